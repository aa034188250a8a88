// SPDX-License-Identifier: Apache-2.0
/// Divides a load's budget between decoder workspaces and batches.
#include <inttypes.h>

#include "load.h"

/// Workspaces take at most this fraction of a budget, but at least one fits.
#define WORKSPACES_DIVISOR 3u

/// The largest workspace that a file of the request needs.
static uint64_t workspace_bytes(const fst_loader *loader, bool *uses_gds) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < loader->plan.item_count; i++) {
        const model_file *file = &loader->model->files[loader->wants[i].file];
        bytes = fsti_max(bytes, file->workspace_bytes);
        *uses_gds |= file->workspace_bytes != 0 && fsti_file_is_object(file->file);
    }
    return bytes;
}

/// Bytes reserved for workspaces.
static uint64_t workspace_bytes_total(const fst_loader *loader) {
    return loader->options.budget_bytes == 0
               ? 0
               : loader->workspaces.bytes * loader->workspaces.thread_count;
}

/// Bytes left for buffers.
static uint64_t find_buffer_budget(const fst_loader *loader) {
    uint64_t budget = loader->options.budget_bytes, workspaces = workspace_bytes_total(loader);
    // If even the workspaces do not fit, a load with data is refused.
    return budget == 0 ? 0 : budget > workspaces ? budget - workspaces : 1;
}

static void count_workspaces(fst_loader *loader) {
    uint64_t budget = loader->options.budget_bytes;
    bool uses_gds = false;
    load_workspaces *workspaces = &loader->workspaces;
    *workspaces =
        (load_workspaces){workspace_bytes(loader, &uses_gds), loader->options.thread_count};
    if (workspaces->bytes == 0 || budget == 0) return;
    fsti_thread_facts facts = {.wanted = workspaces->thread_count,
                               .processor_count = fsti_loader_processors(loader),
                               .chunk_count = SIZE_MAX,
                               .any_blocking = true,
                               .reads_by_gds = uses_gds};
    uint64_t most = fsti_max(budget / WORKSPACES_DIVISOR / workspaces->bytes, 1);
    workspaces->thread_count = (uint32_t)fsti_min(fsti_policy_threads(&facts).thread_count, most);
}

void fsti_loader_share_budget(fst_loader *loader) {
    count_workspaces(loader);
    loader->facts.budget_bytes = find_buffer_budget(loader);
}

fst_status fsti_loader_check_budget(const fst_loader *loader, fst_error *error) {
    uint64_t budget = loader->options.budget_bytes, workspaces = workspace_bytes_total(loader);
    if (budget == 0) return FST_OK;
    for (size_t i = 0; i < loader->plan.batch_count; i++) {
        const fsti_plan_batch *batch = &loader->plan.batches[i];
        uint64_t bytes = batch->buffer_bytes;
        if (loader->policy.memory == FSTI_MEMORY_ARENA) bytes = fsti_buffer_arena_bytes(bytes);
        if (bytes <= budget - fsti_min(budget, workspaces) &&
            (workspaces <= budget || batch->chunk_first == batch->chunk_end))
            continue;
        uint32_t item_index = loader->plan.delivery[batch->delivery_first];
        const fsti_plan_item *item = &loader->plan.items[item_index];
        const fsti_header *header = loader->files[item->file].header;
        const fsti_tensor *tensor = &header->tensors[item->tensor];
        fsti_error_location location = FSTI_NO_LOCATION;
        location.tensor = fsti_header_name(header, tensor);
        location.tensor_size = tensor->name_size;
        if (workspaces == 0)
            return fsti_error_set(error, FST_E_BUDGET, location,
                                  "the budget is %" PRIu64 " bytes, the tensor needs %" PRIu64,
                                  budget, bytes);
        return fsti_error_set(error, FST_E_BUDGET, location,
                              "the budget is %" PRIu64 " bytes, the tensor needs %" PRIu64
                              " and threads that decompress %" PRIu64 " more",
                              budget, bytes, workspaces);
    }
    return FST_OK;
}
