// SPDX-License-Identifier: Apache-2.0
/// The start of a save: layouts, targets, outputs; and its end.
#include "net/net.h"
#include "save_state.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STEM_DEFAULT "model"

// ---- tensors ----

static fst_status copy_tensors(fst_writer *writer, const fst_save_tensor *tensors,
                               size_t tensor_count, fst_error *error) {
    uint64_t name_bytes = 1;
    for (size_t i = 0; i < tensor_count; i++) name_bytes += tensors[i].name_size;
    writer->tensor_count = tensor_count;
    writer->tensors = fsti_alloc_zeroed(tensor_count + 1, sizeof *writer->tensors);
    writer->members = fsti_alloc((tensor_count + 1) * sizeof *writer->members);
    writer->member_begin = fsti_alloc_zeroed(writer->file_count + 2, sizeof(size_t));
    writer->names = fsti_alloc((size_t)name_bytes);
    if (writer->tensors == NULL || writer->members == NULL || writer->member_begin == NULL ||
        writer->names == NULL)
        return fsti_error_memory(error, tensor_count * sizeof *writer->tensors);
    char *name = writer->names;
    for (size_t i = 0; i < tensor_count; i++) {
        save_tensor *tensor = &writer->tensors[i];
        memcpy(name, tensors[i].name, tensors[i].name_size);
        tensor->name = name;
        tensor->name_size = tensors[i].name_size;
        tensor->data = tensors[i].data;
        tensor->device = tensors[i].device;
        tensor->file = tensors[i].file_index;
        name += tensors[i].name_size;
    }
    return FST_OK;
}

/// Groups the tensors by file with a counting sort. The counts are stored two positions further, so
/// that begin[f + 1] can serve as the write position of file f. After the last loop it is the end
/// of file f, which is the beginning of file f + 1.
static void group_members(fst_writer *writer) {
    size_t *begin = writer->member_begin;
    for (size_t i = 0; i < writer->tensor_count; i++) begin[writer->tensors[i].file + 2]++;
    for (uint32_t f = 1; f <= writer->file_count; f++) begin[f + 1] += begin[f];
    for (size_t i = 0; i < writer->tensor_count; i++)
        writer->members[begin[writer->tensors[i].file + 1]++] = (uint32_t)i;
}

static size_t member_count(const fst_writer *writer, uint32_t file) {
    return writer->member_begin[file + 1] - writer->member_begin[file];
}

static fst_status lay_out_file(fst_writer *writer, uint32_t file, const fst_save_tensor *tensors,
                               fst_save_tensor *own, fst_error *error) {
    const uint32_t *members = writer->members + writer->member_begin[file];
    size_t count = member_count(writer, file);
    fst_layout *layout = &writer->files[file].layout;
    for (size_t i = 0; i < count; i++) own[i] = tensors[members[i]];
    FST_TRY(fsti_layout_make(own, count, &writer->options, layout, error));
    if (writer->origin != NULL)
        FST_TRY(fsti_layout_shift(layout, writer->origin_begin, FSTI_OUTPUT_BLOCK_BYTES, error));
    for (size_t i = 0; i < count; i++) {
        save_tensor *tensor = &writer->tensors[members[i]];
        tensor->index = (uint32_t)i;
        fsti_layout_tensor(layout, i, &tensor->offset, &tensor->size_bytes);
    }
    writer->bytes_total += layout->file_bytes;
    for (size_t i = 0; i < count; i++)
        writer->tensors_done += writer->tensors[members[i]].size_bytes == 0;
    return FST_OK;
}

static fsti_name tensor_name(const void *tensors, size_t index) {
    const save_tensor *tensor = (const save_tensor *)tensors + index;
    return (fsti_name){tensor->name, tensor->name_size};
}

/// In a sharded model a name must be unique over all files.
static fst_status check_names(const fst_writer *writer, fst_error *error) {
    size_t twice;
    if (writer->file_count < 2) return FST_OK; // the layout has checked
    if (!fsti_names_twice(tensor_name, writer->tensors, writer->tensor_count, &twice))
        return fsti_error_memory(error, writer->tensor_count * sizeof(uint32_t));
    if (twice == SIZE_MAX) return FST_OK;
    return fsti_writer_refuse(&writer->tensors[twice], error, "duplicate tensor name");
}

