// SPDX-License-Identifier: Apache-2.0
/// Reading the index of a weight delta, and the note of the version that a folder has.
#include "delta_text.h"

#include <string.h>

#include "json_reader.h"

/// Versions longer than this are refused: they are names of folders.
#define VERSION_BYTES_MAX 255u
/// Files that a state may list.
#define STATE_FILES_MAX ((size_t)1 << 20)

/// The fault of a reader that could not allocate.
static const char out_of_memory[] = "out of memory";

static fst_status refuse_text(const json_reader *reader, const char *path, const char *what,
                              fst_error *error) {
    fsti_error_location location = {.file = path,
                                    .byte_offset = (uint64_t)(reader->cursor - reader->start)};
    return fsti_error_set(error, FST_E_INDEX_JSON, location, "invalid %s: %s", what,
                          reader->fault == NULL ? "unexpected text" : reader->fault);
}

/// Ends a string in place: the byte behind it was its closing quote, or has been read. A NUL within
/// is refused, since the texts are used as C strings.
static const char *finish_text(json_reader *reader, const json_string *string) {
    char *start = (char *)(uintptr_t)string->text;
    size_t size = fsti_json_decode(string, start);
    if (memchr(start, '\0', size) != NULL) {
        reader->fault = "a text holds a NUL";
        return NULL;
    }
    start[size] = '\0';
    return start;
}

/// A string, or an unsigned number, which becomes a text by ending it later (*number_end).
static bool read_version(json_reader *reader, const char **out, char **number_end) {
    json_string string;
    json_skip_space(reader);
    if (*out != NULL) return json_fault(reader, "a key is given twice");
    if (*reader->cursor == '"') {
        if (!fsti_json_read_string(reader, &string)) return false;
        *out = finish_text(reader, &string);
        if (*out != NULL && strlen(*out) > VERSION_BYTES_MAX)
            return json_fault(reader, "a version has more than 255 bytes");
        return *out != NULL;
    }
    uint64_t number;
    const char *start = reader->cursor;
    if (!fsti_json_read_u64(reader, &number)) return false;
    *out = start;
    *number_end = (char *)(uintptr_t)reader->cursor;
    return true;
}

/// The fields of the index's metadata, by key.
static const char **find_field(fsti_delta_text *text, const json_string *key) {
    if (fsti_json_equals(key, "version")) return &text->version;
    if (fsti_json_equals(key, "base_version")) return &text->base;
    if (fsti_json_equals(key, "delta_encoding")) return &text->encoding;
    if (fsti_json_equals(key, "compression_format")) return &text->compression;
    return fsti_json_equals(key, "checksum_format") ? &text->checksum : NULL;
}

static bool read_metadata(json_reader *reader, fsti_delta_text *text) {
    if (!json_expect(reader, '{', "expected an object for metadata")) return false;
    if (json_take(reader, '}')) return true;
    bool goes_on;
    do {
        json_string key;
        char *number_end = NULL;
        if (!fsti_json_read_string(reader, &key) ||
            !json_expect(reader, ':', "expected ':' after a key"))
            return false;
        const char **field = find_field(text, &key);
        if (field == NULL ? !fsti_json_skip_value(reader, 2)
                          : !read_version(reader, field, &number_end))
            return false;
        goes_on = json_take(reader, ',');
        bool is_closed = !goes_on && json_take(reader, '}');
        // A number is ended only now: the byte behind it had to be read first.
        if (number_end != NULL) *number_end = '\0';
        if (!goes_on && !is_closed) return json_fault(reader, "expected ',' or '}' in metadata");
    } while (goes_on);
    return true;
}

