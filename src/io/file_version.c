// SPDX-License-Identifier: Apache-2.0
/// What identifies a version of a file, as text, and whether a process may be changing the file.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "io_private.h"
#include "store/store.h"

/// The address and the version of a remote object.
static bool describe_object(const fsti_object *object, char *out, size_t size) {
    static const char begin[] = "object ";
    if (!fsti_object_has_version(object) || size <= sizeof begin) return false;
    memcpy(out, begin, sizeof begin);
    size_t used = sizeof begin - 1;
    if (!fsti_object_address(object, out + used, size - used)) return false;
    used += strlen(out + used);
    if (used + 2 > size) return false;
    out[used++] = '\n';
    return fsti_object_version_text(object, out + used, size - used);
}

/// A number that the file system has in itself: 0 if it has none.
static uint64_t file_system_id(int fd) {
    struct statfs info;
    uint64_t id = 0;
    if (fstatfs(fd, &info) == 0) memcpy(&id, &info.f_fsid, fsti_min(sizeof id, sizeof info.f_fsid));
    return id;
}

/// The number of the mount: since Linux 6.8 one that no later mount gets until the next start of
/// the system, before that one that is used again. 0 if the kernel reports none.
static uint64_t mount_id(int fd) {
    enum { MOUNT_ID = 0x1000, UNIQUE_MOUNT_ID = 0x4000 }; // STATX_MNT_ID.., linux/stat.h
    // struct statx with a field that older C library headers lack.
    union {
        struct {
            uint32_t mask, before[35];
            uint64_t mount_id;
        } fields;
        char room[256];
    } info;
    const unsigned wanted[] = {UNIQUE_MOUNT_ID, MOUNT_ID};
    for (size_t i = 0; i < 2; i++) {
        memset(&info, 0, sizeof info);
        if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, wanted[i], &info) == 0 &&
            (info.fields.mask & wanted[i]) != 0)
            return info.fields.mount_id;
    }
    return 0;
}

bool fsti_file_version_text(const fsti_file *file, char *out, size_t size) {
    const fsti_file *stored = file->derivation.origin != NULL ? file->derivation.origin : file;
    struct stat stamp;
    if (stored->object != NULL) return describe_object(stored->object, out, size);
    int fd = fsti_file_identity(file);
    if (fd < 0 || fstat(fd, &stamp) != 0) return false;
    // Disk images are built with fixed times, whole seconds, so that files of two images that are
    // mounted one after the other differ in nothing but their mount. Other files have times that
    // the kernel wrote. Their mount does not count, because each container mounts a file
    // system anew.
    bool has_fixed_times = stamp.st_mtim.tv_nsec == 0 && stamp.st_ctim.tv_nsec == 0;
    int used =
        snprintf(out, size, "file %ju %" PRIx64 " %" PRIx64 " %ju %jd %jd.%09ld %jd.%09ld",
                 (uintmax_t)stamp.st_dev, file_system_id(fd), has_fixed_times ? mount_id(fd) : 0,
                 (uintmax_t)stamp.st_ino, (intmax_t)stamp.st_size, (intmax_t)stamp.st_mtim.tv_sec,
                 stamp.st_mtim.tv_nsec, (intmax_t)stamp.st_ctim.tv_sec, stamp.st_ctim.tv_nsec);
    return used > 0 && (size_t)used < size;
}

/// fcntl(2): a read lease is refused if the file is open for writing, which includes a mapping.
/// A process that opens it for writing in this moment waits until the lease is given back, and the
/// kernel sends a signal: to this thread alone, and one that is ignored by default.
static bool is_lease_refused(int fd) {
    struct f_owner_ex owner = {.type = F_OWNER_TID, .pid = (pid_t)syscall(SYS_gettid)};
    sigset_t signals, before;
    if (fcntl(fd, F_SETOWN_EX, &owner) != 0 || fcntl(fd, F_SETSIG, SIGURG) != 0) return false;
    sigemptyset(&signals);
    sigaddset(&signals, SIGURG);
    pthread_sigmask(SIG_BLOCK, &signals, &before);
    bool is_refused = fcntl(fd, F_SETLEASE, F_RDLCK) != 0 && errno == EAGAIN;
    if (!is_refused) (void)fcntl(fd, F_SETLEASE, F_UNLCK);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_refused;
}

bool fsti_file_has_writer(fsti_file *file) {
    const fsti_file *stored = file->derivation.origin != NULL ? file->derivation.origin : file;
    if (stored->object != NULL || fsti_file_is_distant(file)) return false;
    // A separate open file, because the program may use the descriptor, too.
    int fd = fsti_io_reopen(fsti_file_identity(file), stored->path, O_RDONLY | O_NONBLOCK);
    if (fd < 0) return false;
    bool has_writer = is_lease_refused(fd);
    close(fd);
    return has_writer;
}
