// SPDX-License-Identifier: Apache-2.0
/// Direct placement or staging slots for io_uring. On a real disk direct placement saves a copy; if
/// the "device" itself copies (virtual disks), slots in the CPU cache may be faster. Both are
/// measured on the first chunks of a device, and the result is kept for the process.
#include <stdio.h>

#include "pipeline.h"

#define DEVICE_COUNT_MAX 16
/// Bytes to measure per method, and chunks in a row with one method meanwhile.
#define MEASURED_BYTES_MIN ((uint64_t)24 << 20)
#define CHUNKS_PER_TURN 4u
/// Slots cost a copy, so they must be faster by this percentage.
#define SLOTS_GAIN_PERCENT 5u

typedef struct device_speed {
    uint64_t device;
    uint64_t bytes[FST_RING_COUNT], ns[FST_RING_COUNT];
    uint32_t chunk_count; ///< chunks that were measured
    fst_ring chosen;      ///< FST_RING_AUTO: still measuring
} device_speed;

static struct {
    pthread_mutex_t lock;
    device_speed devices[DEVICE_COUNT_MAX];
    size_t count;
} known = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t known_once = PTHREAD_ONCE_INIT;
static void register_known(void) { fsti_fork_lock(&known.lock); }

/// The entry of a device, created if there is space. The lock must be held.
static device_speed *find_device(uint64_t device) {
    for (size_t i = 0; i < known.count; i++)
        if (known.devices[i].device == device) return &known.devices[i];
    if (known.count == DEVICE_COUNT_MAX) return NULL;
    known.devices[known.count] = (device_speed){.device = device};
    return &known.devices[known.count++];
}

fst_ring fsti_uring_choose(uint64_t device) {
    pthread_once(&known_once, register_known);
    pthread_mutex_lock(&known.lock);
    device_speed *speed = find_device(device);
    fst_ring method = FST_RING_PLACE;
    if (speed != NULL && speed->chosen != FST_RING_AUTO)
        method = speed->chosen;
    else if (speed != NULL)
        method = speed->chunk_count++ / CHUNKS_PER_TURN % 2 == 0 ? FST_RING_PLACE : FST_RING_SLOTS;
    pthread_mutex_unlock(&known.lock);
    return method;
}

/// Decides once both methods are measured.
static void decide(device_speed *speed) {
    const uint64_t *bytes = speed->bytes, *ns = speed->ns;
    if (bytes[FST_RING_PLACE] < MEASURED_BYTES_MIN || bytes[FST_RING_SLOTS] < MEASURED_BYTES_MIN)
        return;
    double direct_speed = (double)bytes[FST_RING_PLACE] / (double)(ns[FST_RING_PLACE] + 1);
    double slots_speed = (double)bytes[FST_RING_SLOTS] / (double)(ns[FST_RING_SLOTS] + 1);
    bool gain = slots_speed > direct_speed * (100 + SLOTS_GAIN_PERCENT) / 100;
    speed->chosen = gain ? FST_RING_SLOTS : FST_RING_PLACE;
}

void fsti_uring_measured(uint64_t device, fst_ring method, uint64_t bytes, uint64_t ns) {
    pthread_mutex_lock(&known.lock);
    device_speed *speed = find_device(device);
    if (speed != NULL && speed->chosen == FST_RING_AUTO) {
        speed->bytes[method] += bytes;
        speed->ns[method] += ns;
        decide(speed);
    }
    pthread_mutex_unlock(&known.lock);
}

void fsti_uring_explain(uint64_t device, char *text, size_t size) {
    pthread_mutex_lock(&known.lock);
    const device_speed *speed = find_device(device);
    text[0] = '\0';
    if (speed != NULL && speed->chosen != FST_RING_AUTO)
        snprintf(text, size, ", %s measured best (to place %.2f, slots %.2f GB/s)",
                 speed->chosen == FST_RING_PLACE ? "to place" : "slots",
                 (double)speed->bytes[FST_RING_PLACE] / (double)(speed->ns[FST_RING_PLACE] + 1),
                 (double)speed->bytes[FST_RING_SLOTS] / (double)(speed->ns[FST_RING_SLOTS] + 1));
    pthread_mutex_unlock(&known.lock);
}

void fsti_uring_clear_choices(void) {
    pthread_mutex_lock(&known.lock);
    known.count = 0;
    pthread_mutex_unlock(&known.lock);
}
