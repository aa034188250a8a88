// SPDX-License-Identifier: Apache-2.0
/// Presents a compressed file as its original. The reading thread decodes the requested chunks. A
/// read that ends within a chunk keeps it decoded for the next read.
#include "packed_file.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "memory/memory.h"

/// Stored bytes per read: enough for a disk, and small enough for the CPU cache. With neighbouring
/// pages and a tensor's end they fit in a huge page.
#define GROUP_BYTES (((uint64_t)2 << 20) - 3 * FSTI_IO_PAGE_BYTES)
#define NO_CHUNK UINT64_MAX
/// Tensors of at most this size are small: several are read together.
#define SMALL_BYTES_MAX ((uint64_t)256 << 10)

/// Stored bytes [begin, end) of a file, verified if it has digests. None if they are equal.
typedef struct stored_range {
    fsti_buffer *memory; ///< contains `bytes`
    char *bytes;
    uint64_t file; ///< number of its packed_file
    uint64_t begin, end;
} stored_range;

/// Decoder memory of one thread.
typedef struct decode_workspace {
    fsti_decoder *decoder;
    /// `plain` is for uncompressed tensors that are small or verified: they lie elsewhere in the
    /// file than the compressed ones between which they are read.
    stored_range main, plain;
    char *tail;          ///< the decoded chunk in which a read ended
    uint64_t tail_file;  ///< number of its packed_file
    uint64_t tail_chunk; ///< its chunk; NO_CHUNK: none
    struct decode_workspace *next;
} decode_workspace;
#define TAIL_BYTES ((size_t)1 << FSTI_CHUNK_LOG_MAX)

typedef struct packed_file {
    fsti_file *stored;
    fsti_packed packed;
    fsti_digest_list digests; ///< of the stored bytes; kind is NULL without digests
    uint64_t number;          ///< unique in the process
    atomic_bool is_buffered;  ///< the file cannot be read directly
} packed_file;

/// The free list of decoder workspaces, shared by all files, so that there are only as many as
/// threads read at once. It is freed with the last file. The lock is held briefly, and a forked
/// child finds it unlocked.
static pthread_mutex_t workspaces_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t workspaces_once = PTHREAD_ONCE_INIT;
static decode_workspace *idle_workspaces;
static uint64_t files_open, last_number;
static void register_workspaces(void) { fsti_fork_lock(&workspaces_lock); }

/// The state of a read.
typedef struct packed_read {
    packed_file *file;
    decode_workspace *workspace;
    fsti_io_op *op;
    uint64_t end; ///< of the original's bytes that are read
    fst_error *error;
} packed_read;

static void free_workspace(decode_workspace *workspace) {
    fsti_decoder_close(workspace->decoder);
    fsti_buffer_unref(workspace->main.memory);
    fsti_buffer_unref(workspace->plain.memory);
    fsti_free(workspace->tail);
    fsti_free(workspace);
}

static void release_file(void *context) {
    packed_file *file = context;
    pthread_mutex_lock(&workspaces_lock);
    decode_workspace *left = --files_open == 0 ? idle_workspaces : NULL;
    if (left != NULL) idle_workspaces = NULL;
    pthread_mutex_unlock(&workspaces_lock);
    while (left != NULL) {
        decode_workspace *workspace = left;
        left = workspace->next;
        free_workspace(workspace);
    }
    fsti_packed_clear(&file->packed);
    fsti_free(file);
}

/// How much of a read's beginning a workspace has: 2: the chunk is decoded, 1: its stored bytes.
static int rate_workspace(const decode_workspace *workspace, const packed_file *file,
                          uint64_t chunk) {
    if (chunk == NO_CHUNK) return 0;
    if (workspace->tail_file == file->number && workspace->tail_chunk == chunk) return 2;
    uint64_t at = file->packed.chunks[chunk].begin;
    const stored_range *range = &workspace->main;
    return range->file == file->number && range->begin <= at && at < range->end;
}

