// SPDX-License-Identifier: Apache-2.0
/// Writing a shard of a delta whose entries' sizes are not known before they are written: room for
/// the header is left, and filled with spaces (which the format allows) up to the first entry.
#ifndef FSTI_SHARD_WRITE_H
#define FSTI_SHARD_WRITE_H

#include "delta_private.h"

typedef struct shard_entry {
    const char *name; ///< borrowed
    size_t name_size;
    uint64_t begin, end; ///< relative to the data section
    char checksum[2 * FSTI_DIGEST_BYTES_MAX + 1];
} shard_entry;

/// Of one thread at a time.
typedef struct shard_writer {
    char *path; ///< temporary
    int fd;
    uint64_t header_bytes; ///< length field included
    uint64_t data_bytes;
    shard_entry *entries;
    size_t entry_count, entry_capacity;
    uint64_t bytes_written;
} shard_writer;

/// Bytes of a header that has all of these names, at most.
uint64_t fsti_shard_header_room(fsti_name_at name_at, const void *context, size_t count);
/// Makes the temporary file of shard `number`. *out is to be closed in any case.
fst_status fsti_shard_open(const char *folder, uint32_t number, uint64_t header_bytes,
                           shard_writer *out, fst_error *error);
/// Appends bytes: the sink of frames; `context` is the writer.
fst_status fsti_shard_put(void *context, const void *bytes, size_t size, fst_error *error);
/// Notes that the bytes from `begin` on are the entry of a tensor.
fst_status fsti_shard_add(shard_writer *shard, fsti_name name, uint64_t begin, const char *checksum,
                          fst_error *error);
/// Writes the header; then the file is complete.
fst_status fsti_shard_finish(shard_writer *shard, bool durable, fst_error *error);
/// Closes it and removes the temporary file where it still has that name.
void fsti_shard_close(shard_writer *shard);
/// Writes a small file by way of a temporary name.
fst_status fsti_shard_put_text(const char *path, const char *text, size_t size, bool durable,
                               fst_error *error);

#endif
