// SPDX-License-Identifier: Apache-2.0
/// Parses bundles and statements: JSON with members in any order. Unknown members are ignored, as
/// the specification requires; everything that matters is signed.
#include "bundle.h"

#include <string.h>

#include "format.h"
#include "json_reader.h"

#define PAYLOAD_TYPE "application/vnd.in-toto+json"
#define PREDICATE_TYPE "https://model_signing/signature/v1.0"

typedef bool (*read_member)(void *context, json_reader *reader, const json_string *key);

static bool read_object(json_reader *reader, read_member member, void *context) {
    if (!json_expect(reader, '{', "expected an object")) return false;
    if (json_take(reader, '}')) return true;
    do {
        json_string key;
        if (!fsti_json_read_string(reader, &key)) return false;
        if (!json_expect(reader, ':', "expected ':' after a key")) return false;
        if (!member(context, reader, &key)) return false;
    } while (json_take(reader, ','));
    return json_expect(reader, '}', "expected ',' or '}'");
}

static bool read_array(json_reader *reader, bool (*element)(void *, json_reader *), void *context) {
    if (!json_expect(reader, '[', "expected an array")) return false;
    if (json_take(reader, ']')) return true;
    do {
        if (!element(context, reader)) return false;
    } while (json_take(reader, ','));
    return json_expect(reader, ']', "expected ',' or ']'");
}

/// Reads a string and decodes it in place: escapes are longer than the bytes that they stand for.
static bool read_text(json_reader *reader, char *bytes, const char **text, size_t *size) {
    json_string string;
    if (!fsti_json_read_string(reader, &string)) return false;
    char *start = bytes + (string.text - bytes);
    *size = string.escaped ? fsti_json_decode(&string, start) : string.size;
    *text = start;
    return true;
}

static bool is_text(const char *text, size_t size, const char *wanted) {
    return strlen(wanted) == size && memcmp(text, wanted, size) == 0;
}

static unsigned base64_value(char digit) {
    if (digit >= 'A' && digit <= 'Z') return (unsigned)(digit - 'A');
    if (digit >= 'a' && digit <= 'z') return (unsigned)(digit - 'a') + 26;
    if (digit >= '0' && digit <= '9') return (unsigned)(digit - '0') + 52;
    return digit == '+' ? 62 : digit == '/' ? 63 : 64;
}

/// Decodes base64 in place, strictly: complete groups and no unused bits.
static bool decode_base64(char *text, size_t size, size_t *decoded) {
    unsigned char *out = (unsigned char *)text;
    size_t padding = 0;
    if (size == 0 || size % 4 != 0) return false;
    while (padding < 2 && text[size - 1 - padding] == '=') padding++;
    for (size_t i = 0; i < size; i += 4) {
        uint32_t group = 0;
        size_t missing = i + 4 == size ? padding : 0;
        for (size_t j = 0; j < 4; j++) {
            unsigned value = j >= 4 - missing ? 0 : base64_value(text[i + j]);
            if (value > 63) return false;
            group = group << 6 | value;
        }
        if ((missing == 1 && (group & 0xff) != 0) || (missing == 2 && (group & 0xffff) != 0))
            return false;
        for (size_t j = 0; j < 3 - missing; j++) *out++ = (unsigned char)(group >> (16 - 8 * j));
    }
    *decoded = (size_t)(out - (unsigned char *)text);
    return true;
}

static bool read_base64(json_reader *reader, char *bytes, char **out, size_t *size) {
    const char *text;
    size_t text_size;
    if (!read_text(reader, bytes, &text, &text_size)) return false;
    *out = bytes + (text - bytes);
    return decode_base64(*out, text_size, size) || json_fault(reader, "invalid base64");
}

// ---- the envelope ----

static bool read_signature(void *context, json_reader *reader, const json_string *key) {
    fsti_bundle *bundle = context;
    char *bytes;
    if (!fsti_json_equals(key, "sig")) return fsti_json_skip_value(reader, 3);
    if (!read_base64(reader, bundle->bytes, &bytes, &bundle->signature.size)) return false;
    bundle->signature.bytes = (unsigned char *)bytes;
    return true;
}

static bool read_one_signature(void *context, json_reader *reader) {
    const fsti_bundle *bundle = context;
    if (bundle->signature.bytes != NULL) return json_fault(reader, "more than one signature");
    return read_object(reader, read_signature, context);
}

