// SPDX-License-Identifier: Apache-2.0
/// Loads libcrypto once per process.
#include "crypto_library.h"

static atomic_bool is_searched;
static crypto_library library;
static bool is_found;
static const char *missing; ///< a function that an old version lacks

#define CRYPTO_SYMBOL(result, name, parameters) {#name, &library.name},
#define CRYPTO_NEW_NAME(result, name, before, parameters) {#name, &library.name},
#define CRYPTO_OLD_NAME(result, name, before, parameters) {#before, &library.name},

/// Tries the names of OpenSSL 3, and then those of 1.1.
static void find_library(void) {
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", NULL};
    static const fsti_library_symbol symbols[] = {CRYPTO_FUNCTIONS(CRYPTO_SYMBOL)
                                                      CRYPTO_RENAMED(CRYPTO_NEW_NAME){NULL, NULL}};
    static const fsti_library_symbol older_symbols[] = {
        CRYPTO_FUNCTIONS(CRYPTO_SYMBOL) CRYPTO_RENAMED(CRYPTO_OLD_NAME){NULL, NULL}};
    is_found = fsti_library_bind(names, symbols, &missing) ||
               fsti_library_bind(names, older_symbols, &missing);
}

fst_status fsti_crypto_open(const crypto_library **out, fst_error *error) {
    fsti_library_once(&is_searched, find_library);
    *out = &library;
    if (is_found) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "OpenSSL's libcrypto (libssl3) is not installed here%s%s",
                          missing == NULL ? "" : ", or is too old: it lacks ",
                          missing == NULL ? "" : missing);
}
