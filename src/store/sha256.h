// SPDX-License-Identifier: Apache-2.0
/// SHA-256 (FIPS 180-4) and HMAC (RFC 2104) for request signatures. They cover a few hundred bytes
/// each, so no library is needed. Private to the store module. Pure.
#ifndef FSTI_SHA256_H
#define FSTI_SHA256_H

#include "base/primitives.h"

#define SHA256_BYTES 32u
#define SHA256_HEX_BYTES 65u

typedef struct sha256 {
    uint32_t state[8];
    uint64_t size_bytes;
    unsigned char block[64];
} sha256;
void fsti_sha256_begin(sha256 *hash);
void fsti_sha256_add(sha256 *hash, const void *bytes, size_t size);
void fsti_sha256_add_text(sha256 *hash, const char *text);
void fsti_sha256_end(sha256 *hash, unsigned char digest[SHA256_BYTES]);
/// Writes lower-case hexadecimal digits and a NUL.
void fsti_sha256_hex(const unsigned char digest[SHA256_BYTES], char *text);

typedef struct hmac_key {
    const void *bytes;
    size_t size;
} hmac_key;
void fsti_hmac_sha256(hmac_key key, const void *bytes, size_t size,
                      unsigned char digest[SHA256_BYTES]);

#endif
