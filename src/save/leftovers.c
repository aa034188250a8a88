// SPDX-License-Identifier: Apache-2.0
/// Temporary files that killed saves left behind and that will never be published.
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"
#include "save_state.h"

/// The name of the model file whose manifest or digests the temporary file was to become; else the
/// name that it was to get.
static fsti_leftover described_by(const fsti_leftover *leftover) {
    static const char *const endings[] = {SAVE_MANIFEST_ENDING, SAVE_DIGEST_ENDING};
    fsti_leftover model = *leftover;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t size = strlen(endings[i]);
        if (model.base_size > size &&
            memcmp(model.base + model.base_size - size, endings[i], size) == 0)
            model.base_size -= size;
    }
    return model;
}

/// Whether a temporary file belongs to a target of this writer.
static bool is_own(const fst_writer *writer, const fsti_leftover *leftover) {
    const fsti_leftover model = described_by(leftover);
    const char *base = model.base;
    size_t size = model.base_size;
    if (fsti_save_manifest_is_own(writer, leftover)) return true;
    if (writer->target.folder == NULL &&
        fsti_leftover_is_of(&model, fsti_path_name(writer->contents.files[0].target.path)))
        return true;
    if (writer->target.folder == NULL)
        return fsti_leftover_is_of(leftover, fsti_path_name(writer->contents.files[0].target.path));
    // Of a long name only the beginning is known, so the model is not determined.
    if (fsti_leftover_is_cut(leftover)) {
        size_t stem_size = strlen(writer->target.stem);
        return memcmp(base, writer->target.stem, stem_size < size ? stem_size : size) == 0;
    }
    return fsti_save_is_shard(base, size, writer->target.stem) ||
           fsti_save_is_single(base, size, writer->target.stem) ||
           fsti_save_is_index(base, size, writer->target.stem);
}

// ---- names in indexes ----

/// Temporary files that an index of the folder refers to, because a save was killed while
/// publishing.
typedef struct used_names {
    const char *folder;
    fsti_index *indexes;
    size_t count, capacity;
} used_names;

static fst_status add_index(void *context, const fsti_folder_entry *entry, fst_error *error) {
    used_names *used = context;
    const char *name = entry->name;
    if (name[0] == '.' || !fsti_name_is_index(name)) return FST_OK;
    if (!fsti_array_reserve((void **)&used->indexes, &used->capacity, used->count,
                            sizeof *used->indexes, INT32_MAX))
        return fsti_error_memory(error, sizeof *used->indexes);
    fsti_index *index = &used->indexes[used->count++];
    *index = (fsti_index){0};
    return fsti_save_read_index(used->folder, name, index, error);
}

static fst_status read_indexes(used_names *used, fst_error *error) {
    return fsti_folder_visit(used->folder, add_index, used, error);
}

static bool is_used(const used_names *used, const char *name) {
    for (size_t i = 0; i < used->count; i++)
        for (size_t f = 0; f < used->indexes[i].file_count; f++)
            if (strcmp(used->indexes[i].bytes + used->indexes[i].files[f].at, name) == 0)
                return true;
    return false;
}

static void clear_used(used_names *used) {
    for (size_t i = 0; i < used->count; i++) fsti_index_clear(&used->indexes[i]);
    fsti_free(used->indexes);
}

// ---- cleanup by the next save of the same target ----

typedef struct leftover_sweep {
    fst_writer *writer;
    used_names used;
    /// Indexes are read only once there is a file to delete. If that failed, nothing is deleted.
    bool tried_indexes, has_indexes;
} leftover_sweep;

static void remove_leftover(void *context, const fsti_leftover *leftover) {
    leftover_sweep *sweep = context;
    if (leftover->has_owner || !is_own(sweep->writer, leftover)) return;
    if (!sweep->tried_indexes) sweep->has_indexes = read_indexes(&sweep->used, NULL) == FST_OK;
    sweep->tried_indexes = true;
    if (!sweep->has_indexes || is_used(&sweep->used, leftover->name)) return;
    if (unlinkat(leftover->folder, leftover->name, 0) != 0) return;
    sweep->writer->progress.leftover_count++;
    fsti_log(FST_LOG_INFO, "removed %s, left by a killed save", leftover->name);
}

