// SPDX-License-Identifier: Apache-2.0
/// Plans: every requested byte arrives at its destination, and no more than necessary is read. A
/// plan is executed in memory and compared with plain loops over the indices.
#include "check.h"
#include "fixture.h"
#include "plan_fixture.h"

/// Executes the plan chunk by chunk, as the transfer module does. Returns the batch buffers.
static char **execute(const fsti_plan *plan) {
    char **buffers = calloc(plan->batch_count + 1, sizeof *buffers);
    for (size_t i = 0; i < plan->batch_count; i++)
        buffers[i] = malloc(plan->batches[i].buffer_bytes + 1);
    for (size_t c = 0; c < plan->chunk_count; c++) {
        const fsti_plan_chunk *chunk = &plan->chunks[c];
        const fsti_plan_extent *extent = &plan->extents[chunk->extent];
        if (extent->linear) {
            for (uint64_t at = chunk->begin; at < chunk->end; at++)
                buffers[extent->batch][extent->buffer_offset + (at - extent->begin)] =
                    (char)fixture_byte(at);
            continue;
        }
        for (size_t s = 0; s < extent->segment_count; s++) {
            const fsti_plan_segment *segment = &plan->segments[extent->segment_first + s];
            char *target =
                fsti_plan_item_address(&plan->items[segment->item], buffers[extent->batch]);
            for (uint32_t run = 0; run < segment->run_count; run++)
                for (uint64_t i = 0; i < segment->run_bytes; i++) {
                    uint64_t at = segment->file_offset + run * segment->stride_bytes + i;
                    if (at >= chunk->begin && at < chunk->end)
                        target[segment->item_offset + run * segment->run_bytes + i] =
                            (char)fixture_byte(at);
                }
        }
    }
    return buffers;
}

static void free_buffers(const fsti_plan *plan, char **buffers) {
    for (size_t i = 0; i < plan->batch_count; i++) free(buffers[i]);
    free(buffers);
}

/// The slice's bytes by definition: all index tuples in row-major order. Whole bytes per element.
static int slice_matches(const model *m, const fsti_plan_want *want, const char *bytes) {
    const fsti_tensor *tensor = &m->tensors[want->tensor];
    const uint64_t *shape = m->shapes + tensor->shape_at;
    uint64_t element = fsti_dtype_bits((fst_dtype)tensor->dtype) / 8, index[8] = {0}, done = 0;
    uint64_t base = m->header.data_begin + tensor->begin;
    if (want->slice_begin == NULL) return fixture_matches(bytes, base, tensor->end - tensor->begin);
    for (uint32_t d = 0; d < tensor->rank; d++) {
        if (want->slice_begin[d] >= want->slice_end[d]) return 1;
        index[d] = want->slice_begin[d];
    }
    for (;;) {
        uint64_t place = 0;
        for (uint32_t d = 0; d < tensor->rank; d++) place = place * shape[d] + index[d];
        if (!fixture_matches(bytes + done, base + place * element, element)) return 0;
        done += element;
        uint32_t d = tensor->rank;
        while (d > 0 && ++index[d - 1] == want->slice_end[d - 1]) {
            index[d - 1] = want->slice_begin[d - 1];
            d--;
        }
        if (d == 0) return 1;
    }
}

