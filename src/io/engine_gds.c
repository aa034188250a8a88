// SPDX-License-Identifier: Apache-2.0
/// GPUDirect Storage: from storage straight to memory of a GPU, by NVIDIA's cuFile or AMD's
/// hipFile, whose interfaces agree. Both have a mode in which they read with the processors and
/// copy, which is slower than our own pipeline: a probe on the file finds out. Types as in
/// cufile.h 1.14 (the package nvidia-cufile) and hipfile.h.
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "io_private.h"

#define HANDLE_TYPE_FD 1 // CU_FILE_HANDLE_TYPE_OPAQUE_FD
#define PROBE_ATTEMPTS 3

typedef struct gds_error {
    int error, driver_error;
} gds_error;

typedef struct gds_descriptor {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} gds_descriptor;

/// A library, loaded once.
struct fsti_gds_api {
    const char *library;
    gds_error (*driver_open)(void);
    gds_error (*handle_register)(void **handle, gds_descriptor *descriptor);
    void (*handle_deregister)(void *handle);
    ssize_t (*read)(void *handle, void *base, size_t size, off_t file_offset, off_t base_offset);
    bool usable;
    char reason[128];
    pid_t owner;
};

static void load_library(fsti_gds_api *api, bool is_hip) {
    static const char *const names[2][4] = {
        {"cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister", "cuFileRead"},
        {"hipFileDriverOpen", "hipFileHandleRegister", "hipFileHandleDeregister", "hipFileRead"}};
    api->library = is_hip ? "libhipfile.so" : "libcufile.so.0";
    api->owner = getpid();
    void *handle = dlopen(api->library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL && is_hip) handle = dlopen("libhipfile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(api->reason, sizeof api->reason, "%s was not found", api->library);
        return;
    }
    void *found[4];
    for (size_t i = 0; i < 4; i++) {
        found[i] = dlsym(handle, names[is_hip][i]);
        if (found[i] != NULL) continue;
        snprintf(api->reason, sizeof api->reason, "%s lacks %s", api->library, names[is_hip][i]);
        return;
    }
    memcpy(&api->driver_open, &found[0], sizeof found[0]);
    memcpy(&api->handle_register, &found[1], sizeof found[1]);
    memcpy(&api->handle_deregister, &found[2], sizeof found[2]);
    memcpy(&api->read, &found[3], sizeof found[3]);
    gds_error result = api->driver_open();
    api->usable = result.error == 0;
    if (!api->usable)
        snprintf(api->reason, sizeof api->reason, "%s does not start (error %d)", api->library,
                 result.error);
}

static fsti_gds_api libraries[2];
static void load_cufile(void) { load_library(&libraries[0], false); }
static void load_hipfile(void) { load_library(&libraries[1], true); }

static const fsti_gds_api *get_library(bool is_hip) {
    static pthread_once_t cufile_once = PTHREAD_ONCE_INIT, hipfile_once = PTHREAD_ONCE_INIT;
    pthread_once(is_hip ? &hipfile_once : &cufile_once, is_hip ? load_hipfile : load_cufile);
    return &libraries[is_hip];
}

/// The file's handle, made on first use and closed with the file.
static bool register_file(fsti_file *file, const fsti_gds_api *api, char *reason, size_t size) {
    int fd = fsti_io_file_direct(file, reason, size);
    if (fd < 0) return false;
    gds_descriptor descriptor = {.type = HANDLE_TYPE_FD, .handle = {.fd = fd}};
    gds_error result = {0, 0};
    pthread_mutex_lock(&file->lock);
    bool is_other = file->gds_api != NULL && file->gds_api != api;
    if (file->gds_api == NULL) result = api->handle_register(&file->gds_handle, &descriptor);
    if (result.error == 0 && !is_other) file->gds_api = api;
    pthread_mutex_unlock(&file->lock);
    if (is_other) snprintf(reason, size, "the file is registered with another library");
    if (result.error != 0)
        snprintf(reason, size, "%s refuses the file or its file system (error %d)", api->library,
                 result.error);
    return result.error == 0 && !is_other;
}

void fsti_gds_forget(fsti_file *file) {
    if (file->gds_api != NULL && file->gds_api->owner == getpid())
        file->gds_api->handle_deregister(file->gds_handle);
    file->gds_api = NULL;
}

/// Bytes that read calls of this process have returned; UINT64_MAX where the system does not say.
static uint64_t bytes_by_calls(void) {
    uint64_t bytes;
    return fsti_proc_number("/proc/self/io", "rchar:", &bytes) ? bytes : UINT64_MAX;
}

bool fsti_gds_usable(bool is_hip, char *reason, size_t reason_size) {
    const fsti_gds_api *api = get_library(is_hip);
    bool forked = api->usable && api->owner != getpid();
    snprintf(reason, reason_size, "%s",
             forked         ? "started before fork()"
             : !api->usable ? api->reason
                            : "depends on the file");
    return api->usable && !forked;
}

bool fsti_gds_probe(fsti_file *file, bool is_hip, void *scratch, char *reason, size_t reason_size) {
    const fsti_gds_api *api = get_library(is_hip);
    if (!fsti_gds_usable(is_hip, reason, reason_size)) return false;
    if (!register_file(file, api, reason, reason_size)) return false;
    size_t size = (size_t)fsti_align_down(fsti_min(file->size_bytes, FSTI_GDS_PROBE_BYTES),
                                          FSTI_IO_PAGE_BYTES);
    if (size == 0) {
        snprintf(reason, reason_size, "the file is smaller than a page");
        return false;
    }
    // Others may read meanwhile: one quiet attempt is enough.
    for (int attempt = 0; attempt < PROBE_ATTEMPTS; attempt++) {
        uint64_t before = bytes_by_calls();
        ssize_t got = api->read(file->gds_handle, scratch, size, 0, 0);
        uint64_t after = bytes_by_calls();
        if (got != (ssize_t)size) {
            snprintf(reason, reason_size, "a read of the file failed (%zd)", got);
            return false;
        }
        if (before == UINT64_MAX || after - before >= size) continue;
        snprintf(reason, reason_size, "a read of the file went straight to the device");
        return true;
    }
    snprintf(reason, reason_size,
             "a read of the file went through the processors (compatibility "
             "mode: is nvidia-fs loaded?)");
    return false;
}

static void submit_gds(void *lane, fsti_io_op *op) {
    fsti_file *file = op->file;
    ssize_t result =
        file->gds_api->read(file->gds_handle, op->buffer, op->size, (off_t)op->offset, 0);
    // -1 with errno for the system's errors, else the library's own numbers.
    int64_t code = result >= 0 ? result : result == -1 && errno != 0 ? -errno : -EIO;
    fsti_io_sync_finish(lane, op, code, op->buffer);
}

static bool gds_usable(fsti_file *file, char *reason, size_t reason_size) {
    (void)file;
    return fsti_gds_usable(false, reason, reason_size);
}

const fsti_io_engine fsti_io_engine_gds = {
    .name = "gds",
    .number = FST_ENGINE_GDS,
    .is_direct = true,
    .is_remote = true,
    .usable = gds_usable,
    .lane_open = fsti_io_sync_lane_open,
    .lane_close = fsti_io_sync_lane_close,
    .submit = submit_gds,
    .reap = fsti_io_sync_reap,
};
