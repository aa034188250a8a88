// SPDX-License-Identifier: Apache-2.0
/// A model of COUNT tensors of BYTES bytes each, for tests of loads.
#ifndef LOAD_FIXTURE_H
#define LOAD_FIXTURE_H

#include <fastsafetensors.h>

#define COUNT 32
#define BYTES ((uint64_t)500000)

/// Default options with a mode.
fst_load_options options_of(fst_load_mode mode);
/// Writes the model "tensors" and opens it. Aborts if that fails.
fst_model *open_tensors(void);
/// The view of a tensor. Aborts if that fails.
fst_tensor_view view_of(const fst_tensor *tensor);
/// Whether a tensor has the bytes of tensor `index` of the model.
int is_tensor(const fst_tensor *tensor, size_t index);

#endif
