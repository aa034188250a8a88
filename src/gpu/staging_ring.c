// SPDX-License-Identifier: Apache-2.0
/// The staging ring of loads to a device: pinned buffers (slots), two alternating streams, and per
/// stream a device buffer for chunks that the kernel scatters. Pinning costs more than loading a
/// small model, so rings are cached for the next load.
#include <sys/mman.h>
#include <unistd.h>

#include "gpu_private.h"

#define SLOT_STRIDE (FSTI_STAGING_SLOT_BYTES + FSTI_STAGING_TABLE_BYTES)
#define RING_BYTES (FSTI_STAGING_SLOT_COUNT_MAX * SLOT_STRIDE)
/// Two streams: one copies while the kernel of the other runs.
#define STREAM_COUNT 2u
/// Maximum number of cached rings per device. More concurrent loads allocate a ring each and free
/// it at their end.
#define IDLE_COUNT_MAX 4u
/// Copying a slot takes about 40 us, as does sleeping until an interrupt. So a thread polls this
/// long before it sleeps.
#define SPIN_NS 60000u

typedef struct ring_slot {
    char *data; ///< NULL until first use
    void *event;
    bool is_pinned;
} ring_slot;

struct fsti_staging_ring {
    fsti_device *device;
    struct fsti_staging_ring *next_idle;
    char *memory;
    ring_slot slots[FSTI_STAGING_SLOT_COUNT_MAX];
    void *streams[STREAM_COUNT];
    uint64_t staging[STREAM_COUNT]; ///< device memory; 0 until a kernel needs it
    atomic_bool has_unpinned;       ///< a slot could not be pinned; read by any thread
    atomic_bool is_broken;          ///< a stream reported an error: do not cache the ring
    pthread_mutex_t
        lock; ///< held while sending, so that a copy and its kernel go to the same stream
};

static struct {
    pthread_mutex_t lock;
    fsti_staging_ring *first;
} idle_rings = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t idle_rings_once = PTHREAD_ONCE_INIT;
static void register_idle_rings(void) { fsti_fork_lock(&idle_rings.lock); }
static atomic_uint_fast64_t pinned_bytes;

uint64_t fsti_staging_pinned_bytes(void) { return atomic_load(&pinned_bytes); }

/// The context must be current and no copy in flight.
static void free_ring(fsti_staging_ring *ring) {
    const fsti_gpu_api *api = ring->device->api;
    for (uint32_t i = 0; i < FSTI_STAGING_SLOT_COUNT_MAX; i++) {
        ring_slot *slot = &ring->slots[i];
        bool is_stuck = slot->is_pinned && !fsti_gpu_unpin_pages(ring->device, slot->data);
        if (slot->is_pinned && !is_stuck) atomic_fetch_sub(&pinned_bytes, SLOT_STRIDE);
        if (ring->memory != NULL && !is_stuck) munmap(ring->memory + i * SLOT_STRIDE, SLOT_STRIDE);
        if (slot->event != NULL) api->event_destroy(slot->event);
    }
    for (uint32_t i = 0; i < STREAM_COUNT; i++) {
        if (ring->staging[i] != 0) api->memory_free(ring->staging[i]);
        if (ring->streams[i] != NULL) api->stream_destroy(ring->streams[i]);
    }
    pthread_mutex_destroy(&ring->lock);
    fsti_free(ring);
}

static fst_status make_streams(fsti_staging_ring *ring, fst_error *error) {
    for (uint32_t i = 0; i < STREAM_COUNT; i++) {
        fsti_gpu_calls calls = {.api = ring->device->api};
        FSTI_GPU_CALL(&calls, stream_create, &ring->streams[i], GPU_STREAM_NON_BLOCKING);
        calls.code = fsti_gpu_made(calls.code, ring->streams[i]); // 0 is the default stream
        FST_TRY(fsti_gpu_error(&calls, "creating a stream", error));
    }
    return FST_OK;
}

/// On machines with several NUMA nodes, a device's bus belongs to one node; memory of other nodes
/// reaches it through a shared link.
static void place_on_node(const fsti_device *device, char *memory) {
    char bus[32] = "";
    const fsti_gpu_api *api = device->api;
    if (api->device_bus == NULL || api->device_bus(bus, sizeof bus, device->ordinal) != 0) return;
    bus[sizeof bus - 1] = '\0';
    fsti_numa_prefer(memory, RING_BYTES, fsti_numa_node_of_bus(bus));
}

