// SPDX-License-Identifier: Apache-2.0
/// A folder held against a manifest: all of it is read, and everything that differs is told.
#include <string.h>
#include <sys/stat.h>

#include "folder_files.h"
#include "format/format.h"
#include "model/model.h"
#include "scan.h"
#include "verify.h"

typedef struct check_job {
    model_verification *verification;
    const fsti_check_listener *listener;
    scan_file *scans;
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
    const fsti_manifest_file *listed = &manifest->files[file_index];
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
static void open_listed(check_job *job, const char *path, const fsti_manifest_file *listed,
                        fsti_file **out) {
    fst_error error;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    *out = NULL;
    if (fsti_file_open(path, out, &error) != FST_OK) {
        *out = NULL;
        tell(job, &error);
    } else if (fsti_file_size(*out) != listed->size_bytes) {
        fsti_error_set(
            &error, FST_E_DIGEST, place, "the file has %llu bytes, the manifest says %llu",
            (unsigned long long)fsti_file_size(*out), (unsigned long long)listed->size_bytes);
        tell(job, &error);
        fsti_file_unref(*out);
        *out = NULL;
    }
}

static fst_status open_all(check_job *job, fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    folder_files place = {.folder = job->verification->folder};
    job->scans = fsti_alloc_zeroed(manifest->file_count, sizeof *job->scans);
    if (job->scans == NULL) return fsti_error_memory(error, manifest->file_count);
    for (size_t i = 0; i < manifest->file_count; i++) {
        char *path = fsti_folder_join(&place, manifest->files[i].name);
        if (path == NULL) return fsti_error_memory(error, manifest->files[i].name_size);
        open_listed(job, path, &manifest->files[i], &job->scans[i].file);
        fsti_free(path);
    }
    return FST_OK;
}

/// Tells of model files at the path that the manifest does not list: nothing was said of these.
static fst_status tell_unlisted(check_job *job, const char *path, fst_error *error) {
    folder_files there = {0};
    struct stat info;
    if (stat(path, &info) != 0) return FST_OK; // of a file that is listed that will be told
    fst_status status = fsti_folder_files(path, &there, error);
    // A folder that is no model is held against a manifest by what that lists.
    if (S_ISDIR(info.st_mode) && status != FST_E_NO_MEMORY) status = FST_OK;
    for (size_t i = 0; i < there.count && status == FST_OK; i++) {
        const fsti_manifest_file *listed;
        fst_error difference;
        bool is_model = fsti_verify_is_model(there.names[i]) || there.is_single;
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

static fst_status check_all(check_job *job, const char *path, fst_manifest_stats *stats,
                            fst_error *error) {
    const fsti_manifest *manifest = &job->verification->manifest;
    FST_TRY(tell_unlisted(job, path, error));
    FST_TRY(open_all(job, error));
    fsti_scan scan = {.files = job->scans,
                      .file_count = manifest->file_count,
                      .chunk_bytes = manifest->chunk_bytes,
                      .take = check_chunk,
                      .context = job};
    FST_TRY(fsti_scan_run(&scan, error));
    stats->file_count = manifest->file_count;
    stats->bytes_read = stats->bytes_hashed = atomic_load(&scan.bytes_read);
    if (job->difference_count == 0) return FST_OK;
    if (error != NULL) *error = job->first;
    if (error != NULL) error->status = FST_E_DIGEST;
    return FST_E_DIGEST;
}

fst_status fsti_manifest_check(const char *path, const char *manifest,
                               const fsti_check_listener *listener, fst_manifest_stats *stats,
                               fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    check_job job = {.listener = listener};
    model_wish wish = {.flags = FST_OPEN_VERIFY, .manifest = manifest};
    FST_TRY(fsti_verification_open(path, &wish, &job.verification, error));
    pthread_mutex_init(&job.lock, NULL);
    fst_status status = check_all(&job, path, stats, error);
    for (size_t i = 0; job.scans != NULL && i < job.verification->manifest.file_count; i++)
        fsti_file_unref(job.scans[i].file);
    fsti_free(job.scans);
    fsti_verification_close(job.verification);
    pthread_mutex_destroy(&job.lock);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
