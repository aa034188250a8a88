// SPDX-License-Identifier: Apache-2.0
/// Gathers the facts for the policy: request, machine and files are queried here and nowhere else
/// (tools/check_layers.py). Facts that cannot change the decision are not queried: the machine for
/// small loads, engines for views. Memory and residency are determined during the load.
#include <stdio.h>
#include <string.h>

#include "load.h"

// ---- before planning ----

bool fsti_loader_has_destinations(const fst_loader *loader) {
    for (size_t i = 0; i < loader->plan.item_count; i++)
        if (loader->wants[i].destination != NULL) return true;
    return false;
}

/// The number of elements of a request. *is_contiguous: they are contiguous.
static uint64_t count_elements(const fst_loader *loader, const fsti_plan_want *want,
                               bool *is_contiguous) {
    const fsti_header *header = loader->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    const uint64_t *full_shape = fsti_header_shape(header, tensor);
    uint64_t count = 1;
    *is_contiguous = true;
    for (uint32_t d = 0; d < tensor->rank; d++) {
        uint64_t span = full_shape[d];
        // The plan will refuse invalid ranges and overflows.
        if (want->slice_begin != NULL)
            span = want->slice_end[d] - fsti_min(want->slice_begin[d], want->slice_end[d]);
        // Incomplete rows are separate pieces, unless there is only one.
        if (span < full_shape[d] && count > 1) *is_contiguous = false;
        if (!fsti_mul(count, span, &count)) return UINT64_MAX;
    }
    return count;
}

static uint64_t add_saturating(uint64_t sum, uint64_t more) {
    return sum + fsti_min(more, UINT64_MAX - sum);
}

static uint64_t bytes_of(fst_dtype dtype, uint64_t element_count) {
    uint64_t bits;
    bool fits = fsti_mul(element_count, fsti_dtype_bits(dtype), &bits);
    return fits ? bits / 8 : element_count / 8 * fsti_dtype_bits(dtype);
}

/// Bytes in the file, and of the loaded tensor.
typedef struct request_bytes {
    uint64_t stored, loaded;
    bool is_contiguous;
} request_bytes;

static request_bytes measure_request(const fst_loader *loader, const fsti_plan_want *want) {
    const fsti_tensor *tensor = &loader->files[want->file].header->tensors[want->tensor];
    fst_dtype dtype = (fst_dtype)tensor->dtype;
    request_bytes out = {.stored = tensor->end - tensor->begin, .is_contiguous = true};
    out.loaded = out.stored;
    // The common request, of which a model can have very many: the header has its size.
    if (want->slice_begin == NULL && want->dtype == dtype) return out;
    uint64_t count = count_elements(loader, want, &out.is_contiguous);
    out.stored = bytes_of(dtype, count);
    out.loaded = bytes_of(want->dtype, count);
    return out;
}

/// Counts the bytes of the request.
static void count_bytes(const fst_loader *loader, fsti_load_facts *out) {
    for (size_t i = 0; i < loader->plan.item_count; i++) {
        const fsti_plan_want *want = &loader->wants[i];
        const fsti_header *header = loader->files[want->file].header;
        const fsti_tensor *tensor = &header->tensors[want->tensor];
        fst_dtype dtype = (fst_dtype)tensor->dtype;
        request_bytes bytes = measure_request(loader, want);
        bool is_aligned = (header->data_begin + tensor->begin) % fsti_dtype_alignment(dtype) == 0;
        out->bytes = add_saturating(out->bytes, bytes.stored);
        out->loaded_bytes = add_saturating(out->loaded_bytes, bytes.loaded);
        if (!bytes.is_contiguous) {
            out->scattered_bytes = add_saturating(out->scattered_bytes, bytes.stored);
            out->spanned_bytes = add_saturating(out->spanned_bytes, tensor->end - tensor->begin);
        }
        if (!bytes.is_contiguous || !is_aligned)
            out->unmappable_bytes = add_saturating(out->unmappable_bytes, bytes.stored);
    }
}

static uint64_t count_model_bytes(const fst_loader *loader) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < loader->model->file_count; i++)
        bytes = add_saturating(bytes, fsti_file_size(loader->files[i].file));
    return bytes;
}

