// SPDX-License-Identifier: Apache-2.0
/// The manifest of a save: see save_manifest.h. Model and manifest cannot change in one step, so
/// the old manifest is deleted first and the new one is published last. A save that ends in between
/// leaves a model without a manifest, never one with a wrong manifest.
#include "save_manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "save_state.h"

char *fsti_save_manifest_usual(const fst_writer *writer) {
    const save_target *target = &writer->target;
    return target->folder != NULL
               ? target->kind->join(target->folder, SAVE_MANIFEST_NAME)
               : fsti_path_with_ending(target->published[0], SAVE_MANIFEST_ENDING);
}

// ---- digests ----

/// Whether the path is the saved model, or the one that it is made from.
static bool is_model(const fst_writer *writer, const char *path) {
    const char *origin =
        writer->source.origin == NULL ? NULL : fsti_file_path(writer->source.origin);
    if (origin != NULL && fsti_save_is_same_file(path, origin)) return true;
    for (uint32_t f = 0; f <= writer->contents.file_count; f++)
        if (writer->target.published[f] != NULL &&
            (fsti_location_is_same(path, writer->target.published[f]) ||
             fsti_save_is_same_file(path, writer->target.published[f])))
            return true;
    return false;
}

/// Whether two targets are one name of one folder, whether or not a file is there.
static bool is_same_target(const fsti_target *one, const fsti_target *other) {
    struct stat a, b;
    return strcmp(fsti_path_name(one->path), fsti_path_name(other->path)) == 0 &&
           stat(one->folder, &a) == 0 && stat(other->folder, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

/// Whether the manifest would overwrite a file of the save, also one that a link names whose target
/// does not exist yet.
static bool is_target_of_save(const fst_writer *writer) {
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        if (!writer->contents.files[f].target.is_object &&
            is_same_target(&writer->publication.manifest.target, &writer->contents.files[f].target))
            return true;
    return false;
}

fst_status fsti_save_manifest_check(const fst_writer *writer, const char *path, fst_error *error) {
    if (path == NULL || path[0] == '\0') return FST_OK;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (is_model(writer, path))
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "the manifest would overwrite the model");
    if (!fsti_path_is_model(path)) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "the manifest would overwrite a model. Choose another path");
}

/// `is_usual`: the path is where loads look for the manifest.
static fst_status find_target(fst_writer *writer, const char *path, bool is_usual,
                              fst_error *error) {
    save_manifest *manifest = &writer->publication.manifest;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    FST_TRY(fsti_save_manifest_check(writer, path, error));
    if (writer->contents.files[0].target.is_object && fsti_location_is_url(path)) {
        static const fsti_precondition nothing = {.kind = FSTI_PRECONDITION_ABSENT};
        FST_TRY(fsti_target_object(path, &manifest->target, error));
        manifest->target.watch = &writer->target.store.watch;
        // The old manifest is deleted first, so an object that exists then belongs to another save,
        // or is the model itself under another URL.
        if (writer->target.folder != NULL || !is_usual)
            manifest->target.expected_version = &nothing;
        return FST_OK;
    }
    FST_TRY(fsti_target_find(path, false, &manifest->target, error));
    if (is_target_of_save(writer))
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "the manifest would overwrite the model");
    // The manifest gets the model file's permissions.
    if (writer->contents.files[0].target.has_rights)
        (void)fsti_target_like(&manifest->target, writer->contents.files[0].target.path, NULL);
    return FST_OK;
}

static fst_status check_listed_names(const fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->contents.file_count; f++) {
        char *name = fsti_save_listed_name(writer, f);
        if (name == NULL) return fsti_error_memory(error, 64);
        fst_status status = fsti_utf8_require_name(name, writer->target.published[f], error);
        fsti_free(name);
        FST_TRY(status);
    }
    return FST_OK;
}

fst_status fsti_save_manifest_open(fst_writer *writer, fst_error *error) {
    const fst_save_options *options = &writer->options;
    if (options->manifest == NULL) return FST_OK;
    FST_TRY(check_listed_names(writer, error));
    const fsti_digest_kind *kind = fsti_digest_get(options->digest);
    FST_TRY(kind->ready(error));
    char *usual = options->manifest[0] == '\0' ? fsti_save_manifest_usual(writer) : NULL;
    if (usual == NULL && options->manifest[0] == '\0') return fsti_error_memory(error, 64);
    fst_status status =
        find_target(writer, usual == NULL ? options->manifest : usual, usual != NULL, error);
    fsti_free(usual);
    writer->publication.manifest.kind = status == FST_OK ? kind : NULL;
    writer->options.manifest = NULL; // owned by the caller and freed by it
    return status;
}

