// SPDX-License-Identifier: Apache-2.0
/// Parses the header's JSON text to a table of tensors in one pass.
#include <string.h>

#include "format.h"
#include "header_build.h"
#include "json_reader.h"

/// Fields of an entry, as bits.
enum { FIELD_DTYPE = 1, FIELD_SHAPE = 2, FIELD_OFFSETS = 4, FIELD_ALL = 7 };

/// Adds a dimension to a tensor with `rank` dimensions. NULL: out of memory, or beyond a limit.
static uint64_t *push_shape(header_build *build, uint32_t rank) {
    fsti_header *header = build->header;
    if (rank == FSTI_FORMAT_RANK_MAX) build->limit = "a tensor has more than 4,096 dimensions";
    if (header->shape_count == build->shape_capacity) (void)fsti_header_tables_fit(build);
    if (build->limit != NULL) return NULL;
    if (!fsti_array_reserve((void **)&header->shapes, &build->shape_capacity, header->shape_count,
                            sizeof *header->shapes, UINT32_MAX)) {
        build->out_of_memory = true;
        return NULL;
    }
    return &header->shapes[header->shape_count++];
}

/// Reads the name of a dtype. The reference also accepts {"F32":null}, another encoding of an enum
/// variant.
static bool read_dtype_name(json_reader *reader, json_string *name) {
    if (!json_take(reader, '{')) return fsti_json_read_string(reader, name);
    if (!fsti_json_read_string(reader, name) ||
        !json_expect(reader, ':', "expected ':' after a key"))
        return false;
    json_skip_space(reader);
    if (*reader->cursor != 'n') return json_fault(reader, "expected null for the dtype's value");
    return fsti_json_skip_value(reader, 3) && json_expect(reader, '}', "expected '}'");
}

static bool read_dtype(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    json_string name;
    if (!read_dtype_name(reader, &name)) return false;
    // Consecutive tensors usually have the same dtype, so try the last one first.
    const char *last = fsti_dtype_name((fst_dtype)build->last_dtype);
    if (!fsti_json_equals(&name, last)) {
        char decoded[128];
        bool fits = name.size <= sizeof decoded;
        size_t size = fits ? fsti_json_decode(&name, decoded) : 0;
        fst_dtype dtype = fsti_dtype_find(decoded, size);
        if (!fits || dtype == FSTI_DTYPE_NONE) {
            reader->cursor = name.text;
            return json_fault(reader, "unknown dtype");
        }
        build->last_dtype = (uint8_t)dtype;
    }
    tensor->dtype = build->last_dtype;
    return true;
}

static bool read_shape(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    tensor->shape_at = (uint32_t)build->header->shape_count;
    tensor->rank = 0;
    if (!json_expect(reader, '[', "expected an array for the shape")) return false;
    if (json_take(reader, ']')) return true;
    do {
        uint64_t *dimension = push_shape(build, tensor->rank);
        if (dimension == NULL || !fsti_json_read_u64(reader, dimension)) return false;
        tensor->rank++;
    } while (json_take(reader, ','));
    return json_expect(reader, ']', "expected ',' or ']' in the shape");
}

static bool read_offsets(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    return json_expect(reader, '[', "expected an array of two offsets") &&
           fsti_json_read_u64(reader, &tensor->begin) &&
           json_expect(reader, ',', "expected two offsets") &&
           fsti_json_read_u64(reader, &tensor->end) &&
           json_expect(reader, ']', "expected two offsets");
}

static bool read_field(header_build *build, fsti_tensor *tensor, unsigned *seen) {
    json_reader *reader = &build->reader;
    json_string key;
    if (!fsti_json_read_string(reader, &key)) return false;
    unsigned field = fsti_json_equals(&key, "dtype")          ? FIELD_DTYPE
                     : fsti_json_equals(&key, "shape")        ? FIELD_SHAPE
                     : fsti_json_equals(&key, "data_offsets") ? FIELD_OFFSETS
                                                              : 0;
    if ((*seen & field) != 0) return json_fault(reader, "duplicate field");
    *seen |= field;
    if (!json_expect(reader, ':', "expected ':' after a key")) return false;
    switch (field) {
    case FIELD_DTYPE: return read_dtype(build, tensor);
    case FIELD_SHAPE: return read_shape(build, tensor);
    case FIELD_OFFSETS: return read_offsets(build, tensor);
    default: return fsti_json_skip_value(reader, 2); // inside the header and the entry
    }
}

