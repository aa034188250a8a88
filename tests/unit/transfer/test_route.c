// SPDX-License-Identifier: Apache-2.0
/// Routes of real files: what is probed, and what policy makes of it.
#include "check.h"
#include "fixture.h"
#include "transfer/transfer.h"

static fsti_file *open_file(void) {
    fsti_file *file = NULL;
    if (fsti_file_open(fixture_tensors("choice", 3, 100000), &file, NULL) != FST_OK) abort();
    return file;
}

TEST(routes_fall_back_step_by_step)
{
    static const struct {
        unsigned hidden;
        const fsti_io_engine *absent;
    } cases[] = {
        {0, &fsti_io_engine_uring},
        {FSTI_IO_HIDE_URING, &fsti_io_engine_direct},
        {FSTI_IO_HIDE_URING | FSTI_IO_HIDE_DIRECT, &fsti_io_engine_pread},
    };
    char reason[200];
    fsti_file *file = open_file();
    bool all = fsti_io_engine_uring.usable(file, reason, sizeof reason);
    fsti_file_unref(file);
    if (!all) SKIP("io_uring or O_DIRECT does not work here");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_file_route route;
        fsti_route_wish wish = {.guard_allowed = true};
        fsti_io_hide(cases[i].hidden);
        file = open_file(); // probes are kept per file
        CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
        CHECK(fsti_route_engine(&route, false) == cases[i].absent);
        CHECK(fsti_route_engine(&route, true) == &fsti_io_engine_mmap);
        CHECK(route.reason[0] != '\0');
        fst_error error;
        if (cases[i].hidden != 0) {
            wish.engine = FST_ENGINE_URING;
            CHECK_INT(fsti_route_choose(file, &wish, &route, &error), FST_E_UNSUPPORTED);
            CHECK_CONTAINS(error.message, "uring");
        }
        fsti_file_unref(file);
    }
    fsti_io_hide(0);
}

TEST(routes_follow_what_is_wished)
{
    fsti_file_route route;
    fsti_file *file = open_file();
    fsti_route_wish wish = {.guard_allowed = false};
    CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, true) == &fsti_io_engine_pread); // no guard, no mapping
    wish = (fsti_route_wish){.guard_allowed = true, .keeps_cache = true};
    CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_mmap);
    CHECK_CONTAINS(route.reason, "stay in the page cache");
    wish.guard_allowed = false;
    CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_pread);
    wish = (fsti_route_wish){.guard_allowed = true, .is_small = true};
    CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_pread);
    wish = (fsti_route_wish){.guard_allowed = true, .engine = FST_ENGINE_MMAP};
    CHECK_INT(fsti_route_choose(file, &wish, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_mmap);
    fsti_file_unref(file);
}
