// SPDX-License-Identifier: Apache-2.0
/// The public functions of loader.h.
#include <string.h>

#include "api_check.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "loader/load_handle.h"
#include "model/open_model.h"

/// Refuses a part with destination_bytes but no destination: the caller forgot the pointer.
static fst_status check_parts(const fst_load_options *options, fst_error *error) {
    for (size_t i = 0; i < options->part_count; i++)
        API_REQUIRE(options->parts[i].destination != NULL ||
                        options->parts[i].destination_bytes == 0,
                    error, "part %zu has destination_bytes, but destination is NULL", i);
    return FST_OK;
}

/// Refuses options that would have no effect.
static fst_status check_effects(const fst_load_options *options, fst_error *error) {
    API_REQUIRE_SWITCH(options->convert, "convert", error);
    API_REQUIRE_SWITCH(options->map_read_only, "map_read_only", error);
    API_REQUIRE(options->stream == 0 || options->device.kind != FST_DEVICE_CPU, error,
                "a stream has no effect on the CPU");
    API_REQUIRE(options->share_grace_s == 0 || options->share == FST_SHARE_NODE, error,
                "share_grace_s has no effect without FST_SHARE_NODE");
    return FST_OK;
}

/// Refuses options that contradict shared memory, which is on the CPU and allocated by the library.
static fst_status check_share(const fst_load_options *options, fst_error *error) {
    API_REQUIRE((unsigned)options->share < FST_SHARE_COUNT, error,
                "unknown share %d; expected a value of fst_share", (int)options->share);
    if (options->share == FST_SHARE_OFF) return FST_OK;
    API_REQUIRE(options->device.kind == FST_DEVICE_CPU, error,
                "shared memory is on the CPU. Load without a device, or without share");
    API_REQUIRE(options->budget_bytes == 0, error,
                "a budget has no effect on shared memory. Use one of them");
    API_REQUIRE(options->allocator == NULL, error,
                "an allocator together with shared memory: use one of them");
    for (size_t i = 0; i < options->part_count; i++)
        API_REQUIRE(options->parts[i].destination == NULL, error,
                    "part %zu has a destination, which cannot be shared", i);
    return FST_OK;
}

static fst_status check_options(const fst_load_options *options, fst_error *error) {
    API_REQUIRE((unsigned)options->mode < FST_MODE_COUNT, error,
                "unknown mode %d; expected a value of fst_load_mode", (int)options->mode);
    API_REQUIRE((unsigned)options->order < FST_ORDER_COUNT, error,
                "unknown order %d; expected a value of fst_order", (int)options->order);
    API_REQUIRE(!options->convert || (unsigned)options->dtype < FST_DTYPE_COUNT, error,
                "unknown dtype %d; expected a value of fst_dtype", (int)options->dtype);
    API_REQUIRE((unsigned)options->cache < FST_CACHE_COUNT, error,
                "unknown cache %d; expected a value of fst_cache", (int)options->cache);
    FST_TRY(fsti_api_check_device(options->device, error));
    API_REQUIRE(options->device.kind == FST_DEVICE_CPU || options->mode != FST_MODE_MAP, error,
                "mode map is not available on a device. Use mode load");
    API_REQUIRE(!options->convert || options->mode != FST_MODE_MAP, error,
                "mapped tensors can't be converted. Use mode load");
    API_REQUIRE(options->budget_bytes == 0 || options->mode != FST_MODE_MAP, error,
                "mapped tensors need no memory that a budget could limit. Use mode load");
    API_REQUIRE(options->parts != NULL || options->part_count == 0, error, "parts is NULL");
    API_REQUIRE(options->globs != NULL || options->glob_count == 0, error, "globs is NULL");
    for (size_t i = 0; i < options->glob_count; i++)
        API_REQUIRE(options->globs[i] != NULL, error, "glob %zu is NULL", i);
    API_REQUIRE(options->parts == NULL || (options->glob_count == 0 && options->predicate == NULL),
                error, "parts together with globs or a predicate: use one of them");
    FST_TRY(check_share(options, error));
    return check_effects(options, error);
}

/// Refuses an engine in FST_MODE_MAP, which uses none, and a cache option that contradicts the
/// engine.
static fst_status check_engine(const fst_load_options *options, const fst_load_tuning *tuning,
                               fst_error *error) {
    fst_engine engine = tuning->engine;
    bool bypasses = engine == FST_ENGINE_DIRECT || engine == FST_ENGINE_URING;
    bool is_buffered = engine == FST_ENGINE_PREAD || engine == FST_ENGINE_MMAP;
    API_REQUIRE(engine == FST_ENGINE_AUTO || options->mode != FST_MODE_MAP, error,
                "an engine has no effect in mode map. Use mode load");
    API_REQUIRE(tuning->ring == FST_RING_AUTO || engine == FST_ENGINE_AUTO ||
                    engine == FST_ENGINE_URING,
                error, "ring has no effect with an engine other than io_uring");
    API_REQUIRE(!(bypasses && options->cache == FST_CACHE_KEEP), error,
                "the engine bypasses the page cache: FST_CACHE_KEEP is not possible with it");
    API_REQUIRE(!(is_buffered && options->cache == FST_CACHE_BYPASS), error,
                "the engine uses the page cache: FST_CACHE_BYPASS is not possible with it");
    return FST_OK;
}

