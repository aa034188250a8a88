// SPDX-License-Identifier: Apache-2.0
/// A folder held against a manifest: all of it is read, and everything that differs is told.
#include <string.h>

#include "folder_files.h"
#include "format/format.h"
#include "model/model.h"
#include "file_tree.h"
#include "scan.h"
#include "sums_files.h"
#include "verify.h"

typedef struct check_job {
    model_verification *verification;
    const fsti_check_listener *listener;
    work_progress progress;
    size_t first_file; ///< of those that are open
    scan_file scans[FSTI_SCAN_FILES_MAX];
    pthread_mutex_t lock; ///< for what follows
    uint64_t difference_count;
    fst_error first;
} check_job;

/// Tells of a difference; the first is what the check returns.
static void tell(check_job *job, const fst_error *difference) {
    pthread_mutex_lock(&job->lock);
    if (job->difference_count++ == 0) job->first = *difference;
    if (job->listener->callback != NULL)
        job->listener->callback(job->listener->context, difference);
    pthread_mutex_unlock(&job->lock);
}

static fst_status check_chunk(fsti_scan *scan, size_t file_index, uint64_t begin, const char *bytes,
                              size_t size_bytes, fst_error *error) {
    check_job *job = scan->context;
    const fsti_manifest *manifest = &job->verification->manifest;
    const fsti_manifest_file *listed = &manifest->files[job->first_file + file_index];
    fsti_digest_list list = {.kind = manifest->kind,
                             .digests = listed->digests,
                             .file_bytes = listed->size_bytes,
                             .chunk_bytes = manifest->chunk_bytes};
    fsti_error_place place = {.file = fsti_file_path(scan->files[file_index].file)};
    (void)error;
    if (fsti_digest_list_holds(&list, begin, bytes, size_bytes, &place.byte_offset)) return FST_OK;
    fst_error difference;
    fsti_error_set(&difference, FST_E_DIGEST, place, "chunk %llu of the file differs",
                   (unsigned long long)(begin / manifest->chunk_bytes));
    tell(job, &difference);
    return FST_OK;
}

/// Opens a listed file; one that is not there, or has another size, is told and not read.
static fst_status open_listed(check_job *job, const char *path, const fsti_manifest_file *listed,
                              fsti_file **out, fst_error *error) {
    fst_error difference;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    *out = NULL;
    if (fsti_file_open(path, out, &difference) != FST_OK) {
        *out = NULL;
        if (fsti_verify_is_shortage(&difference)) {
            if (error != NULL) *error = difference;
            return difference.status;
        }
        tell(job, &difference);
    } else if (fsti_file_size(*out) != listed->size_bytes) {
        fsti_error_set(
            &difference, FST_E_DIGEST, place, "the file has %llu bytes, the manifest says %llu",
            (unsigned long long)fsti_file_size(*out), (unsigned long long)listed->size_bytes);
        tell(job, &difference);
        fsti_file_unref(*out);
        *out = NULL;
    }
    // What is not read is done with.
    return *out != NULL ? FST_OK : fsti_work_add(&job->progress, listed->size_bytes, error);
}

/// Opens the files from job->first_file on, as many as are open at a time: *count.
static fst_status open_some(check_job *job, size_t *count, fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    folder_files place = {.folder = job->verification->folder};
    *count = (size_t)fsti_min(manifest->file_count - job->first_file, FSTI_SCAN_FILES_MAX);
    for (size_t i = 0; i < *count; i++) {
        const fsti_manifest_file *listed = &manifest->files[job->first_file + i];
        char *path = fsti_folder_join(&place, listed->name);
        if (path == NULL) return fsti_error_memory(error, listed->name_size);
        fst_status status = open_listed(job, path, listed, &job->scans[i].file, error);
        fsti_free(path);
        FST_TRY(status);
    }
    return FST_OK;
}

static void close_some(check_job *job) {
    for (size_t i = 0; i < FSTI_SCAN_FILES_MAX; i++) {
        fsti_file_unref(job->scans[i].file);
        job->scans[i].file = NULL;
    }
}

