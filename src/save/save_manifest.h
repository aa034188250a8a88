// SPDX-License-Identifier: Apache-2.0
/// The manifest that a save writes, and older ones that become wrong. Private to the save module.
#ifndef FSTI_SAVE_MANIFEST_H
#define FSTI_SAVE_MANIFEST_H

#include "save_contents.h"

struct fst_writer;

/// Names of manifests: the name of a file and this, or this in a folder.
#define SAVE_MANIFEST_ENDING ".manifest"
#define SAVE_MANIFEST_NAME "model.manifest"
/// Of digests that the command keeps.
#define SAVE_DIGEST_ENDING ".digest"

typedef struct save_manifest {
    const fsti_digest_kind *kind; ///< NULL: no manifest
    fsti_target target;
    fsti_output *output; ///< written before any name changes
} save_manifest;

/// The path where loads look for the manifest, from fsti_alloc(). NULL without memory.
char *fsti_save_manifest_usual(const struct fst_writer *writer);
/// Checks that the path a caller chose for a manifest leads to no model. NULL and "" are allowed.
fst_status fsti_save_manifest_check(const struct fst_writer *writer, const char *path,
                                    fst_error *error);
/// Opens the manifest's output and hash function. The writer's files must have their targets.
fst_status fsti_save_manifest_open(struct fst_writer *writer, fst_error *error);
/// Allocates a file's digests.
fst_status fsti_save_manifest_begin(struct fst_writer *writer, save_file *file, fst_error *error);
/// Called when the file has all its bytes.
fst_status fsti_save_manifest_end(struct fst_writer *writer, save_file *file, fst_error *error);
/// Writes the text to the temporary file. `index_text`: the final index, or NULL.
fst_status fsti_save_manifest_write(struct fst_writer *writer, const char *index_text,
                                    size_t index_bytes, fst_error *error);
/// Adds steps that delete the manifest and the .digest file of a model file that is deleted.
fst_status fsti_save_sidecars_drop(struct fst_writer *writer, const char *path, fst_error *error);
/// Adds the steps that delete files which will become wrong. They come first.
fst_status fsti_save_manifest_aside(struct fst_writer *writer, fst_error *error);
/// Adds the steps that delete those which other processes wrote meanwhile. They come when the new
/// files are in place: later ones describe the new model. `may_be_undone`: before the commit step.
fst_status fsti_save_manifest_drop(struct fst_writer *writer, bool may_be_undone, fst_error *error);
/// Adds the steps that come first for a save to a store.
fst_status fsti_save_manifest_aside_objects(struct fst_writer *writer, fst_error *error);
/// Adds the steps that publish the manifest, after those of the model.
fst_status fsti_save_manifest_place(struct fst_writer *writer, fst_error *error);
/// Whether a temporary file was to become a manifest of this writer.
bool fsti_save_manifest_is_own(const struct fst_writer *writer, const fsti_leftover *leftover);

#endif