static bool read_top(json_reader *reader, fsti_delta_text *text) {
    bool is_seen = false;
    if (!json_expect(reader, '{', "expected '{' at the start")) return false;
    if (json_take(reader, '}')) return fsti_json_expect_end(reader);
    do {
        json_string key;
        if (!fsti_json_read_string(reader, &key)) return false;
        bool is_metadata = fsti_json_equals(&key, "metadata");
        if (!json_expect(reader, ':', "expected ':' after a key")) return false;
        if (is_metadata && is_seen) return json_fault(reader, "metadata given twice");
        if (is_metadata ? !read_metadata(reader, text) : !fsti_json_skip_value(reader, 1))
            return false;
        is_seen = is_seen || is_metadata;
    } while (json_take(reader, ','));
    return json_expect(reader, '}', "expected ',' or '}'") && fsti_json_expect_end(reader);
}

static fsti_name index_name(const void *context, size_t at) {
    const fsti_index *index = context;
    return (fsti_name){index->bytes + index->entries[at].name.at, index->entries[at].name.size};
}

static fst_status check_map(const fsti_index *index, const char *path, fst_error *error) {
    size_t twice = SIZE_MAX;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    for (size_t i = 0; i < index->file_count; i++)
        if (memchr(index->bytes + index->files[i].at, '/', index->files[i].size) != NULL)
            return fsti_error_set(error, FST_E_PATH_ESCAPES, location,
                                  "weight_map names `%.200s`, which is not a file "
                                  "directly in the version's folder",
                                  index->bytes + index->files[i].at);
    if (!fsti_names_twice(index_name, index, index->entry_count, &twice))
        return fsti_error_memory(error, index->entry_count);
    if (twice == SIZE_MAX) return FST_OK;
    fsti_name name = index_name(index, twice);
    location.tensor = name.bytes;
    location.tensor_size = name.size;
    return fsti_error_set(error, FST_E_DUPLICATE_TENSOR, location,
                          "DuplicateTensor: weight_map names a tensor twice");
}

void fsti_delta_text_clear(fsti_delta_text *text) {
    if (text->index != NULL) fsti_index_clear(text->index);
    fsti_free(text->index);
    fsti_free(text->bytes);
    *text = (fsti_delta_text){0};
}

/// Parses both halves; `text->bytes` and `copy` hold the same text, and the first is taken over
/// already.
static fst_status parse_halves(fsti_delta_text *text, size_t byte_count, const char *path,
                               char *copy, fst_error *error) {
    json_reader reader;
    text->index = fsti_alloc_zeroed(1, sizeof *text->index);
    if (text->index == NULL) {
        fsti_free(copy);
        return fsti_error_memory(error, sizeof *text->index);
    }
    FST_TRY(fsti_index_parse(copy, byte_count, path, fsti_hash_key(), text->index, error));
    if (!fsti_json_begin(&reader, text->bytes, byte_count) || !read_top(&reader, text))
        return refuse_text(&reader, path, "index file", error);
    return check_map(text->index, path, error);
}

fst_status fsti_delta_text_parse(char *bytes, size_t byte_count, const char *path,
                                 fsti_delta_text *out, fst_error *error) {
    *out = (fsti_delta_text){.bytes = bytes};
    // Both parsers decode in place, so each has its own copy of the text.
    char *copy = fsti_alloc(byte_count + FSTI_FORMAT_PADDING_BYTES);
    fst_status status;
    if (copy == NULL) {
        status = fsti_error_memory(error, byte_count);
    } else {
        memcpy(copy, bytes, byte_count + FSTI_FORMAT_PADDING_BYTES);
        status = parse_halves(out, byte_count, path, copy, error);
    }
    if (status != FST_OK) fsti_delta_text_clear(out);
    return status;
}

static bool is_decimal(const char *text) {
    return *text != '\0' && text[strspn(text, "0123456789")] == '\0';
}

const char *fsti_version_plain(const char *version) {
    if (!is_decimal(version)) return version;
    while (version[0] == '0' && version[1] != '\0') version++;
    return version;
}