/// Takes a workspace for a read that starts in `chunk`: the free one that has most of it, else a
/// new one.
static decode_workspace *take_workspace(const packed_file *file, uint64_t chunk) {
    pthread_mutex_lock(&workspaces_lock);
    decode_workspace **link = &idle_workspaces;
    for (decode_workspace **at = link; *at != NULL; at = &(*at)->next)
        if (rate_workspace(*at, file, chunk) > rate_workspace(*link, file, chunk)) link = at;
    decode_workspace *workspace = *link;
    if (workspace != NULL) *link = workspace->next;
    pthread_mutex_unlock(&workspaces_lock);
    if (workspace != NULL) return workspace;
    workspace = fsti_alloc_zeroed(1, sizeof *workspace);
    if (workspace != NULL) workspace->tail_chunk = NO_CHUNK;
    return workspace;
}

static void return_workspace(decode_workspace *workspace) {
    pthread_mutex_lock(&workspaces_lock);
    workspace->next = idle_workspaces;
    idle_workspaces = workspace;
    pthread_mutex_unlock(&workspaces_lock);
}

/// Makes sure that a range has memory for `size` bytes. In huge pages, because disks split reads
/// into small pages, at half the speed.
static fst_status grow_range(stored_range *range, uint64_t size, fst_error *error) {
    if (range->memory != NULL && size <= range->memory->size_bytes) return FST_OK;
    fsti_buffer_unref(range->memory);
    *range = (stored_range){.memory = NULL};
    if (size > FSTI_HUGE_PAGE_BYTES / 4) size = fsti_align_up(size, FSTI_HUGE_PAGE_BYTES);
    FST_TRY(fsti_buffer_arena(size, &range->memory, error));
    if (range->memory == NULL) return FST_E_NO_MEMORY; // cannot happen; for static analyzers
    range->bytes = range->memory->data;
    return FST_OK;
}

/// The memory that one workspace may use.
static uint64_t workspace_bytes(const packed_file *file) {
    uint64_t main = fsti_align_up(GROUP_BYTES, FSTI_HUGE_PAGE_BYTES);
    uint64_t plain = SMALL_BYTES_MAX + FSTI_IO_PAGE_BYTES;
    if (file->digests.kind != NULL) // with the rest of the first and last pieces
        main = plain =
            fsti_align_up(GROUP_BYTES + 2 * file->digests.chunk_bytes, FSTI_HUGE_PAGE_BYTES);
    return main + plain + TAIL_BYTES + fsti_decoder_bytes();
}

static fst_status read_exactly(const packed_read *read, uint64_t begin, uint64_t size,
                               void *target) {
    fsti_file *stored = read->file->stored;
    size_t got;
    FST_TRY(fsti_file_read(stored, target, (size_t)size, begin, &got, read->error));
    read->op->stored_bytes += got;
    if (got == size) return FST_OK;
    // The file may have shrunk, which explains more than "short read".
    FST_TRY(fsti_file_check(stored, read->error));
    fsti_error_location location = {.file = fsti_file_path(stored), .byte_offset = begin + got};
    return fsti_error_set(read->error, FST_E_SHORT_READ, location,
                          "the file ended before its data");
}

static bool bypasses_cache(const packed_read *read) {
    return read->op->bypasses_cache && !atomic_load(&read->file->is_buffered) &&
           !fsti_file_is_object(read->file->stored);
}

/// Reads stored bytes [begin, end) directly to `target`, if the cache is to be bypassed and they
/// are not cached. Both begin at a page. False: read them as usual.
static bool read_direct(const packed_read *read, uint64_t begin, uint64_t end, char *target) {
    packed_file *file = read->file;
    uint64_t resident, until = fsti_align_up(end, FSTI_IO_PAGE_BYTES);
    if (!bypasses_cache(read) || !fsti_file_resident(file->stored, begin, end, &resident) ||
        resident > (end - begin) / 8)
        return false;
    int64_t got = fsti_file_read_direct(file->stored, target, (size_t)(until - begin), begin);
    if (got < 0) atomic_store(&file->is_buffered, true);
    if (got < (int64_t)(end - begin)) return false;
    read->op->stored_bytes += end - begin;
    return true;
}

