// SPDX-License-Identifier: Apache-2.0
/// The names of a model's files: which names a save uses, and the paths of the files that it
/// writes.
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "net/net.h"
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
    // The longer form belongs to sharded models at stores (remote_set.c).
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
    if (file == writer->file_count)
        snprintf(out, size, "%s.safetensors.index.json", writer->stem);
    else if (writer->file_count == 1)
        snprintf(out, size, "%s.safetensors", writer->stem);
    else
        snprintf(out, size, "%s-%05u-of-%05u%s.safetensors", writer->stem, file + 1,
                 writer->file_count, writer->tag);
}

static char *format_path(const fst_writer *writer, uint32_t file) {
    size_t folder_size = strlen(writer->folder) + 1;
    size_t capacity = folder_size + strlen(writer->stem) + 64;
    char *path = fsti_alloc(capacity);
    if (path == NULL) return NULL;
    snprintf(path, capacity, "%s/", writer->folder);
    format_name(writer, file, path + folder_size, capacity - folder_size);
    if (!writer->is_remote) return path;
    // A stem may contain characters that URLs must escape.
    char *name = fsti_string_copy(path + folder_size, strlen(path + folder_size));
    path[folder_size] = '\0';
    char *url = name == NULL ? NULL : fsti_url_sibling(path, name);
    fsti_free(name);
    fsti_free(path);
    return url;
}

/// The index of a sharded model gets a path too.
fst_status fsti_writer_name_files(fst_writer *writer, const char *path, fst_error *error) {
    bool is_sharded = writer->folder != NULL;
    for (uint32_t f = 0; f < writer->file_count + (is_sharded ? 1 : 0); f++) {
        fsti_free(writer->published[f]);
        writer->published[f] =
            is_sharded ? format_path(writer, f) : fsti_string_copy(path, strlen(path));
        if (writer->published[f] == NULL) return fsti_error_memory(error, strlen(path));
    }
    return FST_OK;
}
