// SPDX-License-Identifier: Apache-2.0
/// Segments of three batches for the tests of the share module.
#ifndef SHARE_FIXTURE_H
#define SHARE_FIXTURE_H

#include <stdlib.h>

#include "check.h"
#include "fixture.h"
#include "share/share_private.h"

#define BATCH_COUNT 3u
#define CHUNK_COUNT 6u
#define BATCH_BYTES ((uint64_t)100000)

static const uint64_t batch_bytes[BATCH_COUNT] = {BATCH_BYTES, BATCH_BYTES, BATCH_BYTES};
static char why[160];

/// Sets an empty folder for the segments of a test.
static inline const char *use_folder(const char *name) {
    const char *path = fixture_path(name);
    setenv("FASTSAFETENSORS_SHARE_DIR", path, 1);
    unsetenv("FASTSAFETENSORS_SHARE_GRACE");
    unsetenv("FASTSAFETENSORS_SHARE_MAX");
    return path;
}

static inline fsti_share *open_with_grace(const char *key, uint32_t grace_s) {
    const fsti_share_request request = {.key = key,
                                        .key_bytes = strlen(key),
                                        .label = "model",
                                        .batch_bytes = batch_bytes,
                                        .batch_count = BATCH_COUNT,
                                        .chunk_count = CHUNK_COUNT,
                                        .grace_s = grace_s};
    why[0] = '\0';
    return fsti_share_open(&request, why, sizeof why);
}

static inline fsti_share *open_share(const char *key) { return open_with_grace(key, 0); }

/// Reserves and finishes everything.
static inline void fill(fsti_share *share) {
    for (uint32_t i = 0; i < BATCH_COUNT; i++) {
        if (!fsti_share_reserve(share, i)) abort();
        memset(fsti_share_map_shared(share, i), (int)i + 1, BATCH_BYTES);
    }
    for (uint32_t i = 0; i < CHUNK_COUNT; i++)
        if (fsti_share_claim(share, i) == FSTI_SHARE_CLAIMED) fsti_share_finish(share, i);
}

typedef struct visited_segments {
    size_t count;
    fst_segment last;
    char name[SHARE_NAME_BYTES];
} visited_segments;

static void add_segment(void *context, const fst_segment *segment) {
    visited_segments *all = context;
    all->count++;
    all->last = *segment;
    snprintf(all->name, sizeof all->name, "%s", segment->name);
}

static inline visited_segments list_all(void) {
    visited_segments all = {.count = 0};
    if (fsti_share_visit(NULL, add_segment, &all, NULL) != FST_OK) abort();
    return all;
}

#endif