/// Checks the properties of every plan.
static const char *broken_invariant(const fsti_plan *plan, const model *m) {
    for (size_t i = 0; i < plan->extent_count; i++) {
        const fsti_plan_extent *extent = &plan->extents[i];
        if (extent->begin >= extent->end) return "empty extent";
        if (extent->linear && extent->buffer_offset % 4096 != extent->begin % 4096)
            return "pages disagree";
        const fsti_plan_batch *batch = &plan->batches[extent->batch];
        if (extent->linear && fsti_align_up(extent->buffer_offset + extent->end - extent->begin,
                                            4096) > batch->buffer_bytes)
            return "no room for the last page";
    }
    for (size_t i = 0; i < plan->item_count; i++) {
        const fsti_plan_item *item = &plan->items[i];
        const fsti_plan_batch *batch = &plan->batches[item->batch];
        uint32_t alignment = fsti_dtype_alignment((fst_dtype)m->header.tensors[item->tensor].dtype);
        if (item->destination == NULL && item->buffer_offset % alignment != 0)
            return "misaligned tensor";
        if (item->destination == NULL &&
            item->buffer_offset + item->size_bytes > batch->buffer_bytes)
            return "item outside of its buffer";
    }
    uint64_t chunk_bytes = 0;
    for (size_t i = 0; i < plan->chunk_count; i++) {
        const fsti_plan_chunk *chunk = &plan->chunks[i];
        if (chunk->end - chunk->begin > FSTI_PLAN_CHUNK_BYTES) return "chunk too large";
        chunk_bytes += chunk->end - chunk->begin;
    }
    return chunk_bytes == plan->bytes_planned ? NULL : "chunks do not cover the extents";
}

static void check_plan(const model *m, fsti_plan_want *wants, size_t count,
                       const fsti_plan_rules *rules) {
    fsti_plan_file files[1] = {{.header = &m->header}};
    fsti_plan plan;
    fst_error error = {0};
    CHECK_INT(make_plan(files, wants, count, rules, &plan, &error), FST_OK);
    const char *broken = broken_invariant(&plan, m);
    CHECK_TEXT(broken == NULL ? "ok" : broken, "ok");
    char **buffers = execute(&plan);
    for (size_t i = 0; i < count; i++) {
        const fsti_plan_item *item = &plan.items[i];
        const char *bytes = fsti_plan_item_address(item, buffers[item->batch]);
        if (item->size_bytes > 0 && !slice_matches(m, &wants[i], bytes))
            check_fail(__FILE__, __LINE__, "item %zu has wrong bytes", i);
    }
    free_buffers(&plan, buffers);
    fsti_plan_clear(&plan);
}

/// All slices of all shapes up to 3 x 3 x 3, at aligned and odd places.
TEST(every_small_slice)
{
    static const fst_dtype dtypes[] = {FST_DTYPE_U8, FST_DTYPE_F16, FST_DTYPE_F64};
    for (int place = 0; place < 3; place++) {
        model m;
        init_model(&m, 800 + (uint64_t)place);
        uint64_t three[3] = {3, 3, 3};
        add_tensor(&m, dtypes[place], 3, three);
        for (int code = 0; code < 1000; code++) {
            // begin and end of each dimension: the ten pairs 0 <= b <= e <= 3
            static const uint8_t pairs[10][2] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 1},
                                                 {1, 2}, {1, 3}, {2, 2}, {2, 3}, {3, 3}};
            uint64_t begin[3], end[3];
            for (int d = 0, rest = code; d < 3; d++, rest /= 10) {
                begin[d] = pairs[rest % 10][0];
                end[d] = pairs[rest % 10][1];
            }
            fsti_plan_want want = {.slice_begin = begin, .slice_end = end};
            for (int gap = 0; gap < 2; gap++) {
                fsti_plan_rules rules = plain_rules;
                rules.gaps.any_bytes = rules.gaps.most_bytes = gap ? 4096 : 0;
                check_plan(&m, &want, 1, &rules);
                if (check_failed) return;
            }
        }
    }
}

