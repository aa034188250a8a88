// SPDX-License-Identifier: Apache-2.0
/// Buffers, kept arenas, NUMA policies with fake topologies, and systems without huge pages.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "memory/memory.h"
#include "fixture.h"

TEST(arenas_are_aligned_and_counted)
{
    static const uint64_t sizes[] = {0, 1, 4096, 300000, 2 << 20, (2 << 20) + 1, 20 << 20};
    size_t before, count;
    uint64_t bytes;
    fsti_buffer_live(&before, &bytes);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fsti_buffer *buffer;
        CHECK_INT(fsti_buffer_arena(sizes[i], &buffer, NULL), FST_OK);
        CHECK(buffer->size_bytes >= sizes[i]);
        CHECK_INT((uintptr_t)buffer->data % FSTI_BUFFER_ALIGNMENT, 0);
        if (sizes[i] >= FSTI_HUGE_PAGE_BYTES)
            CHECK_INT((uintptr_t)buffer->data % FSTI_HUGE_PAGE_BYTES, 0);
        fsti_buffer_populate(buffer, 0, buffer->size_bytes);
        memset(buffer->data, 7, sizes[i]);
        fsti_buffer_live(&count, &bytes);
        CHECK_INT(count, before + 1);
        fsti_buffer_unref(fsti_buffer_ref(buffer));
        fsti_buffer_unref(buffer);
    }
    fsti_buffer_live(&count, &bytes);
    CHECK_INT(count, before);
}

TEST(freed_memory_of_small_buffers_is_used_again)
{
    struct rusage before, after;
    if (CHECK_SANITIZED) SKIP("the sanitizers keep freed memory for a while");
    for (int i = 0; i < 12; i++) {
        fsti_buffer *buffer;
        if (i == 2) getrusage(RUSAGE_SELF, &before);
        CHECK_INT(fsti_buffer_arena(1 << 20, &buffer, NULL), FST_OK);
        memset(buffer->data, 7, 1 << 20);
        fsti_buffer_unref(buffer);
    }
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_minflt - before.ru_minflt < 256); // less than one buffer's pages
}

TEST(absurd_size_is_out_of_memory)
{
    fsti_buffer *buffer;
    CHECK_INT(fsti_buffer_arena(UINT64_MAX, &buffer, NULL), FST_E_NO_MEMORY);
    CHECK_INT(fsti_buffer_arena((uint64_t)1 << 60, &buffer, NULL), FST_E_NO_MEMORY);
}

TEST(arenas_are_cached_up_to_the_limit)
{
    fsti_buffer *buffer;
    fsti_arena_keep_max(16 << 20);
    CHECK_INT(fsti_buffer_arena(8 << 20, &buffer, NULL), FST_OK);
    CHECK(buffer->is_fresh);
    char *data = buffer->data;
    fsti_buffer_use(buffer, 8 << 20);
    fsti_buffer_unref(buffer);
    CHECK_INT(fsti_buffer_arena(30 << 20, &buffer, NULL), FST_OK); // too large for it
    CHECK(buffer->data != data && buffer->is_fresh);
    fsti_buffer_unref(buffer); // and too large to be kept
    CHECK_INT(fsti_buffer_arena(7 << 20, &buffer, NULL), FST_OK);
    CHECK(buffer->data == data && !buffer->is_fresh);
    fsti_buffer_unref(buffer);
    CHECK_INT(fsti_arena_trim(), 8 << 20);
    CHECK_INT(fsti_arena_trim(), 0);
    fsti_arena_keep_max(0);
}

