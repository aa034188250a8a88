// SPDX-License-Identifier: Apache-2.0
/// The place of every byte of a file: private to the save room.
#ifndef FSTI_LAYOUT_H
#define FSTI_LAYOUT_H

#include "format/format.h"
#include "save.h"

struct fst_layout {
    fsti_header_entry *entries; ///< the caller's tensors as given, then filling ones
    uint32_t *order;            ///< entries in file order
    size_t tensor_count, entry_count;
    char *header;
    size_t header_bytes;
    uint64_t file_bytes;
    char *names; ///< of the filling tensors
    uint64_t *shapes;
};

/// Lays out tensors of one file, in memory of the layout's own but for names and shapes.
fst_status fsti_layout_make(const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_layout *out, fst_error *error);
void fsti_layout_clear(fst_layout *layout);
/// Makes the header longer, so that the data section begins at `data_begin` modulo `modulus`.
/// Left as it is where readers would not take the longer one.
fst_status fsti_layout_shift(fst_layout *layout, uint64_t data_begin, uint64_t modulus,
                             fst_error *error);

/// Bytes of a tensor by shape and dtype; FST_E_ARGUMENT names one that has none.
fst_status fsti_layout_tensor_bytes(const fst_save_tensor *tensor, uint64_t *size_bytes,
                                    fst_error *error);

#endif
