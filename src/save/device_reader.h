// SPDX-License-Identifier: Apache-2.0
/// Reads tensors from devices for a file that is written. Private to the save module. Blocks arrive
/// in file order through two pinned slots: one is copied while the other is written. One thread per
/// file.
#ifndef FSTI_DEVICE_READER_H
#define FSTI_DEVICE_READER_H

#include "gpu/gpu.h"
#include "save_state.h"

typedef struct device_reader {
    const fst_writer *writer;
    uint32_t file_index;
    size_t entry;  ///< position in the layout's order: the tensor of the next block,
    uint64_t done; ///< and how much of it was copied
    fsti_device *device;
    fsti_staging_ring *ring; ///< NULL until the first block
    char *slots[2];
    uint64_t sizes[2];
    uint64_t fetched_count, taken_count; ///< block numbers; block n is in slot n % 2
} device_reader;

bool fsti_save_is_on_device(const save_tensor *tensor);
/// Returns the next block in file order. It stays valid until the call after the next.
fst_status fsti_device_reader_next(device_reader *reader, const char **data, uint64_t *size_bytes,
                                   fst_error *error);
/// Caches the ring for other saves.
void fsti_device_reader_close(device_reader *reader);

#endif
