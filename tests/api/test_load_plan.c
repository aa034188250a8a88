// SPDX-License-Identifier: Apache-2.0
/// A plan with slices of several files: the bytes read, and repeated reads in any order.
#include <fastsafetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fixture.h"

#define FILE_COUNT 3
#define KIND_COUNT 3 // rows, columns, and a box of three dimensions
#define ITEM_COUNT (FILE_COUNT * KIND_COUNT)
#define MATRIX_BYTES ((uint64_t)4 << 20)
#define BOX_BYTES ((uint64_t)1 << 20)
#define CUBE_BOX_BYTES ((uint64_t)4 * 4096)
/// Two pieces a plane are near each other and are read as one; the planes are not.
#define CUBE_READ_BYTES ((uint64_t)2 * (16384 + 4096))

static const uint64_t begins[KIND_COUNT][3] = {{4, 0}, {0, 65536}, {1, 2, 4096}};
static const uint64_t ends[KIND_COUNT][3] = {{8, 262144}, {16, 131072}, {3, 4, 8192}};

static fst_model *open_files(void) {
    const char *paths[FILE_COUNT];
    for (int i = 0; i < FILE_COUNT; i++) {
        char name[16], json[512];
        snprintf(name, sizeof name, "plan%d", i);
        snprintf(
            json, sizeof json,
            "{\"%d.rows\":{\"dtype\":\"U8\",\"shape\":[16,262144],\"data_offsets\":[0,4194304]},"
            "\"%d.columns\":{\"dtype\":\"U8\",\"shape\":[16,262144],"
            "\"data_offsets\":[4194304,8388608]},"
            "\"%d.cube\":{\"dtype\":\"U8\",\"shape\":[4,8,16384],"
            "\"data_offsets\":[8388608,8912896]}}",
            i, i, i);
        paths[i] = fixture_model(name, json, 8912896);
    }
    fst_model *model;
    fst_error error;
    if (fst_model_open_files(paths, FILE_COUNT, NULL, &model, &error) != FST_OK) abort();
    return model;
}

static int is_box(const char *bytes, size_t kind) {
    int right = 1;
    for (uint64_t row = 0; row < 4 && kind == 0; row++)
        right &= fixture_matches(bytes + row * 262144, (4 + row) * 262144, 262144);
    for (uint64_t row = 0; row < 16 && kind == 1; row++)
        right &= fixture_matches(bytes + row * 65536, MATRIX_BYTES + row * 262144 + 65536, 65536);
    for (uint64_t piece = 0; piece < 4 && kind == 2; piece++)
        right &= fixture_matches(
            bytes + piece * 4096,
            2 * MATRIX_BYTES + (1 + piece / 2) * 131072 + (2 + piece % 2) * 16384 + 4096, 4096);
    return right;
}

/// The last file first; columns go to the caller's memory.
static void describe(fst_part *items, char (*columns)[BOX_BYTES]) {
    for (size_t i = 0; i < ITEM_COUNT; i++) {
        size_t kind = i % KIND_COUNT, file = FILE_COUNT - 1 - i / KIND_COUNT;
        items[i] = (fst_part){.struct_size = sizeof(fst_part),
                              .tensor_index = file * KIND_COUNT + kind,
                              .begin = begins[kind],
                              .end = ends[kind]};
        if (kind != 1) continue;
        items[i].destination = columns[file];
        items[i].destination_bytes = BOX_BYTES;
    }
}

static void check_item(fst_tensor *tensor, size_t item) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK_INT(view.size_bytes, item % KIND_COUNT == 2 ? CUBE_BOX_BYTES : BOX_BYTES);
    CHECK(is_box(view.data, item % KIND_COUNT));
    fst_tensor_unref(tensor);
}

static fst_loader *open_plan(fst_model *model, uint64_t budget_bytes, char (*columns)[BOX_BYTES]) {
    fst_part items[ITEM_COUNT];
    describe(items, columns);
    fst_load_options options = {.struct_size = sizeof options,
                                .tuning = fixture_engine(FST_ENGINE_PREAD),
                                .order = FST_ORDER_REQUEST,
                                .parts = items,
                                .part_count = ITEM_COUNT,
                                .budget_bytes = budget_bytes};
    fst_loader *loader;
    fst_error error;
    if (fst_loader_open(model, &options, &loader, &error) != FST_OK) abort();
    return loader;
}

static fst_load_stats stats_of(fst_loader *loader) {
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK) abort();
    return stats;
}

TEST(slices_of_many_files_are_read_exactly_once)
{
    static char columns[FILE_COUNT][BOX_BYTES];
    fst_model *model = open_files();
    fst_loader *loader = open_plan(model, 0, columns);
    fst_model_close(model);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    // Any order, several times: there is nothing left to read.
    for (size_t i = 0; i < 3 * ITEM_COUNT; i++) {
        fst_tensor *tensor;
        size_t item = i * 5 % ITEM_COUNT;
        CHECK_INT(fst_loader_tensor_at(loader, item, -1, &tensor, NULL), FST_OK);
        check_item(tensor, item);
    }
    fst_load_stats stats = stats_of(loader);
    CHECK_INT(stats.bytes_requested, FILE_COUNT * (2 * BOX_BYTES + CUBE_BOX_BYTES));
    CHECK_INT(stats.bytes_read, FILE_COUNT * (2 * BOX_BYTES + CUBE_READ_BYTES));
    fst_loader_close(loader);
    for (size_t i = 0; i < FILE_COUNT; i++) CHECK(is_box(columns[i], 1));
}

TEST(budgeted_load_continues_after_any_item)
{
    static char columns[FILE_COUNT][BOX_BYTES];
    const uint64_t budget = 8 << 20;
    fst_model *model = open_files();
    fst_loader *loader = open_plan(model, budget, columns);
    fst_model_close(model);
    for (size_t i = 0; i < ITEM_COUNT; i++) {
        fst_tensor *tensor;
        size_t item = (i * 4 + 7) % ITEM_COUNT; // released, ahead, and the next one
        CHECK_INT(fst_loader_tensor_at(loader, item, -1, &tensor, NULL), FST_OK);
        check_item(tensor, item);
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        check_item(tensor, i);
    }
    fst_tensor *none;
    CHECK_INT(fst_loader_next(loader, -1, &none, NULL), FST_END);
    fst_load_stats stats = stats_of(loader);
    CHECK(stats.buffer_bytes_peak <= budget);
    // Each item with the stream; and some once more by itself.
    const uint64_t once = FILE_COUNT * (2 * BOX_BYTES + CUBE_READ_BYTES);
    CHECK(stats.bytes_read > once && stats.bytes_read <= 2 * once);
    fst_loader_close(loader);
    for (size_t i = 0; i < FILE_COUNT; i++) CHECK(is_box(columns[i], 1));
}
