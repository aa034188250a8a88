// SPDX-License-Identifier: Apache-2.0
/// The drivers' functions, under CUDA's names or (FAKE_HIP) HIP's.
#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_gpu.h"
#include "fake_stream.h"

// The kernel's source, compiled for the processor.
#define DEVICE static inline
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

#if defined(FAKE_HIP)
#define FUNCTION(cuda, hip) __attribute__((visibility("default"))) int hip
#define IMAGE_START "FAKE HIP CODE"
#else
#define FUNCTION(cuda, hip) __attribute__((visibility("default"))) int cuda
#define IMAGE_START "// SPDX"
#endif

enum { OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_VALUE = 1, NO_DEVICE = 100 };
enum { INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum { DEVICE_COUNT_MAX = 8, RANGE_COUNT_MAX = 4096, CONTEXT_DEPTH_MAX = 16 };

typedef struct range {
    char *begin;
    size_t size;
    int device; ///< -1: locked memory of the processors
} range;

static struct {
    pthread_mutex_t lock;
    range ranges[RANGE_COUNT_MAX];
    size_t range_count;
    long used[DEVICE_COUNT_MAX];
    char fail_function[64];
    pid_t owner;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

/// Numbers by name: settings and counters.
typedef struct number {
    const char *name;
    atomic_long value;
} number;
enum {
    DEVICES,
    MEMORY,
    VERSION,
    INTEGRATED,
    DELAY_US,
    FAIL_AT,
    FAIL_CODE,
    NO_LOCK,
    INIT_CODE,
    NO_KERNELS,
    OTHER_ADDRESS,
    ALLOCATIONS,
    ALLOCATED_BYTES,
    LOCKED_BYTES,
    CONTEXTS,
    STREAMS,
    EVENTS,
    CALLS,
    COPIES,
    LAUNCHES,
    NUMBER_COUNT
};
static number numbers[NUMBER_COUNT] = {
    [DEVICES] = {"devices", 2},
    [MEMORY] = {"memory", 1l << 32},
    [VERSION] = {"version", 12040},
    [INTEGRATED] = {"integrated", 0},
    [DELAY_US] = {"delay_us", 0},
    [FAIL_AT] = {"fail_at", 0},
    [FAIL_CODE] = {"fail_code", 999},
    [NO_LOCK] = {"no_lock", 0},
    [INIT_CODE] = {"init_code", 0},
    [NO_KERNELS] = {"no_kernels", 0},
    [OTHER_ADDRESS] = {"other_address", 0},
    [ALLOCATIONS] = {"allocations", 0},
    [ALLOCATED_BYTES] = {"allocated_bytes", 0},
    [LOCKED_BYTES] = {"locked_bytes", 0},
    [CONTEXTS] = {"contexts", 0},
    [STREAMS] = {"streams", 0},
    [EVENTS] = {"events", 0},
    [CALLS] = {"calls", 0},
    [COPIES] = {"copies", 0},
    [LAUNCHES] = {"launches", 0},
};
static _Thread_local int context_stack[CONTEXT_DEPTH_MAX], context_depth;
static char contexts[DEVICE_COUNT_MAX]; // their addresses are the handles

static long get(int index) { return atomic_load(&numbers[index].value); }
static void add(int index, long value) { atomic_fetch_add(&numbers[index].value, value); }

static number *find_number(const char *name) {
    for (int i = 0; i < NUMBER_COUNT; i++)
        if (strcmp(numbers[i].name, name) == 0) return &numbers[i];
    abort();
}

__attribute__((visibility("default"))) void fake_gpu_set(const char *name, long value) {
    atomic_store(&find_number(name)->value, value);
}

__attribute__((visibility("default"))) void fake_gpu_fail(const char *function, long nth,
                                                          long code) {
    pthread_mutex_lock(&state.lock);
    snprintf(state.fail_function, sizeof state.fail_function, "%s",
             function == NULL ? "" : function);
    pthread_mutex_unlock(&state.lock);
    atomic_store(&numbers[FAIL_CODE].value, code);
    atomic_store(&numbers[FAIL_AT].value, nth);
}

__attribute__((visibility("default"))) long fake_gpu_get(const char *name) {
    if (strcmp(name, "depth") == 0) return context_depth;
    if (strcmp(name, "fail_left") == 0) return get(FAIL_AT);
    return atomic_load(&find_number(name)->value);
}

static void fill(fake_work *work) { memset(work->target, work->byte, work->size); }

__attribute__((visibility("default"))) void fake_gpu_fill(void *stream, long delay_us, void *target,
                                                          int byte, unsigned long size) {
    fake_work work = {.run = fill, .target = target, .byte = byte, .size = size};
    fake_stream_add(stream, &work, 2 * delay_us);
}

/// Counts a call and says whether it is to fail.
static int begin_call(const char *function) {
    add(CALLS, 1);
    if (get(FAIL_AT) == 0) return 0;
    pthread_mutex_lock(&state.lock);
    // Whoever can't have the context can't give anything back either: only when it is named.
    bool is_any = state.fail_function[0] == '\0' && strcmp(function, "cuCtxPushCurrent") != 0;
    bool is_named = is_any || strcmp(state.fail_function, function) == 0;
    bool fails = is_named && get(FAIL_AT) > 0 && atomic_fetch_sub(&numbers[FAIL_AT].value, 1) == 1;
    pthread_mutex_unlock(&state.lock);
    return fails ? (int)get(FAIL_CODE) : 0;
}

#define BEGIN(function)                                                                            \
    do {                                                                                           \
        int begin_code = begin_call(function);                                                     \
        if (begin_code != 0) return begin_code;                                                    \
    } while (0)
#define BEGIN_IN_CONTEXT(function)                                                                 \
    BEGIN(function);                                                                               \
    if (context_depth == 0) return INVALID_CONTEXT;                                                \
    if (state.owner != getpid()) return NOT_INITIALIZED

/// For calls that give something back: what fails there is lost, whoever calls.
#define END_IN_CONTEXT(function)                                                                   \
    if (context_depth == 0) return INVALID_CONTEXT;                                                \
    if (state.owner != getpid()) return NOT_INITIALIZED

static void read_environment(void) {
    for (int i = 0; i < NUMBER_COUNT; i++) {
        char name[64] = "FAKE_GPU_";
        for (size_t k = 0; numbers[i].name[k] != '\0'; k++)
            name[9 + k] = (char)toupper(numbers[i].name[k]);
        const char *value = getenv(name);
        if (value != NULL) atomic_store(&numbers[i].value, atol(value));
    }
}

FUNCTION(cuInit, hipInit)(unsigned flags) {
    (void)flags;
    read_environment();
    state.owner = getpid();
    BEGIN("cuInit");
    return (int)get(INIT_CODE);
}

FUNCTION(cuDriverGetVersion, hipDriverGetVersion)(int *version) {
    BEGIN("cuDriverGetVersion");
    *version = (int)get(VERSION);
    return 0;
}

FUNCTION(cuDeviceGetCount, hipGetDeviceCount)(int *count) {
    BEGIN("cuDeviceGetCount");
    *count = (int)get(DEVICES);
    return 0;
}

FUNCTION(cuDeviceGet, hipDeviceGet)(int *device, int ordinal) {
    BEGIN("cuDeviceGet");
    *device = ordinal;
    return ordinal >= get(DEVICES) ? INVALID_DEVICE : 0;
}

FUNCTION(cuDeviceGetName, hipDeviceGetName)(char *name, int size, int device) {
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)size, "Fake GPU %d", device);
    return 0;
}

