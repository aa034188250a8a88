// SPDX-License-Identifier: Apache-2.0
/// Writes the bytes of one file, directly from aligned slots or through the page cache. See
/// stage.h.
///
/// Invariants: the kernel owns the memory of a write in flight until it is reaped, so close() reaps
/// all of them. At most one slot is open (being filled), and `cursor` is the next file offset that
/// can be added to it; another offset closes the slot.
#include "stage.h"

#include <stdio.h>
#include <string.h>

#include "memory/memory.h"
#include "plan/plan.h"

#define SLOT_COUNT_MAX 8u
/// 8 writes of 2 MiB in flight use a disk's full speed, and the slots fit in the CPU cache.
#define ASYNC_SLOT_BYTES ((uint64_t)2 << 20)
/// A single write must be larger to keep the disk busy.
#define SYNC_SLOT_BYTES ((uint64_t)8 << 20)
/// Through the page cache, smaller pieces are collected, larger ones written directly.
#define GATHER_BYTES_MAX ((uint64_t)256 << 10)
#define GATHER_SLOT_BYTES ((uint64_t)1 << 20)
/// Minimum size for writing from the caller's memory.
#define SOURCE_BYTES_MIN ((uint64_t)1 << 20)

typedef struct stage_slot {
    fsti_io_op op;
    char *memory;
    bool busy, has_pages;
} stage_slot;

struct save_stage {
    fsti_output *output;
    stage_options options;
    fsti_route route;             ///< for the next bytes
    const fsti_io_engine *engine; ///< the engine used so far; NULL: the page cache
    void *lane;
    int direct_fd;
    uint32_t memory_alignment;
    fsti_buffer *memory;
    stage_slot slots[SLOT_COUNT_MAX];
    uint32_t slot_count, busy_count;
    uint64_t slot_bytes;
    stage_slot *open_slot; ///< being filled
    uint64_t open_begin, open_fill;
    uint64_t cursor; ///< the next expected offset
    stage_counts counts;
};

// ---- choosing a route ----

static fst_status refuse_engine(const save_stage *stage, const char *name, const char *reason,
                                fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_output_path(stage->output);
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "engine %s can't be used: %s", name,
                          reason);
}

static void explain(save_stage *stage, const char *first, const char *second) {
    const char *comma = first[0] != '\0' && second[0] != '\0' ? ", " : "";
    snprintf(stage->counts.reason, sizeof stage->counts.reason, "%.60s%s%.60s", first, comma,
             second);
}

static void set_route(save_stage *stage, fsti_route route) {
    stage->route = route;
    stage->engine = route == FSTI_ROUTE_RING     ? &fsti_io_engine_uring
                    : route == FSTI_ROUTE_DIRECT ? &fsti_io_engine_direct
                                                 : NULL;
    stage->counts.engine = stage->engine == NULL ? "buffered" : stage->engine->name;
}

/// Uses direct I/O if it was requested or pays off.
static fst_status choose_route(save_stage *stage, fst_error *error) {
    fst_save_engine wanted = stage->options.engine;
    fsti_save_facts facts = {.engine = wanted,
                             .is_durable = stage->options.promise == FST_SAVE_DURABLE,
                             .file_bytes = stage->options.file_bytes,
                             .has_direct = true,
                             .has_ring = true};
    if (fsti_output_is_object(stage->output)) {
        set_route(stage, FSTI_ROUTE_CACHE);
        stage->counts.engine = "http";
        explain(stage, "a remote object, sent in parts", "");
        return FST_OK;
    }
    char why_direct[128] = "", why_ring[128] = "direct was requested";
    const char *reason;
    set_route(stage, fsti_policy_save(&facts, &reason));
    if (stage->engine == NULL) {
        explain(stage, reason, "");
        return FST_OK;
    }
    stage->direct_fd = fsti_output_direct(stage->output, why_direct, sizeof why_direct);
    facts.has_direct = stage->direct_fd >= 0;
    facts.has_ring = facts.has_direct && wanted != FST_SAVE_ENGINE_DIRECT &&
                     fsti_io_engine_uring.usable(NULL, why_ring, sizeof why_ring);
    if (!facts.has_direct && wanted != FST_SAVE_ENGINE_AUTO)
        return refuse_engine(stage, stage->engine->name, why_direct, error);
    if (!facts.has_ring && wanted == FST_SAVE_ENGINE_URING)
        return refuse_engine(stage, "uring", why_ring, error);
    set_route(stage, fsti_policy_save(&facts, &reason));
    explain(stage, why_direct, facts.has_direct ? why_ring : "");
    return FST_OK;
}

