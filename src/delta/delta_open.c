// SPDX-License-Identifier: Apache-2.0
/// Opens a chain of delta versions and checks everything that can be checked without the base.
#include <stdlib.h>
#include <string.h>

#include "delta_private.h"

#define VERSIONS_MAX 100000u

static fst_status refuse_index(const delta_version *version, fst_status status, const char *what,
                               const char *value, fst_error *error) {
    fsti_error_location place = {.file = version->index_path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, status, place, "%s%s%s%s", what, value == NULL ? "" : " '",
                          value == NULL ? "" : value, value == NULL ? "" : "'");
}

/// Checks the fields of the index that describe the version: all exist and have supported values.
static fst_status check_metadata(delta_version *version, fst_error *error) {
    const fsti_delta_text *text = &version->text;
    if (text->encoding == NULL)
        return refuse_index(version, FST_E_ARGUMENT,
                            "this is a full version, not a delta: its index has no delta_encoding",
                            NULL, error);
    if (text->version == NULL || text->base == NULL || text->version[0] == '\0' ||
        text->base[0] == '\0')
        return refuse_index(version, FST_E_INDEX_JSON, "the index lacks version or base_version",
                            NULL, error);
    if (text->compression == NULL || strcmp(text->compression, "zstd") != 0)
        return refuse_index(version, FST_E_UNSUPPORTED, "compression_format must be 'zstd', not",
                            text->compression == NULL ? "" : text->compression, error);
    if (strcmp(text->encoding, "xor") == 0)
        version->encoding = FST_DELTA_XOR;
    else if (strcmp(text->encoding, "overwrite") == 0)
        version->encoding = FST_DELTA_OVERWRITE;
    else
        return refuse_index(version, FST_E_UNSUPPORTED,
                            "delta_encoding must be 'xor' or 'overwrite', not", text->encoding,
                            error);
    version->kind = text->checksum == NULL ? NULL : fsti_digest_of_delta(text->checksum);
    if (version->kind == NULL)
        return refuse_index(version, FST_E_UNSUPPORTED,
                            "checksum_format must be 'adler32', 'xxh3-128' or 'blake3', not",
                            text->checksum == NULL ? "" : text->checksum, error);
    fsti_version_order order = fsti_version_compare(text->base, text->version);
    if (order == FSTI_VERSION_SAME || order == FSTI_VERSION_NEWER)
        return refuse_index(version, FST_E_VERSION, "base_version is not older than version",
                            text->version, error);
    return version->kind->ready(error);
}

static fsti_name metadata_key(const void *context, size_t at) {
    const fsti_header *header = context;
    return (fsti_name){header->bytes + header->metadata[at].key.at, header->metadata[at].key.size};
}

/// Checks that an entry is a vector of bytes and has a well-formed checksum in the shard's
/// metadata.
static fst_status check_entry(const delta_version *version, size_t shard_index, size_t index,
                              const fsti_name_table *keys, fst_error *error) {
    const model_file *shard = &version->shards[shard_index];
    const fsti_header *header = shard->header;
    const fsti_tensor *tensor = &header->tensors[index];
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    fsti_name name = {fsti_header_name(header, tensor), tensor->name_size};
    fsti_error_location place = {.file = fsti_file_path(shard->file),
                                 .tensor = name.bytes,
                                 .tensor_size = name.size,
                                 .byte_offset = FST_NO_OFFSET};
    if (tensor->dtype != FST_DTYPE_U8 || tensor->rank != 1)
        return fsti_error_set(
            error, FST_E_TENSOR_INVALID_INFO, place,
            "TensorInvalidInfo: an entry of a delta must be U8 with one dimension");
    size_t at = fsti_name_table_find(keys, name);
    if (at == SIZE_MAX)
        return fsti_error_set(error, FST_E_TENSOR_INVALID_INFO, place,
                              "the shard's metadata lacks the tensor's checksum");
    fsti_text value = header->metadata[at].value;
    if (value.size != 2 * (size_t)version->kind->digest_bytes ||
        !fsti_digest_read(header->bytes + value.at, version->kind->digest_bytes, digest))
        return fsti_error_set(error, FST_E_TENSOR_INVALID_INFO, place,
                              "the tensor's checksum is not %u lower-case hexadecimal digits",
                              2 * version->kind->digest_bytes);
    version->checksums[shard_index][index] = header->bytes + value.at;
    return FST_OK;
}

