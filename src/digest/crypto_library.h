// SPDX-License-Identifier: Apache-2.0
/// OpenSSL's libcrypto, loaded at run time. Private to the digest module. Interfaces: openssl/evp.h
/// and openssl/pem.h of versions 3 and 1.1.
#ifndef FSTI_CRYPTO_LIBRARY_H
#define FSTI_CRYPTO_LIBRARY_H

#include "digest.h"

/// Functions with the same name in both versions: (result, name, parameters).
#define CRYPTO_FUNCTIONS(X)                                                                        \
    X(const void *, EVP_sha256, (void))                                                            \
    X(void *, EVP_MD_CTX_new, (void))                                                              \
    X(void, EVP_MD_CTX_free, (void *context))                                                      \
    X(int, EVP_DigestInit_ex, (void *context, const void *kind, void *engine))                     \
    X(int, EVP_DigestUpdate, (void *context, const void *bytes, size_t size))                      \
    X(int, EVP_DigestFinal_ex, (void *context, unsigned char *digest, unsigned *size))             \
    X(const void *, EVP_sha384, (void))                                                            \
    X(const void *, EVP_sha512, (void))                                                            \
    X(void *, BIO_new_mem_buf, (const void *bytes, int size))                                      \
    X(const void *, BIO_s_mem, (void))                                                             \
    X(void *, BIO_new, (const void *method))                                                       \
    X(long, BIO_ctrl, (void *bio, int command, long number, void *pointer))                        \
    X(int, BIO_free, (void *bio))                                                                  \
    X(void *, PEM_read_bio_PUBKEY,                                                                 \
      (void *bio, void **key, int (*password)(char *, int, int, void *), void *context))           \
    X(void *, PEM_read_bio_PrivateKey,                                                             \
      (void *bio, void **key, int (*password)(char *, int, int, void *), void *context))           \
    X(int, PEM_write_bio_PUBKEY, (void *bio, void *key))                                           \
    X(void, EVP_PKEY_free, (void *key))                                                            \
    X(int, EVP_DigestSignInit,                                                                     \
      (void *context, void **key_context, const void *kind, void *engine, void *key))              \
    X(int, EVP_DigestSign,                                                                         \
      (void *context, unsigned char *signature, size_t *size, const void *bytes, size_t count))    \
    X(int, EVP_DigestVerifyInit,                                                                   \
      (void *context, void **key_context, const void *kind, void *engine, void *key))              \
    X(int, EVP_DigestVerify,                                                                       \
      (void *context, const unsigned char *signature, size_t size, const void *bytes,              \
       size_t count))                                                                              \
    X(void, ERR_clear_error, (void))

/// Functions that version 3 renamed: (result, name, name in 1.1, parameters).
#define CRYPTO_RENAMED(X) X(int, EVP_PKEY_get_base_id, EVP_PKEY_base_id, (const void *key))

typedef struct crypto_library {
#define CRYPTO_FIELD(result, name, parameters) result(*name) parameters;
    CRYPTO_FUNCTIONS(CRYPTO_FIELD)
#undef CRYPTO_FIELD
#define CRYPTO_FIELD(result, name, before, parameters) result(*name) parameters;
    CRYPTO_RENAMED(CRYPTO_FIELD)
#undef CRYPTO_FIELD
} crypto_library;

/// Opens the library, for ever. FST_E_UNSUPPORTED names it if it is missing.
fst_status fsti_crypto_open(const crypto_library **out, fst_error *error);

#endif
