// SPDX-License-Identifier: Apache-2.0
/// Signature bundles of OpenSSF model signing: a DSSE envelope around an in-toto statement that
/// lists files and digests. Included by format.h.
#ifndef FSTI_BUNDLE_H
#define FSTI_BUNDLE_H

#include "digest/digest.h"

/// Identifies the state of a file; all zero: unknown.
typedef struct fsti_file_stamp {
    uint64_t modified_ns, changed_ns, inode;
} fsti_file_stamp;

/// The envelope of a bundle. All pointers point into `bytes`.
typedef struct fsti_bundle {
    char *bytes;
    const char *hint; ///< of the public key; NULL: signed without a key
    size_t hint_size;
    char *payload; ///< decoded, followed by zero bytes as for fsti_header_parse()
    size_t payload_size;
    fsti_octets signature;
} fsti_bundle;

/// A file in a statement.
typedef struct fsti_signed_file {
    const char *name;
    size_t name_size;
    unsigned char digest[32];
    bool is_listed_otherwise; ///< with another algorithm than sha256
    uint64_t size_bytes;      ///< only with a stamp
    fsti_file_stamp stamp;
} fsti_signed_file;

typedef struct fsti_statement {
    fsti_signed_file *files;
    size_t file_count;
    const char *ignored[64]; ///< names that are not part of the folder
    size_t ignored_size[64];
    size_t ignored_count;
} fsti_statement;

/// Parses a bundle and takes over `bytes` (see fsti_header_parse()). FST_E_SIGNATURE.
fst_status fsti_bundle_parse(char *bytes, size_t byte_count, const char *path, fsti_bundle *out,
                             fst_error *error);
void fsti_bundle_clear(fsti_bundle *bundle);
/// The signed text: "DSSEv1 28 application/vnd.in-toto+json LENGTH PAYLOAD", from fsti_alloc().
char *fsti_bundle_signed_text(const char *payload, size_t payload_size, size_t *size);
/// Parses the statement of a bundle whose signature was verified, in place.
fst_status fsti_statement_parse(fsti_bundle *bundle, const char *path, fsti_statement *out,
                                fst_error *error);
void fsti_statement_clear(fsti_statement *statement);

/// Writes the statement of a folder's files, with the folder's name as `subject`. From
/// fsti_alloc().
typedef struct fsti_statement_draft {
    const char *subject;
    const fsti_signed_file *files; ///< sorted by name
    size_t file_count;
    bool allows_links; ///< some files are links
    const char *const *ignored;
    size_t ignored_count;
} fsti_statement_draft;
fst_status fsti_statement_write(const fsti_statement_draft *draft, char **out, size_t *size,
                                fst_error *error);
fst_status fsti_bundle_write(const char *payload, size_t payload_size, const char *hint,
                             const fsti_octets *signature, fsti_octets *out, fst_error *error);

#endif