/// The bytes at `begin` of a range that has all of [begin, end); else NULL.
static const char *find_stored(const packed_read *read, const stored_range *range, uint64_t begin,
                               uint64_t end) {
    bool has_all = range->file == read->file->number && range->begin <= begin && end <= range->end;
    return has_all ? range->bytes + (begin - range->begin) : NULL;
}

/// Where the stored bytes end that this read needs next, without gaps, after those of a tensor:
/// neighbouring small tensors of its kind are read together. Those of the other kind lie elsewhere.
static uint64_t stored_run_end(const packed_read *read, size_t index, uint64_t end,
                               uint64_t limit) {
    const fsti_packed *packed = &read->file->packed;
    const fsti_header *header = packed->header;
    if (header == NULL || end != packed->tensors[index].stored_end) return end;
    for (size_t i = index + 1; i < header->tensor_count; i++) {
        const fsti_packed_tensor *tensor = &packed->tensors[i];
        if (header->data_begin + header->tensors[i].end > read->end) break;
        if (tensor->is_packed != packed->tensors[index].is_packed) continue;
        if (tensor->stored_begin != end || tensor->stored_end - end > SMALL_BYTES_MAX ||
            tensor->stored_end > limit)
            break;
        end = tensor->stored_end;
    }
    return end;
}

/// Stored bytes are read, and verified, in whole pieces of this size.
static uint64_t piece_bytes(const packed_read *read) {
    const fsti_digest_list *digests = &read->file->digests;
    return digests->kind != NULL ? digests->chunk_bytes : FSTI_IO_PAGE_BYTES;
}

static fst_status verify_stored(const packed_read *read, const char *bytes, uint64_t begin,
                                uint64_t end) {
    const fsti_digest_list *digests = &read->file->digests;
    uint64_t bad, start_ns = fsti_now_ns();
    if (digests->kind == NULL) return FST_OK;
    if (!fsti_digest_list_matches(digests, begin, bytes, end - begin, &bad)) {
        fsti_error_location location = {.file = fsti_file_path(read->file->stored),
                                        .byte_offset = bad};
        return fsti_error_set(read->error, FST_E_DIGEST, location,
                              "stored bytes of a compressed file do not match their %s digest",
                              digests->kind->name);
    }
    read->op->verified_bytes += end - begin;
    read->op->digest_ns += fsti_now_ns() - start_ns;
    return FST_OK;
}

/// Reads stored bytes [begin, end) to a range, which keeps those of them that it has.
static fst_status fill_range(const packed_read *read, stored_range *range, uint64_t begin,
                             uint64_t end) {
    uint64_t room = fsti_align_up(end, FSTI_IO_PAGE_BYTES) - begin, kept = 0;
    const char *first = find_stored(read, range, begin, begin + 1);
    if (first != NULL && room <= range->memory->size_bytes) {
        kept = fsti_align_down(range->end - begin, piece_bytes(read));
        memmove(range->bytes, first, (size_t)kept);
    }
    range->begin = range->end = 0; // until all is read and verified
    FST_TRY(grow_range(range, room, read->error));
    char *target = range->bytes + kept;
    if (!read_direct(read, begin + kept, end, target))
        FST_TRY(read_exactly(read, begin + kept, end - begin - kept, target));
    fsti_buffer_use(range->memory, end - begin); // the memory has pages now
    FST_TRY(verify_stored(read, target, begin + kept, end));
    range->file = read->file->number;
    range->begin = begin;
    range->end = end;
    return FST_OK;
}

