// SPDX-License-Identifier: Apache-2.0
/// GPU devices, opened once per process with the process's primary context.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu_private.h"

#define DEVICE_COUNT_MAX 64

/// Attribute numbers of CUDA and HIP. HIP has no attribute that says whether a device maps
/// registered memory at the same address, so the address itself is queried.
enum { CUDA_INTEGRATED = 18, HIP_INTEGRATED = 16 };

static struct {
    pthread_mutex_t lock;
    fsti_device *devices[2][DEVICE_COUNT_MAX];
} opened = {.lock = PTHREAD_MUTEX_INITIALIZER};

static fst_status unsupported(const fsti_gpu_api *api, fst_error *error) {
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION, "%s can't be used: %s",
                          api->kind == FST_DEVICE_CUDA ? "cuda" : "hip", api->reason);
}

/// A driver does not work after fork(): its threads and mappings exist only in the parent.
static fst_status check_fork(const fsti_gpu_api *api, fst_error *error) {
    if (api->owner == getpid()) return FST_OK;
    return fsti_error_set(
        error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
        "the GPU driver was initialised before fork(). Start processes that use it "
        "with spawn");
}

/// The thread's current device, or -1.
static int32_t current_index(const fsti_gpu_api *api) {
    void *context = NULL;
    int device = -1;
    bool has_contexts = api->kind == FST_DEVICE_CUDA;
    if (has_contexts && (api->context_current(&context) != 0 || context == NULL)) return -1;
    return api->context_device(&device) == 0 ? device : -1;
}

/// The first device that the process has a context for, which is a rank's own device even in a new
/// thread. -1: no such device.
static int32_t used_index(const fsti_gpu_api *api) {
    int32_t count = api->visible_count < DEVICE_COUNT_MAX ? api->visible_count : DEVICE_COUNT_MAX;
    for (int32_t i = 0; api->context_state != NULL && i < count; i++) {
        int device, is_active = 0;
        unsigned flags;
        if (api->device_get(&device, i) == 0 &&
            api->context_state(device, &flags, &is_active) == 0 && is_active != 0)
            return i;
    }
    return -1;
}

/// The device for index -1. For pinned memory prefers a device that has a context already.
static int32_t chosen_index(const fsti_gpu_api *api, fst_device_kind kind) {
    int32_t index = current_index(api);
    if (index < 0 && kind == FST_DEVICE_PINNED) index = used_index(api);
    return index < 0 ? 0 : index;
}

static void find_unified(fsti_device *device) {
    int integrated = 0;
    bool is_cuda = device->api->kind == FST_DEVICE_CUDA;
    device->api->device_attribute(&integrated, is_cuda ? CUDA_INTEGRATED : HIP_INTEGRATED,
                                  device->ordinal);
    device->unified = integrated != 0 || strstr(device->name, "GB10") != NULL;
}

static fst_status open_device(const fsti_gpu_api *api, int32_t index, fsti_device **out,
                              fst_error *error) {
    fsti_device *device = fsti_alloc_zeroed(1, sizeof *device);
    if (device == NULL) return fsti_error_memory(error, sizeof *device);
    device->api = api;
    device->index = index;
    pthread_mutex_init(&device->lock, NULL);
    fsti_gpu_calls calls = {.api = api};
    FSTI_GPU_CALL(&calls, device_get, &device->ordinal, index);
    FSTI_GPU_CALL(&calls, device_name, device->name, sizeof device->name, device->ordinal);
    FSTI_GPU_CALL(&calls, context_retain, &device->context, device->ordinal);
    if (api->kind == FST_DEVICE_CUDA) calls.code = fsti_gpu_made(calls.code, device->context);
    if (api->context_id != NULL)
        FSTI_GPU_CALL(&calls, context_id, device->context, &device->context_id);
    if (calls.code != 0) {
        pthread_mutex_destroy(&device->lock);
        fsti_free(device);
        return fsti_gpu_error(&calls, "opening the device", error);
    }
    device->name[sizeof device->name - 1] = '\0';
    fsti_text_make_printable(device->name);
    find_unified(device);
    *out = device;
    return FST_OK;
}

