// SPDX-License-Identifier: Apache-2.0
/// Compiled kernels on disk, one file for each driver, device and source, used by later processes.
/// A file is trusted because it and its folder belong to this user, and other users cannot write to
/// them; its checksum finds damage. The cache is optional: without it the kernel is compiled.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpu_private.h"

#define FILE_COUNT_MAX 32u
/// A temporary file of this age was left by a process that ended.
#define LEFTOVER_AGE_S 3600
#define PATH_BYTES_MAX 1024u
/// Any fixed number: checksums of all processes must agree.
#define CHECKSUM_KEY ((uint64_t)0x6673746b65726e31)

/// The head of a file, in the CPU's byte order. With another order the sizes do not match, and the
/// kernel is compiled again.
typedef struct file_head {
    char magic[8];
    uint64_t key_size, code_size;
    uint64_t checksum; ///< of key and code
} file_head;
static const char magic[8] = {'f', 's', 't', 'k', 'e', 'r', 'n', '1'};

static uint64_t checksum_of(const char *key, const fsti_kernel_code *code) {
    return fsti_hash(code->bytes, code->size, fsti_hash(key, strlen(key), CHECKSUM_KEY));
}

static void name_of(const char *key, char *name, size_t size) {
    snprintf(name, size, "hip-%016llx",
             (unsigned long long)fsti_hash(key, strlen(key), CHECKSUM_KEY));
}

/// The folder of the cache.
typedef struct cache_folder {
    char path[PATH_BYTES_MAX];
    size_t given_size; ///< leading bytes of the path, $HOME, which are not created
} cache_folder;

/// False without a folder: the cache is off.
static bool find_folder(cache_folder *out) {
    const char *base = secure_getenv("FASTSAFETENSORS_KERNEL_CACHE_DIR"), *rest = NULL;
    *out = (cache_folder){.given_size = 0};
    if (base != NULL && base[0] != '\0') {
        rest = ""; // "off" is among the texts that are not an absolute path
    } else if ((base = secure_getenv("XDG_CACHE_HOME")) != NULL && base[0] == '/') {
        rest = "/fastsafetensors/kernels";
    } else if ((base = secure_getenv("HOME")) != NULL && base[0] == '/') {
        rest = "/.cache/fastsafetensors/kernels";
        out->given_size = strlen(base);
    }
    if (rest == NULL || base[0] != '/') return false;
    int used = snprintf(out->path, sizeof out->path, "%s%s", base, rest);
    if (used <= 0 || (size_t)used >= sizeof out->path) return false;
    fsti_path_trim(out->path);
    return true;
}

