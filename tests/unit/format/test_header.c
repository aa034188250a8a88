// SPDX-License-Identifier: Apache-2.0
/// The header parser: the reference's verdicts, byte positions, limits, untrusted input.
#include <inttypes.h>

#include "check.h"
#include "fixture.h"
#include "format/format.h"

/// Parses a JSON text in front of `data_bytes` bytes of data.
static fst_status parse(const char *json, size_t size, uint64_t data_bytes, bool lenient,
                        fsti_header **out, fst_error *error) {
    *out = NULL;
    char *bytes = fsti_alloc(size + FSTI_FORMAT_PADDING_BYTES);
    if (bytes == NULL) return fsti_error_memory(error, size);
    memcpy(bytes, json, size);
    memset(bytes + size, 0, FSTI_FORMAT_PADDING_BYTES);
    fsti_header_rules rules = {.path = "test.safetensors",
                               .file_size = 8 + size + data_bytes,
                               .lenient = lenient,
                               .hash_key = 12345};
    return fsti_header_parse(bytes, size, &rules, out, error);
}

typedef struct verdict {
    const char *json;
    uint64_t data_bytes;
    fst_status status;
    const char *caret; ///< text at the reported position; NULL: not checked
} verdict;

#define T(name, rest) "\"" name "\":{" rest "}"
#define U8_2 "\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]"

