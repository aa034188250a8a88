// SPDX-License-Identifier: Apache-2.0
/// A load, from request to tensors: mode, plan, pipeline, and access to the results.
#include "load.h"

/// Opens the device of the tensors.
static fst_status choose_device(fst_loader *loader, fst_error *error) {
    const fst_load_options *options = &loader->options;
    loader->device_id = options->device;
    if (options->device.kind == FST_DEVICE_CPU) return FST_OK;
    FST_TRY(fsti_device_get(options->device, &loader->device, error));
    fst_unified unified = loader->tuning.unified;
    bool shares_memory = unified == FST_UNIFIED_ON ||
                         (unified == FST_UNIFIED_AUTO && fsti_device_shares(loader->device));
    bool is_pinned = options->device.kind == FST_DEVICE_PINNED;
    if (!is_pinned) loader->device_id = fsti_device_id(loader->device);
    loader->device_id.index = loader->device_id.index < 0 ? 0 : loader->device_id.index;
    // The library does not pin memory that the caller or its allocator provides.
    loader->pins_memory = options->allocator == NULL && !fsti_loader_has_destinations(loader) &&
                          (is_pinned || shares_memory);
    if (is_pinned && !loader->pins_memory) loader->device = NULL;
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
    loader->plan_files = fsti_alloc_zeroed(count, sizeof *loader->plan_files);
    loader->files = fsti_alloc_zeroed(count, sizeof *loader->files);
    if (loader->plan_files == NULL || loader->files == NULL)
        return fsti_error_memory(error, count * sizeof *loader->files);
    for (size_t i = 0; i < count; i++) {
        const model_file *file = &model->files[i];
        loader->files[i] =
            (fsti_job_file){.file = file->file, .header = file->header, .digests = &file->digests};
        loader->plan_files[i].header = file->header;
        loader->plan_files[i].size_bytes = fsti_file_size(file->file);
        if (file->packed != NULL)
            loader->plan_files[i].made_bytes = fsti_packed_chunk_bytes(file->packed);
        // Stored bytes of compressed files are verified while reading; they have no digests here.
        loader->verifies |= model->verification != NULL && file->digests.kind != NULL;
    }
    return FST_OK;
}

/// Maps the files that the request touches.
static fst_status make_views(fst_loader *loader, fst_error *error) {
    if (loader->mode != FST_MODE_MAP) return FST_OK;
    bool writable = loader->options.map_read_only == 0;
    // Needed by fst_tensor_read(), which copies from views.
    if (loader->tuning.keep_sigbus_handler == 0) (void)fsti_io_guard_ready();
    for (size_t i = 0; i < loader->plan.extent_count; i++) {
        uint32_t index = loader->plan.extents[i].file;
        fsti_job_file *file = &loader->files[index];
        if (file->view != NULL) continue;
        FST_TRY(fsti_file_check(file->file, error));
        FST_TRY(fsti_model_map_file(loader->model, index, writable, &file->view, error));
    }
    return FST_OK;
}

static void drop_views(fst_loader *loader) {
    for (size_t i = 0; loader->files != NULL && i < loader->model->file_count; i++) {
        fsti_buffer_unref(loader->files[i].view);
        loader->files[i].view = NULL;
    }
}

/// Makes the plan, and mappings if needed. If the system refuses a mapping (limits of address space
/// or overcommit), a request with automatic mode falls back to owned memory.
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
    pthread_mutex_init(&loader->allocator_lock.mutex, NULL);
    pthread_mutex_init(&loader->place_lock, NULL);
    loader->begun_ns = fsti_now_ns();
    loader->model = fsti_model_ref(model);
    loader->options = *options;
    loader->tuning = *options->tuning;
    loader->options.tuning = &loader->tuning;
    if (options->allocator != NULL) {
        loader->allocator = *options->allocator;
        loader->options.allocator = &loader->allocator;
    }
    fst_status status = list_files(loader, error);
    if (status == FST_OK) status = fsti_loader_resolve(loader, options, error);
    if (status == FST_OK && loader->verifies) status = fsti_loader_check_verified(loader, error);
    if (status == FST_OK) status = choose_device(loader, error);
    if (status == FST_OK) {
        fsti_loader_gather_facts(loader);
        fsti_loader_share_budget(loader);
        choose_policy(loader);
        status = plan_load(loader, error);
    }
    if (status == FST_OK) fsti_loader_open_share(loader);
    if (status == FST_OK)
        status = fsti_loader_find_methods(loader, &loader->plan, loader->mode == FST_MODE_MAP,
                                          &loader->methods, error);
    fsti_job job = fsti_loader_job(loader, &loader->plan, &loader->methods);
    job.share = loader->share;
    job.others_read = loader->options.share == FST_SHARE_NODE;
    if (status == FST_OK) status = fsti_pipeline_open(&job, &loader->pipeline, error);
    if (status != FST_OK) {
        fsti_loader_log_end(loader, status, error);
        fsti_loader_close(loader);
        return status;
    }
    fsti_loader_log_begin(loader);
    *out = loader;
    return FST_OK;
}

