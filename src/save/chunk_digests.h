// SPDX-License-Identifier: Apache-2.0
/// Digests of a file's chunks, made while the file is written: private to the save room. A chunk
/// that comes whole, or in order, is digested as it passes; one that does not (the caller fills it
/// in place, several threads bring pieces of it) is read from the file at the end, and counted.
#ifndef FSTI_CHUNK_DIGESTS_H
#define FSTI_CHUNK_DIGESTS_H

#include "digest/digest.h"

/// As manifests have them that nobody asks for another size of.
#define SAVE_CHUNK_BYTES FSTI_DIGEST_CHUNK_BYTES_MAX

typedef struct chunk_digests chunk_digests;

/// A file that was written and has no name yet.
typedef struct written_file {
    int descriptor;
    const char *path; ///< for messages
} written_file;
/// Reads bytes of it that are there: FST_E_SHORT_READ.
fst_status fsti_written_read(const written_file *file, char *buffer, uint64_t begin, uint64_t size,
                             fst_error *error);

/// `kind` is ready. On success *out is the caller's.
fst_status fsti_chunk_digests_open(const fsti_digest_kind *kind, uint64_t file_bytes,
                                   chunk_digests **out, fst_error *error);
/// Takes bytes that go to `offset`, from any thread: each once, but for those that the file begins
/// with, which may come twice.
fst_status fsti_chunk_digests_put(chunk_digests *digests, uint64_t offset, const void *data,
                                  uint64_t size_bytes, fst_error *error);
/// Reads what is missing from the file, which is written now.
fst_status fsti_chunk_digests_complete(chunk_digests *digests, const written_file *file,
                                       fst_error *error);
/// The digests, once they are complete; they belong to the list.
const unsigned char *fsti_chunk_digests_list(const chunk_digests *digests);
uint64_t fsti_chunk_digests_file_bytes(const chunk_digests *digests);
/// Bytes that were read from the file.
uint64_t fsti_chunk_digests_read_bytes(const chunk_digests *digests);
/// NULL is allowed.
void fsti_chunk_digests_close(chunk_digests *digests);

#endif