void fsti_writer_sweep(fst_writer *writer) {
    leftover_sweep sweep = {.writer = writer};
    sweep.used.folder = writer->target.folder != NULL ? writer->target.folder
                                                      : writer->contents.files[0].target.folder;
    // The save has succeeded, so failures of cleanup are ignored.
    if (fsti_leftovers_visit(sweep.used.folder, remove_leftover, &sweep, NULL) != FST_OK)
        fsti_log(FST_LOG_WARNING, "%s could not be searched for leftovers", sweep.used.folder);
    clear_used(&sweep.used);
}

// ---- files handed over and not published ----

static bool has_output_file(const fsti_output *output) {
    struct stat info;
    return lstat(fsti_output_hidden_path(output), &info) == 0;
}

void fsti_writer_take_back(fst_writer *writer) {
    used_names used = {.folder = writer->contents.files[0].target.folder};
    int lock = -1;
    uint32_t left = 0;
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        left += has_output_file(writer->contents.files[f].output);
    if (left == 0) return;
    // Without this lock another process may be publishing, so the files stay for the next save.
    bool has_indexes =
        fsti_folder_lock(used.folder, &lock, NULL) == FST_OK && read_indexes(&used, NULL) == FST_OK;
    for (uint32_t f = 0; has_indexes && f < writer->contents.file_count; f++)
        if (!is_used(&used, fsti_output_hidden(writer->contents.files[f].output)))
            (void)!fsti_output_unname(writer->contents.files[f].output, NULL);
    fsti_folder_unlock(lock);
    clear_used(&used);
}

// ---- cleanup requested by the user ----

/// Visits the leftovers of a folder, or of one file in it.
typedef struct leftover_walk {
    used_names used;
    const char *target; ///< NULL: of any
    fst_leftover_callback visit;
    void *context;
    bool removes;
    size_t count;
    uint64_t size_bytes;
} leftover_walk;

static void forward_leftover(void *context, const fsti_leftover *leftover) {
    leftover_walk *walk = context;
    char path[PATH_MAX];
    const fsti_leftover model = described_by(leftover);
    if (walk->target != NULL && !fsti_leftover_is_of(leftover, walk->target) &&
        !fsti_leftover_is_of(&model, walk->target))
        return;
    bool in_use = leftover->has_owner || is_used(&walk->used, leftover->name);
    snprintf(path, sizeof path, "%s/%s", walk->used.folder, leftover->name);
    fst_leftover found = {.struct_size = sizeof found,
                          .path = path,
                          .size_bytes = leftover->size_bytes,
                          .in_use = in_use};
    if (walk->visit != NULL) walk->visit(walk->context, &found);
    if (!walk->removes || in_use || unlinkat(leftover->folder, leftover->name, 0) != 0) return;
    walk->count++;
    walk->size_bytes += leftover->size_bytes;
}

static fst_status walk_leftovers(const char *path, leftover_walk *walk, fst_error *error) {
    struct stat info;
    fsti_target target = {0};
    int lock = -1;
    walk->used.folder = path;
    if (fsti_location_looks_like_url(path))
        return fsti_url_refuse(path, "URLs have no leftovers", error);
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) {
        FST_TRY(fsti_target_find(path, true, &target, error));
        walk->used.folder = target.folder;
        walk->target = fsti_path_name(target.path);
    }
    // With the lock no save publishes, so indexes do not change meanwhile.
    fst_status status = fsti_folder_lock(walk->used.folder, &lock, error);
    if (status == FST_OK) status = read_indexes(&walk->used, error);
    if (status == FST_OK)
        status = fsti_leftovers_visit(walk->used.folder, forward_leftover, walk, error);
    fsti_folder_unlock(lock);
    clear_used(&walk->used);
    fsti_target_clear(&target);
    return status;
}

fst_status fsti_leftovers_list(const char *path, fst_leftover_callback visit, void *context,
                               fst_error *error) {
    leftover_walk walk = {.visit = visit, .context = context};
    return walk_leftovers(path, &walk, error);
}

fst_status fsti_leftovers_clean(const char *path, size_t *count, uint64_t *size_bytes,
                                fst_error *error) {
    leftover_walk walk = {.removes = true};
    fst_status status = walk_leftovers(path, &walk, error);
    *count = walk.count;
    *size_bytes = walk.size_bytes;
    return status;
}
