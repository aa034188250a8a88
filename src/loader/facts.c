// SPDX-License-Identifier: Apache-2.0
/// What loads know before they decide: the request, the machine and the files are asked here, and
/// nowhere else (tools/check_layers.py). What can change nothing is not asked for: of a small load
/// the machine, of views how files are read. What memory or chunks tell is found out on the way.
#include <stdio.h>
#include <string.h>

#include "load.h"

// ---- before the plan ----

bool fsti_loader_has_destinations(const fst_loader *loader) {
    for (size_t i = 0; i < loader->plan.item_count; i++)
        if (loader->wants[i].destination != NULL) return true;
    return false;
}

/// Elements of what is wanted of a tensor. *is_piece: they lie in one piece.
static uint64_t count_elements(const fst_loader *loader, const fsti_plan_want *want,
                               bool *is_piece) {
    const fsti_header *header = loader->headers[want->file];
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    const uint64_t *whole = fsti_header_shape(header, tensor);
    uint64_t count = 1;
    *is_piece = true;
    for (uint32_t d = 0; d < tensor->rank; d++) {
        uint64_t span = whole[d];
        // The plan will refuse what is no range, and what overflows.
        if (want->slice_begin != NULL)
            span = want->slice_end[d] - fsti_min(want->slice_begin[d], want->slice_end[d]);
        // Rows that are not whole lie apart, unless there is but one.
        if (span < whole[d] && count > 1) *is_piece = false;
        if (!fsti_mul(count, span, &count)) return UINT64_MAX;
    }
    return count;
}

static uint64_t add_up_to_most(uint64_t sum, uint64_t more) {
    return sum + fsti_min(more, UINT64_MAX - sum);
}

static uint64_t bytes_of(fst_dtype dtype, uint64_t element_count) {
    uint64_t bits;
    bool fits = fsti_mul(element_count, fsti_dtype_bits(dtype), &bits);
    return fits ? bits / 8 : element_count / 8 * fsti_dtype_bits(dtype);
}

/// Counts the bytes of the request.
static void count_bytes(const fst_loader *loader, fsti_load_facts *out) {
    for (size_t i = 0; i < loader->plan.item_count; i++) {
        const fsti_plan_want *want = &loader->wants[i];
        const fsti_header *header = loader->headers[want->file];
        const fsti_tensor *tensor = &header->tensors[want->tensor];
        fst_dtype dtype = (fst_dtype)tensor->dtype;
        bool is_piece;
        uint64_t count = count_elements(loader, want, &is_piece), bytes = bytes_of(dtype, count);
        bool is_aligned = (header->data_begin + tensor->begin) % fsti_dtype_alignment(dtype) == 0;
        out->bytes = add_up_to_most(out->bytes, bytes);
        out->own_bytes = add_up_to_most(out->own_bytes, bytes_of(want->dtype, count));
        if (!is_piece || !is_aligned) out->apart_bytes = add_up_to_most(out->apart_bytes, bytes);
    }
}

static uint64_t count_model_bytes(const fst_loader *loader) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < loader->model->file_count; i++)
        bytes = add_up_to_most(bytes, fsti_file_size(loader->files[i]));
    return bytes;
}

/// Whether reads are requests to a server, of some files at least.
static bool asks_servers(const fst_loader *loader) {
    for (size_t i = 0; i < loader->model->file_count; i++)
        if (fsti_file_is_object(loader->files[i]) && !fsti_file_is_kept(loader->files[i]))
            return true;
    return false;
}

/// Whether no file is one of the system's, or made of one.
static bool lacks_cache(const fst_loader *loader) {
    for (size_t i = 0; i < loader->model->file_count; i++)
        if (fsti_file_identity(loader->files[i]) >= 0) return false;
    return true;
}

static uint64_t memory_for(uint64_t bytes) {
    return bytes <= FSTI_POLICY_SMALL_BYTES ? UINT64_MAX : fsti_memory_left();
}

uint32_t fsti_loader_processors(fst_loader *loader) {
    if (loader->processor_count == 0) loader->processor_count = fsti_cpu_count();
    return loader->processor_count;
}

