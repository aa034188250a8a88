// SPDX-License-Identifier: Apache-2.0
/// A fake of HIP's runtime compiler. It fails if FAKE_HIPRTC_REFUSE is in the environment.
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static const char code[] = "FAKE HIP CODE";

// The texts and names of header files follow; the library passes none.
EXPORT int hiprtcCreateProgram(void **program, const char *source, const char *name, int headers) {
    (void)name;
    *program = (void *)code;
    return headers != 0 || strstr(source, "fst_scatter_pieces") == NULL;
}

EXPORT int hiprtcCompileProgram(void *program, int option_count, const char **options) {
    (void)option_count, (void)options;
    return program != code || getenv("FAKE_HIPRTC_REFUSE") != NULL;
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