static const verdict verdicts[] = {
    // accepted
    {"{}", 0, FST_OK, NULL},
    {" \t\r\n{ } \n ", 0, FST_OK, NULL},
    {"{\"a\":{" U8_2 "}}      ", 2, FST_OK, NULL},
    {"{ \"a\" : { \"shape\" : [ 2 ] , \"data_offsets\" : [ 0 , 2 ] , \"dtype\" : \"U8\" } }", 2,
     FST_OK, NULL},
    {"{\"__metadata__\":null}", 0, FST_OK, NULL},
    {"{\"__metadata__\":{}}", 0, FST_OK, NULL},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, FST_OK, NULL},
    {"{\"a\":[\"U8\",[2],[0,2]]}", 2, FST_OK, NULL},
    {"{\"a\":{\"dtype\":{\"U8\":null},\"shape\":[2],\"data_offsets\":[0,2]}}", 2, FST_OK, NULL},
    {"{\"a\":[ { \"U\\u0038\" : null } ,[2],[0,2]]}", 2, FST_OK, NULL},
    {"{\"a\":{" U8_2 ",\"extra\":[1.5e3,{\"x\":null},true,false,\"s\"]}}", 2, FST_OK, NULL},
    {"{\"a\":{\"d\\u0074ype\":\"U\\u0038\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, FST_OK,
     NULL},
    {"{\"\":{" U8_2 "}}", 2, FST_OK, NULL},
    {"{\"a\\u0000b\":{" U8_2 "}}", 2, FST_OK, NULL},
    {"{\"\\ud83d\\ude00\":{" U8_2 "}}", 2, FST_OK, NULL},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]}}", 2, FST_OK, NULL},
    {"{\"a\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]}}", 3, FST_OK, NULL},
    {"{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, FST_OK, NULL},
    {"{\"b\":{" U8_2 "},\"z\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", 2, FST_OK,
     NULL},
    {"{\"b\":{" U8_2 "},\"z\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}}", 2, FST_OK,
     NULL},
    {"{\"z\":{\"dtype\":\"U8\",\"shape\":[0,9223372036854775808,4],\"data_offsets\":[0,0]}}", 0,
     FST_OK, NULL},
    {"{\"z\":{\"dtype\":\"U8\",\"shape\":[0,18446744073709551615],\"data_offsets\":[0,0]}}", 0,
     FST_OK, NULL},
    {"{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]},\"a\":{" U8_2 "}}", 3, FST_OK,
     NULL},
    // JSON faults, with the place
    {"", 0, FST_E_INVALID_HEADER_JSON, ""},
    {"[]", 0, FST_E_INVALID_HEADER_JSON, "[]"},
    {"\xef\xbb\xbf{}", 0, FST_E_INVALID_HEADER_JSON, "\xef\xbb\xbf{}"},
    {"{}x", 0, FST_E_INVALID_HEADER_JSON, "x"},
    {"{} {}", 0, FST_E_INVALID_HEADER_JSON, "{}"},
    {"{/**/}", 0, FST_E_INVALID_HEADER_JSON, "/**/}"},
    {"{\"a\":{" U8_2 "},}", 2, FST_E_INVALID_HEADER_JSON, "}"},
    {"{\"a\":{" U8_2 "}", 2, FST_E_INVALID_HEADER_JSON, ""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],}}", 2, FST_E_INVALID_HEADER_JSON, "}}"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, FST_E_INVALID_HEADER_JSON, "}"},
    {"{\"a\":{" U8_2 ",\"dtype\":\"U8\"}}", 2, FST_E_INVALID_HEADER_JSON, ":\"U8\"}}"},
    {"{\"a\":{\"dtype\":\"u8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, "u8\",\"shape\":[2],\"data_offsets\":[0,2]}}"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2.0],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2e0],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-0],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, "-0],\"data_offsets\":[0,2]}}"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[02],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-2],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[true],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[\"2\"],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2,],\"data_offsets\":[0,2]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0]}}", 2, FST_E_INVALID_HEADER_JSON,
     NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2,3]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":{}}}", 2, FST_E_INVALID_HEADER_JSON,
     NULL},
    {"{\"a\":[\"U8\",[2],[0,2],1]}", 2, FST_E_INVALID_HEADER_JSON, ",1]}"},
    {"{\"a\":1}", 0, FST_E_INVALID_HEADER_JSON, "1}"},
    {"{\"a\\x\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\\u12\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"\\ud800\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"\\udc00\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"\\udc00\\udc00\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"\\ud800\\u0041\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\nb\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{" U8_2 "},\"a\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"ab\":{" U8_2 "},\"\\u0061b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 2,
     FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"__metadata__\":{\"a\":1}}", 0, FST_E_INVALID_HEADER_JSON, "1}}"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"__metadata__\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER_JSON, "[2],\"data_offsets\":[0,2]}}"},
    {"{\"__metadata__\":[]}", 0, FST_E_INVALID_HEADER_JSON, NULL},
    {"{\"a\":{" U8_2 ",\"x\":1e999}}", 2, FST_E_INVALID_HEADER_JSON, "1e999"},
    {"{\"a\":{" U8_2 ",\"x\":1.7e308}}", 2, FST_OK, NULL},
    // UTF-8 is checked before JSON, as in the reference
    {"{\"a\x80\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER, NULL},
    {"{\"\xed\xa0\x80\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER, NULL},
    {"{\"\xc0\xaf\":{" U8_2 "}}", 2, FST_E_INVALID_HEADER, NULL},
    {"{]\xff", 2, FST_E_INVALID_HEADER, "\xff"},
    {"{\"\xc3\xa9\":{" U8_2 "}}", 2, FST_OK, NULL},
    // offsets, shapes, sizes
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3, FST_E_INVALID_OFFSET,
     "a\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,0]}}", 2, FST_E_INVALID_OFFSET,
     "a\""},
    {"{\"a\":{" U8_2 "},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3,
     FST_E_INVALID_OFFSET, NULL},
    {"{\"a\":{" U8_2 "},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]}}", 5,
     FST_E_INVALID_OFFSET, NULL},
    {"{\"a\":{" U8_2 "},\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]}}", 2,
     FST_E_INVALID_OFFSET, NULL},
    {"{\"a\":{" U8_2 "},\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[3,3]}}", 2,
     FST_E_INVALID_OFFSET, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775808,4,0],\"data_offsets\":[0,0]}}", 0,
     FST_E_VALIDATION_OVERFLOW, NULL},
    {"{\"a\":{\"dtype\":\"U64\",\"shape\":[9223372036854775808],\"data_offsets\":[0,0]}}", 0,
     FST_E_VALIDATION_OVERFLOW, NULL},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, FST_E_MISALIGNED_SLICE,
     NULL},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,2]}}", 2,
     FST_E_TENSOR_INVALID_INFO, NULL},
    {"{\"a\":{" U8_2 "}}", 3, FST_E_METADATA_INCOMPLETE_BUFFER, NULL},
    {"{\"a\":{" U8_2 "}}", 1, FST_E_METADATA_INCOMPLETE_BUFFER, NULL},
    {"{}", 1, FST_E_METADATA_INCOMPLETE_BUFFER, NULL},
};

