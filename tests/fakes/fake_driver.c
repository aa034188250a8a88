// SPDX-License-Identifier: Apache-2.0
/// The functions of the fake drivers, with CUDA's names or (FAKE_HIP) HIP's: devices, contexts,
/// streams, events, the kernel. fake_memory.c has memory and copies.
#include "fake_driver.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The kernel's source, compiled for the processor.
// The thread sanitizer would take ten times as long for each byte. A chunk that is overwritten
// before it was read is found by fake_memory.c.
#define DEVICE static inline __attribute__((no_sanitize("thread")))
typedef unsigned long long u64;
static inline float float_of_bits(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned bits_of_float(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline double double_of_bits(u64 bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}
static inline u64 bits_of_double(double value) {
    u64 bits;
    memcpy(&bits, &value, 8);
    return bits;
}
#define FLOAT_OF(bits) float_of_bits(bits)
#define BITS_OF(value) bits_of_float(value)
#define DOUBLE_OF(bits) double_of_bits(bits)
#define BITS_OF_DOUBLE(value) bits_of_double(value)
#include "../../src/gpu/kernels/scatter.cu"

static pid_t owner;
static _Thread_local int context_stack[CONTEXT_DEPTH_MAX], context_depth;
static char contexts[DEVICE_COUNT_MAX]; // their addresses are the handles

static bool was_reset(const void *context) {
    long device = (const char *)context - contexts;
    return (fake_number(RESETS) >> device & 1) != 0;
}

bool fake_is_owner(void) { return owner == getpid(); }
long fake_depth(void) { return context_depth; }

FUNCTION(cuInit, hipInit)(unsigned flags) {
    (void)flags;
    fake_numbers_read();
    owner = getpid();
    fake_sleep_us(fake_number(INIT_US));
    BEGIN("cuInit");
    return (int)fake_number(INIT_CODE);
}

FUNCTION(cuDriverGetVersion, hipDriverGetVersion)(int *version) {
    BEGIN("cuDriverGetVersion");
    *version = (int)fake_number(VERSION);
    return 0;
}

/// A number of devices that the driver does not store, although it reports success.
#define NO_COUNT (-2)

FUNCTION(cuDeviceGetCount, hipGetDeviceCount)(int *count) {
    BEGIN("cuDeviceGetCount");
    if (fake_number(DEVICES) != NO_COUNT) *count = (int)fake_number(DEVICES);
    return (int)fake_number(COUNT_CODE);
}

FUNCTION(cuDeviceGet, hipDeviceGet)(int *device, int ordinal) {
    BEGIN("cuDeviceGet");
    *device = ordinal;
    return ordinal >= fake_number(DEVICES) ? INVALID_DEVICE : 0;
}

FUNCTION(cuDeviceGetName, hipDeviceGetName)(char *name, int size, int device) {
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)size, fake_number(BAD_NAME) ? "\xff\x1b[GPU %d" : "Fake GPU %d", device);
    return 0;
}

FUNCTION(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *value, int attribute, int device) {
    (void)device;
    BEGIN("cuDeviceGetAttribute");
    *value = 0;
    if (attribute == 18 || attribute == 16) *value = (int)fake_number(INTEGRATED);
    if (attribute == 75) *value = (int)fake_number(CAPABILITY) / 10;
    if (attribute == 76) *value = (int)fake_number(CAPABILITY) % 10;
    return 0;
}

FUNCTION(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char *name, int size, int device) {
    BEGIN("cuDeviceGetPCIBusId");
    snprintf(name, (size_t)size, "0000:%02X:00.0", 0xA0 + device);
    return 0;
}

FUNCTION(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain)(void **context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    fake_number_or(CONTEXTS, 1l << device);
    *context = &contexts[device];
    return 0;
}

#if !defined(FAKE_HIP)
FUNCTION(cuDevicePrimaryCtxGetState, )(int device, unsigned *flags, int *is_active) {
    BEGIN("cuDevicePrimaryCtxGetState");
    *flags = 0;
    *is_active = (fake_number(CONTEXTS) >> device & 1) != 0;
    return 0;
}

FUNCTION(cuCtxGetId, )(void *context, unsigned long long *id) {
    BEGIN("cuCtxGetId");
    *id = was_reset(context) ? 8 : 7;
    return 0;
}

FUNCTION(cuDevicePrimaryCtxReset_v2, )(int device) {
    BEGIN("cuDevicePrimaryCtxReset");
    fake_number_set(RESETS, fake_number(RESETS) | 1l << device);
    fake_number_set(CONTEXTS, fake_number(CONTEXTS) & ~(1l << device));
    return 0;
}
#endif

#if defined(FAKE_HIP)
FUNCTION(, hipPeekAtLastError)(void) { return fake_last_error(); }
FUNCTION(, hipGetLastError)(void) { return fake_error_take(); }

// As ROCm's runtime: pushing a context makes its device the thread's, popping it does not give the
// thread back what it had.
static _Thread_local int current;
int fake_current_device(void) { return current; }

