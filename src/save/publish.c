// SPDX-License-Identifier: Apache-2.0
/// A save's end: finished files get their names. One file is one rename. A set takes several, and
/// at every instant the index leads to whole files of one save:
///
///   1. new shards under hidden names, an index that names these comes into place
///   2. the shards take their names (nobody looks at the old ones any more)
///   3. the final index comes into place
///   4. hidden names, and files of earlier sets, go
///
/// Steps 1 and 3 are one where nothing of an earlier save is met. Where a single file replaces a
/// set, an index leads to it until the old shards are gone.
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "writer.h"

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static fst_status sync_folder(fst_writer *writer, const char *folder, fst_error *error) {
    if (writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    uint64_t start = fsti_now_ns();
    writer->sync_count++;
    fst_status status = fsti_folder_sync(folder, error);
    writer->sync_ns += fsti_now_ns() - start;
    return status;
}

// ---- the index ----

static const char *row_file(const fst_writer *writer, const save_tensor *tensor, bool hidden) {
    save_file *file = &writer->files[tensor->file];
    const char *name = NULL;
    if (hidden && fsti_output_link(file->output, &name, NULL) == FST_OK) return name;
    return file_name(writer->published[tensor->file]);
}

static fst_status make_index_text(const fst_writer *writer, bool hidden, char **text, size_t *size,
                                  fst_error *error) {
    size_t count = writer->tensor_count;
    uint64_t total_bytes = 0;
    fsti_index_row *rows = fsti_alloc((count + 1) * sizeof *rows);
    if (rows == NULL) return fsti_error_memory(error, count * sizeof *rows);
    for (size_t i = 0; i < count; i++) {
        const save_tensor *tensor = &writer->tensors[i];
        total_bytes += tensor->size_bytes;
        rows[i] =
            (fsti_index_row){tensor->name, tensor->name_size, row_file(writer, tensor, hidden)};
    }
    fst_status status = fsti_index_write(rows, count, total_bytes, text, size, error);
    fsti_free(rows);
    return status;
}

static fst_status put_index_file(fst_writer *writer, const char *text, size_t size,
                                 fst_error *error) {
    fsti_output *output = NULL;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    FST_TRY(fsti_output_open(&writer->index_target, size, durable, &output, error));
    fst_status status = fsti_output_write(output, text, size, 0, error);
    if (status == FST_OK && durable) status = fsti_save_sync(writer, output, error);
    if (status == FST_OK) status = fsti_output_publish(output, false, NULL, error);
    fsti_output_close(output);
    if (status == FST_OK) status = sync_folder(writer, writer->index_target.folder, error);
    return status;
}

static fst_status put_index(fst_writer *writer, bool hidden, fst_error *error) {
    char *text = NULL;
    size_t size = 0;
    FST_TRY(make_index_text(writer, hidden, &text, &size, error));
    fst_status status = put_index_file(writer, text, size, error);
    fsti_free(text);
    return status;
}

// ---- what an earlier set has left ----

/// "<stem>-00001-of-00003.safetensors", any numbers.
static bool is_shard_name(const char *name, const char *stem) {
    static const char pattern[] = "-#####-of-#####.safetensors";
    size_t size = strlen(stem);
    if (strncmp(name, stem, size) != 0 || strlen(name + size) != sizeof pattern - 1) return false;
    for (size_t i = 0; i < sizeof pattern - 1; i++) {
        char byte = name[size + i];
        if (pattern[i] == '#' ? !isdigit((unsigned char)byte) : byte != pattern[i]) return false;
    }
    return true;
}

static bool is_stale(const fst_writer *writer, const char *name) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        if (strcmp(name, file_name(writer->published[f])) == 0) return false;
    size_t size = strlen(writer->stem);
    bool is_single =
        strncmp(name, writer->stem, size) == 0 && strcmp(name + size, ".safetensors") == 0;
    return is_single || is_shard_name(name, writer->stem);
}

/// Removes files of earlier sets. What can't be removed stays: the new set is whole without that.
static void remove_stale(const fst_writer *writer) {
    DIR *folder = opendir(writer->folder);
    if (folder == NULL) return;
    const struct dirent *entry;
    int fd = dirfd(folder);
    while (fd >= 0 && (entry = readdir(folder)) != NULL)
        if (is_stale(writer, entry->d_name)) unlinkat(fd, entry->d_name, 0);
    closedir(folder);
}

// ---- the steps ----

/// Whether something of an earlier save would be mixed up with the new shards: one of the same
/// name, or, for who opens the folder before there is an index, the model in one file.
static bool meets_earlier(const fst_writer *writer) {
    char path[PATH_MAX];
    for (uint32_t f = 0; f < writer->file_count; f++)
        if (writer->files[f].target.exists) return true;
    int size = snprintf(path, sizeof path, "%s/%s.safetensors", writer->folder, writer->stem);
    return size > 0 && (size_t)size < sizeof path && access(path, F_OK) == 0;
}

static fst_status link_files(fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_output_link(writer->files[f].output, NULL, error));
    return FST_OK;
}

static fst_status publish_files(fst_writer *writer, bool keep_hidden, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++) {
        save_file *file = &writer->files[f];
        FST_TRY(fsti_output_publish(file->output, keep_hidden, &file->keeps_hidden, error));
    }
    return FST_OK;
}

static void drop_hidden(fst_writer *writer) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        if (writer->files[f].keeps_hidden) fsti_output_drop_hidden(writer->files[f].output);
}

static fst_status publish_set(fst_writer *writer, fst_error *error) {
    bool single = writer->file_count == 1;
    bool had_index = writer->index_target.exists;
    bool in_two_steps = !single && meets_earlier(writer);
    if (in_two_steps) {
        FST_TRY(link_files(writer, error));
        FST_TRY(put_index(writer, true, error));
    }
    FST_TRY(publish_files(writer, in_two_steps, error));
    FST_TRY(sync_folder(writer, writer->folder, error));
    if (!single || had_index) FST_TRY(put_index(writer, false, error));
    drop_hidden(writer);
    remove_stale(writer);
    if (single && had_index) unlink(writer->published[writer->file_count]);
    return sync_folder(writer, writer->folder, error);
}

fst_status fsti_writer_commit(fst_writer *writer, fst_error *error) {
    if (!writer->is_finished) FST_TRY(fsti_writer_finish(writer, error));
    if (writer->is_committed || writer->is_broken)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE, "the save %s",
                              writer->is_broken ? "has failed" : "is committed");
    fst_status status;
    if (writer->folder != NULL) {
        status = publish_set(writer, error);
    } else {
        status = publish_files(writer, false, error);
        if (status == FST_OK) status = sync_folder(writer, writer->files[0].target.folder, error);
    }
    writer->is_broken = status != FST_OK;
    writer->is_committed = status == FST_OK;
    writer->total_ns = fsti_now_ns() - writer->start_ns;
    return status;
}
