// SPDX-License-Identifier: Apache-2.0
/// The policy as a table: requests and conditions, and the expected decision.
#include "check.h"
#include "plan/plan.h"

#define GIB ((uint64_t)1 << 30)
#define AUTO FST_MODE_AUTO
#define LOAD FST_MODE_LOAD
#define MAP FST_MODE_MAP

typedef struct kind_case {
    fsti_load_facts facts;
    fst_load_mode mode;
    bool keeps_cache;
    const char *reason; ///< part of it
} kind_case;

static void check_kinds(const kind_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        fsti_load_policy policy;
        fsti_policy_choose(&cases[i].facts, &policy);
        CHECK_CONTAINS(policy.reason, cases[i].reason);
        CHECK_INT(policy.mode, cases[i].mode);
        CHECK_INT(policy.keeps_cache, cases[i].keeps_cache);
    }
}

TEST(load_modes)
{
    static const kind_case cases[] = {
        // The default gives views, and leaves a warm cache where that fits.
        {{.mode = AUTO, .bytes = GIB, .available_bytes = 4 * GIB}, MAP, true, "it fits"},
        {{.mode = AUTO, .bytes = GIB, .available_bytes = UINT64_MAX}, MAP, true, "it fits"},
        {{.mode = AUTO, .bytes = 3 * GIB, .available_bytes = 4 * GIB},
         MAP,
         false,
         "read on first access"},
        {{.mode = AUTO, .bytes = GIB, .available_bytes = 0}, MAP, false, "does not fit"},
        {{.mode = AUTO, .bytes = 1000, .available_bytes = 0}, MAP, true, "the load is small"},
        {{.mode = MAP, .bytes = GIB, .available_bytes = 4 * GIB}, MAP, true, "as requested"},
        // Requests that views cannot satisfy.
        {{.mode = AUTO, .to_device = true, .bytes = GIB, .available_bytes = 4 * GIB},
         LOAD,
         true,
         "to a device"},
        {{.mode = AUTO, .to_device = true, .bytes = 3 * GIB, .available_bytes = 4 * GIB},
         LOAD,
         false,
         "bypassing"},
        {{.mode = AUTO, .has_destinations = true, .bytes = GIB, .available_bytes = 99 * GIB},
         LOAD,
         false,
         "the caller provides the memory"},
        {{.mode = AUTO, .converts = true}, LOAD, true, "converted"},
        {{.mode = AUTO, .has_allocator = true}, LOAD, true, "allocator"},
        {{.mode = AUTO, .budget_bytes = 1}, LOAD, true, "budget"},
        // A requested engine uses the page cache as it always does.
        {{.mode = AUTO, .engine = FST_ENGINE_PREAD}, LOAD, true, "kept in the page cache: with"},
        {{.mode = LOAD, .engine = FST_ENGINE_MMAP}, LOAD, true, "kept in the page cache: with"},
        {{.mode = LOAD, .engine = FST_ENGINE_DIRECT}, LOAD, false, "the page cache: with"},
        // Engines are not used for views, whatever was requested.
        {{.mode = MAP, .engine = FST_ENGINE_DIRECT, .bytes = GIB, .available_bytes = 4 * GIB},
         MAP,
         true,
         "it fits"},
        {{.mode = AUTO, .view_refused = true}, LOAD, true, "the file cannot be memory-mapped"},
        {{.mode = LOAD, .cache = FST_CACHE_KEEP, .bytes = GIB}, LOAD, true, "as requested"},
    };
    check_kinds(cases, sizeof cases / sizeof *cases);
}

