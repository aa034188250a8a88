// SPDX-License-Identifier: Apache-2.0
/// Reads bytes of a file from their source: the kernel, the program's memory or callback, a derived
/// file, or a remote object.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "io_private.h"

bool fsti_io_file_is_plain(const fsti_file *file) {
    return file->memory == NULL && file->read_at == NULL && file->derivation.read == NULL &&
           file->object == NULL;
}

static int64_t read_source(fsti_file *file, void *target, size_t size, uint64_t offset) {
    uint64_t left = offset < file->size_bytes ? file->size_bytes - offset : 0;
    if (file->memory != NULL) {
        size = (size_t)fsti_min(size, left);
        memcpy(target, file->memory + offset, size);
        return (int64_t)size;
    }
    if (file->read_at != NULL) {
        size = (size_t)fsti_min(size, left);
        int64_t got = size == 0 ? 0 : file->read_at(file->context, target, size, offset);
        return got > (int64_t)size ? -EOVERFLOW : got;
    }
    ssize_t got = pread(file->fd, target, size, (off_t)offset);
    return got < 0 ? -errno : got;
}

/// Reads with one request, and waits.
static void read_object(fsti_io_op *read) {
    uint64_t end = read->file->size_bytes;
    uint64_t left = read->offset < end ? end - read->offset : 0;
    size_t size = (size_t)fsti_min(read->size, left);
    fsti_range_read range = {
        .object = read->file->object, .offset = read->offset, .size = size, .buffer = read->buffer};
    fst_status status =
        read->file->entry != NULL
            ? fsti_cache_read(read->file->entry, &range, read->error)
            : fsti_object_read(read->file->object, read->buffer, size, read->offset, read->error);
    read->result = status == FST_OK ? (int64_t)size : -EIO;
}

void fsti_io_file_pread(fsti_io_op *read) {
    fsti_file *file = read->file;
    if (file->object != NULL) {
        read_object(read);
        return;
    }
    if (file->derivation.read != NULL)
        file->derivation.read(file->derivation.context, read);
    else
        read->result = read_source(file, read->buffer, read->size, read->offset);
}
