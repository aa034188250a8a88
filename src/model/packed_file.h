// SPDX-License-Identifier: Apache-2.0
/// Presents a compressed file as its original. Private to the model module.
#ifndef FSTI_MODEL_PACKED_FILE_H
#define FSTI_MODEL_PACKED_FILE_H

#include "open_model.h"

/// If target->header says that the file is compressed, reads its directory and replaces header and
/// file by those of the original, which is decoded while reading. The digests of `target` are of
/// the stored bytes, which are verified. `flags`: FST_OPEN_*; with FST_OPEN_CUT a file that lacks
/// tensors is FST_E_UNSUPPORTED.
fst_status fsti_packed_file_open(const fst_model *model, model_file *target, uint32_t flags,
                                 fst_error *error);

#endif