TEST(load_modes_by_available_memory)
{
    static const kind_case cases[] = {
        // What would be copied out of a map anyway; where there is memory for it.
        {{.mode = AUTO,
          .bytes = GIB,
          .loaded_bytes = GIB,
          .unmappable_bytes = GIB / 2 + 1,
          .available_bytes = 4 * GIB},
         LOAD,
         false,
         "can't be views"},
        {{.mode = AUTO,
          .bytes = GIB,
          .loaded_bytes = GIB,
          .unmappable_bytes = GIB / 2,
          .available_bytes = 4 * GIB},
         MAP,
         true,
         "it fits"},
        {{.mode = AUTO,
          .bytes = GIB,
          .loaded_bytes = GIB,
          .unmappable_bytes = GIB,
          .available_bytes = GIB},
         MAP,
         false,
         "read on first access"},
        {{.mode = MAP, .bytes = GIB, .loaded_bytes = GIB, .unmappable_bytes = GIB},
         MAP,
         false,
         "as requested"},
        {{.mode = MAP, .verifies = true, .cache = FST_CACHE_BYPASS},
         MAP,
         false,
         "for verification"},
        // For read callbacks and servers, the reason does not mention the page cache.
        {{.mode = LOAD, .lacks_cache = true}, LOAD, true, "load: as requested"},
        // A cache mode that was requested is used, whether it fits or not.
        {{.mode = AUTO, .cache = FST_CACHE_BYPASS, .bytes = GIB, .available_bytes = 9 * GIB},
         LOAD,
         false,
         "is bypassed"},
        {{.mode = MAP, .cache = FST_CACHE_BYPASS, .bytes = GIB, .available_bytes = 9 * GIB},
         MAP,
         false,
         "read on first access"},
        {{.mode = AUTO, .cache = FST_CACHE_KEEP, .bytes = 9 * GIB, .available_bytes = GIB},
         MAP,
         true,
         "as requested"},
        {{.mode = AUTO, .to_device = true, .engine = FST_ENGINE_URING, .bytes = 9},
         LOAD,
         false,
         "with the requested engine"},
    };
    check_kinds(cases, sizeof cases / sizeof *cases);
}

TEST(owned_memory_and_the_page_cache)
{
    static const kind_case cases[] = {
        // Owned memory is a second copy of the cached pages: is there space for both?
        {{.mode = LOAD, .bytes = GIB / 8, .loaded_bytes = GIB / 8, .available_bytes = GIB / 2},
         LOAD,
         true,
         "it fits in memory twice"},
        {{.mode = LOAD, .bytes = GIB / 8, .loaded_bytes = GIB / 8, .available_bytes = GIB * 3 / 8},
         LOAD,
         false,
         "does not fit in the available memory twice"},
        {{.mode = LOAD, .bytes = GIB / 2, .loaded_bytes = GIB / 2, .available_bytes = 2 * GIB},
         LOAD,
         true,
         "fits in memory twice"},
        {{.mode = LOAD,
          .bytes = GIB / 2 + 1,
          .loaded_bytes = GIB / 2 + 1,
          .available_bytes = 99 * GIB},
         LOAD,
         false,
         "a second copy"},
        {{.mode = LOAD, .bytes = 1000, .loaded_bytes = 1000, .available_bytes = 0},
         LOAD,
         true,
         "the load is small"},
        // A part of a large model, nearly all of one, a part of a small one.
        {{.mode = LOAD, .bytes = GIB / 8, .loaded_bytes = GIB / 8, .model_bytes = GIB},
         LOAD,
         false,
         "part of a large model"},
        {{.mode = LOAD,
          .bytes = GIB / 4 - 1,
          .loaded_bytes = GIB / 4 - 1,
          .model_bytes = GIB / 2,
          .available_bytes = 99 * GIB},
         LOAD,
         false,
         "part of a large model"},
        {{.mode = LOAD,
          .bytes = GIB / 4,
          .loaded_bytes = GIB / 4,
          .model_bytes = GIB / 2,
          .available_bytes = 99 * GIB},
         LOAD,
         true,
         "fits in memory twice"},
        {{.mode = LOAD, .bytes = 1000, .loaded_bytes = 1000, .model_bytes = GIB / 8},
         LOAD,
         true,
         "the load is small"},
        {{.mode = AUTO, .bytes = 1000, .loaded_bytes = 1000, .model_bytes = GIB},
         MAP,
         true,
         "the load is small"},
        {{.mode = LOAD,
          .cache = FST_CACHE_KEEP,
          .bytes = 1000,
          .loaded_bytes = 1000,
          .model_bytes = GIB},
         LOAD,
         true,
         "as requested"},
    };
    check_kinds(cases, sizeof cases / sizeof *cases);
}

