// SPDX-License-Identifier: Apache-2.0
/// Opens a model twice: if the paths lead to the same files after both, then the second model has
/// just these files open, because it was opened in between.
#include "steady_model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct file_state {
    uint64_t device, inode, size_bytes;
    struct timespec modified;
} file_state;

struct steady_files {
    size_t count;
    file_state states[];
};

/// How often a model is opened while saves replace it.
#define OPEN_COUNT_MAX 8

static void note_file(const fst_model *model, size_t file, file_state *out) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    struct stat found;
    memset(out, 0, sizeof *out);
    if (fst_model_file_info(model, file, &info, NULL) != FST_OK || stat(info.path, &found) != 0)
        return;
    out->device = (uint64_t)found.st_dev;
    out->inode = (uint64_t)found.st_ino;
    out->size_bytes = (uint64_t)found.st_size;
    out->modified = found.st_mtim;
}

static steady_files *note_files(const fst_model *model) {
    size_t count = fst_model_file_count(model);
    steady_files *files = calloc(1, sizeof *files + count * sizeof *files->states);
    if (files == NULL) return NULL;
    files->count = count;
    for (size_t i = 0; i < count; i++) note_file(model, i, &files->states[i]);
    return files;
}

static bool is_same(const steady_files *one, const steady_files *other) {
    bool same = one->count == other->count;
    for (size_t i = 0; same && i < one->count; i++)
        same = one->states[i].device == other->states[i].device &&
               one->states[i].inode == other->states[i].inode &&
               one->states[i].size_bytes == other->states[i].size_bytes &&
               one->states[i].modified.tv_sec == other->states[i].modified.tv_sec &&
               one->states[i].modified.tv_nsec == other->states[i].modified.tv_nsec;
    return same;
}

static int refuse_changed(const char *path) {
    return cli_refuse(EXIT_UNREADABLE, "FileChanged",
                      "%s was replaced or changed while it was read. Try again", path);
}

int steady_open(const char *path, fst_model **model, steady_files **files) {
    fst_error error;
    steady_files *before = NULL;
    *model = NULL;
    *files = NULL;
    for (int tries = 0; tries < OPEN_COUNT_MAX; tries++) {
        fst_model *opened;
        fst_status status = fst_model_open(path, NULL, &opened, &error);
        if (status != FST_OK) {
            free(before);
            return cli_fail(&error);
        }
        steady_files *after = note_files(opened);
        if (after != NULL && before != NULL && is_same(before, after)) {
            free(before);
            *model = opened;
            *files = after;
            return EXIT_OK;
        }
        fst_model_close(opened);
        free(before);
        before = after;
        if (after == NULL) return cli_no_memory();
    }
    free(before);
    return refuse_changed(path);
}

int steady_check(const char *path, const steady_files *files) {
    fst_model *model;
    // Also the index, or the list of the folder's files, may be another one.
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return refuse_changed(path);
    steady_files *now = note_files(model);
    fst_model_close(model);
    if (now == NULL) return cli_no_memory();
    bool same = is_same(files, now);
    free(now);
    return same ? EXIT_OK : refuse_changed(path);
}

void steady_close(fst_model *model, steady_files *files) {
    fst_model_close(model);
    free(files);
}