/// Provides the stored bytes [begin, end) of a tensor, and reads small ones that follow with them.
/// With digests, whole digested pieces are read and verified. *out: the address of `begin`.
static fst_status read_stored(const packed_read *read, size_t index, uint64_t begin, uint64_t end,
                              const char **out) {
    const fsti_digest_list *digests = &read->file->digests;
    const fsti_packed *packed = &read->file->packed;
    bool is_plain = packed->header != NULL && !packed->tensors[index].is_packed &&
                    (digests->kind != NULL || end - begin <= SMALL_BYTES_MAX);
    bool is_small = is_plain && digests->kind == NULL;
    stored_range *range = is_plain ? &read->workspace->plain : &read->workspace->main;
    if ((*out = find_stored(read, range, begin, end)) != NULL) return FST_OK;
    end = stored_run_end(read, index, end, begin + (is_small ? SMALL_BYTES_MAX : GROUP_BYTES));
    bool has_pieces = digests->kind != NULL || bypasses_cache(read);
    uint64_t from = has_pieces ? fsti_align_down(begin, piece_bytes(read)) : begin;
    if (digests->kind != NULL)
        end = fsti_min(fsti_align_up(end, piece_bytes(read)), digests->file_bytes);
    FST_TRY(fill_range(read, range, from, end));
    *out = range->bytes + (begin - from);
    return FST_OK;
}

/// How much of `left` uncompressed bytes to read at once. Pieces read into the workspace end at
/// page boundaries, so that no page is read twice, and have similar sizes.
static uint64_t plain_piece(const packed_read *read, uint64_t begin, uint64_t left) {
    bool uses_workspace = bypasses_cache(read) || read->file->digests.kind != NULL;
    if (!uses_workspace || left <= GROUP_BYTES) return left;
    uint64_t count = left / GROUP_BYTES + 1;
    return fsti_align_down(begin + left / count, FSTI_IO_PAGE_BYTES) - begin;
}

/// Reads uncompressed bytes of a tensor, and of those that follow it: directly to their
/// destination, or through the workspace if they are few, verified or bypass the page cache.
static fst_status read_plain(const packed_read *read, size_t index, uint64_t begin, uint64_t size,
                             char *target) {
    bool by_workspace = read->file->digests.kind != NULL || bypasses_cache(read);
    for (uint64_t done = 0, piece; done < size; done += piece) {
        uint64_t at = begin + done;
        const char *bytes;
        piece = plain_piece(read, at, size - done);
        if (by_workspace || piece <= SMALL_BYTES_MAX) {
            FST_TRY(read_stored(read, index, at, at + piece, &bytes));
            memcpy(target + done, bytes, (size_t)piece);
        } else {
            FST_TRY(read_exactly(read, at, piece, target + done));
        }
    }
    return FST_OK;
}

/// The bytes [begin, end) of a compressed tensor.
typedef struct packed_part {
    size_t index;
    uint64_t begin, end;
    char *target;
} packed_part;

static fst_status open_decoder(decode_workspace *workspace, fst_error *error) {
    if (workspace->tail == NULL) workspace->tail = fsti_alloc(TAIL_BYTES);
    if (workspace->tail == NULL) return fsti_error_memory(error, TAIL_BYTES);
    return workspace->decoder == NULL ? fsti_decoder_open(&workspace->decoder, error) : FST_OK;
}

/// Decodes chunk `number` of a tensor completely, from its stored bytes.
static fst_status decode_chunk(const packed_read *read, const packed_part *part, uint64_t number,
                               const char *stored, char *target) {
    const fsti_packed *packed = &read->file->packed;
    const fsti_packed_tensor *tensor = &packed->tensors[part->index];
    const fsti_tensor *original = &packed->header->tensors[part->index];
    const fsti_packed_chunk *entry = &packed->chunks[tensor->chunk_first + number];
    uint64_t size = (uint64_t)1 << tensor->chunk_log;
    uint64_t left = original->end - original->begin - number * size;
    fsti_chunk chunk = {.dtype = (fst_dtype)original->dtype,
                        .is_raw = entry->is_raw,
                        .crc = entry->crc,
                        .stored = (const unsigned char *)stored,
                        .stored_bytes = entry->stored_bytes,
                        .true_bytes = (size_t)fsti_min(size, left)};
    fst_error cause;
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_chunk_decode(read->workspace->decoder, &chunk, target, &cause);
    read->op->decode_ns += fsti_now_ns() - start_ns;
    if (status == FST_OK) return FST_OK;
    FST_TRY(fsti_file_check(read->file->stored, read->error));
    fsti_error_location location = {.file = fsti_file_path(read->file->stored),
                                    .tensor = fsti_header_name(packed->header, original),
                                    .tensor_size = original->name_size,
                                    .byte_offset = entry->begin};
    return fsti_error_set(read->error, status, location, "%s", cause.message);
}

