// SPDX-License-Identifier: Apache-2.0
/// Models from a pipe: "-", /dev/stdin and the shells' <(command). Reading a model needs random
/// access, so the pipe is first copied to an unnamed temporary file.
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
/// The format's limit for headers. Input that claims a larger one is not read to its end.
#define HEADER_BYTES_MAX ((uint64_t)100000000)
/// Larger than any model, and within the limits of file systems.
#define HOLE_BYTES ((uint64_t)8 << 40)

/// Gives the temporary file the permissions of new files, because a rewritten model copies the
/// permissions of its source and a pipe has no useful ones.
static void open_rights(int fd) {
    mode_t mask = umask(077);
    (void)umask(mask);
    (void)fchmod(fd, 0666 & ~mask);
}

/// Opens an unnamed temporary file. Returns -1 after printing the error.
static int open_spool(const char *folder) {
    char path[4096];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) {
        open_rights(fd);
        return fd;
    }
    snprintf(path, sizeof path, "%s/fastsafetensors-XXXXXX", folder);
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) {
        cli_fail_errno("creating a temporary file (see TMPDIR)", folder);
        return -1;
    }
    if (unlink(path) == 0) open_rights(fd);
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

/// Whether the first bytes may belong to a model or a torch file. Other input is not read to its
/// end, because it may be endless (yes, /dev/zero).
static bool is_promising(const char *block, size_t size) {
    uint64_t header = 0;
    if (size <= sizeof header) return false;
    for (unsigned i = 0; i < 8; i++) header |= (uint64_t)(unsigned char)block[i] << (8 * i);
    return (header <= HEADER_BYTES_MAX && block[8] == '{') || memcmp(block, "PK", 2) == 0 ||
           (block[0] == '\x80' && block[1] >= 2 && block[1] <= 5);
}

/// The part of a pipe to store, and how far it was read.
typedef struct input_copy {
    int from, to;
    const char *folder; ///< where it is stored
    input_part part;
    uint64_t header_bytes; ///< with the length field; 0: not a model
    uint64_t taken;        ///< bytes read
} input_copy;

/// Stores the needed part of the last block.
static int keep_block(input_copy *copy, const char *block, size_t size) {
    if (copy->taken == 0 && is_promising(block, size) && block[8] == '{') {
        for (unsigned i = 0; i < 8; i++)
            copy->header_bytes |= (uint64_t)(unsigned char)block[i] << (8 * i);
        copy->header_bytes += 8;
    }
    // The directory of a compressed file is behind the header and describes its contents.
    if (copy->taken < copy->header_bytes && memmem(block, size, "\"__packed__\"", 12) != NULL)
        copy->part = INPUT_ALL;
    uint64_t left = UINT64_MAX;
    if (copy->part != INPUT_ALL && copy->header_bytes > 0)
        left = copy->header_bytes > copy->taken ? copy->header_bytes - copy->taken : 0;
    copy->taken += size;
    if (write_block(copy->to, block, left < size ? (size_t)left : size)) return EXIT_OK;
    return cli_fail_errno("storing the input in this folder (see TMPDIR)", copy->folder);
}

/// Copies the needed part of `from` to `to`.
static int spool(input_copy *copy) {
    char *block = malloc(BLOCK_BYTES);
    if (block == NULL) return cli_no_memory();
    int code = EXIT_OK;
    for (bool is_first = true; code == EXIT_OK; is_first = false) {
        ssize_t got = read_block(copy->from, block);
        if (got < 0) code = cli_fail_errno("reading", "standard input");
        if (got <= 0) break;
        code = keep_block(copy, block, (size_t)got);
        if (is_first && !is_promising(block, (size_t)got)) break; // opening it reports its kind
        if (copy->part == INPUT_HEADER && copy->taken >= copy->header_bytes &&
            copy->header_bytes > 0)
            break;
    }
    free(block);
    return code;
}

