// SPDX-License-Identifier: Apache-2.0
/// Refuses requests that cannot be verified while loading, and names an alternative.
#include "load.h"

static fst_status refuse(const char *feature, const char *alternative, fst_error *error) {
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "%s can't be verified during the load: %s", feature, alternative);
}

/// A converted element across a piece boundary would combine bytes that were verified at different
/// times. Boundaries are powers of two, so aligned elements never cross them.
static fst_status check_conversion(const fst_loader *loader, const fsti_plan_want *want,
                                   fst_error *error) {
    const fsti_header *header = loader->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    if (want->dtype == (fst_dtype)tensor->dtype) return FST_OK;
    uint32_t alignment = fsti_dtype_alignment((fst_dtype)tensor->dtype);
    if ((header->data_begin + tensor->begin) % alignment == 0) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = fsti_header_name(header, tensor);
    location.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                          "a tensor that is unaligned in its file can't be converted and "
                          "verified in one load. Load it unconverted, then convert it");
}

fst_status fsti_loader_check_verified(const fst_loader *loader, fst_error *error) {
    const fst_load_tuning *tuning = &loader->tuning;
    if (tuning->engine == FST_ENGINE_MMAP)
        return refuse("a load with the mmap engine", "use another engine", error);
    if (tuning->gds == FST_GDS_STRICT)
        return refuse("GPUDirect Storage (gds=strict)", "set gds to auto", error);
    for (size_t i = 0; i < loader->plan.item_count; i++)
        FST_TRY(check_conversion(loader, &loader->wants[i], error));
    return FST_OK;
}
