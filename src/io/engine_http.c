// SPDX-License-Identifier: Apache-2.0
/// The engine for remote objects: many range requests in flight from one thread.
#include <errno.h>
#include <stdio.h>

#include "io_private.h"

/// A read and its range request.
typedef struct http_read {
    fsti_range_read range; ///< first member: a range pointer is a read pointer
    fsti_io_op *op;
    fst_error error;
    struct http_lane *lane;
    struct http_read *next;
} http_read;

typedef struct http_lane {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    http_read *finished, *unused;
    uint32_t in_flight;
    http_read reads[];
} http_lane;

static fst_status open_lane(uint32_t depth, void **out, fst_error *error) {
    size_t size = sizeof(http_lane) + depth * sizeof(http_read);
    http_lane *lane = fsti_alloc_zeroed(1, size);
    if (lane == NULL) return fsti_error_memory(error, size);
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->changed, NULL);
    for (uint32_t i = 0; i < depth; i++) {
        lane->reads[i].next = lane->unused;
        lane->unused = &lane->reads[i];
    }
    *out = lane;
    return FST_OK;
}

static void close_lane(void *lane_pointer) {
    http_lane *lane = lane_pointer;
    if (lane == NULL) return;
    pthread_cond_destroy(&lane->changed);
    pthread_mutex_destroy(&lane->lock);
    fsti_free(lane);
}

/// Runs on a thread of the http module.
static void finish_read(fsti_range_read *range) {
    http_read *read = range->context;
    http_lane *lane = read->lane;
    pthread_mutex_lock(&lane->lock);
    read->next = lane->finished;
    lane->finished = read;
    pthread_cond_signal(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
}

static void submit_read(void *lane_pointer, fsti_io_op *op) {
    http_lane *lane = lane_pointer;
    http_read *read = lane->unused;
    uint64_t size_bytes = op->file->size_bytes;
    uint64_t left = op->offset < size_bytes ? size_bytes - op->offset : 0;
    lane->unused = read->next;
    lane->in_flight++;
    read->lane = lane;
    read->op = op;
    read->error = (fst_error){.status = FST_OK};
    read->range = (fsti_range_read){.object = op->file->object,
                                    .offset = op->offset,
                                    .size = (size_t)fsti_min(op->size, left),
                                    .buffer = op->buffer,
                                    .stop = op->stop,
                                    .done = finish_read,
                                    .context = read,
                                    .error = &read->error};
    if (op->file->entry != NULL)
        fsti_cache_read_begin(op->file->entry, &read->range);
    else
        fsti_range_read_begin(&read->range);
}

static fsti_io_op *reap_read(void *lane_pointer) {
    http_lane *lane = lane_pointer;
    if (lane->in_flight == 0) return NULL;
    pthread_mutex_lock(&lane->lock);
    while (lane->finished == NULL) pthread_cond_wait(&lane->changed, &lane->lock);
    http_read *read = lane->finished;
    lane->finished = read->next;
    pthread_mutex_unlock(&lane->lock);
    lane->in_flight--;
    read->next = lane->unused;
    lane->unused = read;
    fsti_io_op *op = read->op;
    op->result = read->range.result;
    op->data = op->buffer;
    op->net = read->range.counts;
    if (op->result < 0 && op->error != NULL && op->result != -ECANCELED) *op->error = read->error;
    fsti_io_finish(op);
    return op;
}

static bool http_usable(fsti_file *file, char *reason, size_t reason_size) {
    if (file == NULL) return fsti_http_usable(reason, reason_size);
    bool usable = file->object != NULL;
    snprintf(reason, reason_size, "%s",
             usable ? "a remote object, read by range requests" : "not a remote object");
    return usable;
}

const fsti_io_engine fsti_io_engine_http = {
    .name = "http",
    .number = (fst_engine)FSTI_ENGINE_HTTP,
    .is_async = true,
    .is_network = true,
    .usable = http_usable,
    .lane_open = open_lane,
    .lane_close = close_lane,
    .submit = submit_read,
    .reap = reap_read,
};
