// SPDX-License-Identifier: Apache-2.0
/// Threads that read files in pieces, each with a buffer that fits in its CPU cache.
#include "scan.h"

#include <errno.h>

/// Piece size: large enough for the kernel to recognise sequential reads.
#define PIECE_BYTES ((uint64_t)8 << 20)
#define THREADS_MIN 4u
#define THREADS_MAX 64u

typedef struct scan_piece {
    size_t file;
    uint64_t begin, end;
} scan_piece;

static void fail_scan(fsti_scan *scan, fst_status status, const fst_error *error) {
    pthread_mutex_lock(&scan->lock);
    if (scan->status == FST_OK) {
        scan->status = status;
        scan->error = *error;
    }
    pthread_mutex_unlock(&scan->lock);
}

/// Takes the next piece. False at the end, or if the scan has failed.
static bool take_piece(fsti_scan *scan, scan_piece *out) {
    pthread_mutex_lock(&scan->lock);
    const scan_file *file = NULL;
    for (; scan->next_file < scan->file_count; scan->next_file++, scan->next_begin = 0) {
        file = &scan->files[scan->next_file];
        if (file->file != NULL && scan->next_begin < fsti_file_size(file->file)) break;
    }
    bool any = scan->status == FST_OK && scan->next_file < scan->file_count;
    if (any) {
        uint64_t begin = scan->next_begin, size = fsti_file_size(file->file);
        scan->next_begin = fsti_min(begin + PIECE_BYTES, size);
        *out = (scan_piece){scan->next_file, begin, scan->next_begin};
    }
    pthread_mutex_unlock(&scan->lock);
    return any;
}

/// Reads [begin, end) of a file completely.
static fst_status read_bytes(fsti_file *file, char *buffer, uint64_t begin, uint64_t end,
                             fst_error *error) {
    void *lane;
    uint32_t tries = 0;
    fst_status status = FST_OK;
    FST_TRY(fsti_io_engine_pread.lane_open(1, &lane, error));
    while (begin < end && status == FST_OK) {
        fsti_io_op op = {
            .file = file, .offset = begin, .size = (size_t)(end - begin), .buffer = buffer};
        fsti_io_engine_pread.submit(lane, &op);
        fsti_io_engine_pread.reap(lane);
        if (fsti_io_should_retry(op.result, &tries)) continue;
        fsti_error_location location = {.file = fsti_file_path(file), .byte_offset = begin};
        if (op.result < 0) {
            location.os_errno = (int)-op.result;
            status = fsti_error_set(error, FST_E_IO, location, "reading");
        } else if (op.result == 0) {
            status = fsti_error_set(error, FST_E_SHORT_READ, location,
                                    "the file became shorter while it was read");
        } else {
            tries = 0;
            begin += (uint64_t)op.result;
            buffer += op.result;
        }
    }
    fsti_io_engine_pread.lane_close(lane);
    return status;
}

static fst_status scan_bytes(fsti_scan *scan, const scan_piece *piece, char *buffer,
                             fst_error *error) {
    fsti_file *file = scan->files[piece->file].file;
    for (uint64_t begin = piece->begin; begin < piece->end; begin += scan->chunk_bytes) {
        uint64_t end = fsti_min(begin + scan->chunk_bytes, piece->end);
        FST_TRY(read_bytes(file, buffer, begin, end, error));
        atomic_fetch_add(&scan->bytes_read, end - begin);
        FST_TRY(scan->take(scan, piece->file, begin, buffer, (size_t)(end - begin), error));
        FST_TRY(fsti_work_add(scan->progress, end - begin, error));
    }
    return fsti_file_check(file, error);
}

static void *run_scan(void *context) {
    fsti_scan *scan = context;
    scan_piece piece;
    fst_error error;
    char *buffer = fsti_alloc(scan->chunk_bytes);
    fst_status status = buffer == NULL ? fsti_error_memory(&error, scan->chunk_bytes) : FST_OK;
    while (status == FST_OK && take_piece(scan, &piece))
        status = scan_bytes(scan, &piece, buffer, &error);
    if (status != FST_OK) fail_scan(scan, status, &error);
    fsti_free(buffer);
    return NULL;
}

fst_status fsti_scan_run(fsti_scan *scan, fst_error *error) {
    pthread_t threads[THREADS_MAX];
    uint32_t wanted = scan->thread_count, started = 0;
    if (wanted == 0) wanted = (uint32_t)fsti_max(fsti_cpu_count(), THREADS_MIN);
    wanted = (uint32_t)fsti_min(wanted, THREADS_MAX);
    pthread_mutex_init(&scan->lock, NULL);
    // The calling thread alone can do all the work.
    while (started + 1 < wanted && fsti_thread_start(&threads[started], run_scan, scan) == 0)
        started++;
    run_scan(scan);
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&scan->lock);
    if (scan->status != FST_OK && error != NULL) *error = scan->error;
    return scan->status;
}
