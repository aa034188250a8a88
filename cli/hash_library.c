// SPDX-License-Identifier: Apache-2.0
/// Digest libraries, reached at run time: the command has neither at build time.
/// Interfaces: xxhash.h 0.8 (XXH3_64bits_*), openssl/evp.h 3 and 1.1.
#include "hash_library.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct digest_library {
    const char *name;
    const char *files[4]; ///< sonames to try
    const char *package;  ///< what people install
    const char *symbols[5];
    void *functions[5];
    bool is_sha;
};

enum { CREATE, RESET, UPDATE, FINISH, DESTROY };

static digest_library xxh3 = {
    .name = "xxh3",
    .files = {"libxxhash.so.0", "libxxhash.so"},
    .package = "libxxhash",
    .symbols = {"XXH3_createState", "XXH3_64bits_reset", "XXH3_64bits_update", "XXH3_64bits_digest",
                "XXH3_freeState"},
};
static digest_library sha256 = {
    .name = "sha256",
    .files = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"},
    .package = "libssl (libcrypto)",
    .symbols = {"EVP_MD_CTX_new", "EVP_DigestInit_ex", "EVP_DigestUpdate", "EVP_DigestFinal_ex",
                "EVP_MD_CTX_free"},
    .is_sha = true,
};
static void *sha256_kind; ///< EVP_sha256()

typedef void *(*create_function)(void);
typedef int (*reset_function)(void *state);
typedef int (*init_function)(void *state, const void *kind, void *engine);
typedef int (*update_function)(void *state, const void *bytes, size_t size);
typedef uint64_t (*finish_function)(void *state);
typedef int (*final_function)(void *state, unsigned char *out, unsigned *size);

static bool bind_symbols(digest_library *library, void *handle) {
    for (size_t i = 0; i < 5; i++)
        if ((library->functions[i] = dlsym(handle, library->symbols[i])) == NULL) return false;
    if (!library->is_sha) return true;
    void *kind = dlsym(handle, "EVP_sha256");
    create_function get_kind;
    memcpy(&get_kind, &kind, sizeof get_kind);
    if (kind == NULL) return false;
    sha256_kind = get_kind();
    return sha256_kind != NULL;
}

const digest_library *cli_digest_library(const char *algorithm) {
    digest_library *library = strcmp(algorithm, "xxh3") == 0     ? &xxh3
                              : strcmp(algorithm, "sha256") == 0 ? &sha256
                                                                 : NULL;
    if (library == NULL) { // of kept digests: the command line is checked before
        cli_refuse(EXIT_MISSING, "Unsupported", "digests by '%s' are not known here", algorithm);
        return NULL;
    }
    for (size_t i = 0; i < 4 && library->files[i] != NULL; i++) {
        // A bare name: the system's own folders, never the current one.
        void *handle = dlopen(library->files[i], RTLD_NOW | RTLD_LOCAL);
        if (handle != NULL && bind_symbols(library, handle)) return library;
    }
    cli_refuse(EXIT_MISSING, "NotInstalled", "%s needs %s, which is not installed here",
               library->name, library->package);
    return NULL;
}

const char *cli_digest_name(const digest_library *library) { return library->name; }

/// Object pointers to function pointers, as POSIX promises that dlsym's results can be.
#define FUNCTION(type, library, index) (*(const type *)(const void *)&(library)->functions[index])

void *cli_digest_begin(const digest_library *library) {
    void *state = FUNCTION(create_function, library, CREATE)();
    if (state == NULL) return NULL;
    if (library->is_sha)
        FUNCTION(init_function, library, RESET)(state, sha256_kind, NULL);
    else
        FUNCTION(reset_function, library, RESET)(state);
    return state;
}

void cli_digest_update(const digest_library *library, void *state, const void *bytes, size_t size) {
    FUNCTION(update_function, library, UPDATE)(state, bytes, size);
}

void cli_digest_end(const digest_library *library, void *state, char *text) {
    unsigned char bytes[64] = {0};
    unsigned size = 8;
    if (library->is_sha) {
        FUNCTION(final_function, library, FINISH)(state, bytes, &size);
    } else {
        uint64_t value = FUNCTION(finish_function, library, FINISH)(state);
        for (unsigned i = 0; i < 8; i++) bytes[i] = (unsigned char)(value >> (56 - 8 * i));
    }
    for (unsigned i = 0; i < size && i < DIGEST_BYTES_MAX; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    FUNCTION(update_function, library, DESTROY)(state, NULL, 0);
}
