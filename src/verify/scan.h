// SPDX-License-Identifier: Apache-2.0
/// Reads files completely with several threads, chunk by chunk. Private to the verify module.
#ifndef FSTI_SCAN_H
#define FSTI_SCAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "digest/digest.h"
#include "io/io.h"
#include "work_progress.h"

typedef struct fsti_scan fsti_scan;

/// A file to read. Its chunks arrive in any order, from several threads.
typedef struct scan_file {
    fsti_file *file; ///< NULL: skipped
} scan_file;

struct fsti_scan {
    const scan_file *files;
    size_t file_count;
    uint32_t chunk_bytes, thread_count;
    /// Called with each chunk of files[file_index], from any thread. A failure ends the scan.
    fst_status (*take)(fsti_scan *scan, size_t file_index, uint64_t begin, const char *bytes,
                       size_t size_bytes, fst_error *error);
    void *context;
    work_progress *progress;
    atomic_uint_fast64_t bytes_read;
    // Private to the scan:
    pthread_mutex_t lock;
    size_t next_file;
    uint64_t next_begin;
    fst_status status;
    fst_error error;
};

/// Limit of open files: a folder may have more files than a process may open.
#define FSTI_SCAN_FILES_MAX ((size_t)64)

/// Reads all files. Each is checked after its last byte: FST_E_FILE_CHANGED.
fst_status fsti_scan_run(fsti_scan *scan, fst_error *error);

#endif
