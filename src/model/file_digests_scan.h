// SPDX-License-Identifier: Apache-2.0
/// Expected digests of whole files, and the result of scanning a file. Private to file_digests*.c.
#ifndef FSTI_FILE_DIGESTS_SCAN_H
#define FSTI_FILE_DIGESTS_SCAN_H

#include "file_digests.h"

/// A scanned file, in the form of a manifest entry.
typedef struct scanned_file {
    fsti_manifest_file file;
    unsigned char *chunks;
} scanned_file;

struct file_digests {
    fst_verified_by source;
    const fsti_digest_kind *kind;
    fsti_sums sums;       ///< of checksum lists and sidecars
    signed_bundle bundle; ///< of a bundle
    bool has_bundle;
    scanned_file **scans; ///< allocated separately, because models keep their addresses
    size_t scan_count, scan_capacity;
};

/// The expected digest for a name, or NULL.
const unsigned char *fsti_file_digests_lookup(const file_digests *expected, const char *name);
/// Reads the SHA-256 that is the name of a blob in the Hub cache. `real` has no links.
bool fsti_file_digests_hub(const char *real, unsigned char *digest);

#endif
