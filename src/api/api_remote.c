// SPDX-License-Identifier: Apache-2.0
/// The public functions of remote.h.
#include "api_check.h"
#include "cache/cache.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "store/store.h"

static fst_status check_switches(const fst_remote_options *options, fst_error *error) {
    API_REQUIRE_SWITCH(options->anonymous, "anonymous", error);
    API_REQUIRE_SWITCH(options->cache_required, "cache_required", error);
    API_REQUIRE_SWITCH(options->create_only, "create_only", error);
    API_REQUIRE_SWITCH(options->offline, "offline", error);
    API_REQUIRE_SWITCH(options->private_redirects, "private_redirects", error);
    return FST_OK;
}

fst_status fst_remote_configure(const fst_remote_options *options, fst_error *error) {
    API_DEFER_CANCEL;
    fst_remote_options known = {.struct_size = sizeof known};
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    API_REQUIRE((unsigned)known.bucket_style < FST_BUCKET_STYLE_COUNT, error,
                "unknown bucket style %d; expected a value of fst_bucket_style",
                (int)known.bucket_style);
    FST_TRY(check_switches(&known, error));
    API_CHECK_PATH(known.ca_file, "ca_file", error);
    // On an invalid folder, nothing is changed.
    FST_TRY(fsti_cache_check(&known, error));
    FST_TRY(fsti_store_configure(&known, error));
    fsti_cache_configure(&known);
    return FST_OK;
}

fst_status fst_cache_visit(const char *cache_dir, fst_cache_visitor visit, void *context,
                           fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(visit != NULL, error, "visit is NULL");
    return fsti_cache_visit(cache_dir, visit, context, error);
}

fst_status fst_cache_prune(const char *cache_dir, uint64_t bytes_max, fst_cache_pruned *out,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_cache_pruned full = {.struct_size = sizeof full};
    if (out != NULL) FST_TRY(fsti_api_check_size(out->struct_size, error));
    FST_TRY(fsti_cache_prune(cache_dir, bytes_max, &full, error));
    return out == NULL ? FST_OK
                       : fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}