TEST(small_and_growing_requests)
{
    static const kind_case cases[] = {
        {{.mode = LOAD, .cache = FST_CACHE_BYPASS, .bytes = 1000, .loaded_bytes = 1000},
         LOAD,
         false,
         "as requested"},
        // Small requests use the page cache.
        {{.mode = LOAD, .bytes = 1000, .loaded_bytes = 1000, .model_bytes = GIB},
         LOAD,
         true,
         "small"},
        {{.mode = LOAD, .bytes = (1 << 20) + 1, .loaded_bytes = 1, .model_bytes = GIB},
         LOAD,
         false,
         "part of a large model"},
        // Tensors that grow by conversion must fit at their converted size.
        {{.mode = LOAD, .bytes = GIB / 8, .loaded_bytes = GIB / 2, .available_bytes = GIB},
         LOAD,
         false,
         "available memory twice"},
        {{.mode = LOAD, .bytes = GIB / 8, .loaded_bytes = GIB / 4, .available_bytes = GIB},
         LOAD,
         true,
         "it fits in memory twice"},
    };
    check_kinds(cases, sizeof cases / sizeof *cases);
}

TEST(routes)
{
    static const struct {
        fsti_route_facts facts;
        fsti_route route;
    } cases[] = {
        {{.has_direct = true, .has_ring = true}, FSTI_ROUTE_RING},
        {{.has_direct = true}, FSTI_ROUTE_DIRECT},
        {{.has_ring = true}, FSTI_ROUTE_CACHE}, // a ring of buffered reads gains nothing
        {{.has_direct = true, .has_ring = true, .keeps_cache = true}, FSTI_ROUTE_CACHE},
        {{.has_direct = true, .copies_mapping = true, .keeps_cache = true}, FSTI_ROUTE_MAPPING},
        {{.has_direct = true, .copies_mapping = true}, FSTI_ROUTE_DIRECT},
        {{.is_small = true}, FSTI_ROUTE_CACHE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_INT(fsti_policy_route(&cases[i].facts), cases[i].route);
    // Files that go straight to a device keep the route that was found for the rest of them.
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_GDS, true), FSTI_ROUTE_RING);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_GDS, false), FSTI_ROUTE_RING);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_RING, true), FSTI_ROUTE_DIRECT);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_RING, false), FSTI_ROUTE_CACHE);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_DIRECT, true), FSTI_ROUTE_CACHE);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_DIRECT, false), FSTI_ROUTE_CACHE);
    CHECK_INT(fsti_policy_demote(FSTI_ROUTE_MAPPING, false), FSTI_ROUTE_CACHE);
}

