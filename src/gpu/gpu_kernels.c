// SPDX-License-Identifier: Apache-2.0
/// The kernel: for CUDA binaries of current generations, and PTX, which the driver compiles, for
/// all others; for HIP the source, compiled by the HIP runtime compiler where there is one. Where
/// the kernel can't be had, the processors convert.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "fastsafetensors/dtype.h"
#include "gpu_private.h"
#include "kernel_texts.h" // made by tools/embed_text.py

#define KERNEL_NAME "fst_scatter_pieces"
/// CUDA's attributes of a device's generation, and its word for an image of another one.
enum { CUDA_MAJOR = 75, CUDA_MINOR = 76, GPU_NO_BINARY = 209 };

// The kernel's own numbers of dtypes, and its piece.
_Static_assert(FST_DTYPE_F4 == 1 && FST_DTYPE_U8 == 4 && FST_DTYPE_F8_E8M0 == 8, "scatter.cu");
_Static_assert(FST_DTYPE_I16 == 11 && FST_DTYPE_F32 == 17 && FST_DTYPE_U64 == 21, "scatter.cu");
_Static_assert(sizeof(fsti_piece) == 32, "scatter.cu");

/// The HIP runtime compiler, as its documentation declares it.
typedef struct hip_compiler {
    int (*create)(void **program, const char *source, const char *name, int header_count,
                  const char **headers, const char **include_names);
    int (*compile)(void *program, int option_count, const char **options);
    int (*code_size)(void *program, size_t *size);
    int (*code)(void *program, char *code);
    int (*destroy)(void **program);
} hip_compiler;

static bool find_compiler(hip_compiler *compiler, char *reason, size_t reason_size) {
    static const char *const names[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5",
                                        "libhiprtc.so", NULL};
    static const char *const functions[] = {"hiprtcCreateProgram", "hiprtcCompileProgram",
                                            "hiprtcGetCodeSize", "hiprtcGetCode",
                                            "hiprtcDestroyProgram"};
    void *handle = fsti_gpu_open_library(names), *addresses[5];
    for (size_t i = 0; handle != NULL && i < 5; i++) {
        addresses[i] = dlsym(handle, functions[i]);
        if (addresses[i] != NULL) continue;
        snprintf(reason, reason_size, "libhiprtc.so lacks %s", functions[i]);
        return false;
    }
    if (handle == NULL) {
        snprintf(reason, reason_size, "no runtime compiler: libhiprtc.so was not found");
        return false;
    }
    memcpy(compiler, addresses, sizeof addresses);
    return true;
}

/// Compiles the source for the current device. *code is the caller's.
static bool compile_for_hip(char **code, char *reason, size_t reason_size) {
    hip_compiler compiler;
    const char *options[] = {"-O3", "-ffp-contract=off"};
    void *program = NULL;
    size_t size = 0;
    *code = NULL;
    if (!find_compiler(&compiler, reason, reason_size)) return false;
    bool good = compiler.create(&program, fsti_kernel_source, "scatter.cu", 0, NULL, NULL) == 0 &&
                compiler.compile(program, 2, options) == 0 &&
                compiler.code_size(program, &size) == 0 && size > 0;
    if (good) *code = fsti_alloc(size);
    good = good && *code != NULL && compiler.code(program, *code) == 0;
    if (program != NULL) compiler.destroy(&program);
    if (!good) snprintf(reason, reason_size, "the runtime compiler refused the kernel");
    return good;
}

/// The binary of a device's generation (majors), NULL where there is none. It runs on all devices
/// of the generation from the one on that it was made for.
static const void *binary_for(const fsti_device *device) {
    static const struct {
        int major, minor;
        const void *image;
    } binaries[] = {{7, 5, fsti_kernel_sm75},
                    {8, 0, fsti_kernel_sm80},
                    {9, 0, fsti_kernel_sm90},
                    {10, 0, fsti_kernel_sm100},
                    {12, 0, fsti_kernel_sm120}};
    int major = 0, minor = 0;
    device->api->device_attribute(&major, CUDA_MAJOR, device->ordinal);
    device->api->device_attribute(&minor, CUDA_MINOR, device->ordinal);
    for (size_t i = 0; i < sizeof binaries / sizeof *binaries; i++)
        if (binaries[i].major == major && binaries[i].minor <= minor) return binaries[i].image;
    return NULL;
}

/// The binary where there is one and the driver takes it (an older one may not), else PTX, which
/// takes no less memory.
static int load_for_cuda(const fsti_device *device, void **module) {
    const void *binary = binary_for(device);
    int code = binary == NULL ? GPU_NO_BINARY : device->api->module_load(module, binary);
    if (code == 0 || code == GPU_OUT_OF_MEMORY) return code;
    return device->api->module_load(module, fsti_kernel_ptx);
}

/// Loads them; GPU_KERNELS_MISSING where a later load may be luckier.
static int load_kernels(fsti_device *device) {
    const fsti_gpu_api *api = device->api;
    char *compiled = NULL, *reason = device->kernels_reason;
    size_t reason_size = sizeof device->kernels_reason;
    void *module = NULL;
    int code;
    if (api->kind == FST_DEVICE_CUDA) {
        code = load_for_cuda(device, &module);
    } else {
        bool good = compile_for_hip(&compiled, reason, reason_size);
        code = good ? api->module_load(&module, compiled) : 0;
        fsti_free(compiled);
        if (!good) return GPU_KERNELS_FAILED;
    }
    bool is_loaded = code == 0;
    if (code == 0) code = api->module_function(&device->function, module, KERNEL_NAME);
    if (code == 0) return GPU_KERNELS_READY;
    if (is_loaded) (void)api->module_unload(module);
    snprintf(reason, reason_size, "the driver refused the kernel (error %d)", code);
    // Models are loaded when devices are full.
    return code == GPU_OUT_OF_MEMORY ? GPU_KERNELS_MISSING : GPU_KERNELS_FAILED;
}

fst_status fsti_gpu_kernels(fsti_device *device, fst_error *error) {
    pthread_mutex_lock(&device->lock);
    if (device->kernels == GPU_KERNELS_MISSING) device->kernels = load_kernels(device);
    bool ready = device->kernels == GPU_KERNELS_READY;
    pthread_mutex_unlock(&device->lock);
    if (ready) return FST_OK;
    return fsti_error_set(error, FST_E_DEVICE, FSTI_NOWHERE, "%s", device->kernels_reason);
}

bool fsti_device_has_kernels(fsti_device *device) {
    return fsti_gpu_kernels(device, NULL) == FST_OK;
}