void fsti_loader_look(fst_loader *loader) {
    const fst_load_options *options = &loader->options;
    // Tensors of a stream may be read again by several threads: it is known by then.
    if (options->budget_bytes != 0) (void)fsti_loader_processors(loader);
    loader->facts = (fsti_load_facts){.mode = options->mode,
                                      .cache = options->cache,
                                      .engine = options->engine,
                                      .to_device = options->device.kind != FST_DEVICE_CPU,
                                      .has_device = loader->device != NULL,
                                      .locks_memory = loader->locks_memory,
                                      .has_destinations = fsti_loader_has_destinations(loader),
                                      .converts = options->convert != 0,
                                      .has_allocator = options->allocator != NULL,
                                      .in_order = options->order == FST_ORDER_REQUEST,
                                      .gap_bytes = loader->tuning.coalesce_gap_bytes,
                                      .verifies = loader->digests != NULL,
                                      .asks_servers = asks_servers(loader),
                                      .lacks_cache = lacks_cache(loader),
                                      .model_bytes = count_model_bytes(loader)};
    count_bytes(loader, &loader->facts);
    loader->facts.available_bytes =
        memory_for(fsti_max(loader->facts.bytes, loader->facts.own_bytes));
}

void fsti_loader_look_at_file(fsti_file *file, uint64_t model_bytes, fsti_load_facts *out) {
    char why[160];
    *out = (fsti_load_facts){.mode = FST_MODE_AUTO,
                             .view_refused = !fsti_io_engine_mmap.usable(file, why, sizeof why),
                             .asks_servers = fsti_file_is_object(file) && !fsti_file_is_kept(file),
                             .lacks_cache = fsti_file_identity(file) < 0,
                             .bytes = model_bytes,
                             .own_bytes = model_bytes,
                             .model_bytes = model_bytes,
                             .available_bytes = memory_for(model_bytes)};
}

// ---- behind the plan ----

/// A route that nothing is probed for, or is not to be chosen. False: it is.
static bool has_no_choice(fsti_file *file, const load_route_wish *wish, fsti_file_route *out) {
    if (fsti_file_is_object(file)) {
        out->forced = out->resident = &fsti_io_engine_http;
        const char *words = fsti_file_origin_words(file); // of the cache, where there is one
        snprintf(out->reason, sizeof out->reason, "%s%sby range requests (credentials: %s)", words,
                 *words != '\0' ? ", " : "", fsti_file_credentials(file));
        return true;
    }
    bool is_given = fsti_file_identity(file) < 0;
    if (is_given || wish->is_small)
        snprintf(out->reason, sizeof out->reason, "%s",
                 is_given ? "the program gives the bytes"
                          : "small: read at once by the thread that asks");
    return is_given || wish->is_small;
}

fst_status fsti_loader_find_route(fsti_file *file, const load_route_wish *wish,
                                  fsti_file_route *out, fst_error *error) {
    const fsti_io_wish io_wish = {wish->guard_allowed, wish->buffer_bytes};
    *out = (fsti_file_route){.resident = &fsti_io_engine_pread, .absent = FSTI_ROUTE_CACHE};
    if (wish->engine != FST_ENGINE_AUTO) {
        FST_TRY(fsti_io_check_forced(file, wish->engine, &io_wish, &out->forced, error));
        out->resident = out->forced;
        snprintf(out->reason, sizeof out->reason, "%s was asked for", out->forced->name);
        return FST_OK;
    }
    bool clears = wish->clears_cache;
    if (!has_no_choice(file, wish, out)) {
        fsti_io_facts io;
        fsti_io_probe(file, &io_wish, &io);
        out->is_cached = wish->keeps_cache && fsti_file_is_cached(file);
        // File systems with ways of their own are read, as large reads as can be.
        fsti_route_facts facts = {.has_direct = io.has_direct,
                                  .has_ring = io.has_ring,
                                  .copies_mapping = io.copies_mapping && !out->is_cached,
                                  .keeps_cache = wish->keeps_cache};
        fsti_route absent = fsti_policy_route(&facts);
        atomic_init(&out->absent, absent);
        if (io.copies_mapping) out->resident = &fsti_io_engine_mmap;
        clears = clears && absent == FSTI_ROUTE_CACHE;
        snprintf(
            out->reason, sizeof out->reason, "absent chunks by %s%s (%.120s), cached chunks %s",
            fsti_route_reader(absent)->name, clears ? ", then dropped from the page cache" : "",
            wish->keeps_cache ? "so that they stay in the page cache" : io.absent_reason,
            io.resident_reason);
    }
    // What the kernel reads beyond a range nobody would drop.
    if (clears && out->forced == NULL) fsti_file_expect_jumps(file);
    return FST_OK;
}

