// SPDX-License-Identifier: Apache-2.0
/// Restores the page cache after reads: notes which pages of a chunk are cached before it is read,
/// and drops the others afterwards.
#include "sink.h"

/// Pages covered by one 64-bit word of a chunk's bitmap.
#define BITS_PAGES 64u

/// The pages of one word that lie within the chunk.
static fsti_plan_chunk bits_range(const fsti_plan_chunk *chunk, uint64_t word) {
    uint64_t size = BITS_PAGES * fsti_page_bytes();
    uint64_t begin = fsti_align_down(chunk->begin, fsti_page_bytes()) + word * size;
    return (fsti_plan_chunk){.begin = begin, .end = fsti_min(begin + size, chunk->end)};
}

/// Which pages of a word's range are resident. Unknown pages count as resident, so that they are
/// never dropped.
static uint64_t classify_pages(fsti_file *file, const fsti_plan_chunk *range) {
    uint64_t bits = 0, resident, page = fsti_page_bytes();
    if (fsti_file_resident(file, range->begin, range->end, &resident) && resident == 0) return 0;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        bool has_residency =
            fsti_file_resident(file, at, fsti_min(at + page, range->end), &resident);
        if (!has_residency || resident > 0) bits |= (uint64_t)1 << i;
    }
    return bits;
}

bool fsti_pipeline_note_resident(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    // Direct reads cache nothing, so nothing will be dropped. If they fail later, the earlier
    // residency is unknown.
    if (fsti_pipeline_engine(pipeline, chunk)->is_direct) return false;
    uint64_t count = (range->end - range->begin) / fsti_page_bytes() / BITS_PAGES + 2;
    uint64_t *words = fsti_alloc_zeroed((size_t)count, sizeof *words);
    if (words == NULL) return false;
    for (uint64_t i = 0; i < count; i++) {
        fsti_plan_chunk part = bits_range(range, i);
        if (part.begin < part.end) words[i] = classify_pages(file, &part);
    }
    pipeline->chunks[chunk].resident_pages = words;
    return true;
}

/// Drops pages of a word's range that were not resident before.
static void drop_pages(const fsti_file *file, const fsti_plan_chunk *range, uint64_t kept) {
    uint64_t page = fsti_page_bytes(), from = range->begin;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        if ((kept >> i & 1) == 0) continue;
        if (from < at) fsti_file_drop_cached(file, from, at);
        from = at + page;
    }
    if (from < range->end) fsti_file_drop_cached(file, from, range->end);
}

void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk) {
    const chunk_state *state = &pipeline->chunks[chunk];
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file =
        pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    if (!state->is_dropped || fsti_pipeline_engine(pipeline, chunk)->is_direct) return;
    if (state->resident_pages == NULL) {
        fsti_file_drop_cached(file, range->begin, range->end);
        return;
    }
    for (uint64_t i = 0;; i++) {
        fsti_plan_chunk part = bits_range(range, i);
        if (part.begin >= part.end) return;
        drop_pages(file, &part, state->resident_pages[i]);
    }
}
