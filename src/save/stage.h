// SPDX-License-Identifier: Apache-2.0
/// Writes the bytes of one file. Private to the save module. With direct I/O, bytes are collected
/// in slots, or written from the caller's memory if it is aligned. Through the page cache, small
/// pieces are collected and large ones are written without being copied.
#ifndef FSTI_STAGE_H
#define FSTI_STAGE_H

#include "chunk_digests.h"
#include "io/io.h"
#include "output/output.h"
#include "save.h"

/// What a stage has done, summed over the files of a save.
typedef struct stage_counts {
    uint64_t bytes_written, bytes_direct, bytes_staged, write_count, stage_bytes;
    const char *engine;
    char reason[128];
} stage_counts;

/// Called with bytes taken. Any status except FST_OK stops the save.
typedef fst_status (*stage_report)(void *context, uint64_t size_bytes, fst_error *error);

typedef struct stage_options {
    fst_save_promise promise;
    fst_save_engine engine;
    uint64_t file_bytes;
    stage_report report;
    void *report_context;
    chunk_digests *digests; ///< receives the bytes as well; or NULL
} stage_options;

typedef struct save_stage save_stage;

fst_status fsti_stage_open(fsti_output *output, const stage_options *options, save_stage **out,
                           fst_error *error);
/// Adds bytes for `offset`, fastest in order. `stable`: `data` stays valid until the stage is
/// drained, so it may be written without a copy.
fst_status fsti_stage_put(save_stage *stage, uint64_t offset, const void *data, uint64_t size_bytes,
                          bool stable, fst_error *error);
/// Whether writes are in flight.
bool fsti_stage_is_busy(const save_stage *stage);
/// Waits for one of them.
fst_status fsti_stage_reap(save_stage *stage, fst_error *error);
/// For bytes that were added in order: the file offset before which all are written or copied, so
/// that their memory may be reused.
uint64_t fsti_stage_settled(const save_stage *stage);
/// Waits until the kernel has every byte.
fst_status fsti_stage_drain(save_stage *stage, fst_error *error);
/// Adds to *counts and closes. Bytes that were not drained are lost. NULL is allowed.
void fsti_stage_close(save_stage *stage, stage_counts *counts);

#endif
