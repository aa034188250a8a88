// SPDX-License-Identifier: Apache-2.0
/// A load from request to tensors: mode, plan, pipeline, and the ways to get at what arrives.
#include "load.h"

#include <stdio.h>
#include <string.h>

/// Locked memory that loads to a GPU go through: enough to keep its bus busy.
#define RING_BYTES ((uint64_t)64 << 20)

/// Opens the device that tensors go to.
static fst_status choose_device(fst_loader *loader, fst_error *error) {
    const fst_load_options *options = &loader->options;
    loader->device_id = options->device;
    if (options->device.kind == FST_DEVICE_CPU) return FST_OK;
    FST_TRY(fsti_device_get(options->device, &loader->device, error));
    fst_unified unified = loader->tuning.unified;
    bool shares = unified == FST_UNIFIED_ON ||
                  (unified == FST_UNIFIED_AUTO && fsti_device_shares(loader->device));
    bool is_pinned = options->device.kind == FST_DEVICE_PINNED;
    if (!is_pinned) loader->device_id = fsti_device_id(loader->device);
    loader->device_id.index = loader->device_id.index < 0 ? 0 : loader->device_id.index;
    // Memory of the caller's is filled the way that its kind needs.
    loader->locks_memory = options->allocator == NULL && !fsti_loader_has_destinations(loader) &&
                           (is_pinned || shares);
    if (is_pinned && !loader->locks_memory) loader->device = NULL;
    return FST_OK;
}

static void choose_policy(fst_loader *loader) {
    fsti_policy_choose(&loader->facts, &loader->policy);
    loader->mode = loader->policy.mode;
}

/// The size of what digests are of, the same in all files; 0: there are none.
static uint32_t verify_bytes(const fst_loader *loader) {
    uint32_t bytes = 0;
    for (size_t i = 0; loader->digests != NULL && i < loader->model->file_count; i++)
        if (loader->digests[i]->kind != NULL) bytes = loader->digests[i]->chunk_bytes;
    return bytes;
}

static fst_status plan_wants(const fst_loader *loader, const fsti_plan_want *wants, size_t count,
                             fsti_plan *out, fst_error *error) {
    const fst_load_options *options = &loader->options;
    fsti_plan_rules rules = {.order = options->order,
                             .batch_bytes_max = loader->policy.batch_bytes_max,
                             .gaps = loader->policy.gaps,
                             .chunk_bytes_max =
                                 loader->device != NULL ? FSTI_RING_CHUNK_BYTES_MAX : 0,
                             .to_device = loader->device != NULL,
                             .is_view = loader->mode == FST_MODE_MAP,
                             .verify_bytes = verify_bytes(loader),
                             .file_bytes = loader->file_bytes,
                             .made_bytes = loader->made_bytes};
    return fsti_plan_make(loader->headers, wants, count, &rules, out, error);
}

static fst_status make_plan(fst_loader *loader, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(plan_wants(loader, loader->wants, loader->plan.item_count, &loader->plan, error));
    loader->plan_ns = fsti_now_ns() - start_ns;
    return fsti_loader_check_budget(loader, error);
}

static fst_status list_files(fst_loader *loader, fst_error *error) {
    const fst_model *model = loader->model;
    size_t count = model->file_count;
    loader->headers = fsti_alloc_zeroed(count, sizeof *loader->headers);
    loader->files = fsti_alloc_zeroed(count, sizeof *loader->files);
    loader->made_bytes = fsti_alloc_zeroed(count, sizeof *loader->made_bytes);
    if (loader->headers == NULL || loader->files == NULL || loader->made_bytes == NULL)
        return fsti_error_memory(error, count * sizeof *loader->files);
    for (size_t i = 0; i < count; i++) {
        loader->headers[i] = model->files[i].header;
        loader->files[i] = model->files[i].file;
        if (model->files[i].packed != NULL)
            loader->made_bytes[i] = fsti_packed_chunk_bytes(model->files[i].packed);
    }
    return FST_OK;
}

/// Notes what each file is held against; all are, or none is.
static fst_status list_digests(fst_loader *loader, fst_error *error) {
    const fst_model *model = loader->model;
    if (model->verification == NULL) return FST_OK;
    loader->digests = fsti_alloc_zeroed(model->file_count, sizeof *loader->digests);
    loader->file_bytes = fsti_alloc_zeroed(model->file_count, sizeof *loader->file_bytes);
    if (loader->digests == NULL || loader->file_bytes == NULL)
        return fsti_error_memory(error, model->file_count * sizeof *loader->digests);
    bool any = false;
    for (size_t i = 0; i < model->file_count; i++) {
        loader->digests[i] = &model->files[i].digests;
        loader->file_bytes[i] = fsti_file_size(model->files[i].file);
        any |= model->files[i].digests.kind != NULL;
    }
    if (any) return FST_OK;
    // Compressed files alone: their stored bytes are held against digests as they are read.
    fsti_free(loader->digests);
    loader->digests = NULL;
    return FST_OK;
}

