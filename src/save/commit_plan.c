// SPDX-License-Identifier: Apache-2.0
/// Writes what a save adds to its files: the index of a sharded model, and the manifest.
#include "commit_plan.h"

#include <string.h>

static void free_names(char **names, uint32_t count) {
    for (uint32_t f = 0; names != NULL && f < count; f++) fsti_free(names[f]);
    fsti_free(names);
}

/// The names by which the index refers to the files, or NULL without memory.
static char **name_files(const fst_writer *writer, bool hidden) {
    uint32_t count = writer->contents.file_count;
    char **names = fsti_alloc_zeroed(count, sizeof *names);
    for (uint32_t f = 0; names != NULL && f < count; f++) {
        const char *name = hidden ? fsti_output_hidden(writer->contents.files[f].output) : NULL;
        names[f] = hidden ? fsti_string_copy(name, strlen(name)) : fsti_save_listed_name(writer, f);
        if (names[f] != NULL) continue;
        free_names(names, count);
        return NULL;
    }
    return names;
}

static fst_status make_index_text(const fst_writer *writer, bool hidden, char **text, size_t *size,
                                  fst_error *error) {
    size_t count = writer->contents.tensor_count;
    uint64_t total_bytes = 0;
    fsti_index_row *rows = fsti_alloc((count + 1) * sizeof *rows);
    char **names = name_files(writer, hidden);
    fst_status status = FST_OK;
    if (rows == NULL || names == NULL) status = fsti_error_memory(error, count * sizeof *rows);
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        const save_tensor *tensor = &writer->contents.tensors[i];
        total_bytes += tensor->size_bytes;
        rows[i] = (fsti_index_row){tensor->name, tensor->name_size, names[tensor->file]};
    }
    if (status == FST_OK) status = fsti_index_write(rows, count, total_bytes, text, size, error);
    free_names(names, writer->contents.file_count);
    fsti_free(rows);
    if (status != FST_OK || *size <= FSTI_FORMAT_TEXT_BYTES_MAX) return status;
    fsti_free(*text);
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the index would have %zu bytes, more than readers accept, 1 GiB", *size);
}

/// Writes an index and syncs it if durable, before any name changes, so that a full disk is noticed
/// now.
fst_status fsti_commit_make_index(fst_writer *writer, bool hidden, fsti_output **out,
                                  fst_error *error) {
    char *text = NULL;
    size_t size = 0;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    FST_TRY(make_index_text(writer, hidden, &text, &size, error));
    fst_status status = fsti_output_open(&writer->target.index, size, durable, out, error);
    if (status == FST_OK) status = fsti_output_write(*out, text, size, 0, error);
    if (status == FST_OK && durable && !writer->target.index.is_object)
        status = fsti_progress_sync(&writer->progress, *out, error);
    fsti_free(text);
    return status;
}

/// Writes the manifest's text, if requested. It includes the final index of a sharded model.
fst_status fsti_commit_make_manifest(fst_writer *writer, fst_error *error) {
    char *index = NULL;
    size_t size = 0;
    if (writer->publication.manifest.kind == NULL) return FST_OK;
    if (writer->publication.final_index != NULL && writer->contents.file_count > 1)
        FST_TRY(make_index_text(writer, false, &index, &size, error));
    fst_status status = fsti_save_manifest_write(writer, index, size, error);
    fsti_free(index);
    return status;
}

fst_status fsti_commit_add_files(fst_writer *writer, const fsti_step_kind *kind, fst_error *error) {
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        FST_TRY(fsti_journal_add_output(&writer->publication.journal, kind,
                                        writer->contents.files[f].output, error));
    return FST_OK;
}
