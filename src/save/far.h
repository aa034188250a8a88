// SPDX-License-Identifier: Apache-2.0
/// Bytes that lie on devices, for a file that is written: private to the save room. Blocks come in
/// the order of the file through two slots of locked memory: one is on its way while the other is
/// written. One thread a file.
#ifndef FSTI_SAVE_FAR_H
#define FSTI_SAVE_FAR_H

#include "gpu/gpu.h"
#include "writer.h"

typedef struct save_far {
    const fst_writer *writer;
    uint32_t file_index;
    size_t entry;  ///< of the layout's order: of whose tensor the next block is fetched,
    uint64_t done; ///< and what was fetched of it
    fsti_device *device;
    fsti_ring *ring; ///< NULL until the first block
    char *slots[2];
    uint64_t sizes[2];
    uint64_t fetched_count, taken_count; ///< of blocks; number n is in slot n % 2
} save_far;

bool fsti_far_is(const save_tensor *tensor);
/// The next block in the file's order; it stays until the call after the next one.
fst_status fsti_far_take(save_far *far, const char **data, uint64_t *size_bytes, fst_error *error);
/// Keeps the memory for others.
void fsti_far_close(save_far *far);

#endif
