// SPDX-License-Identifier: Apache-2.0
/// Interface of the digest module: hash functions behind one table, and lists of digests to verify
/// bytes against. XXH3 and BLAKE3 are their authors' sources (third_party/), SHA-256 is
/// libcrypto's.
///
/// Knows: hash functions, keys, lists of digests.
/// Does not know: what the bytes belong to.
/// Main types: fsti_digest_kind, fsti_digest_list, fsti_key.
#ifndef FSTI_DIGEST_H
#define FSTI_DIGEST_H

#include "base/primitives.h"
#include "fastsafetensors/verify.h"

/// Digests of manifests: the first values of fst_digest.
#define FSTI_MANIFEST_DIGEST_COUNT FST_DIGEST_XXH3_64

#define FSTI_DIGEST_BYTES_MAX 32u

/// A hash function. Safe from any thread after ready().
typedef struct fsti_digest_kind {
    const char *name;
    fst_digest number;
    uint32_t digest_bytes;
    bool is_secure; ///< collision-resistant
    /// Loads its library. FST_E_UNSUPPORTED names a missing library. Can be called repeatedly.
    fst_status (*ready)(fst_error *error);
    /// Digests bytes in memory. False if the library fails (out of memory).
    bool (*hash)(const void *bytes, size_t size_bytes, unsigned char *digest);
    /// An incremental digest. begin() returns NULL without memory. end() writes the digest and
    /// frees the state; with a NULL digest it only frees.
    void *(*begin)(void);
    bool (*update)(void *state, const void *bytes, size_t size_bytes);
    bool (*end)(void *state, unsigned char *digest);
} fsti_digest_kind;

extern const fsti_digest_kind fsti_digest_xxh3, fsti_digest_blake3, fsti_digest_sha256;
extern const fsti_digest_kind fsti_digest_xxh3_64, fsti_digest_adler32;

/// The kind with that number or name, or NULL. The name must be one that manifests use.
const fsti_digest_kind *fsti_digest_get(fst_digest digest);
const fsti_digest_kind *fsti_digest_find(const char *name, size_t name_size);
/// By name, for stored digests (`hash --write`, `--embed`), which may also be 64-bit XXH3.
const fsti_digest_kind *fsti_digest_of_stored_name(const char *name, size_t name_size);

/// By name, those of weight deltas: adler32, XXH3 of 128 bits, BLAKE3.
const fsti_digest_kind *fsti_digest_of_delta(const char *name);

/// Writes lower-case hexadecimal digits and a NUL.
void fsti_digest_print(const unsigned char *digest, size_t size_bytes, char *text);
/// Reads exactly 2 * `size_bytes` lower-case digits. `text` and `digest` may be the same memory.
bool fsti_digest_read(const char *text, size_t size_bytes, unsigned char *digest);

/// The digests of a file's consecutive chunks; the last one may be shorter.
typedef struct fsti_digest_list {
    const fsti_digest_kind *kind;
    const unsigned char *digests; ///< kind->digest_bytes each
    uint64_t file_bytes;
    uint32_t chunk_bytes; ///< a power of two
} fsti_digest_list;

/// The lower limit bounds memory and calls; the upper one is the largest chunk read at once.
#define FSTI_DIGEST_CHUNK_BYTES_MIN ((uint32_t)64 << 10)
#define FSTI_DIGEST_CHUNK_BYTES_MAX ((uint32_t)1 << 20)

/// Number of chunks in a file of that size.
static inline uint64_t fsti_digest_chunk_count(uint64_t file_bytes, uint32_t chunk_bytes) {
    return file_bytes / chunk_bytes + (file_bytes % chunk_bytes != 0);
}

/// Verifies the file's bytes [begin, begin + size_bytes), which must be whole chunks, against the
/// list. Returns false at the first chunk that differs and sets *bad_begin. A failure of the
/// library counts as a difference.
bool fsti_digest_list_matches(const fsti_digest_list *list, uint64_t begin, const void *bytes,
                              uint64_t size_bytes, uint64_t *bad_begin);

// ---- keys: ECDSA by libcrypto, as in OpenSSF model signing, and RSA ----

/// The largest signature, in bytes.
#define FSTI_SIGNATURE_BYTES_MAX 1024u

/// A key on P-256, P-384 or P-521. Signatures use SHA-256, -384 or -512 and are DER-encoded.
typedef struct fsti_key fsti_key;

/// Bytes to sign, or a signature.
typedef struct fsti_octets {
    unsigned char *bytes;
    size_t size;
} fsti_octets;

/// Reads a key from PEM text. FST_E_ARGUMENT if it is not a key of these curves, or has a password;
/// FST_E_UNSUPPORTED without libcrypto. `name` is for messages.
fst_status fsti_key_read(const char *pem, const char *name, bool is_private, fsti_key **out,
                         fst_error *error);
void fsti_key_free(fsti_key *key);
/// The SHA-256 of the public key's PEM text in hexadecimal, which identifies the key of a
/// signature.
#define FSTI_KEY_HINT_BYTES 65u
fst_status fsti_key_hint(const fsti_key *key, char *hint, fst_error *error);
/// Signs bytes. signature->bytes is allocated with fsti_alloc().
fst_status fsti_key_sign(const fsti_key *key, const char *bytes, size_t size_bytes,
                         fsti_octets *signature, fst_error *error);
bool fsti_key_verify(const fsti_key *key, const char *bytes, size_t size_bytes,
                     const fsti_octets *signature);
/// Signs bytes with an RSA private key in PEM text: RS256 of RFC 7518. FST_E_ARGUMENT if it is not
/// such a key, or has a password; FST_E_UNSUPPORTED without libcrypto.
fst_status fsti_rsa_sign(const char *pem, const char *bytes, size_t size_bytes,
                         fsti_octets *signature, fst_error *error);

#endif