static bool read_entry_object(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    unsigned seen = 0;
    if (!json_take(reader, '}')) {
        do {
            if (!read_field(build, tensor, &seen)) return false;
        } while (json_take(reader, ','));
        if (!json_expect(reader, '}', "expected ',' or '}'")) return false;
    }
    return seen == FIELD_ALL || json_fault(reader, "tensor lacks dtype, shape or data_offsets");
}

/// The reference also accepts an entry written as ["U8",[2],[0,2]].
static bool read_entry_array(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    return read_dtype(build, tensor) && json_expect(reader, ',', "expected three values") &&
           read_shape(build, tensor) && json_expect(reader, ',', "expected three values") &&
           read_offsets(build, tensor) && json_expect(reader, ']', "expected three values");
}

static bool read_entry(header_build *build, fsti_tensor *tensor) {
    json_reader *reader = &build->reader;
    if (json_take(reader, '{')) return read_entry_object(build, tensor);
    if (json_take(reader, '[')) return read_entry_array(build, tensor);
    return json_fault(reader, "expected an object for the tensor");
}

/// Consumes `literal` if the text at the cursor starts with it.
#define TAKE_LITERAL(at, literal)                                                                  \
    (memcmp((at), literal, sizeof literal - 1) == 0 ? ((at) += sizeof literal - 1, true) : false)

/// Reads digits as the reference writes them; anything unusual is left to the general parser.
static inline bool parse_digits(const char **at, uint64_t *out) {
    const char *digit = *at;
    uint64_t value = 0;
    while (*digit >= '0' && *digit <= '9') value = value * 10 + (uint64_t)(*digit++ - '0');
    size_t count = (size_t)(digit - *at);
    if (count == 0 || count > 18 || (**at == '0' && count > 1)) return false;
    *at = digit;
    *out = value;
    return true;
}

static bool parse_shape(header_build *build, fsti_tensor *tensor, const char **at) {
    tensor->shape_at = (uint32_t)build->header->shape_count;
    tensor->rank = 0;
    if (**at == ']') return true;
    for (;; ++*at) {
        uint64_t *dimension = push_shape(build, tensor->rank);
        if (dimension == NULL || !parse_digits(at, dimension)) return false;
        tensor->rank++;
        if (**at != ',') return **at == ']';
    }
}

/// Parses the bytes between two names if they are exactly as the reference writer prints them;
/// otherwise returns false and leaves the cursor for read_entry(). This halves the time of parsing.
static bool read_entry_fast(header_build *build, fsti_tensor *tensor) {
    const char *at = build->reader.cursor;
    size_t shape_count = build->header->shape_count;
    const char *last = fsti_dtype_name((fst_dtype)build->last_dtype);
    size_t last_size = strlen(last);
    // The text ends in 32 zero bytes, so comparing a literal never reads past the allocation.
    if (!TAKE_LITERAL(at, ":{\"dtype\":\"")) return false;
    if (memcmp(at, last, last_size) != 0) {
        const char *quote = memchr(at, '"', 16);
        fst_dtype dtype =
            quote == NULL ? FSTI_DTYPE_NONE : fsti_dtype_find(at, (size_t)(quote - at));
        if (dtype == FSTI_DTYPE_NONE) return false;
        build->last_dtype = (uint8_t)dtype;
        last_size = (size_t)(quote - at);
    }
    at += last_size;
    tensor->dtype = build->last_dtype;
    if (TAKE_LITERAL(at, "\",\"shape\":[") && parse_shape(build, tensor, &at) &&
        TAKE_LITERAL(at, "],\"data_offsets\":[") && parse_digits(&at, &tensor->begin) &&
        TAKE_LITERAL(at, ",") && parse_digits(&at, &tensor->end) && TAKE_LITERAL(at, "]}")) {
        build->reader.cursor = at;
        return true;
    }
    build->header->shape_count = shape_count;
    return false;
}

