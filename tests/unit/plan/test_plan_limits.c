// SPDX-License-Identifier: Apache-2.0
/// Plans with unusual sizes and many pieces: choices, errors, and splitting.
#include "check.h"
#include "fixture.h"
#include "plan_fixture.h"

static int keeps_large(void *context, const fst_tensor_info *info) {
    return info->size_bytes >= *(uint64_t *)context;
}

TEST(selection)
{
    static const char *const globs[] = {"*.weight", "head[12].?"};
    uint64_t limit = 10;
    fsti_plan_selection any = {0}, by_glob = {.globs = globs, .glob_count = 2};
    fsti_plan_selection by_both = {
        .globs = globs, .glob_count = 2, .predicate = keeps_large, .predicate_context = &limit};
    fst_tensor_info weight = {.name = "a.b.weight", .name_size = 10, .size_bytes = 9};
    fst_tensor_info head = {.name = "head2.x", .name_size = 7, .size_bytes = 10};
    fst_tensor_info other = {.name = "head3.x", .name_size = 7, .size_bytes = 10};
    fst_tensor_info longer = {.name = "head2.x\0y", .name_size = 9, .size_bytes = 10};
    CHECK(fsti_plan_selects(&any, &other));
    CHECK(fsti_plan_selects(&by_glob, &weight) && fsti_plan_selects(&by_glob, &head));
    CHECK(!fsti_plan_selects(&by_glob, &other) && !fsti_plan_selects(&by_glob, &longer));
    CHECK(!fsti_plan_selects(&by_both, &weight) && fsti_plan_selects(&by_both, &head));
}

TEST(sizes_do_not_wrap)
{
    // A file of holes: 2^60 bytes, whose conversion would have 2^64.
    model m;
    init_model(&m, 8);
    add_tensor(&m, FST_DTYPE_F4, 1, (uint64_t[]){(uint64_t)1 << 61});
    fsti_plan_file files[] = {{.header = &m.header}};
    fsti_plan_want want = {.dtype = FST_DTYPE_F64};
    fsti_plan plan;
    fst_error error;
    CHECK_INT(fsti_plan_make(files, &want, 1, &plain_rules, &plan, &error),
              FST_E_VALIDATION_OVERFLOW);
    // Several errors, each of which could be reported.
    init_model(&m, 8);
    fsti_plan_want wants[5] = {0};
    for (uint32_t i = 0; i < 5; i++) {
        add_tensor(&m, FST_DTYPE_U8, 1, (uint64_t[]){((uint64_t)1 << 60) + 8});
        wants[i].tensor = i;
    }
    CHECK_INT(make_plan(files, wants, 5, &plain_rules, &plan, &error), FST_E_VALIDATION_OVERFLOW);
    // A slice of a sub-byte tensor.
    uint64_t begin = 0, end = 1;
    fsti_plan_want slice = {.slice_begin = &begin, .slice_end = &end};
    CHECK_INT(make_plan(files, &slice, 1, &plain_rules, &plan, &error), FST_E_VALIDATION_OVERFLOW);
}

/// Memory is allocated for the requested bytes, not for gaps; limits apply to the requested bytes.
TEST(small_tensors_take_little_memory)
{
    enum { COUNT = 32 };
    model m;
    init_model(&m, 8);
    fsti_plan_want wants[COUNT] = {0};
    for (uint32_t i = 0; i < COUNT; i++) { // one of 8 bytes, one of nearly a page
        add_tensor(&m, FST_DTYPE_U8, 1, (uint64_t[]){8});
        add_tensor(&m, FST_DTYPE_U8, 1, (uint64_t[]){4080});
        wants[i].tensor = 2 * i;
    }
    fsti_plan_file files[] = {{.header = &m.header}};
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, COUNT, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.batch_count, 1);
    CHECK(plan.batches[0].buffer_bytes <= COUNT * 64 + FSTI_PLAN_PAGE_BYTES);
    fsti_plan_clear(&plan);
    fsti_plan_rules rules = plain_rules;
    rules.batch_bytes_max = 2 * FSTI_PLAN_PAGE_BYTES + 512;
    CHECK_INT(make_plan(files, wants, COUNT, &rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.batch_count, COUNT * 64 / 512);
    for (size_t i = 0; i < plan.batch_count; i++)
        CHECK(plan.batches[i].buffer_bytes <= rules.batch_bytes_max);
    fsti_plan_clear(&plan);
}

