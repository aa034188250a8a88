// SPDX-License-Identifier: Apache-2.0
/// Saves to relative paths and through links, while the program changes its working folder or the
/// links: the paths are resolved when the save is opened.
#include <fastsafetensors.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors/experimental.h"
#include "fixture.h"
#include "save_fixture.h"

static const uint64_t shape_64[] = {64};

/// Two folders with the same names in them; the program works in the first one.
static void make_folders(const char *first, const char *second) {
    mkdir(fixture_path(first), 0700);
    mkdir(fixture_path(second), 0700);
    if (chdir(fixture_path(first)) != 0) abort();
}

static fst_status save_values(const char *path, char value, fst_save_options *options) {
    char bytes[64];
    memset(bytes, value, sizeof bytes);
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape_64, bytes);
    return fst_save(path, &tensor, 1, options, NULL, NULL);
}

/// Opens a save of two tensors in the first folder and changes to the second one.
static fst_writer *open_and_leave(const char *path, fst_save_options *options, const char *second) {
    static char bytes[64];
    memset(bytes, 'n', sizeof bytes);
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_64, bytes),
                                 save_tensor_of("b", FST_DTYPE_U8, shape_64, bytes)};
    tensors[1].file_index = options->file_count > 1;
    fst_writer *writer = NULL;
    if (fst_writer_open(path, tensors, 2, options, &writer, NULL) != FST_OK) return NULL;
    if (chdir(fixture_path(second)) != 0) abort();
    return writer;
}

/// A mistyped scheme is not the name of a folder, and its password is not shown.
TEST(urls_of_other_schemes_are_no_folders)
{
    static const char *const urls[] = {"s3a://bucket/m", "gcs://bucket/m.safetensors",
                                       "ftp://user:secret@host/m?token=secret",
                                       " s3://user:secret@bucket/m"};
    static const uint64_t shape[] = {4};
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape, "1234");
    fst_error error;
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++)
        for (uint32_t files = 0; files < 2; files++) {
            fst_save_options options = FST_STRUCT_INIT(fst_save_options);
            fst_async_options later = FST_STRUCT_INIT(fst_async_options);
            fst_async_save *save;
            options.file_count = files;
            later.save = &options;
            CHECK_INT(fst_save(urls[i], &tensor, 1, &options, NULL, &error), FST_E_UNSUPPORTED);
            CHECK(strstr(error.message, "secret") == NULL);
            CHECK_INT(fst_async_save_start(urls[i], &tensor, 1, &later, &save, &error),
                      FST_E_UNSUPPORTED);
            CHECK(strstr(error.message, "secret") == NULL);
        }
    fst_async_save *save;
    CHECK_INT(fst_async_save_start("", &tensor, 1, NULL, &save, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_async_save_start("s3:/bucket/m", &tensor, 1, NULL, &save, &error),
              FST_E_UNSUPPORTED);
    CHECK_INT(fst_async_save_start("s3://user:secret@bucket/m", &tensor, 1, NULL, &save, &error),
              FST_E_ARGUMENT);
    CHECK(strstr(error.message, "secret") == NULL);
}

TEST(file_is_saved_relative_to_the_folder_at_open)
{
    fst_save_options options = save_options_of();
    make_folders("one", "two");
    CHECK_INT(save_values("model.safetensors", 'o', NULL), FST_OK);
    CHECK_INT(save_values(fixture_path("two/model.safetensors"), 'k', NULL), FST_OK);
    options.manifest = "sums.manifest";
    fst_writer *writer = open_and_leave("model.safetensors", &options, "two");
    CHECK(writer != NULL);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    CHECK_TEXT(fst_writer_path(writer, 0), fixture_path("one/model.safetensors"));
    fst_writer_close(writer);
    CHECK_INT(save_set_value("two", 1), 'k');
    CHECK_INT(save_set_value("one", 2), 'n');
    CHECK_INT(save_entry_count("two"), 1);
    CHECK_INT(access(fixture_path("one/sums.manifest"), F_OK), 0);
    CHECK_INT(save_hidden_count("one"), 0);
}

TEST(sharded_model_is_saved_relative_to_the_folder_at_open)
{
    fst_save_options options = save_options_of();
    make_folders("three", "four");
    for (int round = 0; round < 2; round++) {
        options.file_count = 2;
        CHECK_INT(chdir(fixture_path("three")), 0);
        fst_writer *writer = open_and_leave("set", &options, "four");
        CHECK(writer != NULL);
        CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
        fst_writer_close(writer);
        CHECK_INT(save_entry_count("four"), 0);
        CHECK_INT(save_set_value("three/set", 2), 'n');
        CHECK_INT(save_hidden_count("three/set"), 0);
    }
}

/// As operators do to point to another version of a model.
static void point_to(const char *link, const char *target) {
    char new_link[520];
    snprintf(new_link, sizeof new_link, "%s.new", fixture_path(link));
    if (symlink(target, new_link) != 0 || rename(new_link, fixture_path(link)) != 0) abort();
}

