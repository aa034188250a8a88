// SPDX-License-Identifier: Apache-2.0
/// The public functions of loader.h.
#include <string.h>

#include "api_check.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "loader/loader.h"
#include "model/model.h"

static fst_status check_options(const fst_load_options *options, fst_error *error) {
    API_REQUIRE((unsigned)options->mode < FST_MODE_COUNT, error, "unknown mode %d",
                (int)options->mode);
    API_REQUIRE((unsigned)options->engine < FST_ENGINE_COUNT, error, "unknown engine %d",
                (int)options->engine);
    API_REQUIRE((unsigned)options->order < FST_ORDER_COUNT, error, "unknown order %d",
                (int)options->order);
    API_REQUIRE((unsigned)options->dtype < FST_DTYPE_COUNT, error, "unknown dtype %d",
                (int)options->dtype);
    API_REQUIRE((unsigned)options->cache < FST_CACHE_COUNT, error, "unknown cache %d",
                (int)options->cache);
    bool is_around = options->engine == FST_ENGINE_DIRECT || options->engine == FST_ENGINE_URING;
    bool is_through = options->engine == FST_ENGINE_PREAD || options->engine == FST_ENGINE_MMAP;
    API_REQUIRE(!(is_around && options->cache == FST_CACHE_KEEP) &&
                    !(is_through && options->cache == FST_CACHE_BYPASS),
                error, "the engine does not do with the page cache what is asked for");
    API_REQUIRE((unsigned)options->gds < FST_GDS_COUNT, error, "unknown gds %d", (int)options->gds);
    API_REQUIRE((unsigned)options->device.kind < FST_DEVICE_KIND_COUNT, error,
                "unknown kind of device %d", (int)options->device.kind);
    API_REQUIRE(options->device.kind == FST_DEVICE_CPU || options->mode != FST_MODE_MAP, error,
                "views of files are not to be had on a device: use load");
    API_REQUIRE(!options->convert || options->mode != FST_MODE_MAP, error,
                "views can't be converted: use load");
    API_REQUIRE(options->items != NULL || options->item_count == 0, error, "items is NULL");
    API_REQUIRE(options->globs != NULL || options->glob_count == 0, error, "globs is NULL");
    for (size_t i = 0; i < options->glob_count; i++)
        API_REQUIRE(options->globs[i] != NULL, error, "glob %zu is NULL", i);
    API_REQUIRE(options->item_count == 0 ||
                    (options->glob_count == 0 && options->predicate == NULL),
                error, "items and a selection at once");
    const fst_allocator *allocator = options->allocator;
    API_REQUIRE(allocator == NULL || (allocator->allocate != NULL && allocator->release != NULL),
                error, "the allocator lacks a function");
    API_REQUIRE(allocator == NULL || API_ALL_ZERO(allocator->reserved), error,
                "reserved words of the allocator are not zero");
    for (size_t i = 0; i < options->item_count; i++)
        API_REQUIRE(API_ALL_ZERO(options->items[i].reserved), error,
                    "reserved words of item %zu are not zero", i);
    return FST_OK;
}

static fst_status read_tuning(const fst_load_tuning *given, fst_load_tuning *out,
                              fst_error *error) {
    *out = FST_STRUCT_INIT(fst_load_tuning);
    if (given != NULL)
        FST_TRY(fsti_api_copy_struct(out, sizeof *out, given, given->struct_size, error));
    API_REQUIRE((unsigned)out->ring < FST_RING_COUNT, error, "unknown ring %d", (int)out->ring);
    API_REQUIRE((unsigned)out->numa < FST_NUMA_COUNT, error, "unknown numa policy %d",
                (int)out->numa);
    API_REQUIRE((unsigned)out->unified < FST_UNIFIED_COUNT, error, "unknown unified %d",
                (int)out->unified);
    return FST_OK;
}