/// What buffers take of the address space: of all batches, or of as many as a budget lets in; with
/// what their alignment costs.
static uint64_t find_buffer_bytes(const fst_loader *loader, const fsti_plan *plan, bool is_view) {
    uint64_t bytes = 0, budget = loader->facts.budget_bytes;
    for (size_t i = 0; i < plan->batch_count && !is_view; i++) {
        const fsti_plan_batch *batch = &plan->batches[i];
        if (!fsti_add(bytes, batch->buffer_bytes, &bytes) ||
            !fsti_add(bytes, batch->item_bytes + 2 * FSTI_HUGE_PAGE_BYTES, &bytes))
            return UINT64_MAX; // there is no such memory
    }
    return budget == 0 ? bytes : fsti_min(bytes, budget);
}

/// How the files of a plan whose bytes go to memory are read.
static load_route_wish wish_of(const fst_loader *loader, const fsti_plan *plan) {
    const fst_load_options *options = &loader->options;
    // What is verified is read, so that nobody can change it between its digest and its use; and
    // slots are filled by read calls: of a mapping every chunk's pages have to be found and given
    // back, while other threads do the same (docs/gpu.md has the figures).
    bool to_slots = loader->device != NULL && !loader->locks_memory;
    return (load_route_wish){
        .engine = options->engine,
        .guard_allowed = options->no_sigbus_guard == 0 && !to_slots && loader->digests == NULL,
        .keeps_cache = loader->policy.keeps_cache,
        .clears_cache = loader->policy.clears_cache,
        .is_small = !loader->policy.clears_cache &&
                    fsti_policy_is_small(plan->bytes_planned, loader->facts.budget_bytes != 0),
        .buffer_bytes = find_buffer_bytes(loader, plan, false)};
}

/// Of file systems that always answer by way of their cache views come through the kernel's window;
/// what is small is not worth more of it.
#define STREAM_BYTES_MIN ((uint64_t)16 << 20)

static void look_at_view(const fst_loader *loader, const fsti_plan_extent *extent,
                         fsti_file_route *route) {
    fsti_file *file = loader->files[extent->file];
    route->is_cached = fsti_file_is_cached(file);
    if (route->is_cached && loader->policy.keeps_cache &&
        extent->end - extent->begin >= STREAM_BYTES_MIN)
        fsti_file_expect_stream(file);
}

/// Facts for the number of threads; where the address space is limited, buffers will take theirs.
static void look_for_threads(fst_loader *loader, const fsti_plan *plan, bool is_view,
                             load_ways *out) {
    fsti_thread_facts *facts = &out->threads;
    *facts = (fsti_thread_facts){.wanted = loader->rooms.thread_count,
                                 .verifies = loader->digests != NULL,
                                 .chunk_count = plan->chunk_count};
    for (size_t i = 0; i < plan->extent_count && !is_view; i++) {
        const fsti_io_engine *engine =
            fsti_route_engine(&out->routes[plan->extents[i].file], false);
        facts->any_ring |= engine->is_async;
        facts->any_blocking |= !engine->is_async && !engine->is_mapped;
    }
    if (facts->wanted == 0 && plan->chunk_count > 1)
        facts->processor_count = fsti_loader_processors(loader);
    uint64_t left = fsti_address_space_left();
    facts->is_limited = left != UINT64_MAX;
    if (facts->is_limited)
        facts->address_bytes = left - fsti_min(left, find_buffer_bytes(loader, plan, is_view));
}

fst_status fsti_loader_find_ways(fst_loader *loader, const fsti_plan *plan, bool is_view,
                                 load_ways *out, fst_error *error) {
    size_t count = loader->model->file_count;
    const load_route_wish wish = wish_of(loader, plan);
    *out = (load_ways){.routes = fsti_alloc_zeroed(count, sizeof *out->routes)};
    if (out->routes == NULL) return fsti_error_memory(error, count * sizeof *out->routes);
    for (size_t i = 0; i < plan->extent_count; i++) {
        uint32_t file = plan->extents[i].file;
        fsti_file_route *route = &out->routes[file];
        if (is_view)
            look_at_view(loader, &plan->extents[i], route);
        else if (route->resident == NULL)
            FST_TRY(fsti_loader_find_route(loader->files[file], &wish, route, error));
    }
    look_for_threads(loader, plan, is_view, out);
    return FST_OK;
}
