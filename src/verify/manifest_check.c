// SPDX-License-Identifier: Apache-2.0
/// Verifies a folder against a manifest: reads all files and reports every difference.
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "folder_files.h"
#include "format/format.h"
#include "model/open_model.h"
#include "output/output.h"
#include "file_tree.h"
#include "scan.h"
#include "sums_files.h"
#include "folder_check.h"

typedef struct check_job {
    model_verification *verification;
    const fsti_check_listener *listener;
    work_progress progress;
    size_t first_file; ///< of the open ones
    scan_file scans[FSTI_SCAN_FILES_MAX];
    pthread_mutex_t lock; ///< protects the fields below
    uint64_t difference_count;
    fst_error first;
} check_job;

/// Reports a difference. The first one becomes the result of the check.
static void report(check_job *job, const fst_error *difference) {
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
    fsti_error_location location = {.file = fsti_file_path(scan->files[file_index].file)};
    (void)error;
    if (fsti_digest_list_matches(&list, begin, bytes, size_bytes, &location.byte_offset))
        return FST_OK;
    fst_error difference;
    fsti_error_set(&difference, FST_E_DIGEST, location, "chunk %llu of the file does not match",
                   (unsigned long long)(begin / manifest->chunk_bytes));
    report(job, &difference);
    return FST_OK;
}

/// Opens a listed file. A missing file, or one of another size, is reported and not read.
static fst_status open_listed(check_job *job, const char *path, const fsti_manifest_file *listed,
                              fsti_file **out, fst_error *error) {
    fst_error difference;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    *out = NULL;
    if (fsti_file_open(path, out, &difference) != FST_OK) {
        *out = NULL;
        if (fsti_verify_is_shortage(&difference)) {
            if (error != NULL) *error = difference;
            return difference.status;
        }
        report(job, &difference);
    } else if (fsti_file_size(*out) != listed->size_bytes) {
        fsti_error_set(
            &difference, FST_E_DIGEST, location, "the file has %llu bytes, %llu expected",
            (unsigned long long)fsti_file_size(*out), (unsigned long long)listed->size_bytes);
        report(job, &difference);
        fsti_file_unref(*out);
        *out = NULL;
    }
    // A file that is not read counts as processed.
    return *out != NULL ? FST_OK : fsti_work_add(&job->progress, listed->size_bytes, error);
}

/// Opens files from job->first_file on, up to the limit of open files: *count.
static fst_status open_some(check_job *job, size_t *count, fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    folder_files folder = {.folder = job->verification->folder};
    *count = (size_t)fsti_min(manifest->file_count - job->first_file, FSTI_SCAN_FILES_MAX);
    for (size_t i = 0; i < *count; i++) {
        const fsti_manifest_file *listed = &manifest->files[job->first_file + i];
        char *path = fsti_folder_join(&folder, listed->name);
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

/// Reads the open files from job->first_file on; adds to *bytes_read.
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

/// Reports model files at the path that the manifest does not list.
static fst_status report_unlisted(check_job *job, const char *path, fst_error *error) {
    folder_files there;
    fst_status status = fsti_folder_models(path, &there, error);
    for (size_t i = 0; i < there.count && status == FST_OK; i++) {
        const fsti_manifest_file *listed;
        fst_error difference;
        bool is_model = fsti_name_leads_to_model(there.names[i]) || there.is_single;
        char *full = is_model ? fsti_folder_join(&there, there.names[i]) : NULL;
        if (is_model && full == NULL) status = fsti_error_memory(error, strlen(path));
        if (full != NULL &&
            fsti_verification_find(job->verification, full, &listed, &difference) != FST_OK)
            report(job, &difference);
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
    FST_TRY(report_unlisted(job, path, error));
    stats->bytes_read = 0;
    FST_TRY(check_listed(job, &stats->bytes_read, error));
    stats->file_count = manifest->file_count;
    stats->bytes_hashed = stats->bytes_read;
    if (job->difference_count == 0) return FST_OK;
    if (error != NULL) *error = job->first;
    if (error != NULL) error->status = FST_E_DIGEST;
    return FST_E_DIGEST;
}

/// Without a manifest: checks a checksum list, or opens the model to use another digest source.
static fst_status check_other(const model_verification *found, const char *path,
                              const fsti_check_listener *listener, fst_manifest_stats *stats,
                              fst_error *error) {
    if (fsti_sums_is_list(found->path))
        return fsti_sums_check(path, found->path, listener, stats, error);
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (!fsti_location_looks_like_url(path) && access(path, F_OK) != 0)
        return fsti_error_errno(error, errno, path, "looking for the model");
    return fsti_error_set(error, FST_E_NOT_FOUND, location,
                          "no manifest or checksum list was found. Create a manifest with "
                          "'fastsafetensors hash --manifest'");
}

fst_status fsti_manifest_check(const char *path, const char *manifest,
                               const fsti_check_listener *listener, fst_manifest_stats *stats,
                               fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    check_job job = {.listener = listener};
    char settled[2][PATH_MAX];
    const char *folder = fsti_path_settle(path, settled[0]);
    if (manifest != NULL) manifest = fsti_path_settle_inside(manifest, path, folder, settled[1]);
    path = folder;
    if (manifest != NULL && fsti_sums_is_list(manifest))
        return fsti_sums_check(path, manifest, listener, stats, error);
    model_request request = {.flags = FST_OPEN_VERIFY, .manifest = manifest};
    FST_TRY(fsti_verification_open(path, &request, &job.verification, error));
    if (job.verification->expected != NULL) {
        fst_status other = check_other(job.verification, path, listener, stats, error);
        fsti_verification_close(job.verification);
        return other;
    }
    pthread_mutex_init(&job.lock, NULL);
    fst_status status = check_all(&job, path, stats, error);
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (status == FST_E_DIGEST && !fsti_verification_same(job.verification))
        status = fsti_error_set(error, FST_E_FILE_CHANGED, location,
                                "a save replaced the manifest while the files were compared. "
                                "Check again");
    fsti_verification_close(job.verification);
    pthread_mutex_destroy(&job.lock);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