/// Decodes the payload in place. It is parsed as JSON later, which needs zero bytes after the text.
/// Base64 is a third larger than its content, so these fit between the decoded payload and the
/// cursor, unless the payload is too short for a statement.
static bool read_payload(fsti_bundle *bundle, json_reader *reader) {
    const char *padding_end;
    if (!read_base64(reader, bundle->bytes, &bundle->payload, &bundle->payload_size)) return false;
    padding_end = bundle->payload + bundle->payload_size + FSTI_FORMAT_PADDING_BYTES;
    if (padding_end > reader->cursor) return json_fault(reader, "an empty payload");
    memset(bundle->payload + bundle->payload_size, 0, FSTI_FORMAT_PADDING_BYTES);
    return true;
}

static bool read_envelope(void *context, json_reader *reader, const json_string *key) {
    fsti_bundle *bundle = context;
    const char *text;
    size_t size;
    if (fsti_json_equals(key, "signatures")) return read_array(reader, read_one_signature, bundle);
    if (fsti_json_equals(key, "payload"))
        return bundle->payload == NULL ? read_payload(bundle, reader)
                                       : json_fault(reader, "more than one payload");
    if (!fsti_json_equals(key, "payloadType")) return fsti_json_skip_value(reader, 2);
    return read_text(reader, bundle->bytes, &text, &size) &&
           (is_text(text, size, PAYLOAD_TYPE) || json_fault(reader, "wrong payload type"));
}

static bool read_key(void *context, json_reader *reader, const json_string *key) {
    fsti_bundle *bundle = context;
    if (!fsti_json_equals(key, "hint")) return fsti_json_skip_value(reader, 3);
    return read_text(reader, bundle->bytes, &bundle->hint, &bundle->hint_size);
}

static bool read_material(void *context, json_reader *reader, const json_string *key) {
    if (!fsti_json_equals(key, "publicKey")) return fsti_json_skip_value(reader, 2);
    return read_object(reader, read_key, context);
}

static bool read_bundle(void *context, json_reader *reader, const json_string *key) {
    if (fsti_json_equals(key, "dsseEnvelope")) return read_object(reader, read_envelope, context);
    if (fsti_json_equals(key, "verificationMaterial"))
        return read_object(reader, read_material, context);
    return fsti_json_skip_value(reader, 1);
}

static fst_status refuse(const json_reader *reader, const char *path, const char *what,
                         fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (reader != NULL) location.byte_offset = (uint64_t)(reader->cursor - reader->start);
    return fsti_error_set(error, FST_E_SIGNATURE, location, "unusable signature bundle: %s", what);
}

void fsti_bundle_clear(fsti_bundle *bundle) {
    fsti_free(bundle->bytes);
    *bundle = (fsti_bundle){0};
}

fst_status fsti_bundle_parse(char *bytes, size_t byte_count, const char *path, fsti_bundle *out,
                             fst_error *error) {
    json_reader reader;
    *out = (fsti_bundle){.bytes = bytes};
    fst_status status = FST_OK;
    if (!fsti_json_begin(&reader, bytes, byte_count) || !read_object(&reader, read_bundle, out) ||
        !fsti_json_expect_end(&reader))
        status = refuse(&reader, path, reader.fault, error);
    else if (out->payload == NULL || out->signature.bytes == NULL)
        status = refuse(NULL, path, "missing payload or signature", error);
    else if (out->hint == NULL)
        status = refuse(NULL, path,
                        "not signed with a key (certificates and keyless signing are "
                        "only supported by the model_signing package)",
                        error);
    if (status != FST_OK) fsti_bundle_clear(out);
    return status;
}

// ---- the statement ----

typedef struct statement_build {
    fsti_statement *statement;
    char *bytes;
    size_t capacity;
    const char *digest; ///< of the current file
    size_t digest_size;
    bool is_right_type, is_by_file, out_of_memory;
} statement_build;

/// Reads a decimal number that ends at `end`. False for anything else.
static bool parse_number(const char **cursor, const char *end, uint64_t *out) {
    const char *start = *cursor;
    for (*out = 0; *cursor < end && **cursor >= '0' && **cursor <= '9'; ++*cursor)
        if (__builtin_mul_overflow(*out, 10u, out) ||
            __builtin_add_overflow(*out, (uint64_t)(**cursor - '0'), out))
            return false;
    return *cursor > start;
}

/// Parses "SIZE MTIME CTIME INODE". Other text is ignored.
static void parse_stamp(const char *text, size_t size, fsti_signed_file *file) {
    const char *cursor = text, *end = text + size;
    uint64_t numbers[4];
    for (size_t i = 0; i < 4; i++) {
        if (i > 0 && (cursor == end || *cursor != ' ')) return;
        if (i > 0) cursor++;
        if (!parse_number(&cursor, end, &numbers[i])) return;
    }
    if (cursor != end) return;
    file->size_bytes = numbers[0];
    file->stamp = (fsti_file_stamp){numbers[1], numbers[2], numbers[3]};
}