/// Decodes a chunk to its destination, or through the workspace's tail if only a part of it is
/// requested. `stored` NULL: the tail already has this chunk, from the read before.
static fst_status place_chunk(const packed_read *read, const packed_part *part, uint64_t number,
                              const char *stored) {
    const fsti_packed_tensor *tensor = &read->file->packed.tensors[part->index];
    const fsti_tensor *original = &read->file->packed.header->tensors[part->index];
    decode_workspace *workspace = read->workspace;
    uint64_t begin = number << tensor->chunk_log;
    uint64_t end =
        fsti_min(begin + ((uint64_t)1 << tensor->chunk_log), original->end - original->begin);
    uint64_t from = fsti_max(begin, part->begin), until = fsti_min(end, part->end);
    char *target = part->target + (from - part->begin);
    read->op->decoded_bytes += until - from;
    if (from == begin && until == end && stored != NULL)
        return decode_chunk(read, part, number, stored, target);
    if (stored != NULL) {
        // Until the chunk is decoded, the tail is not valid for any chunk.
        workspace->tail_chunk = NO_CHUNK;
        FST_TRY(decode_chunk(read, part, number, stored, workspace->tail));
        workspace->tail_chunk = tensor->chunk_first + number;
        workspace->tail_file = read->file->number;
    }
    memcpy(target, workspace->tail + (from - begin), (size_t)(until - from));
    return FST_OK;
}

static uint64_t chunk_end(const fsti_packed_chunk *chunk) {
    return chunk->begin + chunk->stored_bytes;
}

/// Checks that padding after a tensor's last chunk is zero.
static fst_status check_padding(const packed_read *read, const packed_part *part,
                                const char *padding, uint64_t size) {
    const fsti_packed *packed = &read->file->packed;
    const fsti_tensor *original = &packed->header->tensors[part->index];
    fsti_error_location location = {.file = fsti_file_path(read->file->stored),
                                    .tensor = fsti_header_name(packed->header, original),
                                    .tensor_size = original->name_size,
                                    .byte_offset = packed->tensors[part->index].stored_end - size};
    for (uint64_t i = 0; i < size; i++, location.byte_offset++)
        if (padding[i] != 0)
            return fsti_error_set(read->error, FST_E_CORRUPT, location,
                                  "a compressed tensor is damaged: its padding is not zero");
    return FST_OK;
}

static fst_status read_packed(const packed_read *read, const packed_part *part) {
    const fsti_packed_tensor *tensor = &read->file->packed.tensors[part->index];
    const fsti_packed_chunk *chunks = read->file->packed.chunks + tensor->chunk_first;
    uint64_t next = part->begin >> tensor->chunk_log;
    uint64_t end = ((part->end - 1) >> tensor->chunk_log) + 1;
    FST_TRY(open_decoder(read->workspace, read->error));
    if (read->workspace->tail_file == read->file->number &&
        read->workspace->tail_chunk == tensor->chunk_first + next)
        FST_TRY(place_chunk(read, part, next++, NULL));
    while (next < end) {
        uint64_t until = next + 1, begin = chunks[next].begin;
        const char *stored;
        while (until < end && chunk_end(&chunks[until]) - begin <= GROUP_BYTES) until++;
        uint64_t data_end = chunk_end(&chunks[until - 1]);
        uint64_t stored_end = until == tensor->chunk_count ? tensor->stored_end : data_end;
        FST_TRY(read_stored(read, part->index, begin, stored_end, &stored));
        FST_TRY(check_padding(read, part, stored + (data_end - begin), stored_end - data_end));
        for (; next < until; next++)
            FST_TRY(place_chunk(read, part, next, stored + (chunks[next].begin - begin)));
    }
    return FST_OK;
}

