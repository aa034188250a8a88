// SPDX-License-Identifier: Apache-2.0
/// What is known of whole files, and one file being read to be held against it: private to the
/// model room's two files of it.
#ifndef FSTI_WHOLE_SCAN_H
#define FSTI_WHOLE_SCAN_H

#include "whole_digests.h"

/// A file that was read: what a manifest would say of it.
typedef struct whole_listed {
    fsti_manifest_file file;
    unsigned char *chunks;
} whole_listed;

struct whole_digests {
    fst_verified_by source;
    const fsti_digest_kind *kind;
    fsti_sums sums;       ///< of sums and sidecars
    signed_bundle bundle; ///< of a bundle
    bool has_bundle;
    whole_listed **scans; ///< one by one: models keep their addresses
    size_t scan_count, scan_capacity;
};

/// What is known of a name; NULL: nothing.
const unsigned char *fsti_whole_known(const whole_digests *whole, const char *name);
/// The SHA-256 that a path without links is, in the Hub's cache.
bool fsti_whole_hub_digest(const char *real, unsigned char *digest);

#endif
