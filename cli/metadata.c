// SPDX-License-Identifier: Apache-2.0
#include "metadata.h"

#include <stdlib.h>
#include <string.h>

static int compare_texts(const char *a, size_t a_size, const char *b, size_t b_size) {
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

/// Orders by key; equal keys keep their order.
static int compare_entries(const void *a, const void *b) {
    const fst_metadata_entry *const *left = a, *const *right = b;
    int order = compare_texts((*left)->key, (*left)->key_size, (*right)->key, (*right)->key_size);
    return order != 0 ? order : (*left > *right) - (*left < *right);
}

bool cli_metadata_index(const fst_metadata_entry *entries, size_t count, metadata_index *out) {
    *out = (metadata_index){.order = calloc(count + 1, sizeof *out->order), .count = count};
    if (out->order == NULL) return false;
    for (size_t i = 0; i < count; i++) out->order[i] = &entries[i];
    qsort(out->order, count, sizeof *out->order, compare_entries);
    return true;
}

typedef struct wanted_key {
    const char *prefix, *rest;
    size_t prefix_size, rest_size;
} wanted_key;

static int compare_wanted(const void *key, const void *element) {
    const wanted_key *wanted = key;
    const fst_metadata_entry *entry = *(const fst_metadata_entry *const *)element;
    if (entry->key_size < wanted->prefix_size) {
        int order = memcmp(wanted->prefix, entry->key, entry->key_size);
        return order != 0 ? order : 1;
    }
    int order = memcmp(wanted->prefix, entry->key, wanted->prefix_size);
    return order != 0
               ? order
               : compare_texts(wanted->rest, wanted->rest_size, entry->key + wanted->prefix_size,
                               entry->key_size - wanted->prefix_size);
}

const fst_metadata_entry *cli_metadata_find(const metadata_index *index, const char *prefix,
                                            const char *rest, size_t rest_size) {
    wanted_key wanted = {prefix, rest, strlen(prefix), rest_size};
    const fst_metadata_entry **found =
        bsearch(&wanted, index->order, index->count, sizeof *index->order, compare_wanted);
    return found == NULL ? NULL : *found;
}

/// Padding tensors are not copied: a save makes its own, with their key.
static bool is_padding_key(const fst_metadata_entry *entry) {
    static const char key[] = "__padding__";
    return entry->key_size == sizeof key - 1 && memcmp(entry->key, key, sizeof key - 1) == 0;
}

/// Removes repeated keys. False without memory.
static bool keep_first(fst_metadata_entry *entries, size_t *count) {
    metadata_index index;
    if (!cli_metadata_index(entries, *count, &index)) return false;
    size_t kept = 0, all = *count;
    const fst_metadata_entry *first = all > 0 ? index.order[0] : NULL;
    for (size_t i = 1; i < all; i++) {
        fst_metadata_entry *entry = &entries[index.order[i] - entries];
        if (compare_texts(first->key, first->key_size, entry->key, entry->key_size) != 0)
            first = entry;
        else
            entry->value = NULL; // entries of files always have values
    }
    for (size_t i = 0; i < all; i++)
        if (entries[i].value != NULL) entries[kept++] = entries[i];
    free(index.order);
    *count = kept;
    return true;
}

fst_metadata_entry *cli_model_metadata(const fst_model *model, size_t *count) {
    size_t capacity = 1;
    *count = 0;
    for (size_t f = 0; f < fst_model_file_count(model); f++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        if (fst_model_file_info(model, f, &info, NULL) == FST_OK) capacity += info.metadata_count;
    }
    fst_metadata_entry *entries = calloc(capacity, sizeof *entries), entry;
    for (size_t f = 0; entries != NULL && f < fst_model_file_count(model); f++)
        for (size_t i = 0;
             *count < capacity && fst_model_metadata(model, f, i, &entry, NULL) == FST_OK; i++)
            if (!is_padding_key(&entry)) entries[(*count)++] = entry;
    if (entries == NULL || keep_first(entries, count)) return entries;
    free(entries);
    return NULL;
}