static fst_status digest_part(void *chunks, uint64_t offset, const void *data, uint64_t size_bytes,
                              fst_error *error) {
    return fsti_chunk_digests_put(chunks, offset, data, size_bytes, error);
}

/// An upload cannot be read back, so it is digested part by part while it is sent.
static fst_status begin_object(fst_writer *writer, save_file *file, fst_error *error) {
    FST_TRY(fsti_chunk_digests_open(writer->publication.manifest.kind, file->layout.file_bytes,
                                    &file->digests.chunks, error));
    fsti_output_observe_parts(file->output, digest_part, file->digests.chunks);
    return FST_OK;
}

fst_status fsti_save_manifest_begin(fst_writer *writer, save_file *file, fst_error *error) {
    // Digest while writing only if these are the final bytes: not before compression, not for
    // copies of another file, and not for files written by other processes.
    if (writer->options.compress != FST_COMPRESS_NONE || writer->source.is_whole ||
        writer->options.others_write != 0)
        return FST_OK;
    if (file->target.is_object) return begin_object(writer, file, error);
    const fst_layout *layout = &file->layout;
    FST_TRY(fsti_chunk_digests_open(writer->publication.manifest.kind, layout->file_bytes,
                                    &file->digests.chunks, error));
    file->digests.passing = file->digests.chunks;
    // The header first, because streamed tensors may arrive before it is written.
    return fsti_chunk_digests_put(file->digests.chunks, 0, layout->header, layout->header_bytes,
                                  error);
}

/// Reads the header of a file whose layout is not the writer's: compressed, or written by others.
static fst_status read_header(const written_file *written, char **out, uint64_t *size_bytes,
                              fst_error *error) {
    unsigned char length[8];
    FST_TRY(fsti_written_read(written, (char *)length, 0, sizeof length, error));
    *size_bytes = sizeof length + fsti_number_load(length, sizeof length);
    *out = fsti_alloc((size_t)*size_bytes);
    if (*out == NULL) return fsti_error_memory(error, *size_bytes);
    return fsti_written_read(written, *out, 0, *size_bytes, error);
}

static fst_status begin_reading(save_file *file, const fsti_digest_kind *kind,
                                const written_file *written, fst_error *error) {
    struct stat info;
    char *header = NULL;
    file_digests *digests = &file->digests;
    if (fstat(written->descriptor, &info) != 0)
        return fsti_error_errno(error, errno, written->path, "examining the written file");
    FST_TRY(fsti_chunk_digests_open(kind, (uint64_t)info.st_size, &digests->chunks, error));
    fst_status status = read_header(written, &header, &digests->header_bytes, error);
    if (status == FST_OK && !kind->hash(header, (size_t)digests->header_bytes, digests->header))
        status = fsti_error_memory(error, digests->header_bytes);
    fsti_free(header);
    return status;
}

fst_status fsti_save_manifest_end(fst_writer *writer, save_file *file, fst_error *error) {
    const fsti_digest_kind *kind = writer->publication.manifest.kind;
    file_digests *digests = &file->digests;
    written_file written = {fsti_output_descriptor(file->output), fsti_output_path(file->output)};
    if (digests->chunks == NULL) {
        FST_TRY(begin_reading(file, kind, &written, error));
    } else {
        digests->header_bytes = file->layout.header_bytes;
        if (!kind->hash(file->layout.header, (size_t)digests->header_bytes, digests->header))
            return fsti_error_memory(error, digests->header_bytes);
    }
    FST_TRY(fsti_chunk_digests_complete(digests->chunks, &written, error));
    pthread_mutex_lock(&writer->progress.lock);
    writer->progress.bytes_hashed += fsti_chunk_digests_file_bytes(digests->chunks);
    writer->progress.bytes_read += fsti_chunk_digests_read_bytes(digests->chunks);
    pthread_mutex_unlock(&writer->progress.lock);
    return FST_OK;
}

// ---- the text ----

