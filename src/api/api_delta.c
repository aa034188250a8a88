// SPDX-License-Identifier: Apache-2.0
/// The public functions of delta.h.
#include <string.h>

#include "api_check.h"
#include "delta/delta.h"
#include "digest/digest.h"
#include "fastsafetensors.h"
#include "format/format.h"

#define DELTA_FLAGS                                                                                \
    (FST_DELTA_DURABLE | FST_DELTA_CHECK_FIRST | FST_DELTA_CHECK_ONLY | FST_DELTA_ROLL_BACK |      \
     FST_DELTA_NEW_FILES)

fst_status fst_delta_open(const char *const *folders, size_t folder_count, fst_delta **out,
                          fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(folders != NULL && folder_count > 0, error, "no delta folder is given");
    for (size_t i = 0; i < folder_count; i++) API_REQUIRE_PATH(folders[i], "a folder", error);
    return fsti_delta_open(folders, folder_count, out, error);
}

void fst_delta_close(fst_delta *delta) {
    API_DEFER_CANCEL;
    fsti_delta_close(delta);
}

fst_status fst_delta_info_get(const fst_delta *delta, fst_delta_info *out, fst_error *error) {
    fst_delta_info full = FST_STRUCT_INIT(fst_delta_info);
    API_REQUIRE(delta != NULL && out != NULL, error, "delta or out is NULL");
    FST_TRY(fsti_api_check_size(out->struct_size, error));
    fsti_delta_info(delta, &full);
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

fst_status fst_delta_tensor_get(const fst_delta *delta, size_t index, fst_delta_tensor *out,
                                fst_error *error) {
    fst_delta_tensor full = FST_STRUCT_INIT(fst_delta_tensor);
    API_REQUIRE(delta != NULL && out != NULL, error, "delta or out is NULL");
    FST_TRY(fsti_api_check_size(out->struct_size, error));
    API_REQUIRE(fsti_delta_tensor(delta, index, &full), error, "tensor index %zu is out of range",
                index);
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

static fst_status copy_options(const fst_delta_options *options, fst_delta_options *out,
                               fst_error *error) {
    *out = FST_STRUCT_INIT(fst_delta_options);
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(out, sizeof *out, options, options->struct_size, error));
    API_REQUIRE((out->flags & ~DELTA_FLAGS) == 0, error, "unknown flags 0x%x", out->flags);
    if (out->version == NULL) return FST_OK;
    API_REQUIRE(out->version[0] != '\0', error,
                "version is empty; it must be a version such as '000007'");
    API_REQUIRE(strlen(out->version) < FST_DELTA_VERSION_BYTES, error,
                "version has more than %d bytes", FST_DELTA_VERSION_BYTES - 1);
    return FST_OK;
}

static fst_status give_stats(fst_status status, const fst_delta_stats *full, fst_delta_stats *stats,
                             fst_error *error) {
    if (status != FST_OK || stats == NULL) return status;
    return fsti_api_give_struct(stats, stats->struct_size, full, sizeof *full, error);
}

fst_status fst_delta_version(const char *checkpoint, char version[FST_DELTA_VERSION_BYTES],
                             int *is_interrupted, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE_PATH(checkpoint, "checkpoint", error);
    API_REQUIRE(version != NULL && is_interrupted != NULL, error,
                "version or is_interrupted is NULL");
    return fsti_delta_version(checkpoint, version, is_interrupted, error);
}

fst_status fst_delta_apply(const fst_delta *delta, const char *checkpoint,
                           const fst_delta_options *options, fst_delta_stats *stats,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_delta_options own;
    fst_delta_stats full = FST_STRUCT_INIT(fst_delta_stats);
    API_REQUIRE(delta != NULL, error, "delta is NULL");
    API_REQUIRE_PATH(checkpoint, "checkpoint", error);
    FST_TRY(copy_options(options, &own, error));
    API_REQUIRE((own.flags & FST_DELTA_ROLL_BACK) == 0, error,
                "FST_DELTA_ROLL_BACK is for fst_delta_recover()");
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_delta_apply(delta, checkpoint, &own, &full, error), &full, stats, error);
}

fst_status fst_delta_recover(const char *checkpoint, const fst_delta_options *options,
                             fst_delta_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    fst_delta_options own;
    fst_delta_stats full = FST_STRUCT_INIT(fst_delta_stats);
    API_REQUIRE_PATH(checkpoint, "checkpoint", error);
    FST_TRY(copy_options(options, &own, error));
    API_REQUIRE((own.flags & ~(FST_DELTA_DURABLE | FST_DELTA_ROLL_BACK)) == 0, error,
                "flags 0x%x are for fst_delta_apply()", own.flags);
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_delta_recover(checkpoint, &own, &full, error), &full, stats, error);
}

