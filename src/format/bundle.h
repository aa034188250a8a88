// SPDX-License-Identifier: Apache-2.0
/// Signature bundles of OpenSSF model signing: a DSSE envelope around an in-toto statement that
/// lists files and their digests. Part of the format room's interface, by way of format.h.
#ifndef FSTI_BUNDLE_H
#define FSTI_BUNDLE_H

#include "digest/digest.h"

/// By what a file is known again that nobody has touched: all zero where nothing is known.
typedef struct fsti_file_stamp {
    uint64_t modified_ns, changed_ns, inode;
} fsti_file_stamp;

/// A bundle's envelope. Everything points into `bytes`.
typedef struct fsti_bundle {
    char *bytes;
    const char *hint; ///< of the public key; NULL: signed in another way
    size_t hint_size;
    char *payload; ///< decoded, and followed by zero bytes as for fsti_header_parse()
    size_t payload_size;
    fsti_octets signature;
} fsti_bundle;

/// A file that a statement lists.
typedef struct fsti_signed_file {
    const char *name;
    size_t name_size;
    unsigned char digest[32];
    bool is_listed_otherwise; ///< by another algorithm than sha256
    uint64_t size_bytes;      ///< only with a stamp
    fsti_file_stamp stamp;
} fsti_signed_file;

typedef struct fsti_statement {
    fsti_signed_file *files;
    size_t file_count;
    const char *ignored[64]; ///< names that are no part of the folder
    size_t ignored_size[64];
    size_t ignored_count;
} fsti_statement;

/// Parses a bundle; `bytes` as for fsti_header_parse(), taken over. FST_E_SIGNATURE.
fst_status fsti_bundle_parse(char *bytes, size_t byte_count, const char *path, fsti_bundle *out,
                             fst_error *error);
void fsti_bundle_clear(fsti_bundle *bundle);
/// What was signed: "DSSEv1 28 application/vnd.in-toto+json LENGTH PAYLOAD"; from fsti_alloc.
char *fsti_bundle_signed_text(const char *payload, size_t payload_size, size_t *size);
/// Reads the statement of a bundle whose signature was verified; its payload is decoded in place.
fst_status fsti_statement_parse(fsti_bundle *bundle, const char *path, fsti_statement *out,
                                fst_error *error);
void fsti_statement_clear(fsti_statement *statement);

/// Writes the statement of a folder's files, `subject` being its name. From fsti_alloc.
typedef struct fsti_statement_draft {
    const char *subject;
    const fsti_signed_file *files; ///< by name, ascending
    size_t file_count;
    bool allows_links; ///< some of them are links
    const char *const *ignored;
    size_t ignored_count;
} fsti_statement_draft;
fst_status fsti_statement_write(const fsti_statement_draft *draft, char **out, size_t *size,
                                fst_error *error);
fst_status fsti_bundle_write(const char *payload, size_t payload_size, const char *hint,
                             const fsti_octets *signature, fsti_octets *out, fst_error *error);

#endif
