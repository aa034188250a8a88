// SPDX-License-Identifier: Apache-2.0
/// Folds a chain: all frames of one tensor are decoded in parallel streams, and each block gets the
/// changes of all frames before the next block is read. So the tensor is read, written and hashed
/// once, however long the chain is.
///
/// An "overwrite" frame stores all positions before all values. A decoded list that fits its share
/// of DELTA_LIST_BYTES is kept in memory. A longer one is decoded by two decoders, one at the
/// positions and one at the values. Either way the memory of a thread is bounded.
#include <string.h>

#include "delta_private.h"

/// Positions that are decoded at a time from a list that is not kept.
#define POSITIONS_AT_A_TIME ((size_t)8 << 10)
/// Sizes in an overwrite list: the count before it, and the position of each entry. A value is one
/// byte.
#define COUNT_BYTES 4u
#define POSITION_BYTES 4u

/// A cursor in the list of an overwrite frame.
typedef struct fold_list {
    uint64_t count, taken; ///< entries in the list, and those before the cursor
    uint64_t undo_at;      ///< position of the list's first undo value
    bool has_previous;
    uint32_t previous;
    unsigned char *kept; ///< all positions and all values; NULL: decoded as needed
    size_t kept_capacity;
    size_t chunk_begin, chunk_end;     ///< entries in the two buffers below
    unsigned char *positions, *values; ///< POSITIONS_AT_A_TIME of each
    fsti_frame_reader *value_reader;   ///< reads the values of a list that is not kept
} fold_list;

struct delta_fold {
    delta_frames frames;
    fsti_frame_reader *readers[DELTA_FOLD_MAX]; ///< opened when first needed
    fold_list lists[DELTA_FOLD_MAX];
    fold_undo undo;
    bool has_undo;
    size_t current; ///< the frame that was decoded last
    uint64_t size_bytes, position, undo_bytes;
    uint64_t other_bytes; ///< the size that an xor frame states, if it is not the tensor's
    unsigned char old_values[DELTA_BLOCK_BYTES];
};

fst_status fsti_fold_open(delta_fold **out, fst_error *error) {
    *out = fsti_alloc(sizeof **out);
    if (*out == NULL) return fsti_error_memory(error, sizeof **out);
    memset((*out)->readers, 0, sizeof(*out)->readers);
    memset((*out)->lists, 0, sizeof(*out)->lists);
    (*out)->current = 0;
    return FST_OK;
}

void fsti_fold_close(delta_fold *fold) {
    if (fold == NULL) return;
    for (size_t i = 0; i < DELTA_FOLD_MAX; i++) {
        fsti_frame_reader_close(fold->readers[i]);
        fsti_frame_reader_close(fold->lists[i].value_reader);
        fsti_free(fold->lists[i].kept);
        fsti_free(fold->lists[i].positions);
        fsti_free(fold->lists[i].values);
    }
    fsti_free(fold);
}

/// Reads stored bytes of a frame; `context` is its delta_frame.
static fst_status pull_stored(void *context, void *target, size_t size, uint64_t offset,
                              fst_error *error) {
    const delta_frame *frame = context;
    size_t got = 0;
    FST_TRY(fsti_file_read(frame->file, target, size, frame->offset + offset, &got, error));
    if (got == size) return FST_OK;
    fsti_error_location location = {.file = fsti_file_path(frame->file),
                                    .byte_offset = frame->offset + offset + got};
    return fsti_error_set(error, FST_E_SHORT_READ, location, "the shard became shorter");
}

static fst_status begin_reader(fsti_frame_reader **reader, const delta_frame *frame,
                               fst_error *error) {
    fsti_frame_source source = {pull_stored, (void *)(uintptr_t)frame, frame->size_bytes};
    if (*reader == NULL) FST_TRY(fsti_frame_reader_open(reader, error));
    fsti_frame_begin(*reader, &source);
    return FST_OK;
}

static fst_status refuse_list(const char *what, fst_error *error) {
    return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION, "CorruptData: %s", what);
}

/// Refuses a frame that states another content size than `expected`, before it is decoded.
static fst_status check_stated(uint64_t stated, uint64_t expected, fst_error *error) {
    if (stated == FSTI_FRAME_UNSTATED || stated == expected) return FST_OK;
    return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION,
                          "CorruptData: the zstd frame holds %llu bytes, but the tensor needs %llu",
                          (unsigned long long)stated, (unsigned long long)expected);
}

