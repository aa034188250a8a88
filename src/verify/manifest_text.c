// SPDX-License-Identifier: Apache-2.0
/// Writes small texts atomically, by renaming a temporary file.
#include "manifest_text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "location/location.h"
#include "io/io.h"

/// Creates a temporary file next to the target. Existing files and links are not opened.
static int make_fresh(const char *path, char *fresh, size_t size) {
    const char *slash = strrchr(path, '/');
    int folder_size = slash == NULL ? 0 : (int)(slash - path) + 1;
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t chance = 0;
        if (getrandom(&chance, sizeof chance, 0) != (ssize_t)sizeof chance) return -1;
        snprintf(fresh, size, "%.*s.%s.%016llx", folder_size, path, path + folder_size,
                 (unsigned long long)chance);
        int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

static bool write_all(int fd, const char *bytes, size_t size) {
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        bytes += written;
        size -= (size_t)written;
    }
    return true;
}

fst_status fsti_text_check_target(const char *path, const char *source, fst_error *error) {
    struct stat target, other;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (path == NULL) return FST_OK;
    FST_TRY(fsti_location_require_file(path, "only a local file can be written here", error));
    bool is_model = fsti_path_is_model(path), exists = stat(path, &target) == 0;
    if (!exists && is_model)
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "this is the name of a model or an index. Choose another name");
    if (!exists) return FST_OK;
    bool is_source = source != NULL && stat(source, &other) == 0 && other.st_dev == target.st_dev &&
                     other.st_ino == target.st_ino;
    if (!S_ISREG(target.st_mode)) // renaming would replace a device, even /dev/null
        return fsti_error_set(error, FST_E_NOT_REGULAR, location, "not a regular file but %s",
                              S_ISDIR(target.st_mode) ? "a folder" : "a device or FIFO");
    if (!is_source && !is_model) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "this would overwrite %s. Choose another path",
                          is_model ? "a model" : source);
}

fst_status fsti_text_publish(const char *path, const char *bytes, size_t size, fst_error *error) {
    FST_TRY(fsti_text_check_target(path, NULL, error)); // also paths that were chosen here
    size_t room = strlen(path) + 32;
    char *fresh = fsti_alloc(room);
    if (fresh == NULL) return fsti_error_memory(error, room);
    int fd = make_fresh(path, fresh, room);
    bool good = fd >= 0 && write_all(fd, bytes, size) && fsync(fd) == 0;
    int os_errno = errno;
    if (fd >= 0 && close(fd) != 0 && good) {
        os_errno = errno;
        good = false;
    }
    if (good && rename(fresh, path) != 0) {
        os_errno = errno;
        good = false;
    }
    if (fd >= 0 && !good) unlink(fresh);
    fsti_free(fresh);
    return good ? FST_OK : fsti_error_errno(error, os_errno, path, "writing");
}
