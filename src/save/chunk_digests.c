// SPDX-License-Identifier: Apache-2.0
/// Digests chunks during a save: see chunk_digests.h.
#include "chunk_digests.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

struct chunk_digests {
    const fsti_digest_kind *kind;
    uint64_t file_bytes, chunk_count;
    unsigned char *digests;
    unsigned char *is_done; ///< by chunk; each is set by the thread that has its last bytes
    pthread_mutex_t lock;   ///< protects the chunk that arrives in pieces:
    void *state;            ///< NULL: no such chunk
    uint64_t next;          ///< the next expected byte
    uint64_t read_bytes;
};

fst_status fsti_chunk_digests_open(const fsti_digest_kind *kind, uint64_t file_bytes,
                                   chunk_digests **out, fst_error *error) {
    uint64_t count = fsti_digest_chunk_count(file_bytes, SAVE_CHUNK_BYTES);
    chunk_digests *digests = fsti_alloc_zeroed(1, sizeof *digests);
    if (digests == NULL) return fsti_error_memory(error, sizeof *digests);
    pthread_mutex_init(&digests->lock, NULL);
    digests->kind = kind;
    digests->file_bytes = file_bytes;
    digests->chunk_count = count;
    digests->digests = fsti_alloc_zeroed((size_t)count + 1, kind->digest_bytes);
    digests->is_done = fsti_alloc_zeroed((size_t)count + 1, 1);
    if (digests->digests == NULL || digests->is_done == NULL) {
        fsti_chunk_digests_close(digests);
        return fsti_error_memory(error, count * kind->digest_bytes);
    }
    *out = digests;
    return FST_OK;
}

static uint64_t chunk_end(const chunk_digests *digests, uint64_t number) {
    return fsti_min((number + 1) * SAVE_CHUNK_BYTES, digests->file_bytes);
}

static bool hash_chunk(chunk_digests *digests, uint64_t number, const void *data, uint64_t size) {
    unsigned char *digest = digests->digests + number * digests->kind->digest_bytes;
    if (digests->is_done[number] != 0) return true;
    if (!digests->kind->hash(data, (size_t)size, digest)) return false;
    digests->is_done[number] = 1;
    return true;
}

/// Adds some bytes of a chunk. One chunk at a time is assembled; pieces of other chunks are read
/// from the file later.
static bool digest_piece(chunk_digests *digests, uint64_t offset, const void *data, uint64_t size) {
    const fsti_digest_kind *kind = digests->kind;
    uint64_t number = offset / SAVE_CHUNK_BYTES;
    if (offset % SAVE_CHUNK_BYTES == 0) {
        bool is_begun = digests->state != NULL && digests->next / SAVE_CHUNK_BYTES == number;
        if (is_begun || digests->is_done[number] != 0) return true; // the header is written twice
        if (digests->state != NULL) kind->end(digests->state, NULL);
        digests->state = kind->begin();
        digests->next = offset;
        if (digests->state == NULL) return false;
    }
    if (digests->state == NULL || digests->next != offset) return true;
    if (!kind->update(digests->state, data, (size_t)size)) return false;
    digests->next += size;
    if (digests->next < chunk_end(digests, number)) return true;
    void *state = digests->state;
    digests->state = NULL;
    if (!kind->end(state, digests->digests + number * kind->digest_bytes)) return false;
    digests->is_done[number] = 1;
    return true;
}

fst_status fsti_chunk_digests_put(chunk_digests *digests, uint64_t offset, const void *data,
                                  uint64_t size_bytes, fst_error *error) {
    const char *at = data;
    uint64_t end = fsti_min(offset + size_bytes, digests->file_bytes);
    for (uint64_t size; offset < end; offset += size, at += size) {
        uint64_t number = offset / SAVE_CHUNK_BYTES, stop = chunk_end(digests, number);
        bool is_whole = offset % SAVE_CHUNK_BYTES == 0 && end >= stop, good;
        size = fsti_min(end, stop) - offset;
        if (is_whole) {
            good = hash_chunk(digests, number, at, size);
        } else {
            pthread_mutex_lock(&digests->lock);
            good = digest_piece(digests, offset, at, size);
            pthread_mutex_unlock(&digests->lock);
        }
        if (!good) return fsti_error_memory(error, size);
    }
    return FST_OK;
}

fst_status fsti_written_read(const written_file *file, char *buffer, uint64_t begin, uint64_t size,
                             fst_error *error) {
    for (uint64_t done = 0; done < size;) {
        ssize_t got =
            pread(file->descriptor, buffer + done, (size_t)(size - done), (off_t)(begin + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fsti_error_errno(error, errno, file->path, "reading the written file");
        fsti_error_location location = {.file = file->path, .byte_offset = begin + done};
        if (got == 0)
            return fsti_error_set(error, FST_E_SHORT_READ, location,
                                  "the file ended before its data");
        done += (uint64_t)got;
    }
    return FST_OK;
}

fst_status fsti_chunk_digests_complete(chunk_digests *digests, const written_file *file,
                                       fst_error *error) {
    char *buffer = NULL;
    fst_status status = FST_OK;
    for (uint64_t i = 0; i < digests->chunk_count && status == FST_OK; i++) {
        uint64_t begin = i * SAVE_CHUNK_BYTES, size = chunk_end(digests, i) - begin;
        if (digests->is_done[i] != 0) continue;
        if (buffer == NULL) buffer = fsti_alloc(SAVE_CHUNK_BYTES);
        if (buffer == NULL) return fsti_error_memory(error, SAVE_CHUNK_BYTES);
        status = fsti_written_read(file, buffer, begin, size, error);
        if (status == FST_OK && !hash_chunk(digests, i, buffer, size))
            status = fsti_error_memory(error, size);
        digests->read_bytes += size;
    }
    fsti_free(buffer);
    return status;
}

const unsigned char *fsti_chunk_digests_list(const chunk_digests *digests) {
    return digests->digests;
}

uint64_t fsti_chunk_digests_file_bytes(const chunk_digests *digests) { return digests->file_bytes; }

uint64_t fsti_chunk_digests_read_bytes(const chunk_digests *digests) { return digests->read_bytes; }

void fsti_chunk_digests_close(chunk_digests *digests) {
    if (digests == NULL) return;
    if (digests->state != NULL) digests->kind->end(digests->state, NULL);
    pthread_mutex_destroy(&digests->lock);
    fsti_free(digests->digests);
    fsti_free(digests->is_done);
    fsti_free(digests);
}
