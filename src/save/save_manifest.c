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

#define FILE_ENDING ".manifest"
#define FOLDER_NAME "model.manifest"
#define DIGEST_ENDING ".digest"

/// `folder`/`name``ending`, or without folder. From fsti_alloc().
static char *join(const char *folder, const char *name, const char *ending) {
    size_t capacity = strlen(name) + strlen(ending) + 2;
    if (folder != NULL) capacity += strlen(folder);
    char *path = fsti_alloc(capacity);
    if (path != NULL)
        snprintf(path, capacity, "%s%s%s%s", folder == NULL ? "" : folder,
                 folder == NULL ? "" : "/", name, ending);
    return path;
}

/// The path where loads look for the manifest.
static char *usual_path(const fst_writer *writer) {
    if (writer->is_remote && writer->folder != NULL)
        return fsti_url_sibling(writer->published[0], FOLDER_NAME);
    return writer->folder != NULL ? join(writer->folder, FOLDER_NAME, "")
                                  : join(NULL, writer->published[0], FILE_ENDING);
}

// ---- digests ----

/// Whether the path is the saved model, or the one that it is made from.
static bool is_model(const fst_writer *writer, const char *path) {
    const char *origin = writer->origin == NULL ? NULL : fsti_file_path(writer->origin);
    if (origin != NULL && fsti_save_is_same_file(path, origin)) return true;
    for (uint32_t f = 0; f <= writer->file_count; f++)
        if (writer->published[f] != NULL && (fsti_location_is_same(path, writer->published[f]) ||
                                             fsti_save_is_same_file(path, writer->published[f])))
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

/// The saved file may lie behind a link that led nowhere until now.
static bool is_target_of_save(const fst_writer *writer) {
    for (uint32_t f = 0; !writer->is_remote && f < writer->file_count; f++)
        if (is_same_target(&writer->manifest.target, &writer->files[f].target)) return true;
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

static fst_status find_target(fst_writer *writer, const char *path, fst_error *error) {
    save_manifest *manifest = &writer->manifest;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    FST_TRY(fsti_save_manifest_check(writer, path, error));
    if (writer->is_remote && fsti_location_is_url(path)) {
        static const fsti_precondition nothing = {.kind = FSTI_PRECONDITION_ABSENT};
        FST_TRY(fsti_target_object(path, &manifest->target, error));
        manifest->target.watch = &writer->watch;
        // The old one is deleted first, so a manifest that exists then belongs to another save.
        if (writer->folder != NULL) manifest->target.expected_version = &nothing;
        return FST_OK;
    }
    FST_TRY(fsti_target_find(path, false, &manifest->target, error));
    if (is_target_of_save(writer))
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "the manifest would overwrite the model");
    // The manifest gets the model file's permissions.
    if (writer->files[0].target.has_rights)
        (void)fsti_target_like(&manifest->target, writer->files[0].target.path, NULL);
    return FST_OK;
}

fst_status fsti_save_manifest_open(fst_writer *writer, fst_error *error) {
    const fst_save_options *options = &writer->options;
    if (options->manifest == NULL) return FST_OK;
    const fsti_digest_kind *kind = fsti_digest_get(options->digest);
    FST_TRY(kind->ready(error));
    char *usual = options->manifest[0] == '\0' ? usual_path(writer) : NULL;
    if (usual == NULL && options->manifest[0] == '\0') return fsti_error_memory(error, 64);
    fst_status status = find_target(writer, usual == NULL ? options->manifest : usual, error);
    fsti_free(usual);
    writer->manifest.kind = status == FST_OK ? kind : NULL;
    writer->options.manifest = NULL; // owned by the caller and freed by it
    return status;
}

static fst_status digest_part(void *chunks, uint64_t offset, const void *data, uint64_t size_bytes,
                              fst_error *error) {
    return fsti_chunk_digests_put(chunks, offset, data, size_bytes, error);
}

/// An upload cannot be read back, so it is digested part by part while it is sent.
static fst_status begin_object(fst_writer *writer, save_file *file, fst_error *error) {
    FST_TRY(fsti_chunk_digests_open(writer->manifest.kind, file->layout.file_bytes,
                                    &file->listed.chunks, error));
    fsti_output_observe_parts(file->output, digest_part, file->listed.chunks);
    return FST_OK;
}

chunk_digests *fsti_save_manifest_passing(const fst_writer *writer, const save_file *file) {
    return writer->is_remote ? NULL : file->listed.chunks;
}

fst_status fsti_save_manifest_begin(fst_writer *writer, save_file *file, fst_error *error) {
    // Digest while writing only if these are the final bytes: not before compression, not for
    // copies of another file, and not for files written by other processes.
    if (writer->options.compress != FST_COMPRESS_NONE || writer->is_whole ||
        writer->options.others_write != 0)
        return FST_OK;
    if (writer->is_remote) return begin_object(writer, file, error);
    const fst_layout *layout = &file->layout;
    FST_TRY(fsti_chunk_digests_open(writer->manifest.kind, layout->file_bytes, &file->listed.chunks,
                                    error));
    // The header first, because streamed tensors may arrive before it is written.
    return fsti_chunk_digests_put(file->listed.chunks, 0, layout->header, layout->header_bytes,
                                  error);
}

/// Reads the header of a file whose layout is not the writer's: compressed, or written by others.
static fst_status read_header(const written_file *written, char **out, uint64_t *size_bytes,
                              fst_error *error) {
    unsigned char length[8];
    FST_TRY(fsti_written_read(written, (char *)length, 0, sizeof length, error));
    *size_bytes = sizeof length;
    for (unsigned i = 0; i < sizeof length; i++) *size_bytes += (uint64_t)length[i] << 8 * i;
    *out = fsti_alloc((size_t)*size_bytes);
    if (*out == NULL) return fsti_error_memory(error, *size_bytes);
    return fsti_written_read(written, *out, 0, *size_bytes, error);
}

static fst_status begin_reading(save_file *file, const fsti_digest_kind *kind,
                                const written_file *written, fst_error *error) {
    struct stat info;
    char *header = NULL;
    listed_file *listed = &file->listed;
    if (fstat(written->descriptor, &info) != 0)
        return fsti_error_errno(error, errno, written->path, "examining the written file");
    FST_TRY(fsti_chunk_digests_open(kind, (uint64_t)info.st_size, &listed->chunks, error));
    fst_status status = read_header(written, &header, &listed->header_bytes, error);
    if (status == FST_OK && !kind->hash(header, (size_t)listed->header_bytes, listed->header))
        status = fsti_error_memory(error, listed->header_bytes);
    fsti_free(header);
    return status;
}

fst_status fsti_save_manifest_end(fst_writer *writer, save_file *file, fst_error *error) {
    const fsti_digest_kind *kind = writer->manifest.kind;
    listed_file *listed = &file->listed;
    written_file written = {fsti_output_descriptor(file->output), fsti_output_path(file->output)};
    if (listed->chunks == NULL) {
        FST_TRY(begin_reading(file, kind, &written, error));
    } else {
        listed->header_bytes = file->layout.header_bytes;
        if (!kind->hash(file->layout.header, (size_t)listed->header_bytes, listed->header))
            return fsti_error_memory(error, listed->header_bytes);
    }
    FST_TRY(fsti_chunk_digests_complete(listed->chunks, &written, error));
    pthread_mutex_lock(&writer->lock);
    writer->bytes_hashed += fsti_chunk_digests_file_bytes(listed->chunks);
    writer->bytes_read += fsti_chunk_digests_read_bytes(listed->chunks);
    pthread_mutex_unlock(&writer->lock);
    return FST_OK;
}

// ---- the text ----

static int compare_rows(const void *a, const void *b) {
    const fsti_manifest_file *one = a, *other = b;
    return strcmp(one->name, other->name);
}

static fsti_manifest_file make_row(const fst_writer *writer, uint32_t file) {
    const listed_file *listed = &writer->files[file].listed;
    const char *name = fsti_path_name(writer->published[file]);
    fsti_manifest_file row = {.name = name,
                              .name_size = strlen(name),
                              .size_bytes = fsti_chunk_digests_file_bytes(listed->chunks),
                              .header_bytes = listed->header_bytes,
                              .digests = fsti_chunk_digests_list(listed->chunks)};
    memcpy(row.header, listed->header, sizeof row.header);
    return row;
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
    size_t count = writer->file_count + (index->text == NULL ? 0u : 1u);
    fsti_manifest_file *rows = fsti_alloc_zeroed(count, sizeof *rows);
    if (rows == NULL) return fsti_error_memory(error, count * sizeof *rows);
    for (uint32_t f = 0; f < writer->file_count; f++) rows[f] = make_row(writer, f);
    if (index->text != NULL) {
        const char *name = fsti_path_name(writer->published[writer->file_count]);
        rows[count - 1] = (fsti_manifest_file){.name = name,
                                               .name_size = strlen(name),
                                               .size_bytes = index->size_bytes,
                                               .digests = fsti_chunk_digests_list(index->chunks)};
    }
    qsort(rows, count, sizeof *rows, compare_rows);
    fsti_manifest_draft draft = {.kind = writer->manifest.kind,
                                 .chunk_bytes = SAVE_CHUNK_BYTES,
                                 .files = rows,
                                 .file_count = count};
    fst_status status = fsti_manifest_write(&draft, text, size, error);
    fsti_free(rows);
    return status;
}

fst_status fsti_save_manifest_write(fst_writer *writer, const char *index_text, size_t index_bytes,
                                    fst_error *error) {
    save_manifest *manifest = &writer->manifest;
    set_index index = {.text = index_text, .size_bytes = index_bytes};
    char *text = NULL;
    size_t size = 0;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    fst_status status = digest_index(manifest->kind, &index, error);
    if (status == FST_OK) status = make_text(writer, &index, &text, &size, error);
    if (status == FST_OK)
        status = fsti_output_open(&manifest->target, size, durable, &manifest->output, error);
    if (status == FST_OK) status = fsti_output_write(manifest->output, text, size, 0, error);
    if (status == FST_OK && durable) status = fsti_writer_sync(writer, manifest->output, error);
    fsti_chunk_digests_close(index.chunks);
    fsti_free(text);
    return status;
}

// ---- names ----

/// First words of files that this package writes next to a model and that describe its bytes.
static const char *const first_words[] = {JOURNAL_MANIFEST_WORD, "fastsafetensors-digest "};
#define FIRST_WORD_BYTES_MAX 32u

/// Sets *describes if the file exists and describes a model. A file that cannot be opened or read
/// is an error, at a point where nothing has been changed.
static fst_status check_manifest_kind(const char *path, bool *describes, fst_error *error) {
    char start[FIRST_WORD_BYTES_MAX];
    *describes = false;
    // A link is followed to look at the content; the link itself is what a save deletes.
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        bool is_none = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENXIO ||
                       errno == ENAMETOOLONG;
        return is_none ? FST_OK
                       : fsti_error_errno(error, errno, path, "examining the old manifest");
    }
    ssize_t got = read(fd, start, sizeof start);
    for (size_t i = 0; i < sizeof first_words / sizeof *first_words; i++) {
        size_t size = strlen(first_words[i]);
        if (got >= (ssize_t)size && memcmp(start, first_words[i], size) == 0) *describes = true;
    }
    close(fd);
    return FST_OK;
}

