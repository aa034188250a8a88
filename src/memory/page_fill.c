// SPDX-License-Identifier: Apache-2.0
/// Creates small pages of new memory together with their bytes, by userfaultfd(2). One page fault
/// for each would take most of the time of a copy.
///
/// Invariants: from fsti_buffer_begin_fill() until the fill ends, an access to a page of the buffer
/// that does not exist would wait for ever. So only fsti_buffer_fill() writes to it, and tensors
/// are returned when all their bytes are written. Without a fill the same calls are plain copies.
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory.h"

#if defined(SYS_userfaultfd) && __has_include(<linux/userfaultfd.h>)
#include <linux/userfaultfd.h>

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1 // Linux 5.11; needs no privilege
#endif

/// Larger pages are filled with zeros at the speed of memory.
#define PAGE_BYTES_MAX ((uint64_t)16 << 10)
/// Bytes by one call: kernels before 6.8 hold the lock of all mappings meanwhile.
#define CALL_BYTES_MAX ((uint64_t)512 << 10)
/// After so many pages that exist already, a fill is not faster.
#define FOUND_MAX 64u
/// A byte of each block of this size is read before a call, because a page fault maps a block of a
/// cached file, and the kernel's copy would stop at each.
#define SOURCE_BLOCK_BYTES ((uint64_t)64 << 10)

static int open_userfaultfd(void) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) == 0) return fd;
    close(fd);
    return -1;
}

int fsti_fill_open(void) {
    if (fsti_page_bytes() > PAGE_BYTES_MAX) return -1;
    return fsti_unforked_open(open_userfaultfd); // a child could write to this process by it
}

void fsti_fill_close(int fd) {
    if (fd >= 0) fsti_lockable_close(fd);
}

static struct uffdio_range range_of(const fsti_buffer *buffer) {
    return (struct uffdio_range){(uintptr_t)buffer->data, buffer->size_bytes};
}

void fsti_buffer_begin_fill(fsti_buffer *buffer, int fd) {
    struct uffdio_register request = {.range = range_of(buffer),
                                      .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (fd >= 0 && ioctl(fd, UFFDIO_REGISTER, &request) == 0) atomic_store(&buffer->fill_fd, fd);
}

void fsti_buffer_end_fill(fsti_buffer *buffer) {
    int fd = buffer == NULL ? -1 : atomic_load(&buffer->fill_fd);
    struct uffdio_range range;
    if (fd < 0) return;
    range = range_of(buffer);
    ioctl(fd, UFFDIO_UNREGISTER, &range);
    // Not before: another thread that sees it accesses pages that do not exist.
    atomic_store(&buffer->fill_fd, -1);
}

static void read_blocks(const char *source, uint64_t size) {
    for (uint64_t at = 0; at < size; at += SOURCE_BLOCK_BYTES)
        (void)*(const volatile char *)(source + at);
    (void)*(const volatile char *)(source + size - 1);
}

/// Creates pages with the bytes of `source`. Returns the bytes that were written; after them, a
/// page exists already or the fill has ended.
static uint64_t create_pages(fsti_buffer *buffer, char *target, const char *source, uint64_t size) {
    int fd = atomic_load(&buffer->fill_fd);
    struct uffdio_copy request = {.dst = (uintptr_t)target, .src = (uintptr_t)source, .len = size};
    if (fd < 0) return 0;
    read_blocks(source, size);
    if (ioctl(fd, UFFDIO_COPY, &request) == 0) return size;
    if (request.copy > 0) return (uint64_t)request.copy;
    if (request.copy != -EEXIST) fsti_buffer_end_fill(buffer);
    return 0;
}

/// Copies whole pages.
static void fill_pages(fsti_buffer *buffer, char *target, const char *source, uint64_t size) {
    uint64_t page = fsti_page_bytes();
    while (size > 0) {
        uint64_t part = fsti_min(size, CALL_BYTES_MAX);
        uint64_t written = create_pages(buffer, target, source, part);
        if (written == 0) {
            if (atomic_fetch_add(&buffer->fill_found, 1) >= FOUND_MAX) fsti_buffer_end_fill(buffer);
            written = atomic_load(&buffer->fill_fd) < 0 ? size : page;
            fsti_copy_bytes(target, source, written);
        }
        target += written;
        source += written;
        size -= written;
    }
}

/// Copies bytes within a page, which may have other bytes already.
static void fill_part(fsti_buffer *buffer, char *target, const char *source, uint64_t size) {
    uint64_t page = fsti_page_bytes();
    struct uffdio_zeropage request = {.range = {(uintptr_t)target / page * page, page}};
    int fd = atomic_load(&buffer->fill_fd);
    if (size == 0) return;
    if (fd >= 0 && ioctl(fd, UFFDIO_ZEROPAGE, &request) != 0 && request.zeropage != -EEXIST)
        fsti_buffer_end_fill(buffer);
    fsti_copy_bytes(target, source, size);
}

void fsti_buffer_fill(fsti_buffer *buffer, char *target, const char *source, uint64_t size) {
    bool is_filling = buffer != NULL && atomic_load(&buffer->fill_fd) >= 0;
    if (size == 0 || !is_filling || target < buffer->data ||
        target >= buffer->data + buffer->size_bytes) {
        fsti_copy_bytes(target, source, size);
        return;
    }
    uint64_t page = fsti_page_bytes();
    uint64_t head = fsti_min(-(uintptr_t)target % page, size), body = (size - head) / page * page;
    fill_part(buffer, target, source, head);
    fill_pages(buffer, target + head, source + head, body);
    fill_part(buffer, target + head + body, source + head + body, size - head - body);
}
#else
int fsti_fill_open(void) { return -1; }
void fsti_fill_close(int fd) { (void)fd; }
void fsti_buffer_begin_fill(fsti_buffer *buffer, int fd) {
    (void)buffer;
    (void)fd;
}
void fsti_buffer_end_fill(fsti_buffer *buffer) { (void)buffer; }
void fsti_buffer_fill(fsti_buffer *buffer, char *target, const char *source, uint64_t size) {
    (void)buffer;
    fsti_copy_bytes(target, source, size);
}
#endif
