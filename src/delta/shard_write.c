// SPDX-License-Identifier: Apache-2.0
/// Writes one shard of a delta: the entries first, the header last.
#include "shard_write.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "output/output.h"

/// The most bytes of JSON for an entry's shape, offsets and checksum. Its name occurs twice and is
/// counted separately.
#define ENTRY_TEXT_BYTES ((uint64_t)200)
#define HEADER_TEXT_BYTES ((uint64_t)64)

uint64_t fsti_shard_header_room(fsti_name_at name_at, const void *context, size_t count) {
    uint64_t room = FSTI_FORMAT_LENGTH_BYTES + HEADER_TEXT_BYTES;
    for (size_t i = 0; i < count; i++) {
        fsti_name name = name_at(context, i);
        uint64_t escaped = 0;
        for (size_t k = 0; k < name.size; k++) {
            unsigned char byte = (unsigned char)name.bytes[k];
            escaped += byte < 0x20 || byte == '"' || byte == '\\' ? 6 : 1;
        }
        room += 2 * escaped + ENTRY_TEXT_BYTES;
    }
    return fsti_align_up(room, 8);
}

void fsti_shard_temporary_name(uint32_t number, char *out) {
    snprintf(out, FSTI_SHARD_TEMPORARY_BYTES, "shard-%05u.tmp", number);
}

