// SPDX-License-Identifier: Apache-2.0
/// Maps cached pages of views on a separate thread while the program goes on.
///
/// A page fault maps all cached pages of an aligned block of 64 KiB. One access to each block in a
/// row takes a third of the time of the same faults between accesses to all other pages
/// (docs/benchmarks/README.md), and the program is not interrupted.
#include "sink.h"

/// Between two steps the thread notices that the program has freed the tensors.
#define STEP_BYTES ((uint64_t)2 << 20)
/// For less, a thread does not pay off.
#define MAP_AHEAD_BYTES_MIN ((uint64_t)8 << 20)
/// Mapped pages need page tables, 1/512 of this.
#define MAP_AHEAD_BYTES_MAX ((uint64_t)16 << 30)

/// Part of a mapping whose pages are cached.
typedef struct cached_range {
    fsti_buffer *view;
    uint64_t begin, end;
} cached_range;

/// Owns a reference to each mapping.
typedef struct cached_ranges {
    size_t count;
    uint64_t size_bytes;
    cached_range ranges[];
} cached_ranges;

/// Whether a range is the first one of its mapping, which took the reference.
static bool is_first(const cached_ranges *cached, size_t index) {
    return index == 0 || cached->ranges[index - 1].view != cached->ranges[index].view;
}

static void free_ranges(cached_ranges *cached) {
    for (size_t i = cached->count; i-- > 0;)
        if (is_first(cached, i)) fsti_buffer_unref(cached->ranges[i].view);
    fsti_free(cached);
}

/// Adds a chunk, to the last range if it continues that.
static void add_chunk(cached_ranges *cached, const fsti_plan_chunk *chunk, fsti_buffer *view) {
    cached_range *last = cached->count > 0 ? &cached->ranges[cached->count - 1] : NULL;
    cached->size_bytes += chunk->end - chunk->begin;
    if (last != NULL && last->view == view && last->end == chunk->begin) {
        last->end = chunk->end;
        return;
    }
    cached->ranges[cached->count++] = (cached_range){view, chunk->begin, chunk->end};
    if (is_first(cached, cached->count - 1)) fsti_buffer_ref(view);
}

/// NULL: there is nothing to map, or not enough memory.
static cached_ranges *find_cached(const fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    if (pipeline->chunks_resident == 0) return NULL;
    cached_ranges *cached =
        fsti_alloc_zeroed(1, sizeof *cached + pipeline->chunks_resident * sizeof *cached->ranges);
    if (cached == NULL) return NULL;
    for (uint32_t i = 0; i < pipeline->chunks_known; i++) {
        const fsti_plan_chunk *chunk = &plan->chunks[i];
        if (!pipeline->chunks[i].is_resident) continue;
        if (cached->size_bytes + (chunk->end - chunk->begin) > MAP_AHEAD_BYTES_MAX) break;
        add_chunk(cached, chunk, pipeline->job.files[plan->extents[chunk->extent].file].view);
    }
    if (cached->size_bytes >= MAP_AHEAD_BYTES_MIN) return cached;
    free_ranges(cached);
    return NULL;
}

/// Ends early if the program has freed the tensors, or a page can't be read.
static void map_range(const cached_range *range) {
    for (uint64_t at = range->begin, end; at < range->end; at = end) {
        end = fsti_min(fsti_align_down(at, STEP_BYTES) + STEP_BYTES, range->end);
        if (fsti_buffer_is_last_ref(range->view)) return;
        if (!fsti_view_touch(range->view->data + at, end - at, FSTI_VIEW_BLOCK_BYTES)) return;
    }
}

static void *map_ranges(void *context) {
    cached_ranges *cached = context;
    for (size_t i = 0; i < cached->count; i++)
        map_range(&cached->ranges[i]);
    free_ranges(cached);
    return NULL;
}

void fsti_pipeline_map_ahead(const fsti_pipeline *pipeline) {
    const fsti_job *job = &pipeline->job;
    bool may_start = job->threads.wanted != 1 && !job->threads.is_limited;
    bool is_wanted = pipeline->sink->is_view && !job->populate && !job->verifies &&
                     !job->others_read && job->guard_allowed;
    if (!may_start || !is_wanted || !fsti_io_guard_ready()) return;
    cached_ranges *cached = find_cached(pipeline);
    pthread_t thread;
    if (cached == NULL) return;
    if (fsti_thread_start(&thread, map_ranges, cached) == 0)
        pthread_detach(thread);
    else
        free_ranges(cached); // the program maps the pages
}