/// Refuses tuning options that would have no effect with this mode or device.
static fst_status check_tuning(const fst_load_options *options, const fst_load_tuning *tuning,
                               fst_error *error) {
    bool is_map = options->mode == FST_MODE_MAP;
    API_REQUIRE_SWITCH(tuning->map_populate, "map_populate", error);
    API_REQUIRE_SWITCH(tuning->keep_sigbus_handler, "keep_sigbus_handler", error);
    API_REQUIRE(!is_map || tuning->ring == FST_RING_AUTO, error, "ring has no effect in mode map");
    API_REQUIRE(!is_map || tuning->numa == FST_NUMA_DEFAULT, error,
                "a NUMA policy has no effect in mode map");
    API_REQUIRE(!is_map || tuning->coalesce_gap_bytes == 0, error,
                "coalesce_gap_bytes has no effect in mode map");
    if (options->device.kind != FST_DEVICE_CPU) return FST_OK;
    API_REQUIRE(tuning->unified == FST_UNIFIED_AUTO, error,
                "`unified` is for GPUs, and the device is the CPU");
    API_REQUIRE(tuning->staging_bytes == 0, error,
                "staging_bytes is for GPUs, and the device is the CPU");
    if (tuning->gds != FST_GDS_STRICT) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "gds needs a GPU, and the device is the CPU");
}

static fst_status read_tuning(const fst_load_options *options, fst_load_tuning *out,
                              fst_error *error) {
    const fst_load_tuning *given = options->tuning;
    *out = FST_STRUCT_INIT(fst_load_tuning);
    if (given != NULL)
        FST_TRY(fsti_api_copy_struct(out, sizeof *out, given, given->struct_size, error));
    API_REQUIRE((unsigned)out->engine < FST_ENGINE_COUNT, error,
                "unknown engine %d; expected a value of fst_engine", (int)out->engine);
    API_REQUIRE((unsigned)out->gds < FST_GDS_COUNT, error,
                "unknown gds %d; expected a value of fst_gds", (int)out->gds);
    API_REQUIRE((unsigned)out->ring < FST_RING_COUNT, error,
                "unknown ring %d; expected a value of fst_ring", (int)out->ring);
    API_REQUIRE((unsigned)out->numa < FST_NUMA_COUNT, error,
                "unknown numa policy %d; expected a value of fst_numa", (int)out->numa);
    API_REQUIRE((unsigned)out->unified < FST_UNIFIED_COUNT, error,
                "unknown unified %d; expected a value of fst_unified", (int)out->unified);
    FST_TRY(check_tuning(options, out, error));
    return check_engine(options, out, error);
}

static fst_status read_allocator(const fst_allocator *given, fst_allocator *out, fst_error *error) {
    FST_TRY(fsti_api_copy_struct(out, sizeof *out, given, given->struct_size, error));
    API_REQUIRE(out->allocate != NULL && out->release != NULL, error,
                "the allocator lacks a function");
    return FST_OK;
}

/// Copies parts whose struct_size differs from this version's. The caller frees *copy (NULL: no
/// copy was needed).
static fst_status read_parts(fst_load_options *options, fst_part **copy, fst_error *error) {
    *copy = NULL;
    size_t count = options->part_count;
    if (count == 0) return FST_OK;
    API_REQUIRE(count <= SIZE_MAX / sizeof **copy, error, "too many parts");
    bool is_current = true;
    for (size_t i = 0; i < count && is_current; i++)
        is_current = options->parts[i].struct_size == sizeof(fst_part);
    if (is_current) return FST_OK;
    fst_part *parts = fsti_alloc(count * sizeof *parts);
    if (parts == NULL) return fsti_error_memory(error, count * sizeof *parts);
    *copy = parts;
    for (size_t i = 0; i < count; i++)
        FST_TRY(fsti_api_copy_element(&parts[i], sizeof parts[i], options->parts, i, error));
    options->parts = parts;
    return FST_OK;
}

static fst_status open_loader(fst_model *model, const fst_load_options *options, fst_loader **out,
                              fst_error *error) {
    fst_load_options known = *options;
    fst_load_tuning tuning;
    fst_allocator allocator;
    fst_part *copy;
    FST_TRY(check_options(options, error));
    FST_TRY(read_tuning(options, &tuning, error));
    known.tuning = &tuning;
    if (known.allocator != NULL) {
        FST_TRY(read_allocator(known.allocator, &allocator, error));
        known.allocator = &allocator;
    }
    fst_status status = read_parts(&known, &copy, error);
    if (status == FST_OK) status = check_parts(&known, error);
    if (status == FST_OK) status = fsti_loader_open(model, &known, out, error);
    fsti_free(copy);
    return status;
}

