// SPDX-License-Identifier: Apache-2.0
/// Layouts: checks names, orders tensors, assigns offsets, and writes the header.
#include "layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESERVED_NAME "__metadata__"
/// The name of a padding tensor with its number and NUL.
#define PADDING_NAME_BYTES 32u

static fst_status refuse(const fst_save_tensor *tensor, fst_error *error, const char *why) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = tensor->name;
    location.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "%s", why);
}

/// Size of a tensor by shape and dtype. FST_E_ARGUMENT names an invalid one.
static fst_status tensor_bytes(const fst_save_tensor *tensor, uint64_t *size_bytes,
                               fst_error *error) {
    fst_status status =
        fsti_dtype_tensor_bytes(tensor->dtype, tensor->shape, tensor->rank, size_bytes);
    if (status == FST_OK) return FST_OK;
    return refuse(tensor, error,
                  status == FST_E_MISALIGNED_SLICE ? "sub-byte elements must fill whole bytes"
                                                   : "the number of bytes overflows");
}

static fst_status check_name(const fst_save_tensor *tensor, fst_error *error) {
    size_t fault_at;
    if (tensor->rank > FSTI_FORMAT_RANK_MAX)
        return refuse(tensor, error, "more than 4,096 dimensions, which readers reject");
    if (tensor->name_size > UINT32_MAX ||
        !fsti_utf8_valid((const unsigned char *)tensor->name, tensor->name_size, &fault_at))
        return refuse(tensor, error, "a tensor name must be UTF-8");
    if (tensor->name_size == strlen(RESERVED_NAME) &&
        memcmp(tensor->name, RESERVED_NAME, tensor->name_size) == 0)
        return refuse(tensor, error, "the name " RESERVED_NAME " is reserved by the format");
    return FST_OK;
}

static fsti_name entry_name(const void *entries, size_t index) {
    const fsti_header_entry *entry = (const fsti_header_entry *)entries + index;
    return (fsti_name){entry->name, entry->name_size};
}

static fsti_name metadata_name(const void *entries, size_t index) {
    const fst_metadata_entry *entry = (const fst_metadata_entry *)entries + index;
    return (fsti_name){entry->key, entry->key_size};
}

/// Larger than every dtype's rank.
#define RANK_END 256u

/// The sort key of a tensor, in one cache line.
typedef struct sort_key {
    const char *name;
    uint32_t name_size, index;
    uint32_t group; ///< smaller ones first
} sort_key;

static int compare_keys(const void *a_pointer, const void *b_pointer) {
    const sort_key *a = a_pointer, *b = b_pointer;
    if (a->group != b->group) return a->group < b->group ? -1 : 1;
    size_t size = a->name_size < b->name_size ? a->name_size : b->name_size;
    int order = memcmp(a->name, b->name, size);
    if (order != 0) return order;
    return a->name_size < b->name_size ? -1 : a->name_size > b->name_size;
}

static bool sort_entries(fst_layout *layout, const fst_save_options *options) {
    size_t count = layout->tensor_count;
    sort_key *keys = fsti_alloc((count + 1) * sizeof *keys);
    if (keys == NULL) return false;
    bool sorted = true;
    uint64_t multiple =
        options->alignment_bytes > 1 ? options->alignment_bytes : options->header_alignment_bytes;
    for (size_t i = 0; i < count; i++) {
        const fsti_header_entry *entry = &layout->entries[i];
        bool reference = options->order == FST_SAVE_ORDER_REFERENCE;
        keys[i] =
            (sort_key){.name = entry->name,
                       .name_size = (uint32_t)entry->name_size,
                       .index = (uint32_t)i,
                       .group = reference ? RANK_END - fsti_dtype_sort_rank(entry->dtype) : 0};
        // Those whose size is a multiple come first: they are then aligned without padding.
        if (reference && multiple > 1)
            keys[i].group += (entry->end - entry->begin) % multiple == 0 ? 0 : RANK_END;
        if (i > 0 && compare_keys(&keys[i - 1], &keys[i]) > 0) sorted = false;
    }
    if (!sorted) qsort(keys, count, sizeof *keys, compare_keys);
    for (size_t i = 0; i < count; i++) layout->order[i] = keys[i].index;
    fsti_free(keys);
    return true;
}

