// SPDX-License-Identifier: Apache-2.0
/// The io_uring engine: many direct reads or writes in flight from one thread. It uses the
/// system calls directly, to avoid shipping liburing. Layout and memory ordering: io_uring(7),
/// io_uring_setup(2), io_uring_enter(2).
///
/// Invariant: the kernel owns the buffer of every submitted operation until its completion is
/// reaped. Callers therefore reap all of them before they close a lane, also a broken one.
#include <errno.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io_private.h"

typedef struct uring_lane {
    int fd;
    void *ring; ///< both rings in one mapping (IORING_FEAT_SINGLE_MMAP)
    size_t ring_bytes;
    struct io_uring_sqe *entries;
    size_t entries_bytes;
    _Atomic unsigned *submit_tail, *complete_head, *complete_tail;
    unsigned *submit_array;
    unsigned submit_mask, complete_mask;
    struct io_uring_cqe *completions;
    unsigned unsubmitted; ///< queued, not yet accepted by the kernel
    unsigned in_flight;   ///< not yet reaped; includes the unsubmitted ones
    /// Consecutive EAGAIN or EBUSY results while the kernel has no operation.
    unsigned repeat_count;
} uring_lane;

static int ring_setup(unsigned depth, struct io_uring_params *params) {
    if (fsti_io_test_disables(FSTI_TEST_NO_URING)) {
        errno = ENOSYS;
        return -1;
    }
    return (int)syscall(SYS_io_uring_setup, depth, params);
}

static int ring_enter(int fd, unsigned submit_count, unsigned wait_count) {
    unsigned flags = wait_count > 0 ? IORING_ENTER_GETEVENTS : 0;
    return (int)syscall(SYS_io_uring_enter, fd, submit_count, wait_count, flags, NULL, 0);
}

/// Set once io_uring has worked. If it is refused later, opening a lane fails, and another engine
/// reads the files.
static atomic_bool has_worked;

/// Whether io_uring works in this process, and the reason if not.
static bool is_available(char *reason, size_t reason_size) {
    struct io_uring_params params;
    if (atomic_load(&has_worked) && !fsti_io_test_disables(FSTI_TEST_NO_URING)) {
        snprintf(reason, reason_size, "io_uring works");
        return true;
    }
    memset(&params, 0, sizeof params);
    int fd = ring_setup(2, &params);
    if (fd < 0) {
        // Seccomp filters of containers and kernel.io_uring_disabled return EPERM.
        snprintf(reason, reason_size, "io_uring_setup: %s%s", strerror(errno),
                 errno == EPERM ? " (container filter or kernel.io_uring_disabled)" : "");
        return false;
    }
    close(fd);
    // Linux 5.6 added this flag and the read and write operations without vectors.
    bool is_supported = (params.features & IORING_FEAT_RW_CUR_POS) != 0;
    snprintf(reason, reason_size, "%s", is_supported ? "io_uring works" : "kernel older than 5.6");
    if (is_supported) atomic_store(&has_worked, true);
    return is_supported;
}

static bool map_rings(uring_lane *lane, const struct io_uring_params *params) {
    size_t submit_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t complete_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    lane->ring_bytes = submit_bytes > complete_bytes ? submit_bytes : complete_bytes;
    lane->entries_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    lane->ring = mmap(NULL, lane->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      lane->fd, IORING_OFF_SQ_RING);
    if (lane->ring == MAP_FAILED) return false;
    lane->entries = mmap(NULL, lane->entries_bytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_POPULATE, lane->fd, IORING_OFF_SQES);
    if ((void *)lane->entries == MAP_FAILED) {
        munmap(lane->ring, lane->ring_bytes);
        return false;
    }
    char *base = lane->ring;
    lane->submit_tail = (void *)(base + params->sq_off.tail);
    lane->submit_array = (void *)(base + params->sq_off.array);
    lane->submit_mask = *(unsigned *)(void *)(base + params->sq_off.ring_mask);
    lane->complete_head = (void *)(base + params->cq_off.head);
    lane->complete_tail = (void *)(base + params->cq_off.tail);
    lane->complete_mask = *(unsigned *)(void *)(base + params->cq_off.ring_mask);
    lane->completions = (void *)(base + params->cq_off.cqes);
    return true;
}

static fst_status open_lane(uint32_t depth, void **out, fst_error *error) {
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    uring_lane *lane = fsti_alloc_zeroed(1, sizeof *lane);
    if (lane == NULL) return fsti_error_memory(error, sizeof *lane);
    lane->fd = ring_setup(depth, &params);
    if (lane->fd < 0 || !map_rings(lane, &params)) {
        atomic_store(&has_worked, false); // the next load asks for the reason
        fst_status status = fsti_error_errno(error, errno, NULL, "io_uring_setup");
        if (lane->fd >= 0) close(lane->fd);
        fsti_free(lane);
        return status;
    }
    *out = lane;
    return FST_OK;
}