fst_status fst_loader_open(fst_model *model, const fst_load_options *options, fst_loader **out,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_load_options known = FST_STRUCT_INIT(fst_load_options);
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(model != NULL, error, "model is NULL");
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    return open_loader(model, &known, out, error);
}

size_t fst_loader_tensor_count(const fst_loader *loader) {
    return loader == NULL ? 0 : fsti_loader_tensor_count(loader);
}

fst_status fst_loader_wait(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    return fsti_loader_wait(loader, timeout_ms, error);
}

fst_status fst_loader_next(fst_loader *loader, int64_t timeout_ms, fst_tensor **out,
                           fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    return fsti_loader_next(loader, timeout_ms, out, error);
}

fst_status fst_loader_tensor_at(fst_loader *loader, size_t position, int64_t timeout_ms,
                                fst_tensor **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL, error, "loader is NULL");
    API_REQUIRE(position < fsti_loader_tensor_count(loader), error,
                "position %zu is out of range: there are %zu tensors", position,
                fsti_loader_tensor_count(loader));
    return fsti_loader_item(loader, position, timeout_ms, out, error);
}

fst_status fst_loader_tensor(fst_loader *loader, const char *name, size_t name_size,
                             int64_t timeout_ms, fst_tensor **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(loader != NULL && name != NULL, error, "loader or name is NULL");
    if (name_size == SIZE_MAX) name_size = strlen(name);
    return fsti_loader_tensor(loader, name, name_size, timeout_ms, out, error);
}

void fst_loader_cancel(fst_loader *loader) {
    API_DEFER_CANCEL;
    if (loader != NULL) fsti_loader_cancel(loader);
}

void fst_loader_close(fst_loader *loader) {
    API_DEFER_CANCEL;
    fsti_loader_close(loader);
}

fst_status fst_loader_stats_get(const fst_loader *loader, fst_load_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(loader != NULL && stats != NULL, error, "loader or stats is NULL");
    fst_load_stats full = {.struct_size = sizeof full};
    // The handle is const for the caller, but reading the counters locks its mutex.
    FST_TRY(fsti_loader_stats((fst_loader *)(uintptr_t)loader, &full, error));
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_cached_view(fst_model *model, size_t tensor_index, uint64_t begin, uint64_t end,
                           fst_tensor **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(model != NULL, error, "model is NULL");
    API_REQUIRE(tensor_index < fsti_model_entry_count(model), error,
                "tensor index %zu is out of range: there are %zu tensors", tensor_index,
                fsti_model_tensor_count(model));
    return fsti_cached_view(model, tensor_index, begin, end, out, error);
}

fst_status fst_tensor_view_get(const fst_tensor *tensor, fst_tensor_view *out, fst_error *error) {
    API_REQUIRE(tensor != NULL && out != NULL, error, "tensor or out is NULL");
    fst_tensor_view full;
    fsti_tensor_view(tensor, &full);
    full.struct_size = sizeof full;
    return fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

fst_status fst_tensor_read(const fst_tensor *tensor, void *target, size_t size_bytes,
                           fst_error *error) {
    API_DEFER_CANCEL;
    fst_tensor_view view;
    API_REQUIRE(tensor != NULL, error, "tensor is NULL");
    fsti_tensor_view(tensor, &view);
    API_REQUIRE(size_bytes == view.size_bytes, error, "%zu bytes given for a tensor of %llu bytes",
                size_bytes, (unsigned long long)view.size_bytes);
    API_REQUIRE(target != NULL || size_bytes == 0, error, "target is NULL");
    return fsti_tensor_read(tensor, target, error);
}

fst_tensor *fst_tensor_ref(fst_tensor *tensor) { return fsti_tensor_ref(tensor); }

void fst_tensor_unref(fst_tensor *tensor) {
    API_DEFER_CANCEL;
    fsti_tensor_unref(tensor);
}

fst_status fst_engines_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error) {
    API_DEFER_CANCEL;
    API_CHECK_PATH(path, "path", error);
    API_REQUIRE(count != NULL && (infos != NULL || capacity == 0), error, "count or infos is NULL");
    size_t size = capacity == 0 ? sizeof(fst_engine_info) : infos->struct_size;
    FST_TRY(fsti_api_check_size(size, error));
    fst_engine_info *full = fsti_alloc_zeroed(capacity + 1, sizeof *full);
    if (full == NULL) return fsti_error_memory(error, capacity * sizeof *full);
    fst_status status = fsti_loader_probe(path, full, capacity, count, error);
    for (size_t i = 0; status == FST_OK && i < capacity && i < *count; i++)
        status =
            fsti_api_give_struct((char *)infos + i * size, size, &full[i], sizeof full[i], error);
    fsti_free(full);
    return status;
}

const fst_load_counter *fst_load_counters(size_t *count) {
    size_t own;
    return fsti_load_counters(count == NULL ? &own : count);
}