FUNCTION(, hipGetDevice)(int *device) {
    BEGIN("hipGetDevice");
    *device = current;
    return 0;
}

FUNCTION(, hipSetDevice)(int device) {
    BEGIN("cuCtxPushCurrent");
    if (device < 0 || device >= fake_number(DEVICES)) return INVALID_DEVICE;
    current = device;
    return 0;
}
#else
int fake_current_device(void) { return context_depth == 0 ? -1 : context_stack[context_depth - 1]; }
#endif

FUNCTION(cuCtxPushCurrent_v2, hipCtxPushCurrent)(void *context) {
    BEGIN("cuCtxPushCurrent");
    if (context_depth == CONTEXT_DEPTH_MAX || context == NULL) return INVALID_VALUE;
    if (was_reset(context)) { // NVIDIA's driver crashes
        fprintf(stderr, "fake GPU: a context is used after its reset\n");
        abort();
    }
    context_stack[context_depth++] = (int)((char *)context - contexts);
#if defined(FAKE_HIP)
    current = context_stack[context_depth - 1];
#endif
    return 0;
}

FUNCTION(cuCtxPopCurrent_v2, hipCtxPopCurrent)(void **context) {
    if (context_depth == 0) return INVALID_CONTEXT;
    *context = &contexts[context_stack[--context_depth]];
    return 0;
}

FUNCTION(cuCtxGetCurrent, hipCtxGetCurrent)(void **context) {
    BEGIN("cuCtxGetCurrent");
    *context = context_depth == 0 ? NULL : &contexts[context_stack[context_depth - 1]];
    return 0;
}

FUNCTION(cuCtxGetDevice, hipCtxGetDevice)(int *device) {
    BEGIN_IN_CONTEXT("cuCtxGetDevice");
    *device = fake_current_device();
    return 0;
}

FUNCTION(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int *mode) {
    fake_capture_exchange(mode);
    return 0;
}

/// The stream that a handle stands for: 0 is the legacy stream, as is CUDA's 1.
static fake_stream *stream_of(void *handle) {
    uintptr_t number = (uintptr_t)handle;
    if (number > 2) return handle;
    return fake_stream_legacy();
}

/// Older HIPs have no handle but 0 for it.
static bool is_refused(const void *handle) {
#if defined(FAKE_HIP)
    return handle == (void *)1;
#else
    (void)handle;
    return false;
#endif
}

FUNCTION(cuStreamCreate, hipStreamCreateWithFlags)(void **stream, unsigned flags) {
    BEGIN_IN_CONTEXT("cuStreamCreate");
    if (flags > 1) return INVALID_VALUE;
    *stream = fake_stream_open(flags == 0);
    fake_number_add(STREAM_CALLS, 1);
    if (*stream != NULL) fake_number_add(STREAMS, 1);
    return *stream == NULL ? OUT_OF_MEMORY : 0;
}

FUNCTION(cuStreamDestroy_v2, hipStreamDestroy)(void *stream) {
    END_IN_CONTEXT("cuStreamDestroy");
    fake_stream_close(stream);
    fake_number_add(STREAMS, -1);
    return 0;
}

FUNCTION(cuStreamSynchronize, hipStreamSynchronize)(void *stream) {
    if (is_refused(stream)) return INVALID_HANDLE;
    fake_stream_sync(stream_of(stream)); // also before a requested failure: queued work is done
    BEGIN_IN_CONTEXT("cuStreamSynchronize");
    return 0;
}

FUNCTION(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream, void *event, unsigned flags) {
    BEGIN_IN_CONTEXT("cuStreamWaitEvent");
    if (flags != 0) return INVALID_VALUE;
    if (is_refused(stream)) return INVALID_HANDLE;
    fake_event_follow(event, stream_of(stream));
    return 0;
}

FUNCTION(cuEventCreate, hipEventCreateWithFlags)(void **event, unsigned flags) {
    BEGIN_IN_CONTEXT("cuEventCreate");
    if (flags > 3) return INVALID_VALUE;
    *event = fake_event_open((flags & 1) != 0);
    if (*event != NULL) fake_number_add(EVENTS, 1);
    return *event == NULL ? OUT_OF_MEMORY : 0;
}

FUNCTION(cuEventDestroy_v2, hipEventDestroy)(void *event) {
    bool is_lost = fake_number(STICKY) != 0; // the event's memory is freed all the same
    if (is_lost) fake_event_close(event);
    END_IN_CONTEXT("cuEventDestroy");
    if (!is_lost) fake_event_close(event);
    fake_number_add(EVENTS, -1);
    return 0;
}

FUNCTION(cuEventRecord, hipEventRecord)(void *event, void *stream) {
    BEGIN_IN_CONTEXT("cuEventRecord");
    if (is_refused(stream)) return INVALID_HANDLE;
    fake_event_record(event, stream_of(stream), fake_number(DELAY_US));
    return 0;
}