TEST(link_that_changes_does_not_move_a_save)
{
    // The path, what it is below the linked folder, and the number of files.
    static const struct {
        const char *path, *made;
        uint32_t files;
    } saves[] = {{"now/model.safetensors", "v1/model.safetensors", 1},
                 {"now/set", "v1/set", 2},
                 {"now", "v1", 2},
                 {"to_file.safetensors", "v1/f.safetensors", 1}};
    make_folders("v1", "v2");
    CHECK_INT(symlink("now/f.safetensors", fixture_path("to_file.safetensors")), 0);
    for (size_t i = 0; i < sizeof saves / sizeof *saves; i++) {
        fst_save_options options = save_options_of();
        options.file_count = saves[i].files == 1 ? 0 : saves[i].files;
        point_to("now", "v1");
        fst_writer *writer = open_and_leave(fixture_path(saves[i].path), &options, "v2");
        CHECK(writer != NULL);
        point_to("now", "v2");
        CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
        fst_writer_close(writer);
        CHECK_INT(save_entry_count("v2"), 0);
        fst_model *model = NULL;
        CHECK_INT(fst_model_open(fixture_path(saves[i].made), NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_model_tensor_count(model), 2);
        fst_model_close(model);
    }
}

static int save_here(void *nothing) {
    (void)nothing;
    return save_values("model.safetensors", 'n', NULL) == FST_OK ? 0 : 1;
}

/// The absolute path of the working folder cannot be used there.
TEST(relative_saves_work_below_an_unsearchable_folder)
{
    make_folders("above", "above/below");
    CHECK_INT(chmod(fixture_path("above/below"), 0777), 0);
    CHECK_INT(chdir("below"), 0);
    CHECK_INT(chmod(fixture_path("above"), 0), 0);
    int made = fixture_as_other_user(save_here, NULL);
    CHECK_INT(chmod(fixture_path("above"), 0700), 0);
    CHECK(made <= 0); // -1: this process cannot change its user
    CHECK(made != 0 || access("model.safetensors", F_OK) == 0);
}

TEST(abandoned_save_removes_folders_it_created)
{
    fst_save_options options = save_options_of();
    make_folders("five", "six");
    mkdir(fixture_path("six/set"), 0700);
    options.file_count = 2;
    fst_writer *writer = open_and_leave("set", &options, "six");
    CHECK(writer != NULL);
    fst_writer_close(writer);
    CHECK_INT(save_entry_count("five"), 0);
    CHECK_INT(save_entry_count("six"), 1);
}

TEST(handed_over_paths_are_absolute)
{
    fst_save_options options = save_options_of();
    make_folders("seven", "eight");
    fst_writer *writer = open_and_leave("model.safetensors", &options, "eight");
    CHECK(writer != NULL);
    CHECK_INT(fst_writer_hand_over(writer, NULL), FST_OK);
    const char *hidden = fst_writer_hidden_path(writer, 0);
    CHECK_INT(access(hidden, F_OK), 0);
    CHECK_INT(fst_set_publish(fixture_path("seven"), &hidden, 1, NULL, NULL, NULL), FST_OK);
    fst_writer_close(writer);
    CHECK_INT(save_set_value("seven", 2), 'n');
    CHECK_INT(save_entry_count("eight"), 0);
}

/// A program that changes its working folder in a progress callback.
static int leave(void *folder, uint64_t bytes_done, uint64_t bytes_total, uint64_t tensors_done,
                 uint64_t tensors_total) {
    (void)bytes_done, (void)bytes_total, (void)tensors_done, (void)tensors_total;
    return chdir(folder);
}

/// -1: unreadable.
static int metadata_count_of(const char *path) {
    fst_model *model;
    fst_file_info info = {.struct_size = sizeof info, .metadata_count = 0};
    if (fst_model_open(fixture_path(path), NULL, &model, NULL) != FST_OK) return -1;
    fst_status status = fst_model_file_info(model, 0, &info, NULL);
    fst_model_close(model);
    return status == FST_OK ? (int)info.metadata_count : -1;
}

TEST(edit_after_chdir_changes_the_same_file)
{
    char second[512];
    fst_metadata_entry entry = save_entry_of("key", "value");
    fst_edit_options options = FST_STRUCT_INIT(fst_edit_options);
    make_folders("nine", "ten");
    snprintf(second, sizeof second, "%s", fixture_path("ten"));
    CHECK_INT(save_values("model.safetensors", 'o', NULL), FST_OK);
    CHECK_INT(save_values(fixture_path("ten/model.safetensors"), 'k', NULL), FST_OK);
    options.metadata = &entry;
    options.metadata_count = 1;
    options.progress = leave;
    options.progress_context = second;
    CHECK_INT(fst_header_edit("model.safetensors", NULL, &options, NULL, NULL), FST_OK);
    CHECK_INT(metadata_count_of("nine/model.safetensors"), 1);
    CHECK_INT(metadata_count_of("ten/model.safetensors"), 0);
    CHECK_INT(save_entry_count("nine"), 1);
}

TEST(compressed_file_is_saved_relative_to_the_folder_at_open)
{
    char second[512];
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    make_folders("eleven", "twelve");
    snprintf(second, sizeof second, "%s", fixture_path("twelve"));
    CHECK_INT(save_values("model.safetensors", 'o', NULL), FST_OK);
    options.progress = leave;
    options.progress_context = second;
    CHECK_INT(fst_file_compress("model.safetensors", "small.safetensors", &options, NULL, NULL),
              FST_OK);
    CHECK_INT(save_entry_count("twelve"), 0);
    CHECK_INT(save_entry_count("eleven"), 2);
}
