// SPDX-License-Identifier: Apache-2.0
/// Finds HIP's runtime compiler (hiprtc) and compiles the kernel with it. Distributions build it
/// into the driver's library, ROCm has a separate library, and torch and AMD's Python packages have
/// one next to their copy of the driver.
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "gpu_private.h"

#define TOOLKIT_FOLDER "/opt/rocm/lib"
#define REQUIRED_COUNT 5u
#define FUNCTION_COUNT 7u
/// More of a compiler's log is not kept.
#define LOG_BYTES_MAX ((size_t)1 << 20)

/// In the order of the fields of fsti_hip_compiler. The last two, for the log, are optional.
static const char *const functions[FUNCTION_COUNT] = {
    "hiprtcCreateProgram",  "hiprtcCompileProgram",    "hiprtcGetCodeSize",  "hiprtcGetCode",
    "hiprtcDestroyProgram", "hiprtcGetProgramLogSize", "hiprtcGetProgramLog"};
static const char *const names[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5",
                                    "libhiprtc.so", NULL};

/// The file of a loaded library; its name if the linker does not know it.
static const char *path_of(void *handle, const char *name) {
    const struct link_map *map = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == NULL || map->l_name[0] == '\0')
        return name;
    return map->l_name;
}

/// Takes the functions of a library. `place` describes where it was found, for the log.
static bool take_functions(void *handle, const char *name, const char *place,
                           fsti_hip_compiler *out) {
    void *addresses[FUNCTION_COUNT];
    for (size_t i = 0; i < FUNCTION_COUNT; i++) {
        addresses[i] = dlsym(handle, functions[i]);
        if (addresses[i] != NULL || i >= REQUIRED_COUNT) continue;
        // A driver without a compiler is normal, a compiler without a function is not.
        if (i > 0 || strstr(name, "hiprtc") != NULL)
            snprintf(out->origin, sizeof out->origin, "%s lacks %s", name, functions[i]);
        return false;
    }
    memcpy(&out->create, addresses, sizeof addresses);
    snprintf(out->origin, sizeof out->origin, "%s (%s)", path_of(handle, name), place);
    return true;
}

/// Tries all names in a folder; "": where the linker looks.
static bool search_folder(const char *folder, int flags, const char *place,
                          fsti_hip_compiler *out) {
    for (size_t i = 0; names[i] != NULL; i++) {
        char path[512];
        int size =
            snprintf(path, sizeof path, "%s%s%s", folder, folder[0] == '\0' ? "" : "/", names[i]);
        if (size < 0 || (size_t)size >= sizeof path) continue;
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
        if (handle != NULL && take_functions(handle, names[i], place, out)) return true;
    }
    return false;
}

/// The folder of the driver's library, without its last slash. False if it is not known.
static bool driver_folder(const fsti_gpu_api *api, char *folder, size_t size) {
    const char *path = path_of(api->handle, ""), *slash = strrchr(path, '/');
    if (path[0] != '/' || slash == path || (size_t)(slash - path) >= size) return false;
    memcpy(folder, path, (size_t)(slash - path));
    folder[slash - path] = '\0';
    return true;
}

bool fsti_hip_compiler_find(const fsti_gpu_api *api, fsti_hip_compiler *out) {
    char folder[480];
    *out = (fsti_hip_compiler){.create = NULL};
    if (search_folder("", RTLD_NOLOAD, "loaded by the program", out)) return true;
    if (take_functions(api->handle, api->library, "part of the driver", out)) return true;
    if (search_folder("", 0, "found by the linker", out)) return true;
    if (search_folder(TOOLKIT_FOLDER, 0, "of the ROCm toolkit", out)) return true;
    if (driver_folder(api, folder, sizeof folder) &&
        search_folder(folder, 0, "next to the driver", out))
        return true;
    if (out->origin[0] == '\0')
        snprintf(out->origin, sizeof out->origin,
                 "no runtime compiler: libhiprtc.so was not found");
    return false;
}

/// Keeps the beginning of the compiler's log, where the first error is.
static void keep_log(const fsti_hip_compiler *compiler, void *program, char *log, size_t log_size) {
    size_t size = 0;
    log[0] = '\0';
    if (compiler->log_size == NULL || compiler->log == NULL ||
        compiler->log_size(program, &size) != 0 || size <= 1 || size > LOG_BYTES_MAX)
        return;
    char *text = fsti_alloc_zeroed(size + 1, 1);
    if (text != NULL && compiler->log(program, text) == 0)
        snprintf(log, log_size, "%.*s", (int)fsti_min(size, log_size), text);
    fsti_free(text);
}

static bool take_code(const fsti_hip_compiler *compiler, void *program, fsti_kernel_code *out) {
    if (compiler->code_size(program, &out->size) != 0 || out->size == 0 ||
        out->size > FSTI_KERNEL_BYTES_MAX)
        return false;
    out->bytes = fsti_alloc(out->size);
    if (out->bytes != NULL && compiler->code(program, out->bytes) == 0) return true;
    fsti_free(out->bytes);
    out->bytes = NULL;
    return false;
}

/// The kernel converts by float arithmetic, and rounds like the CPU only if denormals are kept. For
/// devices before gfx9 the compiler flushes them by default; one of these options keeps them.
static const char *const keep_denormals[] = {"-fno-gpu-flush-denormals-to-zero",
                                             "-fno-cuda-flush-denormals-to-zero"};

bool fsti_hip_compile(const fsti_hip_compiler *compiler, const fsti_hip_request *request,
                      fsti_kernel_code *out, char *log, size_t log_size) {
    bool good = false;
    *out = (fsti_kernel_code){.bytes = NULL};
    log[0] = '\0';
    for (size_t i = 0; i < sizeof keep_denormals / sizeof *keep_denormals && !good; i++) {
        const char *options[] = {FSTI_HIP_OPTIMIZE, FSTI_HIP_CONTRACT, keep_denormals[i],
                                 request->architecture};
        void *program = NULL;
        if (compiler->create(&program, request->source, "scatter.cu", 0, NULL, NULL) != 0) continue;
        good = compiler->compile(program, request->architecture == NULL ? 3 : 4, options) == 0;
        if (good)
            good = take_code(compiler, program, out);
        else
            keep_log(compiler, program, log, log_size);
        compiler->destroy(&program);
        // Any other error than an unknown option would only be repeated.
        if (log[0] != '\0' && strstr(log, "flush-denormals") == NULL) break;
    }
    return good;
}
