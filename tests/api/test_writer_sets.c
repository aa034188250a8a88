// SPDX-License-Identifier: Apache-2.0
/// Saves of sets of files through the public header.
#include <fastsafetensors.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

static const uint64_t shape_3[] = {3}, shape_64[] = {64};

TEST(shard_plan_equals_hugging_face)
{
    const struct {
        uint64_t sizes[6], groups[6];
        size_t count;
        uint32_t files[6], file_count;
    } rows[] = {
        {{4, 20, 4, 4}, {0}, 4, {1, 0, 1, 2}, 3},
        {{4, 8, 2}, {0}, 3, {0, 1, 1}, 2},
        {{4, 8, 2, 1}, {7, 0, 7, 0}, 4, {0, 1, 0, 1}, 2},
        {{20}, {0}, 1, {0}, 1},
        {{4, 0}, {0}, 2, {0, 0}, 1},
        {{4, 10, 6, 11, 1}, {0}, 5, {0, 1, 3, 2, 3}, 4},
        {{0}, {0}, 0, {0}, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint32_t files[6], file_count;
        fst_shard_item items[6] = {0};
        for (size_t s = 0; s < 6; s++) {
            items[s].size_bytes = rows[i].sizes[s];
            items[s].group = rows[i].groups[s];
        }
        CHECK_INT(fst_shards_assign(items, rows[i].count, 10, files, &file_count, NULL), FST_OK);
        CHECK_INT(file_count, rows[i].file_count);
        for (size_t t = 0; t < rows[i].count; t++) CHECK_INT(files[t], rows[i].files[t]);
    }
    CHECK_INT(fst_shards_assign(NULL, 1, 10, NULL, NULL, NULL), FST_E_ARGUMENT);
}

/// A set of `file_count` files with `tensor_count` tensors; byte `value` everywhere.
static fst_status save_set(const char *folder, uint32_t file_count, char value,
                           fst_save_promise promise) {
    static char bytes[64];
    char names[8][8];
    fst_save_tensor tensors[8];
    memset(bytes, value, sizeof bytes);
    for (uint32_t i = 0; i < 8; i++) {
        snprintf(names[i], sizeof names[i], "t%u", i);
        tensors[i] = save_tensor_of(names[i], FST_DTYPE_U8, shape_64, bytes);
        tensors[i].file_index = i % file_count;
    }
    fst_save_options options = save_options_of();
    options.file_count = file_count;
    options.promise = promise;
    return fst_save(fixture_path(folder), tensors, 8, &options, NULL, NULL);
}

TEST(sharded_save_replaces_the_old_model_entirely)
{
    static const uint32_t counts[] = {3, 3, 2, 1, 1, 4, 1};
    for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT; promise++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            char value = (char)('a' + i);
            CHECK_INT(save_set("sets/deep", counts[i], value, (fst_save_promise)promise), FST_OK);
            CHECK_INT(save_set_value("sets/deep", 8), value);
            CHECK_INT(save_entry_count("sets/deep"), counts[i] == 1 ? 1 : (int)counts[i] + 1);
        }
    CHECK_INT(access(fixture_path("sets/deep/model.safetensors"), F_OK), 0);
}

TEST(unrelated_files_are_kept)
{
    CHECK_INT(save_set("mixed", 2, 'a', FST_SAVE_QUICK), FST_OK);
    fixture_file("mixed/config.json", "{}", 2);
    fixture_file("mixed/other-00001-of-00002.safetensors", "x", 1);
    fixture_file("mixed/model-1-of-2.safetensors", "x", 1);
    CHECK_INT(save_set("mixed", 3, 'b', FST_SAVE_QUICK), FST_OK);
    CHECK_INT(save_set_value("mixed", 8), 'b');
    CHECK_INT(save_entry_count("mixed"), 4 + 3);
}

static int rights_of(const char *name) {
    struct stat info;
    return stat(fixture_path(name), &info) == 0 ? (int)(info.st_mode & 07777) : -1;
}

