// SPDX-License-Identifier: Apache-2.0
/// Validates the directory of a compressed file against the file's header and the original one:
/// each original tensor appears once, compressed or not, and all numbers are consistent before they
/// are used.
#include <inttypes.h>
#include <string.h>

#include "format.h"

typedef struct packed_parse {
    const fsti_packed_source *source;
    fsti_packed *packed;
    const unsigned char *head, *tensor_table, *chunk_table;
    uint64_t tensor_count, chunk_count, entry_bytes;
    uint64_t chunk_next; ///< first chunk of the next tensor
    fst_error *error;
} packed_parse;

static fst_status refuse(const packed_parse *parse, const fsti_tensor *entry, fst_status status,
                         const char *why) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = parse->source->path;
    if (entry != NULL) {
        location.tensor = fsti_header_name(parse->source->header, entry);
        location.tensor_size = entry->name_size;
    }
    return fsti_error_set(parse->error, status, location, "the compressed file %s%s",
                          status == FST_E_UNSUPPORTED ? "" : "is damaged: ", why);
}

/// The next metadata pair from *index on, except the one that marks a compressed file; NULL at the
/// end.
static const fsti_metadata_pair *next_user_pair(const fsti_header *header, size_t *index) {
    size_t size = strlen(FSTI_PACKED_KEY);
    while (*index < header->metadata_count) {
        const fsti_metadata_pair *pair = &header->metadata[(*index)++];
        if (pair->key.size != size ||
            memcmp(header->bytes + pair->key.at, FSTI_PACKED_KEY, size) != 0)
            return pair;
    }
    return NULL;
}

static bool is_same_text(const fsti_header *a, fsti_text one, const fsti_header *b,
                         fsti_text other) {
    return one.size == other.size && memcmp(a->bytes + one.at, b->bytes + other.at, one.size) == 0;
}

/// Both headers must have the same metadata, so that readers without support for compression see
/// the same.
static bool has_same_metadata(const fsti_header *stored, const fsti_header *original) {
    for (size_t i = 0, j = 0;;) {
        const fsti_metadata_pair *a = next_user_pair(stored, &i), *b = next_user_pair(original, &j);
        if (a == NULL || b == NULL) return a == b;
        if (!is_same_text(stored, a->key, original, b->key) ||
            !is_same_text(stored, a->value, original, b->value))
            return false;
    }
}

static bool is_vector(const fsti_tensor *tensor) {
    return tensor->dtype == FST_DTYPE_U8 && tensor->rank == 1;
}

void fsti_packed_clear(fsti_packed *packed) {
    fsti_header_unref(packed->header);
    fsti_free(packed->tensors);
    fsti_free(packed->chunks);
    fsti_free(packed->bytes);
    *packed = (fsti_packed){0};
}

static fst_status check_sizes(packed_parse *parse) {
    fsti_packed *packed = parse->packed;
    const unsigned char *head = parse->head;
    uint64_t stated_bytes = fsti_number_load(head + 16, 8), size = parse->entry_bytes, left = 0;
    parse->tensor_count = fsti_number_load(head + 24, 4);
    parse->chunk_count = fsti_number_load(head + 32, 8);
    packed->true_bytes = fsti_number_load(head + 40, 8);
    packed->original_bytes = fsti_number_load(head + 48, 8);
    if (stated_bytes < FSTI_PACKED_HEAD_BYTES || stated_bytes > size)
        return refuse(parse, NULL, FST_E_CORRUPT, "its directory has a wrong size");
    left = stated_bytes - FSTI_PACKED_HEAD_BYTES;
    // The count has 32 bits, so this product can't overflow. The chunk count has 64; it is compared
    // by division before it is multiplied.
    uint64_t tensor_bytes = parse->tensor_count * FSTI_PACKED_TENSOR_BYTES;
    if (tensor_bytes > left ||
        parse->chunk_count > (left - tensor_bytes) / FSTI_PACKED_CHUNK_BYTES ||
        left - tensor_bytes - parse->chunk_count * FSTI_PACKED_CHUNK_BYTES !=
            packed->original_bytes)
        return refuse(parse, NULL, FST_E_CORRUPT, "its directory is inconsistent");
    if (packed->original_bytes < FSTI_FORMAT_LENGTH_BYTES ||
        packed->original_bytes > packed->true_bytes)
        return refuse(parse, NULL, FST_E_CORRUPT,
                      "the original header does not fit in the original file");
    if (parse->source->file_size < UINT64_MAX / FSTI_PACKED_FACTOR_MAX - FSTI_PACKED_SLACK &&
        packed->true_bytes > parse->source->file_size * FSTI_PACKED_FACTOR_MAX + FSTI_PACKED_SLACK)
        return refuse(parse, NULL, FST_E_CORRUPT,
                      "its stated size is more than 64 times the file size");
    for (uint64_t i = stated_bytes; i < size; i++)
        if (packed->bytes[i] != 0)
            return refuse(parse, NULL, FST_E_CORRUPT, "its directory's padding is not zero");
    parse->tensor_table = head + FSTI_PACKED_HEAD_BYTES;
    parse->chunk_table = parse->tensor_table + tensor_bytes;
    packed->original =
        (const char *)parse->chunk_table + parse->chunk_count * FSTI_PACKED_CHUNK_BYTES;
    return FST_OK;
}