TEST(header_faults_and_positions)
{
    for (size_t i = 0; i < sizeof verdicts / sizeof *verdicts; i++) {
        const verdict *v = &verdicts[i];
        fsti_header *header;
        fst_error error = {0};
        fst_status status = parse(v->json, strlen(v->json), v->data_bytes, false, &header, &error);
        if (status != v->status) {
            check_fail(__FILE__, __LINE__, "%s: %s, not %s", v->json, fsti_status_name(status),
                       fsti_status_name(v->status));
        } else if (v->caret != NULL) {
            const char *found =
                error.byte_offset == FST_NO_OFFSET ? "none" : v->json + error.byte_offset - 8;
            if (strncmp(found, v->caret, strlen(v->caret)) != 0 ||
                (v->caret[0] == '\0' && *found != '\0'))
                check_fail(__FILE__, __LINE__, "%s: position at '%s', not '%s'", v->json, found,
                           v->caret);
        }
        CHECK_INT(error.status, status);
        CHECK((error.message[0] == '\0') == (status == FST_OK));
        fsti_header_unref(header);
    }
}

TEST(length_field)
{
    unsigned char prefix[8] = {0};
    uint64_t length;
    fst_error error;
    for (uint64_t size = 0; size < 8; size++) {
        fsti_header_rules rules = {.path = "x", .file_size = size};
        CHECK_INT(fsti_header_length(prefix, &rules, &length, &error), FST_E_HEADER_TOO_SMALL);
    }
    fsti_header_rules rules = {.path = "x", .file_size = 10};
    prefix[0] = 3;
    CHECK_INT(fsti_header_length(prefix, &rules, &length, &error), FST_E_INVALID_HEADER_LENGTH);
    prefix[0] = 2;
    CHECK_INT(fsti_header_length(prefix, &rules, &length, &error), FST_OK);
    CHECK_INT(length, 2);
    memset(prefix, 0xff, 8);
    CHECK_INT(fsti_header_length(prefix, &rules, &length, &error), FST_E_HEADER_TOO_LARGE);
}

TEST(lenient_mode_accepts_trailing_bytes_only)
{
    fsti_header *header;
    const char *json = "{\"a\":{" U8_2 "}}";
    CHECK_INT(parse(json, strlen(json), 100, true, &header, NULL), FST_OK);
    CHECK_INT(header->data_bytes, 2);
    fsti_header_unref(header);
    CHECK_INT(parse(json, strlen(json), 1, true, &header, NULL), FST_E_METADATA_INCOMPLETE_BUFFER);
}

TEST(every_dtype)
{
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        char json[200];
        uint32_t bits = fsti_dtype_bits((fst_dtype)i);
        snprintf(json, sizeof json,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%u]}}",
                 fsti_dtype_name((fst_dtype)i), bits);
        fsti_header *header;
        CHECK_INT(parse(json, strlen(json), bits, false, &header, NULL), FST_OK);
        CHECK_INT(header->tensors[0].dtype, i);
        CHECK_INT(header->tensors[0].rank, 2);
        CHECK_INT(header->tensors[0].end, bits);
        fsti_header_unref(header);
    }
    CHECK_INT(fsti_dtype_find("F33", 3), FSTI_DTYPE_NONE);
}

TEST(names_are_decoded_and_found)
{
    const char *json =
        "{\"a\\u0000\\u00e9\\ud83d\\ude00\\n\":{" U8_2 "},\"__metadata__\":{\"k\\t\":\"old\","
        "\"x\":\"\\\"q\\\"\",\"k\\u0009\":\"new\"}}";
    static const char name[] = "a\0\xc3\xa9\xf0\x9f\x98\x80\n";
    fsti_header *header;
    CHECK_INT(parse(json, strlen(json), 2, false, &header, NULL), FST_OK);
    CHECK_INT(header->tensors[0].name_size, sizeof name - 1);
    CHECK(memcmp(fsti_header_name(header, &header->tensors[0]), name, sizeof name) == 0);
    CHECK_INT(fsti_header_find(header, name, sizeof name - 1), 0);
    CHECK(fsti_header_find(header, "a", 1) == SIZE_MAX);
    CHECK_INT(header->metadata_count, 2);
    CHECK_TEXT(header->bytes + header->metadata[0].key.at, "k\t");
    CHECK_TEXT(header->bytes + header->metadata[0].value.at, "new");
    CHECK_TEXT(header->bytes + header->metadata[1].value.at, "\"q\"");
    fsti_header_unref(header);
}

