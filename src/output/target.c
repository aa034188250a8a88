// SPDX-License-Identifier: Apache-2.0
/// Resolves the path of a file to be written: makes it absolute, follows links, and records the
/// permissions of an existing file.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output_private.h"

/// The same limit as the kernel's.
#define LINK_COUNT_MAX 40

const char *fsti_path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

fsti_anchor fsti_anchor_here(void) {
    struct stat info;
    if (stat(".", &info) != 0) return (fsti_anchor){.is_known = false};
    return (fsti_anchor){.is_known = true, .device = info.st_dev, .inode = info.st_ino};
}

fst_status fsti_anchor_check(fsti_anchor anchor, const char *path, fst_error *error) {
    fsti_anchor now = fsti_anchor_here();
    if (fsti_location_is_absolute(path)) return FST_OK;
    if (anchor.is_known && now.is_known && anchor.device == now.device && anchor.inode == now.inode)
        return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                          "the working folder changed during the save and the path is relative. "
                          "Pass an absolute path");
}

/// The folder of a path: everything before the last slash.
static char *folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return fsti_string_copy(".", 1);
    return fsti_string_copy(path, slash == path ? 1 : (size_t)(slash - path));
}

/// The target of a symbolic link, relative to the same folder as `path`; NULL without memory.
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

fst_status fsti_path_link(const char *path, char **next, fst_error *error) {
    char link[PATH_MAX];
    *next = NULL;
    ssize_t size = readlink(path, link, sizeof link - 1);
    if (size < 0) return FST_OK; // not a link, or missing; stat() reports which
    link[size] = '\0';
    *next = join_link(path, link);
    return *next == NULL ? fsti_error_memory(error, sizeof link) : FST_OK;
}

/// Refuses a link to an open file that has no name, such as /proc/self/fd/3 of a deleted one: the
/// link's text cannot be used as a path.
static fst_status check_name(const char *path, fst_error *error) {
    struct stat info;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink > 0) return FST_OK;
    return fsti_error_set(error, FST_E_NOT_REGULAR, location,
                          "the link leads to an open file without a name, which can't be replaced");
}

/// Replaces *path by its target while it is a symbolic link.
static fst_status follow_links(char **path, fst_error *error) {
    for (unsigned depth = 0;; depth++) {
        char *next;
        FST_TRY(fsti_path_link(*path, &next, error));
        if (next == NULL) return FST_OK;
        fst_status status = depth == LINK_COUNT_MAX
                                ? fsti_error_errno(error, ELOOP, *path, "following links")
                                : check_name(*path, error);
        if (status != FST_OK) {
            fsti_free(next);
            return status;
        }
        fsti_free(*path);
        *path = next;
    }
}

/// Appends the components of `rest` to the path in `out`, without looking at the file system. Empty
/// and "." components are left out. If `removes_parents`, a parent reference removes the component
/// before it, which must not be a link. False if PATH_MAX bytes are too few.
static bool append_components(char *out, const char *rest, bool removes_parents) {
    size_t size = strcmp(out, "/") == 0 ? 0 : strlen(out);
    while (*(rest += strspn(rest, "/")) != '\0') {
        size_t part = strcspn(rest, "/");
        if (removes_parents && part == 2 && memcmp(rest, "..", 2) == 0) {
            while (size > 0 && out[size - 1] != '/') size--;
            if (size > 0) size--;
        } else if (part != 1 || rest[0] != '.') {
            if (size + part + 2 > PATH_MAX) return false;
            out[size++] = '/';
            memcpy(out + size, rest, part);
            size += part;
        }
        rest += part;
    }
    if (size == 0) out[size++] = '/';
    out[size] = '\0';
    return true;
}

/// Appends components that do not exist, so none of them is a link.
static bool append_missing(char *out, const char *rest) {
    return append_components(out, rest, true);
}

