// SPDX-License-Identifier: Apache-2.0
/// Targets: where a path to be written leads.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output.h"

/// As many as the kernel follows.
#define LINK_COUNT_MAX 40

const char *fsti_path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/// The folder of a path: everything before the last slash.
static char *folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return fsti_string_copy(".", 1);
    return fsti_string_copy(path, slash == path ? 1 : (size_t)(slash - path));
}

/// Where a symbolic link at `path` points, seen from where `path` is seen from; NULL without
/// memory.
static char *join_link(const char *path, const char *link) {
    const char *slash = strrchr(path, '/');
    if (link[0] == '/' || slash == NULL) return fsti_string_copy(link, strlen(link));
    size_t folder_size = (size_t)(slash - path) + 1, link_size = strlen(link);
    char *joined = fsti_alloc(folder_size + link_size + 1);
    if (joined == NULL) return NULL;
    memcpy(joined, path, folder_size);
    memcpy(joined + folder_size, link, link_size + 1);
    return joined;
}

/// Replaces *path by what it leads to, as long as that is a symbolic link.
static fst_status follow_links(char **path, fst_error *error) {
    char link[PATH_MAX];
    for (unsigned depth = 0;; depth++) {
        ssize_t size = readlink(*path, link, sizeof link - 1);
        if (size < 0) return FST_OK; // no link, or nothing there: both are found out by stat
        if (depth == LINK_COUNT_MAX)
            return fsti_error_errno(error, ELOOP, *path, "following links");
        link[size] = '\0';
        char *next = join_link(*path, link);
        if (next == NULL) return fsti_error_memory(error, sizeof link);
        fsti_free(*path);
        *path = next;
    }
}

static void note_rights(fsti_target *target, const struct stat *info) {
    target->has_rights = true;
    target->mode = info->st_mode & 07777;
    target->owner = info->st_uid;
    target->group = info->st_gid;
}

static fst_status look_at(fsti_target *target, fst_error *error) {
    struct stat info;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = target->path;
    size_t size = strlen(target->path);
    if (size == 0) return fsti_error_errno(error, ENOENT, target->path, "saving");
    if (target->path[size - 1] == '/')
        return fsti_error_set(error, FST_E_NOT_REGULAR, place, "not a regular file but a folder");
    if (stat(target->path, &info) != 0) {
        if (errno == ENOENT) return FST_OK;
        return fsti_error_errno(error, errno, target->path, "looking at the target");
    }
    if (!S_ISREG(info.st_mode))
        return fsti_error_set(error, FST_E_NOT_REGULAR, place, "not a regular file but %s",
                              S_ISDIR(info.st_mode) ? "a folder" : "a device or FIFO");
    if (faccessat(AT_FDCWD, target->path, W_OK, AT_EACCESS) != 0)
        return fsti_error_errno(error, errno, target->path, "writing to the existing file");
    note_rights(target, &info);
    return FST_OK;
}

fst_status fsti_target_find(const char *path, bool follow, fsti_target *out, fst_error *error) {
    memset(out, 0, sizeof *out);
    if (fsti_path_is_address(path))
        return fsti_address_refuse(path,
                                   strstr(path, "://") == NULL
                                       ? "an address is given as a text, not as a path object"
                                       : "nothing is written to addresses, or looked for there",
                                   error);
    out->path = fsti_string_copy(path, strlen(path));
    if (out->path == NULL) return fsti_error_memory(error, strlen(path));
    struct stat info;
    fst_status status = follow ? follow_links(&out->path, error) : FST_OK;
    bool is_link = !follow && lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
    if (status == FST_OK && !is_link) status = look_at(out, error);
    // Who could not read what the link led to can't read what takes its place.
    if (is_link && stat(path, &info) == 0 && S_ISREG(info.st_mode)) note_rights(out, &info);
    if (status == FST_OK && (out->folder = folder_of(out->path)) == NULL)
        status = fsti_error_memory(error, strlen(path));
    if (status != FST_OK) fsti_target_clear(out);
    return status;
}

fst_status fsti_target_object(const char *address, fsti_target *out, fst_error *error) {
    *out = (fsti_target){.is_object = true};
    out->path = fsti_string_copy(address, strlen(address));
    out->folder = folder_of(address);
    if (out->path != NULL && out->folder != NULL) return FST_OK;
    fsti_target_clear(out);
    return fsti_error_memory(error, strlen(address));
}

fst_status fsti_target_like(fsti_target *target, const char *like, fst_error *error) {
    struct stat info;
    if (target->has_rights) return FST_OK;
    if (stat(like, &info) != 0) return fsti_error_errno(error, errno, like, "looking at the file");
    note_rights(target, &info);
    target->like = like;
    return FST_OK;
}

void fsti_target_clear(fsti_target *target) {
    fsti_free(target->folder);
    fsti_free(target->path);
    memset(target, 0, sizeof *target);
}
