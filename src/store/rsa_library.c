// SPDX-License-Identifier: Apache-2.0
/// RSA signatures by libcrypto.
#include "rsa_library.h"

#include <string.h>

/// Functions of the library: (result, name, parameters).
#define RSA_FUNCTIONS(X)                                                                           \
    X(void *, BIO_new_mem_buf, (const void *bytes, int size))                                      \
    X(int, BIO_free, (void *bio))                                                                  \
    X(void *, PEM_read_bio_PrivateKey,                                                             \
      (void *bio, void **key, void *no_password_callback, void *context))                          \
    X(void, EVP_PKEY_free, (void *key))                                                            \
    X(void *, EVP_MD_CTX_new, (void))                                                              \
    X(void, EVP_MD_CTX_free, (void *context))                                                      \
    X(const void *, EVP_sha256, (void))                                                            \
    X(int, EVP_DigestSignInit,                                                                     \
      (void *context, void **inner, const void *kind, void *engine, void *key))                    \
    X(int, EVP_DigestSign,                                                                         \
      (void *context, unsigned char *out, size_t *out_size, const unsigned char *text,             \
       size_t size))

typedef struct rsa_library {
#define RSA_FIELD(result, name, parameters) result(*name) parameters;
    RSA_FUNCTIONS(RSA_FIELD)
#undef RSA_FIELD
} rsa_library;

static rsa_library library;
static bool is_found;
static atomic_bool is_searched;

static void find_library(void) {
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", NULL};
#define RSA_SYMBOL(result, name, parameters) {#name, &library.name},
    static const fsti_library_symbol symbols[] = {RSA_FUNCTIONS(RSA_SYMBOL){NULL, NULL}};
#undef RSA_SYMBOL
    const char *missing = NULL;
    is_found = fsti_library_bind(names, symbols, &missing);
}

/// A key must have no password; the library would otherwise ask on the terminal.
static int no_password(char *out, int size, int is_written, void *context) {
    (void)out;
    (void)size;
    (void)is_written;
    (void)context;
    return 0;
}

static bool sign(void *key, const char *text, size_t size, unsigned char *out, size_t *out_size) {
    void *context = library.EVP_MD_CTX_new();
    *out_size = RSA_SIGNATURE_BYTES_MAX;
    bool good =
        context != NULL &&
        library.EVP_DigestSignInit(context, NULL, library.EVP_sha256(), NULL, key) == 1 &&
        library.EVP_DigestSign(context, out, out_size, (const unsigned char *)text, size) == 1;
    if (context != NULL) library.EVP_MD_CTX_free(context);
    return good;
}

fst_status fsti_rsa_sign(const char *key, const char *text, size_t size,
                         unsigned char out[RSA_SIGNATURE_BYTES_MAX], size_t *out_size,
                         fst_error *error) {
    fsti_library_once(&is_searched, find_library);
    if (!is_found)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "service accounts need libcrypto (OpenSSL 1.1 or later), which was "
                              "not found. Set a token in GOOGLE_OAUTH_ACCESS_TOKEN");
    int (*no_password_callback)(char *, int, int, void *) = no_password;
    void *password_callback;
    memcpy(&password_callback, &no_password_callback, sizeof password_callback);
    void *bio = library.BIO_new_mem_buf(key, (int)strlen(key));
    void *pkey =
        bio == NULL ? NULL : library.PEM_read_bio_PrivateKey(bio, NULL, password_callback, NULL);
    bool good = pkey != NULL && sign(pkey, text, size, out, out_size);
    if (pkey != NULL) library.EVP_PKEY_free(pkey);
    if (bio != NULL) library.BIO_free(bio);
    if (good) return FST_OK;
    return fsti_error_set(error, FST_E_PERMISSION, FSTI_NO_LOCATION,
                          "the service account's private key is not a valid RSA key");
}
