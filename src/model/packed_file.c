// SPDX-License-Identifier: Apache-2.0
/// A compressed file as a file of true bytes: whoever reads it decodes the chunks that are asked
/// for, in its own thread. A read that ends within a chunk leaves that decoded for the next one.
#include "packed_file.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "memory/memory.h"

/// Stored bytes that are read at once: enough for a disk, and they stay in the processor's cache.
/// With the pages around them, and a tensor's end, they fit in a huge one.
#define GROUP_BYTES (((uint64_t)2 << 20) - 3 * FSTI_IO_PAGE_BYTES)
#define NO_CHUNK UINT64_MAX
/// Less than this of tensors that are stored as they are comes through the page cache.
#define AROUND_BYTES_MIN ((uint64_t)256 << 10)

/// One thread's room.
typedef struct packed_room {
    fsti_decoder *decoder;
    fsti_buffer *memory; ///< of `stored`
    char *stored;
    char *tail;          ///< the chunk that a read ended in, decoded
    uint64_t tail_file;  ///< whose, a packed_file's number
    uint64_t tail_chunk; ///< which; NO_CHUNK: none
    struct packed_room *next;
} packed_room;
#define TAIL_BYTES ((size_t)1 << FSTI_CHUNK_LOG_MAX)

typedef struct packed_file {
    fsti_file *stored;
    fsti_packed packed;
    fsti_digest_list digests; ///< of the stored bytes; kind is NULL when there are none
    uint64_t number;          ///< no other file of the process has or had it
    atomic_bool is_buffered;  ///< the file can't be read past the page cache
} packed_file;

/// Rooms that nobody uses now: of all files together, so that there are no more than threads have
/// read at once, however many files a set has. They go with the last file. The lock is held for a
/// few steps, and the child of a fork() finds it free whatever the parent's threads were reading.
static pthread_mutex_t rooms_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t rooms_once = PTHREAD_ONCE_INIT;
static packed_room *idle_rooms;
static uint64_t files_open, files_made;
static void register_rooms(void) { fsti_fork_lock(&rooms_lock); }

/// A read on its way.
typedef struct packed_read {
    packed_file *file;
    packed_room *room;
    fsti_io_op *op;
    fst_error *error;
} packed_read;

static void free_room(packed_room *room) {
    fsti_decoder_close(room->decoder);
    fsti_buffer_unref(room->memory);
    fsti_free(room->tail);
    fsti_free(room);
}

static void release_file(void *context) {
    packed_file *file = context;
    pthread_mutex_lock(&rooms_lock);
    packed_room *left = --files_open == 0 ? idle_rooms : NULL;
    if (left != NULL) idle_rooms = NULL;
    pthread_mutex_unlock(&rooms_lock);
    while (left != NULL) {
        packed_room *room = left;
        left = room->next;
        free_room(room);
    }
    fsti_packed_clear(&file->packed);
    fsti_free(file);
}

/// Room for a read that begins in `chunk`: what holds that already, else any, else a new one.
static packed_room *take_room(const packed_file *file, uint64_t chunk) {
    pthread_mutex_lock(&rooms_lock);
    packed_room **link = &idle_rooms;
    for (packed_room **at = link; *at != NULL; at = &(*at)->next)
        if ((*at)->tail_file == file->number && (*at)->tail_chunk == chunk) link = at;
    packed_room *room = *link;
    if (room != NULL) *link = room->next;
    pthread_mutex_unlock(&rooms_lock);
    if (room != NULL) return room;
    room = fsti_alloc_zeroed(1, sizeof *room);
    if (room != NULL) room->tail_chunk = NO_CHUNK;
    return room;
}

static void give_room(packed_room *room) {
    pthread_mutex_lock(&rooms_lock);
    room->next = idle_rooms;
    idle_rooms = room;
    pthread_mutex_unlock(&rooms_lock);
}

/// In huge pages: a disk takes a read to small ones in many pieces, at half the speed.
static fst_status grow_stored(packed_room *room, uint64_t size, fst_error *error) {
    if (room->stored != NULL && size <= room->memory->size_bytes) return FST_OK;
    fsti_buffer_unref(room->memory);
    room->memory = NULL;
    room->stored = NULL;
    if (size > FSTI_HUGE_PAGE_BYTES / 4) size = fsti_align_up(size, FSTI_HUGE_PAGE_BYTES);
    FST_TRY(fsti_buffer_arena(size, &room->memory, error));
    if (room->memory == NULL) return FST_E_NO_MEMORY; // never, which analyzers do not see
    room->stored = room->memory->data;
    return FST_OK;
}

