// SPDX-License-Identifier: Apache-2.0
/// Runs a fuzz target over files and folders of inputs, without a fuzzer: part of every test run.
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz_target.h"

static int replay_file(const char *path) {
    FILE *file = fopen(path, "re");
    if (file == NULL) return 0;
    size_t capacity = 1 << 20;
    uint8_t *bytes = malloc(capacity);
    if (bytes == NULL) exit(1);
    size_t size = fread(bytes, 1, capacity, file);
    fclose(file);
    // An exact copy, so that a sanitizer detects reads past its end.
    uint8_t *exact = malloc(size + 1);
    if (exact == NULL) exit(1);
    memcpy(exact, bytes, size);
    free(bytes);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 1;
}

int main(int argc, char **argv) {
    int count = 0;
    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        if (folder == NULL) {
            count += replay_file(argv[i]);
            continue;
        }
        for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
            char path[4096];
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (entry->d_name[0] != '.') count += replay_file(path);
        }
        closedir(folder);
    }
    printf("%d inputs\n", count);
    return count == 0;
}