static fst_status check_shard(const delta_version *version, size_t shard_index, size_t expected,
                              fst_error *error) {
    const model_file *shard = &version->shards[shard_index];
    const fsti_header *header = shard->header;
    fsti_error_location place = {.file = fsti_file_path(shard->file), .byte_offset = FST_NO_OFFSET};
    fsti_name_table keys;
    if (header->tensor_count != expected)
        return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, place,
                              "the shard holds %zu tensors, but the index lists %zu for it",
                              header->tensor_count, expected);
    const char **checksums = fsti_alloc_zeroed(header->tensor_count + 1, sizeof *checksums);
    version->checksums[shard_index] = checksums;
    if (checksums == NULL) return fsti_error_memory(error, header->tensor_count);
    bool is_made = fsti_name_table_make(&keys, metadata_key, header, header->metadata_count + 1);
    fst_status status = is_made ? FST_OK : fsti_error_memory(error, header->metadata_count);
    for (size_t i = 0; i < header->metadata_count && status == FST_OK; i++)
        if (fsti_name_table_put(&keys, i) != SIZE_MAX)
            status = fsti_error_set(error, FST_E_DUPLICATE_TENSOR, place,
                                    "the shard's metadata has a checksum twice");
    for (size_t i = 0; i < header->tensor_count && status == FST_OK; i++)
        status = check_entry(version, shard_index, i, &keys, error);
    fsti_name_table_clear(&keys);
    return status;
}

/// Opens the shards. The names in the index are unique, so if the counts are equal and each name is
/// found, index and shards list the same tensors.
static fst_status open_shards(delta_version *version, fst_error *error) {
    const fsti_index *index = version->text.index;
    fst_model empty = {.hash_key = fsti_hash_key()};
    version->shards = fsti_alloc_zeroed(index->file_count + 1, sizeof *version->shards);
    version->checksums = fsti_alloc_zeroed(index->file_count + 1, sizeof *version->checksums);
    size_t *counts = fsti_alloc_zeroed(index->file_count + 1, sizeof *counts);
    fst_status status = version->shards == NULL || version->checksums == NULL || counts == NULL
                            ? fsti_error_memory(error, index->file_count)
                            : FST_OK;
    for (size_t i = 0; i < index->entry_count && status == FST_OK; i++)
        counts[index->entries[i].file]++;
    for (size_t i = 0; i < index->file_count && status == FST_OK; i++) {
        char *slash = fsti_location_join(version->folder, "/");
        char *path =
            slash == NULL ? NULL : fsti_location_join(slash, index->bytes + index->files[i].at);
        fsti_free(slash);
        if (path == NULL) {
            status = fsti_error_memory(error, 64);
            break;
        }
        status = fsti_model_file_open(&empty, path, FST_OPEN_STORED, &version->shards[i], error);
        fsti_free(path);
        if (status != FST_OK) break;
        version->shard_count = i + 1;
        status = check_shard(version, i, counts[i], error);
    }
    fsti_free(counts);
    return status;
}

/// Adds sizes and checksums of all entries to the digest of the index, which contains neither. A
/// delta that was published again under the same names then has another digest.
static fst_status digest_entries(delta_version *version, fst_error *error) {
    void *state = fsti_digest_xxh3.begin();
    bool is_good = state != NULL && fsti_digest_xxh3.update(state, version->index_digest, 16);
    for (size_t i = 0; i < version->shard_count; i++) {
        const fsti_header *header = version->shards[i].header;
        for (size_t k = 0; k < header->tensor_count && is_good; k++) {
            const fsti_tensor *tensor = &header->tensors[k];
            uint64_t range[2] = {tensor->begin, tensor->end};
            is_good = fsti_digest_xxh3.update(state, range, sizeof range) &&
                      fsti_digest_xxh3.update(state, version->checksums[i][k],
                                              2 * (size_t)version->kind->digest_bytes);
        }
    }
    is_good = state != NULL &&
              fsti_digest_xxh3.end(state, is_good ? version->index_digest : NULL) && is_good;
    return is_good ? FST_OK : fsti_error_memory(error, 64);
}