static bool read_resource(void *context, json_reader *reader, const json_string *key) {
    statement_build *build = context;
    fsti_signed_file *file = &build->statement->files[build->statement->file_count];
    const char *text;
    size_t size;
    if (fsti_json_equals(key, "name"))
        return read_text(reader, build->bytes, &file->name, &file->name_size);
    if (fsti_json_equals(key, "digest"))
        return read_text(reader, build->bytes, &build->digest, &build->digest_size);
    json_skip_space(reader);
    if (fsti_json_equals(key, "stamp") && *reader->cursor == '"') {
        if (!read_text(reader, build->bytes, &text, &size)) return false;
        parse_stamp(text, size, file);
        return true;
    }
    if (!fsti_json_equals(key, "algorithm")) return fsti_json_skip_value(reader, 4);
    if (!read_text(reader, build->bytes, &text, &size)) return false;
    file->is_listed_otherwise = !is_text(text, size, "sha256");
    return true;
}

static bool read_one_resource(void *context, json_reader *reader) {
    statement_build *build = context;
    fsti_statement *statement = build->statement;
    if (!fsti_array_reserve((void **)&statement->files, &build->capacity, statement->file_count,
                            sizeof *statement->files, UINT32_MAX)) {
        build->out_of_memory = true;
        return false;
    }
    fsti_signed_file *file = &statement->files[statement->file_count];
    *file = (fsti_signed_file){.is_listed_otherwise = true};
    build->digest = NULL;
    if (!read_object(reader, read_resource, build)) return false;
    if (file->name == NULL || !fsti_path_stays_inside(file->name, file->name_size))
        return json_fault(reader, "a file name that is not inside the folder");
    if (!file->is_listed_otherwise && (build->digest == NULL || build->digest_size != 64 ||
                                       !fsti_digest_read(build->digest, 32, file->digest)))
        return json_fault(reader, "a file without a digest");
    statement->file_count++;
    return true;
}

static bool read_ignored(void *context, json_reader *reader) {
    statement_build *build = context;
    fsti_statement *statement = build->statement;
    size_t at = statement->ignored_count;
    if (at == sizeof statement->ignored / sizeof *statement->ignored)
        return json_fault(reader, "too many ignored paths");
    statement->ignored_count++;
    return read_text(reader, build->bytes, &statement->ignored[at], &statement->ignored_size[at]);
}

static bool read_serialization(void *context, json_reader *reader, const json_string *key) {
    statement_build *build = context;
    const char *text;
    size_t size;
    if (fsti_json_equals(key, "ignore_paths")) return read_array(reader, read_ignored, build);
    if (!fsti_json_equals(key, "method")) return fsti_json_skip_value(reader, 3);
    if (!read_text(reader, build->bytes, &text, &size)) return false;
    build->is_by_file = is_text(text, size, "files");
    return true;
}

static bool read_predicate(void *context, json_reader *reader, const json_string *key) {
    if (fsti_json_equals(key, "resources")) return read_array(reader, read_one_resource, context);
    if (fsti_json_equals(key, "serialization"))
        return read_object(reader, read_serialization, context);
    return fsti_json_skip_value(reader, 2);
}

static bool read_statement(void *context, json_reader *reader, const json_string *key) {
    statement_build *build = context;
    const char *text;
    size_t size;
    if (fsti_json_equals(key, "predicate")) return read_object(reader, read_predicate, build);
    if (!fsti_json_equals(key, "predicateType")) return fsti_json_skip_value(reader, 1);
    if (!read_text(reader, build->bytes, &text, &size)) return false;
    build->is_right_type = is_text(text, size, PREDICATE_TYPE);
    return true;
}

void fsti_statement_clear(fsti_statement *statement) {
    fsti_free(statement->files);
    *statement = (fsti_statement){0};
}

fst_status fsti_statement_parse(fsti_bundle *bundle, const char *path, fsti_statement *out,
                                fst_error *error) {
    *out = (fsti_statement){0};
    const char *payload = bundle->payload;
    json_reader reader = {
        .start = payload, .cursor = payload, .end = payload + bundle->payload_size};
    statement_build build = {.statement = out, .bytes = bundle->payload};
    bool is_valid = read_object(&reader, read_statement, &build) && fsti_json_expect_end(&reader);
    fst_status status = FST_OK;
    if (build.out_of_memory)
        status = fsti_error_memory(error, 64);
    else if (!is_valid)
        status = refuse(&reader, path, reader.fault, error);
    else if (!build.is_right_type || !build.is_by_file)
        status = refuse(NULL, path,
                        "its statement does not follow model signing 1.0 with method files", error);
    if (status != FST_OK) fsti_statement_clear(out);
    return status;
}
