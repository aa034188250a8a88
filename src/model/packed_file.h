// SPDX-License-Identifier: Apache-2.0
/// A compressed file as the file that it was made from: private to the model room.
#ifndef FSTI_MODEL_PACKED_FILE_H
#define FSTI_MODEL_PACKED_FILE_H

#include "model.h"

/// Where target->header says that its file is a compressed one: reads its directory, and puts the
/// original's header and a file of the original's bytes in their place. Those are decoded by who
/// reads them. Digests of target are of the compressed file's bytes: they are held against these.
/// `flags`: FST_OPEN_*; with FST_OPEN_CUT a file that lacks tensors is FST_E_UNSUPPORTED.
fst_status fsti_packed_file_open(const fst_model *model, model_file *target, uint32_t flags,
                                 fst_error *error);

#endif