fst_status fsti_shard_open(const char *folder, uint32_t number, uint64_t header_bytes,
                           shard_writer *out, fst_error *error) {
    char name[FSTI_SHARD_TEMPORARY_BYTES + 1] = "/";
    *out = (shard_writer){.fd = -1, .header_bytes = header_bytes};
    fsti_shard_temporary_name(number, name + 1);
    out->path = fsti_location_join(folder, name);
    if (out->path == NULL) return fsti_error_memory(error, strlen(folder));
    out->fd = open(out->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (out->fd < 0) return fsti_error_errno(error, errno, out->path, "making the shard");
    return FST_OK;
}

static fst_status write_at(shard_writer *shard, const void *bytes, size_t size, uint64_t offset,
                           fst_error *error) {
    FST_TRY(fsti_file_check_limit(shard->path, offset + size, error));
    int failure = fsti_write_at(shard->fd, bytes, size, offset);
    if (failure != 0) return fsti_error_errno(error, failure, shard->path, "writing");
    shard->bytes_written += size;
    return FST_OK;
}

fst_status fsti_shard_put(void *context, const void *bytes, size_t size, fst_error *error) {
    shard_writer *shard = context;
    FST_TRY(write_at(shard, bytes, size, shard->header_bytes + shard->data_bytes, error));
    shard->data_bytes += size;
    return FST_OK;
}

fst_status fsti_shard_add(shard_writer *shard, fsti_name name, uint64_t begin, const char *checksum,
                          fst_error *error) {
    if (!fsti_array_reserve((void **)&shard->entries, &shard->entry_capacity, shard->entry_count,
                            sizeof *shard->entries, UINT32_MAX))
        return fsti_error_memory(error, sizeof *shard->entries);
    shard_entry *entry = &shard->entries[shard->entry_count++];
    *entry = (shard_entry){name.bytes, name.size, begin, shard->data_bytes, ""};
    snprintf(entry->checksum, sizeof entry->checksum, "%s", checksum);
    return FST_OK;
}

/// The parts of a header draft, one for each entry.
typedef struct header_parts {
    fsti_header_entry *entries;
    uint32_t *order;
    uint64_t *shapes;
    fst_metadata_entry *metadata;
} header_parts;

static void clear_parts(header_parts *parts) {
    fsti_free(parts->entries);
    fsti_free(parts->order);
    fsti_free(parts->shapes);
    fsti_free(parts->metadata);
}

static bool fill_parts(const shard_writer *shard, header_parts *parts) {
    size_t count = shard->entry_count;
    parts->entries = fsti_alloc_zeroed(count, sizeof *parts->entries);
    parts->order = fsti_alloc_zeroed(count, sizeof *parts->order);
    parts->shapes = fsti_alloc_zeroed(count, sizeof *parts->shapes);
    parts->metadata = fsti_alloc_zeroed(count, sizeof *parts->metadata);
    if (parts->entries == NULL || parts->order == NULL || parts->shapes == NULL ||
        parts->metadata == NULL)
        return false;
    for (size_t i = 0; i < count; i++) {
        const shard_entry *entry = &shard->entries[i];
        parts->order[i] = (uint32_t)i;
        parts->shapes[i] = entry->end - entry->begin;
        parts->entries[i] =
            (fsti_header_entry){entry->name,       entry->name_size, FST_DTYPE_U8, 1,
                                &parts->shapes[i], entry->begin,     entry->end};
        parts->metadata[i] = (fst_metadata_entry){.key = entry->name,
                                                  .key_size = entry->name_size,
                                                  .value = entry->checksum,
                                                  .value_size = strlen(entry->checksum)};
    }
    return true;
}

/// Writes the header, padded with spaces to the beginning of the data.
static fst_status put_header(shard_writer *shard, char *text, size_t size, fst_error *error) {
    if (size > shard->header_bytes) {
        fsti_free(text);
        return fsti_error_set(error, FST_E_HEADER_TOO_LARGE, FSTI_NO_LOCATION,
                              "the header of %s exceeds the space reserved for it", shard->path);
    }
    char *padded = fsti_realloc(text, (size_t)shard->header_bytes);
    if (padded == NULL) {
        fsti_free(text);
        return fsti_error_memory(error, shard->header_bytes);
    }
    memset(padded + size, ' ', (size_t)shard->header_bytes - size);
    fsti_header_put_length(padded, shard->header_bytes - FSTI_FORMAT_LENGTH_BYTES);
    fst_status status = write_at(shard, padded, (size_t)shard->header_bytes, 0, error);
    fsti_free(padded);
    return status;
}

fst_status fsti_shard_finish(shard_writer *shard, bool durable, fst_error *error) {
    header_parts parts = {0};
    char *text;
    size_t size;
    bool is_filled = fill_parts(shard, &parts);
    fst_status status = is_filled ? FST_OK : fsti_error_memory(error, shard->entry_count);
    fsti_header_draft draft = {.entries = parts.entries,
                               .order = parts.order,
                               .entry_count = shard->entry_count,
                               .metadata = parts.metadata,
                               .metadata_count = shard->entry_count,
                               .has_metadata = true,
                               .alignment_bytes = 8};
    if (status == FST_OK) status = fsti_header_write(&draft, &text, &size, error);
    clear_parts(&parts);
    if (status == FST_OK) status = put_header(shard, text, size, error);
    // A tensor whose encoding was abandoned may have left bytes after the last entry.
    if (status == FST_OK &&
        ftruncate(shard->fd, (off_t)(shard->header_bytes + shard->data_bytes)) != 0)
        status = fsti_error_errno(error, errno, shard->path, "cutting to its size");
    if (status == FST_OK && durable && fsync(shard->fd) != 0)
        status = fsti_error_errno(error, errno, shard->path, "writing to the device");
    return status;
}

void fsti_shard_close(shard_writer *shard) {
    if (shard->fd >= 0) {
        close(shard->fd);
        (void)unlink(shard->path);
    }
    fsti_free(shard->path);
    fsti_free(shard->entries);
    *shard = (shard_writer){.fd = -1};
}

fst_status fsti_shard_put_text(const char *path, const char *text, size_t size, bool durable,
                               fst_error *error) {
    shard_writer file = {.fd = -1, .path = fsti_location_join(path, ".tmp")};
    if (file.path == NULL) return fsti_error_memory(error, strlen(path));
    file.fd = open(file.path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    fst_status status =
        file.fd < 0 ? fsti_error_errno(error, errno, file.path, "making the file") : FST_OK;
    if (status == FST_OK) status = write_at(&file, text, size, 0, error);
    if (status == FST_OK && durable && fsync(file.fd) != 0)
        status = fsti_error_errno(error, errno, file.path, "writing to the device");
    if (status == FST_OK && rename(file.path, path) != 0)
        status = fsti_error_errno(error, errno, path, "renaming");
    fsti_shard_close(&file);
    return status;
}