/// Whether some files are read by requests to a server.
static bool is_remote(const fst_loader *loader) {
    for (size_t i = 0; i < loader->model->file_count; i++)
        if (fsti_file_is_object(loader->files[i].file) &&
            !fsti_file_is_disk_cached(loader->files[i].file))
            return true;
    return false;
}

/// Whether the page cache holds none of the files: servers or the program supply their bytes.
static bool lacks_cache(const fst_loader *loader) {
    for (size_t i = 0; i < loader->model->file_count; i++)
        if (fsti_file_identity(loader->files[i].file) >= 0) return false;
    return true;
}

static uint64_t find_available_memory(uint64_t bytes) {
    return bytes <= FSTI_POLICY_SMALL_BYTES ? UINT64_MAX : fsti_memory_left();
}

uint32_t fsti_loader_processors(fst_loader *loader) {
    if (loader->processor_count == 0) loader->processor_count = fsti_cpu_count();
    return loader->processor_count;
}

void fsti_loader_gather_facts(fst_loader *loader) {
    const fst_load_options *options = &loader->options;
    // Several threads may read tensors of a stream again, so determine the CPU count now.
    if (options->budget_bytes != 0) (void)fsti_loader_processors(loader);
    loader->facts = (fsti_load_facts){.mode = options->mode,
                                      .cache = options->cache,
                                      .engine = loader->tuning.engine,
                                      .to_device = options->device.kind != FST_DEVICE_CPU,
                                      .has_device = loader->device != NULL,
                                      .pins_memory = loader->pins_memory,
                                      .has_destinations = fsti_loader_has_destinations(loader),
                                      .converts = options->convert != 0,
                                      .has_allocator = options->allocator != NULL,
                                      .in_order = options->order == FST_ORDER_REQUEST,
                                      .gap_bytes = loader->tuning.coalesce_gap_bytes,
                                      .verifies = loader->verifies,
                                      .is_remote = is_remote(loader),
                                      .lacks_cache = lacks_cache(loader),
                                      .model_bytes = count_model_bytes(loader)};
    count_bytes(loader, &loader->facts);
    uint64_t bytes = fsti_max(loader->facts.bytes, loader->facts.loaded_bytes);
    loader->facts.available_bytes =
        find_available_memory(fsti_max(bytes, loader->facts.spanned_bytes));
}

void fsti_loader_file_facts(fsti_file *file, uint64_t model_bytes, fsti_load_facts *out) {
    char why[160];
    *out =
        (fsti_load_facts){.mode = FST_MODE_AUTO,
                          .view_refused = !fsti_io_engine_mmap.usable(file, why, sizeof why),
                          .is_remote = fsti_file_is_object(file) && !fsti_file_is_disk_cached(file),
                          .lacks_cache = fsti_file_identity(file) < 0,
                          .bytes = model_bytes,
                          .loaded_bytes = model_bytes,
                          .model_bytes = model_bytes,
                          .available_bytes = find_available_memory(model_bytes)};
}

// ---- after planning ----

/// A route without a choice: forced, or not worth probing. False if there is a choice.
static bool is_route_given(fsti_file *file, const load_route_request *request,
                           fsti_file_route *out) {
    if (fsti_file_is_object(file)) {
        out->forced = out->resident = &fsti_io_engine_http;
        const char *words = fsti_file_origin_text(file); // of the disk cache, if it is used
        snprintf(out->reason, sizeof out->reason, "%s%sby range requests (credentials: %s)", words,
                 *words != '\0' ? ", " : "", fsti_file_credentials(file));
        return true;
    }
    bool is_given = fsti_file_identity(file) < 0;
    if (is_given || request->is_small)
        snprintf(out->reason, sizeof out->reason, "%s",
                 is_given ? "the program supplies the bytes" : "small: read by the calling thread");
    return is_given || request->is_small;
}

