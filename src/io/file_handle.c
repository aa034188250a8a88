// SPDX-License-Identifier: Apache-2.0
/// Open files: identified by size and modification time, read, mapped, and checked for changes.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io_private.h"
#include "location/location.h"
#include "store/store.h"

/// Retries for a device that returns only EAGAIN, about 0.2 seconds.
#define READ_RETRIES_MAX 200u

/// Bytes of a file that stay mapped after copies, see fsti_io_keep_mapped().
#define KEPT_BYTES_MAX ((uint64_t)64 << 20)
/// A page fault may map as much.
#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)

fst_status fsti_io_check_regular(const char *path, const struct stat *info, fst_error *error) {
    if (S_ISREG(info->st_mode)) return FST_OK;
    const char *kind = S_ISDIR(info->st_mode) ? "a folder (to load its model, give its path alone)"
                       : S_ISFIFO(info->st_mode) ? "a FIFO"
                       : S_ISSOCK(info->st_mode) ? "a socket"
                                                 : "a device";
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_NOT_REGULAR, location, "not a regular file but %s", kind);
}

static fst_status open_regular(const char *path, int *fd, struct stat *info, fst_error *error) {
    // O_NONBLOCK: opening a FIFO without a writer must not block. It has no effect on regular
    // files.
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0) return fsti_error_errno(error, errno, path, "open");
    fst_status status = FST_OK;
    if (fstat(*fd, info) != 0)
        status = fsti_error_errno(error, errno, path, "stat");
    else
        status = fsti_io_check_regular(path, info, error);
    if (status != FST_OK) close(*fd);
    return status;
}

fsti_file *fsti_io_file_make(const char *path, fst_error *error) {
    fsti_file *file = fsti_alloc_zeroed(1, sizeof *file);
    char *path_copy = fsti_string_copy(path, strlen(path));
    if (file == NULL || path_copy == NULL) {
        fsti_free(file);
        fsti_free(path_copy);
        fsti_error_memory(error, sizeof *file);
        return NULL;
    }
    fsti_refcount_init(&file->refs);
    pthread_mutex_init(&file->lock, NULL);
    file->path = path_copy;
    file->fd = file->fd_direct = -1;
    return file;
}

/// Makes a file from an opened cache entry. The file owns the entry's object and descriptor; on
/// failure they are closed.
static fst_status make_from_cache(fsti_cached *cached, fsti_file **out, fst_error *error) {
    struct stat info = {0};
    bool is_complete = cached->complete_fd >= 0;
    fsti_file *file = fsti_io_file_make(fsti_object_name(cached->object), error);
    fst_status status = file == NULL ? FST_E_NO_MEMORY : FST_OK;
    if (file != NULL && is_complete && fstat(cached->complete_fd, &info) != 0) {
        status = fsti_error_errno(error, errno, file->path, "stat");
        fsti_file_unref(file);
    }
    if (status != FST_OK) {
        if (is_complete) close(cached->complete_fd);
        fsti_cache_close(cached->entry);
        fsti_object_unref(cached->object);
        return status;
    }
    file->origin = cached->object;
    file->entry = cached->entry;
    if (!is_complete) file->object = cached->object;
    file->fd = cached->complete_fd;
    file->size_bytes = fsti_object_size(cached->object);
    file->device = (uint64_t)info.st_dev;
    file->modified = info.st_mtim;
    snprintf(file->words, sizeof file->words, "%s", cached->words);
    *out = file;
    return FST_OK;
}

/// An object's first bytes arrive with its size and are kept, so that reading a header needs no
/// more requests.
static fst_status open_object(const char *url, fsti_file **out, fst_error *error) {
    fsti_cached cached;
    FST_TRY(fsti_cache_open(url, &cached, error));
    return make_from_cache(&cached, out, error);
}

fst_status fsti_file_open(const char *path, fsti_file **out, fst_error *error) {
    if (fsti_location_is_url(path)) return open_object(path, out, error);
    int fd = -1;
    struct stat info = {0};
    FST_TRY(open_regular(path, &fd, &info, error));
    fsti_file *file = fsti_io_file_make(path, error);
    if (file == NULL) {
        close(fd);
        return FST_E_NO_MEMORY;
    }
    file->fd = fd;
    file->size_bytes = (uint64_t)info.st_size;
    file->device = (uint64_t)info.st_dev;
    file->modified = info.st_mtim;
    *out = file;
    return FST_OK;
}