void fsti_loader_close(fst_loader *loader) {
    if (loader == NULL) return;
    fsti_loader_log_close(loader);
    fsti_loader_end_reads(loader);
    fsti_pipeline_close(loader->pipeline);
    fsti_share_unref(loader->share);
    fsti_free(loader->methods.routes);
    drop_views(loader);
    fsti_plan_clear(&loader->plan);
    fsti_free(loader->wants);
    fsti_free(loader->slices);
    fsti_free(loader->item_of_tensor);
    fsti_free(loader->plan_files);
    fsti_free(loader->files);
    fsti_model_unref(loader->model);
    pthread_mutex_destroy(&loader->lock);
    pthread_mutex_destroy(&loader->allocator_lock.mutex);
    pthread_mutex_destroy(&loader->place_lock);
    fsti_free(loader);
}

size_t fsti_loader_tensor_count(const fst_loader *loader) { return loader->plan.item_count; }

void fsti_loader_cancel(fst_loader *loader) {
    if (fsti_pipeline_check_owner(loader->pipeline, NULL) != FST_OK)
        return; // a forked child has no threads
    fsti_pipeline_cancel(loader->pipeline);
    fsti_loader_cancel_reads(loader);
}

/// Waits for chunks and counts the time.
static fst_status wait_chunks(fst_loader *loader, uint32_t first, uint32_t end, int64_t timeout_ms,
                              fst_error *error) {
    // The usual case of a stream of small tensors.
    if (fsti_pipeline_has(loader->pipeline, first, end)) return FST_OK;
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_pipeline_wait(loader->pipeline, first, end, timeout_ms, error);
    fsti_loader_add_wait(loader, start_ns);
    return status;
}

/// Waits for pages that are mapped when all chunks are complete.
static fst_status wait_mapped(fst_loader *loader, uint64_t start_ns, int64_t timeout_ms,
                              fst_error *error) {
    uint64_t mapping_ns = fsti_now_ns();
    fst_status status = fsti_pipeline_wait_mapped(
        loader->pipeline, fsti_loader_time_left(timeout_ms, start_ns), error);
    fsti_loader_add_wait(loader, mapping_ns);
    return status;
}

fst_status fsti_loader_wait(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    FST_TRY(fsti_pipeline_check_caller(loader->pipeline, error));
    if (loader->options.budget_bytes != 0)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "a load with a budget must be read with fst_loader_next()");
    fst_error cause = {.status = FST_OK};
    uint64_t start_ns = fsti_now_ns();
    fst_status status =
        wait_chunks(loader, 0, (uint32_t)loader->plan.chunk_count, timeout_ms, &cause);
    if (status == FST_OK) status = wait_mapped(loader, start_ns, timeout_ms, &cause);
    fsti_loader_log_end(loader, status, &cause);
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

/// Waits for an item. A view is ready at once, unless it is being read into the page cache.
static fst_status wait_item(fst_loader *loader, const fsti_plan_item *item, int64_t timeout_ms,
                            fst_error *error) {
    const fsti_plan_batch *batch = &loader->plan.batches[item->batch];
    if (item->size_bytes == 0) return FST_OK;
    // A store to a shared tensor copies whole pages, so the bytes of its neighbours must be there.
    // Batches share no pages.
    if (loader->share != NULL)
        return wait_chunks(loader, batch->chunk_first, batch->chunk_end, timeout_ms, error);
    return wait_chunks(loader, item->chunk_first, item->chunk_end, timeout_ms, error);
}

