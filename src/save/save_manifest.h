// SPDX-License-Identifier: Apache-2.0
/// The manifest that a save makes, and older ones that it makes untrue: private to the save room.
#ifndef FSTI_SAVE_MANIFEST_H
#define FSTI_SAVE_MANIFEST_H

#include "chunk_digests.h"
#include "journal.h"

struct fst_writer;
struct save_file;

/// What belongs to a file of a save that a manifest lists.
typedef struct listed_file {
    chunk_digests *chunks; ///< NULL: no manifest
    uint64_t header_bytes;
    unsigned char header[FSTI_DIGEST_BYTES_MAX];
} listed_file;

typedef struct save_manifest {
    const fsti_digest_kind *kind; ///< NULL: none is made
    fsti_target target;
    fsti_output *output; ///< written before any name changes
} save_manifest;

/// Finds its place and its hash function. The writer's files have their targets by then.
fst_status fsti_save_manifest_open(struct fst_writer *writer, fst_error *error);
/// Makes room for a file's digests.
fst_status fsti_save_manifest_begin(struct fst_writer *writer, struct save_file *file,
                                    fst_error *error);
/// The digests that bytes are put to as they pass, or NULL.
chunk_digests *fsti_save_manifest_passing(const struct fst_writer *writer,
                                          const struct save_file *file);
/// The file has all of its bytes.
fst_status fsti_save_manifest_end(struct fst_writer *writer, struct save_file *file,
                                  fst_error *error);
/// Writes the text, hidden. `index_text`: the set's index as it is to stay, or NULL.
fst_status fsti_save_manifest_write(struct fst_writer *writer, const char *index_text,
                                    size_t index_bytes, fst_error *error);
/// Steps that take away what will be untrue when the new model is in place; they come first.
fst_status fsti_save_manifest_aside(struct fst_writer *writer, fst_error *error);
/// The same of a save to a store.
fst_status fsti_save_manifest_aside_objects(struct fst_writer *writer, fst_error *error);
/// Steps that put the manifest in place; they come behind those of the model.
fst_status fsti_save_manifest_place(struct fst_writer *writer, fst_error *error);
/// Whether a hidden file was to become a manifest of the writer's.
bool fsti_save_manifest_is_own(const struct fst_writer *writer, const fsti_leftover *leftover);

#endif