static fst_status check_memory(const fst_delta_memory *tensors, size_t count, fst_error *error) {
    API_REQUIRE(tensors != NULL || count == 0, error, "tensors is NULL");
    for (size_t i = 0; i < count; i++) {
        API_REQUIRE(tensors[i].name != NULL, error, "the name of tensor %zu is NULL", i);
        API_REQUIRE(tensors[i].data != NULL || tensors[i].size_bytes == 0, error,
                    "tensor '%.100s' has no memory", tensors[i].name);
    }
    return FST_OK;
}

fst_status fst_delta_prepare(const fst_delta *delta, const fst_delta_memory *tensors,
                             size_t tensor_count, const fst_delta_options *options,
                             fst_delta_change **out, fst_error *error) {
    API_DEFER_CANCEL;
    fst_delta_options own;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(delta != NULL, error, "delta is NULL");
    FST_TRY(check_memory(tensors, tensor_count, error));
    FST_TRY(copy_options(options, &own, error));
    API_REQUIRE(own.flags == 0, error, "fst_delta_prepare() takes no flags");
    fsti_delta_live live = {tensors, tensor_count};
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    fsti_delta_info(delta, &info);
    if (own.version != NULL &&
        fsti_version_compare(own.version, info.base_version) != FSTI_VERSION_SAME)
        return fsti_error_set(error, FST_E_VERSION, FSTI_NO_LOCATION,
                              "the tensors have version %s, but the delta is based on %s",
                              own.version, info.base_version);
    return fsti_delta_prepare(delta, &live, &own, out, error);
}

void fst_delta_commit(fst_delta_change *change) {
    API_DEFER_CANCEL;
    if (change != NULL) fsti_delta_commit(change);
}

void fst_delta_drop(fst_delta_change *change) {
    API_DEFER_CANCEL;
    fsti_delta_drop(change);
}

