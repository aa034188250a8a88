// SPDX-License-Identifier: Apache-2.0
/// Every field of a file format that names another file: the name must be relative, inside the
/// folder, and not a URL.
#include <stdio.h>

#include "check.h"
#include "format/format.h"
#include "format/sums.h"
#include "store/store.h"

#define HEX64 "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define TEXT_BYTES 4096

/// As CHECK, and the failure names the field.
#define CHECK_FIELD(condition, ...)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            check_fail(__FILE__, __LINE__, __VA_ARGS__);                                           \
            return;                                                                                \
        }                                                                                          \
    } while (0)

/// Parses `text` (a copy with the padding that parsers need) and returns the status.
typedef fst_status (*parse_text)(char *bytes, size_t size, fst_error *error);

static fst_status parse_index(char *bytes, size_t size, fst_error *error) {
    fsti_index index;
    fst_status status = fsti_index_parse(bytes, size, "i.json", 7, &index, error);
    if (status == FST_OK) fsti_index_clear(&index);
    return status;
}

static fst_status parse_manifest(char *bytes, size_t size, fst_error *error) {
    fsti_manifest manifest;
    fst_status status = fsti_manifest_parse(bytes, size, "m.manifest", &manifest, error);
    if (status == FST_OK) fsti_manifest_clear(&manifest);
    return status;
}

static fst_status parse_sums(char *bytes, size_t size, fst_error *error) {
    fsti_sums sums;
    fst_status status = fsti_sums_parse(bytes, size, "SHA256SUMS", &sums, error);
    if (status == FST_OK) fsti_sums_clear(&sums);
    return status;
}

static fst_status parse_sidecar(char *bytes, size_t size, fst_error *error) {
    fsti_sums sums;
    fsti_error_location location = {.file = "m.digest", .byte_offset = FST_NO_OFFSET};
    fst_status status =
        fsti_sidecar_parse(bytes, size, &fsti_digest_sha256, &sums, location, error);
    if (status == FST_OK) fsti_sums_clear(&sums);
    return status;
}

static fst_status parse_statement(char *bytes, size_t size, fst_error *error) {
    fsti_bundle bundle = {.payload = bytes, .payload_size = size};
    fsti_statement statement;
    fst_status status = fsti_statement_parse(&bundle, "model.sig", &statement, error);
    if (status == FST_OK) fsti_statement_clear(&statement);
    fsti_free(bytes);
    return status;
}

static fst_status parse_delta_index(char *bytes, size_t size, fst_error *error) {
    fsti_delta_text text;
    fst_status status = fsti_delta_text_parse(bytes, size, "i.json", &text, error);
    if (status == FST_OK) fsti_delta_text_clear(&text);
    return status;
}

static fst_status parse_delta_state(char *bytes, size_t size, fst_error *error) {
    fsti_delta_state state;
    fst_status status = fsti_delta_state_parse(bytes, size, "state.json", &state, error);
    if (status == FST_OK) fsti_delta_state_clear(&state);
    return status;
}

/// A field that names another file. `before` and `after` surround the name.
typedef struct name_field {
    const char *what, *before, *after;
    parse_text parse;
    bool is_json; ///< the name may be written with escapes of JSON
    bool is_flat; ///< names with a slash are refused, too
} name_field;

static const name_field fields[] = {
    {"index: weight_map", "{\"weight_map\":{\"a\":\"", "\"}}", parse_index, true, false},
    {"manifest: file", "fastsafetensors-manifest 1 sha256 1048576\nfile 0 \"",
     "\"\nseal " HEX64 "\n", parse_manifest, true, false},
    {"sums: plain", HEX64 "  ", "\n", parse_sums, false, false},
    {"sums: binary", HEX64 " *", "\n", parse_sums, false, false},
    {"sums: escaped", "\\" HEX64 "  ", "\n", parse_sums, false, false},
    {"sums: BSD", "SHA256 (", ") = " HEX64 "\n", parse_sums, false, false},
    {"sums: behind ./", HEX64 "  ././", "\n", parse_sums, false, false},
    {"kept digests: file", "fastsafetensors-digest 1 sha256\nfile " HEX64 " \"", "\"\n",
     parse_sidecar, true, false},
    {"statement: resource",
     "{\"predicateType\":\"https://model_signing/signature/v1.0\",\"predicate\":{"
     "\"serialization\":{\"method\":\"files\"},\"resources\":[{\"algorithm\":\"sha256\","
     "\"digest\":\"" HEX64 "\",\"name\":\"",
     "\"}]}}", parse_statement, true, false},
    {"version of weights: weight_map", "{\"metadata\":{},\"weight_map\":{\"a\":\"", "\"}}",
     parse_delta_index, true, true},
    {"state of a folder: file", "{\"version\":1,\"files\":{\"", "\":[1,2]}}", parse_delta_state,
     true, false},
};

