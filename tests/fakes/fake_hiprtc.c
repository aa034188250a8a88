// SPDX-License-Identifier: Apache-2.0
/// A fake of HIP's runtime compiler. It fails with a log if FAKE_HIPRTC_REFUSE is in the
/// environment, or unless denormals are kept. FAKE_HIPRTC_OPTION is the option for that that it
/// knows. FAKE_HIPRTC_COUNT is a file to which each compilation appends a byte.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static const char code[] = "FAKE HIP CODE";
static char words[512]; ///< the log of the last compilation

// The texts and names of header files follow; the library passes none.
EXPORT int hiprtcCreateProgram(void **program, const char *source, const char *name, int headers) {
    (void)name;
    *program = (void *)code;
    return headers != 0 || strstr(source, "fst_scatter_pieces") == NULL;
}

static void count_compilation(void) {
    const char *path = getenv("FAKE_HIPRTC_COUNT");
    int fd = path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return;
    (void)!write(fd, "x", 1);
    close(fd);
}

EXPORT int hiprtcCompileProgram(void *program, int option_count, const char **options) {
    const char *known = getenv("FAKE_HIPRTC_OPTION");
    int good = 0;
    if (known == NULL) known = "-fno-gpu-flush-denormals-to-zero";
    count_compilation();
    snprintf(words, sizeof words, "denormals would be flushed\n");
    for (int i = 0; i < option_count; i++) {
        if (strcmp(options[i], known) == 0) good = 1;
        if (strncmp(options[i], "-fno-", 5) == 0 && strcmp(options[i], known) != 0)
            snprintf(words, sizeof words, "error: unknown argument: '%s'\n", options[i]);
    }
    if (getenv("FAKE_HIPRTC_REFUSE") != NULL)
        snprintf(words, sizeof words,
                 "In file included from here:\nscatter.cu:7:1: error: no such type\n1 error\n");
    return program != code || !good || getenv("FAKE_HIPRTC_REFUSE") != NULL;
}

EXPORT int hiprtcGetProgramLogSize(void *program, size_t *size) {
    (void)program;
    *size = strlen(words) + 1;
    return 0;
}

EXPORT int hiprtcGetProgramLog(void *program, char *text) {
    (void)program;
    strcpy(text, words);
    return 0;
}

EXPORT int hiprtcGetCodeSize(void *program, size_t *size) {
    (void)program;
    *size = sizeof code;
    return 0;
}

EXPORT int hiprtcGetCode(void *program, char *target) {
    (void)program;
    memcpy(target, code, sizeof code);
    return 0;
}

EXPORT int hiprtcDestroyProgram(void **program) {
    *program = NULL;
    return 0;
}
