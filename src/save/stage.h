// SPDX-License-Identifier: Apache-2.0
/// The way of bytes into one file: private to the save room. Past the page cache, blocks are
/// gathered in slots, or written from where they are when address and place agree; through it,
/// small pieces are gathered and large ones written as they are.
#ifndef FSTI_STAGE_H
#define FSTI_STAGE_H

#include "chunk_digests.h"
#include "io/io.h"
#include "output/output.h"
#include "save.h"

/// What a stage has done; summed over the files of a save.
typedef struct stage_counts {
    uint64_t bytes_written, bytes_direct, bytes_staged, write_count, stage_bytes;
    const char *engine;
    char reason[128];
} stage_counts;

/// Told of bytes that were taken; anything but FST_OK stops the save.
typedef fst_status (*stage_report)(void *context, uint64_t size_bytes, fst_error *error);

typedef struct stage_options {
    fst_save_promise promise;
    fst_save_engine engine;
    uint64_t file_bytes;
    stage_report report;
    void *report_context;
    chunk_digests *digests; ///< that the bytes are put to as well, or NULL
} stage_options;

typedef struct save_stage save_stage;

fst_status fsti_stage_open(fsti_output *output, const stage_options *options, save_stage **out,
                           fst_error *error);
/// Takes bytes for `offset`; in order it is fastest. `stable`: `data` stays until the stage is
/// drained, so that it may be written from where it is.
fst_status fsti_stage_put(save_stage *stage, uint64_t offset, const void *data, uint64_t size_bytes,
                          bool stable, fst_error *error);
/// Waits until every byte taken is with the kernel.
fst_status fsti_stage_drain(save_stage *stage, fst_error *error);
/// Adds what was done to *counts and closes; bytes that were not drained are lost. NULL is allowed.
void fsti_stage_close(save_stage *stage, stage_counts *counts);

#endif