/// Views of the files that the request touches.
static fst_status make_views(fst_loader *loader, fst_error *error) {
    size_t count = loader->model->file_count;
    if (loader->mode != FST_MODE_MAP) return FST_OK;
    loader->views = fsti_alloc_zeroed(count, sizeof *loader->views);
    loader->mappings = fsti_alloc_zeroed(count, sizeof *loader->mappings);
    if (loader->views == NULL || loader->mappings == NULL)
        return fsti_error_memory(error, count * sizeof *loader->views);
    bool writable = loader->options.map_read_only == 0;
    for (size_t i = 0; i < loader->plan.extent_count; i++) {
        uint32_t file = loader->plan.extents[i].file;
        if (loader->views[file] != NULL) continue;
        FST_TRY(fsti_file_check(loader->files[file], error));
        FST_TRY(fsti_model_mapping(loader->model, file, writable, &loader->views[file], error));
        loader->mappings[file] = loader->views[file]->data;
    }
    return FST_OK;
}

static void drop_views(fst_loader *loader) {
    if (loader->views != NULL)
        for (size_t i = 0; i < loader->model->file_count; i++) fsti_buffer_unref(loader->views[i]);
    fsti_free(loader->views);
    fsti_free(loader->mappings);
    loader->views = NULL;
    loader->mappings = NULL;
}

/// The plan, and the views if these are wanted. Where the system refuses to map (limits of address
/// space or of promised memory), a request that left the choice to us is loaded.
static fst_status plan_load(fst_loader *loader, fst_error *error) {
    fst_error cause;
    size_t count = loader->plan.item_count;
    FST_TRY(make_plan(loader, error));
    fst_status status = make_views(loader, &cause);
    if (status == FST_OK) return FST_OK;
    if (loader->options.mode == FST_MODE_AUTO && status != FST_E_FILE_CHANGED) {
        drop_views(loader);
        fsti_plan_clear(&loader->plan);
        loader->plan.item_count = count;
        loader->facts.view_refused = true;
        choose_policy(loader);
        return make_plan(loader, error);
    }
    if (error != NULL) *error = cause;
    return status;
}

/// A budget that is smaller than the ring's default makes the ring smaller, too.
static uint64_t ring_bytes(const fst_loader *loader) {
    uint64_t bytes = loader->tuning.staging_bytes, budget = loader->facts.budget_bytes;
    if (bytes == 0) bytes = RING_BYTES;
    if (budget != 0) bytes = fsti_min(bytes, budget / 4);
    return fsti_min(bytes, RING_BYTES);
}

static fsti_job job_of(const fst_loader *loader, const fsti_plan *plan, const load_ways *ways) {
    const fst_load_options *options = &loader->options;
    return (fsti_job){.plan = plan,
                      .routes = ways->routes,
                      .threads = ways->threads,
                      .policy = &loader->policy,
                      .headers = loader->headers,
                      .files = loader->files,
                      .digests = loader->digests,
                      .mappings = loader->mappings,
                      .populate = options->map_populate != 0,
                      .allocator = options->allocator,
                      .device = loader->device,
                      .locks_memory = loader->locks_memory,
                      .stream = options->stream,
                      .ring_bytes = ring_bytes(loader),
                      // What goes straight to a device passes no processor that could digest it.
                      .gds = loader->digests == NULL ? options->gds : FST_GDS_OFF,
                      .ring = loader->tuning.ring,
                      .numa = loader->tuning.numa,
                      .budget_bytes = loader->facts.budget_bytes,
                      .room_bytes = loader->rooms.bytes,
                      .guard_allowed = options->no_sigbus_guard == 0,
                      .progress = options->progress,
                      .progress_context = options->progress_context};
}

