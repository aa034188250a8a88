// SPDX-License-Identifier: Apache-2.0
/// A temporary folder for fuzz targets, and functions that read everything that opening a model
/// gives.
#ifndef FUZZ_FILES_H
#define FUZZ_FILES_H

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "fuzz_input.h"

/// Larger tensors are not loaded: the fuzzer looks for faults, not for slow inputs.
#define FUZZ_LOAD_BYTES_MAX ((uint64_t)16 << 20)

static char fuzz_folder[64];

static inline int fuzz_remove_one(const char *path, const struct stat *info, int type,
                                  struct FTW *place) {
    (void)info, (void)type;
    if (place->level > 0) remove(path);
    return 0;
}

/// Removes everything in the folder.
static inline void fuzz_clear(void) {
    nftw(fuzz_folder, fuzz_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void fuzz_leave(void) {
    fuzz_clear();
    rmdir(fuzz_folder);
}

/// Changes to a new folder, once per process; it is deleted at exit. True the first time.
static inline bool fuzz_enter(const char *name) {
    if (fuzz_folder[0] != '\0') return false;
    snprintf(fuzz_folder, sizeof fuzz_folder, "%s/fuzz-%s-%d",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", name, (int)getpid());
    if (mkdir(fuzz_folder, 0700) != 0 || chdir(fuzz_folder) != 0 || atexit(fuzz_leave) != 0)
        abort();
    return true;
}

/// Writes a file, replacing an existing one of the name.
static inline void fuzz_put(const char *path, const void *bytes, size_t size) {
    remove(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return; // its folder is something else by now
    require(write(fd, bytes, size) == (ssize_t)size);
    close(fd);
}

/// Checks that a message is printable.
static inline void fuzz_check_error(const fst_error *error) {
    size_t size = strlen(error->message);
    int columns;
    require(error->status != FST_OK && size > 0);
    for (size_t at = 0; at < size;) {
        at += fst_text_step(error->message + at, size - at, NULL, &columns);
        require(columns >= 0);
    }
}

/// Loads the first tensor, or all if `target` is NULL. Returns their bytes; at most `capacity`
/// bytes are copied to `target`.
static inline size_t fuzz_load(fst_model *model, void *target, size_t capacity) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_loader *loader;
    fst_tensor *tensor;
    fst_error error;
    size_t size = 0;
    options.thread_count = 1;
    options.mode = FST_MODE_LOAD;
    if (fst_loader_open(model, &options, &loader, &error) != FST_OK) {
        fuzz_check_error(&error);
        return 0;
    }
    fst_status status;
    while ((status = fst_loader_next(loader, -1, &tensor, &error)) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        require(fst_tensor_view_get(tensor, &view, &error) == FST_OK);
        if (size == 0 && target != NULL) {
            size = view.size_bytes < capacity ? (size_t)view.size_bytes : capacity;
            memcpy(target, view.data, size);
        }
        fst_tensor_unref(tensor);
    }
    if (status != FST_END) fuzz_check_error(&error);
    fst_loader_close(loader);
    return status == FST_END ? size : 0;
}

/// Reads everything that a model reports. Returns the bytes of its tensors.
static inline uint64_t fuzz_look(const fst_model *model) {
    fst_error error;
    uint64_t total = 0;
    for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        size_t found;
        require(fst_model_tensor_info(model, i, &info, &error) == FST_OK);
        require(fst_model_find(model, info.name, info.name_size, &found, &error) == FST_OK);
        require(found == i);
        total += info.size_bytes;
    }
    for (size_t i = 0; i < fst_model_file_count(model); i++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        fst_metadata_entry entry;
        require(fst_model_file_info(model, i, &info, &error) == FST_OK);
        for (size_t k = 0; k < info.metadata_count; k++)
            require(fst_model_metadata(model, i, k, &entry, &error) == FST_OK);
    }
    return total;
}

/// Opens a path, reads all its information, and loads it if it is small. False if it is not a
/// model.
static inline bool fuzz_open(const char *path, uint32_t flags) {
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    fst_model *model;
    fst_error error;
    options.flags = flags;
    if (fst_model_open(path, &options, &model, &error) != FST_OK) {
        fuzz_check_error(&error);
        return false;
    }
    if (fuzz_look(model) <= FUZZ_LOAD_BYTES_MAX) (void)fuzz_load(model, NULL, 0);
    fst_model_close(model);
    return true;
}

#endif
