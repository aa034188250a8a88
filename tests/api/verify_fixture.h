// SPDX-License-Identifier: Apache-2.0
/// Models with manifests, and flipped bits.
#ifndef VERIFY_FIXTURE_H
#define VERIFY_FIXTURE_H

#include <fastsafetensors.h>

#define COUNT 12u
#define BYTES ((uint64_t)700001)
#define CHUNK ((uint64_t)1 << 20)

/// Changes one bit of a file, but not its size and modification time.
void flip(const char *path, uint64_t bit);
uint64_t size_of(const char *path);
/// A model of COUNT tensors with a manifest; NULL on failure.
const char *make_listed(const char *name, fst_digest digest, uint32_t chunk_bytes);
/// fst_manifest_check() with a manifest (NULL: the default one); *count grows by each difference.
fst_status count_differences(const char *path, const char *manifest, int *count,
                             fst_manifest_stats *stats, fst_error *error);

#endif