fst_status fsti_loader_open(fst_model *model, const fst_load_options *options, fst_loader **out,
                            fst_error *error) {
    fst_loader *loader = fsti_alloc_zeroed(1, sizeof *loader);
    if (loader == NULL) return fsti_error_memory(error, sizeof *loader);
    pthread_mutex_init(&loader->lock, NULL);
    loader->model = fsti_model_ref(model);
    loader->options = *options;
    loader->tuning = *options->tuning;
    loader->options.tuning = &loader->tuning;
    if (options->allocator != NULL) {
        loader->allocator = *options->allocator;
        loader->options.allocator = &loader->allocator;
    }
    fst_status status = list_files(loader, error);
    if (status == FST_OK) status = list_digests(loader, error);
    if (status == FST_OK) status = fsti_loader_resolve(loader, options, error);
    if (status == FST_OK && loader->digests != NULL)
        status = fsti_loader_check_verified(loader, error);
    if (status == FST_OK) status = choose_device(loader, error);
    if (status == FST_OK) {
        fsti_loader_look(loader);
        fsti_loader_share_budget(loader);
        choose_policy(loader);
        status = plan_load(loader, error);
    }
    if (status == FST_OK)
        status = fsti_loader_find_ways(loader, &loader->plan, &loader->ways, error);
    fsti_job job = job_of(loader, &loader->plan, &loader->ways);
    if (status == FST_OK) status = fsti_pipeline_open(&job, &loader->pipeline, error);
    if (status != FST_OK) {
        fsti_loader_close(loader);
        return status;
    }
    *out = loader;
    return FST_OK;
}

void fsti_loader_close(fst_loader *loader) {
    if (loader == NULL) return;
    fsti_pipeline_close(loader->pipeline);
    fsti_free(loader->ways.routes);
    drop_views(loader);
    fsti_plan_clear(&loader->plan);
    fsti_free(loader->wants);
    fsti_free(loader->slices);
    fsti_free(loader->item_of_tensor);
    fsti_free(loader->headers);
    fsti_free(loader->files);
    fsti_free(loader->digests);
    fsti_free(loader->file_bytes);
    fsti_free(loader->made_bytes);
    fsti_model_unref(loader->model);
    pthread_mutex_destroy(&loader->lock);
    fsti_free(loader);
}

size_t fsti_loader_tensor_count(const fst_loader *loader) { return loader->plan.item_count; }

void fsti_loader_cancel(fst_loader *loader) {
    if (fsti_pipeline_check_owner(loader->pipeline, NULL) != FST_OK) return; // nothing runs here
    fsti_pipeline_cancel(loader->pipeline);
    pthread_mutex_lock(&loader->lock);
    if (loader->reload != NULL) fsti_pipeline_cancel(loader->reload);
    pthread_mutex_unlock(&loader->lock);
}

/// Waits for chunks and keeps the time of it.
static fst_status wait_chunks(fst_loader *loader, uint32_t first, uint32_t end, int64_t timeout_ms,
                              fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_pipeline_wait(loader->pipeline, first, end, timeout_ms, error);
    uint64_t waited_ns = fsti_now_ns() - start_ns;
    pthread_mutex_lock(&loader->lock);
    loader->wait_ns += waited_ns;
    pthread_mutex_unlock(&loader->lock);
    return status;
}

fst_status fsti_loader_wait(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    if (loader->options.budget_bytes != 0)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE,
                              "a load with a budget is finished by fst_loader_next()");
    return wait_chunks(loader, 0, (uint32_t)loader->plan.chunk_count, timeout_ms, error);
}

/// A view waits for what is brought into the page cache on its behalf; else it is there at once.
static fst_status wait_item(fst_loader *loader, const fsti_plan_item *item, int64_t timeout_ms,
                            fst_error *error) {
    if (item->size_bytes == 0) return FST_OK;
    return wait_chunks(loader, item->chunk_first, item->chunk_end, timeout_ms, error);
}

/// Lets go of batches that have been handed out whole. The lock is held.
static void release_delivered(fst_loader *loader) {
    const fsti_plan *plan = &loader->plan;
    if (loader->options.budget_bytes == 0) return; // kept for access by name
    while (loader->next_batch < plan->batch_count) {
        const fsti_plan_batch *batch = &plan->batches[loader->next_batch];
        if (loader->next_delivery < batch->delivery_first + batch->delivery_count) return;
        fsti_pipeline_release(loader->pipeline, loader->next_batch++);
    }
}

static fst_status make_tensor(fst_loader *loader, uint32_t item_index, fsti_buffer *buffer,
                              fst_tensor **out, fst_error *error) {
    tensor_source source = {.plan = &loader->plan,
                            .item = &loader->plan.items[item_index],
                            .want = &loader->wants[item_index],
                            .buffer = buffer};
    return fsti_tensor_make(loader, &source, out, error);
}

