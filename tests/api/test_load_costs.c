// SPDX-License-Identifier: Apache-2.0
/// What loads cost, in counts: page faults, bytes, copies, memory.
#include <fastsafetensors.h>
#include <sys/resource.h>

#include "check.h"
#include "fixture.h"

static fst_load_options options_of(fst_load_mode mode) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options), .mode = mode};
}

static int has_huge_pages(void) {
    char text[64] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    if (file != NULL && fgets(text, sizeof text, file) == NULL) text[0] = '\0';
    if (file != NULL) fclose(file);
    return file != NULL && strstr(text, "[never]") == NULL;
}

TEST(eager_loads_fault_huge_pages_not_small_ones)
{
    if (!has_huge_pages()) SKIP("there are no transparent huge pages");
    fst_model *model = NULL;
    CHECK_INT(fst_model_open(fixture_tensors("faults", 1, (uint64_t)64 << 20), NULL, &model, NULL),
              FST_OK);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.engine = FST_ENGINE_PREAD;
    fst_loader *loader;
    struct rusage before, after;
    CHECK_INT(getrusage(RUSAGE_SELF, &before), 0);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_INT(getrusage(RUSAGE_SELF, &after), 0);
    fst_loader_close(loader);
    fst_model_close(model);
    // 33 huge pages, stacks and tables; small pages would be 16384. A system without a free huge
    // page gives small ones: half of them still show that huge ones were asked for.
    CHECK(after.ru_minflt - before.ru_minflt < 8192);
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
