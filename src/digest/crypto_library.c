// SPDX-License-Identifier: Apache-2.0
/// Loads libcrypto once per process.
#include "crypto_library.h"

static crypto_library library;

#define CRYPTO_SYMBOL(result, name, parameters) {#name, &library.name},
#define CRYPTO_NEW_NAME(result, name, before, parameters) {#name, &library.name},
#define CRYPTO_OLD_NAME(result, name, before, parameters) {#before, &library.name},

/// Tries the names of OpenSSL 3, and then those of 1.1.
static fsti_library_state find_library(char *reason, size_t reason_size) {
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", NULL};
    static const fsti_library_symbol symbols[] = {CRYPTO_FUNCTIONS(CRYPTO_SYMBOL)
                                                      CRYPTO_RENAMED(CRYPTO_NEW_NAME){NULL, NULL}};
    static const fsti_library_symbol older_symbols[] = {
        CRYPTO_FUNCTIONS(CRYPTO_SYMBOL) CRYPTO_RENAMED(CRYPTO_OLD_NAME){NULL, NULL}};
    fsti_library_state state = fsti_library_bind(names, symbols, reason, reason_size);
    return state == FSTI_LIBRARY_ABSENT
               ? fsti_library_bind(names, older_symbols, reason, reason_size)
               : state;
}

static fsti_library optional = {
    .need = "SHA-256, signatures and service accounts need OpenSSL's libcrypto (install libssl3)",
    .find = find_library};

fst_status fsti_crypto_open(const crypto_library **out, fst_error *error) {
    *out = &library;
    return fsti_library_require(&optional, error);
}