static fst_status fill_entries(fst_layout *layout, const fst_save_tensor *tensors,
                               fst_error *error) {
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const fst_save_tensor *tensor = &tensors[i];
        uint64_t size_bytes = 0;
        FST_TRY(check_name(tensor, error));
        FST_TRY(tensor_bytes(tensor, &size_bytes, error));
        layout->entries[i] = (fsti_header_entry){.name = tensor->name,
                                                 .name_size = tensor->name_size,
                                                 .dtype = tensor->dtype,
                                                 .rank = tensor->rank,
                                                 .shape = tensor->shape,
                                                 .end = size_bytes};
        layout->order[i] = (uint32_t)i;
    }
    layout->entry_count = layout->tensor_count;
    size_t duplicate;
    if (!fsti_names_twice(entry_name, layout->entries, layout->tensor_count, &duplicate))
        return fsti_error_memory(error, layout->tensor_count * sizeof(uint32_t));
    if (duplicate != SIZE_MAX) return refuse(&tensors[duplicate], error, "duplicate tensor name");
    return FST_OK;
}

/// Adds a padding tensor of `size_bytes` bytes. Callers may not use names with its prefix.
static fsti_header_entry make_padding(fst_layout *layout, size_t number, uint64_t size_bytes) {
    char *name = layout->names + number * PADDING_NAME_BYTES;
    layout->shapes[number] = size_bytes;
    int size = snprintf(name, PADDING_NAME_BYTES, FSTI_PADDING_NAME "%zu", number);
    return (fsti_header_entry){.name = name,
                               .name_size = (size_t)size,
                               .dtype = FST_DTYPE_U8,
                               .rank = 1,
                               .shape = &layout->shapes[number],
                               .end = size_bytes};
}

/// Assigns offsets in the order of `order`, and inserts padding tensors. placed: the resulting
/// order.
static fst_status place_entries(fst_layout *layout, uint64_t alignment, uint32_t *placed,
                                fst_error *error) {
    uint64_t at = 0;
    size_t count = 0;
    for (size_t i = 0; i < layout->tensor_count; i++) {
        fsti_header_entry *entry = &layout->entries[layout->order[i]];
        uint64_t size = entry->end - entry->begin;
        uint64_t gap = size == 0 ? 0 : (alignment - at % alignment) % alignment;
        if (gap > 0) {
            size_t index = layout->entry_count++;
            layout->entries[index] = make_padding(layout, index - layout->tensor_count, gap);
            layout->entries[index].begin = at;
            layout->entries[index].end = at + gap;
            placed[count++] = (uint32_t)index;
        }
        entry->begin = at + gap;
        if (!fsti_add(entry->begin, size, &entry->end) || entry->end > INT64_MAX)
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                  "the tensors are larger than the maximum file size");
        at = entry->end;
        placed[count++] = layout->order[i];
    }
    return FST_OK;
}

/// Assigns offsets, with padding tensors where the alignment requires them.
static fst_status place_all(fst_layout *layout, const fst_save_options *options, fst_error *error) {
    uint64_t alignment = fsti_max(options->alignment_bytes, 1);
    uint32_t *placed = fsti_alloc((2 * layout->tensor_count + 1) * sizeof *placed);
    if (placed == NULL) return fsti_error_memory(error, layout->tensor_count * sizeof *placed);
    if (alignment > 1) {
        layout->names = fsti_alloc_zeroed(layout->tensor_count + 1, PADDING_NAME_BYTES);
        layout->shapes = fsti_alloc((layout->tensor_count + 1) * sizeof *layout->shapes);
    }
    fst_status status = FST_OK;
    if (alignment > 1 && (layout->names == NULL || layout->shapes == NULL))
        status = fsti_error_memory(error, layout->tensor_count * PADDING_NAME_BYTES);
    else
        status = place_entries(layout, alignment, placed, error);
    fsti_free(layout->order);
    layout->order = placed;
    return status;
}

