// SPDX-License-Identifier: Apache-2.0
/// Parses index files of sharded models: {"metadata": {...}, "weight_map": {tensor: file}}.
#include <string.h>

#include "json_reader.h"

typedef struct index_build {
    fsti_index *index;
    const char *path;
    json_reader reader;
    uint64_t hash_key;
    uint32_t *slots; ///< hash table of file names: index + 1
    size_t slot_count;
    size_t entry_capacity, file_capacity;
    bool out_of_memory, map_seen;
    const char *bad_path; ///< a file name outside the folder
} index_build;

void fsti_index_clear(fsti_index *index) {
    fsti_free(index->bytes);
    fsti_free(index->entries);
    fsti_free(index->files);
    *index = (fsti_index){0};
}

/// Decodes a string in place. Only text before the cursor changes, because its closing quote has
/// been read.
static fsti_text finish_string(index_build *build, const json_string *string) {
    char *start = build->index->bytes + (string->text - build->index->bytes);
    size_t size = string->escaped ? fsti_json_decode(string, start) : string->size;
    start[size] = '\0';
    return (fsti_text){(uint32_t)(start - build->index->bytes), (uint32_t)size};
}

static bool grow_slots(index_build *build) {
    size_t slot_count = build->slot_count == 0 ? 64 : build->slot_count * 2;
    uint32_t *slots = fsti_alloc_zeroed(slot_count, sizeof *slots);
    if (slots == NULL) return false;
    const fsti_index *index = build->index;
    for (size_t i = 0; i < index->file_count; i++) {
        size_t slot =
            fsti_hash(index->bytes + index->files[i].at, index->files[i].size, build->hash_key) &
            (slot_count - 1);
        while (slots[slot] != 0) slot = (slot + 1) & (slot_count - 1);
        slots[slot] = (uint32_t)i + 1;
    }
    fsti_free(build->slots);
    build->slots = slots;
    build->slot_count = slot_count;
    return true;
}

/// The number of a file name, which is added if new.
static bool intern_file(index_build *build, fsti_text name, uint32_t *file) {
    fsti_index *index = build->index;
    const char *text = index->bytes + name.at;
    if (2 * index->file_count >= build->slot_count && !grow_slots(build)) return false;
    size_t slot = fsti_hash(text, name.size, build->hash_key) & (build->slot_count - 1);
    for (; build->slots[slot] != 0; slot = (slot + 1) & (build->slot_count - 1)) {
        const fsti_text *other = &index->files[build->slots[slot] - 1];
        if (other->size == name.size && memcmp(index->bytes + other->at, text, name.size) == 0) {
            *file = build->slots[slot] - 1;
            return true;
        }
    }
    if (!fsti_array_reserve((void **)&index->files, &build->file_capacity, index->file_count,
                            sizeof *index->files, UINT32_MAX))
        return false;
    index->files[index->file_count++] = name;
    build->slots[slot] = (uint32_t)index->file_count;
    *file = (uint32_t)index->file_count - 1;
    return true;
}

static bool read_mapping(index_build *build) {
    json_reader *reader = &build->reader;
    fsti_index *index = build->index;
    json_string name, file;
    if (!fsti_json_read_string(reader, &name) ||
        !json_expect(reader, ':', "expected ':' after a key") ||
        !fsti_json_read_string(reader, &file))
        return false;
    fsti_text file_text = finish_string(build, &file);
    if (!fsti_path_stays_inside(index->bytes + file_text.at, file_text.size)) {
        reader->cursor = index->bytes + file_text.at;
        build->bad_path = reader->cursor;
        return false;
    }
    fsti_index_entry entry = {.name = finish_string(build, &name)};
    if (!intern_file(build, file_text, &entry.file) ||
        !fsti_array_reserve((void **)&index->entries, &build->entry_capacity, index->entry_count,
                            sizeof *index->entries, UINT32_MAX)) {
        build->out_of_memory = true;
        return false;
    }
    index->entries[index->entry_count++] = entry;
    return true;
}

static bool read_weight_map(index_build *build) {
    json_reader *reader = &build->reader;
    if (build->map_seen) return json_fault(reader, "duplicate weight_map");
    build->map_seen = true;
    if (!json_expect(reader, '{', "expected an object for weight_map")) return false;
    if (json_take(reader, '}')) return true;
    do {
        if (!read_mapping(build)) return false;
    } while (json_take(reader, ','));
    return json_expect(reader, '}', "expected ',' or '}' in weight_map");
}

static bool read_index(index_build *build) {
    json_reader *reader = &build->reader;
    if (!json_expect(reader, '{', "expected '{' at the start")) return false;
    if (!json_take(reader, '}')) {
        do {
            json_string key;
            if (!fsti_json_read_string(reader, &key)) return false;
            bool is_map = fsti_json_equals(&key, "weight_map");
            if (!json_expect(reader, ':', "expected ':' after a key")) return false;
            if (is_map ? !read_weight_map(build) : !fsti_json_skip_value(reader, 1)) return false;
        } while (json_take(reader, ','));
        if (!json_expect(reader, '}', "expected ',' or '}'")) return false;
    }
    if (!build->map_seen) return json_fault(reader, "weight_map is missing");
    return fsti_json_expect_end(reader);
}

static fst_status index_failure(const index_build *build, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = build->path;
    if (build->out_of_memory) return fsti_error_memory(error, 64);
    location.byte_offset = (uint64_t)(build->reader.cursor - build->reader.start);
    if (build->bad_path != NULL)
        return fsti_error_set(error, FST_E_PATH_ESCAPES, location,
                              "weight_map lists `%.200s`, which is outside the model's folder",
                              build->bad_path);
    return fsti_error_set(error, FST_E_INDEX_JSON, location, "invalid index file: %s",
                          build->reader.fault);
}

fst_status fsti_index_parse(char *bytes, size_t byte_count, const char *path, uint64_t hash_key,
                            fsti_index *out, fst_error *error) {
    *out = (fsti_index){.bytes = bytes};
    index_build build = {.index = out, .path = path, .hash_key = hash_key};
    fst_status status = FST_OK;
    if (!fsti_json_begin(&build.reader, bytes, byte_count) || !read_index(&build))
        status = index_failure(&build, error);
    fsti_free(build.slots);
    if (status != FST_OK) fsti_index_clear(out);
    return status;
}
