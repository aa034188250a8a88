// SPDX-License-Identifier: Apache-2.0
/// XXH3 with 128 and 64 bits from its author's header, compiled once per instruction set.
#include "digest.h"
#include "digest_xxh3.h"

static const fsti_xxh3_set *best_set(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return &fsti_xxh3_avx512;
    if (__builtin_cpu_supports("avx2")) return &fsti_xxh3_avx2;
#endif
    return &fsti_xxh3_plain;
}

/// An XXH3 state, aligned for vector loads inside its allocation.
typedef struct xxh3_state {
    char bytes[FSTI_XXH3_STATE_BYTES + FSTI_XXH3_STATE_ALIGNMENT];
} xxh3_state;

static void *inside(void *state) {
    uintptr_t address = (uintptr_t)state;
    return (char *)state + (-address & (FSTI_XXH3_STATE_ALIGNMENT - 1));
}

static fst_status ready_xxh3(fst_error *error) {
    (void)error;
    return FST_OK;
}

static bool hash_xxh3(const void *bytes, size_t size_bytes, unsigned char *digest) {
    best_set()->hash(bytes, size_bytes, digest);
    return true;
}

static void *begin_xxh3(void) {
    xxh3_state *state = fsti_alloc(sizeof *state);
    if (state != NULL) best_set()->begin(inside(state));
    return state;
}

static bool update_xxh3(void *state, const void *bytes, size_t size_bytes) {
    best_set()->update(inside(state), bytes, size_bytes);
    return true;
}

static bool end_xxh3(void *state, unsigned char *digest) {
    if (digest != NULL) best_set()->end(inside(state), digest);
    fsti_free(state);
    return true;
}

static bool end_xxh3_64(void *state, unsigned char *digest) {
    if (digest != NULL) best_set()->end_64(inside(state), digest);
    fsti_free(state);
    return true;
}

static bool hash_xxh3_64(const void *bytes, size_t size_bytes, unsigned char *digest) {
    void *state = begin_xxh3();
    return state != NULL && update_xxh3(state, bytes, size_bytes) && end_xxh3_64(state, digest);
}

const fsti_digest_kind fsti_digest_xxh3_64 = {
    .name = "xxh3",
    .number = FST_DIGEST_XXH3_64,
    .digest_bytes = 8,
    .ready = ready_xxh3,
    .hash = hash_xxh3_64,
    .begin = begin_xxh3,
    .update = update_xxh3,
    .end = end_xxh3_64,
};

const fsti_digest_kind fsti_digest_xxh3 = {
    .name = "xxh3-128",
    .number = FST_DIGEST_XXH3_128,
    .digest_bytes = 16,
    .ready = ready_xxh3,
    .hash = hash_xxh3,
    .begin = begin_xxh3,
    .update = update_xxh3,
    .end = end_xxh3,
};