static void close_lane(void *lane_pointer) {
    uring_lane *lane = lane_pointer;
    if (lane == NULL) return;
    munmap(lane->entries, lane->entries_bytes);
    munmap(lane->ring, lane->ring_bytes);
    close(lane->fd);
    fsti_free(lane);
}

/// After this many consecutive EAGAIN results while the kernel has no operation, the ring counts as
/// broken.
#define RETRY_COUNT_MAX 100u

/// Submits queued operations and optionally waits for a completion. On EAGAIN or EBUSY the kernel
/// accepts the rest after a completion. Returns an errno if the ring is broken for good.
static int enter_kernel(uring_lane *lane, bool must_wait) {
    int accepted = ring_enter(lane->fd, lane->unsubmitted, must_wait ? 1 : 0);
    if (accepted >= 0) {
        lane->unsubmitted -= (unsigned)accepted;
        lane->repeat_count = 0;
        return 0;
    }
    if (errno == EINTR) return 0;
    if (errno != EAGAIN && errno != EBUSY) return errno;
    bool is_idle = lane->in_flight == lane->unsubmitted;
    // Not EAGAIN, because callers would retry it.
    if (is_idle && ++lane->repeat_count > RETRY_COUNT_MAX) return ENOBUFS;
    if (must_wait) usleep(1000);
    return 0;
}

static void submit_op(void *lane_pointer, fsti_io_op *op) {
    uring_lane *lane = lane_pointer;
    // Relaxed: only this thread writes the tail.
    unsigned tail = atomic_load_explicit(lane->submit_tail, memory_order_relaxed);
    unsigned slot = tail & lane->submit_mask;
    struct io_uring_sqe *entry = &lane->entries[slot];
    memset(entry, 0, sizeof *entry);
    bool is_write = op->is_write;
    entry->opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = is_write ? op->write_fd : fsti_io_file_direct(op->file, NULL, 0);
    entry->addr = (uint64_t)(uintptr_t)op->buffer;
    entry->len = (uint32_t)op->size;
    entry->off = op->offset;
    entry->user_data = (uint64_t)(uintptr_t)op;
    lane->submit_array[slot] = slot;
    // The release store publishes the entry: the kernel loads the tail with acquire.
    atomic_store_explicit(lane->submit_tail, tail + 1, memory_order_release);
    lane->unsubmitted++;
    lane->in_flight++;
    // A save computes digests next, while its write runs. A failure is returned by reap_op().
    if (is_write) (void)enter_kernel(lane, false);
}

/// Removes and fails the last queued operation of a broken ring. The tail may move back, because
/// without a polling thread (IORING_SETUP_SQPOLL) the kernel reads it only during a call.
static fsti_io_op *fail_unsubmitted(uring_lane *lane, int os_errno) {
    unsigned tail = atomic_load_explicit(lane->submit_tail, memory_order_relaxed) - 1;
    fsti_io_op *op = (fsti_io_op *)(uintptr_t)lane->entries[tail & lane->submit_mask].user_data;
    atomic_store_explicit(lane->submit_tail, tail, memory_order_release);
    lane->unsubmitted--;
    lane->in_flight--;
    op->result = -os_errno;
    op->data = op->buffer;
    return op;
}

static fsti_io_op *reap_op(void *lane_pointer) {
    uring_lane *lane = lane_pointer;
    if (lane->in_flight == 0) return NULL;
    unsigned head = atomic_load_explicit(lane->complete_head, memory_order_relaxed);
    for (;;) {
        // Pairs with the kernel's release store, so that the completion is read after it was
        // written.
        unsigned tail = atomic_load_explicit(lane->complete_tail, memory_order_acquire);
        bool is_empty = head == tail;
        if (!is_empty && lane->unsubmitted == 0) break;
        int broken = enter_kernel(lane, is_empty);
        if (broken != 0 && lane->unsubmitted > 0) return fail_unsubmitted(lane, broken);
        // The kernel still owns the memory of submitted operations, so wait for them in any case.
        if (broken != 0 && is_empty) usleep(1000);
        if (!is_empty) break;
    }
    const struct io_uring_cqe *completion = &lane->completions[head & lane->complete_mask];
    fsti_io_op *op = (fsti_io_op *)(uintptr_t)completion->user_data;
    op->result = completion->res;
    op->data = op->buffer;
    // Only now may the kernel overwrite the completion.
    atomic_store_explicit(lane->complete_head, head + 1, memory_order_release);
    lane->in_flight--;
    fsti_io_finish(op);
    return op;
}

static bool uring_usable(fsti_file *file, char *reason, size_t reason_size) {
    if (!is_available(reason, reason_size)) return false;
    return file == NULL || fsti_io_file_direct(file, reason, reason_size) >= 0;
}

const fsti_io_engine fsti_io_engine_uring = {
    .name = "uring",
    .number = FST_ENGINE_URING,
    .is_direct = true,
    .is_async = true,
    .usable = uring_usable,
    .lane_open = open_lane,
    .lane_close = close_lane,
    .submit = submit_op,
    .reap = reap_op,
};
