// SPDX-License-Identifier: Apache-2.0
/// Counts the costs of loads: bytes, copies, memory.
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

/// Loads each tensor of a cached file, then the first once more, with one time limit for each call.
/// With a budget the stream has released the first tensor by then. False after an error.
static bool load_within(fst_model *model, const fst_load_options *options, int64_t timeout_ms,
                        fst_load_stats *stats) {
    fst_loader *loader;
    fst_tensor *tensor;
    *stats = (fst_load_stats){.struct_size = sizeof *stats};
    if (fst_loader_open(model, options, &loader, NULL) != FST_OK) return false;
    fst_status status;
    while ((status = fst_loader_next(loader, timeout_ms, &tensor, NULL)) == FST_OK)
        fst_tensor_unref(tensor);
    if (status == FST_END) status = fst_loader_tensor(loader, "t0", 2, timeout_ms, &tensor, NULL);
    if (status == FST_OK) fst_tensor_unref(tensor);
    if (status == FST_OK && options->budget_bytes == 0)
        status = fst_loader_wait(loader, timeout_ms, NULL);
    if (status == FST_OK) status = fst_loader_stats_get(loader, stats, NULL);
    fst_loader_close(loader);
    return status == FST_OK;
}

/// A limit that is not reached costs no thread, no read and no copy.
TEST(a_time_limit_costs_nothing)
{
    fst_model *model = NULL;
    for (unsigned size = 1000; size <= 8000000; size *= 20) {
        CHECK_INT(fst_model_open(fixture_tensors("limits", 8, size), NULL, &model, NULL), FST_OK);
        for (int kind = 0; kind <= FST_MODE_COUNT; kind++) {
            fst_load_options options = options_of((fst_load_mode)kind);
            if (kind == FST_MODE_COUNT) {
                options.mode = FST_MODE_LOAD;
                options.budget_bytes = 32 << 20;
            }
            fst_load_stats without, with;
            CHECK(load_within(model, &options, -1, &without)); // the file is cached then
            CHECK(load_within(model, &options, -1, &without));
            CHECK(load_within(model, &options, 100000, &with));
            if (with.chunks_resident != without.chunks_resident)
                continue; // the kernel dropped pages
            CHECK_INT(with.thread_count, without.thread_count);
            CHECK_INT(with.read_count, without.read_count);
            CHECK_INT(with.bytes_read, without.bytes_read);
            CHECK_INT(with.bytes_copied, without.bytes_copied);
            CHECK_INT(with.buffer_bytes, without.buffer_bytes);
        }
        fst_model_close(model);
    }
}
