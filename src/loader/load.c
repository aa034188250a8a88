// SPDX-License-Identifier: Apache-2.0
/// A load from request to tensors: mode, plan, pipeline, and the ways to get at what arrives.
#include "load.h"

#include <stdio.h>
#include <string.h>

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

static fst_status make_plan(fst_loader *loader, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(fsti_loader_plan(loader, loader->wants, loader->plan.item_count,
                             loader->mode == FST_MODE_MAP, &loader->plan, error));
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
    // Reading views for the program is guarded as well (fst_tensor_read).
    if (loader->options.no_sigbus_guard == 0) (void)fsti_io_guard_ready();
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

fst_status fsti_loader_open(fst_model *model, const fst_load_options *options, fst_loader **out,
                            fst_error *error) {
    fst_loader *loader = fsti_alloc_zeroed(1, sizeof *loader);
    if (loader == NULL) return fsti_error_memory(error, sizeof *loader);
    pthread_mutex_init(&loader->lock, NULL);
    pthread_mutex_init(&loader->allocator_lock, NULL);
    pthread_mutex_init(&loader->place_lock, NULL);
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
        status = fsti_loader_find_ways(loader, &loader->plan, loader->mode == FST_MODE_MAP,
                                       &loader->ways, error);
    fsti_job job = fsti_loader_job(loader, &loader->plan, &loader->ways);
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
    fsti_loader_end_reads(loader);
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
    pthread_mutex_destroy(&loader->allocator_lock);
    pthread_mutex_destroy(&loader->place_lock);
    fsti_free(loader);
}

size_t fsti_loader_tensor_count(const fst_loader *loader) { return loader->plan.item_count; }

void fsti_loader_cancel(fst_loader *loader) {
    if (fsti_pipeline_check_owner(loader->pipeline, NULL) != FST_OK) return; // nothing runs here
    fsti_pipeline_cancel(loader->pipeline);
    fsti_loader_cancel_reads(loader);
}

/// Waits for chunks and keeps the time of it.
static fst_status wait_chunks(fst_loader *loader, uint32_t first, uint32_t end, int64_t timeout_ms,
                              fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_pipeline_wait(loader->pipeline, first, end, timeout_ms, error);
    fsti_loader_add_wait(loader, start_ns);
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

/// The next batch that has been handed out whole and not let go of; false: there is none.
static bool take_delivered(fst_loader *loader, uint32_t *out) {
    const fsti_plan *plan = &loader->plan;
    pthread_mutex_lock(&loader->lock);
    uint32_t next = loader->next_batch;
    const fsti_plan_batch *batch = next < plan->batch_count ? &plan->batches[next] : NULL;
    bool is_delivered =
        batch != NULL && loader->next_delivery >= batch->delivery_first + batch->delivery_count;
    if (is_delivered) *out = loader->next_batch++;
    pthread_mutex_unlock(&loader->lock);
    return is_delivered;
}

/// Lets go of batches that have been handed out whole, under no lock: memory of the caller's is
/// given back by his function.
static void release_delivered(fst_loader *loader) {
    uint32_t batch;
    if (loader->options.budget_bytes == 0) return; // kept for access by name
    while (take_delivered(loader, &batch)) fsti_pipeline_release(loader->pipeline, batch);
}

static fst_status make_tensor(fst_loader *loader, uint32_t item_index, fsti_buffer *buffer,
                              fst_tensor **out, fst_error *error) {
    tensor_source source = {.item = &loader->plan.items[item_index],
                            .want = &loader->wants[item_index],
                            .buffer = buffer};
    return fsti_tensor_make(loader, &source, out, error);
}

/// What no view can serve is read to memory, once what is to come into the page cache is there.
static fst_status copy_item(fst_loader *loader, uint32_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(wait_item(loader, &loader->plan.items[item_index], timeout_ms, error));
    return fsti_loader_read_item(loader, item_index, fsti_loader_time_left(timeout_ms, start_ns),
                                 out, error);
}

/// The next item of the stream, as soon as it is there.
static fst_status stream_item(fst_loader *loader, uint32_t item_index, int64_t timeout_ms,
                              fst_tensor **out, fst_error *error) {
    const fsti_plan_item *item = &loader->plan.items[item_index];
    if (fsti_loader_is_apart(loader, item))
        return copy_item(loader, item_index, timeout_ms, out, error);
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(wait_item(loader, item, timeout_ms, error));
    if (fsti_pipeline_place_step(loader->pipeline, item_index) == PLACE_SETTLED)
        return fsti_loader_read_item(loader, item_index,
                                     fsti_loader_time_left(timeout_ms, start_ns), out, error);
    fsti_buffer *buffer;
    fsti_pipeline_buffer(loader->pipeline, item->batch, &buffer);
    fst_status status = make_tensor(loader, item_index, buffer, out, error);
    fsti_buffer_unref(buffer);
    return status;
}

fst_status fsti_loader_next(fst_loader *loader, int64_t timeout_ms, fst_tensor **out,
                            fst_error *error) {
    const fsti_plan *plan = &loader->plan;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    pthread_mutex_lock(&loader->lock);
    size_t position = loader->next_delivery;
    pthread_mutex_unlock(&loader->lock);
    if (position >= plan->item_count) return FST_END;
    FST_TRY(stream_item(loader, plan->delivery[position], timeout_ms, out, error));
    pthread_mutex_lock(&loader->lock);
    loader->next_delivery = position + 1;
    pthread_mutex_unlock(&loader->lock);
    release_delivered(loader);
    return FST_OK;
}

/// Whether an item of memory is read by itself: the stream has let go of it, or has not come to it
/// (its turn may never come while we wait). What is at a destination stays as the caller has left
/// it.
static bool is_read_alone(fst_loader *loader, uint32_t index, fsti_batch_step step) {
    if (loader->plan.items[index].destination == NULL) return step != BATCH_ADMITTED;
    if (step == BATCH_WAITING) fsti_pipeline_settle(loader->pipeline, index);
    return fsti_pipeline_place_step(loader->pipeline, index) == PLACE_SETTLED;
}

fst_status fsti_loader_item(fst_loader *loader, size_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    const fsti_plan_item *item = &loader->plan.items[item_index];
    uint32_t index = (uint32_t)item_index;
    fsti_buffer *buffer;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    if (fsti_loader_is_apart(loader, item)) return copy_item(loader, index, timeout_ms, out, error);
    // Holding the buffer keeps the bytes even if the stream lets go of them meanwhile.
    fsti_batch_step step = fsti_pipeline_buffer(loader->pipeline, item->batch, &buffer);
    if (item->size_bytes > 0 && loader->mode != FST_MODE_MAP &&
        is_read_alone(loader, index, step)) {
        fsti_buffer_unref(buffer);
        return fsti_loader_read_item(loader, index, timeout_ms, out, error);
    }
    bool is_filled = fsti_pipeline_place_step(loader->pipeline, index) == PLACE_FILLED;
    fst_status status = is_filled ? FST_OK : wait_item(loader, item, timeout_ms, error);
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
    // What goes on with a comma needs nothing before it.
    if (engine_reason[0] != '\0' && engine_reason[0] != ',')
        fsti_append(stats->reason, sizeof stats->reason, "; ");
    fsti_append(stats->reason, sizeof stats->reason, engine_reason);
    stats->tensor_count = loader->plan.item_count;
    stats->bytes_requested = loader->plan.bytes_requested;
    stats->plan_ns = loader->plan_ns;
    add_opening(loader, stats);
    add_kept(loader, stats);
    add_cache_words(loader, stats->reason, sizeof stats->reason);
    pthread_mutex_lock(&loader->lock);
    stats->wait_ns = loader->wait_ns;
    fsti_loader_add_read_counts(loader, stats);
    pthread_mutex_unlock(&loader->lock);
    return FST_OK;
}
