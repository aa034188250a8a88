// SPDX-License-Identifier: Apache-2.0
/// See save_fixture.h.
#include "save_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "fixture.h"

fst_save_tensor save_tensor_of(const char *name, fst_dtype dtype, const uint64_t *shape,
                               const void *data) {
    return (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                             .name = name,
                             .name_size = SIZE_MAX,
                             .dtype = dtype,
                             .rank = shape == NULL ? 0 : 1,
                             .shape = shape,
                             .data = data};
}

fst_metadata_entry save_entry_of(const char *key, const char *value) {
    return (fst_metadata_entry){
        .key = key, .key_size = SIZE_MAX, .value = value, .value_size = SIZE_MAX};
}

fst_save_options save_options_of(void) {
    return (fst_save_options){.struct_size = sizeof(fst_save_options)};
}

/// Entries of the fixture folder's subfolder (or of itself: ".") that begin with a dot.
int save_hidden_count(const char *name) {
    DIR *folder = opendir(fixture_path(name));
    int count = 0;
    for (const struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] == '.' && entry->d_name[1] != '.' && entry->d_name[1] != '\0';
    if (folder != NULL) closedir(folder);
    return count;
}

int save_file_holds(const char *name, const char *text, size_t size) {
    char bytes[4096];
    int fd = open(fixture_path(name), O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, bytes, sizeof bytes);
    if (fd >= 0) close(fd);
    return got == (ssize_t)size && memcmp(bytes, text, size) == 0;
}

int save_entry_count(const char *name) {
    DIR *folder = opendir(fixture_path(name));
    int count = -2; // "." and ".."
    for (; folder != NULL && readdir(folder) != NULL;) count++;
    if (folder != NULL) closedir(folder);
    return count;
}

int save_set_value(const char *folder, size_t tensor_count) {
    fst_model *model;
    fst_loader *loader;
    int value = -2;
    if (fst_model_open(fixture_path(folder), NULL, &model, NULL) != FST_OK) return -1;
    if (fst_loader_open(model, NULL, &loader, NULL) != FST_OK) return -1;
    for (fst_tensor *tensor; fst_loader_next(loader, -1, &tensor, NULL) == FST_OK;) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return -1;
        for (size_t i = 0; i < view.size_bytes; i++) {
            int byte = ((const char *)view.data)[i];
            value = value == -2 || value == byte ? byte : -1;
        }
        fst_tensor_unref(tensor);
    }
    if (fst_model_tensor_count(model) != tensor_count) value = -1;
    fst_loader_close(loader);
    fst_model_close(model);
    return value;
}
