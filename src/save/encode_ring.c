// SPDX-License-Identifier: Apache-2.0
/// The ring: chunk n is in slot n modulo the ring's size. The consumer encodes chunks itself while
/// the next one is not ready.
///
/// Invariant: next_to_encode - next_to_return never exceeds the number of slots, and the slot of
/// the chunk returned last is reused only after the next call.
#include "encode_ring.h"

#include <pthread.h>

#define THREADS_MAX 64u
#define SLOTS_PER_THREAD 4u

typedef struct ring_slot {
    fsti_chunk chunk;
    unsigned char *bytes;
    bool is_done;
} ring_slot;

/// One thread's use of the ring.
typedef struct ring_worker {
    encode_ring *ring;
    fsti_encoder *encoder;
    unsigned char *source;
    pthread_t thread;
} ring_worker;

struct encode_ring {
    const encode_job *job;
    ring_slot *slots;
    unsigned char *bytes;
    uint32_t slot_count, worker_count, thread_count; ///< worker 0 is the consumer
    ring_worker workers[THREADS_MAX + 1];
    size_t encode_item_index; ///< the item of next_to_encode
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t next_to_encode, next_to_return; ///< next chunk to encode, and to return
    bool stop;
    fst_status status;
    fst_error error;
};

static fst_status encode_chunk(const ring_worker *worker, const encode_item *item, uint64_t number,
                               ring_slot *slot, fst_error *error) {
    uint64_t at = (number - item->chunk_first) * ENCODE_CHUNK_BYTES;
    size_t size = (size_t)fsti_min(ENCODE_CHUNK_BYTES, item->size_bytes - at), got;
    fsti_file *file = worker->ring->job->file;
    slot->chunk = (fsti_chunk){.dtype = item->dtype, .true_bytes = size};
    if (atomic_load(&item->is_refused)) return FST_OK;
    FST_TRY(fsti_file_read(file, worker->source, size, item->begin + at, &got, error));
    fsti_error_location location = {.file = fsti_file_path(file),
                                    .byte_offset = item->begin + at + got};
    if (got < size)
        return fsti_error_set(error, FST_E_SHORT_READ, location, "the file ended before its data");
    return fsti_chunk_encode(worker->encoder, worker->source, slot->bytes, &slot->chunk, error);
}

/// Encodes one chunk, if there is one. The lock must be held; it is released meanwhile.
static bool work_once(ring_worker *worker) {
    encode_ring *ring = worker->ring;
    const encode_job *job = ring->job;
    // The chunk that was returned last still occupies its slot.
    uint64_t occupied = ring->next_to_return > 0 ? ring->next_to_return - 1 : 0;
    if (ring->stop || ring->status != FST_OK || ring->next_to_encode == job->chunk_count ||
        ring->next_to_encode - occupied >= ring->slot_count)
        return false;
    uint64_t number = ring->next_to_encode++;
    const encode_item *items = job->items;
    while (ring->encode_item_index + 1 < job->item_count &&
           items[ring->encode_item_index + 1].chunk_first <= number)
        ring->encode_item_index++;
    const encode_item *item = &items[ring->encode_item_index];
    ring_slot *slot = &ring->slots[number % ring->slot_count];
    pthread_mutex_unlock(&ring->lock);
    fst_error error;
    fst_status status = encode_chunk(worker, item, number, slot, &error);
    pthread_mutex_lock(&ring->lock);
    slot->is_done = true;
    if (status != FST_OK && ring->status == FST_OK) {
        ring->status = status;
        ring->error = error;
    }
    pthread_cond_broadcast(&ring->changed);
    return true;
}

static void *run_worker(void *context) {
    ring_worker *worker = context;
    encode_ring *ring = worker->ring;
    pthread_mutex_lock(&ring->lock);
    while (!ring->stop && ring->status == FST_OK && ring->next_to_encode < ring->job->chunk_count)
        if (!work_once(worker)) pthread_cond_wait(&ring->changed, &ring->lock);
    pthread_mutex_unlock(&ring->lock);
    return NULL;
}

