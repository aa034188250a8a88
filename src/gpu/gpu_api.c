// SPDX-License-Identifier: Apache-2.0
/// Loads the GPU drivers on first use, if they are installed.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpu_private.h"

/// CUDA 11.2 is the oldest driver that has all these functions and that frameworks still support.
#define CUDA_VERSION_MIN 11020
/// A driver that reports more devices is wrong.
#define POSSIBLE_COUNT_MAX 1024
/// A driver that has not started after this time hangs. Starting takes long with many devices, and
/// if no other process keeps them initialised, so the limit is generous.
#define DRIVER_START_MS 60000u

typedef struct gpu_symbol {
    const char *cuda, *hip;
    size_t offset; ///< offset of the field in the table
} gpu_symbol;

static const gpu_symbol symbols[] = {
#define GPU_SYMBOL(field, parameters, cuda, hip) {cuda, hip, offsetof(fsti_gpu_api, field)},
    FSTI_GPU_FUNCTIONS(GPU_SYMBOL)
#undef GPU_SYMBOL
};

void *fsti_gpu_open_library(const char *const *names) {
    for (int flags = RTLD_NOLOAD; flags >= 0; flags = flags == RTLD_NOLOAD ? 0 : -1)
        for (size_t i = 0; names[i] != NULL; i++) {
            void *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | flags);
            if (handle != NULL) return handle;
        }
    return NULL;
}

/// Error texts, graph captures, bus names and numbers of contexts are optional, because older
/// drivers lack them.
static bool is_optional(size_t offset) {
    return offset == offsetof(fsti_gpu_api, error_string) ||
           offset == offsetof(fsti_gpu_api, device_bus) ||
           offset == offsetof(fsti_gpu_api, context_id) ||
           offset == offsetof(fsti_gpu_api, capture_exchange);
}

static bool find_symbols(fsti_gpu_api *api) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        const char *name = api->kind == FST_DEVICE_CUDA ? symbols[i].cuda : symbols[i].hip;
        if (name == NULL) continue;
        void *address = dlsym(api->handle, name);
        if (address == NULL && !is_optional(symbols[i].offset)) {
            snprintf(api->reason, sizeof api->reason, "%s lacks %s: the driver is too old",
                     api->library, name);
            return false;
        }
        memcpy((char *)api + symbols[i].offset, &address, sizeof address);
    }
    void *text = api->kind == FST_DEVICE_HIP ? dlsym(api->handle, "hipGetErrorString") : NULL;
    memcpy(&api->error_text, &text, sizeof text);
    return true;
}

/// The driver's text for an error code. hipDrvGetErrorString was added in HIP 6; hipGetErrorString
/// is in all versions, and answers codes that it does not know with a text as well.
static const char *words_of(const fsti_gpu_api *api, int code) {
    const char *text = NULL;
    if (code == GPU_NO_RESULT) return "the driver reported success and returned nothing";
    if (code == GPU_MISALIGNED) return "the driver returned an address that is not aligned";
    if (api->error_string != NULL && api->error_string(code, &text) != 0) text = NULL;
    if (text == NULL && api->error_text != NULL) text = api->error_text(code);
    return text == NULL || text[0] == '\0' ? "the driver has no text for this error" : text;
}

/// What the user can do about a driver without devices.
static const char *no_device_hint(fst_device_kind kind) {
    bool is_cuda = kind == FST_DEVICE_CUDA;
    if (!is_cuda && access("/dev/kfd", F_OK) != 0) return "/dev/kfd does not exist here";
    if (!is_cuda && access("/dev/kfd", R_OK | W_OK) != 0)
        return "this user may not open /dev/kfd: see the groups render and video";
    return is_cuda ? "CUDA_VISIBLE_DEVICES may hide them, if nvidia-smi lists any"
                   : "HIP_VISIBLE_DEVICES may hide them, if rocminfo lists any";
}

/// The driver's name of a function.
static const char *name_of(const fsti_gpu_api *api, size_t function) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        if (symbols[i].offset == function)
            return api->kind == FST_DEVICE_CUDA ? symbols[i].cuda : symbols[i].hip;
    return "";
}

static void call_start(fsti_gpu_api *api, fsti_gpu_calls *calls) {
    FSTI_GPU_CALL(calls, init, 0);
    // Without a device, hipInit answers "invalid device", which hipGetDeviceCount corrects.
    if (api->kind == FST_DEVICE_HIP && calls->code == GPU_INVALID_DEVICE &&
        api->device_count(&api->visible_count) == GPU_NO_DEVICE)
        calls->code = GPU_NO_DEVICE;
    FSTI_GPU_CALL(calls, driver_version, &api->version);
    FSTI_GPU_CALL(calls, device_count, &api->visible_count);
}

