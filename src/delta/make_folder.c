// SPDX-License-Identifier: Apache-2.0
/// The folder of a delta while it is made. Files of an earlier, killed attempt are removed; other
/// files stay.
#include "make_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "delta_private.h"
#include "output/output.h"
#include "shard_write.h"

/// A file of the folder while a version is being made.
#define MAKE_MARK "making.tmp"

/// Whether a file of the folder has the name of a shard of a delta.
static bool is_shard_name(const char *name) {
    char own[FSTI_DELTA_SHARD_NAME_BYTES];
    if (strncmp(name, "model-", 6) != 0 || strlen(name) < 15) return false;
    unsigned long shard = strtoul(name + 6, NULL, 10), count = strtoul(name + 15, NULL, 10);
    if (shard > 99999 || count > 99999) return false;
    fsti_delta_shard_name((unsigned)shard, (unsigned)count, own);
    return strcmp(name, own) == 0;
}

static bool is_temporary_name(const char *name) {
    return strncmp(name, "shard-", 6) == 0 && fsti_ends_with(name, ".tmp");
}

/// Looks for files and indexes of models. *is_begun: the mark of an earlier attempt is there, and
/// what such an attempt makes is not counted as a model.
static fst_status look_into(const char *folder, bool *is_begun, bool *has_models,
                            fst_error *error) {
    bool has_shards = false;
    *is_begun = *has_models = false;
    DIR *list = opendir(folder);
    if (list == NULL) return fsti_error_errno(error, errno, folder, "listing the folder");
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (strcmp(entry->d_name, MAKE_MARK) == 0) *is_begun = true;
        if (is_shard_name(entry->d_name))
            has_shards = true;
        else if (fsti_ends_with(entry->d_name, ".safetensors") ||
                 fsti_ends_with(entry->d_name, ".index.json"))
            *has_models = true;
    }
    closedir(list);
    if (has_shards && !*is_begun) *has_models = true;
    return FST_OK;
}

/// Removes the files of an attempt that did not end, and its mark last.
static void remove_remains(const char *folder) {
    DIR *list = opendir(folder);
    int fd = list == NULL ? -1 : dirfd(list);
    if (list == NULL) return;
    for (struct dirent *entry; fd >= 0 && (entry = readdir(list)) != NULL;) {
        const char *name = entry->d_name;
        if (strcmp(name, MAKE_MARK) != 0 && (is_shard_name(name) || is_temporary_name(name)))
            (void)unlinkat(fd, name, 0);
    }
    if (fd >= 0) (void)unlinkat(fd, MAKE_MARK, 0);
    closedir(list);
}

/// Marks the folder, so that the next attempt may remove what this one leaves. Shards of a
/// checkpoint have the same names, so without the mark nothing is removed.
static fst_status mark_folder(const char *folder, fst_error *error) {
    bool is_begun, has_models;
    FST_TRY(look_into(folder, &is_begun, &has_models, error));
    if (has_models) {
        fsti_error_location place = {.file = folder, .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_ARGUMENT, place,
                              "the folder holds files of a model; a delta needs a folder of its "
                              "own");
    }
    if (is_begun) remove_remains(folder);
    char *path = fsti_location_join(folder, "/" MAKE_MARK);
    if (path == NULL) return fsti_error_memory(error, strlen(folder));
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    fst_status status = fd < 0 ? fsti_error_errno(error, errno, path, "making the mark") : FST_OK;
    if (fd >= 0) close(fd);
    fsti_free(path);
    return status;
}

/// Paths are relative to a descriptor, so this also works when no memory is left.
void fsti_make_folder_end(const char *folder, int lock, fst_status status) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool is_made = status == FST_OK || (fd >= 0 && faccessat(fd, DELTA_INDEX_NAME, F_OK, 0) == 0);
    if (is_made && fd >= 0)
        (void)unlinkat(fd, MAKE_MARK, 0);
    else if (!is_made)
        remove_remains(folder);
    if (fd >= 0) close(fd);
    fsti_folder_unlock(lock);
}

static fst_status begin_in(const char *folder, fst_error *error) {
    char *index = fsti_location_join(folder, "/" DELTA_INDEX_NAME);
    if (index == NULL) return fsti_error_memory(error, strlen(folder));
    fsti_error_location place = {.file = folder, .byte_offset = FST_NO_OFFSET};
    bool is_there = access(index, F_OK) == 0;
    fsti_free(index);
    if (is_there)
        return fsti_error_set(error, FST_E_ARGUMENT, place,
                              "the folder holds a version already; versions are not replaced");
    return mark_folder(folder, error);
}

fst_status fsti_make_folder_begin(const char *folder, bool durable, int *lock, fst_error *error) {
    unsigned made_count;
    *lock = -1;
    FST_TRY(fsti_location_require_file(folder, "writing a delta", error));
    FST_TRY(fsti_folder_make(folder, durable, &made_count, error));
    FST_TRY(fsti_folder_lock(folder, lock, error));
    fst_status status = begin_in(folder, error);
    if (status == FST_OK) return FST_OK;
    fsti_folder_unlock(*lock);
    fsti_folder_unmake(folder, made_count);
    return status;
}