/// Refuses names that padding tensors would use.
static fst_status check_padding_names(const fst_save_tensor *tensors, size_t tensor_count,
                                      uint64_t alignment, fst_error *error) {
    for (size_t i = 0; alignment > 1 && i < tensor_count; i++)
        if (fsti_padding_name(tensors[i].name, tensors[i].name_size))
            return refuse(&tensors[i], error,
                          "names that begin with " FSTI_PADDING_NAME
                          " are reserved for padding tensors");
    return FST_OK;
}

static fst_status check_metadata(const fst_save_options *options, fst_error *error) {
    for (size_t i = 0; i < options->metadata_count; i++) {
        const fst_metadata_entry *entry = &options->metadata[i];
        size_t fault_at;
        if (!fsti_utf8_valid((const unsigned char *)entry->key, entry->key_size, &fault_at) ||
            !fsti_utf8_valid((const unsigned char *)entry->value, entry->value_size, &fault_at))
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                  "metadata entry %zu is not UTF-8", i);
    }
    if (options->metadata_count >= FSTI_FORMAT_METADATA_MAX) // one more entry may mark padding
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "%zu metadata entries, but readers accept fewer than 1,048,576",
                              options->metadata_count);
    size_t twice;
    if (!fsti_names_twice(metadata_name, options->metadata, options->metadata_count, &twice))
        return fsti_error_memory(error, options->metadata_count * sizeof(uint32_t));
    if (twice != SIZE_MAX)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "duplicate metadata key in entry %zu", twice);
    return FST_OK;
}

/// The caller's metadata with the key that marks padding, replacing an older one. NULL without
/// memory. `text` becomes its value.
static fst_metadata_entry *with_padding_key(const fst_save_options *options, char *text,
                                            size_t text_size, size_t *count) {
    fst_metadata_entry *entries = fsti_alloc((options->metadata_count + 1) * sizeof *entries);
    if (entries == NULL) return NULL;
    int size = snprintf(text, text_size, "%" PRIu64, options->alignment_bytes);
    fst_metadata_entry mark = {.key = FSTI_PADDING_KEY,
                               .key_size = strlen(FSTI_PADDING_KEY),
                               .value = text,
                               .value_size = (size_t)size};
    *count = 0;
    for (size_t i = 0; i < options->metadata_count; i++)
        if (options->metadata[i].key_size != mark.key_size ||
            memcmp(options->metadata[i].key, mark.key, mark.key_size) != 0)
            entries[(*count)++] = options->metadata[i];
    entries[(*count)++] = mark;
    return entries;
}

static fst_status write_header(fst_layout *layout, const fst_save_options *options,
                               fst_error *error) {
    char text[24];
    uint64_t alignment = options->header_alignment_bytes;
    if (alignment == 0) alignment = fsti_max(options->alignment_bytes, FSTI_FORMAT_LENGTH_BYTES);
    fsti_header_draft draft = {
        .entries = layout->entries,
        .order = layout->order,
        .entry_count = layout->entry_count,
        .metadata = options->metadata,
        .metadata_count = options->metadata_count,
        .has_metadata = options->has_metadata || options->metadata_count > 0,
        .metadata_last = options->metadata_last,
        .alignment_bytes = alignment,
    };
    fst_metadata_entry *marked = NULL;
    if (layout->entry_count > layout->tensor_count) {
        marked = with_padding_key(options, text, sizeof text, &draft.metadata_count);
        if (marked == NULL)
            return fsti_error_memory(error, options->metadata_count * sizeof *marked);
        draft.metadata = marked;
        draft.has_metadata = true;
    }
    fst_status status = fsti_header_write(&draft, &layout->header, &layout->header_bytes, error);
    fsti_free(marked);
    FST_TRY(status);
    uint64_t data_bytes = 0;
    if (layout->entry_count > 0)
        data_bytes = layout->entries[layout->order[layout->entry_count - 1]].end;
    layout->file_bytes = layout->header_bytes + data_bytes;
    return FST_OK;
}

