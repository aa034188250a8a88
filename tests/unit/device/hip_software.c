// SPDX-License-Identifier: Apache-2.0
/// No test: asks a real HIP runtime, which needs no device for this.
/// python/tests/test_gpu_software.py runs it with LD_LIBRARY_PATH.
///     hip_software start                        prints why the driver cannot be used
///     hip_software texts CODE...                prints the errors' messages
///     hip_software compile SOURCE FOLDER ARCHITECTURE...
///                                               writes FOLDER/ARCHITECTURE.hsaco for each
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/gpu_private.h"

static char *read_text(const char *path) {
    static char text[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t size = file == NULL ? 0 : fread(text, 1, sizeof text - 1, file);
    text[size] = '\0';
    if (file != NULL) fclose(file);
    return text;
}

static bool write_code(const char *folder, const char *architecture, const fsti_kernel_code *code) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s.hsaco", folder, architecture);
    FILE *file = fopen(path, "wb");
    if (file == NULL) return false;
    bool good = fwrite(code->bytes, 1, code->size, file) == code->size;
    return fclose(file) == 0 && good;
}

static int compile_all(const fsti_gpu_api *api, char **arguments, int count) {
    fsti_hip_compiler compiler;
    bool found = fsti_hip_compiler_find(api, &compiler);
    printf("compiler: %s\n", compiler.origin);
    if (!found) return 1;
    for (int i = 2; i < count; i++) {
        char option[128], log[1024];
        snprintf(option, sizeof option, "--gpu-architecture=%s", arguments[i]);
        const fsti_hip_request request = {.source = read_text(arguments[0]),
                                          .architecture = option};
        fsti_kernel_code code;
        uint64_t begin_ns = fsti_now_ns();
        bool good = fsti_hip_compile(&compiler, &request, &code, log, sizeof log) &&
                    write_code(arguments[1], arguments[i], &code);
        printf("%s: %s, %zu bytes, %.2f s %s\n", arguments[i], good ? "compiled" : "rejected",
               code.size, (double)(fsti_now_ns() - begin_ns) / 1e9, log);
        fsti_free(code.bytes);
    }
    return 0;
}

int main(int count, char **arguments) {
    const fsti_gpu_api *api = fsti_gpu_driver(FST_DEVICE_HIP);
    if (count < 2 || api->handle == NULL) {
        printf("%s\n", api->reason);
        return 1;
    }
    if (strcmp(arguments[1], "start") == 0) printf("%d %s\n", (int)api->status, api->reason);
    for (int i = 2; i < count && strcmp(arguments[1], "texts") == 0; i++) {
        fst_error error = {0};
        const fsti_gpu_calls calls = {
            .api = api, .code = atoi(arguments[i]), .function = offsetof(fsti_gpu_api, launch)};
        (void)fsti_gpu_error(&calls, "the operation", &error);
        printf("%s\n", error.message);
    }
    if (strcmp(arguments[1], "compile") == 0 && count > 4)
        return compile_all(api, arguments + 2, count - 2);
    return 0;
}