FUNCTION(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *value, int attribute, int device) {
    (void)device;
    BEGIN("cuDeviceGetAttribute");
    *value = attribute == 18 || attribute == 16 ? (int)get(INTEGRATED) : 0;
    return 0;
}

FUNCTION(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain)(void **context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    atomic_fetch_or(&numbers[CONTEXTS].value, 1l << device);
    *context = &contexts[device];
    return 0;
}

FUNCTION(cuCtxPushCurrent_v2, hipCtxPushCurrent)(void *context) {
    BEGIN("cuCtxPushCurrent");
    context_stack[context_depth++] = (int)((char *)context - contexts);
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
    *device = context_stack[context_depth - 1];
    return 0;
}

FUNCTION(cuMemGetInfo_v2, hipMemGetInfo)(size_t *available, size_t *all) {
    BEGIN_IN_CONTEXT("cuMemGetInfo");
    pthread_mutex_lock(&state.lock);
    *all = (size_t)get(MEMORY);
    *available = *all - (size_t)state.used[context_stack[context_depth - 1]];
    pthread_mutex_unlock(&state.lock);
    return 0;
}

/// The range that holds [begin, begin + size), or NULL. The lock is held.
static range *find_range(const void *begin, size_t size) {
    for (size_t i = 0; i < state.range_count; i++) {
        range *one = &state.ranges[i];
        if ((const char *)begin >= one->begin &&
            (const char *)begin + size <= one->begin + one->size)
            return one;
    }
    return NULL;
}

