// SPDX-License-Identifier: Apache-2.0
/// Writes a shard of a delta, whose entries' sizes are only known after they were written. Space
/// for the header is reserved, and the part that it does not need is filled with spaces, which the
/// format allows.
#ifndef FSTI_SHARD_WRITE_H
#define FSTI_SHARD_WRITE_H

#include "delta_private.h"

typedef struct shard_entry {
    const char *name; ///< borrowed
    size_t name_size;
    uint64_t begin, end; ///< relative to the data section
    char checksum[2 * FSTI_DIGEST_BYTES_MAX + 1];
} shard_entry;

/// Used by one thread at a time.
typedef struct shard_writer {
    char *path; ///< temporary
    int fd;
    uint64_t header_bytes; ///< length field included
    uint64_t data_bytes;
    shard_entry *entries;
    size_t entry_count, entry_capacity;
    uint64_t bytes_written;
} shard_writer;

/// The largest possible size in bytes of a header with all of these names.
uint64_t fsti_shard_header_room(fsti_name_at name_at, const void *context, size_t count);
/// The name of the temporary file of a shard.
#define FSTI_SHARD_TEMPORARY_BYTES 24u
void fsti_shard_temporary_name(uint32_t number, char *out);
/// Creates the temporary file of shard `number`, which must not exist. The caller closes *out, also
/// after an error.
fst_status fsti_shard_open(const char *folder, uint32_t number, uint64_t header_bytes,
                           shard_writer *out, fst_error *error);
/// Appends bytes. Passed to the frame encoder as its sink, with the writer as `context`.
fst_status fsti_shard_put(void *context, const void *bytes, size_t size, fst_error *error);
/// Records that the bytes from `begin` to the end of the data are the entry of a tensor.
fst_status fsti_shard_add(shard_writer *shard, fsti_name name, uint64_t begin, const char *checksum,
                          fst_error *error);
/// Writes the header; then the file is complete.
fst_status fsti_shard_finish(shard_writer *shard, bool durable, fst_error *error);
/// Closes the file and deletes it if it still has its temporary name.
void fsti_shard_close(shard_writer *shard);
/// Writes a small file under a temporary name and renames it to `path`.
fst_status fsti_shard_put_text(const char *path, const char *text, size_t size, bool durable,
                               fst_error *error);

#endif
