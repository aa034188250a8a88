// SPDX-License-Identifier: Apache-2.0
/// Log lines of loads. Without a callback a load only checks whether there is one.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "load.h"

/// Longer paths are shortened, so that the rest of a line fits.
#define PATH_BYTES_MAX 400

/// "PATH" or "PATH and 3 more files".
static void name_model(const fst_loader *loader, char *text, size_t size) {
    size_t count = loader->model->file_count;
    const char *path = count > 0 ? fsti_file_path(loader->model->files[0].file) : "a model";
    int used = snprintf(text, size, "%.*s", PATH_BYTES_MAX, path);
    if (count > 1 && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, " and %zu more file%s", count - 1,
                 count == 2 ? "" : "s");
}

/// The scheme and host of a URL, which has no user name, password or query.
static void name_host(const char *url, char *text, size_t size) {
    const char *begin = strstr(url, "://");
    size_t length = begin == NULL ? strlen(url) : (size_t)(begin - url) + 3;
    if (begin != NULL) length += strcspn(begin + 3, "/");
    snprintf(text, size, "%.*s", (int)fsti_min(length, size), url);
}

/// Appends "3 answers cut short, " to a list.
static void add_cause(char *text, size_t size, uint64_t count, const char *cause) {
    size_t used = strlen(text);
    if (count > 0 && used < size)
        snprintf(text + used, size - used, "%s%" PRIu64 " %s", used > 0 ? ", " : "", count, cause);
}

static void log_retries(const char *url, const fsti_retries *retries) {
    static const char *const causes[] = {
        [FSTI_RETRY_REFUSED] = "without a connection",
        [FSTI_RETRY_SILENT] = "after timeouts",
        [FSTI_RETRY_BROKEN] = "after broken connections",
        [FSTI_RETRY_CUT] = "after truncated responses",
    };
    char host[256], text[320] = "", status[48];
    uint64_t total = 0;
    for (unsigned i = 0; i < FSTI_RETRY_CAUSE_COUNT; i++) total += retries->counts[i];
    if (total == 0) return;
    for (unsigned i = 0; i < FSTI_RETRY_STATUS; i++)
        add_cause(text, sizeof text, retries->counts[i], causes[i]);
    snprintf(status, sizeof status, "after status %" PRIu32, retries->status);
    add_cause(text, sizeof text, retries->counts[FSTI_RETRY_STATUS], status);
    name_host(url, host, sizeof host);
    fsti_log(FST_LOG_WARNING,
             "%.*s: %" PRIu64 " request%s to %s retried (%s) after %.3f s of waiting, "
             "summed over requests",
             PATH_BYTES_MAX, url, total, total == 1 ? "" : "s", host, text,
             (double)retries->wait_ns / 1e9);
}

/// Logs one line about retries for all files, which share their host.
static void log_warnings(const fst_loader *loader) {
    const fst_model *model = loader->model;
    fsti_retries retries = {.wait_ns = 0};
    const char *url = NULL;
    for (size_t i = 0; i < model->file_count; i++) {
        uint64_t before = 0, after = 0;
        for (unsigned k = 0; k < FSTI_RETRY_CAUSE_COUNT; k++) before += retries.counts[k];
        fsti_file_take_retries(model->files[i].file, &retries);
        for (unsigned k = 0; k < FSTI_RETRY_CAUSE_COUNT; k++) after += retries.counts[k];
        if (after > before && url == NULL) url = fsti_file_path(model->files[i].file);
        fsti_file_warn_cache(model->files[i].file);
    }
    if (url != NULL) log_retries(url, &retries);
}

/// ", 12 requests (1 of them retries), 4096 bytes from the disk cache"; "" for a local load.
static void describe_requests(const fst_load_stats *stats, char *text, size_t size) {
    text[0] = '\0';
    if (stats->network_requests + stats->disk_cache_bytes == 0) return;
    snprintf(text, size,
             ", %" PRIu64 " requests (%" PRIu64 " of them retries), %" PRIu64
             " bytes from the disk cache",
             stats->network_requests, stats->network_retries, stats->disk_cache_bytes);
}

/// A program may load a model in thousands of parts, so only whole models are logged at INFO.
static fst_log_level level_of(const fst_loader *loader) {
    return loader->plan.item_count < loader->model->tensor_count ? FST_LOG_DEBUG : FST_LOG_INFO;
}

static void log_loaded(fst_loader *loader, const char *name) {
    fst_load_stats stats = {.struct_size = sizeof stats};
    char requests[128];
    if (!fsti_log_wants(level_of(loader))) return;
    if (fsti_loader_stats(loader, &stats, NULL) != FST_OK) return;
    describe_requests(&stats, requests, sizeof requests);
    fsti_log(level_of(loader),
             "loaded %s: %zu tensors, %" PRIu64 " bytes, %.3f s, mode %s, engine %s%s (%s)", name,
             stats.tensor_count, stats.bytes_requested,
             (double)(fsti_now_ns() - loader->begun_ns) / 1e9, stats.mode, stats.engine, requests,
             stats.reason);
}

void fsti_loader_log_begin(const fst_loader *loader) {
    char name[PATH_BYTES_MAX + 64];
    if (!fsti_log_wants(FST_LOG_DEBUG)) return;
    name_model(loader, name, sizeof name);
    fsti_log(FST_LOG_DEBUG, "loading %s: %zu tensors, %" PRIu64 " bytes, %zu chunks, %s (%s)", name,
             loader->plan.item_count, loader->plan.bytes_requested, loader->plan.chunk_count,
             loader->mode == FST_MODE_MAP ? "as views" : "into memory", loader->policy.reason);
}

void fsti_loader_log_end(fst_loader *loader, fst_status status, const fst_error *error) {
    char name[PATH_BYTES_MAX + 64];
    if (status == FST_E_TIMEOUT || !fsti_log_wants(FST_LOG_WARNING)) return;
    if (atomic_exchange(&loader->is_logged, true)) return;
    log_warnings(loader);
    if (!fsti_log_wants(FST_LOG_INFO)) return;
    name_model(loader, name, sizeof name);
    if (status == FST_OK || status == FST_END)
        log_loaded(loader, name);
    else
        fsti_log(FST_LOG_INFO, "%s: the load ended after %.3f s: %s", name,
                 (double)(fsti_now_ns() - loader->begun_ns) / 1e9,
                 error != NULL ? error->message : fst_status_name(status));
}

void fsti_loader_log_close(fst_loader *loader) {
    fst_error error = {.status = FST_OK};
    if (loader->pipeline == NULL || fsti_pipeline_check_owner(loader->pipeline, NULL) != FST_OK)
        return;
    fst_status status = fsti_pipeline_failure(loader->pipeline, &error);
    if (status == FST_OK && !fsti_pipeline_is_done(loader->pipeline))
        status = fsti_error_set(&error, FST_E_CANCELLED, FSTI_NO_LOCATION,
                                "the loader was closed before the end");
    fsti_loader_log_end(loader, status, &error);
}
