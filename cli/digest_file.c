// SPDX-License-Identifier: Apache-2.0
/// The .digest file of a model.
#include "digest_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "digest_model.h"
#include "rewrite.h"

/// Limit of the library's readers.
#define DIGEST_FILE_BYTES_MAX ((off_t)1 << 30)

/// Digests lie next to a file under the name that was given, and next to the folder that a name
/// leads to: fsti_file_digests_find() looks there, and saves delete them there.
static char *sidecar_path(const char *path, const char *suffix) {
    struct stat info;
    bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    char *real = is_folder ? realpath(path, NULL) : NULL;
    if (real != NULL && stat(real, &info) == 0) path = real;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    size_t capacity = size + strlen(suffix) + 1;
    char *result = malloc(capacity);
    if (result != NULL) snprintf(result, capacity, "%.*s%s", (int)size, path, suffix);
    free(real);
    return result;
}

char *digest_file_name(const char *path) { return sidecar_path(path, ".digest"); }

char *digest_file_settle(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        char *whole = realpath(path, NULL);
        // Below a parent that may not be searched only the given path leads there.
        if (whole != NULL && stat(whole, &info) == 0) return whole;
        free(whole);
        return strdup(path);
    }
    const char *slash = strrchr(path, '/');
    size_t folder_size = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    bool is_plain = cli_is_address(path) || folder_size == 0 || slash[1] == '\0';
    char *folder = is_plain ? NULL : strndup(path, folder_size);
    char *real = folder == NULL ? NULL : realpath(folder, NULL), *settled = NULL;
    if (real != NULL && stat(real, &info) != 0) {
        free(real);
        real = NULL;
    }
    size_t capacity = real == NULL ? 0 : strlen(real) + strlen(path) + 2;
    if (real != NULL && (settled = malloc(capacity)) != NULL)
        snprintf(settled, capacity, "%s/%s", real, slash + 1);
    free(folder);
    free(real);
    return settled != NULL ? settled : strdup(path);
}

/// Refuses a file that no `hash --write` wrote, of whatever version. An empty file and a link are
/// replaced.
static int check_replaced(const char *target) {
    static const char word[] = "fastsafetensors-digest ";
    char first[sizeof word - 1];
    struct stat info;
    if (lstat(target, &info) != 0)
        return errno == ENOENT || errno == ENOTDIR ? EXIT_OK : cli_fail_errno("reading", target);
    if (S_ISLNK(info.st_mode)) return EXIT_OK;
    if (S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        return cli_fail_errno("writing", target);
    }
    if (!S_ISREG(info.st_mode))
        return cli_fail_file(FST_E_ARGUMENT, target,
                             "this would overwrite a pipe or device. Move it away first");
    if (info.st_size == 0) return EXIT_OK;
    int fd = open(target, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    ssize_t got = fd < 0 ? -1 : pread(fd, first, sizeof first, 0);
    int failure = errno;
    if (fd >= 0) close(fd);
    errno = failure;
    if (got < 0) return cli_fail_errno("reading", target);
    if (got == (ssize_t)sizeof first && memcmp(first, word, sizeof first) == 0) return EXIT_OK;
    return cli_fail_file(FST_E_ARGUMENT, target,
                         "this would overwrite a file that 'hash --write' did not write. Move it "
                         "away first");
}

int digest_file_check(const char *path) {
    char *target = digest_file_name(path);
    if (target == NULL) return cli_no_memory();
    int code = cli_check_file_folder(target);
    if (code == EXIT_OK) code = check_replaced(target);
    free(target);
    return code;
}

// ---- writing ----

/// Locks a new file. False if another process has deleted it as a leftover before that.
static bool is_locked(int fd) {
    struct stat info;
    (void)flock(fd, LOCK_EX | LOCK_NB); // not every file system has locks
    return fstat(fd, &info) != 0 || info.st_nlink > 0;
}

/// Creates a temporary file next to the target, named and locked as those of saves are, so that
/// their clean-up finds it. Existing files and links are never opened. The caller frees *temporary,
/// the name. Returns -1 with errno set on failure.
static int create_temporary(const char *target, char **temporary) {
    const char *slash = strrchr(target, '/');
    int folder_size = slash == NULL ? 0 : (int)(slash - target) + 1;
    size_t capacity = strlen(target) + sizeof "..0123456789abcdef.tmp";
    if ((*temporary = malloc(capacity)) == NULL) return -1;
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t random_number = 0;
        if (getrandom(&random_number, sizeof random_number, 0) != (ssize_t)sizeof random_number)
            return -1;
        snprintf(*temporary, capacity, "%.*s.%.200s.%016" PRIx64 ".tmp", folder_size, target,
                 target + folder_size, random_number);
        int fd = open(*temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) return -1;
        if (fd >= 0 && is_locked(fd)) return fd;
        if (fd >= 0) close(fd);
    }
    return -1;
}

