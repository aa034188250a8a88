// SPDX-License-Identifier: Apache-2.0
/// The public functions of verify.h.
#include "api_check.h"
#include "digest/digest.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "model/open_model.h"
#include "verify/folder_check.h"

const char *fst_digest_name(fst_digest digest) {
    const fsti_digest_kind *kind = fsti_digest_get(digest);
    return kind == NULL ? "unknown" : kind->name;
}

struct fst_digest_state {
    const fsti_digest_kind *kind;
    void *state;
};

fst_status fst_digest_begin(fst_digest digest, fst_digest_state **out, fst_error *error) {
    API_DEFER_CANCEL;
    const fsti_digest_kind *kind = fsti_digest_get(digest);
    API_REQUIRE(out != NULL, error, "out is NULL");
    API_REQUIRE(kind != NULL, error, "unknown digest %d; expected a value of fst_digest",
                (int)digest);
    FST_TRY(kind->ready(error));
    fst_digest_state *begun = fsti_alloc(sizeof *begun);
    if (begun == NULL) return fsti_error_memory(error, sizeof *begun);
    *begun = (fst_digest_state){kind, kind->begin()};
    if (begun->state == NULL) {
        fsti_free(begun);
        return fsti_error_memory(error, sizeof *begun);
    }
    *out = begun;
    return FST_OK;
}

fst_status fst_digest_update(fst_digest_state *state, const void *bytes, size_t size_bytes,
                             fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(state != NULL && (bytes != NULL || size_bytes == 0), error,
                "state or bytes is NULL");
    if (size_bytes == 0 || state->kind->update(state->state, bytes, size_bytes)) return FST_OK;
    return fsti_error_memory(error, size_bytes);
}

fst_status fst_digest_end(fst_digest_state *state, unsigned char *digest, size_t *size_bytes,
                          fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(state != NULL && digest != NULL && size_bytes != NULL, error,
                "state, digest or size_bytes is NULL");
    bool succeeded = state->kind->end(state->state, digest);
    *size_bytes = state->kind->digest_bytes;
    fsti_free(state);
    return succeeded ? FST_OK : fsti_error_memory(error, FST_DIGEST_BYTES_MAX);
}

void fst_digest_drop(fst_digest_state *state) {
    if (state == NULL) return;
    (void)state->kind->end(state->state, NULL);
    fsti_free(state);
}

fst_status fst_model_verification(const fst_model *model, fst_verification *out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(model != NULL && out != NULL, error, "model or out is NULL");
    fst_verification full = {.struct_size = sizeof full};
    fsti_model_verification(model, &full);
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

static fst_status check_options(const fst_manifest_options *options, fst_error *error) {
    uint32_t chunk = options->chunk_bytes;
    API_REQUIRE((unsigned)options->digest < FSTI_MANIFEST_DIGEST_COUNT, error,
                "digest %d is not one of those for manifests", (int)options->digest);
    API_REQUIRE(chunk == 0 || (chunk >= FSTI_DIGEST_CHUNK_BYTES_MIN &&
                               chunk <= FSTI_DIGEST_CHUNK_BYTES_MAX && (chunk & (chunk - 1)) == 0),
                error, "chunk_bytes %u is not a power of two from 64 KiB to 1 MiB", chunk);
    API_REQUIRE((options->flags & ~(FST_MANIFEST_TENSORS | FST_MANIFEST_SUMS)) == 0, error,
                "unknown flags 0x%x", options->flags);
    bool is_sums = (options->flags & FST_MANIFEST_SUMS) != 0;
    API_REQUIRE(!is_sums || (options->flags == FST_MANIFEST_SUMS && chunk == 0 &&
                             options->keep == NULL && options->digest == FST_DIGEST_SHA256),
                error, "FST_MANIFEST_SUMS needs FST_DIGEST_SHA256 and takes no other option");
    return FST_OK;
}

/// Copies the counts to the caller, if requested.
static fst_status give_stats(fst_status status, const fst_manifest_stats *full,
                             fst_manifest_stats *stats, fst_error *error) {
    if (status != FST_OK || stats == NULL) return status;
    return fsti_api_give_struct(stats, stats->struct_size, full, sizeof *full, error);
}

fst_status fst_manifest_write(const char *path, const char *target,
                              const fst_manifest_options *options, fst_manifest_stats *stats,
                              fst_error *error) {
    API_DEFER_CANCEL;
    fst_manifest_options known = FST_STRUCT_INIT(fst_manifest_options);
    fst_manifest_stats full = FST_STRUCT_INIT(fst_manifest_stats);
    API_REQUIRE_PATH(path, "path", error);
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    API_CHECK_PATH(target, "target", error);
    API_CHECK_PATH(known.keep, "keep", error);
    FST_TRY(check_options(&known, error));
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_manifest_make(path, target, &known, &full, error), &full, stats, error);
}

fst_status fst_manifest_check(const char *path, const fst_check_options *options,
                              fst_manifest_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    fst_check_options known = FST_STRUCT_INIT(fst_check_options);
    fst_manifest_stats full = FST_STRUCT_INIT(fst_manifest_stats);
    API_REQUIRE_PATH(path, "path", error);
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    API_CHECK_PATH(known.manifest, "manifest", error);
    fsti_check_listener listener = {
        known.callback, known.context, {known.progress, known.progress_context}};
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_manifest_check(path, known.manifest, &listener, &full, error), &full,
                      stats, error);
}

static fst_status read_files(const fst_bundle_files *files, fsti_bundle_paths *out,
                             fst_error *error) {
    fst_bundle_files known = FST_STRUCT_INIT(fst_bundle_files);
    API_REQUIRE(files != NULL, error, "files is NULL");
    FST_TRY(fsti_api_copy_struct(&known, sizeof known, files, files->struct_size, error));
    API_REQUIRE_PATH(known.folder, "folder", error);
    API_REQUIRE_PATH(known.key, "key", error);
    API_CHECK_PATH(known.signature, "signature", error);
    API_CHECK_PATH(known.keep, "keep", error);
    *out = (fsti_bundle_paths){
        .folder = known.folder,
        .bundle = known.signature,
        .key = known.key,
        .keep = known.keep,
        .listener = {known.callback, known.context, {known.progress, known.progress_context}}};
    return FST_OK;
}

fst_status fst_bundle_sign(const fst_bundle_files *files, fst_manifest_stats *stats,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_manifest_stats full = FST_STRUCT_INIT(fst_manifest_stats);
    fsti_bundle_paths paths;
    FST_TRY(read_files(files, &paths, error));
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_bundle_sign(&paths, &full, error), &full, stats, error);
}

fst_status fst_bundle_check(const fst_bundle_files *files, fst_manifest_stats *stats,
                            fst_error *error) {
    API_DEFER_CANCEL;
    fst_manifest_stats full = FST_STRUCT_INIT(fst_manifest_stats);
    fsti_bundle_paths paths;
    FST_TRY(read_files(files, &paths, error));
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    return give_stats(fsti_bundle_check(&paths, &full, error), &full, stats, error);
}
