// SPDX-License-Identifier: Apache-2.0
/// Filling a segment: memory for batches, claims of chunks, and the marks of finished ones.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "share_private.h"

/// A claim counts as stalled if no process finished a chunk of the segment in this time: its owner
/// is probably stopped. A slow server needs less for a chunk.
#define STALL_NS ((uint64_t)30 * 1000000000)
static atomic_ullong stall_ns = STALL_NS;

void fsti_share_stall_time(uint64_t new_stall_ns) {
    atomic_store(&stall_ns, new_stall_ns == 0 ? STALL_NS : new_stall_ns);
}

bool fsti_share_is_reserved(const fsti_share *share, uint32_t batch) {
    return atomic_load_explicit(share_batch_state(share, batch), memory_order_acquire) == 1;
}

/// Without a reservation, a store to a page would end the process by SIGBUS when the file system is
/// full. Two processes may reserve the same batch; the second one finds the pages there.
bool fsti_share_reserve(fsti_share *share, uint32_t batch) {
    uint64_t begin = share->batch_at[batch], end = share->batch_at[batch + 1];
    if (fsti_share_is_reserved(share, batch)) return true;
    int failed;
    do failed = begin < end ? fallocate(share->data_fd, 0, (off_t)begin, (off_t)(end - begin)) : 0;
    while (failed != 0 && errno == EINTR);
    if (failed != 0) return false;
    atomic_store_explicit(share_batch_state(share, batch), 1, memory_order_release);
    return true;
}

static uint64_t data_bytes(const fsti_share *share) {
    return share->file_bytes - share->batch_at[0];
}

char *fsti_share_map_shared(fsti_share *share, uint32_t batch) {
    pthread_mutex_lock(&share->lock);
    if (share->shared == NULL) {
        void *data = mmap(NULL, data_bytes(share), PROT_READ | PROT_WRITE, MAP_SHARED,
                          share->data_fd, (off_t)share->batch_at[0]);
        share->shared = data == MAP_FAILED ? NULL : data;
    }
    char *data = share->shared;
    pthread_mutex_unlock(&share->lock);
    return data == NULL ? NULL : data + (share->batch_at[batch] - share->batch_at[0]);
}

char *fsti_share_map_private(const fsti_share *share, uint32_t batch, bool is_writable) {
    uint64_t begin = share->batch_at[batch], end = share->batch_at[batch + 1];
    void *data = mmap(NULL, end - begin, is_writable ? PROT_READ | PROT_WRITE : PROT_READ,
                      MAP_PRIVATE | MAP_NORESERVE, share->data_fd, (off_t)begin);
    return data == MAP_FAILED ? NULL : data;
}

void fsti_share_end_writes(fsti_share *share) {
    pthread_mutex_lock(&share->lock);
    if (share->shared != NULL) munmap(share->shared, data_bytes(share));
    share->shared = NULL;
    pthread_mutex_unlock(&share->lock);
    (void)fsti_share_set_lock(share->lock_fd, F_UNLCK, SHARE_CLAIMS_AT, share->chunk_count);
}

bool fsti_share_is_done(const fsti_share *share, uint32_t chunk) {
    return atomic_load_explicit(share_chunk_state(share, chunk), memory_order_acquire) == 1;
}

bool fsti_share_is_complete(const fsti_share *share) {
    for (uint32_t i = 0; i < share->chunk_count; i++)
        if (!fsti_share_is_done(share, i)) return false;
    return true;
}

/// Whether nothing was finished for the time after which claims do not count.
static bool is_stalled(fsti_share *share) {
    uint64_t progress = atomic_load(&share->control->progress), now_ns = fsti_now_ns();
    pthread_mutex_lock(&share->lock);
    if (progress != share->seen_progress) {
        share->seen_progress = progress;
        share->seen_ns = now_ns;
    }
    bool is_stalled = now_ns - share->seen_ns >= atomic_load(&stall_ns);
    pthread_mutex_unlock(&share->lock);
    return is_stalled;
}

fsti_share_step fsti_share_claim(fsti_share *share, uint32_t chunk) {
    if (fsti_share_is_done(share, chunk)) return FSTI_SHARE_DONE;
    // Only the owner of the lock ever writes the chunk, also when it is stalled. A stopped process
    // may continue at any time, in the middle of a read into the segment, and no check before a
    // write can exclude that. A second writer would mark the chunk as done, and the late owner
    // would then change bytes that others have accepted. If locks fail, no process writes.
    if (!fsti_share_set_lock(share->lock_fd, F_WRLCK, SHARE_CLAIMS_AT + chunk, 1)) {
        bool is_taken = errno == EAGAIN || errno == EACCES;
        return is_taken && !is_stalled(share) ? FSTI_SHARE_TAKEN : FSTI_SHARE_STALLED;
    }
    // Another owner may have finished it just before.
    if (!fsti_share_is_done(share, chunk)) return FSTI_SHARE_CLAIMED;
    (void)fsti_share_set_lock(share->lock_fd, F_UNLCK, SHARE_CLAIMS_AT + chunk, 1);
    return FSTI_SHARE_DONE;
}

void fsti_share_finish(fsti_share *share, uint32_t chunk) {
    // The release store publishes the chunk's bytes to the processes that see it.
    atomic_store_explicit(share_chunk_state(share, chunk), 1, memory_order_release);
    atomic_fetch_add(&share->control->progress, 1);
    (void)fsti_share_set_lock(share->lock_fd, F_UNLCK, SHARE_CLAIMS_AT + chunk, 1);
}