fsti_file *fsti_file_ref(fsti_file *file) {
    fsti_refcount_ref(&file->refs);
    return file;
}

void fsti_file_unref(fsti_file *file) {
    if (file == NULL || !fsti_refcount_unref(&file->refs)) return;
    if (file->mapping != NULL) munmap(file->mapping, file->size_bytes);
    fsti_gds_unregister(file); // before its descriptor is closed
    if (file->fd_direct >= 0) close(file->fd_direct);
    if (file->fd >= 0) close(file->fd);
    if (file->release != NULL) file->release(file->context);
    if (file->derivation.release != NULL) file->derivation.release(file->derivation.context);
    fsti_file_unref(file->derivation.origin);
    fsti_cache_close(file->entry);
    fsti_object_unref(file->origin);
    pthread_mutex_destroy(&file->lock);
    fsti_free(file->path);
    fsti_free(file);
}

const char *fsti_file_path(const fsti_file *file) { return file->path; }

uint64_t fsti_file_size(const fsti_file *file) { return file->size_bytes; }

bool fsti_file_is_object(const fsti_file *file) { return file->object != NULL; }

const char *fsti_file_credentials(const fsti_file *file) {
    return fsti_object_credentials(file->origin);
}

const char *fsti_file_origin_text(const fsti_file *file) {
    return file->derivation.origin != NULL ? file->derivation.origin->words : file->words;
}

int fsti_file_cache_failure(const fsti_file *file) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    return file->entry == NULL ? 0 : fsti_cache_failure(file->entry);
}

void fsti_file_invalidate(const fsti_file *file) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    if (file->origin != NULL) fsti_cache_invalidate(file->origin);
}

bool fsti_file_is_disk_cached(const fsti_file *file) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    return file->origin != NULL && file->object == NULL;
}

void fsti_file_net_counts(const fsti_file *file, fsti_http_counts *out) {
    *out = (fsti_http_counts){0};
    if (file->derivation.origin != NULL)
        file = file->derivation.origin; // compressed: reads go to the stored file
    if (file->origin != NULL) fsti_object_counts(file->origin, out);
    fsti_http_counts kept;
    if (file->entry == NULL) return;
    fsti_cache_counts(file->entry, &kept);
    fsti_http_count(out, &kept);
}

void fsti_file_take_retries(const fsti_file *file, fsti_retries *sum) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    if (file->origin != NULL) fsti_object_take_retries(file->origin, sum);
}

void fsti_file_warn_cache(const fsti_file *file) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    if (file->entry != NULL) fsti_cache_warn_failure(file->entry);
}

uint64_t fsti_file_device(const fsti_file *file) { return file->device; }

int fsti_file_descriptor(const fsti_file *file) { return file->fd; }

int fsti_file_identity(const fsti_file *file) {
    return file->derivation.origin != NULL ? file->derivation.origin->fd : file->fd;
}

/// The first retries after EAGAIN are immediate, later ones wait a millisecond each.
bool fsti_io_should_retry(int64_t result, uint32_t *tries) {
    if (result != -EINTR && result != -EAGAIN) return false;
    if (result == -EAGAIN && *tries > 8) usleep(1000);
    return (*tries)++ < READ_RETRIES_MAX;
}

fst_status fsti_file_read(fsti_file *file, void *target, size_t size, uint64_t offset, size_t *got,
                          fst_error *error) {
    fst_error cause = {.status = FST_OK};
    uint32_t tries = 0;
    *got = 0;
    while (*got < size) {
        fsti_io_op read = {.file = file,
                           .offset = offset + *got,
                           .size = size - *got,
                           .buffer = (char *)target + *got,
                           .error = &cause};
        fsti_io_file_pread(&read);
        fsti_io_finish(&read);
        file->read_count++;
        if (fsti_io_should_retry(read.result, &tries)) continue;
        if (read.result < 0 && cause.status != FST_OK) {
            if (error != NULL) *error = cause;
            return cause.status;
        }
        if (read.result < 0) return fsti_error_errno(error, (int)-read.result, file->path, "read");
        if (read.result == 0) break;
        *got += (size_t)read.result;
        tries = 0;
    }
    return FST_OK;
}