/// The CRC32C of the directory, with its own field as zero.
static uint32_t directory_crc(char *bytes, size_t size) {
    char kept[4];
    memcpy(kept, bytes + 56, 4);
    memset(bytes + 56, 0, 4);
    uint32_t crc = fsti_crc32c(bytes, size);
    memcpy(bytes + 56, kept, 4);
    return crc;
}

static fst_status read_head(packed_parse *parse) {
    const unsigned char *head = parse->head;
    if (parse->entry_bytes < FSTI_PACKED_HEAD_BYTES || memcmp(head, FSTI_PACKED_MAGIC, 8) != 0)
        return refuse(parse, NULL, FST_E_CORRUPT, "its directory has no valid magic number");
    if (fsti_number_load(head + 8, 4) != FSTI_PACKED_VERSION || fsti_number_load(head + 12, 4) != 0)
        return refuse(parse, NULL, FST_E_UNSUPPORTED,
                      "has a version that this library does not support");
    if (fsti_number_load(head + 28, 4) != 0)
        return refuse(parse, NULL, FST_E_UNSUPPORTED,
                      "has a coder that this library does not support");
    if (fsti_number_load(head + 60, 4) != 0)
        return refuse(parse, NULL, FST_E_CORRUPT, "a reserved field is not zero");
    if (fsti_number_load(head + 56, 4) != directory_crc(parse->packed->bytes, parse->entry_bytes))
        return refuse(parse, NULL, FST_E_CORRUPT, "the CRC32C of its directory does not match");
    return check_sizes(parse);
}

static fst_status read_original(packed_parse *parse) {
    fsti_packed *packed = parse->packed;
    const fsti_packed_source *source = parse->source;
    fsti_header_rules rules = {
        .path = source->path, .file_size = packed->true_bytes, .hash_key = source->hash_key};
    uint64_t header_bytes;
    FST_TRY(fsti_header_length((const unsigned char *)packed->original, &rules, &header_bytes,
                               parse->error));
    if (header_bytes != packed->original_bytes - FSTI_FORMAT_LENGTH_BYTES)
        return refuse(parse, NULL, FST_E_CORRUPT, "the original header has a different length");
    size_t size = (size_t)header_bytes;
    char *text = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (text == NULL) return fsti_error_memory(parse->error, size);
    memcpy(text, packed->original + FSTI_FORMAT_LENGTH_BYTES, size);
    return fsti_header_parse(text, size, &rules, &packed->header, parse->error);
}

/// Finds the original tensor with that name, which must not have been used before. A used tensor
/// has a stored_end above 0, even an empty one, because the header precedes the data.
static fst_status find_original(packed_parse *parse, const fsti_tensor *entry, size_t prefix,
                                size_t *out) {
    fsti_packed *packed = parse->packed;
    const char *name = fsti_header_name(parse->source->header, entry);
    *out = fsti_header_find(packed->header, name + prefix, entry->name_size - prefix);
    if (*out == SIZE_MAX)
        return refuse(parse, entry, FST_E_CORRUPT,
                      "an entry's name is not a tensor of the original header");
    if (packed->tensors[*out].stored_end != 0)
        return refuse(parse, entry, FST_E_CORRUPT, "duplicate tensor");
    uint64_t begin = parse->source->header->data_begin;
    packed->tensors[*out].stored_begin = begin + entry->begin;
    packed->tensors[*out].stored_end = begin + entry->end;
    return FST_OK;
}