/// If io_uring is unavailable now (pinned memory may be short), uses blocking writes through the
/// same slots, unless it was forced.
static fst_status open_lane(save_stage *stage, fst_error *error) {
    bool may_fall_back =
        stage->options.engine == FST_SAVE_ENGINE_AUTO && stage->route == FSTI_ROUTE_RING;
    fst_status status =
        stage->engine->lane_open(SLOT_COUNT_MAX, &stage->lane, may_fall_back ? NULL : error);
    if (status == FST_OK || !may_fall_back) return status;
    set_route(stage, fsti_policy_demote(stage->route, true));
    explain(stage, "io_uring could not be set up", "");
    return stage->engine->lane_open(SLOT_COUNT_MAX, &stage->lane, error);
}

static fst_status open_slots(save_stage *stage, fst_error *error) {
    bool async = stage->engine != NULL && stage->engine->is_async;
    stage->slot_count = async ? SLOT_COUNT_MAX : 1;
    stage->slot_bytes = stage->engine != NULL ? SYNC_SLOT_BYTES : GATHER_SLOT_BYTES;
    if (async) stage->slot_bytes = ASYNC_SLOT_BYTES;
    // Not larger than the file needs.
    uint64_t file_bytes = fsti_align_up(stage->options.file_bytes, FSTI_IO_PAGE_BYTES);
    if (file_bytes < stage->slot_bytes) stage->slot_bytes = file_bytes;
    uint64_t needed = fsti_min(stage->slot_count, 1 + file_bytes / stage->slot_bytes);
    stage->slot_count = (uint32_t)needed;
    uint64_t size_bytes = stage->slot_count * stage->slot_bytes;
    FST_TRY(fsti_buffer_arena(size_bytes, &stage->memory, error));
    for (uint32_t i = 0; i < stage->slot_count; i++)
        stage->slots[i].memory = stage->memory->data + i * stage->slot_bytes;
    stage->counts.stage_bytes = size_bytes;
    if (stage->engine == NULL) return FST_OK;
    stage->memory_alignment = fsti_output_memory_alignment(stage->output);
    return open_lane(stage, error);
}

fst_status fsti_stage_open(fsti_output *output, const stage_options *options, save_stage **out,
                           fst_error *error) {
    save_stage *stage = fsti_alloc_zeroed(1, sizeof *stage);
    if (stage == NULL) return fsti_error_memory(error, sizeof *stage);
    stage->output = output;
    stage->options = *options;
    fst_status status = choose_route(stage, error);
    if (status == FST_OK) status = open_slots(stage, error);
    if (status != FST_OK) {
        fsti_stage_close(stage, NULL);
        return status;
    }
    *out = stage;
    return FST_OK;
}

// ---- direct writes ----

static fst_status write_buffered(save_stage *stage, const void *data, uint64_t size,
                                 uint64_t offset, fst_error *error) {
    if (size == 0) return FST_OK;
    stage->counts.write_count++;
    stage->counts.bytes_written += size;
    return fsti_output_write(stage->output, data, (size_t)size, offset, error);
}

/// Handles a finished write. After a failed or short direct write, the page cache writes the rest;
/// only its errors are final. After a failed one no more direct writes follow, unless the engine
/// was requested.
static fst_status finish_write(save_stage *stage, fsti_io_op *op, fst_error *error) {
    uint64_t done = op->result < 0 ? 0 : fsti_min((uint64_t)op->result, op->size);
    bool is_automatic = stage->options.engine == FST_SAVE_ENGINE_AUTO;
    if (op->result < 0 && is_automatic && stage->route != FSTI_ROUTE_CACHE) {
        stage->route = fsti_policy_demote(stage->route, false);
        explain(stage, "then buffered, because a direct write failed", strerror((int)-op->result));
    }
    stage->counts.write_count++;
    stage->counts.bytes_written += done;
    stage->counts.bytes_direct += done;
    return write_buffered(stage, (const char *)op->buffer + done, op->size - done,
                          op->offset + done, error);
}

