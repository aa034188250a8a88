// SPDX-License-Identifier: Apache-2.0
/// Opens and closes writers: layouts, targets and outputs.
#include "store/store.h"
#include "save_state.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STEM_DEFAULT "model"

static fst_status open_outputs(fst_writer *writer, const char *const *hidden, fst_error *error) {
    const fsti_target_kind *target = writer->target.kind;
    if (hidden == NULL && target->check_space != NULL) FST_TRY(target->check_space(writer, error));
    for (uint32_t f = 0; f < writer->contents.file_count; f++) {
        save_file *file = &writer->contents.files[f];
        if (hidden != NULL) {
            FST_TRY(fsti_output_adopt(&file->target, hidden[f], &file->output, error));
            continue;
        }
        // Blocks that an edit shares with the old file take no space.
        FST_TRY(fsti_output_open(
            &file->target,
            writer->source.origin == NULL ? file->layout.file_bytes : file->layout.header_bytes,
            writer->options.promise == FST_SAVE_DURABLE, &file->output, error));
        if (writer->options.others_write != 0)
            FST_TRY(fsti_output_allocate(file->output, 0, file->layout.file_bytes, error));
        if (writer->publication.manifest.kind != NULL)
            FST_TRY(fsti_save_manifest_begin(writer, file, error));
    }
    return FST_OK;
}

/// Copies what must outlive the opening call. Metadata is in the headers already.
static fst_status copy_options(fst_writer *writer, const char *path,
                               const fst_save_options *options, fst_error *error) {
    save_target *target = &writer->target;
    writer->options = *options;
    // These stay the caller's.
    writer->options.stem = NULL;
    writer->options.metadata = NULL;
    writer->progress.report = options->progress;
    writer->progress.report_context = options->progress_context;
    target->published = fsti_alloc_zeroed(writer->contents.file_count + 1, sizeof(char *));
    if (target->published == NULL)
        return fsti_error_memory(error, writer->contents.file_count * sizeof(char *));
    if (options->file_count == 0) return FST_OK;
    const char *stem = options->stem == NULL ? STEM_DEFAULT : options->stem;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    target->folder = fsti_string_copy(path, size);
    target->stem = fsti_string_copy(stem, strlen(stem));
    return target->folder == NULL || target->stem == NULL ? fsti_error_memory(error, size) : FST_OK;
}

static fst_status make_stream(fst_writer *writer, fst_error *error) {
    size_t count = writer->contents.tensor_count;
    writer->stream.coverage = fsti_alloc_zeroed(count + 1, sizeof *writer->stream.coverage);
    return writer->stream.coverage == NULL ? fsti_error_memory(error, count) : FST_OK;
}

/// The part of opening that does not write: names, layouts, paths.
static fst_status plan_at(fst_writer *writer, const char *path, const save_request *request,
                          fst_error *error) {
    const save_source *source = &writer->source;
    if (request->options->file_count == 0) FST_TRY(fsti_save_refuse_index_name(path, error));
    contents_request wanted = {.tensors = request->tensors,
                               .tensor_count = request->tensor_count,
                               .options = request->options,
                               .is_shifted = source->origin != NULL,
                               .shift_begin = source->origin_begin};
    FST_TRY(fsti_contents_make(&wanted, &writer->contents, error));
    FST_TRY(copy_options(writer, path, request->options, error));
    FST_TRY(make_stream(writer, error));
    save_progress *progress = &writer->progress;
    progress->tensor_count = writer->contents.tensor_count;
    progress->tensors_done = fsti_contents_empty_count(&writer->contents);
    progress->bytes_total =
        source->is_whole ? fsti_file_size(source->origin) : fsti_contents_bytes(&writer->contents);
    FST_TRY(fsti_writer_name_files(writer, path, error));
    const fsti_target_kind *kind = writer->target.kind;
    return kind->check == NULL ? FST_OK : kind->check(writer, error);
}