static fst_status lay_out_all(fst_writer *writer, const fst_save_tensor *tensors,
                              fst_error *error) {
    fst_save_tensor *own = fsti_alloc((writer->tensor_count + 1) * sizeof *own);
    if (own == NULL) return fsti_error_memory(error, writer->tensor_count * sizeof *own);
    fst_status status = check_names(writer, error);
    for (uint32_t f = 0; f < writer->file_count && status == FST_OK; f++)
        status = lay_out_file(writer, f, tensors, own, error);
    fsti_free(own);
    return status;
}

// ---- files ----

/// Finds the existing file of the model with the most restrictive permissions.
static fst_status record_member(void *context, const fsti_folder_entry *entry, fst_error *error) {
    fst_writer *writer = context;
    const char *name = entry->name;
    size_t size = strlen(name), capacity = strlen(writer->folder) + size + 2;
    struct stat found, other;
    if (!fsti_save_is_shard(name, size, writer->stem) &&
        !fsti_save_is_single(name, size, writer->stem))
        return FST_OK;
    char *path = fsti_alloc(capacity);
    if (path == NULL) return fsti_error_memory(error, capacity);
    snprintf(path, capacity, "%s/%s", writer->folder, name);
    bool is_file = stat(path, &found) == 0 && S_ISREG(found.st_mode);
    bool is_first = writer->set_member == NULL || stat(writer->set_member, &other) != 0;
    if (is_file && (is_first || (found.st_mode & 077) < (other.st_mode & 077))) {
        fsti_free(writer->set_member);
        writer->set_member = path;
    } else {
        fsti_free(path);
    }
    return FST_OK;
}

/// The permissions of a new file: for an edit those of the edited file, for a sharded model those
/// of the existing model, which may have another number of files.
static fst_status find_rights(const fst_writer *writer, fsti_target *target, fst_error *error) {
    if (writer->origin != NULL)
        return fsti_target_like(target, fsti_file_path(writer->origin), error);
    if (writer->set_member == NULL) return FST_OK;
    // It may be deleted meanwhile; then default permissions apply.
    (void)fsti_target_like(target, writer->set_member, NULL);
    return FST_OK;
}

static fst_status find_targets(fst_writer *writer, fst_error *error) {
    bool is_sharded = writer->folder != NULL;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    if (writer->is_remote) return fsti_writer_find_objects(writer, error);
    if (is_sharded)
        FST_TRY(fsti_folder_make(writer->folder, durable, &writer->folders_made, error));
    if (is_sharded) FST_TRY(fsti_folder_visit(writer->folder, record_member, writer, error));
    for (uint32_t f = 0; f <= writer->file_count; f++) {
        bool is_index = f == writer->file_count;
        if (is_index && !is_sharded) break;
        fsti_target *target = is_index ? &writer->index_target : &writer->files[f].target;
        // A link in a sharded model is replaced, not followed: the index refers to files in its
        // folder, and the link's target may be in a shared store.
        bool follow = !is_sharded && writer->options.replace_link == 0;
        FST_TRY(fsti_target_find(writer->published[f], follow, target, error));
        // Users who could not read the old file must not read its tensors elsewhere.
        FST_TRY(find_rights(writer, target, error));
    }
    return FST_OK;
}

/// Files are created one by one, so check first that the disk has space for all of them.
static fst_status check_space(const fst_writer *writer, fst_error *error) {
    if (writer->folder == NULL || writer->is_remote) return FST_OK;
    return fsti_folder_check_space(writer->folder, writer->bytes_total, error);
}

static fst_status open_outputs(fst_writer *writer, const char *const *hidden, fst_error *error) {
    if (hidden == NULL) FST_TRY(check_space(writer, error));
    for (uint32_t f = 0; f < writer->file_count; f++) {
        save_file *file = &writer->files[f];
        if (hidden != NULL) {
            FST_TRY(fsti_output_adopt(&file->target, hidden[f], &file->output, error));
            continue;
        }
        // Blocks that an edit shares with the old file take no space.
        FST_TRY(fsti_output_open(
            &file->target,
            writer->origin == NULL ? file->layout.file_bytes : file->layout.header_bytes,
            writer->options.promise == FST_SAVE_DURABLE, &file->output, error));
        if (writer->manifest.kind != NULL) FST_TRY(fsti_save_manifest_begin(writer, file, error));
    }
    return FST_OK;
}