static fst_status make_ring(fsti_device *device, fsti_staging_ring **out, fst_error *error) {
    fsti_staging_ring *ring = fsti_alloc_zeroed(1, sizeof *ring);
    if (ring == NULL) return fsti_error_memory(error, sizeof *ring);
    ring->device = device;
    pthread_mutex_init(&ring->lock, NULL);
    ring->memory = fsti_alloc_fails() ? NULL : fsti_pages_map(RING_BYTES);
    fst_status status =
        ring->memory == NULL ? fsti_error_memory(error, RING_BYTES) : make_streams(ring, error);
    if (status != FST_OK) {
        free_ring(ring);
        return status;
    }
    place_on_node(device, ring->memory);
    *out = ring;
    return FST_OK;
}

/// Prefers the ring that was used last on the device, because its slots are pinned.
static fsti_staging_ring *take_idle(const fsti_device *device) {
    fsti_staging_ring *found = NULL;
    pthread_once(&idle_rings_once, register_idle_rings);
    pthread_mutex_lock(&idle_rings.lock);
    for (fsti_staging_ring **link = &idle_rings.first; *link != NULL; link = &(*link)->next_idle) {
        if ((*link)->device != device) continue;
        found = *link;
        *link = found->next_idle;
        break;
    }
    pthread_mutex_unlock(&idle_rings.lock);
    return found;
}

/// Without pinned memory (limits, WSL) copies are slower but correct: the driver then copies the
/// bytes before the call returns.
static bool pin_slot(fsti_staging_ring *ring, uint32_t index) {
    ring_slot *slot = &ring->slots[index];
    slot->is_pinned = fsti_gpu_may_pin() && ring->device->api->host_register(
                                                ring->memory + index * SLOT_STRIDE, SLOT_STRIDE,
                                                GPU_HOST_REGISTER_PORTABLE) == 0;
    if (slot->is_pinned) atomic_fetch_add(&pinned_bytes, SLOT_STRIDE);
    return slot->is_pinned;
}

/// Retries pinning for slots that failed in an earlier load, until one fails again.
static void retry_pinning(fsti_staging_ring *ring) {
    bool all = true;
    for (uint32_t i = 0; i < FSTI_STAGING_SLOT_COUNT_MAX && all; i++)
        if (ring->slots[i].data != NULL && !ring->slots[i].is_pinned) all = pin_slot(ring, i);
    atomic_store(&ring->has_unpinned, !all);
}

fst_status fsti_staging_acquire(fsti_device *device, fsti_staging_ring **out, fst_error *error) {
    *out = take_idle(device);
    if (*out == NULL) return make_ring(device, out, error);
    if (!fsti_staging_is_pinned(*out)) retry_pinning(*out);
    return FST_OK;
}

void fsti_staging_release(fsti_staging_ring *ring) {
    if (ring == NULL) return;
    uint32_t idle_count = 0;
    pthread_mutex_lock(&idle_rings.lock);
    for (const fsti_staging_ring *other = idle_rings.first; other != NULL; other = other->next_idle)
        idle_count += other->device == ring->device;
    if (idle_count < IDLE_COUNT_MAX && !ring->is_broken) {
        ring->next_idle = idle_rings.first;
        idle_rings.first = ring;
        ring = NULL;
    }
    pthread_mutex_unlock(&idle_rings.lock);
    if (ring != NULL) free_ring(ring);
}

static void put_idle(fsti_staging_ring *ring) {
    pthread_mutex_lock(&idle_rings.lock);
    ring->next_idle = idle_rings.first;
    idle_rings.first = ring;
    pthread_mutex_unlock(&idle_rings.lock);
}

uint64_t fsti_staging_trim(void) {
    fsti_device_wait_released();
    pthread_mutex_lock(&idle_rings.lock);
    fsti_staging_ring *ring = idle_rings.first;
    idle_rings.first = NULL;
    pthread_mutex_unlock(&idle_rings.lock);
    uint64_t before = fsti_staging_pinned_bytes();
    while (ring != NULL) {
        fsti_staging_ring *next = ring->next_idle;
        const fsti_device *device = ring->device;
        // A forked child drops the parent's resources without driver calls. A device that can't be
        // entered keeps them: its pages may still be registered.
        if (fsti_device_enter_again(device)) {
            free_ring(ring);
            fsti_device_leave(device);
        } else if (device->api->owner == getpid()) {
            put_idle(ring);
        }
        ring = next;
    }
    return before - fsti_min(before, fsti_staging_pinned_bytes());
}