static uint32_t read_u32(const unsigned char *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/// Allocates memory for the complete list, or two buffers and a second decoder if it is too long.
static fst_status make_list_room(delta_fold *fold, size_t at, fst_error *error) {
    fold_list *list = &fold->lists[at];
    uint64_t entry_bytes = list->count * (POSITION_BYTES + 1);
    if (entry_bytes <= DELTA_LIST_BYTES / fold->frames.count) {
        if (list->kept_capacity >= entry_bytes && list->kept != NULL) return FST_OK;
        fsti_free(list->kept);
        list->kept_capacity = (size_t)entry_bytes + 1;
        list->kept = fsti_alloc(list->kept_capacity);
        return list->kept == NULL ? fsti_error_memory(error, entry_bytes) : FST_OK;
    }
    fsti_free(list->kept);
    list->kept = NULL;
    list->kept_capacity = 0;
    if (list->positions == NULL) list->positions = fsti_alloc(POSITIONS_AT_A_TIME * POSITION_BYTES);
    if (list->values == NULL) list->values = fsti_alloc(POSITIONS_AT_A_TIME);
    if (list->positions == NULL || list->values == NULL)
        return fsti_error_memory(error, POSITIONS_AT_A_TIME * (POSITION_BYTES + 1));
    FST_TRY(begin_reader(&list->value_reader, &fold->frames.frames[at], error));
    return fsti_frame_read(list->value_reader, NULL, COUNT_BYTES + list->count * POSITION_BYTES,
                           error);
}

/// Begins an overwrite frame: reads the count, and the complete list if it is kept in memory.
static fst_status begin_list(delta_fold *fold, size_t at, fst_error *error) {
    fold_list *list = &fold->lists[at];
    unsigned char count[COUNT_BYTES];
    uint64_t stated;
    FST_TRY(fsti_frame_stated(fold->readers[at], &stated, error));
    FST_TRY(fsti_frame_read(fold->readers[at], count, COUNT_BYTES, error));
    list->count = read_u32(count);
    list->taken = 0;
    list->has_previous = false;
    list->chunk_begin = list->chunk_end = 0;
    list->undo_at = fold->undo_bytes;
    fold->undo_bytes += list->count;
    if (list->count > fold->size_bytes)
        return refuse_list("an overwrite list has more entries than the tensor has bytes", error);
    FST_TRY(check_stated(stated, COUNT_BYTES + list->count * (POSITION_BYTES + 1), error));
    FST_TRY(make_list_room(fold, at, error));
    if (list->kept == NULL) return FST_OK;
    list->chunk_end = (size_t)list->count;
    return fsti_frame_read(fold->readers[at], list->kept, list->count * (POSITION_BYTES + 1),
                           error);
}

/// Begins an xor frame. It has as many bytes as the tensor had when the delta was made.
static fst_status begin_difference(delta_fold *fold, size_t at, fst_error *error) {
    uint64_t stated;
    FST_TRY(fsti_frame_stated(fold->readers[at], &stated, error));
    if (stated != FSTI_FRAME_UNSTATED && stated != fold->size_bytes) fold->other_bytes = stated;
    return check_stated(stated, fold->size_bytes, error);
}

fst_status fsti_fold_begin(delta_fold *fold, const delta_frames *frames, uint64_t size_bytes,
                           const fold_undo *undo, fst_error *error) {
    fold->frames = *frames;
    fold->size_bytes = size_bytes;
    fold->position = fold->undo_bytes = fold->other_bytes = 0;
    fold->has_undo = undo != NULL;
    if (undo != NULL) fold->undo = *undo;
    for (size_t i = 0; i < frames->count; i++) {
        fold->current = i;
        FST_TRY(begin_reader(&fold->readers[i], &frames->frames[i], error));
        FST_TRY(frames->frames[i].encoding == FST_DELTA_OVERWRITE
                    ? begin_list(fold, i, error)
                    : begin_difference(fold, i, error));
    }
    return FST_OK;
}

uint64_t fsti_fold_other_bytes(const delta_fold *fold) { return fold->other_bytes; }

uint64_t fsti_fold_undo_bytes(const delta_fold *fold) { return fold->undo_bytes; }

/// Decodes the next entries of a list that is not kept.
static fst_status refill_list(delta_fold *fold, size_t at, fst_error *error) {
    fold_list *list = &fold->lists[at];
    size_t count = (size_t)fsti_min(POSITIONS_AT_A_TIME, list->count - list->taken);
    list->chunk_begin = (size_t)list->taken;
    list->chunk_end = list->chunk_begin + count;
    FST_TRY(fsti_frame_read(fold->readers[at], list->positions, count * POSITION_BYTES, error));
    return fsti_frame_read(list->value_reader, list->values, count, error);
}

/// The treatment of a block's entries: write new values, write saved values, or only move the
/// cursor.
typedef enum list_step { STEP_APPLY, STEP_REVERT, STEP_SKIP } list_step;

/// Returns the position of the next entry. It must be below the tensor's size and above the
/// previous position.
static fst_status next_position(delta_fold *fold, size_t at, uint32_t *position, fst_error *error) {
    fold_list *list = &fold->lists[at];
    if (list->taken == list->chunk_end) FST_TRY(refill_list(fold, at, error));
    const unsigned char *positions = list->kept != NULL ? list->kept : list->positions;
    *position = read_u32(positions + (list->taken - list->chunk_begin) * POSITION_BYTES);
    if (*position >= fold->size_bytes)
        return refuse_list("an overwrite position lies beyond the tensor", error);
    if (list->has_previous && *position <= list->previous)
        return refuse_list("overwrite positions are not ascending and unique", error);
    return FST_OK;
}

/// Processes the entries with positions below `end`. STEP_REVERT writes the saved values.
static fst_status walk_list(delta_fold *fold, size_t at, unsigned char *block, uint64_t end,
                            list_step step, fst_error *error) {
    fold_list *list = &fold->lists[at];
    uint64_t first = list->taken, begin = fold->position;
    size_t count = 0;
    while (list->taken < list->count) {
        uint32_t position;
        FST_TRY(next_position(fold, at, &position, error));
        if (position >= end) break;
        const unsigned char *values =
            list->kept != NULL ? list->kept + list->count * POSITION_BYTES : list->values;
        // Positions ascend, and earlier blocks have consumed those below `begin`. So `position`
        // lies in the block, and `count` stays below its size.
        if (step == STEP_APPLY) {
            fold->old_values[count] = block[position - begin];
            block[position - begin] = values[list->taken - list->chunk_begin];
        } else if (step == STEP_REVERT) {
            // The saved values of a block are contiguous, so one read gets all of them.
            if (count == 0) {
                uint64_t most = fsti_min(DELTA_BLOCK_BYTES, list->count - first);
                FST_TRY(fold->undo.load(fold->undo.context, fold->old_values,
                                        (size_t)fsti_min(most, end - begin), list->undo_at + first,
                                        error));
            }
            block[position - begin] = fold->old_values[count];
        }
        count++;
        list->previous = position;
        list->has_previous = true;
        list->taken++;
    }
    if (step == STEP_APPLY && fold->has_undo && count > 0)
        return fold->undo.save(fold->undo.context, fold->old_values, count, list->undo_at + first,
                               error);
    return FST_OK;
}

static fst_status fold_frame(delta_fold *fold, size_t at, unsigned char *block, size_t size,
                             list_step step, fst_error *error) {
    fold->current = at;
    if (fold->frames.frames[at].encoding == FST_DELTA_XOR)
        return fsti_frame_xor(fold->readers[at], block, size, error);
    return walk_list(fold, at, block, fold->position + size, step, error);
}

fst_status fsti_fold_apply(delta_fold *fold, unsigned char *block, size_t size, fst_error *error) {
    for (size_t i = 0; i < fold->frames.count; i++)
        FST_TRY(fold_frame(fold, i, block, size, STEP_APPLY, error));
    fold->position += size;
    return FST_OK;
}

fst_status fsti_fold_revert(delta_fold *fold, unsigned char *block, size_t size, fst_error *error) {
    for (size_t i = fold->frames.count; i > 0; i--)
        FST_TRY(fold_frame(fold, i - 1, block, size, STEP_REVERT, error));
    fold->position += size;
    return FST_OK;
}

fst_status fsti_fold_skip(delta_fold *fold, uint64_t size, fst_error *error) {
    for (size_t i = 0; i < fold->frames.count; i++) {
        fold->current = i;
        if (fold->frames.frames[i].encoding == FST_DELTA_XOR)
            FST_TRY(fsti_frame_xor(fold->readers[i], NULL, size, error));
        else
            FST_TRY(walk_list(fold, i, NULL, fold->position + size, STEP_SKIP, error));
    }
    fold->position += size;
    return FST_OK;
}

fst_status fsti_fold_end(delta_fold *fold, fst_error *error) {
    for (size_t i = 0; i < fold->frames.count; i++) {
        fold_list *list = &fold->lists[i];
        fold->current = i;
        if (fold->frames.frames[i].encoding == FST_DELTA_OVERWRITE && list->kept == NULL) {
            FST_TRY(fsti_frame_end(list->value_reader, error));
            // The first decoder has only read the positions, so the values are skipped here.
            FST_TRY(fsti_frame_read(fold->readers[i], NULL, list->count, error));
        }
        FST_TRY(fsti_frame_end(fold->readers[i], error));
    }
    return FST_OK;
}

void fsti_fold_locate(const delta_fold *fold, const delta_frames *frames,
                      const delta_tensor *tensor, fst_error *error) {
    if (error == NULL || error->status != FST_E_CORRUPT || frames->count == 0) return;
    size_t frame = fold->current < frames->count ? fold->current : 0;
    fsti_error_location location = {.file = fsti_file_path(frames->frames[frame].file),
                                    .tensor = tensor->name,
                                    .tensor_size = tensor->name_size,
                                    .byte_offset = FST_NO_OFFSET};
    fst_error found = *error;
    if (found.file[0] == '\0')
        (void)!fsti_error_set(error, found.status, location, "%s", found.message);
    else
        fsti_error_locate(error, &location);
}
