// SPDX-License-Identifier: Apache-2.0
/// What a save to a store has found there.
#include <string.h>

#include "save_state.h"

void fsti_save_store_clear(store_state *store) {
    for (size_t i = 0; i < store->member_count; i++) fsti_free(store->members[i]);
    for (size_t i = 0; i < store->manifest_count; i++) fsti_free(store->manifests[i]);
    fsti_free(store->members);
    fsti_free(store->manifests);
    store->members = store->manifests = NULL;
    store->member_count = store->member_capacity = 0;
    store->manifest_count = store->manifest_capacity = 0;
}

bool fsti_save_is_single_url(const fst_writer *writer, const char *member) {
    const char *name = fsti_path_name(member);
    return fsti_save_is_single(name, strlen(name), writer->target.stem);
}

bool fsti_save_replaces_single(const fst_writer *writer, const char *member) {
    return writer->contents.file_count == 1 && strcmp(member, writer->target.published[0]) == 0;
}
