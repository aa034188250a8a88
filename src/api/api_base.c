// SPDX-License-Identifier: Apache-2.0
/// The public functions of base.h, dtype.h and version.h.
#include <string.h>

#include "api_check.h"
#include "gpu/gpu.h"
#include "dtype/dtype_info.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)

const char *fst_version(void) {
    return TEXT(FST_VERSION_MAJOR) "." TEXT(FST_VERSION_MINOR) "." TEXT(FST_VERSION_PATCH);
}

uint32_t fst_version_number(void) { return FST_VERSION_NUMBER; }

const char *fst_status_name(fst_status status) { return fsti_status_name(status); }

const char *fst_status_meaning(fst_status status) { return fsti_status_meaning(status); }

const char *fst_dtype_name(fst_dtype dtype) { return fsti_dtype_name(dtype); }

uint32_t fst_dtype_bits(fst_dtype dtype) { return fsti_dtype_bits(dtype); }

fst_status fst_dtype_from_name(const char *name, size_t name_size, fst_dtype *out,
                               fst_error *error) {
    API_REQUIRE(name != NULL && out != NULL, error, "name or out is NULL");
    if (name_size == SIZE_MAX) name_size = strlen(name);
    *out = fsti_dtype_find(name, name_size);
    if (*out != FSTI_DTYPE_NONE) return FST_OK;
    char known[256];
    fsti_dtype_list(known, sizeof known);
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "unknown dtype '%.*s'; expected one of: %s", (int)fsti_min(name_size, 64),
                          name, known);
}

int fst_dtype_convertible(fst_dtype from, fst_dtype to) {
    if (fsti_dtype_bits(from) == 0 || fsti_dtype_bits(to) == 0) return 0;
    return from == to || fsti_dtype_convertible(from, to);
}

fst_status fst_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape, uint32_t rank,
                                  uint64_t *size_bytes, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(size_bytes != NULL && (shape != NULL || rank == 0), error,
                "shape or size_bytes is NULL");
    API_REQUIRE(fsti_dtype_bits(dtype) != 0, error,
                "unknown dtype %d; expected a value of fst_dtype", (int)dtype);
    fst_status status = fsti_dtype_tensor_bytes(dtype, shape, rank, size_bytes);
    if (status == FST_OK) return FST_OK;
    return fsti_error_set(error, status, FSTI_NO_LOCATION, "%s", fsti_status_meaning(status));
}

size_t fst_text_step(const char *text, size_t text_size, uint32_t *code, int *columns) {
    uint32_t own_code;
    int own_columns;
    if (code == NULL) code = &own_code;
    if (columns == NULL) columns = &own_columns;
    *code = FST_TEXT_INVALID;
    *columns = -1;
    return text == NULL || text_size == 0 ? 0 : fsti_text_step(text, text_size, code, columns);
}

int fst_size_parse(const char *text, uint64_t *size_bytes) {
    return text != NULL && size_bytes != NULL && fsti_size_parse(text, size_bytes);
}

void fst_memory_keep(uint64_t size_bytes) { fsti_arena_keep_max(size_bytes); }

uint64_t fst_memory_trim(void) { return fsti_staging_trim() + fsti_arena_trim(); }

void fst_memory_live(size_t *buffer_count, uint64_t *size_bytes) {
    size_t count;
    uint64_t bytes;
    fsti_buffer_live(&count, &bytes);
    if (buffer_count != NULL) *buffer_count = count;
    if (size_bytes != NULL) *size_bytes = bytes;
}

uint64_t fst_memory_pinned(void) { return fsti_staging_pinned_bytes(); }

void fst_log_set(fst_log_callback callback, void *context, fst_log_level level) {
    fsti_log_set(callback, context, level);
}