/// Finds a batch whose tensors were all returned and which was not released yet; false without one.
static bool next_delivered(fst_loader *loader, uint32_t *out) {
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

/// Releases completely returned batches, without holding a lock, because the caller's allocator may
/// be called.
static void release_delivered(fst_loader *loader) {
    uint32_t batch;
    if (loader->options.budget_bytes == 0) return; // kept for access by name
    while (next_delivered(loader, &batch)) fsti_pipeline_release(loader->pipeline, batch);
}

static fst_status make_tensor(fst_loader *loader, uint32_t item_index, fsti_buffer *buffer,
                              fst_tensor **out, fst_error *error) {
    tensor_source source = {.item = &loader->plan.items[item_index],
                            .want = &loader->wants[item_index],
                            .buffer = buffer};
    return fsti_tensor_make(loader, &source, out, error);
}

/// Reads an item that cannot be mapped, after the page cache has been filled.
static fst_status copy_item(fst_loader *loader, uint32_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(wait_item(loader, &loader->plan.items[item_index], timeout_ms, error));
    return fsti_loader_read_item(loader, item_index, fsti_loader_time_left(timeout_ms, start_ns),
                                 out, error);
}

/// Returns the next item of the stream, when it is ready.
static fst_status stream_item(fst_loader *loader, uint32_t item_index, int64_t timeout_ms,
                              fst_tensor **out, fst_error *error) {
    const fsti_plan_item *item = &loader->plan.items[item_index];
    if (fsti_loader_needs_copy(loader, item))
        return copy_item(loader, item_index, timeout_ms, out, error);
    uint64_t start_ns = timeout_ms > 0 ? fsti_now_ns() : 0;
    FST_TRY(wait_item(loader, item, timeout_ms, error));
    if (fsti_pipeline_place_step(loader->pipeline, item_index) == PLACE_CLAIMED)
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
    FST_TRY(fsti_pipeline_check_caller(loader->pipeline, error));
    pthread_mutex_lock(&loader->lock);
    size_t position = loader->next_delivery;
    pthread_mutex_unlock(&loader->lock);
    if (position >= plan->item_count) {
        // All tensors were returned, so only a timeout counts.
        if (wait_mapped(loader, fsti_now_ns(), timeout_ms, error) == FST_E_TIMEOUT)
            return FST_E_TIMEOUT;
        fsti_loader_log_end(loader, FST_END, NULL);
        return FST_END;
    }
    FST_TRY(stream_item(loader, plan->delivery[position], timeout_ms, out, error));
    // The position advances only now, so that a call after a timeout returns the same item.
    pthread_mutex_lock(&loader->lock);
    loader->next_delivery = position + 1;
    pthread_mutex_unlock(&loader->lock);
    release_delivered(loader);
    return FST_OK;
}

/// Whether an item must be read separately: the stream has released it, or has not reached it, and
/// may not before this call returns. An item with a destination is claimed first: the stream then
/// skips it, and does not overwrite memory that the caller already uses.
static bool is_read_alone(fst_loader *loader, uint32_t index, fsti_batch_step step) {
    if (loader->plan.items[index].destination == NULL) return step != BATCH_ADMITTED;
    if (step == BATCH_WAITING) fsti_pipeline_claim(loader->pipeline, index);
    return fsti_pipeline_place_step(loader->pipeline, index) == PLACE_CLAIMED;
}

fst_status fsti_loader_item(fst_loader *loader, size_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    const fsti_plan_item *item = &loader->plan.items[item_index];
    uint32_t index = (uint32_t)item_index;
    fsti_buffer *buffer;
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    FST_TRY(fsti_pipeline_check_caller(loader->pipeline, error));
    // Reading a shared item separately would read its bytes twice; all of them stay until the end.
    if (loader->share != NULL) return stream_item(loader, index, timeout_ms, out, error);
    if (fsti_loader_needs_copy(loader, item))
        return copy_item(loader, index, timeout_ms, out, error);
    // Hold the buffer, so that its bytes stay valid if the stream releases the batch.
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

/// Makes the table from tensors to items. If a tensor has several items, the first counts.
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
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = name;
    location.tensor_size = name_size;
    return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, location,
                          "the request does not include the tensor");
}
