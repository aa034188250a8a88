// SPDX-License-Identifier: Apache-2.0
/// What of a request can't be verified in the pass that loads is refused with the way that can.
#include "load.h"

static fst_status refuse(const char *what, const char *instead, fst_error *error) {
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NOWHERE,
                          "%s can't be verified as it is loaded: %s", what, instead);
}

/// A converted element that lies across a digest's border would come in part from bytes that were
/// read, and digested, at another time. Borders are powers of two: aligned elements never do.
static fst_status check_conversion(const fst_loader *loader, const fsti_plan_want *want,
                                   fst_error *error) {
    const fsti_header *header = loader->headers[want->file];
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    if (want->dtype == (fst_dtype)tensor->dtype) return FST_OK;
    uint32_t alignment = fsti_dtype_alignment((fst_dtype)tensor->dtype);
    if ((header->data_begin + tensor->begin) % alignment == 0) return FST_OK;
    fsti_error_place place = FSTI_NOWHERE;
    place.tensor = fsti_header_name(header, tensor);
    place.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_UNSUPPORTED, place,
                          "a tensor that is not aligned in its file can't be converted while it "
                          "is verified: load it as it is, and convert then");
}

fst_status fsti_loader_check_verified(const fst_loader *loader, fst_error *error) {
    const fst_load_options *options = &loader->options;
    if (options->engine == FST_ENGINE_MMAP)
        return refuse("what is copied from a mapping", "use another engine", error);
    if (options->gds == FST_GDS_STRICT)
        return refuse("what goes straight to a GPU (gds)", "leave gds to auto", error);
    for (size_t i = 0; i < loader->plan.item_count; i++)
        FST_TRY(check_conversion(loader, &loader->wants[i], error));
    return FST_OK;
}
