// SPDX-License-Identifier: Apache-2.0
/// Implements load_fixture.h.
#include <stdlib.h>

#include "fixture.h"
#include "load_fixture.h"

fst_load_options options_of(fst_load_mode mode) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options), .mode = mode};
}

fst_model *open_tensors(void) {
    fst_model *model = NULL;
    if (fst_model_open(fixture_tensors("tensors", COUNT, BYTES), NULL, &model, NULL) != FST_OK)
        abort();
    return model;
}

fst_tensor_view view_of(const fst_tensor *tensor) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) abort();
    return view;
}

int is_tensor(const fst_tensor *tensor, size_t index) {
    fst_tensor_view view = view_of(tensor);
    return view.size_bytes == BYTES && fixture_matches(view.data, index * BYTES, BYTES);
}
