// SPDX-License-Identifier: Apache-2.0
/// Finds out whether a file can be read with O_DIRECT: first by file system, then by trying.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "io_private.h"

/// File systems where direct reads are refused, useless or slow. Numbers: linux/magic.h and the
/// file systems' sources. All but the first two wait for other machines or processes.
typedef struct buffered_system {
    unsigned long magic;
    const char *reason;
    bool is_distant, is_memory;
    bool may_be_direct; ///< some of its file systems serve direct reads well, but not writes
} buffered_system;

static const buffered_system buffered_systems[] = {
    {0x01021994, "tmpfs is already in memory", false, true, false},
    {0x858458f6, "ramfs is already in memory", false, true, false},
    {0x6969, "NFS is read through its cache", true, false, false},
    {0xff534d42, "CIFS is read through its cache", true, false, false},
    {0xfe534d42, "SMB is read through its cache", true, false, false},
    {0x65735546, "FUSE is written through its cache", true, false, true},
    {0x01021997, "9p is read through its cache", true, false, false},
    {0x00c36400, "Ceph is read through its cache", true, false, false},
    {0x0bd00bd0, "Lustre is read through its cache", true, false, false},
};

static const buffered_system *find_buffered(int fd) {
    static const buffered_system hidden = {0, "no disk", true, false, false};
    struct statfs info;
    if (fsti_io_test_disables(FSTI_TEST_NO_DISK)) return &hidden;
    if (fstatfs(fd, &info) != 0) return NULL;
    for (size_t i = 0; i < sizeof buffered_systems / sizeof *buffered_systems; i++)
        if ((unsigned long)info.f_type == buffered_systems[i].magic) return &buffered_systems[i];
    return NULL;
}

/// Whether a file in memory has no holes. (A mapping would allocate their pages.)
static bool has_all_pages(const fsti_file *file) {
    struct stat info;
    return fstat(file->fd, &info) == 0 && info.st_size >= 0 &&
           (uint64_t)info.st_blocks * 512 ==
               fsti_align_up((uint64_t)info.st_size, fsti_page_bytes());
}

bool fsti_file_has_own_readahead(fsti_file *file) {
    if (!fsti_io_file_is_plain(file)) return false;
    pthread_mutex_lock(&file->lock);
    // Ask once, because a network file system may answer slowly.
    if (!file->file_system_known) {
        const buffered_system *found = find_buffered(file->fd);
        file->has_own_readahead = found != NULL;
        file->is_distant = found != NULL && found->is_distant;
        file->is_memory = found != NULL && found->is_memory && has_all_pages(file);
    }
    file->file_system_known = true;
    bool is_cached = file->has_own_readahead;
    pthread_mutex_unlock(&file->lock);
    return is_cached;
}

bool fsti_file_is_distant(fsti_file *file) {
    return fsti_file_has_own_readahead(file) && file->is_distant;
}

bool fsti_io_file_is_memory(fsti_file *file) {
    return fsti_file_has_own_readahead(file) && file->is_memory;
}

/// Opens `path` if it still is the file behind `fd`; else returns -1.
static int open_same(const char *path, int fd, int flags) {
    struct stat is, was;
    int again = open(path, flags | O_NONBLOCK);
    if (again < 0) return -1;
    if (fstat(again, &is) == 0 && fstat(fd, &was) == 0 && is.st_dev == was.st_dev &&
        is.st_ino == was.st_ino)
        return again;
    close(again);
    errno = ESTALE;
    return -1;
}

/// Whether the kernel reports that direct reads do not help: it would serve them from the page
/// cache (journaled data, encryption, compression) or requires larger blocks than
/// FSTI_IO_PAGE_BYTES. Kernels before 6.1 do not report it; then a test read decides.
static bool denies_direct(int fd) {
    enum { DIRECT_ALIGNMENT = 0x2000 }; // STATX_DIOALIGN, linux/stat.h
    // struct statx with a field that older C library headers lack.
    union {
        struct {
            uint32_t mask, before[38], offset_alignment;
        } fields;
        char room[256];
    } info;
    memset(&info, 0, sizeof info);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, DIRECT_ALIGNMENT, &info) != 0) return false;
    if ((info.fields.mask & DIRECT_ALIGNMENT) == 0) return false;
    uint32_t alignment = info.fields.offset_alignment;
    return alignment == 0 || alignment > FSTI_IO_PAGE_BYTES;
}

