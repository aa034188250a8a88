// SPDX-License-Identifier: Apache-2.0
/// Models that come through a pipe: "-", /dev/stdin, and what shells write <(..) as. A model is
/// read here and there, so what can't be read so is put in a file without a name first.
#include "standard_input.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INPUT_PATH "/dev/stdin"
#define BLOCK_BYTES ((size_t)1 << 20)
/// What the format allows a header; what claims more is no model, and need not be read to its end.
#define HEADER_BYTES_MAX ((uint64_t)100000000)

/// A file without a name where temporary files go; -1 after saying why there is none.
static int open_spool(const char *folder) {
    char path[4096];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) return fd;
    snprintf(path, sizeof path, "%s/fastsafetensors-XXXXXX", folder);
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        cli_fail_errno("making a temporary file (TMPDIR says where) in", folder);
    else
        unlink(path);
    return fd;
}

static ssize_t read_block(int fd, char *block) {
    size_t got = 0;
    while (got < BLOCK_BYTES) {
        ssize_t more = read(fd, block + got, BLOCK_BYTES - got);
        if (more < 0 && errno == EINTR) continue;
        if (more < 0) return -1;
        if (more == 0) break;
        got += (size_t)more;
    }
    return (ssize_t)got;
}

static bool write_block(int fd, const char *block, size_t size) {
    while (size > 0) {
        ssize_t done = write(fd, block, size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        block += done;
        size -= (size_t)done;
    }
    return true;
}

/// Whether a file that begins so may be a model, or one of torch's. What may not is not read to
/// its end, which it may not have (yes, /dev/zero).
static bool is_promising(const char *block, size_t size) {
    uint64_t header = 0;
    if (size <= sizeof header) return false;
    for (unsigned i = 0; i < 8; i++) header |= (uint64_t)(unsigned char)block[i] << (8 * i);
    return (header <= HEADER_BYTES_MAX && block[8] == '{') || memcmp(block, "PK", 2) == 0 ||
           (block[0] == '\x80' && block[1] >= 2 && block[1] <= 5);
}

/// Brings all of `from` to `to`.
static int spool(int from, int to, const char *folder) {
    char *block = malloc(BLOCK_BYTES);
    if (block == NULL) return cli_no_memory();
    int code = EXIT_GOOD;
    for (bool is_first = true; code == EXIT_GOOD; is_first = false) {
        ssize_t got = read_block(from, block);
        if (got < 0) code = cli_fail_errno("reading", "standard input");
        if (got <= 0) break;
        if (!write_block(to, block, (size_t)got))
            code = cli_fail_errno("keeping the input (TMPDIR says where) in", folder);
        if (is_first && !is_promising(block, (size_t)got)) break; // opening it says what it is
    }
    free(block);
    return code;
}

static int spool_to_path(int fd, char **word) {
    static char paths[8][32];
    static unsigned path_count;
    const char *folder = getenv("TMPDIR");
    if (folder == NULL || folder[0] == '\0') folder = "/tmp";
    if (path_count == sizeof paths / sizeof *paths)
        return cli_usage(NULL, "too many pipes: keep them in files");
    int file = open_spool(folder);
    if (file < 0) return EXIT_UNREADABLE;
    int code = spool(fd, file, folder);
    if (code != EXIT_GOOD) return code;
    // Under the number of what was read, so that it has the name that the user knows; for
    // standard input also in a Python that we become.
    if (dup2(file, fd) < 0) return cli_fail_errno("keeping", *word);
    close(file);
    if (fd != STDIN_FILENO && fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return cli_fail_errno("keeping", *word);
    snprintf(paths[path_count], sizeof *paths, "/dev/fd/%d", fd);
    if (fd != STDIN_FILENO) *word = paths[path_count++];
    return EXIT_GOOD;
}

/// The descriptor that a path names, or -1.
static int descriptor_of(const char *path) {
    static const char *const folders[] = {"/dev/fd/", "/proc/self/fd/"};
    uint64_t number;
    if (strcmp(path, INPUT_PATH) == 0) return STDIN_FILENO;
    for (size_t i = 0; i < 2; i++)
        if (strncmp(path, folders[i], strlen(folders[i])) == 0 &&
            cli_parse_count(path + strlen(folders[i]), INT32_MAX, &number))
            return (int)number;
    return -1;
}

int cli_take_input(char **word) {
    static char input_path[] = INPUT_PATH;
    static bool is_taken;
    struct stat info;
    bool is_dash = strcmp(*word, "-") == 0;
    int fd = is_dash ? STDIN_FILENO : descriptor_of(*word);
    if (fd < 0 && stat(*word, &info) == 0 && S_ISFIFO(info.st_mode))
        return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_NOT_REGULAR),
                          "'%s' is a FIFO, and models are read here and there: give it as standard "
                          "input (- < FIFO)",
                          *word);
    if (fd < 0) return EXIT_GOOD;
    if (is_dash && is_taken) return cli_usage(NULL, "'-' is standard input: it can be read once");
    is_taken = is_taken || is_dash;
    if (fstat(fd, &info) != 0) return cli_fail_errno("opening", is_dash ? input_path : *word);
    if (is_dash && isatty(fd))
        return cli_usage(NULL, "'-' is standard input, which is a terminal here: CMD | "
                               "fastsafetensors .. -, or a file");
    if (is_dash) *word = input_path;
    if (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode) || S_ISBLK(info.st_mode)) return EXIT_GOOD;
    return spool_to_path(fd, word);
}

bool cli_is_input(const char *path) { return strcmp(path, INPUT_PATH) == 0; }