fsti_version_order fsti_version_compare(const char *a, const char *b) {
    if (strcmp(a, b) == 0) return FSTI_VERSION_SAME;
    if (!is_decimal(a) || !is_decimal(b)) return FSTI_VERSION_OTHER;
    const char *x = fsti_version_plain(a), *y = fsti_version_plain(b);
    size_t x_size = strlen(x), y_size = strlen(y);
    if (x_size != y_size) return x_size < y_size ? FSTI_VERSION_OLDER : FSTI_VERSION_NEWER;
    int order = strcmp(x, y);
    return order == 0 ? FSTI_VERSION_SAME : order < 0 ? FSTI_VERSION_OLDER : FSTI_VERSION_NEWER;
}

static bool read_stamp(json_reader *reader, fsti_delta_state *state, size_t *capacity) {
    json_string name;
    fsti_delta_stamp stamp;
    if (!fsti_json_read_string(reader, &name) ||
        !json_expect(reader, ':', "expected ':' after a key") ||
        !json_expect(reader, '[', "expected [size, time]") ||
        !fsti_json_read_u64(reader, &stamp.size_bytes) ||
        !json_expect(reader, ',', "expected [size, time]") ||
        !fsti_json_read_u64(reader, &stamp.modified_ns) ||
        !json_expect(reader, ']', "expected [size, time]"))
        return false;
    stamp.name = finish_text(reader, &name);
    if (stamp.name == NULL) return false;
    if (!fsti_path_stays_inside(stamp.name, strlen(stamp.name)))
        return json_fault(reader, "a file name leaves the folder");
    if (state->file_count == STATE_FILES_MAX) return json_fault(reader, "too many files");
    if (!fsti_array_reserve((void **)&state->files, capacity, state->file_count,
                            sizeof *state->files, STATE_FILES_MAX))
        return json_fault(reader, out_of_memory);
    state->files[state->file_count++] = stamp;
    return true;
}

static bool read_stamps(json_reader *reader, fsti_delta_state *state) {
    size_t capacity = state->file_count;
    if (state->files != NULL) return json_fault(reader, "files given twice");
    if (!json_expect(reader, '{', "expected an object for files")) return false;
    if (json_take(reader, '}')) return true;
    do {
        if (!read_stamp(reader, state, &capacity)) return false;
    } while (json_take(reader, ','));
    return json_expect(reader, '}', "expected ',' or '}' in files");
}

static bool read_state(json_reader *reader, fsti_delta_state *state) {
    bool goes_on;
    if (!json_expect(reader, '{', "expected '{' at the start")) return false;
    do {
        json_string key;
        char *number_end = NULL;
        if (!fsti_json_read_string(reader, &key)) return false;
        bool is_version = fsti_json_equals(&key, "version"),
             is_files = fsti_json_equals(&key, "files");
        if (!json_expect(reader, ':', "expected ':' after a key")) return false;
        if (is_version ? !read_version(reader, &state->version, &number_end)
            : is_files ? !read_stamps(reader, state)
                       : !fsti_json_skip_value(reader, 1))
            return false;
        goes_on = json_take(reader, ',');
        bool is_closed = !goes_on && json_take(reader, '}');
        if (number_end != NULL) *number_end = '\0';
        if (!goes_on && !is_closed) return json_fault(reader, "expected ',' or '}'");
    } while (goes_on);
    if (state->version == NULL) return json_fault(reader, "no version");
    return fsti_json_expect_end(reader);
}

fst_status fsti_delta_state_parse(char *bytes, size_t byte_count, const char *path,
                                  fsti_delta_state *out, fst_error *error) {
    json_reader reader;
    *out = (fsti_delta_state){.bytes = bytes};
    if (fsti_json_begin(&reader, bytes, byte_count) && read_state(&reader, out)) return FST_OK;
    fst_status status = reader.fault == out_of_memory
                            ? fsti_error_memory(error, sizeof *out->files)
                            : refuse_text(&reader, path, "version note", error);
    fsti_delta_state_clear(out);
    return status;
}

void fsti_delta_state_clear(fsti_delta_state *state) {
    fsti_free(state->files);
    fsti_free(state->bytes);
    *state = (fsti_delta_state){0};
}
