// SPDX-License-Identifier: Apache-2.0
/// Read errors name the tensor and the byte, for every engine, with and without the page cache.
#include <errno.h>
#include <fastsafetensors.h>
#include <string.h>

#include "check.h"
#include "fixture.h"
#include "io/io.h"

#define COUNT 40
#define BYTES ((uint64_t)100000)

static void fail_reads(fsti_io_op *op) {
    if (!op->is_write) op->result = -EIO;
}

/// Loads a model whose reads fail; *located: whether the error names a tensor and a byte of it.
static fst_status load_failing(fst_load_options *options, bool *located) {
    // One tensor of a larger file, which is read in calls that the hook sees, not in huge pages.
    static const fst_part one = {.struct_size = sizeof one, .tensor_index = 20};
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_error error = {.status = FST_OK};
    const char *path = fixture_tensors("model", COUNT, BYTES);
    fixture_evict(path);
    options->parts = &one;
    options->part_count = 1;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    fsti_io_fault_hook_set(fail_reads);
    fst_status status = fst_loader_open(model, options, &loader, &error);
    bool is_open = status == FST_OK;
    while (status == FST_OK) {
        status = fst_loader_next(loader, -1, &tensor, &error);
        if (status == FST_OK) fst_tensor_unref(tensor);
    }
    if (is_open) fst_loader_close(loader);
    fsti_io_fault_hook_set(NULL);
    fst_model_close(model);
    *located = error.tensor[0] == 't' && error.byte_offset < COUNT * BYTES + 4096 &&
               strstr(error.message, "at byte") != NULL;
    return status;
}

TEST(a_failed_read_names_its_tensor)
{
    static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_PREAD, FST_ENGINE_DIRECT,
                                         FST_ENGINE_URING};
    size_t failed[FST_MODE_COUNT] = {0};
    for (int mode = 0; mode < FST_MODE_COUNT; mode++)
        for (int cache = 0; cache < FST_CACHE_COUNT; cache++)
            for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
                bool located;
                fst_load_options options = FST_STRUCT_INIT(fst_load_options);
                options.mode = (fst_load_mode)mode;
                options.cache = (fst_cache)cache;
                options.tuning = fixture_engine(engines[i]);
                // Other statuses: features that this machine lacks, and pages that need no read.
                if (load_failing(&options, &located) != FST_E_IO) continue;
                CHECK(located);
                failed[mode]++;
            }
    for (int mode = 0; mode < FST_MODE_COUNT; mode++) CHECK(failed[mode] > 0);
}
