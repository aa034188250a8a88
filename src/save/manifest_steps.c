// SPDX-License-Identifier: Apache-2.0
/// The steps of a commit that move old manifests and digests aside and publish the new manifest.
#include <string.h>

#include "journal_steps.h"
#include "store/store.h"
#include "save_state.h"

/// What is done to files that describe the model.
typedef struct sidecar_plan {
    fst_writer *writer;
    const fsti_step_kind *kind;
    bool only_existing; ///< no steps for files that are not there now
} sidecar_plan;

/// Adds a step for a file that describes a model. Frees `path`.
static fst_status add_file(const sidecar_plan *plan, char *path, fst_error *error) {
    bool describes;
    if (path == NULL) return fsti_error_memory(error, 64);
    // Also where it is not needed now: one that can't be examined is an error before anything
    // changes.
    fst_status status = fsti_save_describes_model(path, &describes, error);
    if (status == FST_OK && (describes || !plan->only_existing))
        status = fsti_journal_add_path(&plan->writer->publication.journal, plan->kind, path, error);
    fsti_free(path);
    return status;
}

/// Adds a step for the object if it is a manifest, which is checked then.
static fst_status add_object(fst_writer *writer, const fsti_step_kind *kind, const char *url,
                             fst_error *error) {
    journal_step step = {
        .kind = kind, .path = (char *)(uintptr_t)url, .watch = &writer->target.store.watch};
    return fsti_journal_add(&writer->publication.journal, &step, error);
}

static fst_status add_sync(fst_writer *writer, const char *folder, fst_error *error) {
    return fsti_journal_add_sync(&writer->publication.journal, writer->options.promise, folder,
                                 error);
}

/// Adds the manifest and the .digest file of one model file.
static fst_status add_sidecars(const sidecar_plan *plan, const char *path, fst_error *error) {
    FST_TRY(add_file(plan, fsti_path_with_ending(path, SAVE_MANIFEST_ENDING), error));
    return add_file(plan, fsti_path_with_ending(path, SAVE_DIGEST_ENDING), error);
}

fst_status fsti_save_sidecars_drop(fst_writer *writer, const char *path, fst_error *error) {
    return add_sidecars(&(sidecar_plan){writer, &fsti_step_drop_file, false}, path, error);
}

/// As many as the kernel follows.
#define LINK_COUNT_MAX 40

/// Adds those of a file that is saved through links: of each link, and of the file.
static fst_status add_linked_sidecars(const sidecar_plan *plan, uint32_t file, fst_error *error) {
    const fst_writer *writer = plan->writer;
    const char *end = writer->contents.files[file].target.path;
    char *path = fsti_path_with_ending(writer->target.published[file], "");
    if (path == NULL) return fsti_error_memory(error, 64);
    fst_status status = FST_OK;
    for (int depth = 0; depth < LINK_COUNT_MAX && path != NULL && strcmp(path, end) != 0; depth++) {
        char *next = NULL;
        status = add_sidecars(plan, path, error);
        if (status == FST_OK) status = fsti_path_link(path, &next, error);
        fsti_free(path);
        path = next;
        if (status != FST_OK) break;
    }
    fsti_free(path);
    return status == FST_OK ? add_sidecars(plan, end, error) : status;
}

/// Adds the .digest file of the folder, which lies next to it.
static fst_status add_folder_digests(const sidecar_plan *plan, fst_error *error) {
    const fst_writer *writer = plan->writer;
    size_t size = strlen(writer->target.folder);
    while (size > 1 && writer->target.folder[size - 1] == '/') size--;
    char *folder = fsti_string_copy(writer->target.folder, size);
    if (folder == NULL) return fsti_error_memory(error, size);
    fst_status status = add_file(plan, fsti_path_with_ending(folder, SAVE_DIGEST_ENDING), error);
    fsti_free(folder);
    return status;
}

/// Adds a step for each file that describes the model in the place of the new one.
static fst_status add_descriptions(const sidecar_plan *plan, fst_error *error) {
    const fst_writer *writer = plan->writer;
    for (uint32_t f = 0; f <= writer->contents.file_count; f++) {
        const char *path = writer->target.published[f];
        if (path == NULL) continue;
        bool is_index = f == writer->contents.file_count;
        FST_TRY(is_index ? add_sidecars(plan, path, error) : add_linked_sidecars(plan, f, error));
    }
    if (writer->target.folder == NULL) return FST_OK;
    FST_TRY(add_file(plan, fsti_save_manifest_usual(writer), error));
    return add_folder_digests(plan, error);
}

fst_status fsti_save_manifest_drop(fst_writer *writer, bool may_be_undone, fst_error *error) {
    const fsti_step_kind *kind = may_be_undone ? &fsti_step_hide_late_file : &fsti_step_drop_file;
    return add_descriptions(&(sidecar_plan){writer, kind, false}, error);
}

fst_status fsti_save_manifest_aside(fst_writer *writer, fst_error *error) {
    const save_manifest *manifest = &writer->publication.manifest;
    const sidecar_plan plan = {writer, &fsti_step_hide_file, true};
    size_t before = writer->publication.journal.count;
    FST_TRY(add_descriptions(&plan, error));
    // A model may have been saved there since the path was checked.
    if (manifest->kind != NULL)
        FST_TRY(fsti_save_manifest_check(writer, manifest->target.path, error));
    // Deleting a missing file is not an error.
    if (manifest->kind != NULL)
        FST_TRY(add_file(&plan, fsti_path_with_ending(manifest->target.path, ""), error));
    if (writer->publication.journal.count == before) return FST_OK;
    return add_sync(writer, writer->contents.files[0].target.folder, error);
}

fst_status fsti_save_manifest_aside_objects(fst_writer *writer, fst_error *error) {
    const store_state *store = &writer->target.store;
    const fsti_target *own = &writer->publication.manifest.target;
    if (fsti_store_forbids_overwrite()) return FST_OK; // then nothing is replaced
    char *usual = fsti_save_manifest_usual(writer);
    if (usual == NULL) return fsti_error_memory(error, 64);
    bool is_other = own->path != NULL && strcmp(own->path, usual) != 0;
    fst_status status = add_object(writer, &fsti_step_hide_object, usual, error);
    fsti_free(usual);
    FST_TRY(status);
    for (size_t i = 0; i < store->manifest_count; i++)
        FST_TRY(add_object(writer, &fsti_step_hide_object, store->manifests[i], error));
    if (!is_other) return FST_OK;
    return own->is_object ? add_object(writer, &fsti_step_clear_object, own->path, error)
                          : add_file(&(sidecar_plan){writer, &fsti_step_hide_file, true},
                                     fsti_path_with_ending(own->path, ""), error);
}

fst_status fsti_save_manifest_place(fst_writer *writer, fst_error *error) {
    const save_manifest *manifest = &writer->publication.manifest;
    if (manifest->output == NULL) return FST_OK;
    FST_TRY(fsti_journal_add_output(&writer->publication.journal,
                                    manifest->target.is_object ? &fsti_step_place_object
                                                               : &fsti_step_place_manifest,
                                    manifest->output, error));
    if (manifest->target.is_object) return FST_OK;
    return add_sync(writer, manifest->target.folder, error);
}