/// What a room comes to.
static uint64_t room_bytes(const packed_file *file) {
    uint64_t group = GROUP_BYTES;
    if (file->digests.kind != NULL) group += 2 * (uint64_t)file->digests.chunk_bytes;
    return fsti_align_up(group, FSTI_HUGE_PAGE_BYTES) + TAIL_BYTES + fsti_decoder_bytes();
}

static fst_status read_exactly(const packed_read *read, uint64_t begin, uint64_t size,
                               void *target) {
    fsti_file *stored = read->file->stored;
    size_t got;
    FST_TRY(fsti_file_read(stored, target, (size_t)size, begin, &got, read->error));
    read->op->stored_bytes += got;
    if (got == size) return FST_OK;
    // The file may have shrunk: that says more than "short".
    FST_TRY(fsti_file_check(stored, read->error));
    fsti_error_place place = {.file = fsti_file_path(stored), .byte_offset = begin + got};
    return fsti_error_set(read->error, FST_E_SHORT_READ, place, "the file ended before its data");
}

static bool goes_around(const packed_read *read) {
    return read->op->is_around && !atomic_load(&read->file->is_buffered) &&
           !fsti_file_is_object(read->file->stored);
}

/// Brings stored bytes [begin, end) to the room past the page cache, if that is wished for and they
/// are not in it; NULL: they have to be read as usual.
static const char *read_around(const packed_read *read, uint64_t begin, uint64_t end) {
    packed_file *file = read->file;
    uint64_t resident, from = fsti_align_down(begin, FSTI_IO_PAGE_BYTES);
    uint64_t until = fsti_align_up(end, FSTI_IO_PAGE_BYTES);
    if (!goes_around(read) || !fsti_file_resident(file->stored, begin, end, &resident) ||
        resident > (end - begin) / 8 || grow_stored(read->room, until - from, NULL) != FST_OK)
        return NULL;
    int64_t got =
        fsti_file_read_around(file->stored, read->room->stored, (size_t)(until - from), from);
    if (got < 0) atomic_store(&file->is_buffered, true);
    if (got < (int64_t)(end - from)) return NULL;
    read->op->stored_bytes += end - begin;
    return read->room->stored + (begin - from);
}

/// Brings stored bytes [begin, end) to the room, held against their digests where there are any;
/// these are of whole pieces. *out: where `begin` is.
static fst_status read_stored(const packed_read *read, uint64_t begin, uint64_t end,
                              const char **out) {
    const fsti_digest_list *digests = &read->file->digests;
    uint64_t from = begin, until = end, bad;
    if (digests->kind != NULL) {
        from = fsti_align_down(begin, digests->chunk_bytes);
        until = fsti_min(fsti_align_up(end, digests->chunk_bytes), digests->file_bytes);
    }
    const char *stored = read_around(read, from, until);
    if (stored == NULL) {
        FST_TRY(grow_stored(read->room, until - from, read->error));
        FST_TRY(read_exactly(read, from, until - from, read->room->stored));
        stored = read->room->stored;
    }
    *out = stored + (begin - from);
    if (digests->kind == NULL || fsti_digest_list_holds(digests, from, stored, until - from, &bad))
        return FST_OK;
    fsti_error_place place = {.file = fsti_file_path(read->file->stored), .byte_offset = bad};
    return fsti_error_set(read->error, FST_E_DIGEST, place,
                          "stored bytes of a compressed file differ from their %s digest",
                          digests->kind->name);
}

/// How much of `left` bytes of the file, stored as they are, is read at once. Pieces for the room
/// end where pages do, so that none is read twice, and are of about the same size.
static uint64_t plain_piece(const packed_read *read, uint64_t begin, uint64_t left) {
    bool by_room = goes_around(read) || read->file->digests.kind != NULL;
    if (!by_room || left <= GROUP_BYTES) return left;
    uint64_t count = left / GROUP_BYTES + 1;
    return fsti_align_down(begin + left / count, FSTI_IO_PAGE_BYTES) - begin;
}

/// Bytes that are stored as they are: straight to their place, or by way of the room where they
/// have to be held against digests or come past the page cache.
static fst_status read_plain(const packed_read *read, uint64_t begin, uint64_t size, char *target) {
    bool has_digests = read->file->digests.kind != NULL;
    for (uint64_t done = 0, piece; done < size; done += piece) {
        uint64_t at = begin + done;
        const char *bytes = NULL;
        piece = plain_piece(read, at, size - done);
        if (has_digests)
            FST_TRY(read_stored(read, at, at + piece, &bytes));
        else if (piece >= AROUND_BYTES_MIN)
            bytes = read_around(read, at, at + piece);
        if (bytes == NULL)
            FST_TRY(read_exactly(read, at, piece, target + done));
        else
            memcpy(target + done, bytes, (size_t)piece);
    }
    return FST_OK;
}

