// SPDX-License-Identifier: Apache-2.0
/// Files without a path: bytes in the program's memory, a descriptor, or a read callback.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "io_private.h"

/// A descriptor with O_DIRECT only reads whole pages, so reopen it for headers.
static fst_status reopen_buffered(fsti_file *file, fst_error *error) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
    int fd = open(link, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fsti_error_errno(error, errno, file->path, "reopening an O_DIRECT descriptor");
    close(file->fd);
    file->fd = fd;
    file->is_shared = false;
    return FST_OK;
}

/// The descriptor belongs to the caller: duplicate it.
static fst_status open_descriptor(const fst_source *source, fsti_file *file, fst_error *error) {
    struct stat info;
    file->fd = fcntl(source->descriptor, F_DUPFD_CLOEXEC, 0);
    file->is_shared = true;
    if (file->fd < 0)
        return fsti_error_errno(error, errno, file->path, "duplicating the descriptor");
    if (fstat(file->fd, &info) != 0)
        return fsti_error_errno(error, errno, file->path, "examining the descriptor");
    FST_TRY(fsti_io_check_regular(file->path, &info, error));
    if ((fcntl(file->fd, F_GETFL) & O_ACCMODE) == O_WRONLY)
        return fsti_error_errno(error, EBADF, file->path, "reading from the descriptor");
    if ((fcntl(file->fd, F_GETFL) & O_DIRECT) != 0) FST_TRY(reopen_buffered(file, error));
    file->size_bytes = (uint64_t)info.st_size;
    file->device = (uint64_t)info.st_dev;
    file->modified = info.st_mtim;
    return FST_OK;
}

static const char *default_name(const fst_source *source) {
    if (source->data != NULL) return "(memory)";
    return source->read != NULL ? "(reader)" : "(descriptor)";
}

fst_status fsti_file_open_source(const fst_source *source, fsti_file **out, fst_error *error) {
    const char *name = source->name != NULL ? source->name : default_name(source);
    fsti_file *file = fsti_io_file_make(name, error);
    if (file == NULL) {
        if (source->release != NULL) source->release(source->context);
        return FST_E_NO_MEMORY;
    }
    file->context = source->context;
    file->release = source->release;
    fst_status status = FST_OK;
    if (source->data != NULL || source->read != NULL) {
        file->memory = source->data;
        file->read_at = source->data == NULL ? source->read : NULL;
        file->size_bytes = source->size_bytes;
    } else {
        status = open_descriptor(source, file, error);
    }
    if (status == FST_OK)
        *out = file;
    else
        fsti_file_unref(file);
    return status;
}

fst_status fsti_file_derive(const fsti_derivation *derivation, fsti_file **out, fst_error *error) {
    fsti_file *file = fsti_io_file_make(fsti_file_path(derivation->origin), error);
    if (file == NULL) {
        derivation->release(derivation->context);
        fsti_file_unref(derivation->origin);
        return FST_E_NO_MEMORY;
    }
    file->derivation = *derivation;
    file->size_bytes = derivation->size_bytes;
    file->device = derivation->origin->device;
    *out = file;
    return FST_OK;
}
