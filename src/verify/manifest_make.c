// SPDX-License-Identifier: Apache-2.0
/// Makes a manifest: opens the files, reads their headers, and digests every chunk with several
/// threads.
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "file_stamp.h"
#include "folder_files.h"
#include "format/format.h"
#include "manifest_text.h"
#include "location/location.h"
#include "model/open_model.h"
#include "output/output.h"
#include "scan.h"
#include "sums_files.h"
#include "folder_check.h"

#define CHUNK_BYTES_DEFAULT ((uint32_t)1 << 20)

typedef struct made_file {
    char *path;
    fsti_file *file;       ///< NULL: its old entry is reused
    fsti_header *header;   ///< NULL: not a safetensors file, or reused
    unsigned char *chunks; ///< NULL: reused
    fsti_lines lines;
} made_file;

typedef struct manifest_job {
    const fst_manifest_options *options;
    const fsti_digest_kind *kind;
    uint32_t chunk_bytes;
    folder_files list;
    file_watch watch; ///< of the listed files
    made_file *files;
    fsti_manifest_file *rows;
    size_t first_file; ///< index of the first file of the open group
    scan_file scans[FSTI_SCAN_FILES_MAX];
    fsti_manifest old; ///< the old manifest with reusable digests
    struct timespec begun;
    fsti_check_progress listener;
    work_progress progress;
    atomic_uint_fast64_t bytes_hashed;
} manifest_job;

static void clear_job(manifest_job *job) {
    for (size_t i = 0; job->files != NULL && i < job->list.count; i++) {
        fsti_free(job->files[i].path);
        fsti_file_unref(job->files[i].file);
        fsti_header_unref(job->files[i].header);
        fsti_free(job->files[i].chunks);
        fsti_free(job->files[i].lines.bytes);
    }
    fsti_free(job->files);
    fsti_free(job->rows);
    fsti_manifest_clear(&job->old);
    fsti_file_watch_clear(&job->watch);
    fsti_folder_files_clear(&job->list);
}

/// Reads the old manifest, which must use the same digest kind.
static fst_status read_old(manifest_job *job, fst_error *error) {
    const char *path = job->options->keep;
    if (path == NULL) return FST_OK;
    model_verification *old;
    model_request request = {.manifest = path};
    FST_TRY(fsti_verification_open(path, &request, &old, error));
    if (old->expected != NULL) {
        fsti_verification_close(old);
        return fsti_error_set(error, FST_E_MANIFEST,
                              (fsti_error_location){.file = path, .byte_offset = FST_NO_OFFSET},
                              "a checksum list, not a manifest");
    }
    bool same = old->manifest.kind == job->kind && old->manifest.chunk_bytes == job->chunk_bytes;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    fst_status status = FST_OK;
    if (!same)
        status = fsti_error_set(
            error, FST_E_ARGUMENT, location,
            "its digests are %s with chunks of %u bytes. Use the same, or leave out keep",
            old->manifest.kind->name, old->manifest.chunk_bytes);
    if (status == FST_OK) {
        job->old = old->manifest;
        old->manifest = (fsti_manifest){0};
    }
    fsti_verification_close(old);
    return status;
}

/// Whether the old entry of a file is still valid; if so, it is copied.
static bool reuse_entry(const manifest_job *job, size_t index, const struct stat *info) {
    const char *name = job->list.names[index];
    const fsti_manifest_file *old = fsti_manifest_find(&job->old, name, strlen(name));
    bool wants_tensors = (job->options->flags & FST_MANIFEST_TENSORS) != 0;
    fsti_file_stamp now = fsti_file_stamp_of(info);
    if (old == NULL || old->size_bytes != (uint64_t)info->st_size ||
        !fsti_file_stamp_equals(&old->stamp, &now))
        return false;
    if (wants_tensors && old->header_bytes > 0 && old->tensor_lines_size == 0) return false;
    job->rows[index] = *old;
    if (!wants_tensors) job->rows[index].tensor_lines_size = 0;
    return true;
}

