// SPDX-License-Identifier: Apache-2.0
/// Assigns tensors to files like Hugging Face's libraries.
#include "save.h"

#define NO_FILE UINT32_MAX

/// The file of a group's first tensor.
typedef struct group_slot {
    uint64_t group; ///< 0: empty
    uint32_t file;
} group_slot;

/// Files are numbered when they are full, not when they are started, so a tensor larger than a
/// shard is numbered before the file that is being filled.
typedef struct shard_split {
    uint64_t file_bytes_max, open_bytes;
    uint32_t begun_count, full_count;
    uint32_t open_file; ///< in order of start, or NO_FILE
    uint32_t *numbers;  ///< in order of start
    group_slot *slots;
    size_t slot_count;
} shard_split;

static group_slot *find_group(const shard_split *split, uint64_t group) {
    size_t mask = split->slot_count - 1;
    size_t slot = (size_t)(group * 0x9e3779b97f4a7c15u >> 20) & mask;
    while (split->slots[slot].group != 0 && split->slots[slot].group != group)
        slot = (slot + 1) & mask;
    return &split->slots[slot];
}

static void close_shard(shard_split *split, uint32_t file) {
    split->numbers[file] = split->full_count++;
}

static uint32_t place_tensor(shard_split *split, uint64_t size) {
    if (size > split->file_bytes_max) {
        uint32_t file = split->begun_count++;
        close_shard(split, file);
        return file;
    }
    if (split->open_file != NO_FILE && size > split->file_bytes_max - split->open_bytes) {
        close_shard(split, split->open_file);
        split->open_file = NO_FILE;
    }
    if (split->open_file == NO_FILE) {
        split->open_file = split->begun_count++;
        split->open_bytes = 0;
    }
    split->open_bytes += size;
    return split->open_file;
}

static void place_all(shard_split *split, const fst_shard_item *items, size_t item_count,
                      uint32_t *file_of) {
    for (size_t i = 0; i < item_count; i++) {
        uint64_t group = items[i].group;
        group_slot *slot = group == 0 ? NULL : find_group(split, group);
        if (slot != NULL && slot->group != 0) {
            file_of[i] = slot->file;
            continue;
        }
        file_of[i] = place_tensor(split, items[i].size_bytes);
        if (slot != NULL) *slot = (group_slot){group, file_of[i]};
    }
    if (split->open_file != NO_FILE) close_shard(split, split->open_file);
    for (size_t i = 0; i < item_count; i++) file_of[i] = split->numbers[file_of[i]];
}

fst_status fsti_shards_assign(const fst_shard_item *items, size_t item_count,
                              uint64_t file_bytes_max, uint32_t *file_of, uint32_t *file_count,
                              fst_error *error) {
    shard_split split = {.file_bytes_max = file_bytes_max, .open_file = NO_FILE, .slot_count = 4};
    while (split.slot_count < 2 * item_count) split.slot_count *= 2;
    split.numbers = fsti_alloc((item_count + 1) * sizeof *split.numbers);
    split.slots = fsti_alloc_zeroed(split.slot_count, sizeof *split.slots);
    fst_status status = FST_OK;
    if (split.numbers == NULL || split.slots == NULL)
        status = fsti_error_memory(error, split.slot_count * sizeof *split.slots);
    else
        place_all(&split, items, item_count, file_of);
    *file_count = status == FST_OK ? split.full_count : 0;
    fsti_free(split.numbers);
    fsti_free(split.slots);
    return status;
}