/// Bytes from `at` on that are stored uncompressed and contiguously: of this tensor, and of
/// following ones with the same order in the stored file. 0: the tensor is compressed.
static uint64_t plain_run(const fsti_packed *packed, size_t index, uint64_t at, uint64_t end) {
    const fsti_header *header = packed->header;
    const fsti_packed_tensor *tensors = packed->tensors;
    if (tensors[index].is_packed) return 0;
    size_t last = index;
    while (last + 1 < header->tensor_count && !tensors[last + 1].is_packed &&
           tensors[last + 1].stored_begin == tensors[last].stored_end &&
           header->data_begin + header->tensors[last].end < end)
        last++;
    return fsti_min(end, header->data_begin + header->tensors[last].end) - at;
}

static fst_status read_bytes(const packed_read *read, uint64_t at, uint64_t end) {
    const fsti_packed *packed = &read->file->packed;
    char *target = read->op->buffer;
    if (at < packed->original_bytes) {
        uint64_t size = fsti_min(end, packed->original_bytes) - at;
        memcpy(target, packed->original + at, (size_t)size);
        at += size;
        target += size;
    }
    for (uint64_t size; at < end; at += size, target += size) {
        packed_part part = {.index = fsti_packed_tensor_at(packed, at), .target = target};
        const fsti_tensor *tensor = &packed->header->tensors[part.index];
        part.begin = at - packed->header->data_begin - tensor->begin;
        size = plain_run(packed, part.index, at, end);
        if (size != 0) {
            read->op->decoded_bytes += size;
            uint64_t begin = packed->tensors[part.index].stored_begin + part.begin;
            FST_TRY(read_plain(read, part.index, begin, size, target));
        } else {
            part.end = fsti_min(part.begin + (end - at), tensor->end - tensor->begin);
            size = part.end - part.begin;
            FST_TRY(read_packed(read, &part));
        }
    }
    return FST_OK;
}

/// The chunk that contains byte `at` of the original, or NO_CHUNK.
static uint64_t chunk_at(const fsti_packed *packed, uint64_t at) {
    if (at < packed->original_bytes || at >= packed->true_bytes) return NO_CHUNK;
    size_t index = fsti_packed_tensor_at(packed, at);
    const fsti_packed_tensor *tensor = &packed->tensors[index];
    uint64_t begin = packed->header->data_begin + packed->header->tensors[index].begin;
    return tensor->is_packed ? tensor->chunk_first + ((at - begin) >> tensor->chunk_log) : NO_CHUNK;
}

static void read_original(void *context, fsti_io_op *op) {
    packed_file *file = context;
    uint64_t end = fsti_min(op->offset + op->size, file->packed.true_bytes);
    fst_error error;
    op->result = 0;
    if (op->offset >= end) return;
    packed_read read = {.file = file,
                        .workspace = take_workspace(file, chunk_at(&file->packed, op->offset)),
                        .op = op,
                        .end = end,
                        .error = op->error != NULL ? op->error : &error};
    fst_status status = FST_OK;
    if (read.workspace == NULL)
        status = fsti_error_memory(read.error, sizeof *read.workspace);
    else
        status = read_bytes(&read, op->offset, end);
    if (read.workspace != NULL) return_workspace(read.workspace);
    op->result = status == FST_OK ? (int64_t)(end - op->offset) : -EIO;
}

