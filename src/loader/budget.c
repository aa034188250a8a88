// SPDX-License-Identifier: Apache-2.0
/// How a load's budget is shared out: rooms of threads that decode, and batches.
#include <inttypes.h>

#include "load.h"

/// Of a budget, rooms of threads take this part at most, unless that is less than one room.
#define ROOMS_DIVISOR 3u

/// The largest room that a file of the request needs.
static uint64_t room_bytes(const fst_loader *loader, bool *is_far) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < loader->plan.item_count; i++) {
        const model_file *file = &loader->model->files[loader->wants[i].file];
        bytes = fsti_max(bytes, file->room_bytes);
        *is_far |= file->room_bytes != 0 && fsti_file_is_object(file->file);
    }
    return bytes;
}

/// What is set aside for rooms.
static uint64_t set_aside(const fst_loader *loader) {
    return loader->options.budget_bytes == 0 ? 0 : loader->rooms.bytes * loader->rooms.thread_count;
}

/// What the rooms leave for buffers.
static uint64_t find_buffer_budget(const fst_loader *loader) {
    uint64_t budget = loader->options.budget_bytes, rooms = set_aside(loader);
    // Less than the rooms fits nothing: a load with bytes in it will be refused.
    return budget == 0 ? 0 : budget > rooms ? budget - rooms : 1;
}

static void count_rooms(fst_loader *loader) {
    uint64_t budget = loader->options.budget_bytes;
    bool is_far = false;
    load_rooms *rooms = &loader->rooms;
    *rooms = (load_rooms){room_bytes(loader, &is_far), loader->options.thread_count};
    if (rooms->bytes == 0 || budget == 0) return;
    fsti_thread_facts facts = {.wanted = rooms->thread_count,
                               .processor_count = fsti_loader_processors(loader),
                               .chunk_count = SIZE_MAX,
                               .any_blocking = true,
                               .reads_far = is_far};
    uint64_t most = fsti_max(budget / ROOMS_DIVISOR / rooms->bytes, 1);
    rooms->thread_count = (uint32_t)fsti_min(fsti_policy_threads(&facts).thread_count, most);
}

void fsti_loader_share_budget(fst_loader *loader) {
    count_rooms(loader);
    loader->facts.budget_bytes = find_buffer_budget(loader);
}

fst_status fsti_loader_check_budget(const fst_loader *loader, fst_error *error) {
    uint64_t budget = loader->options.budget_bytes, rooms = set_aside(loader);
    if (budget == 0) return FST_OK;
    for (size_t i = 0; i < loader->plan.batch_count; i++) {
        const fsti_plan_batch *batch = &loader->plan.batches[i];
        uint64_t bytes = batch->buffer_bytes;
        if (loader->policy.memory == FSTI_MEMORY_ARENA) bytes = fsti_buffer_arena_bytes(bytes);
        if (bytes <= budget - fsti_min(budget, rooms) &&
            (rooms <= budget || batch->chunk_first == batch->chunk_end))
            continue;
        uint32_t item_index = loader->plan.delivery[batch->delivery_first];
        const fsti_plan_item *item = &loader->plan.items[item_index];
        const fsti_header *header = loader->headers[item->file];
        const fsti_tensor *tensor = &header->tensors[item->tensor];
        fsti_error_place place = FSTI_NOWHERE;
        place.tensor = fsti_header_name(header, tensor);
        place.tensor_size = tensor->name_size;
        if (rooms == 0)
            return fsti_error_set(error, FST_E_BUDGET, place,
                                  "the budget is %" PRIu64 " bytes, a batch needs %" PRIu64, budget,
                                  bytes);
        return fsti_error_set(error, FST_E_BUDGET, place,
                              "the budget is %" PRIu64 " bytes, a batch needs %" PRIu64
                              " and threads that decompress %" PRIu64 " more",
                              budget, bytes, rooms);
    }
    return FST_OK;
}