/// Creates the folder and its parents, for this user only. Opening the folder reports the errors.
static void make_folders(cache_folder *folder) {
    char *path = folder->path, *slash = strchr(path + folder->given_size + 1, '/');
    for (; slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    (void)mkdir(path, 0700);
}

/// The folder's descriptor, or -1 with the reason in `note`.
static int open_folder(bool may_create, char *note, size_t size) {
    cache_folder folder;
    struct stat info;
    if (!find_folder(&folder)) {
        snprintf(note, size, "switched off, or neither XDG_CACHE_HOME nor HOME is set");
        return -1;
    }
    if (may_create) make_folders(&folder);
    int fd = open(folder.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) {
        snprintf(note, size, "%s: %s", folder.path, strerror(errno));
    } else if (info.st_uid != geteuid() || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        snprintf(note, size, "%s: %s. It is not used", folder.path,
                 info.st_uid != geteuid() ? "the folder belongs to another user"
                                          : "other users can write to the folder");
    } else {
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

/// Reads the rest of a file of the right size: the key, which must be equal, and the code.
static bool read_body(int fd, const char *key, const file_head *head, fsti_kernel_code *out) {
    size_t key_size = strlen(key);
    char *bytes = fsti_alloc(key_size + head->code_size);
    if (bytes == NULL || fsti_read_at(fd, bytes, key_size + head->code_size, sizeof *head) != 0 ||
        memcmp(bytes, key, key_size) != 0) {
        fsti_free(bytes);
        return false;
    }
    memmove(bytes, bytes + key_size, head->code_size);
    *out = (fsti_kernel_code){.bytes = bytes, .size = head->code_size};
    if (checksum_of(key, out) == head->checksum) return true;
    fsti_free(bytes);
    *out = (fsti_kernel_code){.bytes = NULL};
    return false;
}

/// Reads a file that is complete, belongs to this user and has no other hard link.
static bool read_file(int fd, const char *key, fsti_kernel_code *out) {
    struct stat info;
    file_head head;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid() ||
        info.st_nlink != 1 || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return false;
    if (fsti_read_at(fd, &head, sizeof head, 0) != 0 ||
        memcmp(head.magic, magic, sizeof magic) != 0)
        return false;
    if (head.key_size != strlen(key) || head.code_size == 0 ||
        head.code_size > FSTI_KERNEL_BYTES_MAX ||
        (uint64_t)info.st_size != sizeof head + head.key_size + head.code_size)
        return false;
    return read_body(fd, key, &head, out);
}

bool fsti_kernel_cache_read(const char *key, fsti_kernel_code *out, char *note, size_t size) {
    char name[32];
    *out = (fsti_kernel_code){.bytes = NULL};
    int folder = open_folder(false, note, size);
    if (folder < 0) return false;
    name_of(key, name, sizeof name);
    // Without O_NONBLOCK, opening a FIFO of that name would block the load.
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    bool good = fd >= 0 && read_file(fd, key, out);
    if (good)
        snprintf(note, size, "%s", name);
    else
        snprintf(note, size,
                 fd < 0 ? "no file yet"
                        : "%s is damaged, is for another kernel or belongs to another user",
                 name);
    if (fd >= 0) close(fd);
    close(folder);
    return good;
}

/// Whether a name is `begin` and then `size` hexadecimal digits.
static bool is_named(const char *name, const char *begin, size_t size) {
    size_t begin_size = strlen(begin);
    return strncmp(name, begin, begin_size) == 0 && strlen(name + begin_size) == size &&
           strspn(name + begin_size, "0123456789abcdef") == size;
}

/// Whether a name is that of a temporary file: "new-", a process, "-" and 16 digits.
static bool is_temporary_name(const char *name) {
    if (strncmp(name, "new-", 4) != 0) return false;
    size_t digits = strspn(name + 4, "0123456789");
    return digits > 0 && is_named(name + 4 + digits, "-", 16);
}

/// Whether a file of this name is one of this cache. The user may have named a folder with other
/// files, whose names may look the same; they are left alone.
static bool is_kernel_file(int folder, const char *name) {
    char begin[sizeof magic];
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    bool is_own = fd >= 0 && fsti_read_at(fd, begin, sizeof begin, 0) == 0 &&
                  memcmp(begin, magic, sizeof begin) == 0;
    if (fd >= 0) close(fd);
    return is_own;
}

/// Deletes temporary files of killed processes and, if there are more than FILE_COUNT_MAX kernels,
/// the oldest one.
static void limit_folder(int folder) {
    char oldest[sizeof(((struct dirent *)NULL)->d_name)] = "";
    struct timespec oldest_time = {0};
    size_t count = 0;
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (list == NULL && copy >= 0) close(copy);
    if (list == NULL) return;
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        struct stat info;
        bool is_temporary = is_temporary_name(entry->d_name);
        if (!is_temporary && !is_named(entry->d_name, "hip-", 16)) continue;
        if (fstatat(folder, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        bool is_begun = is_temporary && S_ISREG(info.st_mode) && info.st_size == 0;
        if (!is_begun && !is_kernel_file(folder, entry->d_name)) continue;
        if (is_temporary && time(NULL) - info.st_mtim.tv_sec > LEFTOVER_AGE_S)
            (void)unlinkat(folder, entry->d_name, 0);
        if (is_temporary) continue;
        bool is_older = info.st_mtim.tv_sec < oldest_time.tv_sec ||
                        (info.st_mtim.tv_sec == oldest_time.tv_sec &&
                         info.st_mtim.tv_nsec < oldest_time.tv_nsec);
        if (count++ > 0 && !is_older) continue;
        oldest_time = info.st_mtim;
        snprintf(oldest, sizeof oldest, "%s", entry->d_name);
    }
    closedir(list);
    if (count > FILE_COUNT_MAX) (void)unlinkat(folder, oldest, 0);
}

/// Writes a temporary file and renames it when it is complete.
static bool write_file(int folder, const char *key, const fsti_kernel_code *code) {
    char name[32], temporary[64];
    file_head head = {.key_size = strlen(key), .code_size = code->size};
    memcpy(head.magic, magic, sizeof magic);
    head.checksum = checksum_of(key, code);
    if (sizeof head + head.key_size + head.code_size > fsti_file_size_max()) {
        errno = EFBIG;
        return false;
    }
    name_of(key, name, sizeof name);
    snprintf(temporary, sizeof temporary, "new-%d-%016llx", (int)getpid(),
             (unsigned long long)fsti_random());
    int fd = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    int failure = fsti_write_at(fd, &head, sizeof head, 0);
    if (failure == 0) failure = fsti_write_at(fd, key, head.key_size, sizeof head);
    if (failure == 0)
        failure = fsti_write_at(fd, code->bytes, code->size, sizeof head + head.key_size);
    if (close(fd) != 0 && failure == 0) failure = errno;
    if (failure == 0 && renameat(folder, temporary, folder, name) != 0) failure = errno;
    if (failure != 0) (void)unlinkat(folder, temporary, 0);
    errno = failure;
    return failure == 0;
}

void fsti_kernel_cache_write(const char *key, const fsti_kernel_code *code, char *note,
                             size_t size) {
    int folder = open_folder(true, note, size);
    if (folder < 0) return;
    if (write_file(folder, key, code)) {
        snprintf(note, size, "kept for later processes");
        limit_folder(folder);
    } else {
        snprintf(note, size, "the file can't be written: %s", strerror(errno));
    }
    close(folder);
}