static fst_status plan_save(fst_writer *writer, const save_request *request, fst_error *error) {
    char *path = NULL;
    writer->target.anchor = fsti_anchor_here();
    fst_status status = fsti_path_absolute(request->path, &path, error);
    if (status == FST_OK) status = plan_at(writer, path, request, error);
    fsti_free(path);
    return status;
}

fst_status fsti_writer_create(fst_writer *writer, const char *const *hidden, fst_error *error) {
    FST_TRY(writer->target.kind->find(writer, error));
    FST_TRY(fsti_save_manifest_open(writer, error));
    return open_outputs(writer, hidden, error);
}

fst_status fsti_writer_open(const char *path, const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_writer **out, fst_error *error) {
    save_request request = {
        .path = path, .tensors = tensors, .tensor_count = tensor_count, .options = options};
    return fsti_writer_begin(&request, out, error);
}

/// The default source is the tensors' memory. Tensors are compressed after they are written.
static void choose_source(const save_request *request, save_source *out) {
    *out = request->source;
    if (out->kind == NULL) out->kind = &fsti_source_memory;
    if (request->options->compress == FST_COMPRESS_NONE || out->origin != NULL) return;
    out->plain = out->kind;
    out->kind = &fsti_source_packed;
}

fst_status fsti_writer_plan(const save_request *request, fst_writer **out, fst_error *error) {
    FST_TRY(fsti_location_check_scheme(request->path, error));
    fst_writer *writer = fsti_alloc_zeroed(1, sizeof *writer);
    if (writer == NULL) return fsti_error_memory(error, sizeof *writer);
    fsti_progress_init(&writer->progress);
    pthread_mutex_init(&writer->stream.lock, NULL);
    writer->owner = getpid();
    choose_source(request, &writer->source);
    writer->target.kind =
        fsti_location_is_url(request->path) ? &fsti_target_objects : &fsti_target_files;
    fst_status status = plan_save(writer, request, error);
    if (status != FST_OK) {
        fsti_writer_close(writer);
        return status;
    }
    *out = writer;
    return FST_OK;
}

fst_status fsti_writer_begin(const save_request *request, fst_writer **out, fst_error *error) {
    fst_writer *writer;
    FST_TRY(fsti_writer_plan(request, &writer, error));
    fst_status status = fsti_async_await_link(writer, error);
    if (status == FST_OK) status = fsti_writer_create(writer, request->hidden, error);
    if (status != FST_OK) {
        fsti_writer_close(writer);
        return status;
    }
    *out = writer;
    return FST_OK;
}

/// Closes the files and deletes their temporary names, unless the commit passed its commit step,
/// because an index may then refer to them. Names known to other processes are kept.
static void close_files(fst_writer *writer, bool keeps_names) {
    const save_publication *publication = &writer->publication;
    bool names_are_shared =
        publication->role == ROLE_JOINED || publication->role == ROLE_HANDED_OVER;
    void (*drop)(fsti_output *) =
        keeps_names || names_are_shared ? fsti_output_abandon : fsti_output_close;
    for (uint32_t f = 0; writer->contents.files != NULL && f < writer->contents.file_count; f++) {
        save_file *file = &writer->contents.files[f];
        fsti_stage_close(file->stage, NULL);
        // After a cancellation, a store has two seconds to abort uploads.
        if (file->output != NULL && atomic_load(&writer->progress.cancel_reported))
            fsti_output_stop(file->output);
        drop(file->output);
    }
    fsti_output_close(publication->manifest.output); // no index refers to it
    drop = keeps_names ? fsti_output_abandon : fsti_output_close;
    drop(publication->interim_index);
    drop(publication->final_index);
}

