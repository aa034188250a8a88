// SPDX-License-Identifier: Apache-2.0
/// The door of the digest room: hash functions behind one table, and lists of digests to hold bytes
/// against. XXH3 and BLAKE3 are their authors' sources (third_party/), SHA-256 is libcrypto's.
#ifndef FSTI_DIGEST_H
#define FSTI_DIGEST_H

#include "base/base.h"
#include "fastsafetensors/verify.h"

#define FSTI_DIGEST_BYTES_MAX 32u

/// A hash function. From any thread, once it is ready.
typedef struct fsti_digest_kind {
    const char *name;
    fst_digest number;
    uint32_t digest_bytes;
    bool is_secure; ///< nobody can make other bytes of the same digest
    /// Finds its library; FST_E_UNSUPPORTED that names what is missing. Any number of times.
    fst_status (*ready)(fst_error *error);
    /// The digest of bytes in memory; false where the library refuses (no memory).
    bool (*hash)(const void *bytes, size_t size_bytes, unsigned char *digest);
    /// A digest in progress: NULL without memory. end() gives the digest and frees; with NULL it
    /// only frees.
    void *(*begin)(void);
    bool (*update)(void *state, const void *bytes, size_t size_bytes);
    bool (*end)(void *state, unsigned char *digest);
} fsti_digest_kind;

extern const fsti_digest_kind fsti_digest_xxh3, fsti_digest_blake3, fsti_digest_sha256;
extern const fsti_digest_kind fsti_digest_xxh3_64;

/// NULL for numbers and names that are none; by name only what manifests are of.
const fsti_digest_kind *fsti_digest_get(fst_digest digest);
const fsti_digest_kind *fsti_digest_find(const char *name, size_t name_size);
/// By name, those of kept digests (`hash --write`, `--embed`): XXH3 of 64 bits as well.
const fsti_digest_kind *fsti_digest_of_kept(const char *name, size_t name_size);

/// Writes lower-case hexadecimal digits, two a byte, and a NUL.
void fsti_digest_print(const unsigned char *digest, size_t size_bytes, char *text);
/// Reads exactly 2 * `size_bytes` lower-case digits; `text` and `digest` may begin at one place.
bool fsti_digest_read(const char *text, size_t size_bytes, unsigned char *digest);

/// The digests of a file's consecutive chunks; the last one may be shorter.
typedef struct fsti_digest_list {
    const fsti_digest_kind *kind;
    const unsigned char *digests; ///< kind->digest_bytes each
    uint64_t file_bytes;
    uint32_t chunk_bytes; ///< a power of two
} fsti_digest_list;

/// Smaller chunks cost memory and calls, larger ones are no longer read as one.
#define FSTI_DIGEST_CHUNK_BYTES_MIN ((uint32_t)64 << 10)
#define FSTI_DIGEST_CHUNK_BYTES_MAX ((uint32_t)1 << 20)

/// How many chunks a file of that size has.
static inline uint64_t fsti_digest_chunk_count(uint64_t file_bytes, uint32_t chunk_bytes) {
    return file_bytes / chunk_bytes + (file_bytes % chunk_bytes != 0);
}

/// Holds the file's bytes [begin, begin + size_bytes), found at `bytes`, against the list: whole
/// chunks of it. False at the first one that differs, which begins at *bad_begin; an error of the
/// library counts as a difference.
bool fsti_digest_list_holds(const fsti_digest_list *list, uint64_t begin, const void *bytes,
                            uint64_t size_bytes, uint64_t *bad_begin);

// ---- keys: ECDSA by libcrypto, as OpenSSF model signing has it ----

/// A key of the curve P-256, P-384 or P-521; signatures are of SHA-256, -384 or -512, in DER.
typedef struct fsti_key fsti_key;

/// Bytes to be signed, or a signature.
typedef struct fsti_octets {
    unsigned char *bytes;
    size_t size;
} fsti_octets;

/// Reads a key from PEM text. FST_E_ARGUMENT for what is none, has a password, or is of another
/// kind; FST_E_UNSUPPORTED without libcrypto. `name` is for messages.
fst_status fsti_key_read(const char *pem, const char *name, bool is_private, fsti_key **out,
                         fst_error *error);
void fsti_key_free(fsti_key *key);
/// SHA-256 of the public key's PEM text, in hexadecimal: which key a signature is of.
#define FSTI_KEY_HINT_BYTES 65u
fst_status fsti_key_hint(const fsti_key *key, char *hint, fst_error *error);
/// signature->bytes is from fsti_alloc.
fst_status fsti_key_sign(const fsti_key *key, const char *bytes, size_t size_bytes,
                         fsti_octets *signature, fst_error *error);
bool fsti_key_verify(const fsti_key *key, const char *bytes, size_t size_bytes,
                     const fsti_octets *signature);

#endif