TEST(plans_of_any_size_stay_small)
{
    model m;
    init_model(&m, 8);
    add_tensor(&m, FST_DTYPE_U8, 1, (uint64_t[]){(uint64_t)1 << 60});
    fsti_plan_file files[] = {{.header = &m.header}};
    fsti_plan_want want = {0};
    fsti_plan plan;
    fsti_plan_rules rules = plain_rules;
    rules.chunk_bytes_max = FSTI_PLAN_CHUNK_BYTES; // for memory
    CHECK_INT(make_plan(files, &want, 1, &rules, &plan, NULL), FST_E_NO_MEMORY);
    rules.is_view = true;
    CHECK_INT(make_plan(files, &want, 1, &rules, &plan, NULL), FST_OK);
    CHECK(plan.chunk_count <= FSTI_PLAN_CHUNK_COUNT_MAX + 1);
    fsti_plan_clear(&plan);
}

/// Allocations of a plan of the first `count` tensors.
static long count_allocations(const fsti_plan_file *files, fsti_plan_want *wants, size_t count) {
    fsti_plan plan;
    long allocations = 0;
    for (fst_status status = FST_E_NO_MEMORY; status != FST_OK; allocations++) {
        fsti_alloc_fail_after(allocations);
        status = make_plan(files, wants, count, &plain_rules, &plan, NULL);
        fsti_alloc_fail_after(-1);
        if (status == FST_OK) fsti_plan_clear(&plan);
    }
    return allocations - 1;
}

/// The first copy to a device waits for the plan, so it should not grow arrays step by step.
TEST(whole_tensors_take_a_fixed_number_of_allocations)
{
    enum { COUNT = 60 };
    model m;
    init_model(&m, 8);
    fsti_plan_want wants[COUNT] = {0};
    for (uint32_t i = 0; i < COUNT; i++) {
        add_tensor(&m, FST_DTYPE_BF16, 1, (uint64_t[]){100});
        wants[i].tensor = i;
    }
    fsti_plan_file files[] = {{.header = &m.header}};
    CHECK_INT(count_allocations(files, wants, COUNT), count_allocations(files, wants, 1));
}

/// Bytes of a chunk of a plan of one tensor. 0: it has no such chunk.
static uint64_t chunk_bytes(const fsti_plan_rules *rules, uint64_t bytes, size_t index) {
    model m;
    init_model(&m, 4096);
    add_tensor(&m, FST_DTYPE_U8, 1, &bytes);
    fsti_plan_file files[] = {{.header = &m.header, .size_bytes = 4096 + bytes}};
    fsti_plan_want want = {0};
    fsti_plan plan;
    if (make_plan(files, &want, 1, rules, &plan, NULL) != FST_OK) return 0;
    uint64_t size = 0;
    if (index < plan.chunk_count) size = plan.chunks[index].end - plan.chunks[index].begin;
    fsti_plan_clear(&plan);
    return size;
}

TEST(first_chunks_for_a_device_are_small)
{
    static const uint64_t kib[] = {256, 256, 512, 1024, 2048, 2048};
    fsti_plan_rules rules = plain_rules;
    const uint64_t large = 64 << 20, small = 8 << 20;
    rules.chunk_bytes_max = 2 << 20;
    CHECK_INT(chunk_bytes(&rules, large, 0), 2 << 20); // not for memory
    rules.to_device = true;
    for (size_t i = 0; i < sizeof kib / sizeof *kib; i++)
        CHECK_INT(chunk_bytes(&rules, large, i), kib[i] << 10);
    CHECK(chunk_bytes(&rules, large, 34) > 0); // three more copies than without
    CHECK_INT(chunk_bytes(&rules, large, 35), 0);
    CHECK_INT(chunk_bytes(&rules, small, 0), 2 << 20);
    rules.verify_bytes = 1 << 20;
    CHECK_INT(chunk_bytes(&rules, large, 0), 2 << 20);
}