static fst_status read_header(made_file *made, fsti_manifest_file *row, const manifest_job *job,
                              fst_error *error) {
    fst_model empty = {.hash_key = fsti_hash_key()};
    model_file opened;
    // For a compressed file, digest the stored header, because loads verify that one.
    FST_TRY(fsti_model_file_adopt(&empty, fsti_file_ref(made->file),
                                  FST_OPEN_LENIENT | FST_OPEN_STORED, &opened, error));
    row->header_bytes = opened.header->data_begin;
    made->header = fsti_header_ref(opened.header);
    fsti_model_file_clear(&opened);
    char *bytes = fsti_alloc((size_t)row->header_bytes);
    size_t got = 0;
    if (bytes == NULL) return fsti_error_memory(error, row->header_bytes);
    fst_status status =
        fsti_file_read(made->file, bytes, (size_t)row->header_bytes, 0, &got, error);
    if (status == FST_OK && !job->kind->hash(bytes, got, row->header))
        status = fsti_error_memory(error, got);
    fsti_free(bytes);
    return status;
}

static fst_status open_file(manifest_job *job, size_t index, fst_manifest_stats *stats,
                            fst_error *error) {
    struct stat info;
    made_file *made = &job->files[index];
    fsti_manifest_file *row = &job->rows[index];
    const char *name = job->list.names[index];
    made->path = fsti_folder_join(&job->list, name);
    if (made->path == NULL) return fsti_error_memory(error, strlen(name));
    bool exists = stat(made->path, &info) == 0;
    if (exists && reuse_entry(job, index, &info)) {
        stats->files_kept++;
        return fsti_work_add(&job->progress, job->rows[index].size_bytes, error);
    }
    FST_TRY(fsti_file_open(made->path, &made->file, error));
    *row = (fsti_manifest_file){
        .name = name, .name_size = strlen(name), .size_bytes = fsti_file_size(made->file)};
    if (exists && fsti_file_stamp_is_settled(&info, &job->begun))
        row->stamp = fsti_file_stamp_of(&info);
    if (fsti_name_is_model(name) || job->list.is_single)
        FST_TRY(read_header(made, row, job, error));
    uint64_t count = fsti_digest_chunk_count(row->size_bytes, job->chunk_bytes);
    made->chunks = fsti_alloc_zeroed((size_t)count + 1, job->kind->digest_bytes);
    if (made->chunks == NULL) return fsti_error_memory(error, count * job->kind->digest_bytes);
    row->digests = made->chunks;
    job->scans[index - job->first_file].file = made->file;
    return FST_OK;
}

static fst_status digest_chunk(fsti_scan *scan, size_t file_index, uint64_t begin,
                               const char *bytes, size_t size_bytes, fst_error *error) {
    manifest_job *job = scan->context;
    uint64_t number = begin / job->chunk_bytes;
    atomic_fetch_add(&job->bytes_hashed, size_bytes);
    if (job->kind->hash(bytes, size_bytes,
                        job->files[job->first_file + file_index].chunks +
                            number * job->kind->digest_bytes))
        return FST_OK;
    return fsti_error_memory(error, size_bytes);
}

