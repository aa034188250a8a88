// SPDX-License-Identifier: Apache-2.0
/// OpenSSL's libcrypto, found at run time: private to the digest room. Interfaces: openssl/evp.h
/// and openssl/pem.h of 3 and 1.1.
#ifndef FSTI_CRYPTO_LIBRARY_H
#define FSTI_CRYPTO_LIBRARY_H

#include "digest.h"

/// Functions of the library, by its names: (result, name, parameters).
#define CRYPTO_FUNCTIONS(X)                                                                        \
    X(const void *, EVP_sha256, (void))                                                            \
    X(void *, EVP_MD_CTX_new, (void))                                                              \
    X(void, EVP_MD_CTX_free, (void *context))                                                      \
    X(int, EVP_DigestInit_ex, (void *context, const void *kind, void *engine))                     \
    X(int, EVP_DigestUpdate, (void *context, const void *bytes, size_t size))                      \
    X(int, EVP_DigestFinal_ex, (void *context, unsigned char *digest, unsigned *size))

typedef struct crypto_library {
#define CRYPTO_FIELD(result, name, parameters) result(*name) parameters;
    CRYPTO_FUNCTIONS(CRYPTO_FIELD)
#undef CRYPTO_FIELD
} crypto_library;

/// The library, which stays open. FST_E_UNSUPPORTED that names it where it is not there.
fst_status fsti_crypto_open(const crypto_library **out, fst_error *error);

#endif
