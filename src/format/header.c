// SPDX-License-Identifier: Apache-2.0
/// Headers: parsing, decoding names, sorting, indexing, validating, sharing.
#include <string.h>

#include "header_build.h"

fsti_header *fsti_header_ref(fsti_header *header) {
    fsti_refcount_ref(&header->refs);
    return header;
}

void fsti_header_unref(fsti_header *header) {
    if (header == NULL || !fsti_refcount_unref(&header->refs)) return;
    fsti_free(header->bytes);
    fsti_free(header->tensors);
    fsti_free(header->shapes);
    fsti_free(header->slots);
    fsti_free(header->metadata);
    fsti_free(header);
}

static fst_status json_failure(const header_build *build, fst_error *error) {
    const fsti_header *header = build->header;
    if (build->out_of_memory) return fsti_error_memory(error, header->byte_count);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = build->rules->path;
    size_t fault_at;
    if (build->limit != NULL) {
        location.byte_offset =
            FSTI_FORMAT_LENGTH_BYTES + (uint64_t)(build->reader.cursor - build->reader.start);
        return fsti_error_set(error, FST_E_HEADER_TOO_LARGE, location,
                              "the header is beyond a limit of this reader: %s", build->limit);
    }
    // The reference checks UTF-8 before parsing JSON, so a UTF-8 error takes precedence.
    if (!fsti_utf8_valid((const unsigned char *)header->bytes, header->byte_count, &fault_at)) {
        location.byte_offset = FSTI_FORMAT_LENGTH_BYTES + fault_at;
        return fsti_error_set(error, FST_E_INVALID_HEADER, location, "invalid UTF-8 in header");
    }
    location.byte_offset =
        FSTI_FORMAT_LENGTH_BYTES + (uint64_t)(build->reader.cursor - build->reader.start);
    return fsti_error_set(error, FST_E_INVALID_HEADER_JSON, location, "invalid JSON in header: %s",
                          build->reader.fault);
}

static fst_status duplicate_failure(const header_build *build, size_t index, fst_error *error) {
    const fsti_header *header = build->header;
    const fsti_tensor *tensor = &header->tensors[index];
    fsti_error_location location = {.file = build->rules->path,
                                    .tensor = fsti_header_name(header, tensor),
                                    .tensor_size = tensor->name_size,
                                    .byte_offset = FSTI_FORMAT_LENGTH_BYTES + tensor->name_at};
    return fsti_error_set(error, FST_E_INVALID_HEADER_JSON, location,
                          "invalid JSON in header: "
                          "duplicate tensor name");
}

/// Decodes a span of the text in place and terminates it with NUL (at or before the quote).
static void finish_text(fsti_header *header, fsti_text *text) {
    char *start = header->bytes + text->at;
    json_string raw = {start, text->size, true};
    if (memchr(start, '\\', text->size) != NULL)
        text->size = (uint32_t)fsti_json_decode(&raw, start);
    start[text->size] = '\0';
}

static void finish_names(fsti_header *header) {
    for (size_t i = 0; i < header->tensor_count; i++) {
        fsti_tensor *tensor = &header->tensors[i];
        if (tensor->escaped) {
            fsti_text text = {tensor->name_at, tensor->name_size};
            finish_text(header, &text);
            tensor->name_size = text.size;
            tensor->hash =
                (uint32_t)(fsti_hash(header->bytes + text.at, text.size, header->hash_key) >> 32);
        } else {
            header->bytes[tensor->name_at + tensor->name_size] = '\0';
        }
    }
}

/// Decodes metadata. For a repeated key, the last value counts, at the first position.
static void finish_metadata(fsti_header *header) {
    size_t kept = 0;
    for (size_t i = 0; i < header->metadata_count; i++) {
        fsti_metadata_pair pair = header->metadata[i];
        finish_text(header, &pair.key);
        finish_text(header, &pair.value);
        header->metadata[kept++] = pair;
    }
    header->metadata_count = kept;
}

static fsti_name name_of_key(const void *context, size_t index) {
    const fsti_header *header = context;
    fsti_text key = header->metadata[index].key;
    return (fsti_name){header->bytes + key.at, key.size};
}