/// Digests the bytes of one tensor.
static fst_status digest_tensor(manifest_job *job, made_file *made, const fsti_tensor *tensor,
                                char *buffer, fst_error *error) {
    uint64_t begin = made->header->data_begin + tensor->begin;
    uint64_t end = made->header->data_begin + tensor->end;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    void *state = job->kind->begin();
    fst_status status = state == NULL ? fsti_error_memory(error, 64) : FST_OK;
    for (; status == FST_OK && begin < end;) {
        size_t size = (size_t)fsti_min(job->chunk_bytes, end - begin), got = 0;
        status = fsti_file_read(made->file, buffer, size, begin, &got, error);
        if (status == FST_OK && got < size) {
            fsti_error_location location = {.file = made->path, .byte_offset = begin + got};
            status = fsti_error_set(error, FST_E_SHORT_READ, location,
                                    "the file became shorter while it was read");
        }
        if (status == FST_OK && !job->kind->update(state, buffer, size))
            status = fsti_error_memory(error, 64);
        atomic_fetch_add(&job->bytes_hashed, size);
        begin += size;
        if (status == FST_OK) status = fsti_work_add(&job->progress, size, error);
    }
    if (state != NULL && !job->kind->end(state, digest) && status == FST_OK)
        status = fsti_error_memory(error, 64);
    if (status == FST_OK &&
        !fsti_manifest_put_tensor(job->kind, digest, made->header, tensor, &made->lines))
        status = fsti_error_memory(error, made->lines.size);
    return status;
}

static fst_status digest_tensors(manifest_job *job, size_t end, fst_error *error) {
    char *buffer = fsti_alloc(job->chunk_bytes);
    fst_status status = buffer == NULL ? fsti_error_memory(error, job->chunk_bytes) : FST_OK;
    for (size_t i = job->first_file; i < end && status == FST_OK; i++) {
        made_file *made = &job->files[i];
        if (made->header == NULL) continue;
        for (size_t t = 0; t < made->header->tensor_count && status == FST_OK; t++)
            status = digest_tensor(job, made, &made->header->tensors[t], buffer, error);
        if (status == FST_OK) status = fsti_file_check(made->file, error);
        job->rows[i].tensor_lines = made->lines.bytes;
        job->rows[i].tensor_lines_size = made->lines.size;
    }
    fsti_free(buffer);
    return status;
}

/// Finishes a file that was read. Its stamp is kept if the path still leads to the same file.
static void finish_file(made_file *made, fsti_manifest_file *row) {
    struct stat info;
    if (made->file == NULL) return;
    fsti_file_stamp now = {0};
    if (stat(made->path, &info) == 0) now = fsti_file_stamp_of(&info);
    if (!fsti_file_stamp_equals(&row->stamp, &now)) row->stamp = (fsti_file_stamp){0};
    fsti_file_unref(made->file);
    fsti_header_unref(made->header);
    made->file = NULL;
    made->header = NULL;
}

/// Processes files from job->first_file on, up to the limit of open files: *end is after them.
static fst_status digest_group(manifest_job *job, size_t *end, fst_manifest_stats *stats,
                               fst_error *error) {
    *end = (size_t)fsti_min(job->list.count, job->first_file + FSTI_SCAN_FILES_MAX);
    memset(job->scans, 0, sizeof job->scans);
    for (size_t i = job->first_file; i < *end; i++) FST_TRY(open_file(job, i, stats, error));
    fsti_scan scan = {.files = job->scans,
                      .file_count = *end - job->first_file,
                      .chunk_bytes = job->chunk_bytes,
                      .thread_count = job->options->thread_count,
                      .take = digest_chunk,
                      .context = job,
                      .progress = &job->progress};
    FST_TRY(fsti_scan_run(&scan, error));
    if ((job->options->flags & FST_MANIFEST_TENSORS) != 0)
        FST_TRY(digest_tensors(job, *end, error));
    for (size_t i = job->first_file; i < *end; i++) finish_file(&job->files[i], &job->rows[i]);
    return FST_OK;
}

/// The number of bytes to digest, as far as known before opening the files.
static uint64_t total_bytes(const manifest_job *job) {
    uint64_t total = 0;
    bool twice = (job->options->flags & FST_MANIFEST_TENSORS) != 0;
    for (size_t i = 0; job->listener.callback != NULL && i < job->list.count; i++) {
        struct stat info;
        char *path = fsti_folder_join(&job->list, job->list.names[i]);
        if (path == NULL || stat(path, &info) != 0) info.st_size = 0;
        bool is_model = job->list.is_single || fsti_name_is_model(job->list.names[i]);
        total += (uint64_t)info.st_size * (twice && is_model ? 2 : 1);
        fsti_free(path);
    }
    return total;
}