static bool add_range(char *begin, size_t size, int device) {
    if (state.range_count == RANGE_COUNT_MAX) return false;
    state.ranges[state.range_count++] = (range){begin, size, device};
    return true;
}

FUNCTION(cuMemAlloc_v2, hipMalloc)(uint64_t *address, size_t size) {
    BEGIN_IN_CONTEXT("cuMemAlloc");
    int device = context_stack[context_depth - 1];
    void *memory = NULL;
    pthread_mutex_lock(&state.lock);
    bool fits = size > 0 && state.used[device] + (long)size <= get(MEMORY);
    if (fits && posix_memalign(&memory, 4096, size) == 0 && add_range(memory, size, device)) {
        memset(memory, 0xa5, size < 8u << 20 ? size : 8u << 20); // what nobody wrote shows
        state.used[device] += (long)size;
        add(ALLOCATIONS, 1);
        add(ALLOCATED_BYTES, (long)size);
    }
    pthread_mutex_unlock(&state.lock);
    *address = (uintptr_t)memory;
    return memory == NULL ? OUT_OF_MEMORY : 0;
}

FUNCTION(cuMemFree_v2, hipFree)(uint64_t address) {
    END_IN_CONTEXT("cuMemFree");
    pthread_mutex_lock(&state.lock);
    range *one = find_range((void *)(uintptr_t)address, 1);
    bool good = one != NULL && one->begin == (char *)(uintptr_t)address && one->device >= 0;
    if (good) {
        state.used[one->device] -= (long)one->size;
        add(ALLOCATIONS, -1);
        add(ALLOCATED_BYTES, -(long)one->size);
        free(one->begin);
        *one = state.ranges[--state.range_count];
    }
    pthread_mutex_unlock(&state.lock);
    return good ? 0 : INVALID_VALUE;
}

FUNCTION(cuMemHostRegister_v2, hipHostRegister)(void *address, size_t size, unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuMemHostRegister");
    if (get(NO_LOCK) != 0) return OUT_OF_MEMORY;
    pthread_mutex_lock(&state.lock);
    bool good = find_range(address, size) == NULL && add_range(address, size, -1);
    if (good) add(LOCKED_BYTES, (long)size);
    pthread_mutex_unlock(&state.lock);
    return good ? 0 : INVALID_VALUE;
}

FUNCTION(cuMemHostUnregister, hipHostUnregister)(void *address) {
    END_IN_CONTEXT("cuMemHostUnregister");
    pthread_mutex_lock(&state.lock);
    range *one = find_range(address, 1);
    bool good = one != NULL && one->begin == address && one->device == -1;
    if (good) {
        add(LOCKED_BYTES, -(long)one->size);
        *one = state.ranges[--state.range_count];
    }
    pthread_mutex_unlock(&state.lock);
    return good ? 0 : INVALID_VALUE;
}

FUNCTION(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer)(uint64_t *device, void *host,
                                                                unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuMemHostGetDevicePointer");
    *device = (uintptr_t)host + (get(OTHER_ADDRESS) != 0 ? 4096u : 0u);
    return 0;
}

/// Whether `size` bytes at `address` are memory of a device.
static bool is_device_memory(uint64_t address, size_t size) {
    pthread_mutex_lock(&state.lock);
    const range *one = find_range((void *)(uintptr_t)address, size);
    bool good = one != NULL && one->device >= 0;
    pthread_mutex_unlock(&state.lock);
    return good;
}

static bool is_locked(const void *address, size_t size) {
    pthread_mutex_lock(&state.lock);
    const range *one = find_range(address, size);
    bool locked = one != NULL && one->device == -1;
    pthread_mutex_unlock(&state.lock);
    return locked;
}

static void copy(fake_work *work) { memcpy(work->target, work->source, work->size); }