static int compare_rows(const void *a, const void *b) {
    const fsti_manifest_file *one = a, *other = b;
    return strcmp(one->name, other->name);
}

static void name_row(const fst_writer *writer, uint32_t file, fsti_manifest_file *row) {
    row->name = fsti_save_listed_name(writer, file);
    row->name_size = row->name == NULL ? 0 : strlen(row->name);
}

static fsti_manifest_file make_row(const fst_writer *writer, uint32_t file) {
    const file_digests *digests = &writer->contents.files[file].digests;
    fsti_manifest_file row = {.size_bytes = fsti_chunk_digests_file_bytes(digests->chunks),
                              .header_bytes = digests->header_bytes,
                              .digests = fsti_chunk_digests_list(digests->chunks)};
    memcpy(row.header, digests->header, sizeof row.header);
    name_row(writer, file, &row);
    return row;
}

static bool has_names(const fsti_manifest_file *rows, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (rows[i].name == NULL) return false;
    return true;
}

static void free_rows(fsti_manifest_file *rows, size_t count) {
    for (size_t i = 0; i < count; i++) fsti_free((char *)(uintptr_t)rows[i].name);
    fsti_free(rows);
}

/// The index of a sharded model, and its digests.
typedef struct set_index {
    const char *text; ///< NULL: not sharded
    size_t size_bytes;
    chunk_digests *chunks;
} set_index;

static fst_status digest_index(const fsti_digest_kind *kind, set_index *index, fst_error *error) {
    if (index->text == NULL) return FST_OK;
    FST_TRY(fsti_chunk_digests_open(kind, index->size_bytes, &index->chunks, error));
    return fsti_chunk_digests_put(index->chunks, 0, index->text, index->size_bytes, error);
}

static fst_status make_text(const fst_writer *writer, const set_index *index, char **text,
                            size_t *size, fst_error *error) {
    size_t count = writer->contents.file_count + (index->text == NULL ? 0u : 1u);
    fsti_manifest_file *rows = fsti_alloc_zeroed(count, sizeof *rows);
    if (rows == NULL) return fsti_error_memory(error, count * sizeof *rows);
    for (uint32_t f = 0; f < writer->contents.file_count; f++) rows[f] = make_row(writer, f);
    if (index->text != NULL) {
        rows[count - 1] = (fsti_manifest_file){.size_bytes = index->size_bytes,
                                               .digests = fsti_chunk_digests_list(index->chunks)};
        name_row(writer, writer->contents.file_count, &rows[count - 1]);
    }
    fst_status status = FST_OK;
    if (!has_names(rows, count)) status = fsti_error_memory(error, count);
    if (status == FST_OK) {
        qsort(rows, count, sizeof *rows, compare_rows);
        fsti_manifest_draft draft = {.kind = writer->publication.manifest.kind,
                                     .chunk_bytes = SAVE_CHUNK_BYTES,
                                     .files = rows,
                                     .file_count = count};
        status = fsti_manifest_write(&draft, text, size, error);
    }
    free_rows(rows, count);
    return status;
}

fst_status fsti_save_manifest_write(fst_writer *writer, const char *index_text, size_t index_bytes,
                                    fst_error *error) {
    save_manifest *manifest = &writer->publication.manifest;
    set_index index = {.text = index_text, .size_bytes = index_bytes};
    char *text = NULL;
    size_t size = 0;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    fst_status status = digest_index(manifest->kind, &index, error);
    if (status == FST_OK) status = make_text(writer, &index, &text, &size, error);
    if (status == FST_OK)
        status = fsti_output_open(&manifest->target, size, durable, &manifest->output, error);
    if (status == FST_OK) status = fsti_output_write(manifest->output, text, size, 0, error);
    if (status == FST_OK && durable)
        status = fsti_progress_sync(&writer->progress, manifest->output, error);
    fsti_chunk_digests_close(index.chunks);
    fsti_free(text);
    return status;
}

bool fsti_save_manifest_is_own(const fst_writer *writer, const fsti_leftover *leftover) {
    char *usual = fsti_save_manifest_usual(writer);
    const char *own = writer->publication.manifest.target.path;
    bool is_own = (usual != NULL && fsti_leftover_is_of(leftover, fsti_path_name(usual))) ||
                  (own != NULL && fsti_leftover_is_of(leftover, fsti_path_name(own)));
    fsti_free(usual);
    return is_own;
}
