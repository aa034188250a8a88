// SPDX-License-Identifier: Apache-2.0
/// Engines with blocking reads: buffered pread(2), and direct pread(2) and pwrite(2).
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "io_private.h"

/// The lane of a synchronous engine: finished reads that have not been reaped.
typedef struct sync_lane {
    fsti_io_op *finished;
} sync_lane;

fst_status fsti_io_sync_lane_open(uint32_t depth, void **lane, fst_error *error) {
    (void)depth; // one read at a time, so there is no queue
    *lane = fsti_alloc_zeroed(1, sizeof(sync_lane));
    return *lane == NULL ? fsti_error_memory(error, sizeof(sync_lane)) : FST_OK;
}

void fsti_io_sync_lane_close(void *lane) { fsti_free(lane); }

void fsti_io_sync_finish(void *lane_pointer, fsti_io_op *read, int64_t result, const void *data) {
    sync_lane *lane = lane_pointer;
    read->result = result;
    read->data = data;
    read->next = lane->finished;
    lane->finished = read;
    fsti_io_finish(read);
}

fsti_io_op *fsti_io_sync_reap(void *lane_pointer) {
    sync_lane *lane = lane_pointer;
    fsti_io_op *read = lane->finished;
    if (read != NULL) lane->finished = read->next;
    return read;
}

static void read_at_once(void *lane, fsti_io_op *read, int fd) {
    ssize_t result = pread(fd, read->buffer, read->size, (off_t)read->offset);
    fsti_io_sync_finish(lane, read, result < 0 ? -errno : result, read->buffer);
}

static void submit_buffered(void *lane, fsti_io_op *read) {
    fsti_io_file_pread(read);
    fsti_io_sync_finish(lane, read, read->result, read->buffer);
}

static void submit_direct(void *lane, fsti_io_op *op) {
    if (!op->is_write) {
        read_at_once(lane, op, fsti_io_file_direct(op->file, NULL, 0));
        return;
    }
    ssize_t result = pwrite(op->write_fd, op->buffer, op->size, (off_t)op->offset);
    fsti_io_sync_finish(lane, op, result < 0 ? -errno : result, op->buffer);
}

static bool buffered_usable(fsti_file *file, char *reason, size_t reason_size) {
    (void)file; // buffered reads work on every file
    snprintf(reason, reason_size, "always works");
    return true;
}

static bool direct_usable(fsti_file *file, char *reason, size_t reason_size) {
    if (file == NULL) {
        snprintf(reason, reason_size, "depends on the file");
        return true;
    }
    return fsti_io_file_direct(file, reason, reason_size) >= 0;
}

const fsti_io_engine fsti_io_engine_pread = {
    .name = "pread",
    .number = FST_ENGINE_PREAD,
    .usable = buffered_usable,
    .lane_open = fsti_io_sync_lane_open,
    .lane_close = fsti_io_sync_lane_close,
    .submit = submit_buffered,
    .reap = fsti_io_sync_reap,
};

const fsti_io_engine fsti_io_engine_direct = {
    .name = "direct",
    .number = FST_ENGINE_DIRECT,
    .is_direct = true,
    .usable = direct_usable,
    .lane_open = fsti_io_sync_lane_open,
    .lane_close = fsti_io_sync_lane_close,
    .submit = submit_direct,
    .reap = fsti_io_sync_reap,
};
