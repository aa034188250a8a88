// SPDX-License-Identifier: Apache-2.0
/// Loads libcrypto once per process.
#include "crypto_library.h"

#include <dlfcn.h>
#include <string.h>

static atomic_bool is_searched;
static crypto_library library;
static bool is_found;
static const char *missing; ///< a function that an old version lacks

static bool bind_symbol(void *handle, const char *name, void *field) {
    void *symbol = dlsym(handle, name);
    // POSIX guarantees that an object pointer from dlsym() can be used as a function pointer.
    memcpy(field, &symbol, sizeof symbol);
    if (symbol == NULL) missing = name;
    return symbol != NULL;
}

/// Finds all functions. Those of CRYPTO_RENAMED have another name since OpenSSL 3; both names are
/// tried.
static bool bind_all(void *handle) {
#define CRYPTO_BIND(result, name, parameters)                                                      \
    if (!bind_symbol(handle, #name, &library.name)) return false;
    CRYPTO_FUNCTIONS(CRYPTO_BIND)
#undef CRYPTO_BIND
#define CRYPTO_BIND(result, name, before, parameters)                                              \
    if (!bind_symbol(handle, #name, &library.name) &&                                              \
        !bind_symbol(handle, #before, &library.name))                                              \
        return false;
    CRYPTO_RENAMED(CRYPTO_BIND)
#undef CRYPTO_BIND
    return true;
}

static void find_library(void) {
    // Bare names are searched in system folders only, never in the current one.
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !is_found; i++) {
        void *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        // A library that lacks a function stays loaded: the program may use it.
        is_found = handle != NULL && bind_all(handle);
    }
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