fst_status fsti_loader_find_route(fsti_file *file, const load_route_request *request,
                                  fsti_file_route *out, fst_error *error) {
    const fsti_io_request io_request = {request->no_mapping, request->buffer_bytes};
    *out = (fsti_file_route){.resident = &fsti_io_engine_pread, .absent = FSTI_ROUTE_CACHE};
    if (request->engine != FST_ENGINE_AUTO) {
        FST_TRY(fsti_io_check_forced(file, request->engine, &io_request, &out->forced, error));
        out->resident = out->forced;
        snprintf(out->reason, sizeof out->reason, "%s was requested", out->forced->name);
        return FST_OK;
    }
    bool clears = request->clears_cache;
    bool keeps = request->keeps_cache;
    if (!is_route_given(file, request, out)) {
        fsti_io_facts io;
        fsti_io_probe(file, &io_request, &io);
        keeps = keeps && (request->must_keep_cache || !fsti_file_loses_cache(file));
        out->has_own_readahead = keeps && fsti_file_has_own_readahead(file);
        // File systems with their own readahead get large reads. More threads than rings can wait.
        fsti_route_facts facts = {.has_direct = io.has_direct,
                                  .has_ring = io.has_ring && !fsti_file_is_distant(file),
                                  .copies_mapping = io.copies_mapping && !out->has_own_readahead,
                                  .keeps_cache = keeps};
        fsti_route absent = fsti_policy_route(&facts);
        atomic_init(&out->absent, absent);
        if (io.copies_mapping) out->resident = &fsti_io_engine_mmap;
        clears = clears && absent == FSTI_ROUTE_CACHE;
        const char *reader = fsti_route_reader(absent)->name;
        if (request->keeps_cache && !keeps)
            snprintf(out->reason, sizeof out->reason,
                     "but uncached chunks by %s (the file system drops cached pages at each open), "
                     "cached chunks %s",
                     reader, io.resident_reason);
        else
            snprintf(out->reason, sizeof out->reason,
                     "uncached chunks by %s%s (%.120s), cached chunks %s", reader,
                     clears ? ", then dropped from the page cache" : "",
                     keeps ? "and kept in the page cache" : io.absent_reason, io.resident_reason);
    }
    // Readahead beyond a range would not be dropped.
    if (clears && out->forced == NULL) fsti_file_advise_random(file);
    return FST_OK;
}

/// Address space for buffers, including alignment: of all batches, or of as many as the budget
/// admits.
static uint64_t find_buffer_bytes(const fst_loader *loader, const fsti_plan *plan, bool is_view) {
    uint64_t bytes = 0, budget = loader->facts.budget_bytes;
    for (size_t i = 0; i < plan->batch_count && !is_view; i++) {
        const fsti_plan_batch *batch = &plan->batches[i];
        if (!fsti_add(bytes, batch->buffer_bytes, &bytes) ||
            !fsti_add(bytes, batch->item_bytes + 2 * FSTI_HUGE_PAGE_BYTES, &bytes))
            return UINT64_MAX; // no such memory exists
    }
    return budget == 0 ? bytes : fsti_min(bytes, budget);
}

/// Why a load must not copy from a mapping of the file; NULL if it may.
static const char *find_mapping_obstacle(const fst_loader *loader) {
    // For a mapping, each chunk's pages would be mapped and unmapped while other threads do the
    // same.
    if (loader->device != NULL && !loader->pins_memory)
        return "staging buffers are filled by reads";
    // So that nothing can change the bytes between digest and use.
    if (loader->verifies) return "verified bytes are read";
    return loader->tuning.keep_sigbus_handler != 0 ? "no SIGBUS guard" : NULL;
}

/// How to read the files of a plan into memory.
static load_route_request request_for(const fst_loader *loader, const fsti_plan *plan) {
    return (load_route_request){
        .engine = loader->tuning.engine,
        .no_mapping = find_mapping_obstacle(loader),
        .keeps_cache = loader->policy.keeps_cache,
        .must_keep_cache = loader->options.cache == FST_CACHE_KEEP,
        .clears_cache = loader->policy.clears_cache,
        .is_small = !loader->policy.clears_cache &&
                    fsti_policy_is_small(plan->bytes_planned, loader->facts.budget_bytes != 0),
        .buffer_bytes = find_buffer_bytes(loader, plan, false)};
}

