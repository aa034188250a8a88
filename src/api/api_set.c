// SPDX-License-Identifier: Apache-2.0
/// The public functions of writer.h for sharded models written by several processes.
#include "api_check.h"
#include "digest/digest.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "save/save.h"

fst_status fst_writer_hand_over(fst_writer *writer, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(writer != NULL, error, "writer is NULL");
    return fsti_writer_hand_over(writer, error);
}

const char *fst_writer_hidden_path(const fst_writer *writer, uint32_t file_index) {
    return writer == NULL ? NULL : fsti_writer_hidden_path(writer, file_index);
}

fst_status fst_writer_join(const char *path, const fst_save_options *options, fst_writer **out,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_save_options own = {.struct_size = sizeof own};
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE_PATH(path, "path", error);
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&own, sizeof own, options, options->struct_size, error));
    API_REQUIRE((unsigned)own.promise < FST_SAVE_PROMISE_COUNT, error,
                "unknown promise %d; expected a value of fst_save_promise", (int)own.promise);
    return fsti_writer_join(path, &own, out, error);
}

fst_status fst_set_publish(const char *folder, const char *const *paths, size_t path_count,
                           const fst_publish_options *options, fst_save_stats *stats,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_publish_options own = {.struct_size = sizeof own};
    fst_save_stats full = {.struct_size = sizeof full};
    API_REQUIRE_PATH(folder, "folder", error);
    API_REQUIRE(paths != NULL, error, "paths is NULL");
    API_REQUIRE(path_count > 0 && path_count <= 99999, error, "%zu files", path_count);
    for (size_t i = 0; i < path_count; i++) API_REQUIRE_PATH(paths[i], "a path of the list", error);
    // Check before anything is replaced, because afterwards nothing may fail.
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&own, sizeof own, options, options->struct_size, error));
    API_REQUIRE((unsigned)own.promise < FST_SAVE_PROMISE_COUNT, error,
                "unknown promise %d; expected a value of fst_save_promise", (int)own.promise);
    API_REQUIRE((unsigned)own.digest < FSTI_MANIFEST_DIGEST_COUNT, error,
                "digest %d is not one of those for manifests", (int)own.digest);
    API_REQUIRE_SWITCH(own.names_only, "names_only", error);
    API_REQUIRE(own.manifest == NULL || own.names_only == 0, error,
                "a manifest lists the index: names_only can't be set");
    FST_TRY(fsti_api_check_stem(own.stem, error));
    FST_TRY(fsti_set_publish(folder, paths, path_count, &own, &full, error));
    if (stats == NULL) return FST_OK;
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}
