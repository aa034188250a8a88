// SPDX-License-Identifier: Apache-2.0
/// Temporary names of files until they are published, and finding files whose save was killed.
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "io/io.h"
#include "output_private.h"

/// Long target names are truncated, so that the temporary name stays within NAME_MAX.
#define BASE_BYTES_MAX 200u
#define CHARACTER_BYTES_MAX 4u // of UTF-8
#define NUMBER_DIGITS 16u
#define ENDING ".tmp"

/// Length of the part of a name that its temporary name repeats; UTF-8 characters are not split.
static size_t base_size(const char *name) {
    size_t size = strlen(name);
    if (size <= BASE_BYTES_MAX) return size;
    for (size = BASE_BYTES_MAX; size > 0 && ((unsigned char)name[size] & 0xc0) == 0x80;) size--;
    return size;
}

char *fsti_hidden_path(const char *folder, const char *path) {
    static atomic_uint_fast64_t counter;
    const char *name = fsti_path_name(path);
    uint64_t words[3] = {atomic_fetch_add(&counter, 1), fsti_now_ns(), (uint64_t)getpid()};
    size_t capacity = strlen(folder) + BASE_BYTES_MAX + NUMBER_DIGITS + sizeof ENDING + 4;
    char *hidden = fsti_alloc(capacity);
    if (hidden != NULL)
        snprintf(hidden, capacity, "%s/.%.*s.%016" PRIx64 ENDING, folder, (int)base_size(name),
                 name, fsti_hash(words, sizeof words, fsti_hash_key()));
    return hidden;
}

int fsti_hidden_create(const char *hidden) {
    int fd = open(hidden, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return -1;
    struct stat info;
    // Between open and lock, another save may have deleted it as a leftover (not without lock
    // support).
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || fstat(fd, &info) != 0 || info.st_nlink > 0) return fd;
    close(fd);
    errno = EAGAIN;
    return -1;
}

fst_status fsti_output_share(fsti_output *output, fst_error *error) {
    struct stat info;
    // Without lock support there is nothing to convert.
    (void)flock(output->fd, LOCK_SH | LOCK_NB);
    // Converting a lock may release it for a moment, in which the file can be deleted.
    if (!output->has_hidden || fstat(output->fd, &info) != 0 || info.st_nlink > 0) return FST_OK;
    return fsti_error_errno(error, ENOENT, output->hidden, "sharing the new file");
}

static fst_status refuse_join(const fsti_output *output, const char *why, fst_error *error) {
    fsti_error_location location = {.file = output->hidden, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_ARGUMENT, location, "%s", why);
}

/// Whether the file system is one of a single machine, so that all locks are visible. Network file
/// systems may keep flock() to each machine.
static bool shows_all_locks(int fd) {
    static const unsigned long local_systems[] = {
        0xef53,     // ext2 to ext4
        0x58465342, // XFS
        0x9123683e, // btrfs
        0xf2f52010, // F2FS
        0xca451a4e, // bcachefs
        0x2fc12fc1, // ZFS
        0x794c7630, // overlayfs
        0x01021994, // tmpfs
        0x858458f6, // ramfs
    };
    struct statfs info;
    if (fstatfs(fd, &info) != 0) return false;
    for (size_t i = 0; i < sizeof local_systems / sizeof *local_systems; i++)
        if ((unsigned long)info.f_type == local_systems[i]) return true;
    return false;
}

fst_status fsti_output_check_shared(const fsti_output *output, fst_error *error) {
    struct stat info;
    if (fstat(output->fd, &info) != 0)
        return fsti_error_errno(error, errno, output->hidden, "examining the file");
    if (info.st_nlink != 1)
        return refuse_join(output,
                           "the file has other hard links, which a file that was handed "
                           "over has not",
                           error);
    if (flock(output->fd, LOCK_EX | LOCK_NB) == 0) {
        (void)flock(output->fd, LOCK_UN);
        if (!shows_all_locks(output->fd)) return FST_OK; // the owner may run on another machine
        return refuse_join(output,
                           "no running save owns the file. The process that hands it over "
                           "must keep its writer open",
                           error);
    }
    if (errno != EWOULDBLOCK) return FST_OK; // without lock support the owner is unknown
    if (flock(output->fd, LOCK_SH | LOCK_NB) != 0)
        return refuse_join(output, "the file was not handed over with others_write", error);
    (void)flock(output->fd, LOCK_UN);
    return FST_OK;
}

/// Parses ".BASE.<16 hex digits>.tmp".
static bool read_name(const char *name, fsti_leftover *out) {
    size_t size = strlen(name), tail = 1 + NUMBER_DIGITS + strlen(ENDING);
    if (name[0] != '.' || size < 2 + tail || strcmp(name + size - strlen(ENDING), ENDING) != 0)
        return false;
    const char *number = name + size - tail + 1;
    if (number[-1] != '.') return false;
    for (unsigned i = 0; i < NUMBER_DIGITS; i++)
        if (!isxdigit((unsigned char)number[i]) || isupper((unsigned char)number[i])) return false;
    out->name = name;
    out->base = name + 1;
    out->base_size = size - tail - 1;
    return true;
}

bool fsti_hidden_is(const char *name) {
    fsti_leftover leftover;
    return read_name(name, &leftover);
}

bool fsti_leftover_is_of(const fsti_leftover *leftover, const char *name) {
    size_t size = base_size(name);
    return leftover->base_size == size && memcmp(leftover->base, name, size) == 0;
}

bool fsti_leftover_is_cut(const fsti_leftover *leftover) {
    return leftover->base_size + CHARACTER_BYTES_MAX > BASE_BYTES_MAX;
}

/// Examines one entry of a folder.
static void examine_entry(int folder, const char *name, fsti_leftover_visit visit, void *context) {
    fsti_leftover leftover = {.folder = folder};
    struct stat info;
    if (!read_name(name, &leftover)) return;
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    // A replaced link that was kept for rollback cannot be locked.
    if (fd < 0 && errno == ELOOP) visit(context, &leftover);
    if (fd < 0) return; // or deleted, or not accessible
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
        leftover.size_bytes = (uint64_t)info.st_size;
        leftover.has_owner = flock(fd, LOCK_EX | LOCK_NB) != 0;
        visit(context, &leftover);
    }
    close(fd);
}

typedef struct leftover_walk {
    fsti_leftover_visit visit;
    void *context;
} leftover_walk;

static fst_status visit_entry(void *context, const fsti_folder_entry *entry, fst_error *error) {
    const leftover_walk *walk = context;
    (void)error;
    examine_entry(entry->folder_fd, entry->name, walk->visit, walk->context);
    return FST_OK;
}

fst_status fsti_leftovers_visit(const char *folder, fsti_leftover_visit visit, void *context,
                                fst_error *error) {
    leftover_walk walk = {visit, context};
    return fsti_folder_visit(folder, visit_entry, &walk, error);
}
