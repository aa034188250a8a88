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
#include <sys/stat.h>
#include <unistd.h>

#include "delta_private.h"
#include "output/output.h"
#include "shard_write.h"

/// A file of the folder while a version is being made: MARK_WORD, and a line for each shard that
/// gets its name. Shards of a checkpoint have the same names, so other shards are never removed.
#define MAKE_MARK "making.tmp"
#define MARK_WORD "fastsafetensors-making 1\n"
#define MARK_BLOCK_BYTES 4096u
#define LINE_BYTES (FSTI_DELTA_SHARD_NAME_BYTES + 64)

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
    char own[FSTI_SHARD_TEMPORARY_BYTES];
    if (strcmp(name, DELTA_INDEX_NAME ".tmp") == 0) return true;
    if (strncmp(name, "shard-", 6) != 0) return false;
    fsti_shard_temporary_name((uint32_t)strtoul(name + 6, NULL, 10), own);
    return strcmp(name, own) == 0;
}

typedef enum mark_kind { MARK_ABSENT, MARK_EMPTY, MARK_OWN, MARK_FOREIGN } mark_kind;

static int open_mark(int folder) {
    const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    return folder < 0 ? -1 : openat(folder, MAKE_MARK, flags);
}

static mark_kind kind_of_mark(int folder) {
    char text[sizeof MARK_WORD] = "";
    int fd = open_mark(folder);
    if (fd < 0) return MARK_ABSENT;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return MARK_EMPTY;
    return strcmp(text, MARK_WORD) == 0 ? MARK_OWN : MARK_FOREIGN;
}

/// Whether the mark has a line. Read in blocks, so that it works without memory; the end of a block
/// is kept, because the line may begin there.
static bool mark_lists(int folder, const char *line) {
    char text[LINE_BYTES + MARK_BLOCK_BYTES + 1];
    size_t kept = 0, overlap = strlen(line) - 1;
    bool is_found = false;
    int fd = open_mark(folder);
    ssize_t got = fd < 0 ? 0 : 1;
    while (!is_found && got > 0) {
        got = read(fd, text + kept, MARK_BLOCK_BYTES);
        if (got <= 0) break;
        size_t size = kept + (size_t)got;
        text[size] = '\0';
        is_found = strstr(text, line) != NULL;
        kept = size < overlap ? size : overlap;
        memmove(text, text + size - kept, kept);
    }
    if (fd >= 0) close(fd);
    return is_found;
}

/// The mark's line for a file.
static void format_line(const struct stat *info, const char *name, char *line, size_t size) {
    snprintf(line, size, "shard %llu %llu %s\n", (unsigned long long)info->st_ino,
             (unsigned long long)info->st_size, name);
}

/// Whether the attempt whose mark this is has written the file.
static bool is_of_attempt(mark_kind mark, int folder, const char *name) {
    struct stat info;
    char line[LINE_BYTES];
    if (folder < 0 || mark != MARK_OWN) return false;
    if (is_temporary_name(name)) return true;
    if (!is_shard_name(name) || fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return false;
    format_line(&info, name, line, sizeof line);
    return mark_lists(folder, line);
}

static fst_status refuse_folder(const char *folder, const char *why, fst_error *error) {
    fsti_error_location place = {.file = folder, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_ARGUMENT, place, "%s", why);
}

/// FST_E_ARGUMENT if there are files or indexes of models that an earlier attempt has not made, or
/// if the mark was written by another program.
static fst_status look_into(const char *folder, fst_error *error) {
    const char *why = NULL;
    DIR *list = opendir(folder);
    int fd = list == NULL ? -1 : dirfd(list);
    if (list == NULL) return fsti_error_errno(error, errno, folder, "listing the folder");
    mark_kind mark = kind_of_mark(fd);
    if (mark == MARK_FOREIGN)
        why = "the folder holds a file " MAKE_MARK " of something else. Choose another folder";
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        const char *name = entry->d_name;
        bool is_model = fsti_ends_with(name, ".safetensors") || fsti_ends_with(name, ".index.json");
        if ((is_model || is_temporary_name(name)) && !is_of_attempt(mark, fd, name))
            why = "the folder holds files of a model. Choose another folder for the delta";
    }
    closedir(list);
    return why == NULL ? FST_OK : refuse_folder(folder, why, error);
}

