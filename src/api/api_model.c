// SPDX-License-Identifier: Apache-2.0
/// The public functions of model.h.
#include <string.h>

#include "api_check.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "model/open_model.h"

static fst_status read_options(const fst_open_options *options, model_request *request,
                               fst_error *error) {
    fst_open_options known = {.struct_size = sizeof known};
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    API_REQUIRE((known.flags & ~(FST_OPEN_LENIENT | FST_OPEN_CUT | FST_OPEN_VERIFY |
                                 FST_OPEN_STORED | FST_OPEN_PARTS)) == 0,
                error, "unknown open flags 0x%x", known.flags);
    *request = (model_request){.flags = known.flags,
                               .manifest = known.manifest,
                               .signature = known.signature,
                               .public_key = known.public_key};
    API_CHECK_PATH(known.manifest, "manifest", error);
    API_CHECK_PATH(known.signature, "signature", error);
    API_CHECK_PATH(known.public_key, "public_key", error);
    bool verifies = known.manifest != NULL || (known.flags & FST_OPEN_VERIFY) != 0;
    API_REQUIRE((known.signature == NULL) == (known.public_key == NULL), error,
                "signature and key must be given together");
    API_REQUIRE(known.signature == NULL || verifies, error,
                "a signature needs a manifest: set FST_OPEN_VERIFY or give a manifest as well");
    API_REQUIRE(!verifies || (known.flags & FST_OPEN_CUT) == 0, error,
                "a truncated file can't be verified against a manifest");
    return FST_OK;
}

fst_status fst_model_open(const char *path, const fst_open_options *options, fst_model **out,
                          fst_error *error) {
    API_DEFER_CANCEL;
    model_request request;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE_PATH(path, "path", error);
    FST_TRY(read_options(options, &request, error));
    return fsti_model_open(path, &request, out, error);
}

static fst_status check_source(const fst_source *source, fst_model **out, fst_error *error) {
    API_REQUIRE(out != NULL, error, "out is NULL");
    API_REQUIRE(source->data == NULL || source->read == NULL, error,
                "a source has either data or a function, not both");
    API_REQUIRE(source->size_bytes <= INT64_MAX, error, "invalid source size: %llu bytes",
                (unsigned long long)source->size_bytes);
    API_REQUIRE(source->data != NULL || source->read != NULL || source->descriptor >= 0, error,
                "a source without data, function or descriptor");
    return FST_OK;
}

fst_status fst_model_open_source(const fst_source *source, const fst_open_options *options,
                                 fst_model **out, fst_error *error) {
    API_DEFER_CANCEL;
    model_request request;
    fst_source known = FST_STRUCT_INIT(fst_source);
    if (out != NULL) *out = NULL;
    API_REQUIRE(source != NULL, error, "source is NULL");
    FST_TRY(fsti_api_copy_struct(&known, sizeof known, source, source->struct_size, error));
    fst_status status = check_source(&known, out, error);
    if (status == FST_OK) status = read_options(options, &request, error);
    if (status == FST_OK) return fsti_model_open_source(&known, &request, out, error);
    if (known.release != NULL) known.release(known.context);
    return status;
}

fst_status fst_model_open_files(const char *const *paths, size_t path_count,
                                const fst_open_options *options, fst_model **out,
                                fst_error *error) {
    API_DEFER_CANCEL;
    model_request request;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(paths != NULL && path_count > 0, error, "no paths");
    API_REQUIRE(path_count < UINT32_MAX, error, "too many paths");
    for (size_t i = 0; i < path_count; i++) API_REQUIRE_PATH(paths[i], "a path of the list", error);
    FST_TRY(read_options(options, &request, error));
    return fsti_model_open_files(paths, path_count, &request, out, error);
}

void fst_model_close(fst_model *model) {
    API_DEFER_CANCEL;
    fsti_model_unref(model);
}

size_t fst_model_tensor_count(const fst_model *model) {
    return model == NULL ? 0 : fsti_model_tensor_count(model);
}

size_t fst_model_file_count(const fst_model *model) {
    return model == NULL ? 0 : fsti_model_file_count(model);
}

fst_status fst_model_tensor_info(const fst_model *model, size_t index, fst_tensor_info *out,
                                 fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(model != NULL && out != NULL, error, "model or out is NULL");
    API_REQUIRE(index < fsti_model_entry_count(model), error,
                "tensor index %zu is out of range: there are %zu tensors", index,
                fsti_model_tensor_count(model));
    fst_tensor_info full = FST_STRUCT_INIT(fst_tensor_info);
    fsti_model_tensor_info(model, index, &full);
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

fst_status fst_model_find(const fst_model *model, const char *name, size_t name_size, size_t *index,
                          fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(model != NULL && name != NULL && index != NULL, error,
                "model, name or index is NULL");
    if (name_size == SIZE_MAX) name_size = strlen(name);
    return fsti_model_find(model, name, name_size, index, error);
}

fst_status fst_model_check(const fst_model *model, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(model != NULL, error, "model is NULL");
    return fsti_model_check(model, error);
}

fst_status fst_part_copy(const fst_model *model, const fst_part *part, int *copied,
                         fst_error *error) {
    API_DEFER_CANCEL;
    fst_part known = {.struct_size = sizeof known};
    API_REQUIRE(model != NULL && part != NULL && copied != NULL, error,
                "model, part or copied is NULL");
    *copied = 0;
    FST_TRY(fsti_api_copy_struct(&known, sizeof known, part, part->struct_size, error));
    API_REQUIRE(known.tensor_index < fsti_model_entry_count(model), error,
                "tensor index %zu is out of range: there are %zu tensors", known.tensor_index,
                fsti_model_tensor_count(model));
    API_REQUIRE(known.destination != NULL, error, "destination is NULL");
    fst_tensor_info info = {0};
    fsti_model_tensor_info(model, known.tensor_index, &info);
    API_REQUIRE(info.rank == 0 || (known.begin != NULL && known.end != NULL), error,
                "begin or end is NULL");
    return fsti_part_copy(model, &known, copied, error);
}

fst_status fst_model_file_info(const fst_model *model, size_t index, fst_file_info *out,
                               fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(model != NULL && out != NULL, error, "model or out is NULL");
    API_REQUIRE(index < fsti_model_file_count(model), error,
                "file index %zu is out of range: there are %zu files", index,
                fsti_model_file_count(model));
    fst_file_info full = FST_STRUCT_INIT(fst_file_info);
    fsti_model_file_info(model, index, &full);
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

fst_status fst_model_metadata(const fst_model *model, size_t file_index, size_t entry_index,
                              fst_metadata_entry *out, fst_error *error) {
    API_DEFER_CANCEL;
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    FST_TRY(fst_model_file_info(model, file_index, &info, error));
    API_REQUIRE(out != NULL, error, "out is NULL");
    API_REQUIRE(entry_index < info.metadata_count, error,
                "metadata entry %zu is out of range: there are %zu entries", entry_index,
                info.metadata_count);
    fsti_model_metadata(model, file_index, entry_index, out);
    return FST_OK;
}

fst_status fst_models_check_save(const fst_model *const *models, size_t model_count,
                                 fst_error *error) {
    bool is_unfinished;
    API_REQUIRE(models != NULL || model_count == 0, error, "models is NULL");
    for (size_t i = 0; i < model_count; i++)
        API_REQUIRE(models[i] != NULL, error, "model %zu is NULL", i);
    return fsti_models_check_save(models, model_count, NULL, &is_unfinished, error);
}
