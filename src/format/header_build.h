// SPDX-License-Identifier: Apache-2.0
/// The steps from JSON text to a validated header: private to the format room.
#ifndef FSTI_HEADER_BUILD_H
#define FSTI_HEADER_BUILD_H

#include "format.h"
#include "json_reader.h"

/// The name table keeps an index in 24 bits; a header within the limit holds under 3 million.
#define HEADER_TENSOR_COUNT_MAX ((size_t)0xfffffe)

typedef struct header_build {
    fsti_header *header;
    const fsti_header_rules *rules;
    json_reader reader;
    size_t tensor_capacity, shape_capacity, metadata_capacity;
    uint64_t last_begin, last_end;
    uint8_t last_dtype;
    bool metadata_seen, unordered, out_of_memory;
} header_build;

/// Fills tensors (names still as in the text) and metadata; false: see reader.fault or
/// out_of_memory.
bool fsti_header_read_json(header_build *build);

/// Sorts the tensors by (begin, end). False: out of memory.
bool fsti_header_sort(fsti_header *header);

/// Builds the name table. *duplicate is the second of two tensors of one name, or SIZE_MAX.
/// False: out of memory.
bool fsti_header_index_names(fsti_header *header, size_t *duplicate);

/// How many tensors, the first in file order, lie wholly in `data_bytes` of data.
size_t fsti_header_whole_count(const fsti_header *header, uint64_t data_bytes);

/// Checks offsets, shapes and sizes in the reference's order.
fst_status fsti_header_validate(const fsti_header *header, const fsti_header_rules *rules,
                                fst_error *error);

#endif
