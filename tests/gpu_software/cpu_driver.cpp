// SPDX-License-Identifier: Apache-2.0
/// A libcuda.so.1 in front of vgre (PyPI), a CUDA of other authors that computes on the CPU.
///
/// Most functions are vgre's. These are made here, because its version 0.1.4 lacks them or differs
/// from CUDA:
/// - the driver's version, bus names, primary contexts, the mode of stream capture;
/// - the stack of contexts: vgre's pop does not restore the context that was current before;
/// - cudaErrorNotReady, which vgre numbers 34 and CUDA 600, and waits for events, which vgre ends
///   with an error after 10 s;
/// - modules: vgre's loads CUDA C only. Here binaries are refused, as a driver of another generation
///   does, and PTX is run by vgre's interpreter in the order of the stream.
///
/// The interpreter ignores vector loads and does not know bfe.u32: the PTX gets scalar loads, and a
/// shift and a mask, instead.
///
/// VGRE_LIBRARY: path of libvgre_cudart.so. CPU_DRIVER_INTEGRATED: the device shares the memory of
/// the processor (otherwise not, although it does). CPU_DRIVER_LATE: accept binaries at load, and refuse them
/// when a function is asked for. CPU_DRIVER_LOG: a file that gets the number of launches at exit.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <sstream>
#include <string>

