// SPDX-License-Identifier: Apache-2.0
/// The steps from JSON text to a validated header. Private to the format module.
#ifndef FSTI_HEADER_BUILD_H
#define FSTI_HEADER_BUILD_H

#include "format.h"
#include "json_reader.h"

/// The name table has 24 bits per index; a header within the limit has under 3 million tensors.
#define HEADER_TENSOR_COUNT_MAX ((size_t)0xfffffe)

typedef struct header_build {
    fsti_header *header;
    const fsti_header_rules *rules;
    json_reader reader;
    size_t tensor_capacity, shape_capacity, metadata_capacity;
    uint64_t last_begin, last_end;
    uint8_t last_dtype;
    bool metadata_seen, unordered, out_of_memory;
    const char *limit; ///< the limit that the header exceeds; NULL: none
} header_build;

/// Fills tensors (names still undecoded) and metadata. On false: see reader.fault or out_of_memory.
bool fsti_header_read_json(header_build *build);

/// Whether the tables are within their memory limit, which excludes the text; if not, sets
/// build->limit. Called before tables grow, and after parsing.
bool fsti_header_tables_fit(header_build *build);

/// Sorts the tensors by (begin, end). False without memory.
bool fsti_header_sort(fsti_header *header);

/// Builds the name table. *duplicate is the second tensor of a repeated name, or SIZE_MAX. False
/// without memory.
bool fsti_header_index_names(fsti_header *header, size_t *duplicate);

/// The number of tensors, in file order, that lie completely within `data_bytes` of data.
size_t fsti_header_whole_count(const fsti_header *header, uint64_t data_bytes);

/// Checks offsets, shapes and sizes in the order of the reference.
fst_status fsti_header_validate(const fsti_header *header, const fsti_header_rules *rules,
                                fst_error *error);

#endif