fst_status fsti_staging_slot(fsti_staging_ring *ring, uint32_t index, char **data,
                             fst_error *error) {
    ring_slot *slot = &ring->slots[index];
    fsti_gpu_calls calls = {.api = ring->device->api};
    *data = slot->data;
    if (slot->data != NULL) return FST_OK;
    if (slot->event == NULL) {
        FSTI_GPU_CALL(&calls, event_create, &slot->event, GPU_EVENT_NO_TIMING | GPU_EVENT_BLOCKING);
        calls.code = fsti_gpu_made(calls.code, slot->event);
        FST_TRY(fsti_gpu_error(&calls, "creating an event", error));
    }
    // The pages are allocated first, so that the driver only has to pin them.
    char *memory = ring->memory + index * SLOT_STRIDE;
    fsti_pages_populate(memory, SLOT_STRIDE);
    if (!pin_slot(ring, index)) atomic_store(&ring->has_unpinned, true);
    slot->data = *data = memory;
    return FST_OK;
}

bool fsti_staging_is_pinned(const fsti_staging_ring *ring) {
    return !atomic_load(&ring->has_unpinned);
}

fst_status fsti_staging_follow(fsti_staging_ring *ring, uintptr_t stream, fst_error *error) {
    const fsti_gpu_api *api = ring->device->api;
    void *event = NULL;
    // HIP's handle of the default stream is 0. The value 1, as in CUDA, was added later.
    if (api->kind == FST_DEVICE_HIP && stream == GPU_STREAM_DEFAULT) stream = 0;
    fsti_gpu_calls calls = {.api = api};
    FSTI_GPU_CALL(&calls, event_create, &event, GPU_EVENT_NO_TIMING);
    calls.code = fsti_gpu_made(calls.code, event);
    FSTI_GPU_CALL(&calls, event_record, event, (void *)stream);
    for (uint32_t i = 0; i < STREAM_COUNT; i++)
        FSTI_GPU_CALL(&calls, stream_wait, ring->streams[i], event, 0);
    if (event != NULL) api->event_destroy(event); // the driver keeps it until it has completed
    return fsti_gpu_error(&calls, "waiting for the caller's stream", error);
}

bool fsti_staging_stage(fsti_staging_ring *ring, uint32_t slot_index) {
    const fsti_gpu_api *api = ring->device->api;
    uint64_t *staging = &ring->staging[slot_index % STREAM_COUNT];
    pthread_mutex_lock(&ring->lock);
    if (*staging == 0) {
        int code = api->memory_alloc(staging, SLOT_STRIDE);
        if (code == GPU_OUT_OF_MEMORY && fsti_device_wait_released())
            code = api->memory_alloc(staging, SLOT_STRIDE);
        if (code != 0) *staging = 0;
        if (*staging % GPU_ALIGNMENT != 0) { // the kernel could not use it
            api->memory_free(*staging);
            *staging = 0;
        }
    }
    bool is_ready = *staging != 0;
    pthread_mutex_unlock(&ring->lock);
    return is_ready;
}

/// Waits for a stream after a driver call failed: the device may still access the slots, so they
/// must not be reused before. The wait itself may also fail once.
static void drain_stream(fsti_staging_ring *ring, void *stream) {
    const fsti_gpu_api *api = ring->device->api;
    if (api->stream_sync(stream) != 0) api->stream_sync(stream);
    atomic_store(&ring->is_broken, true);
}

static void launch_pieces(const fsti_staging_ring *ring, uint32_t stream_index,
                          const fsti_copy_list *list, fsti_gpu_calls *calls) {
    uint64_t chunk = ring->staging[stream_index];
    uint64_t table = chunk + fsti_staging_table(list->chunk_bytes);
    void *arguments[] = {&table, &chunk};
    FSTI_GPU_CALL(calls, launch, ring->device->function, list->piece_count, 1, 1, 256, 1, 1, 0,
                  ring->streams[stream_index], arguments, NULL);
}

/// Copies the slot and its table to device memory and launches the kernel.
static void send_pieces(fsti_staging_ring *ring, uint32_t slot_index, const fsti_copy_list *list,
                        fsti_gpu_calls *calls) {
    const ring_slot *slot = &ring->slots[slot_index];
    uint32_t stream_index = slot_index % STREAM_COUNT;
    void *stream = ring->streams[stream_index];
    uint64_t bytes = fsti_staging_table(list->chunk_bytes) + list->piece_count * sizeof(fsti_piece);
    FSTI_GPU_CALL(calls, copy_in, ring->staging[stream_index], slot->data, bytes, stream);
    launch_pieces(ring, stream_index, list, calls);
}