/// Reads the chunks of a compressed tensor: sizes must be within limits and add up to the entry.
static fst_status read_chunks(packed_parse *parse, const fsti_tensor *entry,
                              fsti_packed_tensor *tensor, uint64_t true_bytes) {
    uint64_t at = tensor->stored_begin, chunk_bytes = (uint64_t)1 << tensor->chunk_log;
    for (uint64_t i = 0; i < tensor->chunk_count; i++) {
        const unsigned char *record =
            parse->chunk_table + (tensor->chunk_first + i) * FSTI_PACKED_CHUNK_BYTES;
        uint32_t word = (uint32_t)fsti_number_load(record, 4);
        fsti_packed_chunk *chunk = &parse->packed->chunks[tensor->chunk_first + i];
        *chunk = (fsti_packed_chunk){.begin = at,
                                     .crc = (uint32_t)fsti_number_load(record + 4, 4),
                                     .stored_bytes = word & ~FSTI_PACKED_RAW,
                                     .is_raw = (word & FSTI_PACKED_RAW) != 0};
        uint64_t loaded_bytes = fsti_min(chunk_bytes, true_bytes - i * chunk_bytes);
        if (chunk->stored_bytes == 0 || chunk->stored_bytes > loaded_bytes ||
            (chunk->is_raw ? chunk->stored_bytes != loaded_bytes : chunk->stored_bytes % 16 != 0))
            return refuse(parse, entry, FST_E_CORRUPT, "a chunk has an impossible size");
        at += chunk->stored_bytes;
        if (at > tensor->stored_end)
            return refuse(parse, entry, FST_E_CORRUPT, "chunks exceed their entry");
    }
    if (tensor->stored_end - at >= FSTI_PACKED_ALIGNMENT)
        return refuse(parse, entry, FST_E_CORRUPT, "chunks do not fill their entry");
    return FST_OK;
}

static fst_status read_packed(packed_parse *parse, const fsti_tensor *entry,
                              const unsigned char *record) {
    fsti_packed *packed = parse->packed;
    size_t index, prefix = strlen(FSTI_PACKED_NAME ".");
    const char *name = fsti_header_name(parse->source->header, entry);
    if (entry->name_size < prefix || memcmp(name, FSTI_PACKED_NAME ".", prefix) != 0 ||
        !is_vector(entry))
        return refuse(parse, entry, FST_E_CORRUPT, "a record has no packed entry");
    FST_TRY(find_original(parse, entry, prefix, &index));
    const fsti_tensor *original = &packed->header->tensors[index];
    fsti_packed_tensor *tensor = &packed->tensors[index];
    uint64_t true_bytes = original->end - original->begin;
    if (record[1] >= FSTI_LAYOUT_COUNT || record[2] != FSTI_CODER_ZSTD)
        return refuse(parse, entry, FST_E_UNSUPPORTED,
                      "has a layout or coder that this library does not support");
    if (record[0] != original->dtype ||
        record[1] != fsti_codec_layout_of((fst_dtype)original->dtype) ||
        fsti_number_load(record + 8, 8) != true_bytes || true_bytes == 0)
        return refuse(parse, entry, FST_E_CORRUPT, "a record differs from the original header");
    if (record[3] < FSTI_CHUNK_LOG_MIN || record[3] > FSTI_CHUNK_LOG_MAX ||
        fsti_number_load(record + 4, 4) != 0 || fsti_number_load(record + 24, 8) != 0 ||
        entry->begin % FSTI_PACKED_ALIGNMENT != 0)
        return refuse(parse, entry, FST_E_CORRUPT, "a record has an impossible value");
    tensor->is_packed = true;
    tensor->chunk_log = record[3];
    tensor->chunk_first = fsti_number_load(record + 16, 8);
    tensor->chunk_count = (true_bytes - 1) / ((uint64_t)1 << record[3]) + 1;
    if (tensor->chunk_first != parse->chunk_next ||
        tensor->chunk_count > parse->chunk_count - parse->chunk_next)
        return refuse(parse, entry, FST_E_CORRUPT,
                      "a tensor's number of chunks does not match its size");
    parse->chunk_next += tensor->chunk_count;
    return read_chunks(parse, entry, tensor, true_bytes);
}

