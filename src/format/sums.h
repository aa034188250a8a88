// SPDX-License-Identifier: Apache-2.0
/// Lists of SHA-256 checksums of whole files, in the format of sha256sum. Included by format.h.
#ifndef FSTI_SUMS_H
#define FSTI_SUMS_H

#include "bundle.h"

typedef struct fsti_sums {
    char *bytes; ///< the text; names are decoded in place
    fsti_signed_file *files;
    size_t file_count;
} fsti_sums;

/// Whether a text starts with a line of such a list.
bool fsti_sums_peek(const char *bytes, size_t byte_count);
/// Parses "HEX  NAME", "HEX *NAME" and "SHA256 (NAME) = HEX" lines, with coreutils' escapes and
/// comments. Takes over `bytes` (see fsti_header_parse()). FST_E_MANIFEST for other lines, names
/// outside the folder, and two digests of one file.
fst_status fsti_sums_parse(char *bytes, size_t byte_count, const char *path, fsti_sums *out,
                           fst_error *error);
void fsti_sums_clear(fsti_sums *sums);
/// FST_E_MANIFEST if a name occurs with different digests. The parsers call it.
fst_status fsti_sums_check_duplicates(const fsti_sums *sums, const char *path, fst_error *error);
/// Parses the "file HEX "NAME"" lines of digests stored by `fastsafetensors hash --write`, of that
/// kind; names are relative to the folder. Otherwise like fsti_sums_parse(); `place` is for errors.
fst_status fsti_sidecar_parse(char *bytes, size_t byte_count, const fsti_digest_kind *kind,
                              fsti_sums *out, fsti_error_location location, fst_error *error);
/// Writes "HEX  NAME" lines. From fsti_alloc().
fst_status fsti_sums_write(const fsti_signed_file *files, size_t file_count, char **out,
                           size_t *size_bytes, fst_error *error);

#endif