TEST(nesting_limit)
{
    // The header and the entry are two levels: 125 more are allowed, 126 are not.
    for (int levels = 125; levels <= 126; levels++) {
        char json[1024] = "{\"a\":{" U8_2 ",\"x\":";
        size_t size = strlen(json);
        memset(json + size, '[', (size_t)levels);
        memset(json + size + levels, ']', (size_t)levels);
        strcpy(json + size + 2 * levels, "}}");
        fsti_header *header;
        fst_status status = parse(json, strlen(json), 2, false, &header, NULL);
        CHECK_INT(status, levels == 125 ? FST_OK : FST_E_INVALID_HEADER_JSON);
        fsti_header_unref(header);
    }
}

/// Text of `count` tensors as models have them; offsets descend when `reversed`.
static char *large_header(size_t count, bool reversed, size_t *size) {
    char *json = malloc(count * 180 + 64), *end = json;
    *end++ = '{';
    for (size_t i = 0; i < count; i++) {
        size_t place = reversed ? count - 1 - i : i;
        end +=
            sprintf(end,
                    "%s\"model.layers.%zu.block_sparse_moe.experts.%zu.down_proj.weight_packed\":"
                    "{\"dtype\":\"BF16\",\"shape\":[1,4],\"data_offsets\":[%zu,%zu]}",
                    i > 0 ? "," : "", i / 256, i % 256, place * 8, place * 8 + 8);
    }
    *end++ = '}';
    *size = (size_t)(end - json);
    return json;
}

TEST(many_tensors_within_twice_the_header)
{
    for (int reversed = 0; reversed < 2; reversed++) {
        size_t count = 250000, size;
        char *json = large_header(count, reversed, &size);
        fsti_header *header;
        fst_status status = parse(json, size, count * 8, false, &header, NULL);
        free(json);
        CHECK_INT(status, FST_OK);
        CHECK_INT(header->tensor_count, count);
        CHECK(header->table_bytes <= 2 * size);
        // All tables are allocated: the one of names is the last.
        CHECK(header->slot_count >= count);
        CHECK(header->table_bytes >
              size + count * sizeof *header->tensors + header->slot_count * sizeof *header->slots);
        for (size_t i = 0; i < count; i += 997) {
            const fsti_tensor *tensor = &header->tensors[i];
            CHECK_INT(tensor->begin, i * 8);
            CHECK_INT(fsti_header_find(header, fsti_header_name(header, tensor), tensor->name_size),
                      i);
        }
        fsti_header_unref(header);
    }
}

/// `begin`, then `part` as often as fits in `size`, then `end`. `part` is a format for the number
/// of the repetition, twice, and the next number. *count: of repetitions.
static char *repeat(const char *const parts[3], size_t size, size_t *count) {
    const char *begin = parts[0], *part = parts[1], *end = parts[2];
    char *json = malloc(size + 1), piece[128];
    size_t used = (size_t)snprintf(json, size, "%s", begin), own = 0;
    for (*count = 0;; ++*count) {
        own = (size_t)snprintf(piece, sizeof piece, part, *count, *count, *count + 1);
        if (used + strlen(end) + own >= size) break;
        memcpy(json + used, piece, own);
        used += own;
    }
    json[used - 1] = ' '; // the last comma
    snprintf(json + used, size + 1 - used, "%s", end);
    return json;
}

TEST(no_header_takes_more_than_twice_its_size)
{
    static const struct {
        const char *parts[3];
        bool is_refused, has_data;
    } headers[] = {
        {{"{\"a\":{\"dtype\":\"U8\",\"shape\":[", "1,", "],\"data_offsets\":[0,1]}}"}, true, false},
        {{"{\"a\":[\"U8\",[ ", "1,", "],[0,1]]}"}, true, false},
        {{"{\"__metadata__\":{", "\"%zx\":\"\",", "}}"}, true, false},
        {{"{\"__metadata__\":{", "\"a\":\"\",", "}}"}, true, false},
        {{"{", "\"%zx\":[\"U8\",[],[0,1]],", "}"}, true, false},
        {{"{", "\"%zx\":[\"U8\",[0,0,0,0,0,0,0,0],[0,0]],", "}"}, true, false},
        // As writers make them: the shortest there can be.
        {{"{", "\"%zx\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[%zu,%zu]},", "}"},
         false,
         true},
        {{"{", "\"%zx\":{\"dtype\":\"U8\",\"shape\":[1,1,1],\"data_offsets\":[%zu,%zu]},", "}"},
         false,
         true},
    };
    const size_t size = CHECK_SANITIZED ? 30000000 : 90000000;
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        size_t count;
        char *json = repeat(headers[i].parts, size, &count);
        fsti_header *header;
        fst_error error;
        size_t own = strlen(json);
        fst_status status =
            parse(json, own, headers[i].has_data ? count : 1, false, &header, &error);
        free(json);
        if (status != FST_OK) CHECK_CONTAINS(error.message, "limit of this reader");
        CHECK_INT(status, headers[i].is_refused ? FST_E_HEADER_TOO_LARGE : FST_OK);
        if (status == FST_OK) CHECK(header->table_bytes <= 2 * own + FSTI_FORMAT_TABLES_SLACK);
        if (status == FST_OK) fsti_header_unref(header);
    }
}