fst_status fsti_loader_next(fst_loader *loader, int64_t timeout_ms, fst_tensor **out,
                            fst_error *error) {
    const fsti_plan *plan = &loader->plan;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    pthread_mutex_lock(&loader->lock);
    size_t position = loader->next_delivery;
    pthread_mutex_unlock(&loader->lock);
    if (position >= plan->item_count) return FST_END;
    uint32_t item_index = plan->delivery[position];
    const fsti_plan_item *item = &plan->items[item_index];
    FST_TRY(wait_item(loader, item, timeout_ms, error));
    fsti_buffer *buffer;
    fsti_pipeline_buffer(loader->pipeline, item->batch, &buffer);
    fst_status status = make_tensor(loader, item_index, buffer, out, error);
    fsti_buffer_unref(buffer);
    FST_TRY(status);
    pthread_mutex_lock(&loader->lock);
    loader->next_delivery = position + 1;
    release_delivered(loader);
    pthread_mutex_unlock(&loader->lock);
    return FST_OK;
}

/// Makes `pipeline` the one that cancelling the load reaches, too (NULL: none). FST_E_CANCELLED
/// when that has happened already.
static fst_status set_reload(fst_loader *loader, fsti_pipeline *pipeline, fst_error *error) {
    pthread_mutex_lock(&loader->lock);
    loader->reload = pipeline;
    pthread_mutex_unlock(&loader->lock);
    bool cancelled = pipeline != NULL && fsti_pipeline_cancelled(loader->pipeline, error);
    return cancelled ? FST_E_CANCELLED : FST_OK;
}

/// Carries out a plan of one item: the same work as the load's, beside it.
static fst_status run_reload(fst_loader *loader, const fsti_plan_want *want, const fsti_plan *plan,
                             int64_t timeout_ms, fst_tensor **out, fst_error *error) {
    load_ways ways;
    fst_status status = fsti_loader_find_ways(loader, plan, &ways, error);
    fsti_job job = job_of(loader, plan, &ways);
    job.budget_bytes = 0;
    job.progress = NULL;
    fsti_pipeline *pipeline = NULL;
    if (status == FST_OK) status = fsti_pipeline_open(&job, &pipeline, error);
    if (status == FST_OK) status = set_reload(loader, pipeline, error);
    if (status == FST_OK)
        status = fsti_pipeline_wait(pipeline, 0, (uint32_t)plan->chunk_count, timeout_ms, error);
    tensor_source source = {.plan = plan, .item = plan->items, .want = want};
    if (status == FST_OK) {
        fsti_pipeline_buffer(pipeline, 0, &source.buffer);
        status = fsti_tensor_make(loader, &source, out, error);
    }
    fsti_buffer_unref(source.buffer);
    (void)set_reload(loader, NULL, NULL);
    fsti_pipeline_close(pipeline);
    fsti_free(ways.routes);
    return status;
}

/// Reads one item that the stream has let go of, or not come to.
static fst_status reload_item(fst_loader *loader, uint32_t item_index, int64_t timeout_ms,
                              fst_tensor **out, fst_error *error) {
    const fsti_plan_want *want = &loader->wants[item_index];
    fsti_plan plan;
    if (fsti_pipeline_cancelled(loader->pipeline, error)) return FST_E_CANCELLED;
    FST_TRY(plan_wants(loader, want, 1, &plan, error));
    fst_status status = run_reload(loader, want, &plan, timeout_ms, out, error);
    fsti_plan_clear(&plan);
    return status;
}

fst_status fsti_loader_item(fst_loader *loader, size_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    const fsti_plan_item *item = &loader->plan.items[item_index];
    uint32_t index = (uint32_t)item_index;
    fsti_buffer *buffer;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    // Holding the buffer keeps the bytes even if the stream lets go of them meanwhile. A batch
    // that is not admitted must not be waited for: its turn may never come while we wait.
    fsti_batch_step step = fsti_pipeline_buffer(loader->pipeline, item->batch, &buffer);
    if (item->size_bytes > 0 && loader->mode != FST_MODE_MAP) {
        bool has_place = item->destination != NULL;
        // What is at its destination stays as the caller has left it.
        if (step == BATCH_RELEASED && !has_place)
            return reload_item(loader, index, timeout_ms, out, error);
        if (step == BATCH_WAITING && (!has_place || fsti_pipeline_settle(loader->pipeline, index)))
            return reload_item(loader, index, timeout_ms, out, error);
    }
    fst_status status = wait_item(loader, item, timeout_ms, error);
    if (status == FST_OK) status = make_tensor(loader, index, buffer, out, error);
    fsti_buffer_unref(buffer);
    return status;
}