int64_t fsti_file_read_direct(fsti_file *file, void *target, size_t size, uint64_t offset) {
    int fd = fsti_io_file_direct(file, NULL, 0);
    size_t got = 0;
    uint32_t tries = 0;
    if (fd < 0) return -EOPNOTSUPP;
    while (got < size) {
        fsti_io_op read = {.file = file,
                           .offset = offset + got,
                           .size = size - got,
                           .buffer = (char *)target + got,
                           .engine = FST_ENGINE_DIRECT};
        ssize_t result = pread(fd, read.buffer, read.size, (off_t)read.offset);
        read.result = result < 0 ? -errno : result;
        fsti_io_finish(&read);
        if (fsti_io_should_retry(read.result, &tries)) continue;
        if (read.result < 0) return read.result;
        got += (size_t)read.result;
        // A read that is not a multiple of the page ends the file or stops within a page; direct
        // reads cannot continue there.
        if (read.result == 0 || read.result % FSTI_IO_PAGE_BYTES != 0) break;
    }
    return (int64_t)got;
}

uint32_t fsti_file_read_count(const fsti_file *file) { return file->read_count; }

fst_status fsti_file_check(const fsti_file *file, fst_error *error) {
    struct stat info;
    if (file->derivation.origin != NULL) return fsti_file_check(file->derivation.origin, error);
    if (!fsti_io_file_is_plain(file)) return FST_OK; // the owner guarantees that it does not change
    if (fstat(file->fd, &info) != 0) return fsti_error_errno(error, errno, file->path, "stat");
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = file->path;
    if ((uint64_t)info.st_size != file->size_bytes)
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file changed since its header was read: it had %" PRIu64
                              " bytes, now %" PRIu64,
                              file->size_bytes, (uint64_t)info.st_size);
    if (info.st_mtim.tv_sec != file->modified.tv_sec ||
        info.st_mtim.tv_nsec != file->modified.tv_nsec)
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file was modified since its header was read");
    return FST_OK;
}

fst_status fsti_file_map_private(fsti_file *file, const fsti_map_range *range, void **out,
                                 fst_error *error) {
    int protection = range->is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (fsti_alloc_fails()) return fsti_error_memory(error, range->size_bytes);
    fsti_error_location location = {.file = file->path, .byte_offset = FST_NO_OFFSET};
    if (file->derivation.read != NULL)
        return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                              "the file is %s and can't be mapped. Load it instead",
                              file->derivation.what);
    if (file->object != NULL)
        return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                              "remote objects can't be mapped. Load it instead");
    if (!fsti_io_file_is_plain(file))
        return fsti_error_errno(error, EOPNOTSUPP, file->path, "only files can be mapped");
    // MAP_NORESERVE: pages that are never written need no memory.
    void *address = mmap(NULL, range->size_bytes, protection, MAP_PRIVATE | MAP_NORESERVE, file->fd,
                         (off_t)range->begin);
    if (address == MAP_FAILED) return fsti_error_errno(error, errno, file->path, "mmap");
    *out = address;
    return FST_OK;
}

void fsti_io_unmap(void *address, uint64_t size_bytes) { munmap(address, size_bytes); }

/// One mapping per file, shared by all readers and kept until the file is closed. Under the lock,
/// so that two threads do not map it twice.
const char *fsti_io_file_mapping(fsti_file *file) {
    if (!fsti_io_file_is_plain(file)) return file->memory;
    pthread_mutex_lock(&file->lock);
    if (file->mapping == NULL && !fsti_alloc_fails()) {
        void *address = mmap(NULL, file->size_bytes, PROT_READ, MAP_SHARED, file->fd, 0);
        if (address != MAP_FAILED) file->mapping = address;
    }
    const char *mapping = file->mapping;
    pthread_mutex_unlock(&file->lock);
    return mapping;
}

void fsti_io_drop_mapped(fsti_file *file, uint64_t begin, uint64_t end) {
    if (!fsti_io_file_is_plain(file)) return; // memory of the program
    const char *mapping = fsti_io_file_mapping(file);
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    if (mapping == NULL || end <= from) return;
    // The mapping is shared and read-only, so dropping pages loses nothing. Failure is harmless.
    madvise((void *)(uintptr_t)(mapping + from), end - from, MADV_DONTNEED);
}

bool fsti_io_keep_mapped(fsti_file *file, uint64_t begin, uint64_t end) {
    uint64_t bytes = fsti_align_up(end, HUGE_PAGE_BYTES) - fsti_align_down(begin, HUGE_PAGE_BYTES);
    if (atomic_fetch_add(&file->kept_bytes, bytes) + bytes <= KEPT_BYTES_MAX) return true;
    atomic_store(&file->kept_bytes, 0);
    fsti_io_drop_mapped(file, 0, file->size_bytes);
    return false;
}
