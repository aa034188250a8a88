// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of the GPU module: a driver as one table of functions. The CUDA driver API
/// and HIP have nearly the same signatures. The types here match theirs at the ABI level (handles
/// are pointers, results and enumerations are int, device addresses have 64 bits).
#ifndef FSTI_GPU_PRIVATE_H
#define FSTI_GPU_PRIVATE_H

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>

#include "gpu.h"

/// X(field, parameters, CUDA symbol, HIP symbol); a NULL symbol is missing in that driver. Sources:
/// the CUDA driver API reference and the HIP runtime API reference. CUDA's _v2 names are those to
/// which its header maps the plain ones.
#define FSTI_GPU_FUNCTIONS(X)                                                                      \
    X(init, (unsigned flags), "cuInit", "hipInit")                                                 \
    X(driver_version, (int *version), "cuDriverGetVersion", "hipDriverGetVersion")                 \
    X(device_count, (int *count), "cuDeviceGetCount", "hipGetDeviceCount")                         \
    X(device_get, (int *device, int ordinal), "cuDeviceGet", "hipDeviceGet")                       \
    X(device_name, (char *name, int size, int device), "cuDeviceGetName", "hipDeviceGetName")      \
    X(device_bus, (char *name, int size, int device), "cuDeviceGetPCIBusId",                       \
      "hipDeviceGetPCIBusId")                                                                      \
    X(device_attribute, (int *value, int attribute, int device), "cuDeviceGetAttribute",           \
      "hipDeviceGetAttribute")                                                                     \
    X(context_retain, (void **context, int device), "cuDevicePrimaryCtxRetain",                    \
      "hipDevicePrimaryCtxRetain")                                                                 \
    X(context_push, (void *context), "cuCtxPushCurrent_v2", NULL)                                  \
    X(context_pop, (void **context), "cuCtxPopCurrent_v2", NULL)                                   \
    X(context_current, (void **context), "cuCtxGetCurrent", NULL)                                  \
    X(context_device, (int *device), "cuCtxGetDevice", "hipGetDevice")                             \
    X(device_select, (int device), NULL, "hipSetDevice")                                           \
    X(capture_exchange, (int *mode), "cuThreadExchangeStreamCaptureMode",                          \
      "hipThreadExchangeStreamCaptureMode")                                                        \
    X(memory_info, (size_t *free_bytes, size_t *all_bytes), "cuMemGetInfo_v2", "hipMemGetInfo")    \
    X(memory_alloc, (uint64_t *address, size_t size), "cuMemAlloc_v2", "hipMalloc")                \
    X(memory_free, (uint64_t address), "cuMemFree_v2", "hipFree")                                  \
    X(host_register, (void *address, size_t size, unsigned flags), "cuMemHostRegister_v2",         \
      "hipHostRegister")                                                                           \
    X(host_unregister, (void *address), "cuMemHostUnregister", "hipHostUnregister")                \
    X(host_address, (uint64_t *device, void *host, unsigned flags),                                \
      "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer")                                   \
    X(copy_in, (uint64_t target, const void *source, size_t size, void *stream),                   \
      "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync")                                                \
    X(copy_out, (void *target, uint64_t source, size_t size, void *stream),                        \
      "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync")                                                \
    X(stream_create, (void **stream, unsigned flags), "cuStreamCreate",                            \
      "hipStreamCreateWithFlags")                                                                  \
    X(stream_destroy, (void *stream), "cuStreamDestroy_v2", "hipStreamDestroy")                    \
    X(stream_sync, (void *stream), "cuStreamSynchronize", "hipStreamSynchronize")                  \
    X(stream_wait, (void *stream, void *event, unsigned flags), "cuStreamWaitEvent",               \
      "hipStreamWaitEvent")                                                                        \
    X(event_create, (void **event, unsigned flags), "cuEventCreate", "hipEventCreateWithFlags")    \
    X(event_destroy, (void *event), "cuEventDestroy_v2", "hipEventDestroy")                        \
    X(event_record, (void *event, void *stream), "cuEventRecord", "hipEventRecord")                \
    X(event_query, (void *event), "cuEventQuery", "hipEventQuery")                                 \
    X(event_sync, (void *event), "cuEventSynchronize", "hipEventSynchronize")                      \
    X(module_load, (void **module, const void *image), "cuModuleLoadData", "hipModuleLoadData")    \
    X(module_function, (void **function, void *module, const char *name), "cuModuleGetFunction",   \
      "hipModuleGetFunction")                                                                      \
    X(launch,                                                                                      \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,        \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,  \
       void **extra),                                                                              \
      "cuLaunchKernel", "hipModuleLaunchKernel")                                                   \
    X(module_unload, (void *module), "cuModuleUnload", "hipModuleUnload")                          \
    X(context_state, (int device, unsigned *flags, int *is_active), "cuDevicePrimaryCtxGetState",  \
      NULL)                                                                                        \
    X(context_id, (void *context, unsigned long long *id), "cuCtxGetId", NULL)                     \
    X(error_peek, (void), NULL, "hipPeekAtLastError")                                              \
    X(error_take, (void), NULL, "hipGetLastError")                                                 \
    X(error_string, (int code, const char **text), "cuGetErrorString", "hipDrvGetErrorString")