/// Makes the table of items by tensor; of several items of a tensor the first counts.
static fst_status index_items(fst_loader *loader, fst_error *error) {
    size_t count = loader->model->entry_count;
    uint32_t *table = fsti_alloc_zeroed(count, sizeof *table);
    if (table == NULL) return fsti_error_memory(error, count * sizeof *table);
    for (size_t i = loader->plan.item_count; i-- > 0;)
        table[loader->wants[i].tensor_index] = (uint32_t)i + 1;
    loader->item_of_tensor = table;
    return FST_OK;
}

fst_status fsti_loader_tensor(fst_loader *loader, const char *name, size_t name_size,
                              int64_t timeout_ms, fst_tensor **out, fst_error *error) {
    size_t tensor_index = 0;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    FST_TRY(fsti_model_find(loader->model, name, name_size, &tensor_index, error));
    pthread_mutex_lock(&loader->lock);
    fst_status status = loader->item_of_tensor == NULL ? index_items(loader, error) : FST_OK;
    const uint32_t *table = loader->item_of_tensor;
    uint32_t item = table != NULL ? table[tensor_index] : 0;
    pthread_mutex_unlock(&loader->lock);
    FST_TRY(status);
    if (item > 0) return fsti_loader_item(loader, item - 1, timeout_ms, out, error);
    fsti_error_place place = FSTI_NOWHERE;
    place.tensor = name;
    place.tensor_size = name_size;
    return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, place,
                          "the request does not include the tensor");
}

/// What opening the files, and reads of headers, have cost.
static void add_opening(const fst_loader *loader, fst_load_stats *stats) {
    for (size_t i = 0; i < loader->model->file_count; i++) {
        fsti_net_counts net;
        fsti_file_net_counts(loader->files[i], &net);
        stats->network_requests += net.requests;
        stats->network_retries += net.retries;
        stats->network_hedges += net.hedges;
        stats->network_connections += net.connections;
        stats->network_bytes += net.bytes;
        stats->disk_cache_bytes += net.kept_bytes;
        stats->disk_cache_written += net.written_bytes;
    }
}

/// Tells of the cache on disk what can't be seen by the engine.
static void add_cache_words(const fst_loader *loader, char *reason, size_t size) {
    size_t used = strlen(reason);
    const char *kept = NULL;
    int failure = 0;
    for (size_t i = 0; i < loader->model->file_count; i++) {
        if (fsti_file_is_kept(loader->files[i])) kept = fsti_file_origin_words(loader->files[i]);
        if (failure == 0) failure = fsti_file_cache_failure(loader->files[i]);
    }
    if (failure != 0)
        snprintf(reason + used, size - used, "; the cache on disk is not written to: %s",
                 strerror(failure));
    else if (kept != NULL)
        snprintf(reason + used, size - used, "; %s", kept);
}

/// Objects that are whole in the cache on disk are files: what is planned of them is read there.
static void add_kept(const fst_loader *loader, fst_load_stats *stats) {
    for (size_t i = 0; i < loader->plan.extent_count; i++) {
        const fsti_plan_extent *extent = &loader->plan.extents[i];
        if (fsti_file_is_kept(loader->files[extent->file]))
            stats->disk_cache_bytes += extent->end - extent->begin;
    }
}

fst_status fsti_loader_stats(fst_loader *loader, fst_load_stats *stats, fst_error *error) {
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    size_t struct_size = stats->struct_size;
    memset(stats, 0, sizeof *stats);
    stats->struct_size = struct_size;
    fsti_pipeline_stats(loader->pipeline, stats);
    char engine_reason[sizeof stats->reason];
    snprintf(engine_reason, sizeof engine_reason, "%s", stats->reason);
    bool map = loader->mode == FST_MODE_MAP;
    snprintf(stats->mode, sizeof stats->mode, "%s", map ? "map" : "load");
    if (map) snprintf(stats->engine, sizeof stats->engine, "mapping");
    snprintf(stats->reason, sizeof stats->reason, "%s", loader->policy.reason);
    if (engine_reason[0] != '\0') fsti_append(stats->reason, sizeof stats->reason, "; ");
    fsti_append(stats->reason, sizeof stats->reason, engine_reason);
    stats->tensor_count = loader->plan.item_count;
    stats->bytes_requested = loader->plan.bytes_requested;
    stats->plan_ns = loader->plan_ns;
    add_opening(loader, stats);
    add_kept(loader, stats);
    add_cache_words(loader, stats->reason, sizeof stats->reason);
    pthread_mutex_lock(&loader->lock);
    stats->wait_ns = loader->wait_ns;
    stats->bytes_copied += loader->bytes_aligned;
    pthread_mutex_unlock(&loader->lock);
    return FST_OK;
}
