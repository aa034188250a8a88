// SPDX-License-Identifier: Apache-2.0
/// The public functions of async_save.h.
#include "fastsafetensors/experimental/async_save.h"

#include "api_check.h"
#include "api_save_request.h"
#include "location/location.h"
#include "save/save.h"
#include "snapshot/snapshot.h"

#define NICE_MAX 19u

fst_status fst_staging_open(uint64_t limit_bytes, uint64_t ready_bytes, fst_staging_pool **out,
                            fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    return fsti_staging_pool_open(limit_bytes, ready_bytes, out, error);
}

void fst_staging_close(fst_staging_pool *pool) {
    API_DEFER_CANCEL;
    fsti_staging_pool_unref(pool);
}

uint64_t fst_staging_bytes(const fst_staging_pool *pool) {
    API_DEFER_CANCEL;
    // The handle is const for the caller; its lock is not seen.
    return pool == NULL ? 0 : fsti_staging_pool_bytes((fst_staging_pool *)(uintptr_t)pool);
}

static fst_status read_options(const fst_async_options *options, fst_async_options *own,
                               fst_error *error) {
    *own = (fst_async_options){.struct_size = sizeof *own};
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(own, sizeof *own, options, options->struct_size, error));
    API_REQUIRE((unsigned)own->stage < FST_STAGE_COUNT, error, "unknown stage %d", (int)own->stage);
    API_REQUIRE((unsigned)own->overlap < FST_OVERLAP_COUNT, error, "unknown overlap %d",
                (int)own->overlap);
    API_REQUIRE(own->nice <= NICE_MAX, error, "nice must be at most %u, not %u", NICE_MAX,
                own->nice);
    return FST_OK;
}

fst_status fst_async_save_start(const char *path, const fst_save_tensor *tensors,
                                size_t tensor_count, const fst_async_options *options,
                                fst_async_save **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE_PATH(path, "path", error);
    FST_TRY(fsti_location_check(path, error));
    fsti_async_request request = {.path = path, .tensor_count = tensor_count};
    FST_TRY(read_options(options, &request.options, error));
    api_save_request checked = {0};
    fst_status status =
        fsti_api_save_request_read(request.options.save, tensors, tensor_count, &checked, error);
    if (status == FST_OK) {
        request.tensors = checked.tensors;
        request.options.save = &checked.options;
        status = fsti_async_save_start(&request, out, error);
    }
    fsti_api_save_request_clear(&checked);
    return status;
}

fst_status fst_async_save_stage(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(save != NULL, error, "save is NULL");
    return fsti_async_save_stage(save, timeout_ms, error);
}

fst_status fst_async_save_wait(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(save != NULL, error, "save is NULL");
    return fsti_async_save_wait(save, timeout_ms, error);
}

const fst_async_save *fst_async_save_serve(const fst_async_save *save) {
    return fsti_async_set_callback_save(save);
}

void fst_async_save_cancel(fst_async_save *save) {
    API_DEFER_CANCEL;
    if (save != NULL) fsti_async_save_cancel(save);
}

void fst_async_save_close(fst_async_save *save) {
    API_DEFER_CANCEL;
    fsti_async_save_close(save);
}

fst_status fst_async_save_stats_get(fst_async_save *save, fst_async_stats *stats,
                                    fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(save != NULL && stats != NULL, error, "save or stats is NULL");
    fst_async_stats full = {.struct_size = sizeof full};
    FST_TRY(fsti_async_save_stats(save, &full, error));
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_async_save_writer_stats(fst_async_save *save, fst_save_stats *stats,
                                       fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(save != NULL && stats != NULL, error, "save or stats is NULL");
    fst_save_stats full = {.struct_size = sizeof full};
    FST_TRY(fsti_async_save_writer_stats(save, &full, error));
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}