/// Part of a packed tensor: bytes [begin, end) of it.
typedef struct packed_part {
    size_t index;
    uint64_t begin, end;
    char *target;
} packed_part;

static fst_status open_decoder(packed_room *room, fst_error *error) {
    if (room->tail == NULL) room->tail = fsti_alloc(TAIL_BYTES);
    if (room->tail == NULL) return fsti_error_memory(error, TAIL_BYTES);
    return room->decoder == NULL ? fsti_decoder_open(&room->decoder, error) : FST_OK;
}

/// Decodes chunk `number` of a tensor, whose stored bytes are given; all of it, wherever it begins.
static fst_status decode_chunk(const packed_read *read, const packed_part *part, uint64_t number,
                               const char *stored, char *target) {
    const fsti_packed *packed = &read->file->packed;
    const fsti_packed_tensor *tensor = &packed->tensors[part->index];
    const fsti_tensor *original = &packed->header->tensors[part->index];
    const fsti_packed_chunk *mark = &packed->chunks[tensor->chunk_first + number];
    uint64_t size = (uint64_t)1 << tensor->chunk_log;
    uint64_t left = original->end - original->begin - number * size;
    fsti_chunk chunk = {.dtype = (fst_dtype)original->dtype,
                        .is_raw = mark->is_raw,
                        .crc = mark->crc,
                        .stored = (const unsigned char *)stored,
                        .stored_bytes = mark->stored_bytes,
                        .true_bytes = (size_t)fsti_min(size, left)};
    fst_error cause;
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_chunk_decode(read->room->decoder, &chunk, target, &cause);
    read->op->decode_ns += fsti_now_ns() - start_ns;
    if (status == FST_OK) return FST_OK;
    FST_TRY(fsti_file_check(read->file->stored, read->error));
    fsti_error_place place = {.file = fsti_file_path(read->file->stored),
                              .tensor = fsti_header_name(packed->header, original),
                              .tensor_size = original->name_size,
                              .byte_offset = mark->begin};
    return fsti_error_set(read->error, status, place, "%s", cause.message);
}

/// Puts one chunk's part in its place: at once, or by way of the room where only some is wanted.
static fst_status place_chunk(const packed_read *read, const packed_part *part, uint64_t number,
                              const char *stored) {
    const fsti_packed_tensor *tensor = &read->file->packed.tensors[part->index];
    const fsti_tensor *original = &read->file->packed.header->tensors[part->index];
    packed_room *room = read->room;
    uint64_t begin = number << tensor->chunk_log;
    uint64_t end =
        fsti_min(begin + ((uint64_t)1 << tensor->chunk_log), original->end - original->begin);
    uint64_t from = fsti_max(begin, part->begin), until = fsti_min(end, part->end);
    char *target = part->target + (from - part->begin);
    read->op->decoded_bytes += until - from;
    if (from == begin && until == end && stored != NULL)
        return decode_chunk(read, part, number, stored, target);
    if (stored != NULL) {
        room->tail_chunk = NO_CHUNK;
        FST_TRY(decode_chunk(read, part, number, stored, room->tail));
        room->tail_chunk = tensor->chunk_first + number;
        room->tail_file = read->file->number;
    }
    memcpy(target, room->tail + (from - begin), (size_t)(until - from));
    return FST_OK;
}

static uint64_t chunk_end(const fsti_packed_chunk *chunk) {
    return chunk->begin + chunk->stored_bytes;
}

/// What fills a tensor's entry behind its last chunk is zero.
static fst_status check_filling(const packed_read *read, const packed_part *part,
                                const char *filling, uint64_t size) {
    const fsti_packed *packed = &read->file->packed;
    const fsti_tensor *original = &packed->header->tensors[part->index];
    fsti_error_place place = {.file = fsti_file_path(read->file->stored),
                              .tensor = fsti_header_name(packed->header, original),
                              .tensor_size = original->name_size,
                              .byte_offset = packed->tensors[part->index].stored_end - size};
    for (uint64_t i = 0; i < size; i++, place.byte_offset++)
        if (filling[i] != 0)
            return fsti_error_set(read->error, FST_E_CORRUPT, place,
                                  "a compressed tensor is damaged: its end is not zero");
    return FST_OK;
}

