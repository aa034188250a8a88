// SPDX-License-Identifier: Apache-2.0
/// SHA-256 by libcrypto, which uses the CPU's SHA instructions.
#include "crypto_library.h"

static fst_status ready_sha256(fst_error *error) {
    const crypto_library *crypto;
    return fsti_crypto_open(&crypto, error);
}

static void *begin_sha256(void) {
    const crypto_library *crypto;
    if (fsti_alloc_fails() || fsti_crypto_open(&crypto, NULL) != FST_OK) return NULL;
    void *state = crypto->EVP_MD_CTX_new();
    if (state == NULL || crypto->EVP_DigestInit_ex(state, crypto->EVP_sha256(), NULL) == 1)
        return state;
    crypto->EVP_MD_CTX_free(state);
    return NULL;
}

static bool update_sha256(void *state, const void *bytes, size_t size_bytes) {
    const crypto_library *crypto;
    return fsti_crypto_open(&crypto, NULL) == FST_OK &&
           crypto->EVP_DigestUpdate(state, bytes, size_bytes) == 1;
}

static bool end_sha256(void *state, unsigned char *digest) {
    const crypto_library *crypto;
    if (fsti_crypto_open(&crypto, NULL) != FST_OK) return false;
    bool good = digest == NULL || crypto->EVP_DigestFinal_ex(state, digest, NULL) == 1;
    crypto->EVP_MD_CTX_free(state);
    return good;
}

static bool hash_sha256(const void *bytes, size_t size_bytes, unsigned char *digest) {
    void *state = begin_sha256();
    if (state == NULL) return false;
    bool good = update_sha256(state, bytes, size_bytes);
    return end_sha256(state, digest) && good;
}

const fsti_digest_kind fsti_digest_sha256 = {
    .name = "sha256",
    .number = FST_DIGEST_SHA256,
    .digest_bytes = 32,
    .is_secure = true,
    .ready = ready_sha256,
    .hash = hash_sha256,
    .begin = begin_sha256,
    .update = update_sha256,
    .end = end_sha256,
};