/// Elements of half a byte, taken in pairs, are as the bytes of the pairs.
TEST(slices_of_half_bytes)
{
    model halves, bytes;
    init_model(&halves, 8);
    init_model(&bytes, 8);
    add_tensor(&halves, FST_DTYPE_F4, 3, (uint64_t[]){2, 3, 8});
    add_tensor(&bytes, FST_DTYPE_U8, 3, (uint64_t[]){2, 3, 4});
    fsti_plan_file files[1] = {{.header = &halves.header}};
    for (uint64_t code = 0; code < 1u << 8; code++) {
        uint64_t begin[3] = {code & 1, code >> 1 & 1, code >> 2 & 3};
        uint64_t end[3] = {2, begin[1] + 1 + (code >> 4 & 1), begin[2] + 1 + (code >> 5 & 1)};
        if (end[2] > 4) continue;
        fsti_plan_want want = {.slice_begin = begin, .slice_end = end};
        check_plan(&bytes, &want, 1, &plain_rules);
        begin[2] *= 2;
        end[2] *= 2;
        fsti_plan plan;
        CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, NULL), FST_OK);
        char **buffers = execute(&plan);
        begin[2] /= 2;
        end[2] /= 2;
        CHECK(slice_matches(&bytes, &want, fsti_plan_item_address(plan.items, buffers[0])));
        free_buffers(&plan, buffers);
        fsti_plan_clear(&plan);
    }
}

/// The plan describes every piece: above 2^22 pieces it would be larger than the requested bytes.
TEST(slices_of_too_many_pieces_are_refused)
{
    model m;
    init_model(&m, 8);
    uint64_t shape[4] = {1 << 12, 1 << 11, 2, 4}, begin[4] = {0}, end[4] = {1 << 12, 1 << 11, 1, 1};
    add_tensor(&m, FST_DTYPE_U8, 4, shape);
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want want = {.slice_begin = begin, .slice_end = end};
    fsti_plan plan;
    fst_error error;
    CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, &error), FST_E_ARGUMENT);
    CHECK(strstr(error.message, "too many") != NULL || strstr(error.message, "pieces") != NULL);
    CHECK(plan.segments == NULL);
    end[0] = 1;
    CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, &error), FST_OK);
    fsti_plan_clear(&plan);
}

/// Requests of random tensors and slices, overlapping ones and ones with destinations too.
TEST(random_requests)
{
    uint64_t random = 42;
    for (int round = 0; round < 300; round++) {
        model m;
        init_model(&m, 8 + fixture_random(&random) % 5000);
        size_t tensor_count = 1 + fixture_random(&random) % 12, want_count = 0;
        for (size_t i = 0; i < tensor_count; i++) {
            static const fst_dtype dtypes[] = {FST_DTYPE_U8, FST_DTYPE_BF16, FST_DTYPE_F32,
                                               FST_DTYPE_I64};
            uint64_t shape[4] = {0};
            uint32_t rank = (uint32_t)(fixture_random(&random) % 5);
            for (uint32_t d = 0; d < rank; d++) shape[d] = fixture_random(&random) % 17;
            add_tensor(&m, dtypes[fixture_random(&random) % 4], rank, shape);
        }
        fsti_plan_want wants[24] = {{0}};
        uint64_t numbers[24][8];
        char *memory[24] = {0};
        for (; want_count < fixture_random(&random) % 24; want_count++) {
            fsti_plan_want *want = &wants[want_count];
            want->tensor = (uint32_t)(fixture_random(&random) % tensor_count);
            const fsti_tensor *tensor = &m.tensors[want->tensor];
            uint64_t bytes = fsti_dtype_bits((fst_dtype)tensor->dtype) / 8;
            for (uint32_t d = 0; d < tensor->rank; d++) {
                uint64_t size = m.shapes[tensor->shape_at + d];
                uint64_t begin = fixture_random(&random) % (size + 1);
                numbers[want_count][d] = begin;
                numbers[want_count][4 + d] = begin + fixture_random(&random) % (size - begin + 1);
                bytes *= numbers[want_count][4 + d] - begin;
            }
            if (fixture_random(&random) % 2) {
                want->slice_begin = numbers[want_count];
                want->slice_end = numbers[want_count] + 4;
            } else {
                bytes = tensor->end - tensor->begin;
            }
            if (fixture_random(&random) % 3 == 0) {
                want->destination = memory[want_count] = malloc(bytes + 1);
                want->destination_bytes = bytes;
            }
        }
        static const uint64_t gaps[] = {0, 1, 64, 4096, 1 << 20};
        static const uint64_t limits[] = {UINT64_MAX, 1 << 16, 20000};
        fsti_plan_rules rules = {
            .order = (fst_order)(fixture_random(&random) % 2),
            .batch_bytes_max = limits[fixture_random(&random) % 3],
            .gaps = {gaps[fixture_random(&random) % 5], gaps[fixture_random(&random) % 5]}};
        check_plan(&m, wants, want_count, &rules);
        for (size_t i = 0; i < want_count; i++) free(memory[i]);
        if (check_failed) return;
    }
}