/// The driver of a kind. For pinned memory any that can be used, or else one that is there.
static const fsti_gpu_api *driver_of(fst_device_kind kind) {
    if (kind == FST_DEVICE_HIP) return fsti_gpu_driver(FST_DEVICE_HIP);
    const fsti_gpu_api *cuda = fsti_gpu_driver(FST_DEVICE_CUDA);
    if (kind == FST_DEVICE_CUDA || cuda->status == FST_OK) return cuda;
    const fsti_gpu_api *hip = fsti_gpu_driver(FST_DEVICE_HIP);
    return hip->status == FST_OK || (cuda->handle == NULL && hip->handle != NULL) ? hip : cuda;
}

fst_status fsti_device_get(fst_device wanted, fsti_device **out, fst_error *error) {
    *out = NULL;
    if (wanted.kind == FST_DEVICE_CPU) return FST_OK;
    const fsti_gpu_api *api = driver_of(wanted.kind);
    if (api->status != FST_OK) return unsupported(api, error);
    FST_TRY(check_fork(api, error));
    int before = fsti_gpu_errors_begin(api);
    int32_t index = wanted.index == -1 ? chosen_index(api, wanted.kind) : wanted.index;
    fsti_gpu_errors_end(api, before);
    if (index < 0 || index >= api->visible_count || index >= DEVICE_COUNT_MAX)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "device %s:%d does not exist (%d %s visible)",
                              api->kind == FST_DEVICE_CUDA ? "cuda" : "hip", (int)index,
                              api->visible_count, api->visible_count == 1 ? "is" : "are");
    fst_status status = FST_OK;
    pthread_mutex_lock(&opened.lock);
    fsti_device **entry = &opened.devices[api->kind == FST_DEVICE_CUDA ? 0 : 1][index];
    if (*entry == NULL) status = open_device(api, index, entry, error);
    *out = *entry;
    pthread_mutex_unlock(&opened.lock);
    fsti_gpu_errors_end(api, before);
    return status;
}

int32_t fsti_device_count(fst_device_kind kind) {
    if (kind == FST_DEVICE_CPU) return 1;
    const fsti_gpu_api *api = driver_of(kind);
    if (api->status != FST_OK || api->owner != getpid()) return 0;
    return kind == FST_DEVICE_PINNED ? 1 : api->visible_count;
}

fst_device fsti_device_id(const fsti_device *device) {
    if (device == NULL) return (fst_device){FST_DEVICE_CPU, 0};
    return (fst_device){device->api->kind, device->index};
}

bool fsti_device_unified(const fsti_device *device) { return device != NULL && device->unified; }

/// The state of a thread before it entered a device. The entries of a thread form a stack.
typedef struct device_entry {
    int hip_device, capture_mode, last_error;
} device_entry;
#define ENTRY_COUNT_MAX 8
static _Thread_local device_entry entries[ENTRY_COUNT_MAX];
static _Thread_local uint32_t entry_count;

/// CUDA has a stack of contexts. HIP's functions of the same name do not restore the device when a
/// context is popped (clr's hip_context.cpp), so the current device is saved and restored.
static void select_device(const fsti_device *device, device_entry *before, fsti_gpu_calls *calls) {
    if (calls->api->kind == FST_DEVICE_CUDA) {
        FSTI_GPU_CALL(calls, context_push, device->context);
        return;
    }
    FSTI_GPU_CALL(calls, context_device, &before->hip_device);
    FSTI_GPU_CALL(calls, device_select, device->ordinal);
}

/// A program may reset the primary context (cudaDeviceReset). NVIDIA's driver then crashes when it
/// gets the old context, or anything that was made in it.
static fst_status check_context(const fsti_device *device, fst_error *error) {
    const fsti_gpu_api *api = device->api;
    unsigned flags;
    int is_active = 1;
    unsigned long long id = device->context_id;
    // A driver that does not answer does not say that there was a reset.
    if (api->context_state != NULL && api->context_state(device->ordinal, &flags, &is_active) != 0)
        is_active = 1;
    if (is_active != 0 && api->context_id != NULL && api->context_id(device->context, &id) != 0)
        id = device->context_id;
    if (is_active != 0 && id == device->context_id) return FST_OK;
    return fsti_error_set(error, FST_E_DEVICE, FSTI_NO_LOCATION,
                          "the primary context of cuda:%d was reset (cudaDeviceReset): this "
                          "process cannot load to the device any more",
                          (int)device->index);
}