TEST(items_know_their_segments)
{
    // Misaligned ones are gathered from a mapping: looking through all segments for each of them
    // would take minutes for a header of hundreds of thousands.
    model m;
    init_model(&m, 9);
    fsti_plan_want wants[40] = {0};
    for (uint32_t i = 0; i < 40; i++) {
        add_tensor(&m, FST_DTYPE_F32, 1, (uint64_t[]){10});
        wants[i].tensor = i;
    }
    fsti_plan_file files[] = {{.header = &m.header}};
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, 40, &plain_rules, &plan, NULL), FST_OK);
    for (size_t i = 0; i < plan.item_count; i++) {
        const fsti_plan_item *item = &plan.items[i];
        CHECK_INT(item->segment_end - item->segment_first, 1);
        CHECK_INT(plan.segments[item->segment_first].item, i);
    }
    fsti_plan_clear(&plan);
}

TEST(no_chunk_is_a_gap_alone)
{
    model m;
    init_model(&m, 8);
    for (int i = 0; i < 3; i++) add_tensor(&m, FST_DTYPE_U8, 1, (uint64_t[]){(uint64_t)40 << 20});
    fsti_plan_file files[] = {{.header = &m.header}};
    fsti_plan_want wants[2] = {{.tensor = 0}, {.tensor = 2}};
    fsti_plan_rules rules = plain_rules;
    rules.gaps = (fsti_gaps){(uint64_t)1 << 30, (uint64_t)1 << 30};
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, 2, &rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.bytes_planned, plan.bytes_requested);
    fsti_plan_clear(&plan);
}

/// For converted or decompressed bytes, a piece belongs to one chunk, whatever the tensors' sizes
/// are.
TEST(chunks_end_where_pieces_do)
{
    model m;
    init_model(&m, 8);
    uint64_t sizes[] = {(uint64_t)5 << 20, 8200, ((uint64_t)30 << 20) + 72, 3, (uint64_t)9 << 20};
    uint64_t made = (uint64_t)256 << 10, begin = 0, crossed = 0;
    fsti_plan_want wants[5] = {{.tensor = 0}};
    for (uint32_t i = 0; i < 5; i++) {
        add_tensor(&m, FST_DTYPE_U8, 1, &sizes[i]);
        wants[i].tensor = i;
    }
    fsti_plan_file files[] = {{.header = &m.header, .made_bytes = made}};
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, 5, &plain_rules, &plan, NULL), FST_OK);
    for (size_t i = 0; i < plan.chunk_count; i++) {
        const fsti_plan_chunk *chunk = &plan.chunks[i];
        CHECK(begin == 0 || chunk->begin == begin);
        CHECK(chunk->end > chunk->begin && chunk->end - chunk->begin <= plan.chunk_bytes);
        begin = chunk->end;
        for (uint32_t t = 0; t < 5; t++) {
            const fsti_tensor *tensor = &m.header.tensors[t];
            uint64_t first = m.header.data_begin + tensor->begin;
            if (begin > first && begin < m.header.data_begin + tensor->end)
                crossed += (begin - first) % made != 0;
        }
    }
    CHECK_INT(crossed, 0);
    CHECK(plan.chunk_count > 5);
    for (size_t i = 0; i < 5; i++) {
        const fsti_plan_item *item = &plan.items[i];
        CHECK(plan.chunks[item->chunk_first].begin <= item->file_offset &&
              plan.chunks[item->chunk_first].end > item->file_offset);
        CHECK(plan.chunks[item->chunk_end - 1].end >= item->file_offset + sizes[i] &&
              plan.chunks[item->chunk_end - 1].begin < item->file_offset + sizes[i]);
    }
    fsti_plan_clear(&plan);
}