static fst_status open_version(delta_version *version, const char *folder, fst_error *error) {
    char *bytes;
    size_t size;
    version->folder = fsti_string_copy(folder, strlen(folder));
    version->index_path = fsti_location_join(folder, "/" DELTA_INDEX_NAME);
    if (version->folder == NULL || version->index_path == NULL)
        return fsti_error_memory(error, strlen(folder));
    FST_TRY(fsti_model_read_text(version->index_path, &bytes, &size, error));
    fsti_digest_xxh3.hash(bytes, size, version->index_digest);
    FST_TRY(fsti_delta_text_parse(bytes, size, version->index_path, &version->text, error));
    FST_TRY(check_metadata(version, error));
    FST_TRY(open_shards(version, error));
    return digest_entries(version, error);
}

/// One tensor of one version, before entries are grouped by name.
typedef struct open_entry {
    fsti_name name;
    delta_frame frame;
} open_entry;

static int compare_entries(const void *a_pointer, const void *b_pointer) {
    const open_entry *a = a_pointer, *b = b_pointer;
    size_t size = a->name.size < b->name.size ? a->name.size : b->name.size;
    int order = memcmp(a->name.bytes, b->name.bytes, size);
    if (order != 0) return order;
    if (a->name.size != b->name.size) return a->name.size < b->name.size ? -1 : 1;
    return a->frame.version < b->frame.version ? -1 : a->frame.version > b->frame.version;
}

static fst_status collect_entries(const fst_delta *delta, open_entry *out, fst_error *error) {
    size_t count = 0;
    for (size_t v = 0; v < delta->version_count; v++) {
        const delta_version *version = &delta->versions[v];
        const fsti_index *index = version->text.index;
        for (size_t i = 0; i < index->entry_count; i++) {
            const fsti_index_entry *row = &index->entries[i];
            const model_file *shard = &version->shards[row->file];
            fsti_name name = {index->bytes + row->name.at, row->name.size};
            size_t at = fsti_header_find(shard->header, name.bytes, name.size);
            fsti_error_location place = {.file = fsti_file_path(shard->file),
                                         .tensor = name.bytes,
                                         .tensor_size = name.size,
                                         .byte_offset = FST_NO_OFFSET};
            if (at == SIZE_MAX)
                return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, place,
                                      "the index lists the tensor, but the shard lacks it");
            const fsti_tensor *tensor = &shard->header->tensors[at];
            out[count++] =
                (open_entry){name,
                             {shard->file, version->checksums[row->file][at],
                              shard->header->data_begin + tensor->begin,
                              tensor->end - tensor->begin, (uint32_t)v, version->encoding}};
        }
    }
    return FST_OK;
}

static fst_status group_entries(fst_delta *delta, fst_error *error) {
    size_t count = 0;
    for (size_t v = 0; v < delta->version_count; v++)
        count += delta->versions[v].text.index->entry_count;
    open_entry *entries = fsti_alloc_zeroed(count + 1, sizeof *entries);
    delta->frames = fsti_alloc_zeroed(count + 1, sizeof *delta->frames);
    delta->tensors = fsti_alloc_zeroed(count + 1, sizeof *delta->tensors);
    fst_status status = entries == NULL || delta->frames == NULL || delta->tensors == NULL
                            ? fsti_error_memory(error, count)
                            : collect_entries(delta, entries, error);
    if (status == FST_OK && entries != NULL)
        qsort(entries, count, sizeof *entries, compare_entries);
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        const fsti_name *name = &entries[i].name;
        delta_tensor *last =
            delta->tensor_count == 0 ? NULL : &delta->tensors[delta->tensor_count - 1];
        delta->frames[delta->frame_count++] = entries[i].frame;
        if (last != NULL && last->name_size == name->size &&
            memcmp(last->name, name->bytes, name->size) == 0)
            last->frame_count++;
        else
            delta->tensors[delta->tensor_count++] = (delta_tensor){name->bytes, name->size, i, 1};
    }
    fsti_free(entries);
    return status;
}