static void clear_memory(fst_writer *writer) {
    save_target *target = &writer->target;
    for (size_t i = 0; writer->stream.coverage != NULL && i < writer->contents.tensor_count; i++)
        fsti_coverage_clear(&writer->stream.coverage[i].claimed);
    for (uint32_t f = 0; target->published != NULL && f <= writer->contents.file_count; f++)
        fsti_free(target->published[f]);
    fsti_target_clear(&target->index);
    fsti_target_clear(&writer->publication.manifest.target);
    fsti_journal_clear(&writer->publication.journal);
    fsti_save_store_clear(&target->store);
    fsti_snapshot_source_close(&writer->source);
    fsti_contents_clear(&writer->contents);
    fsti_free(writer->stream.coverage);
    fsti_free(target->set_member);
    fsti_free(target->followed);
    fsti_free(target->published);
    fsti_free(target->folder);
    fsti_free(target->stem);
    fsti_free(writer);
}

/// In a forked child: files, reads and writes in flight, and locks belong to the parent. The
/// stages' memory stays allocated, because the kernel may be writing from it.
static void leave_to_parent(fst_writer *writer) {
    for (uint32_t f = 0; writer->contents.files != NULL && f < writer->contents.file_count; f++)
        fsti_output_abandon(writer->contents.files[f].output);
    fsti_output_abandon(writer->publication.interim_index);
    fsti_output_abandon(writer->publication.final_index);
    fsti_output_abandon(writer->publication.manifest.output);
    fsti_folder_leave(&writer->target.folder_use, false);
    clear_memory(writer);
}

void fsti_writer_close(fst_writer *writer) {
    if (writer == NULL) return;
    if (writer->owner != getpid()) {
        leave_to_parent(writer);
        return;
    }
    bool keeps_names = writer->publication.journal.keeps_names;
    // Other processes may use names that were handed over.
    if (writer->publication.role == ROLE_HANDED_OVER && !keeps_names) fsti_writer_take_back(writer);
    close_files(writer, keeps_names);
    fsti_folder_leave(&writer->target.folder_use,
                      atomic_load(&writer->state) != WRITER_COMMITTED && !keeps_names);
    fsti_progress_destroy(&writer->progress);
    pthread_mutex_destroy(&writer->stream.lock);
    clear_memory(writer);
}

const char *fsti_writer_path(const fst_writer *writer, uint32_t file_index) {
    bool has_index = writer->target.folder != NULL && writer->contents.file_count > 1;
    if (file_index >= writer->contents.file_count + (has_index ? 1u : 0u)) return NULL;
    return writer->target.published[file_index];
}

size_t fsti_writer_tensor_count(const fst_writer *writer) { return writer->contents.tensor_count; }

fst_status fsti_writer_stats(fst_writer *writer, fst_save_stats *stats, fst_error *error) {
    const stage_counts *counts = &writer->progress.counts;
    FST_TRY(fsti_writer_check_owner(writer, error)); // its lock may never be released in a child
    pthread_mutex_lock(&writer->progress.lock);
    snprintf(stats->engine, sizeof stats->engine, "%s",
             counts->engine == NULL ? "" : counts->engine);
    snprintf(stats->reason, sizeof stats->reason, "%s", counts->reason);
    stats->file_count = writer->contents.file_count;
    stats->tensor_count = writer->contents.tensor_count;
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        stats->padding_count += fsti_layout_padding_count(&writer->contents.files[f].layout);
    stats->bytes_total = writer->progress.bytes_total - writer->progress.bytes_packed;
    stats->bytes_written = counts->bytes_written;
    stats->bytes_direct = counts->bytes_direct;
    stats->bytes_staged = counts->bytes_staged;
    stats->write_count = counts->write_count;
    stats->stage_bytes = counts->stage_bytes;
    stats->sync_count = writer->progress.sync_count;
    stats->sync_ns = writer->progress.sync_ns;
    stats->total_ns = writer->progress.total_ns;
    stats->step_count = writer->progress.step_count;
    stats->leftover_count = writer->progress.leftover_count;
    snprintf(stats->warning, sizeof stats->warning, "%s", writer->progress.warning);
    stats->bytes_shared = writer->progress.bytes_shared;
    stats->bytes_copied = writer->progress.bytes_copied;
    stats->bytes_hashed = writer->progress.bytes_hashed;
    stats->bytes_read = writer->progress.bytes_read;
    pthread_mutex_unlock(&writer->progress.lock);
    return FST_OK;
}