static void drop_cached(void *context, uint64_t at, uint64_t end) {
    const packed_file *file = context;
    const fsti_packed *packed = &file->packed;
    at = fsti_max(at, packed->original_bytes);
    for (; at < fsti_min(end, packed->true_bytes);) {
        size_t index = fsti_packed_tensor_at(packed, at);
        const fsti_packed_tensor *tensor = &packed->tensors[index];
        uint64_t begin = packed->header->data_begin + packed->header->tensors[index].begin;
        uint64_t until =
            fsti_min(end, packed->header->data_begin + packed->header->tensors[index].end);
        uint64_t from = tensor->stored_begin + (at - begin);
        uint64_t to = tensor->stored_begin + (until - begin);
        if (tensor->is_packed) {
            from = packed->chunks[chunk_at(packed, at)].begin;
            to = chunk_end(&packed->chunks[chunk_at(packed, until - 1)]);
        }
        fsti_file_drop_cached(file->stored, from, to);
        at = until;
    }
}

/// Reads the directory completely.
static fst_status read_directory(const packed_read *read, const fsti_header *header, char **bytes,
                                 size_t *byte_count) {
    uint64_t size = header->tensors[0].end;
    const char *stored;
    char *copy = fsti_alloc((size_t)size + 1);
    if (copy == NULL) return fsti_error_memory(read->error, size);
    fst_status status = FST_OK;
    if (read->file->digests.kind == NULL) {
        status = read_exactly(read, header->data_begin, size, copy);
    } else {
        status = read_stored(read, 0, header->data_begin, header->data_begin + size, &stored);
        if (status == FST_OK) memcpy(copy, stored, (size_t)size);
    }
    if (status != FST_OK) {
        fsti_free(copy);
        return status;
    }
    *bytes = copy;
    *byte_count = (size_t)size;
    return FST_OK;
}

static fst_status parse_file(packed_file *file, const fsti_packed_source *source,
                             fst_error *error) {
    decode_workspace workspace = {.tail_chunk = NO_CHUNK};
    fsti_io_op op = {.file = file->stored};
    packed_read read = {.file = file, .workspace = &workspace, .op = &op, .error = error};
    char *bytes = NULL;
    size_t byte_count = 0;
    fst_status status = read_directory(&read, source->header, &bytes, &byte_count);
    fsti_buffer_unref(workspace.main.memory);
    FST_TRY(status);
    return fsti_packed_parse(bytes, byte_count, source, &file->packed, error);
}

fst_status fsti_packed_file_open(const fst_model *model, model_file *target, uint32_t flags,
                                 fst_error *error) {
    packed_file *file = fsti_alloc_zeroed(1, sizeof *file);
    if (file == NULL) return fsti_error_memory(error, sizeof *file);
    pthread_once(&workspaces_once, register_workspaces);
    pthread_mutex_lock(&workspaces_lock);
    files_open++;
    file->number = ++last_number;
    pthread_mutex_unlock(&workspaces_lock);
    file->stored = target->file;
    file->digests = target->digests;
    fsti_packed_source source = {.header = target->header,
                                 .file_size = fsti_file_size(file->stored),
                                 .path = fsti_file_path(file->stored),
                                 .hash_key = model->hash_key,
                                 .cut = (flags & FST_OPEN_CUT) != 0};
    fst_status status = parse_file(file, &source, error);
    if (status != FST_OK) {
        release_file(file);
        return status;
    }
    target->packed = &file->packed;
    target->workspace_bytes = workspace_bytes(file);
    target->stored_header = target->header;
    target->header = fsti_header_ref(file->packed.header);
    target->digests = (fsti_digest_list){0};
    fsti_derivation derivation = {.origin = target->file,
                                  .size_bytes = file->packed.true_bytes,
                                  .context = file,
                                  .read = read_original,
                                  .drop_cached = drop_cached,
                                  .release = release_file,
                                  .what = "compressed"};
    target->file = NULL; // now owned by the derivation
    return fsti_file_derive(&derivation, &target->file, error);
}