static fst_status read_plain(packed_parse *parse, const fsti_tensor *entry) {
    const fsti_header *stored = parse->source->header;
    const fsti_header *header = parse->packed->header;
    size_t index;
    FST_TRY(find_original(parse, entry, 0, &index));
    const fsti_tensor *original = &header->tensors[index];
    if (original->dtype != entry->dtype || original->rank != entry->rank ||
        original->end - original->begin != entry->end - entry->begin ||
        memcmp(fsti_header_shape(header, original), fsti_header_shape(stored, entry),
               entry->rank * sizeof(uint64_t)) != 0)
        return refuse(parse, entry, FST_E_CORRUPT, "a tensor differs from the original header");
    return FST_OK;
}

static fst_status read_entries(packed_parse *parse) {
    const fsti_header *stored = parse->source->header;
    fsti_packed *packed = parse->packed;
    size_t count = packed->header->tensor_count;
    packed->tensors = fsti_alloc_zeroed(count, sizeof *packed->tensors);
    packed->chunks = fsti_alloc_zeroed((size_t)parse->chunk_count, sizeof *packed->chunks);
    if (packed->tensors == NULL || packed->chunks == NULL)
        return fsti_error_memory(parse->error, parse->chunk_count * sizeof *packed->chunks);
    if (parse->source->cut && stored->tensor_count - 1 < count)
        return refuse(parse, NULL, FST_E_UNSUPPORTED,
                      "is truncated, and tensors of a truncated compressed file can't be located");
    if (!has_same_metadata(stored, packed->header))
        return refuse(parse, NULL, FST_E_CORRUPT,
                      "its metadata differs from the original header's");
    if (stored->tensor_count - 1 != count || parse->tensor_count > count)
        return refuse(parse, NULL, FST_E_CORRUPT, "it has a different number of tensors");
    for (size_t i = 0; i < count; i++) {
        const fsti_tensor *entry = &stored->tensors[i + 1];
        FST_TRY(i < parse->tensor_count
                    ? read_packed(parse, entry, parse->tensor_table + i * FSTI_PACKED_TENSOR_BYTES)
                    : read_plain(parse, entry));
    }
    if (parse->chunk_next != parse->chunk_count)
        return refuse(parse, NULL, FST_E_CORRUPT, "it has chunks that belong to no tensor");
    packed->chunk_count = parse->chunk_count;
    packed->packed_count = (size_t)parse->tensor_count;
    return FST_OK;
}

fst_status fsti_packed_parse(char *bytes, size_t byte_count, const fsti_packed_source *source,
                             fsti_packed *out, fst_error *error) {
    *out = (fsti_packed){.bytes = bytes, .stored_bytes = source->file_size};
    packed_parse parse = {.source = source,
                          .packed = out,
                          .head = (const unsigned char *)bytes,
                          .entry_bytes = byte_count,
                          .error = error};
    fst_status status = read_head(&parse);
    if (status == FST_OK && out->original != NULL) status = read_original(&parse);
    if (status == FST_OK && out->header != NULL) status = read_entries(&parse);
    if (status != FST_OK) fsti_packed_clear(out);
    return status;
}

size_t fsti_packed_tensor_at(const fsti_packed *packed, uint64_t offset) {
    const fsti_header *header = packed->header;
    uint64_t at = offset - header->data_begin;
    size_t low = 0, high = header->tensor_count;
    // Find the first tensor that ends after the byte; earlier ones, including empty ones, do not.
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (header->tensors[middle].end <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint64_t fsti_packed_chunk_bytes(const fsti_packed *packed) {
    uint32_t log = 0;
    for (size_t i = 0; i < packed->header->tensor_count; i++)
        if (packed->tensors[i].is_packed && packed->tensors[i].chunk_log > log)
            log = packed->tensors[i].chunk_log;
    return log == 0 ? 0 : (uint64_t)1 << log;
}