/// Adds the step that moves the file aside if it describes the model's bytes. Frees `path`.
static fst_status add_aside(fst_writer *writer, char *path, fst_error *error) {
    bool describes = false;
    if (path == NULL) return fsti_error_memory(error, 64);
    bool is_url = fsti_location_is_url(path); // its content is checked when the step runs
    fst_status status = is_url
                            ? fsti_journal_add_aside(&writer->journal, path, &writer->watch, error)
                            : check_manifest_kind(path, &describes, error);
    if (status == FST_OK && describes)
        status = fsti_journal_add_path(&writer->journal, STEP_ASIDE, path, error);
    fsti_free(path);
    return status;
}

static fst_status add_sync(fst_writer *writer, const char *folder, fst_error *error) {
    if (writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    return fsti_journal_add_path(&writer->journal, STEP_SYNC, folder, error);
}

/// Adds the manifest and the .digest file of one model file.
static fst_status add_sidecars(fst_writer *writer, const char *path, fst_error *error) {
    FST_TRY(add_aside(writer, join(NULL, path, FILE_ENDING), error));
    return add_aside(writer, join(NULL, path, DIGEST_ENDING), error);
}

/// Adds the .digest file of the folder, which lies next to it.
static fst_status add_folder_digests(fst_writer *writer, fst_error *error) {
    size_t size = strlen(writer->folder);
    while (size > 1 && writer->folder[size - 1] == '/') size--;
    char *folder = fsti_string_copy(writer->folder, size);
    if (folder == NULL) return fsti_error_memory(error, size);
    fst_status status = add_aside(writer, join(NULL, folder, DIGEST_ENDING), error);
    fsti_free(folder);
    return status;
}

fst_status fsti_save_manifest_aside(fst_writer *writer, fst_error *error) {
    const save_manifest *manifest = &writer->manifest;
    size_t before = writer->journal.count;
    for (uint32_t f = 0; f <= writer->file_count; f++) {
        const char *path = writer->published[f];
        if (path == NULL) continue;
        FST_TRY(add_sidecars(writer, path, error));
        // After following a link, the file's own name may have a manifest as well.
        if (f < writer->file_count && strcmp(path, writer->files[f].target.path) != 0)
            FST_TRY(add_sidecars(writer, writer->files[f].target.path, error));
    }
    if (writer->folder != NULL) {
        FST_TRY(add_aside(writer, join(writer->folder, FOLDER_NAME, ""), error));
        FST_TRY(add_folder_digests(writer, error));
    }
    // A model may have been saved there since the path was checked.
    if (manifest->kind != NULL)
        FST_TRY(fsti_save_manifest_check(writer, manifest->target.path, error));
    // Deleting a missing file is not an error.
    if (manifest->kind != NULL)
        FST_TRY(add_aside(writer, join(NULL, manifest->target.path, ""), error));
    if (writer->journal.count == before) return FST_OK;
    return add_sync(writer, writer->files[0].target.folder, error);
}

fst_status fsti_save_manifest_aside_objects(fst_writer *writer, fst_error *error) {
    const remote_objects *remote_state = &writer->remote_state;
    const char *own = writer->manifest.target.path;
    if (fsti_store_forbids_overwrite()) return FST_OK; // then nothing is replaced
    char *usual = usual_path(writer);
    if (usual == NULL) return fsti_error_memory(error, 64);
    bool is_other = own != NULL && strcmp(own, usual) != 0;
    FST_TRY(add_aside(writer, usual, error));
    for (size_t i = 0; i < remote_state->manifest_count; i++)
        FST_TRY(add_aside(writer, join(NULL, remote_state->manifests[i], ""), error));
    return is_other ? add_aside(writer, join(NULL, own, ""), error) : FST_OK;
}

fst_status fsti_save_manifest_place(fst_writer *writer, fst_error *error) {
    const save_manifest *manifest = &writer->manifest;
    if (manifest->output == NULL) return FST_OK;
    FST_TRY(fsti_journal_add(&writer->journal, STEP_PLACE, manifest->output, error));
    if (manifest->target.is_object) return FST_OK;
    return add_sync(writer, manifest->target.folder, error);
}

bool fsti_save_manifest_is_own(const fst_writer *writer, const fsti_leftover *leftover) {
    char *usual = usual_path(writer);
    const char *own = writer->manifest.target.path;
    bool is_own = (usual != NULL && fsti_leftover_is_of(leftover, fsti_path_name(usual))) ||
                  (own != NULL && fsti_leftover_is_of(leftover, fsti_path_name(own)));
    fsti_free(usual);
    return is_own;
}
