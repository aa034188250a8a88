// SPDX-License-Identifier: Apache-2.0
/// Saves to files: finds existing files, checks space, and takes the lock for changing names.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commit_plan.h"

static char *join_path(const char *folder, const char *name) {
    size_t capacity = strlen(folder) + strlen(name) + 2;
    char *path = fsti_alloc(capacity);
    if (path != NULL) snprintf(path, capacity, "%s/%s", folder, name);
    return path;
}

/// Finds the existing file of the model with the most restrictive permissions.
static fst_status record_member(void *context, const fsti_folder_entry *entry, fst_error *error) {
    fst_writer *writer = context;
    const char *name = entry->name;
    size_t size = strlen(name);
    struct stat found, other;
    if (!fsti_save_is_shard(name, size, writer->target.stem) &&
        !fsti_save_is_single(name, size, writer->target.stem))
        return FST_OK;
    char *path = join_path(writer->target.folder, name);
    if (path == NULL) return fsti_error_memory(error, size);
    bool is_file = stat(path, &found) == 0 && S_ISREG(found.st_mode);
    bool is_first =
        writer->target.set_member == NULL || stat(writer->target.set_member, &other) != 0;
    if (is_file && (is_first || (found.st_mode & 077) < (other.st_mode & 077))) {
        fsti_free(writer->target.set_member);
        writer->target.set_member = path;
    } else {
        fsti_free(path);
    }
    return FST_OK;
}

/// The permissions of a new file: for an edit those of the edited file, for a sharded model those
/// of the existing model, which may have another number of files.
static fst_status find_rights(const fst_writer *writer, fsti_target *target, fst_error *error) {
    if (writer->source.origin != NULL)
        return fsti_target_like(target, fsti_file_path(writer->source.origin), error);
    if (writer->target.set_member == NULL) return FST_OK;
    // It may be deleted meanwhile; then default permissions apply.
    (void)fsti_target_like(target, writer->target.set_member, NULL);
    return FST_OK;
}

static fst_status find_targets(fst_writer *writer, fst_error *error) {
    const char *followed = writer->target.followed;
    bool is_sharded = writer->target.folder != NULL;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    if (is_sharded)
        FST_TRY(
            fsti_folder_make(writer->target.folder, durable, &writer->target.folder_use, error));
    if (is_sharded) FST_TRY(fsti_folder_visit(writer->target.folder, record_member, writer, error));
    for (uint32_t f = 0; f <= writer->contents.file_count; f++) {
        bool is_index = f == writer->contents.file_count;
        if (is_index && !is_sharded) break;
        fsti_target *target = is_index ? &writer->target.index : &writer->contents.files[f].target;
        // A link in a sharded model is replaced, not followed: the index refers to files in its
        // folder, and the link's target may be in a shared store.
        bool follow = !is_sharded && writer->options.replace_link == 0 && followed == NULL;
        const char *path = followed != NULL ? followed : writer->target.published[f];
        FST_TRY(fsti_target_find(path, follow, target, error));
        if (!is_sharded) FST_TRY(fsti_save_refuse_index_name(target->path, error));
        // Users who could not read the old file must not read its tensors elsewhere.
        FST_TRY(find_rights(writer, target, error));
    }
    return is_sharded ? FST_OK
                      : fsti_folder_use_existing(writer->contents.files[0].target.folder,
                                                 &writer->target.folder_use, error);
}

/// Files are created one by one, so check first that the disk has space for all of them.
static fst_status check_space(const fst_writer *writer, fst_error *error) {
    if (writer->target.folder == NULL) return FST_OK;
    return fsti_folder_check_space(writer->target.folder, writer->progress.bytes_total, error);
}

/// Syncs a finished file if the save is durable.
static fst_status settle_file(fst_writer *writer, fsti_output *output, fst_error *error) {
    if (writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    return fsti_progress_sync(&writer->progress, output, error);
}

/// Takes the folder's lock: two saves would mix their names, and of two edits the later would undo
/// the earlier. A single-file save is one rename and needs no lock. *lock is -1 without a lock; an
/// edit continues without one if the folder may not be read.
static fst_status lock_folder(const fst_writer *writer, int *lock, fst_error *error) {
    const char *folder = writer->target.folder;
    if (folder == NULL &&
        (writer->source.origin != NULL || writer->publication.manifest.kind != NULL)) {
        folder = writer->contents.files[0].target.folder;
        if (faccessat(AT_FDCWD, folder, R_OK, AT_EACCESS) != 0 && errno == EACCES) folder = NULL;
    }
    *lock = -1;
    return folder == NULL ? FST_OK : fsti_folder_lock(folder, lock, error);
}

const fsti_target_kind fsti_target_files = {.join = join_path,
                                            .resolve = fsti_path_resolve,
                                            .find = find_targets,
                                            .check_space = check_space,
                                            .settle = settle_file,
                                            .lock = lock_folder,
                                            .plan = fsti_commit_plan_files,
                                            .clean_up = fsti_writer_sweep};