FUNCTION(cuEventQuery, hipEventQuery)(void *event) {
    BEGIN_IN_CONTEXT("cuEventQuery");
    fake_number_add(QUERIES, 1);
    return fake_event_done(event) ? 0 : NOT_READY;
}

FUNCTION(cuEventSynchronize, hipEventSynchronize)(void *event) {
    bool waited = !fake_event_done(event);
    fake_event_sync(event);
    BEGIN_IN_CONTEXT("cuEventSynchronize");
    // Whoever sleeps for an interrupt wakes late.
    if (waited && fake_event_blocks(event)) {
        fake_number_add(BLOCKING_WAITS, 1);
        fake_sleep_us(fake_number(WAKE_US));
    }
    return 0;
}

/// A binary for this device's generation, or what the driver compiles.
static int check_image(const char *image) {
#if defined(FAKE_HIP)
    return strncmp(image, "FAKE HIP CODE", 13) == 0 ? 0 : INVALID_IMAGE;
#else
    if (memcmp(image, "\177ELF", 4) != 0)
        return strncmp(image, "// SPDX", 7) == 0 ? 0 : INVALID_IMAGE;
    // e_flags of a cubin hold the generation that it was made for.
    unsigned flags;
    memcpy(&flags, image + 48, sizeof flags);
    unsigned low = flags & 0xff, made_for = low >= 30 ? low : flags >> 8 & 0xff;
    long capability = fake_number(CAPABILITY);
    bool fits = (long)made_for / 10 == capability / 10 && (long)made_for <= capability;
    if (fake_number(NO_BINARIES) != 0 || !fits) return NO_BINARY;
    fake_number_add(BINARIES, 1);
    return 0;
#endif
}

static char module, binary_module, function_handle;
_Thread_local bool fake_loaded_module;

FUNCTION(cuModuleLoadData, hipModuleLoadData)(void **out, const void *image) {
    BEGIN_IN_CONTEXT("cuModuleLoadData");
    fake_number_add(MODULE_CALLS, 1);
    fake_loaded_module = true;
    fake_sleep_us(fake_number(MODULE_US));
    *out = memcmp(image, "\177ELF", 4) == 0 ? &binary_module : &module;
    int code = fake_number(NO_KERNELS) != 0 ? INVALID_IMAGE : check_image(image);
    if (code == 0) fake_number_add(MODULES, 1);
    return fake_error(code);
}

FUNCTION(cuModuleUnload, hipModuleUnload)(void *loaded) {
    END_IN_CONTEXT("cuModuleUnload");
    if (loaded != &module && loaded != &binary_module) return INVALID_HANDLE;
    fake_number_add(MODULES, -1);
    return 0;
}

FUNCTION(cuModuleGetFunction, hipModuleGetFunction)(void **function, void *from, const char *name) {
    BEGIN_IN_CONTEXT("cuModuleGetFunction");
    if (from != &module && from != &binary_module) return INVALID_HANDLE;
    if (from == &binary_module && fake_number(NO_FUNCTION) != 0)
        return fake_error((int)fake_number(NO_FUNCTION));
    *function = &function_handle;
    return strcmp(name, "fst_scatter_pieces") == 0 ? 0 : NOT_FOUND;
}

static void run_kernel(fake_work *work) {
    if (fake_number(NO_BYTES) != 0) return;
    const struct piece *pieces = work->source;
    for (size_t i = 0; i < work->size; i++)
        for (u32 thread = 0; thread < 4; thread++) // few threads, so that all of the code is used
            scatter_piece(&pieces[i], work->place, thread, 4);
}

FUNCTION(cuLaunchKernel, hipModuleLaunchKernel)(void *function, unsigned grid_x, unsigned grid_y,
                                                unsigned grid_z, unsigned block_x, unsigned block_y,
                                                unsigned block_z, unsigned shared, void *stream,
                                                void **arguments, void **extra) {
    BEGIN_IN_CONTEXT("cuLaunchKernel");
    if (function != &function_handle || grid_y * grid_z * block_y * block_z != 1 || block_x == 0 ||
        shared != 0 || extra != NULL || grid_x == 0)
        return INVALID_VALUE;
    fake_number_add(LAUNCHES, 1);
    fake_work work = {.run = run_kernel,
                      .source = *(void **)arguments[0],
                      .place = *(void **)arguments[1],
                      .size = grid_x};
    fake_stream_add(stream_of(stream), &work, fake_number(DELAY_US));
    return 0;
}

static const char *words_of(int code) {
    return code == OUT_OF_MEMORY     ? "out of memory"
           : code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
           : code == UNKNOWN_CODE    ? NULL
                                     : "a fake error";
}

FUNCTION(cuGetErrorString, hipDrvGetErrorString)(int code, const char **text) {
    *text = words_of(code);
    return *text == NULL ? INVALID_VALUE : 0;
}

#if defined(FAKE_HIP)
__attribute__((visibility("default"))) const char *hipGetErrorString(int code) {
    return words_of(code);
}
#endif
