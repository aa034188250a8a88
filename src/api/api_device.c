// SPDX-License-Identifier: Apache-2.0
/// The public functions of device.h.
#include <string.h>

#include "api_check.h"
#include "gpu/gpu.h"
#include "fastsafetensors.h"

fst_status fst_device_parse(const char *text, fst_device *out, fst_error *error) {
    API_REQUIRE(text != NULL && out != NULL, error, "text or out is NULL");
    return fsti_device_parse(text, out, error);
}

int32_t fst_device_count(fst_device_kind kind) {
    return (unsigned)kind < FST_DEVICE_KIND_COUNT ? fsti_device_count(kind) : 0;
}

fst_status fst_device_info_get(fst_device device, fst_device_info *out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    API_REQUIRE(out->struct_size >= sizeof(size_t), error, "struct_size is not set");
    FST_TRY(fsti_api_check_device(device, error));
    fst_device_info full = {.struct_size = sizeof full};
    FST_TRY(fsti_device_info(device, &full, error));
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}