/// Removes earlier values of repeated metadata keys.
static bool drop_repeated_metadata(fsti_header *header) {
    size_t count = header->metadata_count, kept = 0;
    fsti_name_table places;
    if (count < 2) return true;
    if (!fsti_name_table_make(&places, name_of_key, header, count)) return false;
    for (size_t i = 0; i < count; i++) {
        size_t at = fsti_name_table_find(&places, name_of_key(header, i));
        if (at != SIZE_MAX) {
            header->metadata[at].value = header->metadata[i].value;
            continue;
        }
        header->metadata[kept] = header->metadata[i];
        fsti_name_table_put(&places, kept++);
    }
    header->metadata_count = kept;
    fsti_name_table_clear(&places);
    return true;
}

/// Frees unused capacity of the arrays.
static void trim_tables(header_build *build) {
    fsti_header *header = build->header;
    if (build->tensor_capacity > header->tensor_count && header->tensor_count > 0) {
        void *trimmed =
            fsti_realloc(header->tensors, header->tensor_count * sizeof *header->tensors);
        if (trimmed != NULL) header->tensors = trimmed;
    }
    if (build->shape_capacity > header->shape_count && header->shape_count > 0) {
        void *trimmed = fsti_realloc(header->shapes, header->shape_count * sizeof *header->shapes);
        if (trimmed != NULL) header->shapes = trimmed;
    }
}

/// Adds up the memory of all tables.
static void sum_tables(fsti_header *header) {
    header->table_bytes = sizeof *header + header->byte_count + FSTI_FORMAT_PADDING_BYTES +
                          header->tensor_count * sizeof *header->tensors +
                          header->shape_count * sizeof *header->shapes +
                          header->slot_count * sizeof *header->slots +
                          header->metadata_count * sizeof *header->metadata;
}

/// Keeps only tensors that are completely in the file.
static bool drop_cut_tensors(fsti_header *header, uint64_t file_size) {
    size_t count = fsti_header_whole_count(header, file_size - header->data_begin), duplicate;
    if (count == header->tensor_count) return true;
    header->tensor_count = count;
    fsti_free(header->slots);
    header->slots = NULL;
    header->slot_count = 0;
    return fsti_header_index_names(header, &duplicate);
}

static fst_status build_tables(header_build *build, fst_error *error) {
    fsti_header *header = build->header;
    size_t fault_at;
    if (!fsti_header_read_json(build) || !fsti_header_tables_fit(build))
        return json_failure(build, error);
    if (build->reader.has_high_bytes &&
        !fsti_utf8_valid((const unsigned char *)header->bytes, header->byte_count, &fault_at))
        return json_failure(build, error);
    finish_names(header);
    finish_metadata(header);
    trim_tables(build);
    size_t duplicate;
    if (!drop_repeated_metadata(header) || (build->unordered && !fsti_header_sort(header)) ||
        !fsti_header_index_names(header, &duplicate))
        return fsti_error_memory(error, header->byte_count);
    if (duplicate != SIZE_MAX) return duplicate_failure(build, duplicate, error);
    FST_TRY(fsti_header_validate(header, build->rules, error));
    if (build->rules->cut && !drop_cut_tensors(header, build->rules->file_size))
        return fsti_error_memory(error, header->byte_count);
    if (header->tensor_count > 0)
        header->data_bytes = header->tensors[header->tensor_count - 1].end;
    sum_tables(header);
    return FST_OK;
}

fst_status fsti_header_parse(char *bytes, size_t byte_count, const fsti_header_rules *rules,
                             fsti_header **out, fst_error *error) {
    fsti_header *header = fsti_alloc_zeroed(1, sizeof *header);
    if (header == NULL) {
        fsti_free(bytes);
        return fsti_error_memory(error, sizeof *header);
    }
    fsti_refcount_init(&header->refs);
    header->bytes = bytes;
    header->byte_count = byte_count;
    header->data_begin = FSTI_FORMAT_LENGTH_BYTES + byte_count;
    header->hash_key = rules->hash_key;
    header_build build = {.header = header,
                          .rules = rules,
                          .reader = {.start = bytes, .cursor = bytes, .end = bytes + byte_count},
                          .last_dtype = FST_DTYPE_F32};
    fst_status status = build_tables(&build, error);
    if (status != FST_OK) {
        fsti_header_unref(header);
        return status;
    }
    *out = header;
    return FST_OK;
}