fst_status fsti_device_enter(const fsti_device *device, fst_error *error) {
    const fsti_gpu_api *api = device->api;
    FST_TRY(check_fork(api, error));
    FST_TRY(check_context(device, error));
    assert(entry_count < ENTRY_COUNT_MAX);
    device_entry *before = &entries[entry_count];
    before->last_error = fsti_gpu_errors_begin(api);
    fsti_gpu_calls calls = {.api = api};
    select_device(device, before, &calls);
    if (calls.code != 0) {
        fsti_gpu_errors_end(api, before->last_error);
        return fsti_gpu_error(&calls, "using the device", error);
    }
    // The program may be capturing a graph. Allocations, waits and event queries from a thread in
    // the default mode would invalidate that capture.
    before->capture_mode = GPU_CAPTURE_RELAXED;
    if (api->capture_exchange != NULL) api->capture_exchange(&before->capture_mode);
    entry_count++;
    return FST_OK;
}

bool fsti_device_enter_again(const fsti_device *device) {
    bool entered = false;
    for (int tries = 0; tries < 2 && !entered; tries++)
        entered = fsti_device_enter(device, NULL) == FST_OK;
    return entered;
}

void fsti_device_leave(const fsti_device *device) {
    const fsti_gpu_api *api = device->api;
    device_entry *before = &entries[--entry_count];
    void *context;
    if (api->capture_exchange != NULL) api->capture_exchange(&before->capture_mode);
    if (api->kind == FST_DEVICE_CUDA)
        api->context_pop(&context);
    else
        api->device_select(before->hip_device);
    fsti_gpu_errors_end(api, before->last_error);
}

fst_status fsti_device_info(fst_device wanted, fst_device_info *out, fst_error *error) {
    fsti_device *device;
    FST_TRY(fsti_device_get(wanted, &device, error));
    if (device == NULL) {
        snprintf(out->name, sizeof out->name, "CPU");
        out->converts = 1;
        return FST_OK;
    }
    FST_TRY(fsti_device_enter(device, error));
    size_t available = 0, all = 0;
    fsti_gpu_calls calls = {.api = device->api};
    FSTI_GPU_CALL(&calls, memory_info, &available, &all);
    out->index = device->index;
    snprintf(out->name, sizeof out->name, "%s", device->name);
    out->driver_version = device->api->version;
    out->unified = device->unified;
    out->memory_bytes = all;
    out->memory_free = fsti_min(available, all); // some drivers report more than all
    out->converts = fsti_gpu_kernels(device, NULL) == FST_OK;
    if (!out->converts)
        snprintf(out->converts_reason, sizeof out->converts_reason, "%s", device->kernels_reason);
    fsti_text_make_printable(out->converts_reason);
    fsti_device_leave(device);
    return fsti_gpu_error(&calls, "querying the memory", error);
}

// ---- names of devices ----

typedef struct device_word {
    const char *word;
    fst_device_kind kind;
    bool may_have_index;
} device_word;

static bool parse_index(const char *text, int32_t *index) {
    char *end;
    if (*text < '0' || *text > '9') return false;
    errno = 0;
    long value = strtol(text, &end, 10);
    *index = (int32_t)value;
    return errno == 0 && *end == '\0' && value < 32768;
}

fst_status fsti_device_parse(const char *text, fst_device *out, fst_error *error) {
    static const device_word words[] = {{"cpu", FST_DEVICE_CPU, true},
                                        {"cuda", FST_DEVICE_CUDA, true},
                                        {"hip", FST_DEVICE_HIP, true},
                                        {"gpu", FST_DEVICE_KIND_COUNT, true},
                                        {"pinned", FST_DEVICE_PINNED, false}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t size = strlen(words[i].word);
        if (strncmp(text, words[i].word, size) != 0) continue;
        const char *rest = text + size;
        fst_device device = {words[i].kind, words[i].kind == FST_DEVICE_CPU ? 0 : -1};
        if (*rest == ':' && words[i].may_have_index && parse_index(rest + 1, &device.index))
            rest = "";
        if (*rest != '\0' || (device.kind == FST_DEVICE_CPU && device.index != 0)) continue;
        if (device.kind == FST_DEVICE_KIND_COUNT) device.kind = driver_of(FST_DEVICE_PINNED)->kind;
        *out = device;
        return FST_OK;
    }
    return fsti_error_set(
        error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
        "unknown device \"%.40s\"; expected one of: cpu, cuda, cuda:N, hip, hip:N, gpu, pinned",
        text);
}