TEST(gpudirect_policy)
{
    static const struct {
        fsti_gds_facts facts;
        fsti_gds_decision way;
        const char *reason;
    } cases[] = {
        {{FST_GDS_AUTO, false, false, false, true}, FSTI_GDS_IF_PROBED, NULL},
        {{FST_GDS_AUTO, false, false, true, true}, FSTI_GDS_NO, "page cache"},
        {{FST_GDS_AUTO, false, false, false, false}, FSTI_GDS_NO, "too small"},
        {{FST_GDS_AUTO, true, true, false, false}, FSTI_GDS_YES, NULL},
        {{FST_GDS_AUTO, true, false, false, false}, FSTI_GDS_NO, NULL},
        {{FST_GDS_STRICT, false, false, true, true}, FSTI_GDS_IF_PROBED, NULL},
        {{FST_GDS_STRICT, false, false, true, false}, FSTI_GDS_NO, "too small"},
        {{FST_GDS_STRICT, true, false, false, false}, FSTI_GDS_NO, NULL},
        {{FST_GDS_OFF, true, true, false, true}, FSTI_GDS_NO, "switched off"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *reason;
        CHECK_INT(fsti_policy_gds(&cases[i].facts, &reason), cases[i].way);
        CHECK_INT(reason == NULL, cases[i].reason == NULL);
        if (reason != NULL && cases[i].reason != NULL) CHECK_CONTAINS(reason, cases[i].reason);
    }
}

TEST(save_methods)
{
    static const struct {
        fsti_save_facts facts;
        fsti_route route;
        const char *reason;
    } cases[] = {
        {{FST_SAVE_ENGINE_AUTO, true, (uint64_t)64 << 20, true, true}, FSTI_ROUTE_RING, NULL},
        {{FST_SAVE_ENGINE_AUTO, true, (uint64_t)64 << 20, true, false}, FSTI_ROUTE_DIRECT, NULL},
        {{FST_SAVE_ENGINE_AUTO, true, (uint64_t)64 << 20, false, false}, FSTI_ROUTE_CACHE, NULL},
        {{FST_SAVE_ENGINE_AUTO, true, ((uint64_t)64 << 20) - 1, true, true},
         FSTI_ROUTE_CACHE,
         "small"},
        {{FST_SAVE_ENGINE_AUTO, false, (uint64_t)1 << 40, true, true}, FSTI_ROUTE_CACHE, "faster"},
        {{FST_SAVE_ENGINE_BUFFERED, true, 1, true, true}, FSTI_ROUTE_CACHE, "requested"},
        {{FST_SAVE_ENGINE_DIRECT, false, 1, true, true}, FSTI_ROUTE_DIRECT, NULL},
        {{FST_SAVE_ENGINE_URING, false, 1, true, true}, FSTI_ROUTE_RING, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *reason;
        CHECK_INT(fsti_policy_save(&cases[i].facts, &reason), cases[i].route);
        CHECK_INT(reason == NULL, cases[i].reason == NULL);
        if (reason != NULL && cases[i].reason != NULL) CHECK_CONTAINS(reason, cases[i].reason);
    }
}

TEST(gaps)
{
    static const struct {
        fsti_load_facts facts;
        fsti_gaps gaps;
    } cases[] = {
        {{.gap_bytes = 0}, {64 << 10, 64 << 10}},
        {{.is_remote = true}, {64 << 10, 1 << 20}}, // a request costs what half a MiB does, or more
        {{.gap_bytes = 4096, .is_remote = true}, {4096, 4096}}, // as requested
        {{.gap_bytes = UINT64_MAX}, {0, 0}},                    // no gap is read
        {{.gap_bytes = UINT64_MAX, .is_remote = true}, {0, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_load_policy policy;
        fsti_policy_choose(&cases[i].facts, &policy);
        CHECK_INT(policy.gaps.any_bytes, cases[i].gaps.any_bytes);
        CHECK_INT(policy.gaps.most_bytes, cases[i].gaps.most_bytes);
    }
}

TEST(threads)
{
    static const struct {
        fsti_thread_facts facts;
        uint32_t threads, lanes;
    } cases[] = {
        {{.processor_count = 8, .chunk_count = 1}, 1, 0},
        {{.processor_count = 8, .chunk_count = 0}, 1, 0},
        {{.processor_count = 4, .chunk_count = 100}, 4, 0},
        {{.processor_count = 200, .chunk_count = 100}, 16, 0},
        {{.processor_count = 200, .chunk_count = 100, .to_device = true}, 8, 0},
        {{.processor_count = 200, .chunk_count = 100, .to_device = true, .verifies = true}, 16, 0},
        {{.processor_count = 1, .chunk_count = 100, .any_async = true}, 2, 1},
        {{.processor_count = 8, .chunk_count = 100, .any_async = true}, 8, 2},
        {{.processor_count = 1, .chunk_count = 100, .any_blocking = true}, 4, 0},
        {{.processor_count = 1, .chunk_count = 100, .any_async = true, .any_blocking = true}, 4, 1},
        {{.processor_count = 1, .chunk_count = 100, .any_async = true, .reads_by_gds = true}, 8, 0},
        {{.processor_count = 1, .chunk_count = 3, .any_blocking = true}, 3, 0},
        {{.processor_count = 2, .chunk_count = 100, .any_distant = true}, 32, 0},
        {{.processor_count = 2, .chunk_count = 7, .any_distant = true}, 7, 0},
        {{.wanted = 2, .chunk_count = 100, .any_distant = true}, 2, 0},
        {{.wanted = 1, .chunk_count = 100, .any_async = true}, 1, 1},
        {{.wanted = 999, .chunk_count = 1000}, 64, 0},
        // A limit of address space: a thread needs 72 MiB, and all threads get half of the rest.
        {{.processor_count = 8, .chunk_count = 9, .is_limited = true, .address_bytes = 9 * GIB},
         8,
         0},
        {{.processor_count = 8, .chunk_count = 9, .is_limited = true, .address_bytes = 300 << 20},
         2,
         0},
        {{.wanted = 4, .chunk_count = 9, .is_limited = true, .address_bytes = 100 << 20}, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_thread_policy policy = fsti_policy_threads(&cases[i].facts);
        CHECK_INT(policy.thread_count, cases[i].threads);
        CHECK_INT(policy.lane_count, cases[i].lanes);
    }
}

/// Other slices need the bytes between the pieces of a slice.
TEST(slices_of_many_pieces_keep_the_cache)
{
    fsti_load_policy policy;
    fsti_load_facts facts = {.mode = LOAD,
                             .bytes = GIB / 8,
                             .loaded_bytes = GIB / 8,
                             .scattered_bytes = GIB / 8,
                             .spanned_bytes = GIB / 2,
                             .model_bytes = 2 * GIB,
                             .available_bytes = 2 * GIB};
    fsti_policy_choose(&facts, &policy);
    CHECK(policy.keeps_cache);
    facts.available_bytes = GIB / 2; // room for the request, but not for the bytes between
    fsti_policy_choose(&facts, &policy);
    CHECK(!policy.keeps_cache);
    facts.available_bytes = 2 * GIB;
    facts.scattered_bytes = GIB / 16;
    fsti_policy_choose(&facts, &policy);
    CHECK(!policy.keeps_cache);
}

TEST(threads_that_wait_for_another_machine)
{
    static const struct {
        fsti_thread_facts facts;
        uint32_t threads;
    } cases[] = {
        {{.processor_count = 2, .chunk_count = 100, .any_distant = true}, 32},
        {{.processor_count = 64, .chunk_count = 100, .any_distant = true}, 32},
        {{.processor_count = 2, .chunk_count = 1, .any_distant = true}, 1},
        {{.wanted = 8, .chunk_count = 100, .any_distant = true}, 8},
        {{.processor_count = 4, .chunk_count = 100}, 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_INT(fsti_policy_threads(&cases[i].facts).thread_count, cases[i].threads);
}

TEST(batches)
{
    enum { MIB = 1 << 20 };
    static const struct {
        fsti_load_facts facts;
        uint64_t bytes;
    } cases[] = {
        {{.mode = LOAD}, 64 * MIB},
        {{.mode = LOAD, .verifies = true}, 256 * MIB},
        {{.mode = MAP}, UINT64_MAX}, // a file each
        {{.mode = LOAD, .has_device = true}, UINT64_MAX},
        {{.mode = LOAD, .has_allocator = true, .verifies = true}, UINT64_MAX},
        {{.mode = MAP, .in_order = true}, 64 * MIB},
        {{.mode = LOAD, .has_device = true, .in_order = true, .verifies = true}, 256 * MIB},
        // A quarter each, so that reading and using overlap.
        {{.mode = LOAD, .budget_bytes = 100 * MIB}, 25 * MIB},
        {{.mode = LOAD, .budget_bytes = 3, .has_device = true}, 0}, // each item alone
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_load_policy policy;
        fsti_policy_choose(&cases[i].facts, &policy);
        CHECK_INT(policy.batch_bytes_max, cases[i].bytes);
    }
}

TEST(memory_kinds)
{
    static const struct {
        fsti_load_facts facts;
        fsti_memory_kind kind;
    } cases[] = {
        {{.mode = MAP}, FSTI_MEMORY_ARENA}, // of what no view can serve
        {{.mode = MAP, .has_allocator = true}, FSTI_MEMORY_CALLERS},
        {{.mode = LOAD}, FSTI_MEMORY_ARENA},
        {{.mode = LOAD, .to_device = true, .has_device = true}, FSTI_MEMORY_DEVICE},
        // Locked memory that the caller gives is the processors' alone.
        {{.mode = LOAD, .to_device = true, .has_destinations = true}, FSTI_MEMORY_ARENA},
        {{.mode = LOAD, .to_device = true, .has_device = true, .pins_memory = true},
         FSTI_MEMORY_PINNED},
        {{.mode = LOAD, .has_allocator = true}, FSTI_MEMORY_CALLERS},
        {{.mode = LOAD, .has_allocator = true, .has_device = true}, FSTI_MEMORY_CALLERS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_load_policy policy;
        fsti_policy_choose(&cases[i].facts, &policy);
        CHECK_INT(policy.memory, cases[i].kind);
    }
}

TEST(bypassed_cache_is_cleared_after_buffered_reads)
{
    static const struct {
        fsti_load_facts facts;
        bool clears_cache;
    } cases[] = {
        {{.mode = LOAD, .cache = FST_CACHE_BYPASS}, true},
        {{.mode = AUTO, .cache = FST_CACHE_BYPASS}, true},
        {{.mode = MAP, .cache = FST_CACHE_BYPASS}, false}, // the program's own accesses read it
        {{.mode = LOAD, .bytes = 9 * GIB}, false},         // bypassing it, if possible
        {{.mode = LOAD, .cache = FST_CACHE_KEEP}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_load_policy policy;
        fsti_policy_choose(&cases[i].facts, &policy);
        CHECK_INT(policy.clears_cache, cases[i].clears_cache);
    }
}

TEST(executor_policy)
{
    enum { KIB = 1 << 10, MIB = 1 << 20 };
    static const struct {
        fsti_executor_facts facts;
        fsti_executor who;
    } cases[] = {
        {{.bytes = 0, .touched_bytes = 0, .may_wait = true}, FSTI_EXECUTOR_CALLER},
        {{.bytes = 64 * KIB, .touched_bytes = 64 * KIB, .may_wait = true}, FSTI_EXECUTOR_CALLER},
        {{.bytes = 64 * KIB, .touched_bytes = 64 * KIB}, FSTI_EXECUTOR_CALLER_IF_CACHED},
        {{.bytes = 64 * KIB + 1, .touched_bytes = 64 * KIB + 1, .may_wait = true},
         FSTI_EXECUTOR_CALLER_IF_CACHED},
        {{.bytes = MIB, .touched_bytes = MIB}, FSTI_EXECUTOR_CALLER_IF_CACHED},
        {{.bytes = MIB + 1, .touched_bytes = MIB + 1}, FSTI_EXECUTOR_THREADS},
        {{.bytes = 8 * MIB, .touched_bytes = MIB}, FSTI_EXECUTOR_CALLER_IF_CACHED},
        {{.bytes = 8 * MIB, .touched_bytes = MIB, .has_budget = true}, FSTI_EXECUTOR_THREADS},
        {{.bytes = 1, .touched_bytes = 1, .has_budget = true, .may_wait = true},
         FSTI_EXECUTOR_THREADS},
        {{.bytes = 16 * MIB, .touched_bytes = 16 * MIB, .is_view_only = true},
         FSTI_EXECUTOR_CALLER_IF_CACHED},
        {{.bytes = 16 * MIB + 1, .touched_bytes = 16 * MIB + 1, .is_view_only = true},
         FSTI_EXECUTOR_THREADS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_INT(fsti_policy_executor(&cases[i].facts), cases[i].who);
    CHECK(fsti_policy_is_small(MIB, false) && !fsti_policy_is_small(MIB + 1, false));
    CHECK(!fsti_policy_is_small(1, true)); // budgets are for threads to keep
}