/// Whether both paths lead to the same folder. The path of the working folder may not: a parent
/// may be unsearchable, or hidden by a mount.
static bool is_same_folder(const char *one, const char *other) {
    struct stat first, second;
    return stat(one, &first) == 0 && stat(other, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

/// Resolves a folder that exists. errno is ENOENT if it does not, and only then.
static bool resolve_existing(const char *folder, char *out) {
    if (realpath(folder, out) == NULL) return false;
    if (is_same_folder(folder, out)) return true;
    errno = EACCES;
    return false;
}

bool fsti_path_resolve(const char *path, bool follow_last, char *out) {
    char *copy = fsti_string_copy(path, strlen(path));
    if (copy == NULL || (follow_last && follow_links(&copy, NULL) != FST_OK)) {
        fsti_free(copy);
        return false;
    }
    size_t end = (size_t)(fsti_path_name(copy) - copy);
    bool is_found = false;
    errno = ENOENT;
    while (!is_found && errno == ENOENT && end > 0) {
        char kept = copy[end];
        copy[end] = '\0';
        is_found = resolve_existing(copy, out);
        copy[end] = kept;
        if (is_found || errno != ENOENT) break;
        while (end > 0 && copy[end - 1] == '/') end--;
        while (end > 0 && copy[end - 1] != '/') end--;
    }
    if (!is_found && errno == ENOENT) is_found = resolve_existing(".", out);
    is_found = is_found && append_missing(out, copy + end);
    fsti_free(copy);
    return is_found;
}

/// Makes a path absolute without looking at its links. Parent references stay, because a link may
/// be before them. False if PATH_MAX bytes are too few.
static bool spell_out(const char *path, char *out) {
    out[0] = '\0';
    if (path[0] != '/' && getcwd(out, PATH_MAX) == NULL) return false;
    return append_components(out, path, false);
}

const char *fsti_path_settle_inside(const char *path, const char *folder, const char *settled,
                                    char *out) {
    char whole[PATH_MAX], begin[PATH_MAX];
    bool is_local = !fsti_location_looks_like_url(path) && !fsti_location_looks_like_url(folder);
    size_t size = 0;
    if (is_local && spell_out(folder, begin) && spell_out(path, whole)) size = strlen(begin);
    bool is_inside = size > 0 && strncmp(whole, begin, size) == 0 && whole[size] == '/' &&
                     strstr(whole + size, "/../") == NULL;
    if (!is_inside) return fsti_path_settle(path, out);
    int needed = snprintf(out, PATH_MAX, "%s%s", settled, whole + size);
    return needed < PATH_MAX ? out : path;
}

/// Whether the last part of a path can only be a folder: it is empty or refers to one.
static bool names_folder(const char *path) {
    const char *name = fsti_path_name(path);
    size_t dot_count = strspn(name, ".");
    return dot_count <= 2 && name[dot_count] == '\0';
}

/// Resolves the links of the path's folders, and its last part if that leads to a folder. False
/// also for a path that can only lead to a folder and leads to none.
static bool resolve_folders(const char *path, char *out) {
    struct stat info;
    if (path[0] == '\0' || fsti_location_looks_like_url(path)) return false;
    bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (names_folder(path) && !is_folder) return false;
    return fsti_path_resolve(path, is_folder, out);
}

const char *fsti_path_settle(const char *path, char *out) {
    char plain[PATH_MAX] = "/";
    bool is_rooted = path[0] == '/';
    if (!resolve_folders(path, out)) return path;
    // Messages contain the path, so a path without links stays the given one.
    bool is_plain = (is_rooted || realpath(".", plain) != NULL) && append_missing(plain, path) &&
                    strcmp(plain, out) == 0;
    return is_plain ? path : out;
}

fst_status fsti_path_absolute(const char *path, char **out, fst_error *error) {
    char resolved[PATH_MAX];
    bool is_resolved =
        resolve_folders(path, resolved) &&
        strlen(resolved) + NAME_MAX < PATH_MAX; // for temporary names in the same folder
    const char *chosen = is_resolved ? resolved : path;
    *out = fsti_string_copy(chosen, strlen(chosen));
    return *out == NULL ? fsti_error_memory(error, strlen(chosen)) : FST_OK;
}

static void note_rights(fsti_target *target, const struct stat *info) {
    target->has_rights = true;
    target->mode = info->st_mode & 07777;
    target->owner = info->st_uid;
    target->group = info->st_gid;
}

static fst_status examine_target(fsti_target *target, fst_error *error) {
    struct stat info;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = target->path;
    if (target->path[0] == '\0') return fsti_error_errno(error, ENOENT, target->path, "saving");
    if (names_folder(target->path))
        return fsti_error_set(error, FST_E_NOT_REGULAR, location, "a folder, not a regular file");
    if (stat(target->path, &info) != 0) {
        if (errno == ENOENT) return FST_OK;
        return fsti_error_errno(error, errno, target->path, "examining the target");
    }
    if (!S_ISREG(info.st_mode))
        return fsti_error_set(error, FST_E_NOT_REGULAR, location, "not a regular file but %s",
                              S_ISDIR(info.st_mode) ? "a folder" : "a device or FIFO");
    if (faccessat(AT_FDCWD, target->path, W_OK, AT_EACCESS) != 0) {
        if (errno == ENOENT) return FST_OK; // removed since
        return fsti_error_errno(error, errno, target->path, "writing to the existing file");
    }
    note_rights(target, &info);
    return FST_OK;
}

/// Resolves the folder of the file that links led to.
static fst_status fix_folder(fsti_target *target, fst_error *error) {
    char *linked = target->path;
    fst_status status = fsti_path_absolute(linked, &target->path, error);
    fsti_free(linked);
    return status;
}

fst_status fsti_target_find(const char *path, bool follow, fsti_target *out, fst_error *error) {
    memset(out, 0, sizeof *out);
    FST_TRY(fsti_location_require_path(path, error));
    FST_TRY(fsti_path_absolute(path, &out->path, error));
    struct stat info;
    fst_status status = follow ? follow_links(&out->path, error) : FST_OK;
    if (status == FST_OK && follow) status = fix_folder(out, error);
    bool is_link = !follow && lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
    if (status == FST_OK && !is_link) status = examine_target(out, error);
    // Users who could not read the link's target must not read its replacement.
    if (is_link && stat(path, &info) == 0 && S_ISREG(info.st_mode)) note_rights(out, &info);
    if (status == FST_OK && (out->folder = folder_of(out->path)) == NULL)
        status = fsti_error_memory(error, strlen(path));
    if (status != FST_OK) fsti_target_clear(out);
    return status;
}

fst_status fsti_target_object(const char *url, fsti_target *out, fst_error *error) {
    *out = (fsti_target){.is_object = true};
    out->path = fsti_string_copy(url, strlen(url));
    out->folder = folder_of(url);
    if (out->path != NULL && out->folder != NULL) return FST_OK;
    fsti_target_clear(out);
    return fsti_error_memory(error, strlen(url));
}

fst_status fsti_target_like(fsti_target *target, const char *like, fst_error *error) {
    struct stat info;
    if (target->has_rights) return FST_OK;
    if (stat(like, &info) != 0) return fsti_error_errno(error, errno, like, "examining the file");
    note_rights(target, &info);
    target->like = like;
    return FST_OK;
}

void fsti_target_clear(fsti_target *target) {
    fsti_free(target->folder);
    fsti_free(target->path);
    memset(target, 0, sizeof *target);
}

fst_status fsti_output_refuse_object(const fsti_output *output, fst_error *error) {
    return fsti_url_refuse(output->target.path,
                           "an object is sent sequentially and can't be written in place", error);
}
