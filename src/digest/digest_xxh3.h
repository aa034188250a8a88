// SPDX-License-Identifier: Apache-2.0
/// XXH3 per instruction set. Private to the digest module.
#ifndef FSTI_DIGEST_XXH3_H
#define FSTI_DIGEST_XXH3_H

#include <stddef.h>

#define FSTI_XXH3_STATE_BYTES 1024u
#define FSTI_XXH3_STATE_ALIGNMENT 64u

typedef struct fsti_xxh3_set {
    void (*hash)(const void *bytes, size_t size_bytes, unsigned char *digest);
    void (*begin)(void *state);
    void (*update)(void *state, const void *bytes, size_t size_bytes);
    void (*end)(const void *state, unsigned char *digest);
    void (*end_64)(const void *state, unsigned char *digest); ///< of the same state
} fsti_xxh3_set;

extern const fsti_xxh3_set fsti_xxh3_plain;
#if defined(__x86_64__)
extern const fsti_xxh3_set fsti_xxh3_avx2, fsti_xxh3_avx512;
#endif

#endif
