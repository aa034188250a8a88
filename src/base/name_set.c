// SPDX-License-Identifier: Apache-2.0
/// Hash tables of names, and the search for duplicates.
#include <string.h>

#include "primitives.h"

static bool same_name(fsti_name a, fsti_name b) {
    return a.size == b.size && memcmp(a.bytes, b.bytes, a.size) == 0;
}

bool fsti_name_table_make(fsti_name_table *table, fsti_name_at name_at, const void *context,
                          size_t capacity) {
    *table = (fsti_name_table){
        .name_at = name_at, .context = context, .slot_count = 4, .key = fsti_hash_key()};
    while (table->slot_count < 2 * capacity) table->slot_count *= 2;
    table->slots = fsti_alloc_zeroed(table->slot_count, sizeof *table->slots);
    return table->slots != NULL;
}

void fsti_name_table_clear(fsti_name_table *table) {
    fsti_free(table->slots);
    table->slots = NULL;
}

static uint32_t *find_slot(const fsti_name_table *table, fsti_name name) {
    size_t mask = table->slot_count - 1;
    size_t slot = fsti_hash(name.bytes, name.size, table->key) & mask;
    while (table->slots[slot] != 0 &&
           !same_name(name, table->name_at(table->context, table->slots[slot] - 1)))
        slot = (slot + 1) & mask;
    return &table->slots[slot];
}

size_t fsti_name_table_put(fsti_name_table *table, size_t index) {
    uint32_t *slot = find_slot(table, table->name_at(table->context, index));
    size_t before = *slot == 0 ? SIZE_MAX : *slot - 1;
    *slot = (uint32_t)index + 1;
    return before;
}

size_t fsti_name_table_find(const fsti_name_table *table, fsti_name name) {
    uint32_t found = *find_slot(table, name);
    return found == 0 ? SIZE_MAX : found - 1;
}

bool fsti_names_twice(fsti_name_at name_at, const void *context, size_t count, size_t *twice) {
    fsti_name_table table;
    *twice = SIZE_MAX;
    if (!fsti_name_table_make(&table, name_at, context, count)) return false;
    for (size_t i = 0; i < count && *twice == SIZE_MAX; i++)
        if (fsti_name_table_put(&table, i) != SIZE_MAX) *twice = i;
    fsti_name_table_clear(&table);
    return true;
}