static fst_status reap_one(save_stage *stage, fst_error *error) {
    fsti_io_op *op = stage->engine->reap(stage->lane);
    if (op == NULL) return FST_OK;
    stage_slot *slot = (stage_slot *)(void *)((char *)op - offsetof(stage_slot, op));
    slot->busy = false;
    stage->busy_count--;
    return finish_write(stage, op, error);
}

static fst_status take_slot(save_stage *stage, stage_slot **out, fst_error *error) {
    while (stage->busy_count == stage->slot_count) FST_TRY(reap_one(stage, error));
    uint32_t index = 0; // a free slot exists, because not all are busy
    while (stage->slots[index].busy) index++;
    *out = &stage->slots[index];
    // The slot gets pages with its first bytes: count them as used instead of reserved.
    if (!(*out)->has_pages) fsti_buffer_use(stage->memory, stage->slot_bytes);
    (*out)->has_pages = true;
    return FST_OK;
}

static fst_status submit(save_stage *stage, stage_slot *slot, const char *data, uint64_t size,
                         uint64_t offset, fst_error *error) {
    if (stage->route == FSTI_ROUTE_CACHE) return write_buffered(stage, data, size, offset, error);
    slot->op = (fsti_io_op){.is_write = true,
                            .write_fd = stage->direct_fd,
                            .offset = offset,
                            .size = (size_t)size,
                            .buffer = (void *)(uintptr_t)data};
    slot->busy = true;
    stage->busy_count++;
    stage->engine->submit(stage->lane, &slot->op);
    if (stage->engine->is_async) return FST_OK;
    return reap_one(stage, error);
}

/// Writes whole pages of the open slot directly, and a partial page through the cache.
static fst_status close_slot(save_stage *stage, fst_error *error) {
    stage_slot *slot = stage->open_slot;
    if (slot == NULL) return FST_OK;
    uint64_t fill = stage->open_fill, body = 0;
    stage->open_slot = NULL;
    stage->open_fill = 0;
    if (stage->engine != NULL) body = fsti_align_down(fill, FSTI_IO_PAGE_BYTES);
    FST_TRY(
        write_buffered(stage, slot->memory + body, fill - body, stage->open_begin + body, error));
    if (body == 0) return FST_OK;
    return submit(stage, slot, slot->memory, body, stage->open_begin, error);
}

static fst_status fill_slot(save_stage *stage, const char *data, uint64_t *size, fst_error *error) {
    if (stage->open_slot == NULL) {
        stage_slot *slot = NULL;
        FST_TRY(take_slot(stage, &slot, error));
        stage->open_slot = slot;
        stage->open_begin = stage->cursor;
        stage->open_fill = 0;
    }
    *size = fsti_min(*size, stage->slot_bytes - stage->open_fill);
    memcpy(stage->open_slot->memory + stage->open_fill, data, (size_t)*size);
    stage->open_fill += *size;
    stage->counts.bytes_staged += *size;
    if (stage->open_fill < stage->slot_bytes) return FST_OK;
    return close_slot(stage, error);
}

/// Bytes at the cursor that can be written from the caller's memory; 0 if they must be staged.
/// Direct I/O requires an aligned file offset, size and address.
static uint64_t uncopied_bytes(const save_stage *stage, const char *data, uint64_t size) {
    if (stage->cursor % FSTI_IO_PAGE_BYTES != 0 || size < SOURCE_BYTES_MIN) return 0;
    if ((uintptr_t)data % stage->memory_alignment != 0) return 0;
    return fsti_align_down(fsti_min(size, stage->slot_bytes), FSTI_IO_PAGE_BYTES);
}