int fsti_io_reopen(int fd, const char *path, int flags) {
    // By the descriptor, because the path may name another file by now.
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    bool has_proc = !fsti_io_test_disables(FSTI_TEST_NO_PROC);
    int again = has_proc ? open(link, flags | O_CLOEXEC) : -1;
    if (again < 0 && (!has_proc || errno == ENOENT) && path != NULL)
        again = open_same(path, fd, flags | O_CLOEXEC);
    return again;
}

int fsti_io_reopen_direct(int fd, const char *path, int flags, char *reason, size_t reason_size) {
    const buffered_system *system = find_buffered(fd);
    bool may_try = system == NULL || (system->may_be_direct && (flags & O_ACCMODE) == O_RDONLY);
    const char *buffered = may_try ? NULL : system->reason;
    if (fsti_io_test_disables(FSTI_TEST_NO_DIRECT)) buffered = "switched off";
    if (buffered != NULL) {
        snprintf(reason, reason_size, "%s", buffered);
        return -1;
    }
    int direct = fsti_io_reopen(fd, path, flags | O_DIRECT);
    bool is_denied = direct >= 0 && denies_direct(direct);
    snprintf(reason, reason_size, "%s",
             is_denied     ? "the file system serves direct reads from its cache"
             : direct >= 0 ? "the file system supports O_DIRECT"
                           : strerror(errno));
    if (!is_denied) return direct;
    close(direct);
    return -1;
}

/// Whether the first page of a file is in the page cache. Kernels say yes to processes that neither
/// own the file nor may write it.
static bool has_first_page(int fd) {
    size_t page = fsti_page_bytes();
    unsigned char residency = 0;
    void *mapping = mmap(NULL, page, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) return false;
    bool is_known = mincore(mapping, page, &residency) == 0;
    munmap(mapping, page);
    return is_known && (residency & 1) != 0;
}

/// Opens the file for direct reads, and notes whether that dropped its cached pages.
static void open_direct(fsti_file *file) {
    char byte;
    const buffered_system *system = find_buffered(file->fd);
    bool is_cached = system != NULL && system->may_be_direct && pread(file->fd, &byte, 1, 0) == 1 &&
                     has_first_page(file->fd);
    int fd = fsti_io_reopen_direct(file->fd, file->path, O_RDONLY, file->direct_reason,
                                   sizeof file->direct_reason);
    file->loses_cache = fd >= 0 && is_cached && !has_first_page(file->fd);
    file->fd_direct = fd;
}

int fsti_io_file_direct(fsti_file *file, char *reason, size_t reason_size) {
    if (!fsti_io_file_is_plain(file)) {
        if (reason != NULL)
            snprintf(reason, reason_size, "%s",
                     file->derivation.read != NULL ? file->derivation.what
                     : file->object != NULL        ? "remote objects are read by requests"
                                                   : "the program supplies the bytes");
        return -1;
    }
    pthread_mutex_lock(&file->lock);
    if (!file->direct_probed) {
        file->direct_probed = true;
        open_direct(file);
    }
    if (reason != NULL) snprintf(reason, reason_size, "%s", file->direct_reason);
    int fd = file->fd_direct;
    pthread_mutex_unlock(&file->lock);
    return fd;
}

bool fsti_file_loses_cache(fsti_file *file) {
    if (fsti_io_file_direct(file, NULL, 0) < 0) return false;
    pthread_mutex_lock(&file->lock);
    bool loses_cache = file->loses_cache;
    pthread_mutex_unlock(&file->lock);
    return loses_cache;
}

bool fsti_file_derived_bypasses_cache(fsti_file *file) {
    return file->derivation.origin != NULL &&
           fsti_io_file_direct(file->derivation.origin, NULL, 0) >= 0;
}

bool fsti_file_derived_uses_cache(fsti_file *file) {
    return file->derivation.origin != NULL && !fsti_file_derived_bypasses_cache(file);
}