/// End of the last tensor of the stored header. 0: not a header, or the tensors are too large.
static uint64_t claimed_bytes(const input_copy *copy) {
    char path[32];
    fst_open_options options = {.struct_size = sizeof options, .flags = FST_OPEN_LENIENT};
    fst_model *model;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    uint64_t end = copy->header_bytes;
    snprintf(path, sizeof path, "/dev/fd/%d", copy->to);
    // Tensors must fit in the file, so give it a hole larger than any model.
    if (ftruncate(copy->to, (off_t)(copy->header_bytes + HOLE_BYTES)) != 0) return 0;
    if (fst_model_open(path, &options, &model, NULL) != FST_OK) return 0;
    // The last tensor may be padding.
    for (size_t i = 0; fst_model_tensor_info(model, i, &info, NULL) == FST_OK; i++)
        if (info.file_offset + info.size_bytes > end) end = info.file_offset + info.size_bytes;
    fst_model_close(model);
    return end;
}

/// Gives the file the length of the model if only its header was stored.
static int set_length(input_copy *copy) {
    uint64_t length = copy->taken;
    if (copy->part == INPUT_ALL || copy->header_bytes == 0 || copy->taken < copy->header_bytes)
        return EXIT_OK;
    if (copy->part == INPUT_HEADER && (length = claimed_bytes(copy)) == 0) {
        // The real length lets later errors describe the input correctly.
        char *block = malloc(BLOCK_BYTES);
        if (block == NULL) return cli_no_memory();
        for (ssize_t got; (got = read_block(copy->from, block)) > 0;) copy->taken += (uint64_t)got;
        free(block);
        length = copy->taken;
    }
    if (ftruncate(copy->to, (off_t)length) == 0) return EXIT_OK;
    return cli_fail_errno("storing the input in this folder (see TMPDIR)", copy->folder);
}

static int spool_to_path(int fd, input_part part, char **word) {
    static char paths[8][32];
    static unsigned path_count;
    const char *folder = getenv("TMPDIR");
    if (folder == NULL || folder[0] == '\0') folder = "/tmp";
    if (path_count == sizeof paths / sizeof *paths)
        return cli_usage(NULL, "too many pipes. Use files instead");
    int file = open_spool(folder);
    if (file < 0) return EXIT_UNREADABLE;
    input_copy copy = {.from = fd, .to = file, .folder = folder, .part = part};
    int code = spool(&copy);
    if (code == EXIT_OK) code = set_length(&copy);
    if (code != EXIT_OK) return code;
    // The temporary file takes the descriptor number of the pipe, so that messages show the
    // name that the user gave. For standard input this also works in an exec'd Python.
    if (dup2(file, fd) < 0) return cli_fail_errno("redirecting", *word);
    close(file);
    if (fd != STDIN_FILENO && fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return cli_fail_errno("redirecting", *word);
    snprintf(paths[path_count], sizeof *paths, "/dev/fd/%d", fd);
    if (fd != STDIN_FILENO) *word = paths[path_count++];
    return EXIT_OK;
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

int cli_take_input(char **word, input_part part) {
    static char input_path[] = INPUT_PATH;
    static bool is_taken;
    struct stat info;
    bool is_dash = strcmp(*word, "-") == 0;
    int fd = is_dash ? STDIN_FILENO : descriptor_of(*word);
    if (fd < 0 && stat(*word, &info) == 0 && S_ISFIFO(info.st_mode))
        return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_NOT_REGULAR),
                          "'%s' is a FIFO, and models need random access. Give it as standard "
                          "input (- < FIFO)",
                          *word);
    if (fd < 0) return EXIT_OK;
    if (is_dash && is_taken) return cli_usage(NULL, "'-' (standard input) can only be given once");
    is_taken = is_taken || is_dash;
    if (fstat(fd, &info) != 0) return cli_fail_errno("opening", is_dash ? input_path : *word);
    if (is_dash && isatty(fd))
        return cli_usage(NULL, "'-' is standard input, which is a terminal. Use CMD | "
                               "fastsafetensors ... -, or a file");
    if (is_dash) *word = input_path;
    if (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode) || S_ISBLK(info.st_mode)) return EXIT_OK;
    return spool_to_path(fd, part, word);
}

bool cli_is_input(const char *path) { return strcmp(path, INPUT_PATH) == 0; }

bool cli_is_output(const char *path) {
    static const char *const names[] = {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(path, names[i]) == 0) return true;
    return false;
}
