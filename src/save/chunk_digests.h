// SPDX-License-Identifier: Apache-2.0
/// Digests of a file's chunks, computed while the file is written. Private to the save module. A
/// chunk that arrives complete or in order is digested during the write. Other chunks (filled in
/// place by the caller, or written in pieces by several threads) are read from the file at the end,
/// and these bytes are counted.
#ifndef FSTI_CHUNK_DIGESTS_H
#define FSTI_CHUNK_DIGESTS_H

#include "digest/digest.h"

/// The default chunk size of manifests.
#define SAVE_CHUNK_BYTES FSTI_DIGEST_CHUNK_BYTES_MAX

typedef struct chunk_digests chunk_digests;

/// A written file that has no final name yet.
typedef struct written_file {
    int descriptor;
    const char *path; ///< for messages
} written_file;
/// Reads written bytes of it: FST_E_SHORT_READ.
fst_status fsti_written_read(const written_file *file, char *buffer, uint64_t begin, uint64_t size,
                             fst_error *error);

/// `kind` must be ready. On success the caller owns *out.
fst_status fsti_chunk_digests_open(const fsti_digest_kind *kind, uint64_t file_bytes,
                                   chunk_digests **out, fst_error *error);
/// Adds bytes written to `offset`, from any thread. Each byte once, except the header, which may be
/// written twice.
fst_status fsti_chunk_digests_put(chunk_digests *digests, uint64_t offset, const void *data,
                                  uint64_t size_bytes, fst_error *error);
/// Reads missing chunks from the file, which is completely written now.
fst_status fsti_chunk_digests_complete(chunk_digests *digests, const written_file *file,
                                       fst_error *error);
/// The complete digests. They belong to the list.
const unsigned char *fsti_chunk_digests_list(const chunk_digests *digests);
uint64_t fsti_chunk_digests_file_bytes(const chunk_digests *digests);
/// Bytes read from the file.
uint64_t fsti_chunk_digests_read_bytes(const chunk_digests *digests);
/// NULL is allowed.
void fsti_chunk_digests_close(chunk_digests *digests);

#endif
