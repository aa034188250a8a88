// SPDX-License-Identifier: Apache-2.0
/// XXH3 for one instruction set, named XXH3_SET and chosen by compiler flags. Each xxh3_*.c file
/// includes it once.
#define XXH_INLINE_ALL
#include "digest_xxh3.h"
#include "xxhash.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

static void put_digest(XXH128_hash_t value, unsigned char *digest) {
    XXH128_canonical_t text;
    XXH128_canonicalFromHash(&text, value);
    memcpy(digest, text.digest, sizeof text.digest);
}

static void hash_bytes(const void *bytes, size_t size_bytes, unsigned char *digest) {
    put_digest(XXH3_128bits(bytes, size_bytes), digest);
}

static void begin_state(void *state) { (void)XXH3_128bits_reset(state); }

static void update_state(void *state, const void *bytes, size_t size_bytes) {
    (void)XXH3_128bits_update(state, bytes, size_bytes);
}

static void end_state(const void *state, unsigned char *digest) {
    put_digest(XXH3_128bits_digest(state), digest);
}

static void end_state_64(const void *state, unsigned char *digest) {
    XXH64_canonical_t text;
    XXH64_canonicalFromHash(&text, XXH3_64bits_digest(state));
    memcpy(digest, text.digest, sizeof text.digest);
}

_Static_assert(sizeof(XXH3_state_t) <= FSTI_XXH3_STATE_BYTES, "a state has room");

const fsti_xxh3_set NAMED(fsti_xxh3_, XXH3_SET) = {hash_bytes, begin_state, update_state, end_state,
                                                   end_state_64};