/// Removes the files of an attempt that did not end, and its mark last.
static void remove_remains(const char *folder) {
    DIR *list = opendir(folder);
    if (list == NULL) return;
    int fd = dirfd(list);
    mark_kind mark = kind_of_mark(fd);
    if (fd >= 0 && (mark == MARK_EMPTY || mark == MARK_OWN)) {
        for (struct dirent *entry; (entry = readdir(list)) != NULL;)
            if (is_of_attempt(mark, fd, entry->d_name)) (void)unlinkat(fd, entry->d_name, 0);
        (void)unlinkat(fd, MAKE_MARK, 0);
    }
    closedir(list);
}

static fst_status write_mark(const char *folder, int flags, const char *text, bool durable,
                             fst_error *error) {
    char *path = fsti_location_join(folder, "/" MAKE_MARK);
    if (path == NULL) return fsti_error_memory(error, strlen(folder));
    bool is_new = (flags & O_CREAT) != 0;
    fst_status limit = is_new ? fsti_file_check_limit(path, strlen(text), error) : FST_OK;
    if (limit != FST_OK) {
        fsti_free(path);
        return limit;
    }
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | flags, 0666);
    ssize_t put = fd < 0 ? -1 : write(fd, text, strlen(text));
    if (put >= 0 && put < (ssize_t)strlen(text)) errno = ENOSPC;
    bool good = put == (ssize_t)strlen(text) && (!durable || fsync(fd) == 0);
    fst_status status = good ? FST_OK : fsti_error_errno(error, errno, path, "writing the mark");
    if (fd >= 0) close(fd);
    if (fd >= 0 && !good && is_new) (void)unlink(path);
    fsti_free(path);
    return status;
}

fst_status fsti_make_folder_list(const char *folder, int fd, const char *name, bool durable,
                                 fst_error *error) {
    struct stat info;
    char line[LINE_BYTES];
    if (fstat(fd, &info) != 0)
        return fsti_error_errno(error, errno, folder, "examining a new shard");
    format_line(&info, name, line, sizeof line);
    return write_mark(folder, O_APPEND, line, durable, error);
}

/// Marks the folder, so that the next attempt may remove what this one leaves.
static fst_status mark_folder(const char *folder, fst_error *error) {
    FST_TRY(look_into(folder, error));
    remove_remains(folder);
    return write_mark(folder, O_CREAT | O_TRUNC, MARK_WORD, false, error);
}

/// Paths are relative to a descriptor, so this also works when no memory is left.
void fsti_make_folder_end(make_folder *folder, fst_status status) {
    int fd = open(folder->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool is_made = status == FST_OK || (fd >= 0 && faccessat(fd, DELTA_INDEX_NAME, F_OK, 0) == 0);
    if (is_made && fd >= 0)
        (void)unlinkat(fd, MAKE_MARK, 0);
    else if (!is_made)
        remove_remains(folder->path);
    if (fd >= 0) close(fd);
    fsti_folder_unlock(folder->lock);
    fsti_folder_leave(&folder->use, !is_made);
}

static fst_status begin_in(const char *folder, fst_error *error) {
    char *index = fsti_location_join(folder, "/" DELTA_INDEX_NAME);
    if (index == NULL) return fsti_error_memory(error, strlen(folder));
    bool is_there = access(index, F_OK) == 0;
    fsti_free(index);
    if (is_there)
        return refuse_folder(
            folder, "the folder holds a version already; versions are not replaced", error);
    return mark_folder(folder, error);
}

fst_status fsti_make_folder_begin(make_folder *folder, bool durable, fst_error *error) {
    folder->lock = -1;
    FST_TRY(
        fsti_location_require_file(folder->path, "a delta is written to a local folder", error));
    FST_TRY(fsti_folder_make(folder->path, durable, &folder->use, error));
    fst_status status = fsti_folder_lock(folder->path, &folder->lock, error);
    if (status == FST_OK) status = begin_in(folder->path, error);
    if (status == FST_OK) return FST_OK;
    fsti_folder_unlock(folder->lock);
    fsti_folder_leave(&folder->use, true);
    return status;
}
