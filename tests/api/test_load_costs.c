// SPDX-License-Identifier: Apache-2.0
/// What loads cost, in counts: page faults, bytes, copies, memory.
#include <fastsafetensors.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "check.h"
#include "fixture.h"

static fst_load_options options_of(fst_load_mode mode) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options), .mode = mode};
}

static long faults_now(void) {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_minflt : 0;
}

/// Whether memory that asks for huge pages gets them: not where they are switched off, used up, or
/// emulated.
static int has_huge_pages(void) {
    size_t size = (size_t)16 << 20;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    madvise(memory, size, MADV_HUGEPAGE);
    long before = faults_now();
    memset(memory, 1, size);
    long faults = faults_now() - before;
    munmap(memory, size);
    return faults < 2000; // 4096 small pages
}

TEST(eager_loads_fault_huge_pages_not_small_ones)
{
    if (!has_huge_pages()) SKIP("memory that asks for huge pages gets small ones here");
    fst_model *model = NULL;
    CHECK_INT(fst_model_open(fixture_tensors("faults", 1, (uint64_t)64 << 20), NULL, &model, NULL),
              FST_OK);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.engine = FST_ENGINE_PREAD;
    fst_loader *loader;
    long before = faults_now();
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    long faults = faults_now() - before;
    fst_loader_close(loader);
    fst_model_close(model);
    // 33 huge pages, stacks and tables; small pages would be 16384. A system without a free huge
    // page gives small ones: half of them still show that huge ones were asked for.
    CHECK(faults < 8192);
}

TEST(views_cost_no_memory_and_no_reads)
{
    fst_model *model = NULL;
    CHECK_INT(fst_model_open(fixture_tensors("views", 32, 500000), NULL, &model, NULL), FST_OK);
    fst_load_options options = options_of(FST_MODE_MAP);
    fst_loader *loader;
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK_INT(stats.bytes_read, 0);
    CHECK_INT(stats.bytes_copied, 0);
    CHECK_INT(stats.buffer_bytes, 0);
    CHECK_INT(stats.bounce_bytes, 0);
    fst_loader_close(loader);
    fst_model_close(model);
}