fst_status fsti_layout_make(const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_layout *layout, fst_error *error) {
    FST_TRY(check_metadata(options, error));
    FST_TRY(check_padding_names(tensors, tensor_count, options->alignment_bytes, error));
    layout->tensor_count = tensor_count;
    // With alignment, each tensor may need a padding tensor before it.
    size_t capacity = tensor_count * (options->alignment_bytes > 1 ? 2 : 1) + 1;
    layout->entries = fsti_alloc_zeroed(capacity, sizeof *layout->entries);
    layout->order = fsti_alloc((tensor_count + 1) * sizeof *layout->order);
    if (layout->entries == NULL || layout->order == NULL)
        return fsti_error_memory(error, capacity * sizeof *layout->entries);
    FST_TRY(fill_entries(layout, tensors, error));
    if (options->order != FST_SAVE_ORDER_GIVEN && !sort_entries(layout, options))
        return fsti_error_memory(error, tensor_count * sizeof(sort_key));
    FST_TRY(place_all(layout, options, error));
    return write_header(layout, options, error);
}

fst_status fsti_layout_shift(fst_layout *layout, uint64_t data_begin, uint64_t modulus,
                             fst_error *error) {
    uint64_t gap = (data_begin % modulus + modulus - layout->header_bytes % modulus) % modulus;
    size_t header_bytes = layout->header_bytes + (size_t)gap;
    if (gap == 0 || header_bytes - FSTI_FORMAT_LENGTH_BYTES > FSTI_FORMAT_HEADER_BYTES_MAX)
        return FST_OK;
    char *header = fsti_realloc(layout->header, header_bytes);
    if (header == NULL) return fsti_error_memory(error, header_bytes);
    memset(header + layout->header_bytes, ' ', (size_t)gap);
    fsti_header_put_length(header, header_bytes - FSTI_FORMAT_LENGTH_BYTES);
    layout->header = header;
    layout->header_bytes = header_bytes;
    layout->file_bytes += gap;
    return FST_OK;
}

void fsti_layout_clear(fst_layout *layout) {
    fsti_free(layout->entries);
    fsti_free(layout->order);
    fsti_free(layout->header);
    fsti_free(layout->names);
    fsti_free(layout->shapes);
    memset(layout, 0, sizeof *layout);
}

fst_status fsti_layout_open(const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_layout **out, fst_error *error) {
    fst_layout *layout = fsti_alloc_zeroed(1, sizeof *layout);
    if (layout == NULL) return fsti_error_memory(error, sizeof *layout);
    fst_status status = fsti_layout_make(tensors, tensor_count, options, layout, error);
    if (status != FST_OK) {
        fsti_layout_close(layout);
        return status;
    }
    *out = layout;
    return FST_OK;
}

void fsti_layout_close(fst_layout *layout) {
    if (layout == NULL) return;
    fsti_layout_clear(layout);
    fsti_free(layout);
}

const char *fsti_layout_header(const fst_layout *layout, size_t *size_bytes) {
    *size_bytes = layout->header_bytes;
    return layout->header;
}

size_t fsti_layout_tensor_count(const fst_layout *layout) { return layout->tensor_count; }

void fsti_layout_tensor(const fst_layout *layout, size_t tensor_index, uint64_t *offset,
                        uint64_t *size_bytes) {
    const fsti_header_entry *entry = &layout->entries[tensor_index];
    *offset = layout->header_bytes + entry->begin;
    *size_bytes = entry->end - entry->begin;
}

uint64_t fsti_layout_file_bytes(const fst_layout *layout) { return layout->file_bytes; }

size_t fsti_layout_padding_count(const fst_layout *layout) {
    return layout->entry_count - layout->tensor_count;
}
