// SPDX-License-Identifier: Apache-2.0
/// The names of a model's files: which names a save uses, and the paths of the files that it
/// writes.
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "save_state.h"

static bool has_stem(const char **name, size_t *size, const char *stem) {
    size_t stem_size = strlen(stem);
    if (*size < stem_size || memcmp(*name, stem, stem_size) != 0) return false;
    *name += stem_size;
    *size -= stem_size;
    return true;
}

static bool is_text(const char *bytes, size_t size, const char *text) {
    return size == strlen(text) && memcmp(bytes, text, size) == 0;
}

/// '#' matches a digit, 'x' a hexadecimal digit.
static bool matches(const char *name, size_t size, const char *pattern) {
    if (size != strlen(pattern)) return false;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)name[i];
        bool is_good = pattern[i] == '#'   ? isdigit(c)
                       : pattern[i] == 'x' ? isdigit(c) || (c >= 'a' && c <= 'f')
                                           : c == (unsigned char)pattern[i];
        if (!is_good) return false;
    }
    return true;
}

bool fsti_save_is_shard(const char *name, size_t size, const char *stem) {
    if (!has_stem(&name, &size, stem)) return false;
    // The longer form belongs to sharded models at stores (object_target.c).
    return matches(name, size, "-#####-of-#####.safetensors") ||
           matches(name, size, "-#####-of-#####-xxxxxxxxxxxxxxxx.safetensors");
}

bool fsti_save_is_single(const char *name, size_t size, const char *stem) {
    return has_stem(&name, &size, stem) && is_text(name, size, ".safetensors");
}

bool fsti_save_is_index(const char *name, size_t size, const char *stem) {
    return has_stem(&name, &size, stem) && is_text(name, size, ".safetensors.index.json");
}

/// The name of a file of a sharded model.
static void format_name(const fst_writer *writer, uint32_t file, char *out, size_t size) {
    if (file == writer->contents.file_count)
        snprintf(out, size, "%s.safetensors.index.json", writer->target.stem);
    else if (writer->contents.file_count == 1)
        snprintf(out, size, "%s.safetensors", writer->target.stem);
    else
        snprintf(out, size, "%s-%05u-of-%05u%s.safetensors", writer->target.stem, file + 1,
                 writer->contents.file_count, writer->target.store.tag);
}

static char *format_path(const fst_writer *writer, uint32_t file) {
    const save_target *target = &writer->target;
    size_t capacity = strlen(target->stem) + 64;
    char *name = fsti_alloc(capacity);
    if (name == NULL) return NULL;
    format_name(writer, file, name, capacity);
    char *path = target->kind->join(target->folder, name);
    fsti_free(name);
    return path;
}

char *fsti_save_listed_name(const fst_writer *writer, uint32_t file) {
    const char *path = writer->target.published[file];
    size_t size = strlen(path) + 1;
    char *text = fsti_alloc(size);
    if (text == NULL) return NULL;
    const char *name = fsti_location_name(path, text, size);
    if (name != text) memmove(text, name, strlen(name) + 1);
    return text;
}

fst_status fsti_save_refuse_index_name(const char *path, fst_error *error) {
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (!fsti_path_has_index_name(path)) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "this is the name of an index, and one file would be saved there, which "
                          "could not be opened. Choose another name");
}

/// The index of a sharded model gets a path too.
fst_status fsti_writer_name_files(fst_writer *writer, const char *path, fst_error *error) {
    bool is_sharded = writer->target.folder != NULL;
    for (uint32_t f = 0; f < writer->contents.file_count + (is_sharded ? 1 : 0); f++) {
        fsti_free(writer->target.published[f]);
        writer->target.published[f] =
            is_sharded ? format_path(writer, f) : fsti_string_copy(path, strlen(path));
        if (writer->target.published[f] == NULL) return fsti_error_memory(error, strlen(path));
    }
    return FST_OK;
}

char *fsti_path_with_ending(const char *path, const char *ending) {
    size_t capacity = strlen(path) + strlen(ending) + 1;
    char *text = fsti_alloc(capacity);
    if (text != NULL) snprintf(text, capacity, "%s%s", path, ending);
    return text;
}