TEST(sharded_model_keeps_permissions)
{
    CHECK_INT(save_set("secret", 2, 'a', FST_SAVE_QUICK), FST_OK);
    CHECK_INT(chmod(fixture_path("secret/model-00001-of-00002.safetensors"), 0644), 0);
    CHECK_INT(chmod(fixture_path("secret/model-00002-of-00002.safetensors"), 0600), 0);
    CHECK_INT(save_set("secret", 3, 'b', FST_SAVE_QUICK), FST_OK);
    CHECK_INT(rights_of("secret/model-00001-of-00003.safetensors"), 0600);
    CHECK_INT(rights_of("secret/model-00003-of-00003.safetensors"), 0600);
    CHECK_INT(save_set("secret", 1, 'c', FST_SAVE_QUICK), FST_OK);
    CHECK_INT(rights_of("secret/model.safetensors"), 0600);
    CHECK_INT(save_set("secret", 2, 'd', FST_SAVE_QUICK), FST_OK);
    CHECK_INT(rights_of("secret/model-00001-of-00002.safetensors"), 0600);
    CHECK_INT(save_set_value("secret", 8), 'd');
}

TEST(leftovers_with_long_names_are_removed)
{
    char stem[216], hidden[300];
    memset(stem, 's', 215);
    stem[215] = '\0';
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz");
    fst_save_options options = save_options_of();
    options.file_count = 1;
    options.stem = stem;
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    CHECK_INT(fst_save(fixture_path("long"), &tensor, 1, &options, NULL, NULL), FST_OK);
    // Names are cut where they are hidden: 200 bytes of them.
    snprintf(hidden, sizeof hidden, "long/.%.200s.0123456789abcdef.tmp", stem);
    fixture_file(hidden, "x", 1);
    fixture_file("long/.t.safetensors.0123456789abcdef.tmp", "x", 1); // of another target
    CHECK_INT(fst_save(fixture_path("long"), &tensor, 1, &options, &stats, NULL), FST_OK);
    CHECK_INT(stats.leftover_count, 1);
    CHECK_INT(save_hidden_count("long"), 1);
}

TEST(index_equals_hugging_face)
{
    fst_save_tensor tensors[] = {
        save_tensor_of("b\xc3\xa9\xf0\x9f\x98\x80\x7f", FST_DTYPE_U8, shape_3, "xyz"),
        save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz")};
    tensors[0].file_index = 1;
    fst_save_options options = save_options_of();
    options.file_count = 2;
    options.stem = "diffusion";
    fst_writer *writer;
    CHECK_INT(fst_writer_open(fixture_path("hf"), tensors, 2, &options, &writer, NULL), FST_OK);
    CHECK_CONTAINS(fst_writer_path(writer, 0), "/diffusion-00001-of-00002.safetensors");
    CHECK_CONTAINS(fst_writer_path(writer, 2), "/diffusion.safetensors.index.json");
    CHECK(fst_writer_path(writer, 3) == NULL);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    fst_writer_close(writer);
    static const char expected[] =
        "{\n  \"metadata\": {\n    \"total_size\": 6\n  },\n  \"weight_map\": {\n"
        "    \"a\": \"diffusion-00001-of-00002.safetensors\",\n"
        "    \"b\\u00e9\\ud83d\\ude00\\u007f\": \"diffusion-00002-of-00002.safetensors\"\n  }\n}\n";
    CHECK(save_file_holds("hf/diffusion.safetensors.index.json", expected, sizeof expected - 1));
}

TEST(duplicate_names_in_a_sharded_model_are_refused)
{
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz"),
                                 save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz")};
    tensors[1].file_index = 1;
    fst_save_options options = save_options_of();
    options.file_count = 2;
    fst_error error;
    CHECK_INT(fst_save(fixture_path("twice"), tensors, 2, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_TEXT(error.tensor, "a");
}