static fst_status fill_rows(manifest_job *job, fst_manifest_stats *stats, fst_error *error) {
    size_t count = job->list.count;
    job->files = fsti_alloc_zeroed(count, sizeof *job->files);
    job->rows = fsti_alloc_zeroed(count, sizeof *job->rows);
    if (job->files == NULL || job->rows == NULL)
        return fsti_error_memory(error, count * sizeof *job->files);
    fst_status status = FST_OK;
    fsti_work_begin(&job->progress, &job->listener, total_bytes(job));
    for (size_t end; job->first_file < count && status == FST_OK; job->first_file = end)
        status = digest_group(job, &end, stats, error);
    fsti_work_end(&job->progress);
    FST_TRY(status);
    // All bytes read are digested.
    stats->bytes_read = stats->bytes_hashed = atomic_load(&job->bytes_hashed);
    stats->file_count = count;
    return FST_OK;
}

/// The default path of a manifest.
static char *default_target(const folder_files *list) {
    char name[300] = "model.manifest";
    if (list->is_single) snprintf(name, sizeof name, "%.280s.manifest", list->names[0]);
    return fsti_folder_join(list, name);
}

static fst_status publish_manifest(manifest_job *job, const char *path, const char *target,
                                   fst_error *error) {
    folder_check check = {path, &job->list, &job->watch};
    char *text, *own = target == NULL ? default_target(&job->list) : NULL;
    size_t size;
    fsti_manifest_draft draft = {.kind = job->kind,
                                 .chunk_bytes = job->chunk_bytes,
                                 .files = job->rows,
                                 .file_count = job->list.count};
    if (target == NULL && own == NULL) return fsti_error_memory(error, 64);
    fst_status status = fsti_manifest_write(&draft, &text, &size, error);
    if (status == FST_OK) {
        status = fsti_text_publish(target == NULL ? own : target, text, size,
                                   fsti_folder_files_check, &check, error);
        fsti_free(text);
    }
    if (status == FST_OK) fsti_manifest_report_path(job->options, target == NULL ? own : target);
    fsti_free(own);
    return status;
}

fst_status fsti_manifest_make(const char *path, const char *target,
                              const fst_manifest_options *options, fst_manifest_stats *stats,
                              fst_error *error) {
    char settled[2][PATH_MAX];
    const char *folder = fsti_path_settle(path, settled[0]);
    if (target != NULL) target = fsti_path_settle_inside(target, path, folder, settled[1]);
    path = folder;
    FST_TRY(fsti_text_check_target(target, path, error));
    if (target == NULL)
        FST_TRY(fsti_location_require_file(
            path, "the manifest of a URL needs a target, which is a local file", error));
    if ((options->flags & FST_MANIFEST_SUMS) != 0)
        return fsti_sums_make(path, target, options, stats, error);
    uint64_t start_ns = fsti_now_ns();
    manifest_job job = {.options = options,
                        .listener = {options->progress, options->progress_context},
                        .kind = fsti_digest_get(options->digest),
                        .chunk_bytes = options->chunk_bytes};
    clock_gettime(CLOCK_REALTIME, &job.begun);
    if (job.chunk_bytes == 0) job.chunk_bytes = CHUNK_BYTES_DEFAULT;
    FST_TRY(job.kind->ready(error));
    fst_status status = read_old(&job, error);
    if (status == FST_OK) status = fsti_folder_files(path, &job.list, &job.watch, error);
    if (status == FST_OK) fsti_folder_files_omit(&job.list, target);
    if (status == FST_OK) status = fsti_folder_files_check_names(&job.list, error);
    if (status == FST_OK) status = fill_rows(&job, stats, error);
    if (status == FST_OK) status = publish_manifest(&job, path, target, error);
    clear_job(&job);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
