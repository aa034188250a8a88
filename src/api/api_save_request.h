// SPDX-License-Identifier: Apache-2.0
/// The arguments of a save as the save module takes them: sizes known, structs of this version.
#ifndef FSTI_API_SAVE_REQUEST_H
#define FSTI_API_SAVE_REQUEST_H

#include "fastsafetensors/writer.h"

typedef struct api_save_request {
    fst_save_options options;
    fst_save_tensor *tensors;
    fst_metadata_entry *metadata;
} api_save_request;

/// Checks and copies; `out` is zeroed before, and is to be cleared, also after an error.
fst_status fsti_api_save_request_read(const fst_save_options *options,
                                      const fst_save_tensor *tensors, size_t tensor_count,
                                      api_save_request *out, fst_error *error);
void fsti_api_save_request_clear(api_save_request *request);

#endif