static const char *const refused[] = {
    "http://127.0.0.1/x",
    "https://host/x.safetensors",
    "s3://bucket/key",
    "gs://bucket/key",
    "az://box/key",
    "hf://owner/name/x.safetensors",
    "HTTP://127.0.0.1/x",
    "hTtPs://host/x",
    "S3://bucket/key",
    "Hf://owner/name/x",
    "ftp://host/x",
    "file:///etc/passwd",
    "a+b-c.d1://x",
    "/etc/passwd",
    "//host/x",
    "../x",
    "..",
    "a/..",
    "a/../../x",
    "./../x",
};

static const char *const accepted[] = {
    "x.safetensors", "sub/x.safetensors", "..x", "x..",   "http:/x", "http", "a:b", "s3:x",
    "x y",           "sub/http://x",      "...", "_://x",
};

static fst_status parse_name(const name_field *field, const char *name, fst_error *error) {
    char *bytes = fsti_alloc_zeroed(TEXT_BYTES, 1);
    if (bytes == NULL) return FST_E_NO_MEMORY;
    int size = snprintf(bytes, TEXT_BYTES - FSTI_FORMAT_PADDING_BYTES, "%s%s%s", field->before,
                        name, field->after);
    return field->parse(bytes, (size_t)size, error);
}

/// The name with every byte as \u00XX.
static void escape_all(const char *name, char *out, size_t size) {
    size_t used = 0;
    for (; *name != '\0' && used + 7 < size; name++)
        used += (size_t)snprintf(out + used, size - used, "\\u%04x", (unsigned char)*name);
}

TEST(every_field_refuses_names_outside_the_folder)
{
    fst_error error;
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++)
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
            char escaped[512] = "";
            fst_status status = parse_name(&fields[f], refused[i], &error);
            CHECK_FIELD(status != FST_OK, "%s takes %s", fields[f].what, refused[i]);
            if (!fields[f].is_json) continue;
            escape_all(refused[i], escaped, sizeof escaped);
            status = parse_name(&fields[f], escaped, &error);
            CHECK_FIELD(status != FST_OK, "%s takes %s, escaped", fields[f].what, refused[i]);
        }
}

TEST(every_field_refuses_a_name_with_a_nul)
{
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++)
        if (fields[f].is_json)
            CHECK_FIELD(parse_name(&fields[f], "x\\u0000y", NULL) != FST_OK, "%s takes a NUL",
                        fields[f].what);
}

TEST(every_field_takes_names_inside_the_folder)
{
    fst_error error = {0};
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++)
        for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
            bool is_refused = fields[f].is_flat && strchr(accepted[i], '/') != NULL;
            CHECK_FIELD((parse_name(&fields[f], accepted[i], &error) == FST_OK) != is_refused,
                        "%s, %s: %s", fields[f].what, accepted[i], error.message);
        }
}

TEST(every_parser_says_when_there_is_no_memory)
{
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
        fst_status status = FST_E_NO_MEMORY;
        for (long n = 0; status == FST_E_NO_MEMORY && n < 100; n++) {
            fsti_alloc_fail_after(n);
            status = parse_name(&fields[f], "x.safetensors", NULL);
            fsti_alloc_fail_after(-1);
        }
        CHECK_FIELD(status == FST_OK, "%s: %s", fields[f].what, fst_status_name(status));
    }
}

/// The rule itself: an accepted name is never read as a URL, whatever folder precedes it.
TEST(accepted_names_are_never_urls)
{
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        CHECK(fsti_path_stays_inside(accepted[i], strlen(accepted[i])));
        CHECK(!fsti_location_is_url(accepted[i]));
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        CHECK(!fsti_path_stays_inside(refused[i], strlen(refused[i])));
    CHECK(!fsti_path_stays_inside("", 0));
    CHECK(!fsti_path_stays_inside("x\0y", 3));
}
