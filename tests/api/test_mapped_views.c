// SPDX-License-Identifier: Apache-2.0
/// Memory-mapped tensors: private to their load, and populated only on request.
#include <fastsafetensors.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "fixture.h"
#include "load_fixture.h"

TEST(stores_to_views_stay_private)
{
    fst_model *model = open_tensors();
    fst_load_options options = options_of(FST_MODE_MAP);
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, NULL), FST_OK);
    memset(view_of(tensor).data, 0, 100);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    CHECK_INT(fst_model_open(fixture_path("tensors"), NULL, &model, NULL), FST_OK);
    options.map_read_only = 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, NULL), FST_OK);
    CHECK(is_tensor(tensor, 0));
    CHECK_INT(view_of(tensor).writable, 0);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
}

/// Loads everything with `mode`, and clears the tensors afterwards if requested. Returns whether
/// every tensor had the file's bytes.
static bool load_and_clear(fst_model *model, fst_load_mode mode, bool clears) {
    fst_load_options options = options_of(mode);
    fst_loader *loader;
    fst_tensor *tensors[COUNT];
    bool is_right = true;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) return false;
    for (size_t i = 0; i < COUNT; i++) {
        if (fst_loader_tensor_at(loader, i, -1, &tensors[i], NULL) != FST_OK) return false;
        is_right = is_right && is_tensor(tensors[i], i);
    }
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor_view view = view_of(tensors[i]);
        if (clears) memset(view.data, 0, view.size_bytes);
        fst_tensor_unref(tensors[i]);
    }
    fst_loader_close(loader);
    return is_right;
}

TEST(stores_do_not_reach_later_loads)
{
    static const fst_load_mode modes[] = {FST_MODE_AUTO, FST_MODE_MAP, FST_MODE_LOAD};
    fst_model *model = open_tensors();
    fixture_warm(fixture_path("tensors"));
    for (size_t i = 0; i < 3; i++) {
        CHECK(load_and_clear(model, modes[i], true));
        for (size_t k = 0; k < 3; k++) CHECK(load_and_clear(model, modes[k], false));
        if (modes[i] == FST_MODE_LOAD) break; // its memory may be kept for the next load
        CHECK_INT(fixture_live_buffers(), 0);
    }
    fst_model_close(model);
}

/// Bytes that this process has written to private mappings of the fixture file.
static uint64_t written_bytes(void) {
    char line[512];
    unsigned long kib;
    bool is_inside = false;
    uint64_t sum = 0;
    FILE *stream = fopen("/proc/self/smaps", "re");
    while (stream != NULL && fgets(line, sizeof line, stream) != NULL) {
        if (strchr(line, '-') != NULL && strstr(line, " rw-p ") != NULL)
            is_inside = strstr(line, fixture_path("tensors")) != NULL;
        else if (strchr(line, '-') != NULL && strchr(line, '/') != NULL)
            is_inside = false;
        else if (is_inside && sscanf(line, "Private_Dirty: %lu kB", &kib) == 1)
            sum += (uint64_t)kib << 10;
    }
    if (stream != NULL) fclose(stream);
    return sum;
}

TEST(written_pages_are_freed_with_the_last_tensor)
{
    fst_model *model = open_tensors();
    fst_load_options options = options_of(FST_MODE_MAP);
    fst_loader *loader;
    fst_tensor *tensors[COUNT];
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(fst_loader_tensor_at(loader, i, -1, &tensors[i], NULL), FST_OK);
        memset(view_of(tensors[i]).data, 1, view_of(tensors[i]).size_bytes);
    }
    fst_loader_close(loader);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(written_bytes() > 0);
        fst_tensor_unref(tensors[i]);
    }
    CHECK_INT(fixture_live_buffers(), 0);
    CHECK_INT(written_bytes(), 0); // the model is still open
    fst_model_close(model);
}

TEST(mapping_with_an_engine_is_refused_at_open)
{
    static const fst_engine engines[] = {FST_ENGINE_PREAD, FST_ENGINE_URING, FST_ENGINE_MMAP};
    fst_model *model = open_tensors();
    for (size_t i = 0; i < 3; i++) {
        fst_load_options options = options_of(FST_MODE_MAP);
        fst_loader *loader = NULL;
        fst_error error;
        options.tuning = fixture_engine(engines[i]);
        CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
        CHECK(loader == NULL);
    }
    fst_model_close(model);
}

TEST(views_are_populated_only_on_request)
{
    // Another program may empty the page cache at any moment, so such a round is not counted.
    for (int populate = 0, lost = 0; populate < 2 && lost < 100; populate++) {
        fst_model *model = open_tensors();
        fst_load_options options = options_of(FST_MODE_MAP);
        options.tuning = populate ? fixture_populate() : NULL;
        fst_loader *loader;
        fst_load_stats stats = {.struct_size = sizeof stats};
        fixture_warm(fixture_path("tensors"));
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        CHECK_INT(stats.bytes_copied + stats.buffer_bytes, 0);
        CHECK_TEXT(stats.mode, "map");
        if (stats.chunks_resident == stats.chunk_count) {
            CHECK_INT(stats.bytes_mapped, populate ? COUNT * BYTES : 0);
            CHECK_INT(stats.bytes_read, 0);
        } else {
            lost++;
            populate--;
        }
        fst_loader_close(loader);
        fst_model_close(model);
    }
}
