// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the command line. The input is words separated by zero bytes. The word ";" ends a
/// command, and the next one works on what the first has left. A command "!" damages a file: its
/// name, an offset, and the new byte. All run in a folder with a few models and broken files, and
/// can't leave it. They may fail, but must end with one of the exit codes.
#include <getopt.h>

#include "fuzz_files.h"
#include "fuzz_keys.h"
#include "fuzz_target.h"

#define WORD_COUNT_MAX 12
#define COMMAND_COUNT_MAX 8
#define FILE_BYTES_MAX (1 << 16)

int command_main(int argc, char **argv); // main() of the command, by another name

/// Writes a model whose bytes are compressible; `step` makes the versions of a model differ.
static void put_model(const char *name, const char *header, size_t data_bytes, int step) {
    static unsigned char file[FILE_BYTES_MAX];
    uint64_t size = strlen(header);
    require(8 + size + data_bytes <= sizeof file);
    memcpy(file, &size, 8);
    memcpy(file + 8, header, size);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + size + i] = (unsigned char)(i % 2 == 1 ? 61 : i * 7 * (size_t)step);
    fuzz_put(name, file, 8 + size + data_bytes);
}

#define LARGE_BYTES ((size_t)16 << 10)
#define LARGE                                                                                      \
    "{\"layers.0.w\":{\"dtype\":\"BF16\",\"shape\":[64,64],\"data_offsets\":[0,8192]},"            \
    "\"layers.1.w\":{\"dtype\":\"F16\",\"shape\":[4096],\"data_offsets\":[8192,16384]}}"

/// Restores the files that every run starts with.
static void make_files(void) {
    fuzz_clear();
    put_model("a",
              "{\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
              "\"layers.1.b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}",
              32, 1);
    put_model("b",
              "{\"__metadata__\":{\"k\":\"v\"},\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],"
              "\"data_offsets\":[0,24]}}",
              24, 1);
    put_model("broken", "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9]}}", 9, 1);
    if (mkdir("m1", 0700) != 0 || mkdir("m2", 0700) != 0) abort();
    put_model("m1/model.safetensors", LARGE, LARGE_BYTES, 1);
    put_model("m2/model.safetensors", LARGE, LARGE_BYTES, 3);
    fuzz_put("key", private_pem, sizeof private_pem - 1);
    fuzz_put("pub", public_pem, sizeof public_pem - 1);
}

/// Enters the folder, and keeps the commands away from the user's caches and other programs.
static void prepare(void) {
    static const char *const folders[] = {"HOME", "XDG_CACHE_HOME", "FASTSAFETENSORS_CACHE_DIR",
                                          "FASTSAFETENSORS_SHARE_DIR"};
    fst_remote_options offline = {.struct_size = sizeof offline, .offline = 1};
    if (!fuzz_enter("command")) return;
    char path[sizeof fuzz_folder + 8];
    snprintf(path, sizeof path, "%s/cache", fuzz_folder);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) setenv(folders[i], path, 1);
    setenv("PATH", "", 1);
    require(fst_remote_configure(&offline, NULL) == FST_OK);
    // The command's output is discarded; sanitizer reports go to the original stderr.
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nowhere < 0 || dup2(nowhere, STDOUT_FILENO) < 0 || dup2(nowhere, STDIN_FILENO) < 0) abort();
    stderr = fopen("/dev/null", "we"); // a fuzzer has kept the old one for itself
    if (stderr == NULL) abort();
}

/// Refuses paths outside the folder, and long work.
static bool is_allowed(const char *word) {
    static const char *const refused[] = {"//", ":/", "=/", "..", "~", "bench", "runs", "repeat"};
    if (word[0] == '/') return false;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (strstr(word, refused[i]) != NULL) return false;
    return true;
}

static void damage_file(const char *name, const char *offset, const char *byte) {
    unsigned char value = (unsigned char)strtoul(byte, NULL, 10);
    int fd = open(name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    (void)!pwrite(fd, &value, 1, (off_t)(strtoul(offset, NULL, 10) % FILE_BYTES_MAX));
    close(fd);
}

static void run_command(int count, char **words) {
    words[count] = NULL;
    if (count == 5 && strcmp(words[1], "!") == 0) {
        damage_file(words[2], words[3], words[4]);
        return;
    }
    optind = 0; // getopt starts anew
    int code = command_main(count, words);
    if (code < 0 || code > 4) __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char text[4096], name[] = "fastsafetensors";
    char *words[WORD_COUNT_MAX + 3] = {name};
    int count = 1, commands = 0;
    prepare();
    if (size >= sizeof text) return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (size_t at = 0; at < size; at += strlen(text + at) + 1)
        if (!is_allowed(text + at)) return 0;
    make_files();
    for (size_t at = 0; at < size && commands < COMMAND_COUNT_MAX; at += strlen(text + at) + 1) {
        bool is_end = strcmp(text + at, ";") == 0;
        if (!is_end && count <= WORD_COUNT_MAX) words[count++] = text + at;
        if (!is_end) continue;
        run_command(count, words);
        commands++;
        count = 1;
    }
    run_command(count, words);
    return 0;
}
