// SPDX-License-Identifier: Apache-2.0
/// The offset of every byte of a file. Private to the save module.
#ifndef FSTI_LAYOUT_H
#define FSTI_LAYOUT_H

#include "format/format.h"
#include "save.h"

struct fst_layout {
    fsti_header_entry *entries; ///< the caller's tensors in the given order, then padding tensors
    uint32_t *order;            ///< entries in file order
    size_t tensor_count, entry_count;
    char *header;
    size_t header_bytes;
    uint64_t file_bytes;
    char *names; ///< names of padding tensors
    uint64_t *shapes;
};

/// Makes the layout of one file. Names and shapes are not copied.
fst_status fsti_layout_make(const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_layout *out, fst_error *error);
void fsti_layout_clear(fst_layout *layout);
/// Extends the header so that the data section starts at `data_begin` modulo `modulus`. Unchanged
/// if readers would refuse the longer header.
fst_status fsti_layout_shift(fst_layout *layout, uint64_t data_begin, uint64_t modulus,
                             fst_error *error);

#endif