typedef struct fsti_gpu_api {
    fst_device_kind kind;
    const char *library;
    void *handle;
#define GPU_FIELD(field, parameters, cuda, hip) int(*field) parameters;
    FSTI_GPU_FUNCTIONS(GPU_FIELD)
#undef GPU_FIELD
    const char *(*error_text)(int code); ///< HIP's older call for `error_string`, or NULL
    fst_status status;                   ///< FST_OK: loaded and initialised
    char reason[240];                    ///< the reason otherwise
    int version, visible_count;          ///< number of devices that the process may use
    pid_t owner; ///< the process that initialised it; a forked child must not use it
} fsti_gpu_api;

/// Results with the same number in both drivers.
enum {
    GPU_OUT_OF_MEMORY = 2,
    GPU_NO_DEVICE = 100,
    GPU_INVALID_DEVICE = 101,
    GPU_NOT_READY = 600,
    GPU_NOT_REGISTERED = 713,
};
/// No driver's code: a call reported success without the result that it is for.
enum { GPU_NO_RESULT = -10002, GPU_MISALIGNED = -10003 };
/// What is promised of memory of a device, and what the kernel needs; drivers promise 256.
#define GPU_ALIGNMENT 16u
/// The capture mode that allows everything. Safe, because the library's streams are never captured.
enum { GPU_CAPTURE_RELAXED = 2 };
/// The caller's name for the default stream; HIP's handle is 0.
#define GPU_STREAM_DEFAULT ((uintptr_t)1)
/// Flags with the same number in both drivers.
enum {
    GPU_HOST_REGISTER_PORTABLE = 1,
    GPU_STREAM_NON_BLOCKING = 1,
    GPU_EVENT_BLOCKING = 1,
    GPU_EVENT_NO_TIMING = 2,
};

/// Opens the first available library of `names` (NULL-terminated). A library that the process has
/// already loaded, such as a framework's copy, is preferred. NULL: not found.
void *fsti_gpu_open_library(const char *const *names);

/// The driver of a kind, loaded and initialised on first use. Check ->status. A driver that does
/// not start within a minute cannot be used until it has started.
const fsti_gpu_api *fsti_gpu_driver(fst_device_kind kind);
/// For tests: the time that a driver may take to start; 0: the usual time.
void fsti_gpu_limit_start(uint32_t limit_ms);

/// HIP keeps a thread's last error until it is queried, and frameworks query it after each kernel.
/// Errors of the library's calls must not reach them. Returns the earlier error.
int fsti_gpu_errors_begin(const fsti_gpu_api *api);
void fsti_gpu_errors_end(const fsti_gpu_api *api, int before);

/// The result of a call that makes something: its code, or GPU_NO_RESULT if `made` is 0 or NULL.
static inline int fsti_gpu_made(int code, const void *made) {
    return code == 0 && made == NULL ? GPU_NO_RESULT : code;
}

/// Calls of a driver, one after another until one fails.
typedef struct fsti_gpu_calls {
    const fsti_gpu_api *api;
    int code;        ///< of the last call; 0: no call has failed
    size_t function; ///< the last function that was called: the offset of its field
} fsti_gpu_calls;
/// Calls a function of the driver, unless an earlier call has failed.
#define FSTI_GPU_CALL(calls, field, ...)                                                           \
    do {                                                                                           \
        if ((calls)->code != 0) break;                                                             \
        (calls)->function = offsetof(fsti_gpu_api, field);                                         \
        (calls)->code = (calls)->api->field(__VA_ARGS__);                                          \
    } while (0)