static bool write_all(int fd, const char *text) {
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t written = write(fd, text, left);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        text += written;
        left -= (size_t)written;
    }
    return fsync(fd) == 0;
}

int digest_file_open(const char *path, const char *text, digest_file *out) {
    struct stat info;
    *out = (digest_file){.target = digest_file_name(path), .fd = -1};
    if (out->target == NULL) return cli_no_memory();
    out->fd = create_temporary(out->target, &out->temporary);
    if (out->fd < 0 || !write_all(out->fd, text) || fstat(out->fd, &info) != 0)
        return cli_fail_errno("writing", out->target);
    out->device = (uint64_t)info.st_dev;
    out->inode = (uint64_t)info.st_ino;
    return EXIT_OK;
}

/// The rename replaces a planted link, not its target.
int digest_file_place(digest_file *file) {
    int code = check_replaced(file->target);
    if (code != EXIT_OK) return code;
    if (rename(file->temporary, file->target) != 0) return cli_fail_errno("writing", file->target);
    file->is_placed = true;
    return EXIT_OK;
}

void digest_file_remove(const digest_file *file) {
    struct stat info;
    if (lstat(file->target, &info) == 0 && (uint64_t)info.st_dev == file->device &&
        (uint64_t)info.st_ino == file->inode)
        unlink(file->target);
}

void digest_file_close(digest_file *file) {
    if (file->fd >= 0 && !file->is_placed) unlink(file->temporary);
    if (file->fd >= 0) close(file->fd); // with its lock, by which it is no leftover
    free(file->temporary);
    free(file->target);
}

// ---- reading ----

static bool read_all(int fd, char *text, size_t size) {
    size_t have = 0;
    while (have < size) {
        ssize_t got = read(fd, text + have, size - have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        have += (size_t)got;
    }
    return true;
}

/// The words of a line, which ends with "\n": "file" or "tensor", a hexadecimal number, a name.
static bool is_digest_line(const char *line) {
    bool is_file = strncmp(line, "file ", 5) == 0, is_tensor = strncmp(line, "tensor ", 7) == 0;
    if (!is_file && !is_tensor) return false;
    line += is_file ? 5 : 7;
    size_t digits = strspn(line, "0123456789abcdef");
    return digits > 0 && line[digits] == ' ' && line[digits + 1] != '\n';
}

/// Whether all of it is as `hash --write` writes it.
static bool is_digest_text(const char *text, size_t size) {
    char name[32];
    fst_digest digest;
    if (strlen(text) != size || size == 0 || text[size - 1] != '\n' ||
        strncmp(text, DIGEST_FILE_WORDS, strlen(DIGEST_FILE_WORDS)) != 0)
        return false;
    const char *line = text + strlen(DIGEST_FILE_WORDS), *end = strchr(line, '\n');
    if ((size_t)(end - line) >= sizeof name) return false;
    snprintf(name, sizeof name, "%.*s", (int)(end - line), line);
    if (!cli_digest_find(name, &digest)) return false;
    for (line = end + 1; *line != '\0'; line = strchr(line, '\n') + 1)
        if (!is_digest_line(line)) return false;
    return true;
}

static int refuse_text(const char *name) {
    return cli_fail_file(FST_E_MANIFEST, name, "not a file that 'hash --write' wrote");
}

/// Reads an open file, which is `name` in messages.
static int read_text(int fd, const char *name, char **text) {
    char first[sizeof DIGEST_FILE_WORDS - 1];
    struct stat info;
    if (fstat(fd, &info) != 0) return cli_fail_errno("reading", name);
    if (!S_ISREG(info.st_mode)) return EXIT_OK; // something else has the name
    if (pread(fd, first, sizeof first, 0) != (ssize_t)sizeof first ||
        memcmp(first, DIGEST_FILE_WORDS, sizeof first) != 0 || info.st_size > DIGEST_FILE_BYTES_MAX)
        return refuse_text(name); // before all of it is read
    *text = calloc((size_t)info.st_size + 1, 1);
    if (*text == NULL) return cli_no_memory();
    if (!read_all(fd, *text, (size_t)info.st_size)) return cli_fail_errno("reading", name);
    if (is_digest_text(*text, (size_t)info.st_size)) return EXIT_OK;
    return refuse_text(name);
}

int digest_file_read(const char *path, char **text) {
    char *name = digest_file_name(path);
    *text = NULL;
    if (name == NULL) return cli_no_memory();
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // does not wait for a pipe
    bool is_socket = fd < 0 && errno == ENXIO;
    bool is_none = is_socket || (fd < 0 && (errno == ENOENT || errno == ENOTDIR));
    int code = EXIT_OK;
    if (fd >= 0)
        code = read_text(fd, name, text);
    else if (!is_none)
        code = cli_fail_errno("reading", name);
    if (fd >= 0) close(fd);
    free(name);
    return code;
}