fst_status fst_delta_patch_make(const fst_delta *delta, size_t index,
                                const fst_delta_patch_options *options, fst_delta_patch *out,
                                fst_error *error) {
    API_DEFER_CANCEL;
    fst_delta_patch_options own = FST_STRUCT_INIT(fst_delta_patch_options);
    fst_delta_patch full = FST_STRUCT_INIT(fst_delta_patch);
    fst_delta_tensor tensor = FST_STRUCT_INIT(fst_delta_tensor);
    API_REQUIRE(delta != NULL && options != NULL && out != NULL, error,
                "delta, options or out is NULL");
    FST_TRY(fsti_api_check_size(out->struct_size, error));
    FST_TRY(fsti_api_copy_struct(&own, sizeof own, options, options->struct_size, error));
    uint32_t size = own.element_bytes;
    API_REQUIRE(size == 1 || size == 2 || size == 4 || size == 8, error,
                "element_bytes must be 1, 2, 4 or 8, not %u", size);
    API_REQUIRE_SWITCH(own.dense, "dense", error);
    API_REQUIRE(own.index_bytes == 4 || own.index_bytes == 8, error,
                "index_bytes must be 4 or 8, not %u", own.index_bytes);
    API_REQUIRE(own.size_bytes % size == 0, error, "size_bytes is not a multiple of element_bytes");
    API_REQUIRE(own.index_bytes == 8 || own.size_bytes / size <= (uint64_t)INT32_MAX, error,
                "the tensor has too many elements for 4-byte indices");
    API_REQUIRE(own.old != NULL || own.size_bytes == 0, error, "old is NULL");
    API_REQUIRE(fsti_delta_tensor(delta, index, &tensor), error, "tensor index %zu is out of range",
                index);
    FST_TRY(fsti_delta_patch_make(delta, index, &own, &full, error));
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

void fst_delta_patch_clear(fst_delta_patch *patch) {
    if (patch == NULL) return;
    fsti_free(patch->indices);
    fsti_free(patch->values);
    patch->indices = patch->values = NULL;
    patch->element_count = 0;
}

static bool is_decimal(const char *text) {
    return text[0] != '\0' && text[strspn(text, "0123456789")] == '\0';
}

/// Whether `version` is the number behind `base`: compared digit by digit, of any length.
static bool follows(const char *base, const char *version) {
    size_t base_size = strlen(base), size = strlen(version);
    unsigned carry = 1;
    for (size_t i = 0; i < base_size || i < size; i++) {
        unsigned a = i < base_size ? (unsigned)(base[base_size - 1 - i] - '0') + carry : carry;
        unsigned b = i < size ? (unsigned)(version[size - 1 - i] - '0') : 0;
        if (a % 10 != b) return false;
        carry = a / 10;
    }
    return carry == 0;
}

/// Whether the new state is several versions behind its base: a chain, or one that was folded.
static bool spans_several(const fst_delta *delta) {
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    if (delta == NULL) return false;
    fsti_delta_info(delta, &info);
    if (info.version_count > 1) return true;
    return is_decimal(info.base_version) && is_decimal(info.version) &&
           !follows(info.base_version, info.version);
}

/// What a dialect allows. Readers refuse a version that is not newer than its base.
static fst_status check_dialect(const fst_delta_make_options *options, fst_error *error) {
    bool is_sglang = options->dialect == FST_DELTA_SGLANG;
    API_REQUIRE(is_sglang ||
                    (options->encoding == FST_DELTA_XOR && options->digest == FST_DIGEST_ADLER32),
                error, "ModelExpress reads only xor with adler32");
    API_REQUIRE(!is_sglang || (is_decimal(options->version) && is_decimal(options->base_version)),
                error,
                "SGLang's versions are decimal numbers, such as '000007', not '%.64s' on '%.64s'",
                options->version, options->base_version);
    fsti_version_order order = fsti_version_compare(options->base_version, options->version);
    API_REQUIRE(order != FSTI_VERSION_SAME && order != FSTI_VERSION_NEWER, error,
                "version '%.64s' must be newer than base_version '%.64s'", options->version,
                options->base_version);
    API_REQUIRE(!is_sglang || follows(options->base_version, options->version) ||
                    spans_several(options->delta),
                error, "SGLang's version must be base_version + 1, not '%.64s' on '%.64s'",
                options->version, options->base_version);
    return FST_OK;
}

static fst_status check_make(const fst_delta_make_options *options, fst_error *error) {
    API_REQUIRE(options->version != NULL && options->base_version != NULL, error,
                "version and base_version are required");
    API_REQUIRE(options->version[0] != '\0', error, "version is empty");
    API_REQUIRE(options->base_version[0] != '\0', error, "base_version is empty");
    API_REQUIRE(strlen(options->version) < FST_DELTA_VERSION_BYTES, error,
                "version has more than %d bytes", FST_DELTA_VERSION_BYTES - 1);
    API_REQUIRE(strlen(options->base_version) < FST_DELTA_VERSION_BYTES, error,
                "base_version has more than %d bytes", FST_DELTA_VERSION_BYTES - 1);
    API_REQUIRE((unsigned)options->encoding < FST_DELTA_ENCODING_COUNT, error,
                "unknown encoding %d", (int)options->encoding);
    API_REQUIRE((unsigned)options->dialect < FST_DELTA_DIALECT_COUNT, error, "unknown dialect %d",
                (int)options->dialect);
    API_REQUIRE(options->digest == FST_DIGEST_ADLER32 || options->digest == FST_DIGEST_XXH3_128 ||
                    options->digest == FST_DIGEST_BLAKE3,
                error, "a delta's checksums are adler32, xxh3-128 or blake3");
    API_REQUIRE(options->level >= 0 && options->level <= 19, error,
                "level must be 1 to 19, or 0 for the default, not %d", options->level);
    API_REQUIRE((options->flags & ~FST_DELTA_DURABLE) == 0, error, "unknown flags 0x%x",
                options->flags);
    API_CHECK_PATH(options->checkpoint, "checkpoint", error);
    int sources = (options->checkpoint != NULL) + (options->delta != NULL) +
                  (options->tensors != NULL || options->tensor_count > 0);
    API_REQUIRE(sources == 1, error, "give exactly one of checkpoint, tensors and delta");
    FST_TRY(check_memory(options->tensors, options->tensor_count, error));
    return check_dialect(options, error);
}

fst_status fst_delta_make(const char *old, const char *folder,
                          const fst_delta_make_options *options, fst_delta_stats *stats,
                          fst_error *error) {
    API_DEFER_CANCEL;
    fst_delta_make_options own = FST_STRUCT_INIT(fst_delta_make_options);
    fst_delta_stats full = FST_STRUCT_INIT(fst_delta_stats);
    API_REQUIRE_PATH(old, "old", error);
    API_REQUIRE_PATH(folder, "folder", error);
    API_REQUIRE(options != NULL, error, "options is NULL");
    FST_TRY(fsti_api_copy_struct(&own, sizeof own, options, options->struct_size, error));
    FST_TRY(check_make(&own, error));
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    if (own.level == 0) own.level = 1;
    return give_stats(fsti_delta_make(old, folder, &own, &full, error), &full, stats, error);
}