static fst_status open_worker(encode_ring *ring, fst_error *error) {
    ring_worker *worker = &ring->workers[ring->worker_count++];
    worker->ring = ring;
    worker->source = fsti_alloc((size_t)ENCODE_CHUNK_BYTES);
    if (worker->source == NULL) return fsti_error_memory(error, ENCODE_CHUNK_BYTES);
    return fsti_encoder_open(&worker->encoder, error);
}

static fst_status open_slots(encode_ring *ring, fst_error *error) {
    uint64_t size = ring->slot_count * ENCODE_CHUNK_BYTES;
    ring->slots = fsti_alloc_zeroed(ring->slot_count, sizeof *ring->slots);
    ring->bytes = fsti_alloc((size_t)size);
    if (ring->slots == NULL || ring->bytes == NULL) return fsti_error_memory(error, size);
    for (uint32_t i = 0; i < ring->slot_count; i++)
        ring->slots[i].bytes = ring->bytes + i * ENCODE_CHUNK_BYTES;
    return FST_OK;
}

fst_status fsti_encode_open(const encode_job *job, encode_ring **out, fst_error *error) {
    encode_ring *ring = fsti_alloc_zeroed(1, sizeof *ring);
    if (ring == NULL) return fsti_error_memory(error, sizeof *ring);
    uint32_t wanted =
        (uint32_t)fsti_min(fsti_min(job->thread_count, THREADS_MAX), fsti_max(job->chunk_count, 1));
    ring->job = job;
    ring->slot_count = (wanted + 1) * SLOTS_PER_THREAD;
    pthread_mutex_init(&ring->lock, NULL);
    pthread_cond_init(&ring->changed, NULL);
    fst_status status = open_slots(ring, error);
    if (status == FST_OK) status = open_worker(ring, error);
    // Threads that cannot be started, or get no memory, are not needed.
    while (status == FST_OK && ring->thread_count + 1 < wanted) {
        if (open_worker(ring, NULL) != FST_OK) break;
        ring_worker *worker = &ring->workers[ring->worker_count - 1];
        if (fsti_thread_start(&worker->thread, run_worker, worker) != 0) break;
        ring->thread_count++;
    }
    if (status != FST_OK) {
        fsti_encode_close(ring);
        return status;
    }
    *out = ring;
    return FST_OK;
}

fst_status fsti_encode_next(encode_ring *ring, const fsti_chunk **out, fst_error *error) {
    pthread_mutex_lock(&ring->lock);
    // The previous chunk has been used, so its slot is free.
    if (ring->next_to_return > 0) pthread_cond_broadcast(&ring->changed);
    ring_slot *slot = &ring->slots[ring->next_to_return % ring->slot_count];
    while (!slot->is_done && ring->status == FST_OK)
        if (!work_once(&ring->workers[0])) pthread_cond_wait(&ring->changed, &ring->lock);
    fst_status status = ring->status;
    if (status != FST_OK && error != NULL) *error = ring->error;
    slot->is_done = false;
    ring->next_to_return++;
    pthread_mutex_unlock(&ring->lock);
    *out = &slot->chunk;
    return status;
}

void fsti_encode_close(encode_ring *ring) {
    if (ring == NULL) return;
    pthread_mutex_lock(&ring->lock);
    ring->stop = true;
    pthread_cond_broadcast(&ring->changed);
    pthread_mutex_unlock(&ring->lock);
    for (uint32_t i = 0; i < ring->thread_count; i++)
        pthread_join(ring->workers[i + 1].thread, NULL);
    for (uint32_t i = 0; i < ring->worker_count; i++) {
        fsti_encoder_close(ring->workers[i].encoder);
        fsti_free(ring->workers[i].source);
    }
    pthread_cond_destroy(&ring->changed);
    pthread_mutex_destroy(&ring->lock);
    fsti_free(ring->slots);
    fsti_free(ring->bytes);
    fsti_free(ring);
}
