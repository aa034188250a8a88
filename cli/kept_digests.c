// SPDX-License-Identifier: Apache-2.0
/// Selects the digests in a model's metadata that stay valid when it is rewritten.
#include "kept_digests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIGEST_KEY "digest."
#define TENSOR_KEY "digest.tensor."
#define ALGORITHM_KEY "digest.algorithm"

static bool begins_with(const fst_metadata_entry *entry, const char *prefix) {
    return entry->key_size >= strlen(prefix) && memcmp(entry->key, prefix, strlen(prefix)) == 0;
}

/// Renames an entry's key for the new model. False if the tensor's bytes change.
static bool follow_tensor(kept_digests *digests, fst_metadata_entry *entry) {
    size_t prefix = strlen(TENSOR_KEY), source, name_size = entry->key_size - prefix;
    const char *name = entry->key + prefix;
    if (fst_model_find(digests->model, name, name_size, &source, NULL) != FST_OK) return false;
    const fst_save_tensor *tensor = digests->find(digests->context, source);
    if (tensor == NULL) return false;
    if (tensor->name_size == name_size && memcmp(tensor->name, name, name_size) == 0) return true;
    char *key = calloc(prefix + tensor->name_size + 1, 1);
    if (key == NULL) return false;
    memcpy(key, TENSOR_KEY, sizeof TENSOR_KEY);
    memcpy(key + prefix, tensor->name, tensor->name_size);
    entry->key = digests->keys[digests->key_count++] = key;
    entry->key_size = prefix + tensor->name_size;
    return true;
}

/// Whether all files with embedded digests use the same algorithm.
static bool is_one_algorithm(const fst_model *model) {
    fst_metadata_entry first = {0}, entry;
    for (size_t f = 0; f < fst_model_file_count(model); f++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        if (fst_model_file_info(model, f, &info, NULL) != FST_OK) return false;
        for (size_t i = 0; i < info.metadata_count; i++) {
            if (fst_model_metadata(model, f, i, &entry, NULL) != FST_OK) return false;
            if (!begins_with(&entry, ALGORITHM_KEY)) continue;
            if (first.key != NULL && strcmp(first.value, entry.value) != 0) return false;
            first = entry;
        }
    }
    return true;
}

static void drop_all(kept_digests *digests) {
    size_t kept = 0;
    for (size_t i = 0; i < digests->entry_count; i++)
        if (!begins_with(&digests->entries[i], DIGEST_KEY))
            digests->entries[kept++] = digests->entries[i];
    digests->entry_count = kept;
    cli_print_note("warning: the embedded digests are removed, because they describe the old "
                   "tensors. 'hash --embed' writes new ones");
}

bool cli_digests_select(kept_digests *digests) {
    size_t kept = 0, had = 0, followed = 0;
    digests->keys = calloc(digests->entry_count + 1, sizeof *digests->keys);
    if (digests->keys == NULL) return false;
    for (size_t i = 0; i < digests->entry_count; i++) {
        fst_metadata_entry entry = digests->entries[i];
        if (begins_with(&entry, TENSOR_KEY)) {
            had++;
            if (!follow_tensor(digests, &entry)) continue;
            followed++;
        }
        digests->entries[kept++] = entry;
    }
    digests->entry_count = kept;
    if (had > 0 && (followed < digests->tensor_count || !is_one_algorithm(digests->model)))
        drop_all(digests);
    return true;
}

void cli_digests_clear(kept_digests *digests) {
    for (size_t i = 0; i < digests->key_count; i++) free(digests->keys[i]);
    free(digests->keys);
}
