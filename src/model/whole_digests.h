// SPDX-License-Identifier: Apache-2.0
/// Holding files against digests of their whole bytes, or of their tensors: private to the model
/// room. A file is read once through the descriptor that it will be loaded from; what comes of it
/// is a list of digests of its chunks, which loads are held against as against a manifest's.
#ifndef FSTI_WHOLE_DIGESTS_H
#define FSTI_WHOLE_DIGESTS_H

#include "model.h"

/// Looks for what says something of the files at `path`, a model's, other than a manifest: the
/// bundle that is wished for, sums, the Hub's cache, a sidecar, else digests inside. *found is its
/// path. NULL in *out: there is nothing but, perhaps, digests inside of files.
fst_status fsti_whole_find(const char *path, const char *folder, const model_wish *wish,
                           whole_digests **out, char **found, fst_error *error);
/// What `bytes`, the text of the file at `path`, is; NULL in *out: it may be a manifest. Taken over
/// unless it is NULL.
fst_status fsti_whole_read(const char *path, char *bytes, size_t byte_count, whole_digests **out,
                           fst_error *error);
/// Digests that are inside of the files.
fst_status fsti_whole_inside(whole_digests **out, fst_error *error);
void fsti_whole_close(whole_digests *whole);

/// Whether it is a signed bundle, whose names are below its own folder.
bool fsti_whole_is_signed(const whole_digests *whole);

/// What lists of whole files call the file at `path`: its name in the model's folder; a bundle's
/// names are below its own folder, wherever in there the model is. `text` has room for two paths.
const char *fsti_verification_name(const model_verification *verification, const char *path,
                                   char *text);

/// A file under its name in the model's folder, or the bundle's.
typedef struct whole_file {
    const char *name;
    fsti_file *file;
} whole_file;
/// Reads the file and holds it against what is known of it. *listed and its digests (BLAKE3, of
/// chunks of FSTI_WHOLE_CHUNK_BYTES) belong to `whole`.
fst_status fsti_whole_scan(whole_digests *whole, const whole_file *file,
                           const fsti_manifest_file **listed, fst_error *error);
#define FSTI_WHOLE_CHUNK_BYTES ((uint32_t)1 << 20)
/// Holds bytes that were read (an index) against what is known of the name. Digests inside, the
/// Hub's and sidecars are of weights: they say nothing of an index.
bool fsti_whole_holds(const whole_digests *whole, const char *name, const char *bytes,
                      size_t byte_count);
void fsti_whole_describe(const whole_digests *whole, fst_verification *out);

#endif