FUNCTION(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(uint64_t target, const void *source, size_t size,
                                                   void *stream) {
    BEGIN_IN_CONTEXT("cuMemcpyHtoDAsync");
    if (!is_device_memory(target, size)) return ILLEGAL_ADDRESS;
    add(COPIES, 1);
    fake_work work = {
        .run = copy, .target = (void *)(uintptr_t)target, .source = source, .size = size};
    fake_stream_add(stream, &work, get(DELAY_US));
    // Memory that is not locked is taken before the call returns.
    if (!is_locked(source, size)) fake_stream_sync(stream);
    return 0;
}

FUNCTION(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void *target, uint64_t source, size_t size,
                                                   void *stream) {
    BEGIN_IN_CONTEXT("cuMemcpyDtoHAsync");
    // Locked memory of the processors has an address for the device, too.
    if (!is_device_memory(source, size) && !is_locked((void *)(uintptr_t)source, size))
        return ILLEGAL_ADDRESS;
    fake_work work = {
        .run = copy, .target = target, .source = (void *)(uintptr_t)source, .size = size};
    fake_stream_add(stream, &work, get(DELAY_US));
    return 0;
}

FUNCTION(cuMemsetD8Async, hipMemsetD8Async)(uint64_t target, unsigned char byte, size_t size,
                                            void *stream) {
    BEGIN_IN_CONTEXT("cuMemsetD8Async");
    if (!is_device_memory(target, size)) return ILLEGAL_ADDRESS;
    fake_work work = {.run = fill, .target = (void *)(uintptr_t)target, .byte = byte, .size = size};
    fake_stream_add(stream, &work, get(DELAY_US));
    return 0;
}

FUNCTION(cuStreamCreate, hipStreamCreateWithFlags)(void **stream, unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuStreamCreate");
    *stream = fake_stream_open();
    if (*stream != NULL) add(STREAMS, 1);
    return *stream == NULL ? OUT_OF_MEMORY : 0;
}

FUNCTION(cuStreamDestroy_v2, hipStreamDestroy)(void *stream) {
    END_IN_CONTEXT("cuStreamDestroy");
    fake_stream_close(stream);
    add(STREAMS, -1);
    return 0;
}

FUNCTION(cuStreamSynchronize, hipStreamSynchronize)(void *stream) {
    fake_stream_sync(stream); // also when it is to fail: what was queued happens
    BEGIN_IN_CONTEXT("cuStreamSynchronize");
    return 0;
}

FUNCTION(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream, void *event, unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuStreamWaitEvent");
    fake_event_follow(event, stream);
    return 0;
}

FUNCTION(cuEventCreate, hipEventCreateWithFlags)(void **event, unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuEventCreate");
    *event = fake_event_open();
    if (*event != NULL) add(EVENTS, 1);
    return *event == NULL ? OUT_OF_MEMORY : 0;
}

FUNCTION(cuEventDestroy_v2, hipEventDestroy)(void *event) {
    END_IN_CONTEXT("cuEventDestroy");
    fake_event_close(event);
    add(EVENTS, -1);
    return 0;
}

FUNCTION(cuEventRecord, hipEventRecord)(void *event, void *stream) {
    BEGIN_IN_CONTEXT("cuEventRecord");
    bool is_default = (uintptr_t)stream < 3; // the legacy and the thread's stream: nothing queued
    fake_event_record(event, is_default ? NULL : stream, get(DELAY_US));
    return 0;
}

FUNCTION(cuEventQuery, hipEventQuery)(void *event) {
    BEGIN_IN_CONTEXT("cuEventQuery");
    return fake_event_done(event) ? 0 : NOT_READY;
}

FUNCTION(cuEventSynchronize, hipEventSynchronize)(void *event) {
    fake_event_sync(event);
    BEGIN_IN_CONTEXT("cuEventSynchronize");
    return 0;
}

FUNCTION(cuModuleLoadData, hipModuleLoadData)(void **module, const void *image) {
    BEGIN_IN_CONTEXT("cuModuleLoadData");
    bool good = get(NO_KERNELS) == 0 && strncmp(image, IMAGE_START, strlen(IMAGE_START)) == 0;
    *module = &state;
    return good ? 0 : INVALID_IMAGE;
}

FUNCTION(cuModuleGetFunction, hipModuleGetFunction)(void **function, void *module,
                                                    const char *name) {
    (void)module;
    BEGIN_IN_CONTEXT("cuModuleGetFunction");
    *function = &numbers;
    return strcmp(name, "fst_scatter_pieces") == 0 ? 0 : NOT_FOUND;
}

static void run_kernel(fake_work *work) {
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
    if (function != &numbers || grid_y * grid_z * block_y * block_z != 1 || block_x == 0 ||
        shared != 0 || extra != NULL || grid_x == 0)
        return INVALID_VALUE;
    add(LAUNCHES, 1);
    fake_work work = {.run = run_kernel,
                      .source = *(void **)arguments[0],
                      .place = *(void **)arguments[1],
                      .size = grid_x};
    fake_stream_add(stream, &work, get(DELAY_US));
    return 0;
}

FUNCTION(cuGetErrorString, hipDrvGetErrorString)(int code, const char **text) {
    *text = code == OUT_OF_MEMORY     ? "out of memory"
            : code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
                                      : "a fake error";
    return 0;
}