TEST(cached_arenas_without_pages_count_as_available)
{
    fsti_buffer *buffer;
    fsti_arena_keep_max(64 << 20);
    CHECK_INT(fsti_buffer_arena(32 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_unref(buffer); // a load that was cancelled: nothing was written
    char root[512], *self = strdup(fixture_file("self", "0::/job\n", 8));
    snprintf(root, sizeof root, "%s", fixture_path("."));
    mkdir(fixture_path("job"), 0700);
    fixture_file("job/memory.max", "30000000\n", 9);
    fixture_file("job/memory.current", "10000000\n", 9);
    fsti_cgroup_fake(root, self);
    CHECK_INT(fsti_buffer_arena(32 << 20, &buffer, NULL), FST_E_NO_MEMORY);
    fsti_cgroup_fake(NULL, NULL);
    free(self);
    CHECK_INT(fsti_buffer_arena(32 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_use(buffer, 20 << 20);
    fsti_buffer_unref(buffer);
    CHECK_INT(fsti_arena_trim(), 20 << 20); // what there was
    fsti_arena_keep_max(0);
    unlink(fixture_path("job/memory.max"));
    unlink(fixture_path("job/memory.current"));
}

/// Lowering the limit gives back what is above it.
TEST(lower_limit_trims)
{
    fsti_buffer *buffer;
    fsti_arena_keep_max(16 << 20);
    CHECK_INT(fsti_buffer_arena(8 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_unref(buffer);
    fsti_arena_keep_max(4 << 20);
    CHECK_INT(fsti_arena_trim(), 0);
    fsti_arena_keep_max(0);
}

static uint64_t huge_cost_ns;
static unsigned measured_count;
static uint64_t tell_cost(char *data, bool is_huge) {
    (void)data;
    measured_count++;
    return is_huge ? huge_cost_ns : 1000000;
}

static void check_choice(uint64_t cost_ns, const char *flag, unsigned count) {
    static uint64_t last_ns;
    // A result holds for two seconds, which may pass on a machine that does other work.
    bool is_late = fsti_now_ns() - last_ns > 1000000000;
    huge_cost_ns = cost_ns;
    measured_count = 0;
    char *data = fsti_pages_map(32 << 20);
    fsti_pages_choose(data, 32 << 20);
    if (count > 0 || !is_late) CHECK_INT(measured_count, count);
    last_ns = fsti_now_ns();
    for (size_t at = 0; at < 32 << 20; at += 1 << 20) CHECK(fixture_mapping_has(data + at, flag));
    munmap(data, 32 << 20);
}

/// A system without huge pages rejects advice about them.
TEST(cheaper_page_size_is_chosen)
{
    char *data = fsti_pages_map(4 << 20);
    bool has_huge = fixture_mapping_has(data, "hg");
    munmap(data, 4 << 20);
    if (!has_huge) SKIP("the system has no huge pages");
    fsti_pages_fake(tell_cost);
    check_choice(100000, "hg", 3); // small ones are not known yet
    check_choice(1400000, "hg", 1);
    check_choice(2000000, "nh", 3); // may be an outlier, so a second page is measured
    // The result holds for eight times the bytes, after a second one for twice as many again.
    for (int i = 0; i < 8; i++) check_choice(100000, "nh", 0);
    check_choice(4000000, "nh", 2); // the host has to allocate them
    for (int i = 0; i < 24; i++) check_choice(100000, "nh", 0);
    check_choice(100000, "hg", 1); // the host has free memory again
    fsti_pages_fake(NULL);
    data = fsti_pages_map(8 << 20); // too small: nothing is measured
    fsti_pages_fake(tell_cost);
    measured_count = 0;
    fsti_pages_choose(data, 8 << 20);
    CHECK_INT(measured_count, 0);
    fsti_pages_fake(NULL);
    munmap(data, 8 << 20);
}

static unsigned
    cheap_count; // huge pages that are backed already; the host has to allocate the later ones
static uint64_t tell_cost_later(char *data, bool is_huge) {
    (void)data;
    if (is_huge && measured_count++ >= cheap_count) return huge_cost_ns;
    return is_huge ? 100000 : 1000000;
}

static void check_rest(unsigned count, const char *flag, bool is_urgent) {
    fsti_buffer *buffer = NULL;
    cheap_count = count, measured_count = 0;
    fsti_pages_fake(tell_cost_later); // forgets earlier results
    CHECK_INT(fsti_buffer_arena(64 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_choose_pages(buffer, is_urgent);
    for (uint64_t at = 0; at < 64 << 20; at += 8 << 20)
        fsti_buffer_populate(buffer, at + 4096, at + (8 << 20)); // as chunks do, not page by page
    CHECK(fixture_mapping_has(buffer->data + (4 << 20), count == 0 ? "nh" : "hg"));
    CHECK(fixture_mapping_has(buffer->data + (60 << 20), flag));
    if (strcmp(flag, "nh") == 0) CHECK(measured_count <= count + 3);
    fsti_buffer_unref(buffer);
}

/// If huge pages become slow to get, they are no longer requested.
TEST(slow_huge_pages_are_abandoned)
{
    char *data = fsti_pages_map(4 << 20);
    bool has_huge = fixture_mapping_has(data, "hg");
    munmap(data, 4 << 20);
    if (!has_huge) SKIP("the system has no huge pages");
    fsti_arena_keep_max(0);
    huge_cost_ns = 4000000;
    for (int is_urgent = 0; is_urgent < 2; is_urgent++) {
        check_rest(1000, "hg", is_urgent != 0);
        check_rest(10, "nh", is_urgent != 0);
        check_rest(0, "nh", is_urgent != 0);
    }
    fsti_pages_fake(NULL);
}

/// What one buffer finds out holds for others whose pages were chosen before.
TEST(slow_huge_pages_are_abandoned_by_all_buffers)
{
    fsti_buffer *buffers[2] = {NULL, NULL};
    char *data = fsti_pages_map(4 << 20);
    bool has_huge = fixture_mapping_has(data, "hg");
    munmap(data, 4 << 20);
    if (!has_huge) SKIP("the system has no huge pages");
    fsti_arena_keep_max(0);
    cheap_count = 3, measured_count = 0, huge_cost_ns = 4000000;
    fsti_pages_fake(tell_cost_later);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(fsti_buffer_arena(64 << 20, &buffers[i], NULL), FST_OK);
        fsti_buffer_choose_pages(buffers[i], true);
        CHECK(fixture_mapping_has(buffers[i]->data, "hg"));
    }
    CHECK_INT(measured_count, 3);
    for (int i = 0; i < 2; i++)
        for (uint64_t at = 0; at < 64 << 20; at += 8 << 20)
            fsti_buffer_populate(buffers[i], at, at + (8 << 20));
    CHECK_INT(measured_count, 4);
    CHECK(fixture_mapping_has(buffers[1]->data, "nh"));
    for (int i = 0; i < 2; i++) fsti_buffer_unref(buffers[i]);
    fsti_pages_fake(NULL);
}

static bool has_page(char *address) {
    unsigned char is_resident = 0;
    return mincore(address, (size_t)sysconf(_SC_PAGESIZE), &is_resident) == 0 &&
           (is_resident & 1) != 0;
}

TEST(small_buffers_have_pages_at_once)
{
    fsti_buffer *buffers[8];
    if (CHECK_SANITIZED) SKIP("the sanitizers allocate by themselves");
    for (int i = 0; i < 8; i++) CHECK_INT(fsti_buffer_arena(1 << 20, &buffers[i], NULL), FST_OK);
    for (int i = 0; i < 8; i++) {
        for (size_t at = 0; at < 1 << 20; at += 64 << 10) CHECK(has_page(buffers[i]->data + at));
        fsti_buffer_unref(buffers[i]);
    }
}

/// Prepares a buffer part by part; its huge pages become slow after `cheap` of them.
static void prepare_buffer(unsigned cheap, uint64_t slow_ns, fsti_buffer **out) {
    cheap_count = cheap, measured_count = 0, huge_cost_ns = slow_ns;
    fsti_pages_fake(tell_cost_later);
    CHECK_INT(fsti_buffer_arena(64 << 20, out, NULL), FST_OK);
    fsti_buffer_choose_pages(*out, true);
    for (uint64_t at = 0; at < 64 << 20; at += 8 << 20)
        fsti_buffer_prepare(*out, at, at + (8 << 20));
}

TEST(pages_are_timed_before_writes)
{
    char *data = fsti_pages_map(4 << 20);
    bool has_huge = fixture_mapping_has(data, "hg");
    munmap(data, 4 << 20);
    if (!has_huge) SKIP("the system has no huge pages");
    fsti_arena_keep_max(0);
    fsti_buffer *buffer = NULL;
    prepare_buffer(1000, 0, &buffer);
    CHECK_INT(measured_count, 2 + 32); // two by the choice
    CHECK(fixture_mapping_has(buffer->data + (60 << 20), "hg"));
    fsti_buffer_unref(buffer);
    prepare_buffer(8, 4000000, &buffer); // the seventh is slow
    CHECK_INT(measured_count, 9);
    CHECK(fixture_mapping_has(buffer->data + (8 << 20), "hg"));
    CHECK(fixture_mapping_has(buffer->data + (60 << 20), "nh"));
    CHECK(has_page(buffer->data + (42 << 20))); // small pages are allocated together
    fsti_buffer_unref(buffer);
    prepare_buffer(8, 2000000, &buffer); // two pages are needed to know
    CHECK_INT(measured_count, 10);
    CHECK(fixture_mapping_has(buffer->data + (60 << 20), "nh"));
    fsti_buffer_prepare(buffer, 64 << 20, 65 << 20); // outside
    fsti_buffer_unref(buffer);
    CHECK_INT(fsti_buffer_arena(8 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_prepare(buffer, 0, 8 << 20); // nothing was chosen: the writes will allocate
    CHECK(!has_page(buffer->data));
    fsti_buffer_unref(buffer);
    fsti_pages_fake(NULL);
}

TEST(without_huge_pages)
{
    // For this process as a whole, as a system set up without them.
    if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0) SKIP("huge pages can't be switched off here");
    fsti_buffer *buffer;
    CHECK_INT(fsti_buffer_arena(8 << 20, &buffer, NULL), FST_OK);
    fsti_buffer_populate(buffer, 0, 8 << 20);
    memset(buffer->data, 1, 8 << 20);
    fsti_buffer_unref(buffer);
    CHECK_INT(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
}

static char fake_root[512], fake_list[512];

/// The process's groups, and files below the fake tree, for one case.
static void fake_groups(const char *self) {
    snprintf(fake_root, sizeof fake_root, "%s", fixture_path("."));
    snprintf(fake_list, sizeof fake_list, "%s", fixture_file("self", self, strlen(self)));
    fsti_cgroup_fake(fake_root, fake_list);
}

/// The processors that the fake tree allows now, not a second ago.
static uint32_t count_processors(void) {
    fsti_cgroup_fake(fake_root, fake_list);
    return fsti_cpu_count();
}

/// Makes a cgroup's file in the fake tree.
static void cgroup_file(const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "job/%s", name);
    fixture_file(path, text, strlen(text));
}

TEST(cgroup_limits_over_fake_trees)
{
    fsti_buffer *buffer;
    fst_error error;
    mkdir(fixture_path("job"), 0700);
    uint32_t all = fsti_cpu_count();
    fake_groups("1:name=x:/y\n0::/job\n");
    CHECK_INT(fsti_cpu_count(), all); // no files: no limits
    CHECK(fsti_memory_available() == UINT64_MAX);
    cgroup_file("cpu.max", "50000 100000\n");
    CHECK_INT(count_processors(), 1); // half a processor
    cgroup_file("cpu.max", "max 100000\n");
    CHECK_INT(fsti_cpu_count(), 1); // the quota is read once a second
    usleep(1100000);
    CHECK_INT(fsti_cpu_count(), all);
    cgroup_file("memory.max", "max\n");
    CHECK(fsti_memory_available() == UINT64_MAX);
    cgroup_file("memory.max", "10000000\n");
    cgroup_file("memory.current", "9000000\n");
    CHECK_INT(fsti_memory_available(), 1000000);
    cgroup_file("memory.stat", "anon 5\nactive_file 1000000\ninactive_file 2000000\nslab 1\n");
    CHECK_INT(fsti_memory_available(), 4000000); // what files hold can be given up
    CHECK_INT(fsti_buffer_arena(3000000, &buffer, &error), FST_E_NO_MEMORY); // rounds to 4 MiB
    CHECK_CONTAINS(error.message, "limit leaves 4000000");
    CHECK_INT(fsti_buffer_arena(2000000, &buffer, &error), FST_OK);
    fsti_buffer_unref(buffer);
    fixture_limit_descriptors(true); // the limit cannot be read: the last one counts
    uint64_t left = fsti_memory_available();
    fixture_limit_descriptors(false);
    CHECK_INT(left, 4000000);
    fsti_cgroup_fake(NULL, NULL);
}

static void tree_file(const char *name, const char *text) {
    fixture_file(name, text, strlen(text));
}

TEST(limits_of_groups_above_count)
{
    uint32_t all = fsti_cpu_count();
    mkdir(fixture_path("pod"), 0700);
    mkdir(fixture_path("pod/box"), 0700);
    fake_groups("0::/pod/box\n");
    tree_file("pod/memory.max", "5000000\n");
    tree_file("pod/memory.current", "1000000\n");
    tree_file("pod/box/memory.max", "max\n");
    CHECK_INT(fsti_memory_available(), 4000000);
    tree_file("pod/box/memory.max", "3000000\n");
    tree_file("pod/box/memory.current", "0\n");
    CHECK_INT(fsti_memory_available(), 3000000);
    tree_file("pod/cpu.max", "100000 100000\n");
    tree_file("pod/box/cpu.max", "max 100000\n");
    CHECK_INT(count_processors(), 1);
    // Also with version 1, on a late line.
    char list[4096] = "";
    for (int i = 12; i > 2; i--)
        snprintf(list + strlen(list), sizeof list - strlen(list),
                 "%d:name%d:/a/rather/long/path/as/container/systems/like/to/make/them\n", i, i);
    snprintf(list + strlen(list), sizeof list - strlen(list),
             "2:memory:/old\n1:cpu,cpuacct:/old\n0::/\n");
    fake_groups(list);
    mkdir(fixture_path("memory"), 0700);
    mkdir(fixture_path("memory/old"), 0700);
    tree_file("memory/old/memory.limit_in_bytes", "9223372036854771712\n");
    tree_file("memory/old/memory.usage_in_bytes", "1000\n");
    CHECK(fsti_memory_available() == UINT64_MAX);
    tree_file("memory/old/memory.limit_in_bytes", "8000000\n");
    tree_file("memory/old/memory.usage_in_bytes", "3000000\n");
    tree_file("memory/old/memory.stat", "total_active_file 500000\ntotal_inactive_file 500000\n");
    CHECK_INT(fsti_memory_available(), 6000000);
    mkdir(fixture_path("cpu"), 0700);
    mkdir(fixture_path("cpu/old"), 0700);
    tree_file("cpu/old/cpu.cfs_quota_us", "-1\n");
    tree_file("cpu/old/cpu.cfs_period_us", "100000\n");
    CHECK_INT(count_processors(), all);
    tree_file("cpu/old/cpu.cfs_quota_us", "50000\n");
    CHECK_INT(count_processors(), 1);
    fsti_cgroup_fake(NULL, NULL);
}

TEST(small_buffers_end_where_memory_does)
{
    fsti_buffer *buffers[40];
    size_t count = 0;
    mkdir(fixture_path("full"), 0700);
    fake_groups("0::/full\n");
    tree_file("full/memory.max", "90000000\n");
    tree_file("full/memory.current", "80000000\n");
    // The group's use does not grow in this test. Each failure is followed by another try, as a
    // stream makes after a pause.
    for (int i = 0; i < 40; i++)
        count += fsti_buffer_arena(1 << 20, &buffers[count], NULL) == FST_OK;
    CHECK(count < 10);
    while (count > 0) fsti_buffer_unref(buffers[--count]);
    fsti_cgroup_fake(NULL, NULL);
}

/// Files of a folder that were opened since the watch was added.
static int count_opened(int watch) {
    char events[4096];
    int count = 0;
    ssize_t size = read(watch, events, sizeof events);
    for (ssize_t at = 0; at < size; count++) {
        struct inotify_event event;
        memcpy(&event, events + at, sizeof event);
        at += (ssize_t)(sizeof event + event.len);
    }
    return count;
}

TEST(groups_without_a_limit_cost_one_file)
{
    mkdir(fixture_path("memory"), 0700);
    mkdir(fixture_path("memory/free"), 0700);
    fake_groups("2:memory:/free\n");
    tree_file("memory/free/memory.limit_in_bytes", "9223372036854771712\n");
    tree_file("memory/free/memory.usage_in_bytes", "1000\n");
    tree_file("memory/free/memory.stat", "total_active_file 500\n");
    int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    CHECK(watch >= 0 && inotify_add_watch(watch, fixture_path("memory/free"), IN_OPEN) >= 0);
    CHECK(fsti_memory_available() == UINT64_MAX);
    CHECK_INT(count_opened(watch), 1);
    tree_file("memory/free/memory.limit_in_bytes", "8000\n");
    (void)count_opened(watch); // by the test
    CHECK_INT(fsti_memory_available(), 7500);
    CHECK_INT(count_opened(watch), 3);
    close(watch);
    fsti_cgroup_fake(NULL, NULL);
}

TEST(reserved_memory_is_summed)
{
    // Each of them fits alone; nothing of them has been touched.
    fsti_buffer *buffers[4] = {NULL};
    fst_error error;
    mkdir(fixture_path("sum"), 0700);
    fake_groups("0::/sum\n");
    tree_file("sum/memory.max", "16777216\n");
    tree_file("sum/memory.current", "0\n");
    CHECK_INT(fsti_buffer_arena(6 << 20, &buffers[0], &error), FST_OK);
    CHECK_INT(fsti_buffer_arena(6 << 20, &buffers[1], &error), FST_OK);
    CHECK_INT(fsti_buffer_arena(6 << 20, &buffers[2], &error), FST_E_NO_MEMORY);
    CHECK_CONTAINS(error.message, "12582912 reserved");
    // Memory in use is counted by the system.
    fsti_buffer_use(buffers[0], 6 << 20);
    fsti_buffer_use(buffers[0], 6 << 20);
    CHECK_INT(fsti_buffer_arena(6 << 20, &buffers[2], &error), FST_OK);
    for (size_t i = 0; i < 3; i++) fsti_buffer_unref(buffers[i]);
    CHECK_INT(fsti_buffer_arena(16 << 20, &buffers[3], &error), FST_OK);
    fsti_buffer_unref(buffers[3]);
    fsti_cgroup_fake(NULL, NULL);
}

TEST(many_small_buffers_count_towards_the_limit)
{
    enum { COUNT = 200 };
    static fsti_buffer *buffers[COUNT];
    size_t granted = 0;
    mkdir(fixture_path("small"), 0700);
    fake_groups("0::/small\n");
    tree_file("small/memory.max", "16777216\n");
    tree_file("small/memory.current", "14680064\n"); // 2 MiB are left
    while (granted < COUNT && fsti_buffer_arena(200 << 10, &buffers[granted], NULL) == FST_OK)
        granted++;
    CHECK(granted < COUNT); // 39 MiB
    for (size_t i = 0; i < granted; i++) fsti_buffer_unref(buffers[i]);
    fsti_cgroup_fake(NULL, NULL);
}

TEST(reservations_never_exceed_physical_memory)
{
    // The system would grant each of them, and end the process when their pages are touched.
    enum { COUNT = 12 };
    fsti_buffer *buffers[COUNT] = {NULL};
    uint64_t whole = fsti_memory_total(), granted = 0;
    if (whole == UINT64_MAX) SKIP("the machine does not tell");
    for (size_t i = 0; i < COUNT; i++) {
        fst_error error;
        fst_status status = fsti_buffer_arena(whole / 4, &buffers[i], &error);
        if (status == FST_OK) granted += buffers[i]->size_bytes;
        if (status != FST_OK) CHECK_CONTAINS(error.message, "out of memory");
        if (status != FST_OK) buffers[i] = NULL;
    }
    for (size_t i = 0; i < COUNT; i++) fsti_buffer_unref(buffers[i]);
    CHECK(granted <= whole);
}

static struct {
    int calls, mode;
    unsigned long first_word;
    size_t size;
    long result;
} seen;

static long fake_bind(void *address, size_t size, int mode, const unsigned long *nodes,
                      unsigned long node_max) {
    (void)address;
    (void)node_max;
    seen.calls++;
    seen.mode = mode;
    seen.size = size;
    seen.first_word = nodes == NULL ? 0 : nodes[0];
    return seen.result;
}

TEST(the_node_of_a_device_on_the_bus)
{
    enum { PREFERRED = 1 };
    static const struct {
        const char *text;
        int32_t node;
    } files[] = {{"1\n", 1}, {"0\n", 0}, {"-1\n", -1}, {"", -1}, {"none", -1}, {"99999", -1}};
    char folder[512], device[512], file[600];
    snprintf(folder, sizeof folder, "%s", fixture_path("."));
    snprintf(device, sizeof device, "%s", fixture_path("0000:a0:00.0"));
    snprintf(file, sizeof file, "0000:a0:00.0/numa_node");
    CHECK_INT(mkdir(device, 0700), 0);
    fixture_file("online", "0-1", 3);
    fsti_numa_fake(folder, fake_bind);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        fixture_file(file, files[i].text, strlen(files[i].text));
        CHECK_INT(fsti_numa_node_of_bus("0000:A0:00.0"), files[i].node);
    }
    CHECK_INT(fsti_numa_node_of_bus("0000:B0:00.0"), -1);
    CHECK_INT(fsti_numa_node_of_bus("../online"), -1);
    memset(&seen, 0, sizeof seen);
    CHECK(fsti_numa_prefer(&seen, 4096, 1) && seen.mode == PREFERRED && seen.first_word == 2);
    CHECK(!fsti_numa_prefer(&seen, 4096, -1));
    fixture_file("online", "0", 1); // there is nothing to choose
    CHECK(!fsti_numa_prefer(&seen, 4096, 0));
    CHECK_INT(seen.calls, 1);
    fsti_numa_fake(NULL, NULL);
    unlink(fixture_path(file));
    rmdir(device);
}

TEST(numa_policies_over_fake_topologies)
{
    static const struct {
        const char *online;
        uint32_t count;
        unsigned long mask;
    } machines[] = {{"0\n", 1, 0}, {"0-1\n", 2, 3}, {"0,2-3\n", 3, 13}, {"", 1, 0}, {"junk", 1, 0}};
    char folder[512];
    snprintf(folder, sizeof folder, "%s", fixture_path("."));
    fsti_numa_fake(folder, fake_bind);
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        fixture_file("online", machines[i].online, strlen(machines[i].online));
        CHECK_INT(fsti_numa_node_count(), machines[i].count);
        for (int policy = FST_NUMA_DEFAULT; policy < FST_NUMA_COUNT; policy++) {
            memset(&seen, 0, sizeof seen);
            bool placed = fsti_numa_set_policy(&seen, 4096, (fst_numa)policy);
            bool expected = machines[i].count > 1 && policy != FST_NUMA_DEFAULT;
            CHECK_INT(placed, expected);
            CHECK_INT(seen.calls, expected);
            if (expected && policy == FST_NUMA_INTERLEAVE)
                CHECK_INT(seen.first_word, machines[i].mask);
        }
    }
    seen.result = -1; // refused: the memory is used unchanged
    fixture_file("online", "0-3", 3);
    CHECK(!fsti_numa_set_policy(&seen, 4096, FST_NUMA_LOCAL));
    fsti_numa_fake(NULL, NULL);
    CHECK(fsti_numa_node_count() >= 1);
}
