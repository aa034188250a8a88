// SPDX-License-Identifier: Apache-2.0
/// GPUDirect Storage: reads directly into GPU memory, by NVIDIA's cuFile or AMD's hipFile. Both can
/// silently fall back to CPU reads plus a copy, which is slower than the library's own pipeline, so
/// a probe on the file finds out.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "gds_library.h"

/// If this many probes in a row see read calls return exactly the bytes read, the library reads
/// with the CPU.
#define PROBE_REFUSALS 3
/// Other threads' read calls disturb the count, so a probe is repeated; one undisturbed probe is
/// enough.
#define PROBE_ATTEMPTS 12
/// Upper bound for the bytes that reading the counter itself adds.
#define PROBE_NOISE_BYTES ((uint64_t)8192)

/// cuFile is installed with every torch and also initialises without the module: it starts threads,
/// writes a log to the current folder, takes a good part of a second, and then reads with the CPU.
bool fsti_gds_usable(bool is_hip, bool is_demanded, char *reason, size_t reason_size) {
    if (!is_demanded && !fsti_gds_has_module(is_hip)) {
        snprintf(reason, reason_size, "nvidia-fs is not loaded");
        return false;
    }
    const fsti_gds_api *api = fsti_gds_library(is_hip, reason, reason_size);
    if (api == NULL) return false;
    bool is_forked = api->owner != getpid();
    snprintf(reason, reason_size, "%s",
             is_forked ? "started before fork()" : "depends on the file");
    return !is_forked;
}

/// Registers the file on first use. It is unregistered when the file is closed.
static bool register_file(fsti_file *file, const fsti_gds_api *api, char *reason, size_t size) {
    int fd = fsti_io_file_direct(file, reason, size);
    if (fd < 0) return false;
    fsti_gds_descriptor descriptor = {.type = FSTI_GDS_HANDLE_FD, .handle = {.fd = fd}};
    fsti_gds_error result = {0, 0};
    pthread_mutex_lock(&file->lock);
    bool has_other_library = file->gds_api != NULL && file->gds_api != api;
    if (file->gds_api == NULL) result = api->handle_register(&file->gds_handle, &descriptor);
    if (result.error == 0 && !has_other_library) file->gds_api = api;
    pthread_mutex_unlock(&file->lock);
    if (has_other_library)
        snprintf(reason, size, "the file is registered with a different library");
    if (result.error != 0)
        snprintf(reason, size, "%s rejects the file or its file system (error %d)%s", api->library,
                 result.error, fsti_gds_container_hint(api));
    return result.error == 0 && !has_other_library;
}

void fsti_gds_unregister(fsti_file *file) {
    if (file->gds_api != NULL && file->gds_api->owner == getpid())
        file->gds_api->handle_deregister(file->gds_handle);
    file->gds_api = NULL;
}

/// Bytes returned by read calls of this process (/proc/self/io); UINT64_MAX: unknown.
static uint64_t bytes_by_calls(void) {
    uint64_t bytes;
    return fsti_proc_number("/proc/self/io", "rchar:", &bytes) ? bytes : UINT64_MAX;
}

// ---- verdicts, one per library and file system ----

#define VERDICT_COUNT_MAX 16

typedef struct gds_verdict {
    uint64_t device; ///< of the file system
    bool is_hip, is_good;
    char reason[192];
} gds_verdict;

static struct {
    pthread_mutex_t lock;
    gds_verdict rows[VERDICT_COUNT_MAX];
    size_t count;
} verdicts = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t verdicts_once = PTHREAD_ONCE_INIT;
static void register_verdicts(void) { fsti_fork_lock(&verdicts.lock); }

void fsti_gds_clear_verdicts(void) {
    pthread_mutex_lock(&verdicts.lock);
    verdicts.count = 0;
    pthread_mutex_unlock(&verdicts.lock);
}

static bool find_known(uint64_t device, bool is_hip, gds_verdict *out) {
    bool found = false;
    pthread_once(&verdicts_once, register_verdicts);
    pthread_mutex_lock(&verdicts.lock);
    for (size_t i = 0; i < verdicts.count && !found; i++) {
        found = verdicts.rows[i].device == device && verdicts.rows[i].is_hip == is_hip;
        if (found) *out = verdicts.rows[i];
    }
    pthread_mutex_unlock(&verdicts.lock);
    return found;
}