TEST(limits_of_rank_and_metadata)
{
    for (size_t rank = FSTI_FORMAT_RANK_MAX; rank <= FSTI_FORMAT_RANK_MAX + 1; rank++) {
        const char *const begins[] = {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1",
                                      "{\"a\":{\"shape\":[1"};
        const char *const ends[] = {"],\"data_offsets\":[0,1]}}",
                                    "],\"dtype\":\"U8\",\"data_offsets\":[0,1]}}"};
        for (int way = 0; way < 2; way++) { // the writers' order, and another one
            char *json = calloc(2 * rank + 200, 1);
            strcpy(json, begins[way]);
            for (size_t i = 1; i < rank; i++) strcat(json + 2 * (i - 1), ",1");
            strcat(json, ends[way]);
            fsti_header *header;
            fst_status status = parse(json, strlen(json), 1, false, &header, NULL);
            CHECK_INT(status, rank <= FSTI_FORMAT_RANK_MAX ? FST_OK : FST_E_HEADER_TOO_LARGE);
            if (status == FST_OK) CHECK_INT(header->tensors[0].rank, rank);
            if (status == FST_OK) fsti_header_unref(header);
            free(json);
        }
    }
}

TEST(largest_header)
{
    // 100 MB of white space in front of the brace that ends it.
    size_t size = FSTI_FORMAT_HEADER_BYTES_MAX;
    char *json = malloc(size);
    memset(json, ' ', size);
    json[0] = '{';
    json[size - 1] = '}';
    fsti_header *header;
    fst_status status = parse(json, size, 0, false, &header, NULL);
    free(json);
    CHECK_INT(status, FST_OK);
    fsti_header_unref(header);
}

TEST(random_mutations_do_not_leak)
{
    size_t size;
    char *json = large_header(12, false, &size), *mutated = malloc(size + 8);
    uint64_t random = 1;
    long live = fsti_alloc_live(), accepted = 0;
    for (int i = 0; i < 10000; i++) {
        memcpy(mutated, json, size);
        size_t mutated_size = size;
        for (uint64_t changes = fixture_random(&random) % 4 + 1; changes > 0; changes--) {
            size_t at = fixture_random(&random) % size;
            static const char bytes[] = "\"{}[]:,\\u0912eE.- \n\x80\xff\0abt";
            mutated[at] = bytes[fixture_random(&random) % sizeof bytes];
            if (fixture_random(&random) % 8 == 0) mutated_size = at;
        }
        fsti_header *header;
        fst_error error = {0};
        fst_status status = parse(mutated, mutated_size, 96, false, &header, &error);
        if (status == FST_OK) accepted++;
        CHECK(status == FST_OK || error.message[0] != '\0');
        fsti_header_unref(header);
        CHECK_INT(fsti_alloc_live(), live);
    }
    CHECK(accepted < 9000); // most mutations must be noticed
    free(json);
    free(mutated);
}

TEST(every_allocation_may_fail)
{
    const char *json = "{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]},\"a\":{" U8_2
                       "},\"__metadata__\":{\"a\":\"1\",\"b\":\"2\"}}";
    long live = fsti_alloc_live(), n = 0;
    fst_status status;
    do {
        fsti_header *header;
        fsti_alloc_fail_after(n++);
        status = parse(json, strlen(json), 3, false, &header, NULL);
        fsti_alloc_fail_after(-1);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        fsti_header_unref(header);
        CHECK_INT(fsti_alloc_live(), live);
    } while (status != FST_OK);
    CHECK(n > 6);
}