/// FST_OK if no call has failed. Otherwise FST_E_NO_MEMORY or FST_E_DEVICE, and an error with
/// `what` was done, the driver's text, the function and its code.
fst_status fsti_gpu_error(const fsti_gpu_calls *calls, const char *what, fst_error *error);

#define GPU_KERNELS_MISSING 0
#define GPU_KERNELS_READY 1
#define GPU_KERNELS_FAILED 2

struct fsti_device {
    const fsti_gpu_api *api;
    int32_t index;
    int ordinal;
    void *context;
    unsigned long long context_id; ///< changes when the context is reset; 0 without the call
    bool unified;                  ///< shares memory with the CPU
    char name[64];
    pthread_mutex_t lock; ///< protects the fields below
    int kernels;          ///< GPU_KERNELS_*
    void *function;
    char kernels_reason[96];  ///< why they failed
    char kernels_origin[704]; ///< which kernel it is, or where the compiler was looked for
    char kernels_log[2048];   ///< the compiler's, if it rejected the kernel
    bool shares;              ///< was seen to map pinned memory at the same address
};

/// Whether memory may be pinned: false when the driver has failed to unpin it several times.
bool fsti_gpu_may_pin(void);
/// Unpins pages. If it returns false they must stay mapped: the driver
/// would take the next mapping at their address for them. Call with the device's context.
bool fsti_gpu_unpin_pages(const fsti_device *device, void *data);
/// Unpins memory and releases it. Memory that the driver does not unpin stays mapped: the driver
/// would take the next mapping at its address for the pinned pages. The context must be current.
void fsti_gpu_unpin(const fsti_device *device, fsti_buffer *memory);

/// Releases device memory, or unpins and releases `beneath`, on another thread. Needs no context.
void fsti_gpu_release_later(const fsti_device *device, void *data, fsti_buffer *beneath);

/// Memory that a device maps at the CPU's address, from its registration to its release. The range
/// that is asked for has to lie in one buffer. (shared_memory.c)
void fsti_shared_memory_add(const void *begin, uint64_t size);
void fsti_shared_memory_remove(const void *begin);
bool fsti_shared_memory_has(const void *begin, uint64_t size);

/// Loads the kernels once per device. FST_E_DEVICE if they are unavailable. The context must be
/// current.
fst_status fsti_gpu_kernels(fsti_device *device, fst_error *error);

/// Larger code is not taken; the kernel's has about 14 kB.
#define FSTI_KERNEL_BYTES_MAX ((size_t)16 << 20)
/// Compiled code. fsti_free() frees `bytes`.
typedef struct fsti_kernel_code {
    char *bytes;
    size_t size;
} fsti_kernel_code;

/// HIP's runtime compiler, as its API is documented. (hip_compiler.c)
typedef struct fsti_hip_compiler {
    int (*create)(void **program, const char *source, const char *name, int header_count,
                  const char **headers, const char **include_names);
    int (*compile)(void *program, int option_count, const char **options);
    int (*code_size)(void *program, size_t *size);
    int (*code)(void *program, char *code);
    int (*destroy)(void **program);
    int (*log_size)(void *program, size_t *size); ///< NULL: missing
    int (*log)(void *program, char *text);        ///< NULL: missing
    char origin[600]; ///< the file, and where it was found; or why it is missing
} fsti_hip_compiler;

/// Looks in the process, in the driver's library, where the linker looks, in the toolkit, and in
/// the folder of the driver's library, which is torch's or a Python package's if the driver is.
bool fsti_hip_compiler_find(const fsti_gpu_api *api, fsti_hip_compiler *out);
/// Options of the compiler, next to those that keep denormals.
#define FSTI_HIP_OPTIMIZE "-O3"
#define FSTI_HIP_CONTRACT "-ffp-contract=off"
/// What to compile.
typedef struct fsti_hip_request {
    const char *source;
    const char *architecture; ///< "--gpu-architecture=..."; NULL: the thread's device
} fsti_hip_request;
/// Compiles. If it fails, `log` is the beginning of the compiler's log.
bool fsti_hip_compile(const fsti_hip_compiler *compiler, const fsti_hip_request *request,
                      fsti_kernel_code *out, char *log, size_t log_size);

/// Compiled code that this user's processes keep on disk, by a key of any text. Both report in
/// `note` what was found or why nothing is kept. (kernel_cache.c)
bool fsti_kernel_cache_read(const char *key, fsti_kernel_code *out, char *note, size_t size);
void fsti_kernel_cache_write(const char *key, const fsti_kernel_code *code, char *note,
                             size_t size);

#endif