/// The lock keeps the copies and the kernel of a slot together in their stream. Slots of one stream
/// share its device buffer: the stream runs in order, so a copy into the buffer starts only when
/// the kernel of the slot before has read it.
fst_status fsti_staging_send(fsti_staging_ring *ring, uint32_t slot_index,
                             const fsti_copy_list *list, fst_error *error) {
    const ring_slot *slot = &ring->slots[slot_index];
    fsti_gpu_calls calls = {.api = ring->device->api};
    void *stream = ring->streams[slot_index % STREAM_COUNT];
    pthread_mutex_lock(&ring->lock);
    for (uint32_t i = 0; i < list->copy_count; i++)
        FSTI_GPU_CALL(&calls, copy_in, list->copies[i].target, slot->data + list->copies[i].source,
                      list->copies[i].size, stream);
    if (list->piece_count > 0) send_pieces(ring, slot_index, list, &calls);
    FSTI_GPU_CALL(&calls, event_record, slot->event, stream);
    if (calls.code != 0) drain_stream(ring, stream);
    pthread_mutex_unlock(&ring->lock);
    return fsti_gpu_error(&calls, "copying to the device", error);
}

/// Without the ring's lock, as fsti_staging_fetch(): driver calls are thread-safe, and a single
/// copy has no kernel that must follow it in the stream.
fst_status fsti_staging_copy(fsti_staging_ring *ring, uint32_t slot_index, uint64_t target,
                             const void *source, uint64_t size, fst_error *error) {
    fsti_gpu_calls calls = {.api = ring->device->api};
    void *stream = ring->streams[slot_index % STREAM_COUNT];
    FSTI_GPU_CALL(&calls, copy_in, target, source, size, stream);
    FSTI_GPU_CALL(&calls, stream_sync, stream);
    if (calls.code != 0) drain_stream(ring, stream);
    return fsti_gpu_error(&calls, "copying to the device", error);
}

fst_status fsti_staging_fetch(fsti_staging_ring *ring, uint32_t slot_index, const void *source,
                              uint64_t size, fst_error *error) {
    const ring_slot *slot = &ring->slots[slot_index];
    fsti_gpu_calls calls = {.api = ring->device->api};
    void *stream = ring->streams[slot_index % STREAM_COUNT];
    if (fsti_shared_memory_has(source, size))
        fsti_copy_bytes(slot->data, source, (size_t)size);
    else
        FSTI_GPU_CALL(&calls, copy_out, slot->data, (uint64_t)(uintptr_t)source, size, stream);
    FSTI_GPU_CALL(&calls, event_record, slot->event, stream);
    if (calls.code != 0) drain_stream(ring, stream);
    return fsti_gpu_error(&calls, "copying from the device", error);
}

/// Polls the event until it completes or the time is up.
static int spin_for(const fsti_gpu_api *api, void *event) {
    uint64_t end_ns = fsti_now_ns() + SPIN_NS;
    int code = api->event_query(event);
    while (code == GPU_NOT_READY && fsti_now_ns() < end_ns) {
        code = api->event_query(event);
    }
    return code;
}

fst_status fsti_staging_arrived(fsti_staging_ring *ring, uint32_t slot_index, bool wait,
                                bool *arrived, fst_error *error) {
    const fsti_gpu_api *api = ring->device->api;
    void *event = ring->slots[slot_index].event;
    int code = wait ? spin_for(api, event) : api->event_query(event);
    fsti_gpu_calls calls = {
        .api = api, .code = code, .function = offsetof(fsti_gpu_api, event_query)};
    if (wait && code == GPU_NOT_READY) {
        calls.code = 0;
        FSTI_GPU_CALL(&calls, event_sync, event);
    }
    *arrived = calls.code == 0;
    if (*arrived || (!wait && calls.code == GPU_NOT_READY)) return FST_OK;
    drain_stream(ring, ring->streams[slot_index % STREAM_COUNT]);
    return fsti_gpu_error(&calls, "waiting for a copy on the device", error);
}

void fsti_staging_drain(fsti_staging_ring *ring) {
    for (uint32_t i = 0; i < STREAM_COUNT; i++)
        if (ring->device->api->stream_sync(ring->streams[i]) != 0)
            drain_stream(ring, ring->streams[i]);
}