/// On network and user-space file systems, views use the kernel's readahead; below this size a
/// larger window does not pay off.
#define STREAM_BYTES_MIN ((uint64_t)16 << 20)

static void check_view_residency(const fst_loader *loader, const fsti_plan_extent *extent,
                                 fsti_file_route *route) {
    fsti_file *file = loader->files[extent->file].file;
    route->has_own_readahead = fsti_file_has_own_readahead(file);
    if (route->has_own_readahead && loader->policy.keeps_cache &&
        extent->end - extent->begin >= STREAM_BYTES_MIN)
        fsti_file_advise_sequential(file);
}

/// Whether page faults may read the absent bytes of a file, if its file system answers slowly. The
/// mapping for that must not take address space from buffers.
static bool may_fault(const fst_loader *loader, uint32_t file, bool is_view,
                      const fsti_file_route *route) {
    if (!route->has_own_readahead || !loader->policy.keeps_cache) return false;
    if (!fsti_file_is_distant(loader->files[file].file)) return false;
    return is_view || (atomic_load(&route->absent) == FSTI_ROUTE_CACHE && route->forced == NULL &&
                       fsti_address_space_left() == UINT64_MAX);
}

/// Facts for the number of threads. If address space is limited, buffers reserve theirs first.
static void probe_threads(fst_loader *loader, const fsti_plan *plan, bool is_view,
                          load_methods *out) {
    fsti_thread_facts *facts = &out->threads;
    *facts = (fsti_thread_facts){.wanted = loader->workspaces.thread_count,
                                 .to_device = loader->device != NULL && !loader->pins_memory,
                                 .verifies = loader->verifies,
                                 .chunk_count = plan->chunk_count};
    for (size_t i = 0; i < plan->extent_count; i++) {
        uint32_t file = plan->extents[i].file;
        bool is_same = i > 0 && plan->extents[i - 1].file == file;
        if (!is_same && !facts->any_distant)
            facts->any_distant = fsti_file_is_distant(loader->files[file].file);
        if (is_view) continue;
        const fsti_io_engine *engine = fsti_route_engine(&out->routes[file], false);
        facts->any_async |= engine->is_async;
        facts->any_blocking |= !engine->is_async && !engine->is_mapped;
    }
    if (facts->wanted == 0 && plan->chunk_count > 1)
        facts->processor_count = fsti_loader_processors(loader);
    uint64_t left = fsti_address_space_left();
    facts->is_limited = left != UINT64_MAX;
    if (facts->is_limited)
        facts->address_bytes = left - fsti_min(left, find_buffer_bytes(loader, plan, is_view));
}

fst_status fsti_loader_find_methods(fst_loader *loader, const fsti_plan *plan, bool is_view,
                                    load_methods *out, fst_error *error) {
    size_t count = loader->model->file_count;
    const load_route_request request = request_for(loader, plan);
    *out = (load_methods){.routes = fsti_alloc_zeroed(count, sizeof *out->routes)};
    if (out->routes == NULL) return fsti_error_memory(error, count * sizeof *out->routes);
    for (size_t i = 0; i < plan->extent_count; i++) {
        uint32_t file = plan->extents[i].file;
        fsti_file_route *route = &out->routes[file];
        if (is_view)
            check_view_residency(loader, &plan->extents[i], route);
        else if (route->resident == NULL)
            FST_TRY(fsti_loader_find_route(loader->files[file].file, &request, route, error));
        if (may_fault(loader, file, is_view, route))
            atomic_init(&route->faults, FSTI_FAULTS_UNKNOWN);
    }
    for (size_t i = 0; is_view && i < plan->chunk_count; i++)
        atomic_fetch_add(&out->routes[plan->extents[plan->chunks[i].extent].file].views_left, 1);
    probe_threads(loader, plan, is_view, out);
    return FST_OK;
}

bool fsti_loader_can_map_twice(const fst_loader *loader) {
    uint64_t left = fsti_address_space_left(), bytes = 0;
    for (size_t i = 0; i < loader->plan.batch_count; i++)
        bytes += loader->plan.batches[i].buffer_bytes;
    return left == UINT64_MAX || bytes <= left / 2;
}
