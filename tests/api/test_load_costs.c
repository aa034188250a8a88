// SPDX-License-Identifier: Apache-2.0
/// What loads cost, in counts: bytes, copies, memory.
#include <fastsafetensors.h>

#include "check.h"
#include "fixture.h"

static fst_load_options options_of(fst_load_mode mode) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options), .mode = mode};
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