static bool start_driver(fsti_gpu_api *api) {
    fsti_gpu_calls calls = {.api = api};
    api->visible_count = -1; // in case the driver does not set it
    call_start(api, &calls);
    int code = calls.code;
    if (code == 0 && api->kind == FST_DEVICE_CUDA && api->version < CUDA_VERSION_MIN) {
        snprintf(api->reason, sizeof api->reason, "the driver is too old: CUDA %d.%d, %d.%d needed",
                 api->version / 1000, api->version % 1000 / 10, CUDA_VERSION_MIN / 1000,
                 CUDA_VERSION_MIN % 1000 / 10);
        return false;
    }
    if (code == 0 && (api->visible_count < 0 || api->visible_count > POSSIBLE_COUNT_MAX)) {
        snprintf(api->reason, sizeof api->reason, "the driver reports %d devices",
                 api->visible_count);
        return false;
    }
    if (code == GPU_NO_DEVICE || (code == 0 && api->visible_count == 0)) {
        snprintf(api->reason, sizeof api->reason, "the driver sees no device (%s)",
                 no_device_hint(api->kind));
        return false;
    }
    if (code != 0)
        snprintf(api->reason, sizeof api->reason,
                 "the driver could not be started: %s failed: %.120s (error %d)",
                 name_of(api, calls.function), words_of(api, code), code);
    return code == 0;
}

int fsti_gpu_errors_begin(const fsti_gpu_api *api) {
    return api->error_peek == NULL ? 0 : api->error_peek();
}

void fsti_gpu_errors_end(const fsti_gpu_api *api, int before) {
    if (before == 0 && api->error_peek != NULL && api->error_peek() != 0) (void)api->error_take();
}

/// A driver, and the state of its start.
typedef struct driver {
    fsti_gpu_api api;
    bool is_loaded; ///< its library is there and has all functions
    fsti_library_start start;
    fsti_gpu_api late; ///< stands for `api` while the driver has not started in time
} driver;
static driver drivers[2];
static atomic_uint start_limit_ms = DRIVER_START_MS;

void fsti_gpu_limit_start(uint32_t limit_ms) {
    atomic_store(&start_limit_ms, limit_ms == 0 ? DRIVER_START_MS : limit_ms);
}

/// On a separate thread, so that HIP's last error of the program's threads is unchanged.
static void run_start(void *context) {
    driver *one = context;
    if (start_driver(&one->api)) one->api.status = FST_OK;
}

/// Why the library was not opened: it is not there, or the loader's own words.
static void explain_missing(fsti_gpu_api *api, const char *const *names) {
    for (size_t i = 0; names[i] != NULL; i++) {
        void *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        const char *words = handle == NULL ? dlerror() : NULL;
        if (handle != NULL) dlclose(handle);
        size_t size = strlen(names[i]);
        bool is_absent =
            words == NULL || (strstr(words, "No such file") != NULL &&
                              strncmp(words, names[i], size) == 0 && words[size] == ':');
        if (is_absent) continue;
        snprintf(api->reason, sizeof api->reason, "the driver can't be loaded: %.200s", words);
        fsti_text_make_printable(api->reason);
        return;
    }
    snprintf(api->reason, sizeof api->reason, "no driver: %s was not found", api->library);
}

static void load_driver(driver *one, fst_device_kind kind) {
    static const char *const cuda[] = {"libcuda.so.1", NULL};
    static const char *const hip[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                      "libamdhip64.so", NULL};
    bool is_cuda = kind == FST_DEVICE_CUDA;
    fsti_gpu_api *api = &one->api;
    api->kind = kind;
    api->library = is_cuda ? "libcuda.so.1" : "libamdhip64.so";
    api->status = FST_E_UNSUPPORTED;
    api->owner = getpid();
    one->late = *api;
    snprintf(one->late.reason, sizeof one->late.reason,
             "the driver could not be started: %s has not returned in time. The driver or the "
             "device hangs: see dmesg, and whether %s works",
             is_cuda ? "cuInit or cuDeviceGetCount" : "hipInit or hipGetDeviceCount",
             is_cuda ? "nvidia-smi" : "rocminfo");
    one->start = (fsti_library_start){.run = run_start, .context = one};
    api->handle = fsti_gpu_open_library(is_cuda ? cuda : hip);
    if (api->handle == NULL)
        explain_missing(api, is_cuda ? cuda : hip);
    else
        one->is_loaded = find_symbols(api);
}

static void load_cuda(void) { load_driver(&drivers[0], FST_DEVICE_CUDA); }
static void load_hip(void) { load_driver(&drivers[1], FST_DEVICE_HIP); }

const fsti_gpu_api *fsti_gpu_driver(fst_device_kind kind) {
    static atomic_bool tried_cuda, tried_hip;
    bool is_cuda = kind == FST_DEVICE_CUDA;
    driver *one = &drivers[is_cuda ? 0 : 1];
    fsti_library_once(is_cuda ? &tried_cuda : &tried_hip, is_cuda ? load_cuda : load_hip);
    if (!one->is_loaded) return &one->api;
    bool is_started = fsti_library_start_within(&one->start, atomic_load(&start_limit_ms));
    return is_started ? &one->api : &one->late;
}

fst_status fsti_gpu_error(const fsti_gpu_calls *calls, const char *what, fst_error *error) {
    const fsti_gpu_api *api = calls->api;
    if (calls->code == 0) return FST_OK;
    fst_status status = calls->code == GPU_OUT_OF_MEMORY ? FST_E_NO_MEMORY : FST_E_DEVICE;
    fsti_error_set(error, status, FSTI_NO_LOCATION, "%s failed: %s (%s: %s error %d)", what,
                   words_of(api, calls->code), name_of(api, calls->function),
                   api->kind == FST_DEVICE_CUDA ? "CUDA" : "HIP", calls->code);
    if (error != NULL) error->device_code = calls->code;
    return status;
}
