// SPDX-License-Identifier: Apache-2.0
/// The engine that returns pages of a mapping, for cached chunks. Copying from a mapping is faster
/// than pread(2), because the kernel's copy does not use non-temporal stores.
#include <errno.h>
#include <stdio.h>

#include "io_private.h"

static void submit_mapped(void *lane, fsti_io_op *read) {
    const char *mapping = fsti_io_file_mapping(read->file);
    fsti_io_sync_finish(lane, read, mapping == NULL ? -ENOMEM : (int64_t)read->size,
                        mapping == NULL ? NULL : mapping + read->offset);
}

static bool mapping_usable(fsti_file *file, char *reason, size_t reason_size) {
    bool usable = file == NULL || fsti_io_file_mapping(file) != NULL;
    snprintf(reason, reason_size, "%s",
             usable                          ? "files can be mapped"
             : file->derivation.read != NULL ? file->derivation.what
                                             : "the file can't be mapped");
    return usable;
}

const fsti_io_engine fsti_io_engine_mmap = {
    .name = "mmap",
    .number = FST_ENGINE_MMAP,
    .is_mapped = true,
    .usable = mapping_usable,
    .lane_open = fsti_io_sync_lane_open,
    .lane_close = fsti_io_sync_lane_close,
    .submit = submit_mapped,
    .reap = fsti_io_sync_reap,
};
