// SPDX-License-Identifier: Apache-2.0
/// ECDSA and RSA signatures, computed by libcrypto.
#include <string.h>

#include "crypto_library.h"

/// NID_X9_62_id_ecPublicKey and NID_rsaEncryption of openssl/obj_mac.h.
#define KEY_IS_EC 408
#define KEY_IS_RSA 6
/// BIO_CTRL_INFO of openssl/bio.h: where the bytes of a memory BIO are.
#define BIO_INFO 3
#define PUBLIC_BYTES_MAX 1024u

struct fsti_key {
    const crypto_library *crypto;
    void *key;
    const void *hash; ///< the hash that belongs to the curve
};

/// The password callback of libcrypto: without it, libcrypto would ask on the terminal.
static int no_password(char *text, int size, int is_writing, void *context) {
    (void)text;
    (void)size;
    (void)is_writing;
    (void)context;
    return -1;
}

void fsti_key_free(fsti_key *key) {
    if (key == NULL) return;
    if (key->key != NULL) key->crypto->EVP_PKEY_free(key->key);
    fsti_free(key);
}

/// Writes the public key in PEM. False on failure or if it is larger than a key of a supported
/// curve.
static bool write_public(const crypto_library *crypto, void *key, char *out, size_t capacity) {
    char *text = NULL;
    void *bio = crypto->BIO_new(crypto->BIO_s_mem());
    bool succeeded = bio != NULL && crypto->PEM_write_bio_PUBKEY(bio, key) == 1;
    long size = succeeded ? crypto->BIO_ctrl(bio, BIO_INFO, 0, &text) : 0;
    succeeded = size > 0 && (size_t)size < capacity;
    if (succeeded) memcpy(out, text, (size_t)size);
    if (succeeded) out[size] = '\0';
    if (bio != NULL) crypto->BIO_free(bio);
    return succeeded;
}

/// Curves by the beginning of their PEM public keys, which has the object identifier (RFC 5480,
/// 2.1.1.1) and the uncompressed point format. The bit count alone does not identify a curve.
static const void *hash_of_curve(const crypto_library *crypto, void *key) {
    char text[PUBLIC_BYTES_MAX];
    if (crypto->EVP_PKEY_get_base_id(key) != KEY_IS_EC) return NULL;
    if (!write_public(crypto, key, text, sizeof text)) return NULL;
    if (strstr(text, "\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE") != NULL) return crypto->EVP_sha256();
    if (strstr(text, "\nMHYwEAYHKoZIzj0CAQYFK4EEACIDYgAE") != NULL) return crypto->EVP_sha384();
    if (strstr(text, "\nMIGbMBAGByqGSM49AgEGBSuBBAAjA4GGAAQ") != NULL) return crypto->EVP_sha512();
    return NULL;
}

static void *read_pem(const crypto_library *crypto, const char *pem, bool is_private) {
    void *key = NULL, *bio = crypto->BIO_new_mem_buf(pem, (int)strnlen(pem, 1 << 20));
    if (bio != NULL && is_private)
        key = crypto->PEM_read_bio_PrivateKey(bio, NULL, no_password, NULL);
    else if (bio != NULL)
        key = crypto->PEM_read_bio_PUBKEY(bio, NULL, no_password, NULL);
    if (bio != NULL) crypto->BIO_free(bio);
    crypto->ERR_clear_error(); // the error queue belongs to the program
    return key;
}

fst_status fsti_key_read(const char *pem, const char *name, bool is_private, fsti_key **out,
                         fst_error *error) {
    const crypto_library *crypto;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    FST_TRY(fsti_crypto_open(&crypto, error));
    fsti_key *made = fsti_alloc_zeroed(1, sizeof *made);
    if (made == NULL) return fsti_error_memory(error, sizeof *made);
    made->crypto = crypto;
    made->key = read_pem(crypto, pem, is_private);
    if (made->key != NULL) made->hash = hash_of_curve(crypto, made->key);
    if (made->hash != NULL) {
        *out = made;
        return FST_OK;
    }
    bool is_unsupported = made->key != NULL;
    fsti_key_free(made);
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          is_unsupported
                              ? "unsupported key; expected an EC key on P-256, P-384 or P-521"
                          : is_private ? "not a PEM private key without a password"
                                       : "not a PEM public key");
}

fst_status fsti_key_hint(const fsti_key *key, char *hint, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char text[PUBLIC_BYTES_MAX];
    if (!write_public(key->crypto, key->key, text, sizeof text) ||
        !fsti_digest_sha256.hash(text, strlen(text), digest))
        return fsti_error_memory(error, sizeof text);
    fsti_digest_print(digest, 32, hint);
    return FST_OK;
}

fst_status fsti_key_sign(const fsti_key *key, const char *bytes, size_t size_bytes,
                         fsti_octets *signature, fst_error *error) {
    const crypto_library *crypto = key->crypto;
    signature->size = FSTI_SIGNATURE_BYTES_MAX;
    signature->bytes = fsti_alloc(FSTI_SIGNATURE_BYTES_MAX);
    if (signature->bytes == NULL) return fsti_error_memory(error, FSTI_SIGNATURE_BYTES_MAX);
    void *context = crypto->EVP_MD_CTX_new();
    bool succeeded =
        context != NULL &&
        crypto->EVP_DigestSignInit(context, NULL, key->hash, NULL, key->key) == 1 &&
        crypto->EVP_DigestSign(context, signature->bytes, &signature->size, bytes, size_bytes) == 1;
    if (context != NULL) crypto->EVP_MD_CTX_free(context);
    crypto->ERR_clear_error(); // the error queue belongs to the program
    if (succeeded) return FST_OK;
    fsti_free(signature->bytes);
    return fsti_error_set(error, FST_E_SIGNATURE, FSTI_NO_LOCATION, "libcrypto could not sign");
}

fst_status fsti_rsa_sign(const char *pem, const char *bytes, size_t size_bytes,
                         fsti_octets *signature, fst_error *error) {
    fsti_key rsa = {0};
    FST_TRY(fsti_crypto_open(&rsa.crypto, error));
    rsa.key = read_pem(rsa.crypto, pem, true);
    rsa.hash = rsa.crypto->EVP_sha256();
    bool is_rsa = rsa.key != NULL && rsa.crypto->EVP_PKEY_get_base_id(rsa.key) == KEY_IS_RSA;
    fst_status status = is_rsa ? fsti_key_sign(&rsa, bytes, size_bytes, signature, error)
                               : fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                                "not a PEM private RSA key without a password");
    if (rsa.key != NULL) rsa.crypto->EVP_PKEY_free(rsa.key);
    return status;
}

bool fsti_key_verify(const fsti_key *key, const char *bytes, size_t size_bytes,
                     const fsti_octets *signature) {
    const crypto_library *crypto = key->crypto;
    void *context = crypto->EVP_MD_CTX_new();
    bool succeeded = context != NULL &&
                     crypto->EVP_DigestVerifyInit(context, NULL, key->hash, NULL, key->key) == 1 &&
                     crypto->EVP_DigestVerify(context, signature->bytes, signature->size, bytes,
                                              size_bytes) == 1;
    if (context != NULL) crypto->EVP_MD_CTX_free(context);
    crypto->ERR_clear_error();
    return succeeded;
}
