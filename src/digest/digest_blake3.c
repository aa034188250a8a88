// SPDX-License-Identifier: Apache-2.0
/// BLAKE3 with 256 bits, from its authors' C sources.
#include <pthread.h>

#include "blake3.h"
#include "digest.h"

static pthread_once_t detect_once = PTHREAD_ONCE_INIT;

static bool hash_blake3(const void *bytes, size_t size_bytes, unsigned char *digest) {
    blake3_hasher state;
    blake3_hasher_init(&state);
    blake3_hasher_update(&state, bytes, size_bytes);
    blake3_hasher_finalize(&state, digest, BLAKE3_OUT_LEN);
    return true;
}

/// BLAKE3 detects CPU features on first use and stores them without a lock, so this runs once.
static void detect_features(void) {
    unsigned char digest[BLAKE3_OUT_LEN];
    hash_blake3("", 0, digest);
}

static fst_status ready_blake3(fst_error *error) {
    (void)error;
    pthread_once(&detect_once, detect_features);
    return FST_OK;
}

static void *begin_blake3(void) {
    blake3_hasher *state = fsti_alloc(sizeof *state);
    if (state != NULL) blake3_hasher_init(state);
    return state;
}

static bool update_blake3(void *state, const void *bytes, size_t size_bytes) {
    blake3_hasher_update(state, bytes, size_bytes);
    return true;
}

static bool end_blake3(void *state, unsigned char *digest) {
    if (digest != NULL) blake3_hasher_finalize(state, digest, BLAKE3_OUT_LEN);
    fsti_free(state);
    return true;
}

const fsti_digest_kind fsti_digest_blake3 = {
    .name = "blake3",
    .number = FST_DIGEST_BLAKE3,
    .digest_bytes = BLAKE3_OUT_LEN,
    .is_secure = true,
    .ready = ready_blake3,
    .hash = hash_blake3,
    .begin = begin_blake3,
    .update = update_blake3,
    .end = end_blake3,
};