fst_status fst_loader_open(fst_model *model, const fst_load_options *options, fst_loader **out,
                           fst_error *error) {
    fst_load_options known = {.struct_size = sizeof known};
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(model != NULL, error, "model is NULL");
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    fst_load_tuning tuning;
    FST_TRY(check_options(&known, error));
    FST_TRY(read_tuning(known.tuning, &tuning, error));
    known.tuning = &tuning;
    return fsti_loader_open(model, &known, out, error);
}

size_t fst_loader_tensor_count(const fst_loader *loader) {
    return loader == NULL ? 0 : fsti_loader_tensor_count(loader);
}

fst_status fst_loader_wait(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    return fsti_loader_wait(loader, timeout_ms, error);
}

fst_status fst_loader_next(fst_loader *loader, int64_t timeout_ms, fst_tensor **out,
                           fst_error *error) {
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    return fsti_loader_next(loader, timeout_ms, out, error);
}

fst_status fst_loader_item(fst_loader *loader, size_t item_index, int64_t timeout_ms,
                           fst_tensor **out, fst_error *error) {
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    API_REQUIRE(item_index < fsti_loader_tensor_count(loader), error, "item %zu of %zu", item_index,
                fsti_loader_tensor_count(loader));
    return fsti_loader_item(loader, item_index, timeout_ms, out, error);
}

fst_status fst_loader_tensor(fst_loader *loader, const char *name, size_t name_size,
                             int64_t timeout_ms, fst_tensor **out, fst_error *error) {
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL && name != NULL, error, "loader or name is NULL");
    if (name_size == SIZE_MAX) name_size = strlen(name);
    return fsti_loader_tensor(loader, name, name_size, timeout_ms, out, error);
}

void fst_loader_cancel(fst_loader *loader) {
    if (loader != NULL) fsti_loader_cancel(loader);
}

void fst_loader_close(fst_loader *loader) { fsti_loader_close(loader); }

fst_status fst_loader_stats_get(const fst_loader *loader, fst_load_stats *stats, fst_error *error) {
    API_REQUIRE(loader != NULL && stats != NULL, error, "loader or stats is NULL");
    fst_load_stats full = {.struct_size = sizeof full};
    // The handle is const for the caller; counting under its lock is not seen.
    FST_TRY(fsti_loader_stats((fst_loader *)(uintptr_t)loader, &full, error));
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_range_view(fst_model *model, const fst_range *range, fst_tensor **out,
                          fst_error *error) {
    fst_range known = {.struct_size = sizeof known};
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(model != NULL && range != NULL, error, "model or range is NULL");
    FST_TRY(fsti_api_copy_struct(&known, sizeof known, range, range->struct_size, error));
    API_REQUIRE(known.index < fsti_model_entry_count(model), error, "tensor index %zu of %zu",
                known.index, fsti_model_tensor_count(model));
    return fsti_range_view(model, &known, out, error);
}

fst_status fst_tensor_view_get(const fst_tensor *tensor, fst_tensor_view *out, fst_error *error) {
    API_REQUIRE(tensor != NULL && out != NULL, error, "tensor or out is NULL");
    fsti_tensor_view(tensor, out);
    return FST_OK;
}

fst_status fst_tensor_read(const fst_tensor *tensor, void *target, size_t size_bytes,
                           fst_error *error) {
    fst_tensor_view view;
    API_REQUIRE(tensor != NULL, error, "tensor is NULL");
    fsti_tensor_view(tensor, &view);
    API_REQUIRE(size_bytes == view.size_bytes, error, "%zu bytes for a tensor of %llu", size_bytes,
                (unsigned long long)view.size_bytes);
    API_REQUIRE(target != NULL || size_bytes == 0, error, "target is NULL");
    return fsti_tensor_read(tensor, target, error);
}

fst_tensor *fst_tensor_ref(fst_tensor *tensor) { return fsti_tensor_ref(tensor); }

void fst_tensor_unref(fst_tensor *tensor) { fsti_tensor_unref(tensor); }

fst_status fst_engines_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error) {
    API_REQUIRE(count != NULL && (infos != NULL || capacity == 0), error, "count or infos is NULL");
    return fsti_loader_probe(path, infos, capacity, count, error);
}