static fst_status read_packed(const packed_read *read, const packed_part *part) {
    const fsti_packed_tensor *tensor = &read->file->packed.tensors[part->index];
    const fsti_packed_chunk *chunks = read->file->packed.chunks + tensor->chunk_first;
    uint64_t next = part->begin >> tensor->chunk_log;
    uint64_t end = ((part->end - 1) >> tensor->chunk_log) + 1;
    FST_TRY(open_decoder(read->room, read->error));
    if (read->room->tail_file == read->file->number &&
        read->room->tail_chunk == tensor->chunk_first + next)
        FST_TRY(place_chunk(read, part, next++, NULL));
    while (next < end) {
        uint64_t until = next + 1, begin = chunks[next].begin;
        const char *stored;
        while (until < end && chunk_end(&chunks[until]) - begin <= GROUP_BYTES) until++;
        uint64_t data_end = chunk_end(&chunks[until - 1]);
        uint64_t stored_end = until == tensor->chunk_count ? tensor->stored_end : data_end;
        FST_TRY(read_stored(read, begin, stored_end, &stored));
        FST_TRY(check_filling(read, part, stored + (data_end - begin), stored_end - data_end));
        for (; next < until; next++)
            FST_TRY(place_chunk(read, part, next, stored + (chunks[next].begin - begin)));
    }
    return FST_OK;
}

/// The bytes from `at` on that lie in the stored file one after the other, as they are: of a plain
/// tensor, and of those that follow it there as they do here. 0: the tensor is packed.
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
            FST_TRY(read_plain(read, begin, size, target));
        } else {
            part.end = fsti_min(part.begin + (end - at), tensor->end - tensor->begin);
            size = part.end - part.begin;
            FST_TRY(read_packed(read, &part));
        }
    }
    return FST_OK;
}

/// The chunk that byte `at` of the original is in; NO_CHUNK where it is in none.
static uint64_t chunk_at(const fsti_packed *packed, uint64_t at) {
    if (at < packed->original_bytes || at >= packed->true_bytes) return NO_CHUNK;
    size_t index = fsti_packed_tensor_at(packed, at);
    const fsti_packed_tensor *tensor = &packed->tensors[index];
    uint64_t begin = packed->header->data_begin + packed->header->tensors[index].begin;
    return tensor->is_packed ? tensor->chunk_first + ((at - begin) >> tensor->chunk_log) : NO_CHUNK;
}

static void read_made(void *context, fsti_io_op *op) {
    packed_file *file = context;
    uint64_t end = fsti_min(op->offset + op->size, file->packed.true_bytes);
    fst_error error;
    op->result = 0;
    if (op->offset >= end) return;
    packed_read read = {.file = file,
                        .room = take_room(file, chunk_at(&file->packed, op->offset)),
                        .op = op,
                        .error = op->error != NULL ? op->error : &error};
    fst_status status = FST_OK;
    if (read.room == NULL)
        status = fsti_error_memory(read.error, sizeof *read.room);
    else
        status = read_bytes(&read, op->offset, end);
    if (read.room != NULL) give_room(read.room);
    op->result = status == FST_OK ? (int64_t)(end - op->offset) : -EIO;
}

static void let_go(void *context, uint64_t at, uint64_t end) {
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
        fsti_file_let_go(file->stored, from, to);
        at = until;
    }
}

/// The directory's entry, whole.
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
        status = read_stored(read, header->data_begin, header->data_begin + size, &stored);
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
    packed_room room = {.tail_chunk = NO_CHUNK};
    fsti_io_op op = {.file = file->stored};
    packed_read read = {.file = file, .room = &room, .op = &op, .error = error};
    char *bytes = NULL;
    size_t byte_count = 0;
    fst_status status = read_directory(&read, source->header, &bytes, &byte_count);
    fsti_buffer_unref(room.memory);
    FST_TRY(status);
    return fsti_packed_parse(bytes, byte_count, source, &file->packed, error);
}

fst_status fsti_packed_file_open(const fst_model *model, model_file *target, uint32_t flags,
                                 fst_error *error) {
    packed_file *file = fsti_alloc_zeroed(1, sizeof *file);
    if (file == NULL) return fsti_error_memory(error, sizeof *file);
    pthread_once(&rooms_once, register_rooms);
    pthread_mutex_lock(&rooms_lock);
    files_open++;
    file->number = ++files_made;
    pthread_mutex_unlock(&rooms_lock);
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
    target->room_bytes = room_bytes(file);
    target->stored_header = target->header;
    target->header = fsti_header_ref(file->packed.header);
    target->digests = (fsti_digest_list){0};
    fsti_file_maker maker = {.origin = target->file,
                             .size_bytes = file->packed.true_bytes,
                             .context = file,
                             .read = read_made,
                             .let_go = let_go,
                             .release = release_file,
                             .what = "compressed"};
    target->file = NULL; // the maker's now
    return fsti_file_make(&maker, &target->file, error);
}