static void remember(const gds_verdict *verdict) {
    pthread_mutex_lock(&verdicts.lock);
    if (verdicts.count < VERDICT_COUNT_MAX) verdicts.rows[verdicts.count++] = *verdict;
    pthread_mutex_unlock(&verdicts.lock);
}

/// Reads by GPUDirect and compares with the bytes that read calls returned meanwhile. A library
/// that falls back to the CPU reads the file with a call, which adds `size` to the process's
/// counter; a direct read adds nothing. False if other threads read so much that the result is
/// unclear.
static bool try_read(fsti_file *file, const fsti_gds_api *api, void *target, uint64_t size,
                     gds_verdict *verdict) {
    int refusals = 0;
    for (int attempt = 0;
         attempt < PROBE_ATTEMPTS && refusals < PROBE_REFUSALS && !verdict->is_good; attempt++) {
        uint64_t before = bytes_by_calls();
        ssize_t got = api->read(file->gds_handle, target, (size_t)size, 0, 0);
        uint64_t after = bytes_by_calls();
        if (got != (ssize_t)size) {
            snprintf(verdict->reason, sizeof verdict->reason, "a read of the file failed (%zd)",
                     got);
            return true;
        }
        bool has_counter = before != UINT64_MAX;
        verdict->is_good = has_counter && after - before < size;
        bool is_refusal = !has_counter || after - before < size + PROBE_NOISE_BYTES;
        refusals = is_refusal ? refusals + 1 : 0;
    }
    bool is_refused = refusals == PROBE_REFUSALS;
    snprintf(verdict->reason, sizeof verdict->reason, "%s",
             verdict->is_good ? "a read of the file went directly to the device"
             : is_refused     ? "a read of the file went through the CPU (compatibility "
                                "mode: is nvidia-fs loaded?)"
                              : "not tried: reads of other threads prevent measuring this read");
    return verdict->is_good || is_refused;
}

bool fsti_gds_find_verdict(fsti_file *file, bool is_hip, bool *is_good, char *reason,
                           size_t reason_size) {
    gds_verdict verdict;
    *is_good = false;
    if (!find_known(file->device, is_hip, &verdict)) return false;
    char refusal[sizeof verdict.reason];
    const fsti_gds_api *api =
        verdict.is_good ? fsti_gds_library(is_hip, refusal, sizeof refusal) : NULL;
    *is_good = api != NULL && register_file(file, api, refusal, sizeof refusal);
    snprintf(reason, reason_size, "%s", verdict.is_good && !*is_good ? refusal : verdict.reason);
    return true;
}

bool fsti_gds_probe(fsti_file *file, bool is_hip, void *target, char *reason, size_t reason_size) {
    const fsti_gds_api *api = fsti_gds_library(is_hip, reason, reason_size);
    if (api == NULL) return false;
    gds_verdict verdict = {.device = file->device, .is_hip = is_hip};
    uint64_t size =
        fsti_align_down(fsti_min(file->size_bytes, FSTI_GDS_PROBE_BYTES), FSTI_IO_PAGE_BYTES);
    if (size == 0) {
        snprintf(reason, reason_size, "the file is smaller than a page");
        return false;
    }
    bool is_conclusive = true;
    if (register_file(file, api, verdict.reason, sizeof verdict.reason))
        is_conclusive = try_read(file, api, target, size, &verdict);
    snprintf(reason, reason_size, "%s", verdict.reason);
    if (is_conclusive) remember(&verdict);
    return verdict.is_good;
}

static void submit_gds(void *lane, fsti_io_op *op) {
    fsti_file *file = op->file;
    ssize_t result =
        file->gds_api->read(file->gds_handle, op->buffer, op->size, (off_t)op->offset, 0);
    // -1 with errno is a system error; other negative values are error codes of the library.
    int64_t code = result >= 0 ? result : result == -1 && errno != 0 ? -errno : -EIO;
    fsti_io_sync_finish(lane, op, code, op->buffer);
}

static bool gds_usable(fsti_file *file, char *reason, size_t reason_size) {
    (void)file;
    return fsti_gds_usable(false, false, reason, reason_size);
}

const fsti_io_engine fsti_io_engine_gds = {
    .name = "gds",
    .number = (fst_engine)FSTI_ENGINE_GDS,
    .is_direct = true,
    .reads_to_device = true,
    .usable = gds_usable,
    .lane_open = fsti_io_sync_lane_open,
    .lane_close = fsti_io_sync_lane_close,
    .submit = submit_gds,
    .reap = fsti_io_sync_reap,
};