/// Copies what must outlive the opening call. Metadata is in the headers already.
static fst_status copy_options(fst_writer *writer, const char *path,
                               const fst_save_options *options, fst_error *error) {
    writer->options = *options;
    writer->file_count = options->file_count > 0 ? options->file_count : 1;
    writer->files = fsti_alloc_zeroed(writer->file_count, sizeof *writer->files);
    writer->published = fsti_alloc_zeroed(writer->file_count + 1, sizeof *writer->published);
    if (writer->files == NULL || writer->published == NULL)
        return fsti_error_memory(error, writer->file_count * sizeof *writer->files);
    if (options->file_count == 0) return FST_OK;
    const char *stem = options->stem == NULL ? STEM_DEFAULT : options->stem;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    writer->folder = fsti_string_copy(path, size);
    writer->stem = fsti_string_copy(stem, strlen(stem));
    return writer->folder == NULL || writer->stem == NULL ? fsti_error_memory(error, size) : FST_OK;
}

/// The part of opening that needs no disk: names, layouts, paths.
static fst_status plan_at(fst_writer *writer, const char *path, const save_request *request,
                          fst_error *error) {
    FST_TRY(copy_options(writer, path, request->options, error));
    FST_TRY(copy_tensors(writer, request->tensors, request->tensor_count, error));
    group_members(writer);
    FST_TRY(lay_out_all(writer, request->tensors, error));
    if (writer->is_whole) writer->bytes_total = fsti_file_size(writer->origin);
    FST_TRY(fsti_writer_name_files(writer, path, error));
    return writer->is_remote ? fsti_writer_check_remote(writer, request->options, error) : FST_OK;
}

static fst_status plan_save(fst_writer *writer, const save_request *request, fst_error *error) {
    char *path = NULL;
    writer->anchor = fsti_anchor_here();
    fst_status status = fsti_path_absolute(request->path, &path, error);
    if (status == FST_OK) status = plan_at(writer, path, request, error);
    fsti_free(path);
    return status;
}

fst_status fsti_writer_create(fst_writer *writer, const char *const *hidden, fst_error *error) {
    FST_TRY(find_targets(writer, error));
    FST_TRY(fsti_save_manifest_open(writer, error));
    return open_outputs(writer, hidden, error);
}

fst_status fsti_writer_open(const char *path, const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_writer **out, fst_error *error) {
    save_request request = {path, tensors, tensor_count, options, NULL, 0, NULL, NULL, false};
    return fsti_writer_begin(&request, out, error);
}

fst_status fsti_writer_plan(const save_request *request, fst_writer **out, fst_error *error) {
    fst_writer *writer = fsti_alloc_zeroed(1, sizeof *writer);
    if (writer == NULL) return fsti_error_memory(error, sizeof *writer);
    pthread_mutex_init(&writer->lock, NULL);
    pthread_mutex_init(&writer->stream_lock, NULL);
    pthread_mutex_init(&writer->progress_lock, NULL);
    writer->owner = getpid();
    writer->start_ns = fsti_now_ns();
    writer->origin = request->origin;
    writer->origin_begin = request->origin_begin;
    writer->origin_header = request->origin_header;
    writer->is_whole = request->is_whole;
    writer->is_remote = fsti_net_is_url(request->path);
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
    fst_status status = fsti_writer_create(writer, request->hidden, error);
    if (status != FST_OK) {
        fsti_writer_close(writer);
        return status;
    }
    *out = writer;
    return FST_OK;
}

/// Closes the files and deletes their temporary names, unless the commit passed its commit step,
/// because an index may then refer to them. Names known to other processes are kept.
static void clear_files(fst_writer *writer, bool is_published) {
    bool names_are_shared = writer->is_joined || (writer->is_shared && !writer->is_adopted);
    void (*drop)(fsti_output *) =
        is_published || names_are_shared ? fsti_output_abandon : fsti_output_close;
    for (uint32_t f = 0; writer->files != NULL && f < writer->file_count; f++) {
        save_file *file = &writer->files[f];
        fsti_stage_close(file->stage, NULL);
        // After a cancellation, a store has two seconds to abort uploads.
        if (writer->is_remote && file->output != NULL && atomic_load(&writer->is_ended))
            fsti_output_stop(file->output);
        drop(file->output);
        fsti_target_clear(&file->target);
        fsti_layout_clear(&file->layout);
    }
    fsti_output_close(writer->manifest.output); // no index refers to it
    drop = is_published ? fsti_output_abandon : fsti_output_close;
    drop(writer->interim_index);
    drop(writer->final_index);
}