static bool push_metadata(header_build *build, const json_string *key, const json_string *value) {
    fsti_header *header = build->header;
    if (header->metadata_count == FSTI_FORMAT_METADATA_MAX)
        build->limit = "__metadata__ has more than 1,048,576 entries";
    if (header->metadata_count == build->metadata_capacity) (void)fsti_header_tables_fit(build);
    if (build->limit != NULL) return false;
    if (!fsti_array_reserve((void **)&header->metadata, &build->metadata_capacity,
                            header->metadata_count, sizeof *header->metadata, UINT32_MAX)) {
        build->out_of_memory = true;
        return false;
    }
    // Sizes are those of the raw text until finish_metadata() decodes it.
    header->metadata[header->metadata_count++] = (fsti_metadata_pair){
        .key = {(uint32_t)(key->text - header->bytes), (uint32_t)key->size},
        .value = {(uint32_t)(value->text - header->bytes), (uint32_t)value->size},
    };
    return true;
}

static bool read_metadata(header_build *build) {
    json_reader *reader = &build->reader;
    if (build->metadata_seen) return json_fault(reader, "duplicate __metadata__");
    build->metadata_seen = true;
    json_skip_space(reader);
    if (*reader->cursor == 'n') return fsti_json_skip_value(reader, 1);
    if (!json_expect(reader, '{', "expected an object for __metadata__")) return false;
    build->header->has_metadata = true;
    if (json_take(reader, '}')) return true;
    do {
        json_string key, value;
        if (!fsti_json_read_string(reader, &key) ||
            !json_expect(reader, ':', "expected ':' after a key"))
            return false;
        json_skip_space(reader);
        if (*reader->cursor != '"') return json_fault(reader, "metadata value is not a string");
        if (!fsti_json_read_string(reader, &value) || !push_metadata(build, &key, &value))
            return false;
    } while (json_take(reader, ','));
    return json_expect(reader, '}', "expected ',' or '}' in __metadata__");
}

static bool read_tensor(header_build *build, const json_string *name) {
    fsti_header *header = build->header;
    if (header->tensor_count == build->tensor_capacity && !fsti_header_tables_fit(build))
        return false;
    if (!fsti_array_reserve((void **)&header->tensors, &build->tensor_capacity,
                            header->tensor_count, sizeof *header->tensors,
                            HEADER_TENSOR_COUNT_MAX)) {
        build->out_of_memory = true;
        return false;
    }
    fsti_tensor *tensor = &header->tensors[header->tensor_count];
    *tensor = (fsti_tensor){.name_at = (uint32_t)(name->text - header->bytes),
                            .name_size = (uint32_t)name->size,
                            .escaped = name->escaped};
    // Hash the name while its bytes are in the CPU cache; an escaped name is hashed after decoding.
    if (!name->escaped)
        tensor->hash = (uint32_t)(fsti_hash(name->text, name->size, header->hash_key) >> 32);
    if (!read_entry_fast(build, tensor)) {
        if (build->out_of_memory || build->limit != NULL ||
            !json_expect(&build->reader, ':', "expected ':' after a key") ||
            !read_entry(build, tensor))
            return false;
    }
    if (tensor->begin < build->last_begin ||
        (tensor->begin == build->last_begin && tensor->end < build->last_end))
        build->unordered = true;
    build->last_begin = tensor->begin;
    build->last_end = tensor->end;
    header->tensor_count++;
    return true;
}

bool fsti_header_read_json(header_build *build) {
    json_reader *reader = &build->reader;
    if (!json_expect(reader, '{', "expected '{' at the start of the header")) return false;
    if (!json_take(reader, '}')) {
        do {
            json_string name;
            if (!fsti_json_read_string(reader, &name)) return false;
            if (fsti_json_equals(&name, "__metadata__")) {
                if (!json_expect(reader, ':', "expected ':' after a key") || !read_metadata(build))
                    return false;
            } else if (!read_tensor(build, &name)) {
                return false;
            }
        } while (json_take(reader, ','));
        if (!json_expect(reader, '}', "expected ',' or '}'")) return false;
    }
    return fsti_json_expect_end(reader);
}
