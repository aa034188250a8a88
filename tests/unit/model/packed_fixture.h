// SPDX-License-Identifier: Apache-2.0
/// A plain file of every dtype, the same compressed, and comparison of loads.
#ifndef PACKED_FIXTURE_H
#define PACKED_FIXTURE_H

#include <fastsafetensors.h>
#include <stdlib.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "format/format.h"
#include "io/io.h"

#define ROWS 3000u
#define COLUMNS 500u
#define CHUNK_BYTES ((uint64_t)1 << FSTI_CHUNK_LOG_DEFAULT)

typedef struct file_bytes {
    unsigned char *bytes;
    size_t size;
} file_bytes;

file_bytes read_bytes(const char *path);
/// A tensor of each dtype, a matrix of BF16, and some that stay plain.
const char *make_plain(void);
/// The same compressed; NULL without libzstd, and the test is skipped.
const char *make_packed(void);
fst_status open_bytes(const file_bytes *file, fst_model **model, fst_error *error);
/// Loads everything and compares it with the plain file. Returns FST_E_CANCELLED for wrong bytes.
fst_status load_and_compare(fst_model *model, const fst_load_options *options,
                            const file_bytes *plain, fst_error *error);

#endif