static void clear_memory(fst_writer *writer) {
    for (size_t i = 0; writer->tensors != NULL && i < writer->tensor_count; i++)
        fsti_coverage_clear(&writer->tensors[i].coverage);
    for (uint32_t f = 0; writer->published != NULL && f <= writer->file_count; f++)
        fsti_free(writer->published[f]);
    for (uint32_t f = 0; writer->files != NULL && f < writer->file_count; f++)
        fsti_chunk_digests_close(writer->files[f].listed.chunks);
    fsti_target_clear(&writer->index_target);
    fsti_target_clear(&writer->manifest.target);
    fsti_journal_clear(&writer->journal);
    fsti_writer_clear_remote_state(writer);
    fsti_writer_drop_snapshot(writer);
    fsti_free(writer->set_member);
    fsti_free(writer->published);
    fsti_free(writer->files);
    fsti_free(writer->tensors);
    fsti_free(writer->members);
    fsti_free(writer->member_begin);
    fsti_free(writer->names);
    fsti_free(writer->folder);
    fsti_free(writer->stem);
    fsti_free(writer);
}

/// In a forked child: files, reads and writes in flight, and locks belong to the parent. The
/// stages' memory stays allocated, because the kernel may be writing from it.
static void leave_to_parent(fst_writer *writer) {
    for (uint32_t f = 0; writer->files != NULL && f < writer->file_count; f++) {
        fsti_output_abandon(writer->files[f].output);
        fsti_target_clear(&writer->files[f].target);
        fsti_layout_clear(&writer->files[f].layout);
    }
    fsti_output_abandon(writer->interim_index);
    fsti_output_abandon(writer->final_index);
    fsti_output_abandon(writer->manifest.output);
    clear_memory(writer);
}

void fsti_writer_close(fst_writer *writer) {
    if (writer == NULL) return;
    if (writer->owner != getpid()) {
        leave_to_parent(writer);
        return;
    }
    bool is_published = writer->journal.is_committed;
    // Names of other processes belong to them, and they may use names that were handed over.
    if (writer->is_shared && !writer->is_adopted && !is_published) fsti_writer_take_back(writer);
    clear_files(writer, is_published);
    if (!writer->is_remote && atomic_load(&writer->state) != WRITER_COMMITTED &&
        !writer->journal.is_committed)
        fsti_folder_unmake(writer->folder, writer->folders_made);
    pthread_mutex_destroy(&writer->lock);
    pthread_mutex_destroy(&writer->progress_lock);
    pthread_mutex_destroy(&writer->stream_lock);
    clear_memory(writer);
}

const char *fsti_writer_path(const fst_writer *writer, uint32_t file_index) {
    bool has_index = writer->folder != NULL && writer->file_count > 1;
    if (file_index >= writer->file_count + (has_index ? 1u : 0u)) return NULL;
    return writer->published[file_index];
}

size_t fsti_writer_tensor_count(const fst_writer *writer) { return writer->tensor_count; }

fst_status fsti_writer_stats(fst_writer *writer, fst_save_stats *stats, fst_error *error) {
    const stage_counts *counts = &writer->counts;
    FST_TRY(fsti_writer_check_owner(writer, error)); // its lock may never be released in a child
    pthread_mutex_lock(&writer->lock);
    snprintf(stats->engine, sizeof stats->engine, "%s",
             counts->engine == NULL ? "" : counts->engine);
    snprintf(stats->reason, sizeof stats->reason, "%s", counts->reason);
    stats->file_count = writer->file_count;
    stats->tensor_count = writer->tensor_count;
    for (uint32_t f = 0; f < writer->file_count; f++)
        stats->padding_count += fsti_layout_padding_count(&writer->files[f].layout);
    stats->bytes_total = writer->bytes_total - writer->bytes_packed;
    stats->bytes_written = counts->bytes_written;
    stats->bytes_direct = counts->bytes_direct;
    stats->bytes_staged = counts->bytes_staged;
    stats->write_count = counts->write_count;
    stats->stage_bytes = counts->stage_bytes;
    stats->sync_count = writer->sync_count;
    stats->sync_ns = writer->sync_ns;
    stats->total_ns = writer->total_ns;
    stats->step_count = writer->step_count;
    stats->leftover_count = writer->leftover_count;
    snprintf(stats->warning, sizeof stats->warning, "%s", writer->warning);
    stats->bytes_shared = writer->bytes_shared;
    stats->bytes_copied = writer->bytes_copied;
    stats->bytes_hashed = writer->bytes_hashed;
    stats->bytes_read = writer->bytes_read;
    pthread_mutex_unlock(&writer->lock);
    return FST_OK;
}