namespace {

constexpr int NOT_READY = 600, VGRE_NOT_READY = 34, NO_BINARY = 209, NOT_SUPPORTED = 801;
constexpr int NO_CONTEXT = 201, INVALID_VALUE = 1;
std::atomic<long> launches;

void *library() {
    static void *handle = dlopen(getenv("VGRE_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fprintf(stderr, "cpu_driver: %s\n", dlerror());
    return handle;
}

template <class F>
F find(const char *name) {
    void *found = library() == nullptr ? nullptr : dlsym(library(), name);
    if (found == nullptr) fprintf(stderr, "cpu_driver: vgre has no %s\n", name);
    return reinterpret_cast<F>(found);
}

__attribute__((destructor)) void log_launches() {
    const char *path = getenv("CPU_DRIVER_LOG");
    FILE *file = path == nullptr || launches == 0 ? nullptr : fopen(path, "w");
    if (file == nullptr) return;
    fprintf(file, "%ld\n", launches.load());
    fclose(file);
}

// ---- PTX ----

struct Size {
    int x, y, z;
};
struct Module {
    std::string ptx; ///< empty for a binary
};
struct Function {
    Module *module;
    std::string name;
};
struct Launch {
    const Function *function;
    Size grid, block;
    uint64_t values[2];
};

/// A line with bfe.u32 by constants, as a shift and a mask; "" for other lines.
std::string without_bfe(const std::string &line) {
    static const std::regex form(
        R"(^(\s*(?:@!?%p\d+\s+)?)bfe\.u32\s+(%r\d+), (%r\d+), (\d+), (\d+);)");
    std::smatch found;
    if (!std::regex_search(line, found, form)) return "";
    unsigned mask = (1u << std::stoi(found[5])) - 1;
    return found[1].str() + "shr.u32 " + found[2].str() + ", " + found[3].str() + ", " +
           found[4].str() + ";\n" + found[1].str() + "and.b32 " + found[2].str() + ", " +
           found[2].str() + ", " + std::to_string(mask) + ";\n";
}

/// A line with a vector load, as scalar loads; "" for other lines.
std::string without_vector(const std::string &line) {
    static const std::regex form(R"(^(\s*(?:@!?%p\d+\s+)?)ld\.global\.v[24]\.([a-z])(\d+)\s*)"
                                 R"(\{([^}]*)\},\s*\[([^\]+]+)(?:\+(-?\d+))?\];)");
    std::smatch found;
    if (!std::regex_search(line, found, form)) return "";
    std::istringstream registers(found[4].str());
    std::string out, name;
    long offset = found[6].matched ? std::stol(found[6]) : 0, step = std::stol(found[3]) / 8;
    for (; std::getline(registers, name, ','); offset += step)
        out += found[1].str() + "ld.global." + found[2].str() + found[3].str() + " " + name +
               ", [" + found[5].str() + "+" + std::to_string(offset) + "];\n";
    return out;
}

std::string for_interpreter(const char *ptx) {
    std::istringstream in(ptx);
    std::string out, line;
    while (std::getline(in, line)) {
        std::string changed = without_bfe(line);
        if (changed.empty()) changed = without_vector(line);
        out += changed.empty() ? line + "\n" : changed;
    }
    return out;
}

#define STRING "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

void run(void *context) {
    auto *launch = static_cast<Launch *>(context);
    using Interpret = bool (*)(const std::string &, const std::string &, const Size &, const Size &,
                               void *const *, int, unsigned long);
    static auto interpret = find<Interpret>("_ZN4vgre5debug14PtxInterpreter9runKernelE" STRING
                                            "S9_RKNS0_4Dim3ESC_PKPvim");
    void *arguments[] = {&launch->values[0], &launch->values[1]};
    if (!interpret(launch->function->module->ptx, launch->function->name, launch->grid,
                   launch->block, arguments, 2, 0)) {
        fprintf(stderr, "cpu_driver: the interpreter gave up\n");
        abort();
    }
    delete launch;
}

thread_local void *contexts[64];
thread_local int depth, capture_mode;
std::atomic<int> retained[64]; ///< of the primary context of each device

int make_current(void *context) {
    static auto set = find<int (*)(void *)>("cuCtxSetCurrent");
    return set(context);
}

} // namespace

extern "C" {

// ---- vgre's functions under the driver's names ----

#define FORWARD(name, theirs, parameters, arguments)                                               \
    int name parameters {                                                                          \
        static auto function = find<int(*) parameters>(theirs);                                    \
        return function == nullptr ? NOT_SUPPORTED : function arguments;                           \
    }

FORWARD(cuInit, "cuInit", (unsigned flags), (flags))
FORWARD(cuDeviceGetCount, "cuDeviceGetCount", (int *count), (count))
FORWARD(cuDeviceGet, "cuDeviceGet", (int *device, int ordinal), (device, ordinal))
FORWARD(cuDeviceGetName, "cuDeviceGetName", (char *name, int size, int device),
        (name, size, device))
FORWARD(cuMemGetInfo_v2, "cudaMemGetInfo", (size_t *free_bytes, size_t *bytes), (free_bytes, bytes))
FORWARD(cuMemAlloc_v2, "cudaMalloc", (uint64_t *address, size_t size), (address, size))
FORWARD(cuMemFree_v2, "cuMemFree", (uint64_t address), (address))
FORWARD(cuMemHostRegister_v2, "cuMemHostRegister", (void *address, size_t size, unsigned flags),
        (address, size, flags))
FORWARD(cuMemHostUnregister, "cuMemHostUnregister", (void *address), (address))
FORWARD(cuMemHostGetDevicePointer_v2, "cuMemHostGetDevicePointer",
        (uint64_t *device, void *host, unsigned flags), (device, host, flags))
FORWARD(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync",
        (uint64_t target, const void *source, size_t size, void *stream),
        (target, source, size, stream))
FORWARD(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync",
        (void *target, uint64_t source, size_t size, void *stream), (target, source, size, stream))
FORWARD(cuStreamCreate, "cuStreamCreate", (void **stream, unsigned flags), (stream, flags))
FORWARD(cuStreamDestroy_v2, "cuStreamDestroy", (void *stream), (stream))
FORWARD(cuStreamSynchronize, "cuStreamSynchronize", (void *stream), (stream))
FORWARD(cuStreamWaitEvent, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags),
        (stream, event, flags))
FORWARD(cuEventCreate, "cuEventCreate", (void **event, unsigned flags), (event, flags))
FORWARD(cuEventDestroy_v2, "cuEventDestroy", (void *event), (event))
FORWARD(cuEventRecord, "cuEventRecord", (void *event, void *stream), (event, stream))
FORWARD(cuGetErrorString, "cuGetErrorString", (int code, const char **text), (code, text))
FORWARD(cuGetErrorName, "cuGetErrorName", (int code, const char **text), (code, text))

static FORWARD(query, "cudaEventQuery", (void *event), (event))

int cuEventQuery(void *event) {
    int code = query(event);
    return code == VGRE_NOT_READY ? NOT_READY : code;
}

int cuEventSynchronize(void *event) {
    int code;
    while ((code = query(event)) == VGRE_NOT_READY) usleep(300);
    return code;
}

// ---- devices and contexts ----

int cuDriverGetVersion(int *version) {
    *version = 12040;
    return 0;
}

int cuDeviceGetPCIBusId(char *name, int size, int device) {
    snprintf(name, static_cast<size_t>(size), "0000:%02x:00.0", device);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static auto get = find<int (*)(int *, int, int)>("cuDeviceGetAttribute");
    constexpr int INTEGRATED = 18, MAJOR = 75, MINOR = 76;
    if (attribute == INTEGRATED) {
        *value = getenv("CPU_DRIVER_INTEGRATED") != nullptr;
        return 0;
    }
    if (attribute == MAJOR || attribute == MINOR) {
        *value = attribute == MAJOR ? 9 : 0;
        return 0;
    }
    return get(value, attribute, device);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    static auto create = find<int (*)(void **, unsigned, int)>("cuCtxCreate");
    retained[device]++;
    return create(context, 0, device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = retained[device] > 0;
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    if (depth == 63) return INVALID_VALUE;
    contexts[++depth] = context;
    return make_current(context);
}

int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return NO_CONTEXT;
    if (context != nullptr) *context = contexts[depth];
    return make_current(contexts[--depth]);
}

int cuCtxGetCurrent(void **context) {
    *context = contexts[depth];
    return 0;
}

int cuCtxGetDevice(int *device) {
    if (contexts[depth] == nullptr) return NO_CONTEXT;
    *device = static_cast<int>(reinterpret_cast<uintptr_t>(contexts[depth])) - 1;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    std::swap(capture_mode, *mode);
    return 0;
}

// ---- modules and launches ----

int cuModuleLoadData(void **module, const void *image) {
    bool is_binary = memcmp(image, "\177ELF", 4) == 0;
    if (is_binary && getenv("CPU_DRIVER_LATE") == nullptr) return NO_BINARY;
    *module = new Module{is_binary ? "" : for_interpreter(static_cast<const char *>(image))};
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    if (static_cast<Module *>(module)->ptx.empty()) return NO_BINARY;
    *function = new Function{static_cast<Module *>(module), name};
    return 0;
}

int cuModuleUnload(void *module) {
    delete static_cast<Module *>(module);
    return 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned /*block_x*/, unsigned, unsigned, unsigned, void *stream,
                   void **parameters, void **) {
    static auto call = find<int (*)(void *, void (*)(void *), void *)>("cudaLaunchHostFunc");
    // The interpreter needs long for many threads. The kernel takes any number.
    auto *launch = new Launch{static_cast<Function *>(function),
                              {int(grid_x), int(grid_y), int(grid_z)},
                              {4, 1, 1},
                              {}};
    memcpy(&launch->values[0], parameters[0], 8);
    memcpy(&launch->values[1], parameters[1], 8);
    launches++;
    return call(stream, run, launch);
}

} // extern "C"
