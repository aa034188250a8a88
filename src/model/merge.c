// SPDX-License-Identifier: Apache-2.0
/// The table of tensors over several files: names must be unique, or assigned by an index.
#include <string.h>

#include "open_model.h"

static const fsti_tensor *entry_tensor(const fst_model *model, model_entry entry) {
    return &model->files[entry.file].header->tensors[entry.tensor];
}

static const char *entry_name(const fst_model *model, model_entry entry) {
    return fsti_header_name(model->files[entry.file].header, entry_tensor(model, entry));
}

/// The hash slot of a name, or the free slot for it.
static size_t find_slot(const fst_model *model, const char *name, size_t size, uint32_t hash) {
    size_t mask = model->slot_count - 1, slot = hash & mask;
    for (; model->slots[slot] != 0; slot = (slot + 1) & mask) {
        model_entry entry = model->entries[model->slots[slot] - 1];
        const fsti_tensor *tensor = entry_tensor(model, entry);
        if (tensor->hash == hash && tensor->name_size == size &&
            memcmp(entry_name(model, entry), name, size) == 0)
            break;
    }
    return slot;
}

static fst_status duplicate_failure(const fst_model *model, model_entry first, model_entry second,
                                    fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = entry_name(model, second);
    location.tensor_size = entry_tensor(model, second)->name_size;
    return fsti_error_set(error, FST_E_DUPLICATE_TENSOR, location,
                          "duplicate tensor name in two files (variants of one model? Open one "
                          "of them): %.150s and %.150s",
                          fsti_file_path(model->files[first.file].file),
                          fsti_file_path(model->files[second.file].file));
}

/// Padding tensors have the same names in every file; the first one is found.
static fst_status index_names(fst_model *model, fst_error *error) {
    size_t slot_count = 4;
    while (slot_count < model->entry_count * 2) slot_count *= 2;
    model->slots = fsti_alloc_zeroed(slot_count, sizeof *model->slots);
    if (model->slots == NULL) return fsti_error_memory(error, slot_count * sizeof *model->slots);
    model->slot_count = slot_count;
    for (size_t i = 0; i < model->entry_count; i++) {
        model_entry entry = model->entries[i];
        const fsti_tensor *tensor = entry_tensor(model, entry);
        size_t slot = find_slot(model, entry_name(model, entry), tensor->name_size, tensor->hash);
        if (model->slots[slot] != 0 && i >= model->tensor_count) continue;
        if (model->slots[slot] != 0)
            return duplicate_failure(model, model->entries[model->slots[slot] - 1], entry, error);
        model->slots[slot] = (uint32_t)i + 1;
    }
    return FST_OK;
}

static size_t count_all(const fst_model *model) {
    size_t count = 0;
    for (size_t i = 0; i < model->file_count; i++) count += model->files[i].header->tensor_count;
    return count;
}

/// Marks the tensors that an index assigns to their file. `marks` is indexed by file and tensor,
/// files one after the other.
static fst_status mark_mapped(const fst_model *model, const fsti_index *index, char *marks,
                              const size_t *file_starts, fst_error *error) {
    for (size_t i = 0; i < index->entry_count; i++) {
        const fsti_index_entry *mapped = &index->entries[i];
        const char *name = index->bytes + mapped->name.at;
        const model_file *file = &model->files[mapped->file];
        size_t tensor = fsti_header_find(file->header, name, mapped->name.size);
        if (tensor == SIZE_MAX) {
            fsti_error_location location = {.file = fsti_file_path(file->file),
                                            .tensor = name,
                                            .tensor_size = mapped->name.size,
                                            .byte_offset = FST_NO_OFFSET};
            return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, location,
                                  "the index lists a tensor that the file does not contain");
        }
        marks[file_starts[mapped->file] + tensor] = 1;
    }
    return FST_OK;
}

/// Adds the marked tensors (all without marks): either padding tensors, or the others.
static void add_entries(fst_model *model, const char *marks, bool padding) {
    size_t mark_index = 0;
    for (uint32_t f = 0; f < model->file_count; f++) {
        const fsti_header *header = model->files[f].header;
        bool may_pad = model->files[f].padding_count > 0;
        for (uint32_t t = 0; t < header->tensor_count; t++) {
            bool is_padding = may_pad && fsti_header_is_padding(header, &header->tensors[t]);
            if ((marks == NULL || marks[mark_index++] != 0) && is_padding == padding)
                model->entries[model->entry_count++] = (model_entry){f, t};
        }
    }
}

static void collect_entries(fst_model *model, const char *marks) {
    add_entries(model, marks, false);
    model->tensor_count = model->entry_count;
    add_entries(model, marks, true);
}

static fst_status collect_mapped(fst_model *model, const fsti_index *index, fst_error *error) {
    char *marks = fsti_alloc_zeroed(count_all(model), 1);
    size_t *file_starts = fsti_alloc_zeroed(model->file_count, sizeof *file_starts);
    fst_status status;
    if (marks == NULL || file_starts == NULL) {
        status = fsti_error_memory(error, count_all(model));
    } else {
        for (size_t i = 1; i < model->file_count; i++)
            file_starts[i] = file_starts[i - 1] + model->files[i - 1].header->tensor_count;
        status = mark_mapped(model, index, marks, file_starts, error);
        if (status == FST_OK) collect_entries(model, marks);
    }
    fsti_free(marks);
    fsti_free(file_starts);
    return status;
}

fst_status fsti_model_merge(fst_model *model, const fsti_index *index, fst_error *error) {
    size_t all = count_all(model);
    if (index == NULL && model->file_count == 1 && model->files[0].padding_count == 0) {
        model->tensor_count = model->entry_count = all;
        return FST_OK;
    }
    if (all >= UINT32_MAX)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "too many tensors");
    model->entries = fsti_alloc((all + 1) * sizeof *model->entries);
    if (model->entries == NULL) return fsti_error_memory(error, all * sizeof *model->entries);
    if (index != NULL)
        FST_TRY(collect_mapped(model, index, error));
    else
        collect_entries(model, NULL);
    return index_names(model, error);
}

fst_status fsti_model_find(const fst_model *model, const char *name, size_t name_size,
                           size_t *index, fst_error *error) {
    size_t found;
    if (model->entries == NULL) {
        found = fsti_header_find(model->files[0].header, name, name_size);
    } else {
        uint32_t hash = (uint32_t)(fsti_hash(name, name_size, model->hash_key) >> 32);
        uint32_t value = model->slots[find_slot(model, name, name_size, hash)];
        found = value == 0 ? SIZE_MAX : value - 1;
    }
    if (found == SIZE_MAX) {
        fsti_error_location location = FSTI_NO_LOCATION;
        location.tensor = name;
        location.tensor_size = name_size;
        return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, location, "tensor not found");
    }
    *index = found;
    return FST_OK;
}