/// Adds the next piece at the cursor. *size: bytes taken; *borrowed: they are written from the
/// caller's memory.
static fst_status stage_direct(save_stage *stage, const char *data, uint64_t *size, bool *borrowed,
                               fst_error *error) {
    uint64_t gap = -stage->cursor % FSTI_IO_PAGE_BYTES;
    uint64_t source = uncopied_bytes(stage, data, *size);
    if (source > 0) {
        stage_slot *slot = NULL;
        FST_TRY(close_slot(stage, error)); // ends at a page, so all of it is written directly
        FST_TRY(take_slot(stage, &slot, error));
        *size = source;
        *borrowed = true;
        return submit(stage, slot, data, source, stage->cursor, error);
    }
    // After a jump: write up to the next page through the cache, and then use slots.
    if (stage->open_slot == NULL && gap > 0) {
        *size = fsti_min(*size, gap);
        return write_buffered(stage, data, *size, stage->cursor, error);
    }
    // Only to the end of the page, if the rest can be written from the caller's memory.
    if (gap > 0 && *size >= gap + SOURCE_BYTES_MIN &&
        (uintptr_t)(data + gap) % stage->memory_alignment == 0)
        *size = gap;
    return fill_slot(stage, data, size, error);
}

static fst_status write_cached(save_stage *stage, const char *data, uint64_t *size,
                               fst_error *error) {
    if (*size < GATHER_BYTES_MAX) return fill_slot(stage, data, size, error);
    FST_TRY(close_slot(stage, error));
    *size = fsti_min(*size, SYNC_SLOT_BYTES);
    return write_buffered(stage, data, *size, stage->cursor, error);
}

fst_status fsti_stage_put(save_stage *stage, uint64_t offset, const void *data, uint64_t size_bytes,
                          bool stable, fst_error *error) {
    if (offset != stage->cursor) {
        FST_TRY(close_slot(stage, error));
        stage->cursor = offset;
    }
    const char *from = data;
    bool borrowed = false;
    for (uint64_t left = size_bytes; left > 0;) {
        uint64_t size = left;
        FST_TRY(stage->engine != NULL ? stage_direct(stage, from, &size, &borrowed, error)
                                      : write_cached(stage, from, &size, error));
        // Digest after submitting the write, which continues in parallel.
        if (stage->options.digests != NULL)
            FST_TRY(
                fsti_chunk_digests_put(stage->options.digests, stage->cursor, from, size, error));
        stage->cursor += size;
        from += size;
        left -= size;
        FST_TRY(stage->options.report(stage->options.report_context, size, error));
    }
    while (!stable && borrowed && stage->busy_count > 0) FST_TRY(reap_one(stage, error));
    return FST_OK;
}

bool fsti_stage_is_busy(const save_stage *stage) { return stage->busy_count > 0; }

fst_status fsti_stage_reap(save_stage *stage, fst_error *error) {
    return stage->busy_count == 0 ? FST_OK : reap_one(stage, error);
}

uint64_t fsti_stage_settled(const save_stage *stage) {
    uint64_t settled = stage->cursor;
    for (uint32_t i = 0; i < stage->slot_count; i++)
        if (stage->slots[i].busy) settled = fsti_min(settled, stage->slots[i].op.offset);
    return settled;
}

fst_status fsti_stage_drain(save_stage *stage, fst_error *error) {
    fst_status status = close_slot(stage, error);
    while (stage->busy_count > 0) {
        // The kernel owns the memory until everything is reaped, so continue after errors.
        fst_status reaped = reap_one(stage, status == FST_OK ? error : NULL);
        if (status == FST_OK) status = reaped;
    }
    return status;
}

void fsti_stage_close(save_stage *stage, stage_counts *counts) {
    if (stage == NULL) return;
    if (stage->lane != NULL) {
        stage->open_slot = NULL;
        // Reap all writes, whether they failed or not, so that the kernel releases the memory.
        while (stage->busy_count > 0) (void)!reap_one(stage, NULL);
        stage->engine->lane_close(stage->lane);
    }
    if (counts != NULL) {
        counts->bytes_written += stage->counts.bytes_written;
        counts->bytes_direct += stage->counts.bytes_direct;
        counts->bytes_staged += stage->counts.bytes_staged;
        counts->write_count += stage->counts.write_count;
        counts->stage_bytes = fsti_max(counts->stage_bytes, stage->counts.stage_bytes);
        counts->engine = stage->counts.engine;
        memcpy(counts->reason, stage->counts.reason, sizeof counts->reason);
    }
    fsti_output_direct_close(stage->output);
    fsti_buffer_unref(stage->memory);
    fsti_free(stage);
}
