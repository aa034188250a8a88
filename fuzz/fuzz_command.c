// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the command line. The input is words separated by zero bytes; the command runs in a
/// folder with a few models and broken files, and can't leave it. It may fail, but must end with
/// one of its exit codes.
#include <fcntl.h>
#include <ftw.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz_target.h"

#define WORD_COUNT_MAX 12
#define FILE_BYTES_MAX (1 << 16)

int command_main(int argc, char **argv); // main() of the command, by another name

static void write_file(const char *name, const char *header, size_t data_bytes) {
    FILE *file = fopen(name, "we");
    if (file == NULL) abort();
    uint64_t size = strlen(header);
    fwrite(&size, 8, 1, file);
    fputs(header, file);
    for (size_t i = 0; i < data_bytes; i++) fputc((int)(i * 7), file);
    fclose(file);
}

static char folder[64];

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *place) {
    (void)info, (void)type;
    if (place->level > 0) remove(path);
    return 0;
}

static void remove_files(void) { nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS); }

static void remove_folder(void) {
    remove_files();
    rmdir(folder);
}

/// Restores the files that every run starts with.
static void make_files(void) {
    remove_files();
    write_file("a",
               "{\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
               "\"layers.1.b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}",
               32);
    write_file("b",
               "{\"__metadata__\":{\"k\":\"v\"},\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],"
               "\"data_offsets\":[0,24]}}",
               24);
    write_file("broken", "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9]}}", 9);
}

static void enter_folder(void) {
    snprintf(folder, sizeof folder, "%s/fuzz-command-%d",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid());
    if (mkdir(folder, 0700) != 0 || chdir(folder) != 0 || atexit(remove_folder) != 0) abort();
    // The command's output is discarded; sanitizer reports go to the original stderr.
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere < 0 || dup2(nowhere, STDOUT_FILENO) < 0) abort();
    stderr = fopen("/dev/null", "we"); // a fuzzer has kept the old one for itself
    if (stderr == NULL) abort();
}

/// Refuses paths outside the folder, long work, and waiting for a terminal.
static bool is_allowed(const char *word) {
    static const char *const refused[] = {"/",    "..",     "~",    "bench",
                                          "runs", "repeat", "size", "budget"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (strstr(word, refused[i]) != NULL) return false;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool is_ready;
    if (!is_ready) enter_folder();
    is_ready = true;
    static char text[4096];
    if (size >= sizeof text) return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    static char name[] = "fastsafetensors";
    char *words[WORD_COUNT_MAX + 2] = {name};
    int count = 1;
    for (size_t at = 0; at < size && count <= WORD_COUNT_MAX; at += strlen(text + at) + 1) {
        if (!is_allowed(text + at)) return 0;
        words[count++] = text + at;
    }
    make_files();
    optind = 0; // getopt starts anew
    int code = command_main(count, words);
    if (code < 0 || code > 4) __builtin_trap();
    return 0;
}