TEST(large_linear_extent_is_cut_in_chunks)
{
    model m;
    init_model(&m, 4000);
    uint64_t shape[1] = {(160u << 20) / 8 + 3};
    add_tensor(&m, FST_DTYPE_F64, 1, shape);
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want want = {0};
    fsti_plan plan;
    CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.extent_count, 1);
    CHECK(plan.extents[0].linear);
    CHECK_INT(plan.chunk_count, 21);
    CHECK_INT(plan.chunk_bytes, FSTI_PLAN_CHUNK_BYTES);
    // Interior borders fall on the buffer's multiples of 8 MiB: no two threads share a huge page.
    for (size_t i = 1; i < plan.chunk_count; i++)
        CHECK_INT((plan.chunks[i].begin - plan.extents[0].begin + plan.extents[0].buffer_offset) %
                      FSTI_PLAN_CHUNK_BYTES,
                  0);
    CHECK_INT(plan.items[0].chunk_first, 0);
    CHECK_INT(plan.items[0].chunk_end, 21);
    CHECK_INT(plan.items[0].file_offset, 4000);
    CHECK_INT(plan.bytes_planned, plan.bytes_requested);
    fsti_plan_clear(&plan);
}

TEST(over_read_is_bounded)
{
    model m;
    init_model(&m, 64);
    uint64_t small[1] = {1000}, gap[1] = {5000};
    for (int i = 0; i < 10; i++) add_tensor(&m, FST_DTYPE_U8, 1, i % 2 ? gap : small);
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want wants[5] = {{0}};
    for (uint32_t i = 0; i < 5; i++) wants[i].tensor = 2 * i;
    fsti_plan plan;
    fsti_plan_rules rules = plain_rules;
    for (uint64_t most = 4999; most <= 5000; most++) {
        rules.gaps = (fsti_gaps){most, most};
        CHECK_INT(make_plan(files, wants, 5, &rules, &plan, NULL), FST_OK);
        CHECK_INT(plan.extent_count, most == 5000 ? 1 : 5);
        CHECK_INT(plan.bytes_planned, 5 * 1000 + (most == 5000 ? 4 * 5000 : 0));
        fsti_plan_clear(&plan);
    }
}

/// Wider gaps are read over as long as that doubles what is read, at most; by a slice's rows, too.
TEST(wide_gaps_are_worth_twice_the_bytes)
{
    // Bytes between tensors of 1,000, and between parts of rows.
    static const uint64_t cases[][2] = {{100, 1}, {1250, 1}, {1251, 2}, {2002, 5}, {5001, 5}};
    fsti_plan_rules rules = plain_rules;
    rules.gaps = (fsti_gaps){100, 5000};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model m;
        init_model(&m, 64);
        uint64_t small[1] = {1000}, begin[2] = {0, 0}, end[2] = {5, 1000};
        uint64_t rows[2] = {5, 1000 + cases[i][0]};
        for (int k = 0; k < 10; k++) add_tensor(&m, FST_DTYPE_U8, 1, k % 2 ? &cases[i][0] : small);
        add_tensor(&m, FST_DTYPE_U8, 2, rows);
        fsti_plan_file files[1] = {{.header = &m.header}};
        fsti_plan_want wants[6] = {{0}};
        for (uint32_t k = 0; k < 5; k++) wants[k].tensor = 2 * k;
        wants[5] = (fsti_plan_want){.tensor = 10, .slice_begin = begin, .slice_end = end};
        for (int half = 0; half < 2; half++) {
            fsti_plan plan;
            fsti_plan_want *first = half == 0 ? wants : &wants[5];
            CHECK_INT(make_plan(files, first, half == 0 ? 5 : 1, &rules, &plan, NULL), FST_OK);
            CHECK_INT(plan.extent_count, cases[i][1]);
            fsti_plan_clear(&plan);
        }
    }
}

