// SPDX-License-Identifier: Apache-2.0
/// Digests of bytes that arrive in pieces.
///
///     fst_digest_state *state;
///     unsigned char digest[FST_DIGEST_BYTES_MAX];
///     size_t digest_bytes;
///     if (fst_digest_begin(FST_DIGEST_BLAKE3, &state, NULL) != FST_OK) return 1;
///     fst_status status = fst_digest_update(state, text, size, NULL);
///     if (fst_digest_end(state, digest, &digest_bytes, NULL) != FST_OK) return 1;
#ifndef FASTSAFETENSORS_DIGEST_STREAM_H
#define FASTSAFETENSORS_DIGEST_STREAM_H

#include "../verify.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A digest in progress; use it from one thread at a time.
typedef struct fst_digest_state fst_digest_state;

/// The size of the longest digest.
#define FST_DIGEST_BYTES_MAX 32

/// Begins a digest. The caller frees *out with fst_digest_end() or fst_digest_drop().
/// FST_E_UNSUPPORTED for FST_DIGEST_SHA256 without libcrypto; FST_E_NO_MEMORY.
FST_API FST_NODISCARD fst_status fst_digest_begin(fst_digest digest, fst_digest_state **out,
                                                  fst_error *error);

/// Adds the next `size_bytes` bytes; `bytes` may be NULL if `size_bytes` is 0.
FST_API FST_NODISCARD fst_status fst_digest_update(fst_digest_state *state, const void *bytes,
                                                   size_t size_bytes, fst_error *error);

/// Writes the digest to `digest` (FST_DIGEST_BYTES_MAX bytes), its length to *size_bytes, and frees
/// the state, also on failure. XXH3 is in canonical order (big-endian).
FST_API FST_NODISCARD fst_status fst_digest_end(fst_digest_state *state, unsigned char *digest,
                                                size_t *size_bytes, fst_error *error);

/// Frees a state without a result. NULL is allowed.
FST_API void fst_digest_drop(fst_digest_state *state);

#ifdef __cplusplus
}
#endif

#endif