/// Reads the files from job->first_file on that are open at a time; *bytes_read grows.
static fst_status check_some(check_job *job, size_t *count, uint64_t *bytes_read,
                             fst_error *error) {
    fst_status status = open_some(job, count, error);
    fsti_scan scan = {.files = job->scans,
                      .file_count = *count,
                      .chunk_bytes = job->verification->manifest.chunk_bytes,
                      .take = check_chunk,
                      .context = job,
                      .progress = &job->progress};
    if (status == FST_OK) status = fsti_scan_run(&scan, error);
    *bytes_read += atomic_load(&scan.bytes_read);
    close_some(job);
    return status;
}

/// Tells of model files at the path that the manifest does not list: nothing was said of these.
static fst_status tell_unlisted(check_job *job, const char *path, fst_error *error) {
    folder_files there;
    fst_status status = fsti_folder_models(path, &there, error);
    for (size_t i = 0; i < there.count && status == FST_OK; i++) {
        const fsti_manifest_file *listed;
        fst_error difference;
        bool is_model = fsti_verify_leads_to_model(there.names[i]) || there.is_single;
        char *full = is_model ? fsti_folder_join(&there, there.names[i]) : NULL;
        if (is_model && full == NULL) status = fsti_error_memory(error, strlen(path));
        if (full != NULL &&
            fsti_verification_find(job->verification, full, &listed, &difference) != FST_OK)
            tell(job, &difference);
        fsti_free(full);
    }
    fsti_folder_files_clear(&there);
    return status;
}

static fst_status check_listed(check_job *job, uint64_t *bytes_read, fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    uint64_t total = 0;
    fst_status status = FST_OK;
    for (size_t i = 0; i < manifest->file_count; i++) total += manifest->files[i].size_bytes;
    fsti_work_begin(&job->progress, &job->listener->progress, total);
    for (size_t count; job->first_file < manifest->file_count && status == FST_OK;
         job->first_file += count)
        status = check_some(job, &count, bytes_read, error);
    fsti_work_end(&job->progress);
    return status;
}

static fst_status check_all(check_job *job, const char *path, fst_manifest_stats *stats,
                            fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    FST_TRY(tell_unlisted(job, path, error));
    stats->bytes_read = 0;
    FST_TRY(check_listed(job, &stats->bytes_read, error));
    stats->file_count = manifest->file_count;
    stats->bytes_hashed = stats->bytes_read;
    if (job->difference_count == 0) return FST_OK;
    if (error != NULL) *error = job->first;
    if (error != NULL) error->status = FST_E_DIGEST;
    return FST_E_DIGEST;
}

/// There is no manifest. A list of sums is as good; what else there is, opening looks at.
static fst_status check_other(const model_verification *found, const char *path,
                              const fsti_check_listener *listener, fst_manifest_stats *stats,
                              fst_error *error) {
    if (fsti_sums_is_list(found->path))
        return fsti_sums_check(path, found->path, listener, stats, error);
    fsti_error_place place = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_NOT_FOUND, place,
                          "neither a manifest, which 'hash --manifest' makes, nor a list of sums "
                          "lies beside it");
}

fst_status fsti_manifest_check(const char *path, const char *manifest,
                               const fsti_check_listener *listener, fst_manifest_stats *stats,
                               fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    check_job job = {.listener = listener};
    if (manifest != NULL && fsti_sums_is_list(manifest))
        return fsti_sums_check(path, manifest, listener, stats, error);
    model_wish wish = {.flags = FST_OPEN_VERIFY, .manifest = manifest};
    FST_TRY(fsti_verification_open(path, &wish, &job.verification, error));
    if (job.verification->whole != NULL) {
        fst_status other = check_other(job.verification, path, listener, stats, error);
        fsti_verification_close(job.verification);
        return other;
    }
    pthread_mutex_init(&job.lock, NULL);
    fst_status status = check_all(&job, path, stats, error);
    fsti_verification_close(job.verification);
    pthread_mutex_destroy(&job.lock);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