TEST(slice_of_half_a_matrix)
{
    model m;
    init_model(&m, 4096);
    uint64_t shape[2] = {1024, 65536};
    add_tensor(&m, FST_DTYPE_F32, 2, shape);
    fsti_plan_file files[1] = {{.header = &m.header}};
    uint64_t zero[2] = {0, 0}, rows[2] = {512, 65536}, columns[2] = {1024, 32768};
    fsti_plan_want want = {.slice_begin = zero, .slice_end = rows};
    fsti_plan plan;
    CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, NULL), FST_OK);
    CHECK(plan.extents[0].linear); // rows are one piece
    CHECK_INT(plan.bytes_planned, plan.bytes_requested);
    fsti_plan_clear(&plan);
    want.slice_end = columns;
    CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.segment_count, 1024);
    CHECK_INT(plan.bytes_planned, plan.bytes_requested);
    fsti_plan_clear(&plan);
}

TEST(repeated_requests_share_reads)
{
    enum { SAME_COUNT = 4, MANY = 5000 };
    model m;
    init_model(&m, 4096);
    uint64_t shape[5] = {16, 2, 16, 2, 4};
    add_tensor(&m, FST_DTYPE_U8, 5, shape);
    uint64_t begin[5] = {0}, end[5] = {16, 1, 16, 1, 4}; // 256 pieces of 4 bytes
    fsti_plan_want wants[SAME_COUNT];
    for (size_t i = 0; i < SAME_COUNT; i++)
        wants[i] = (fsti_plan_want){.slice_begin = begin, .slice_end = end};
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, 1, &plain_rules, &plan, NULL), FST_OK);
    size_t once = plan.extent_count;
    fsti_plan_clear(&plan);
    CHECK_INT(make_plan(files, wants, SAME_COUNT, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.extent_count, SAME_COUNT * once);
    fsti_plan_clear(&plan);
    check_plan(&m, wants, SAME_COUNT, &plain_rules);
    // A slice among pieces of another, and both whole.
    uint64_t middle[5] = {8, 0, 0, 0, 0}, last[5] = {16, 2, 16, 2, 4};
    wants[1].slice_begin = middle;
    wants[2].slice_end = wants[3].slice_end = last;
    check_plan(&m, wants, SAME_COUNT, &plain_rules);
    // The same tensor very often: one read for each request, in linear time.
    fsti_plan_want *many = calloc(MANY, sizeof *many);
    CHECK_INT(make_plan(files, many, MANY, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.extent_count, MANY);
    fsti_plan_clear(&plan);
    free(many);
}

TEST(misaligned_tensors_do_not_spoil_large_ones)
{
    model m;
    init_model(&m, 4096);
    uint64_t three[1] = {3}, large[1] = {4 << 20};
    add_tensor(&m, FST_DTYPE_F32, 1, large);
    add_tensor(&m, FST_DTYPE_U8, 1, three);
    add_tensor(&m, FST_DTYPE_F32, 1, three); // at an odd offset
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want wants[3] = {{0}};
    for (uint32_t i = 0; i < 3; i++) wants[i].tensor = i;
    fsti_plan plan;
    CHECK_INT(make_plan(files, wants, 3, &plain_rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.extent_count, 2);
    CHECK(plan.extents[0].linear);
    CHECK(!plan.extents[1].linear);
    CHECK_INT(plan.items[2].buffer_offset % 64, 0);
    fsti_plan_clear(&plan);
}

TEST(order_and_batches)
{
    model m;
    init_model(&m, 4096);
    uint64_t shape[1] = {100000};
    for (int i = 0; i < 8; i++) add_tensor(&m, FST_DTYPE_U8, 1, shape);
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want wants[8] = {{0}};
    for (uint32_t i = 0; i < 8; i++) wants[i].tensor = 7 - i;
    fsti_plan plan;
    fsti_plan_rules rules = {.order = FST_ORDER_REQUEST, .batch_bytes_max = 250000};
    CHECK_INT(make_plan(files, wants, 8, &rules, &plan, NULL), FST_OK);
    CHECK_INT(plan.batch_count, 4);
    for (uint32_t i = 0; i < 8; i++) CHECK_INT(plan.delivery[i], i);
    // Within a batch the file order is read: one extent for two neighbours.
    CHECK_INT(plan.extent_count, 4);
    fsti_plan_clear(&plan);
    rules.order = FST_ORDER_FILE;
    CHECK_INT(make_plan(files, wants, 8, &rules, &plan, NULL), FST_OK);
    for (uint32_t i = 0; i < 8; i++) CHECK_INT(plan.delivery[i], 7 - i);
    fsti_plan_clear(&plan);
}

TEST(invalid_requests)
{
    model m;
    init_model(&m, 8);
    uint64_t shape[2] = {4, 3};
    add_tensor(&m, FST_DTYPE_F32, 2, shape);
    add_tensor(&m, FST_DTYPE_F4, 2, (uint64_t[]){4, 3});
    fsti_plan_file files[1] = {{.header = &m.header}};
    uint64_t zero[2] = {0, 0}, beyond[2] = {5, 3}, one[2] = {1, 3}, two[2] = {2, 3},
             inner[2] = {4, 2};
    char memory[64];
    const struct {
        fsti_plan_want want;
        fst_status status;
    } cases[] = {
        {{.slice_begin = zero, .slice_end = beyond}, FST_E_ARGUMENT},
        {{.slice_begin = two, .slice_end = one}, FST_E_ARGUMENT},
        {{.destination = memory, .destination_bytes = 47}, FST_E_ARGUMENT},
        {{.destination = memory, .destination_bytes = 48}, FST_OK},
        {{.tensor = 1, .slice_begin = zero, .slice_end = one}, FST_E_MISALIGNED_SLICE},
        {{.tensor = 1, .slice_begin = zero, .slice_end = inner}, FST_E_MISALIGNED_SLICE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_plan plan;
        fst_error error = {0};
        fsti_plan_want want = cases[i].want;
        CHECK_INT(make_plan(files, &want, 1, &plain_rules, &plan, &error), cases[i].status);
        if (cases[i].status == FST_OK)
            fsti_plan_clear(&plan);
        else
            CHECK_TEXT(error.tensor, "t");
    }
}

TEST(every_allocation_may_fail)
{
    model m;
    init_model(&m, 8);
    uint64_t shape[3] = {4, 4, 4}, begin[3] = {1, 1, 1}, end[3] = {3, 3, 3};
    add_tensor(&m, FST_DTYPE_F32, 3, shape);
    fsti_plan_file files[1] = {{.header = &m.header}};
    fsti_plan_want wants[2] = {{.slice_begin = begin, .slice_end = end}, {0}};
    long live = fsti_alloc_live(), n = 0;
    fst_status status;
    do {
        fsti_plan plan;
        fsti_alloc_fail_after(n++);
        status = make_plan(files, wants, 2, &plain_rules, &plan, NULL);
        fsti_alloc_fail_after(-1);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        if (status == FST_OK) fsti_plan_clear(&plan);
        CHECK_INT(fsti_alloc_live(), live);
    } while (status != FST_OK);
    CHECK(n > 8);
}
