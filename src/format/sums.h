// SPDX-License-Identifier: Apache-2.0
/// Lists of whole-file SHA-256 sums, as sha256sum prints and reads them. Part of the format room's
/// interface, by way of format.h.
#ifndef FSTI_SUMS_H
#define FSTI_SUMS_H

#include "bundle.h"

typedef struct fsti_sums {
    char *bytes; ///< the text; names are decoded in place
    fsti_signed_file *files;
    size_t file_count;
} fsti_sums;

/// Whether a text begins with a line of such a list.
bool fsti_sums_peek(const char *bytes, size_t byte_count);
/// Reads "HEX  NAME", "HEX *NAME" and "SHA256 (NAME) = HEX" lines, with coreutils' escapes and
/// comments; `bytes` as for fsti_header_parse(), taken over. FST_E_MANIFEST for any other line,
/// names that lead out of the folder, and two digests of one file.
fst_status fsti_sums_parse(char *bytes, size_t byte_count, const char *path, fsti_sums *out,
                           fst_error *error);
void fsti_sums_clear(fsti_sums *sums);
/// FST_E_MANIFEST where a name is there twice with different digests; the parsers end with it.
fst_status fsti_sums_check_twins(const fsti_sums *sums, const char *path, fst_error *error);
/// Reads the "file HEX "NAME"" lines of digests that `fastsafetensors hash --write` keeps, of that
/// kind; names are of files in the folder. As fsti_sums_parse(); `place` is for errors.
fst_status fsti_sidecar_parse(char *bytes, size_t byte_count, const fsti_digest_kind *kind,
                              fsti_sums *out, fsti_error_place place, fst_error *error);
/// Writes "HEX  NAME" lines. From fsti_alloc.
fst_status fsti_sums_write(const fsti_signed_file *files, size_t file_count, char **out,
                           size_t *size_bytes, fst_error *error);

#endif