/// Checks that each version is based on the one before it.
static fst_status check_lineage(const fst_delta *delta, fst_error *error) {
    for (size_t i = 1; i < delta->version_count; i++) {
        const fsti_delta_text *before = &delta->versions[i - 1].text,
                              *text = &delta->versions[i].text;
        if (fsti_version_compare(text->base, before->version) == FSTI_VERSION_SAME) continue;
        fsti_error_location place = {.file = delta->versions[i].index_path,
                                     .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_VERSION, place,
                              "version %s is based on %s, but the chain has %s before it",
                              text->version, text->base, before->version);
    }
    return FST_OK;
}

fst_status fsti_delta_open(const char *const *folders, size_t folder_count, fst_delta **out,
                           fst_error *error) {
    *out = NULL;
    if (folder_count > VERSIONS_MAX)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "a chain of %zu versions",
                              folder_count);
    fst_delta *delta = fsti_alloc_zeroed(1, sizeof *delta);
    if (delta == NULL) return fsti_error_memory(error, sizeof *delta);
    fst_status status = FST_OK;
    delta->versions = fsti_alloc_zeroed(folder_count, sizeof *delta->versions);
    if (delta->versions == NULL)
        status = fsti_error_memory(error, folder_count * sizeof *delta->versions);
    for (size_t i = 0; i < folder_count && status == FST_OK; i++) {
        delta->version_count = i + 1;
        status = open_version(&delta->versions[i], folders[i], error);
    }
    if (status == FST_OK) status = check_lineage(delta, error);
    if (status == FST_OK) status = group_entries(delta, error);
    if (status != FST_OK) {
        fsti_delta_close(delta);
        return status;
    }
    *out = delta;
    return FST_OK;
}

void fsti_delta_close(fst_delta *delta) {
    if (delta == NULL) return;
    for (size_t i = 0; i < delta->version_count; i++) {
        delta_version *version = &delta->versions[i];
        for (size_t k = 0; k < version->shard_count; k++) {
            fsti_model_file_clear(&version->shards[k]);
            fsti_free(version->checksums[k]);
        }
        fsti_free(version->checksums);
        fsti_free(version->shards);
        fsti_delta_text_clear(&version->text);
        fsti_free(version->folder);
        fsti_free(version->index_path);
    }
    fsti_free(delta->versions);
    fsti_free(delta->tensors);
    fsti_free(delta->frames);
    fsti_free(delta);
}

void fsti_delta_info(const fst_delta *delta, fst_delta_info *out) {
    const delta_version *last = &delta->versions[delta->version_count - 1];
    out->base_version = delta->versions[0].text.base;
    out->version = last->text.version;
    out->version_count = delta->version_count;
    out->tensor_count = delta->tensor_count;
    out->encoding = last->encoding;
    out->digest = last->kind->number;
    out->stored_bytes = 0;
    for (size_t i = 0; i < delta->frame_count; i++)
        out->stored_bytes += delta->frames[i].size_bytes;
}

bool fsti_delta_tensor(const fst_delta *delta, size_t index, fst_delta_tensor *out) {
    if (index >= delta->tensor_count) return false;
    const delta_tensor *tensor = &delta->tensors[index];
    out->name = tensor->name;
    out->name_size = tensor->name_size;
    out->version_count = tensor->frame_count;
    out->stored_bytes = 0;
    for (size_t i = 0; i < tensor->frame_count; i++)
        out->stored_bytes += delta->frames[tensor->first_frame + i].size_bytes;
    return true;
}
