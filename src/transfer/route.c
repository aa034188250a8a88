// SPDX-License-Identifier: Apache-2.0
/// From what works for a file to the engines that read it.
#include "route.h"

#include <stdio.h>

#include "plan/plan.h"

static const fsti_io_engine *const route_engines[] = {[FSTI_ROUTE_RING] = &fsti_io_engine_uring,
                                                      [FSTI_ROUTE_DIRECT] = &fsti_io_engine_direct,
                                                      [FSTI_ROUTE_MAPPING] = &fsti_io_engine_mmap,
                                                      [FSTI_ROUTE_CACHE] = &fsti_io_engine_pread};

fst_status fsti_route_choose(fsti_file *file, const fsti_route_wish *wish, fsti_file_route *out,
                             fst_error *error) {
    const fsti_io_wish io_wish = {wish->guard_allowed, wish->buffer_bytes};
    *out = (fsti_file_route){.resident = &fsti_io_engine_pread, .absent = FSTI_ROUTE_CACHE};
    if (wish->engine != FST_ENGINE_AUTO) {
        FST_TRY(fsti_io_check_forced(file, wish->engine, &io_wish, &out->forced, error));
        out->resident = out->forced;
        snprintf(out->reason, sizeof out->reason, "%s was asked for", out->forced->name);
        return FST_OK;
    }
    if (fsti_file_is_object(file)) {
        out->forced = out->resident = &fsti_io_engine_http;
        const char *words = fsti_file_origin_words(file); // of the cache, where there is one
        snprintf(out->reason, sizeof out->reason, "%s%sby range requests (credentials: %s)", words,
                 *words != '\0' ? ", " : "", fsti_file_credentials(file));
        return FST_OK;
    }
    fsti_route_facts facts = {.keeps_cache = wish->keeps_cache, .is_small = wish->is_small};
    fsti_io_facts io = {.has_direct = false};
    if (!wish->is_small) fsti_io_probe(file, &io_wish, &io);
    facts.has_direct = io.has_direct;
    facts.has_ring = io.has_ring;
    // File systems with ways of their own are read, as large reads as can be.
    facts.copies_mapping = wish->keeps_cache && io.copies_mapping && !fsti_file_is_cached(file);
    fsti_route absent = fsti_policy_route(&facts);
    atomic_init(&out->absent, absent);
    if (io.copies_mapping) out->resident = &fsti_io_engine_mmap;
    bool clears = absent == FSTI_ROUTE_CACHE && wish->clears_cache;
    // What the kernel reads beyond a range nobody would drop.
    if (clears) fsti_file_expect_jumps(file);
    if (wish->is_small)
        snprintf(out->reason, sizeof out->reason, "small: read at once by the thread that asks");
    else
        snprintf(out->reason, sizeof out->reason,
                 "absent chunks by %s%s (%.120s), cached chunks %s", route_engines[absent]->name,
                 clears ? ", then dropped from the page cache" : "",
                 wish->keeps_cache ? "so that they stay in the page cache" : io.absent_reason,
                 io.resident_reason);
    return FST_OK;
}

const fsti_io_engine *fsti_route_engine(const fsti_file_route *route, bool is_resident) {
    if (route->forced != NULL || is_resident) return route->resident;
    return route_engines[atomic_load_explicit(&route->absent, memory_order_relaxed)];
}
