// SPDX-License-Identifier: Apache-2.0
/// Header edits: changed and unchanged fields, and errors. tests/unit/save/test_publish_faults.c
/// checks that a failed edit leaves the old file or the new one.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

#define TENSOR_BYTES ((uint64_t)100000)

static fst_edit_options edit_of(const fst_metadata_entry *metadata, size_t metadata_count) {
    return (fst_edit_options){.struct_size = sizeof(fst_edit_options),
                              .metadata = metadata,
                              .metadata_count = metadata_count};
}

static const char *metadata_of(const fst_model *model, const char *key) {
    fst_metadata_entry entry;
    for (size_t i = 0; fst_model_metadata(model, 0, i, &entry, NULL) == FST_OK; i++)
        if (strcmp(entry.key, key) == 0) return entry.value;
    return NULL;
}

/// Whether tensor `index` of fixture_tensors() has its bytes in the file.
static bool has_bytes(const char *path, const fst_model *model, size_t index) {
    static char bytes[TENSOR_BYTES];
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool whole = fst_model_tensor_info(model, index, &info, NULL) == FST_OK &&
                 pread(fd, bytes, sizeof bytes, (off_t)info.file_offset) == (ssize_t)sizeof bytes &&
                 fixture_matches(bytes, index * TENSOR_BYTES, TENSOR_BYTES);
    if (fd >= 0) close(fd);
    return whole;
}

TEST(metadata_is_set_and_deleted)
{
    const char *path = fixture_tensors("edit", 5, TENSOR_BYTES);
    fst_metadata_entry first[] = {save_entry_of("a", "1"), save_entry_of("b", "2")};
    fst_metadata_entry next[] = {save_entry_of("b", "two"), save_entry_of("c", "3"),
                                 save_entry_of("a", NULL), save_entry_of("nobody", NULL)};
    fst_edit_options options = edit_of(first, 2);
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_model *model;
    CHECK_INT(fst_header_edit(path, NULL, &options, &stats, NULL), FST_OK);
    CHECK_INT(stats.bytes_shared + stats.bytes_copied, 5 * TENSOR_BYTES);
    CHECK_INT(stats.bytes_total, 5 * TENSOR_BYTES + stats.bytes_written);
    options = edit_of(next, 4);
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK(metadata_of(model, "a") == NULL && metadata_of(model, "nobody") == NULL);
    CHECK_TEXT(metadata_of(model, "b"), "two");
    CHECK_TEXT(metadata_of(model, "c"), "3");
    CHECK_INT(fst_model_tensor_count(model), 5);
    for (size_t i = 0; i < 5; i++) CHECK(has_bytes(path, model, i));
    fst_model_close(model);
    options.clear_metadata = 1;
    options.metadata_count = 0;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK(metadata_of(model, "b") == NULL);
    fst_model_close(model);
}

/// The keys in a row, as the file has them.
static const char *keys_of(const char *path) {
    static char keys[64];
    fst_model *model;
    fst_metadata_entry entry;
    keys[0] = '\0';
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return "no model";
    for (size_t i = 0; fst_model_metadata(model, 0, i, &entry, NULL) == FST_OK; i++)
        strncat(keys, entry.key, sizeof keys - strlen(keys) - 1);
    fst_model_close(model);
    return keys;
}

TEST(edits_apply_in_order)
{
    const char *path = fixture_tensors("order", 1, 10);
    fst_metadata_entry first[] = {save_entry_of("a", "1"), save_entry_of("b", "2"),
                                  save_entry_of("c", "3"), save_entry_of("d", "4")};
    fst_metadata_entry next[] = {save_entry_of("b", NULL), save_entry_of("c", "x"),
                                 save_entry_of("a", NULL), save_entry_of("e", "5"),
                                 save_entry_of("a", "6"),  save_entry_of("a", "7"),
                                 save_entry_of("e", NULL), save_entry_of("f", NULL)};
    fst_edit_options options = edit_of(first, 4);
    fst_model *model;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
    CHECK_TEXT(keys_of(path), "abcd");
    options = edit_of(next, 8);
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
    CHECK_TEXT(keys_of(path), "cda");
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_TEXT(metadata_of(model, "a"), "7");
    CHECK_TEXT(metadata_of(model, "c"), "x");
    fst_model_close(model);
}

/// Where a file system shares blocks, their place in them must stay.
TEST(data_keeps_its_offset_within_a_block)
{
    const char *path = fixture_tensors("place", 2, TENSOR_BYTES);
    static char text[9000];
    fst_file_info before = FST_STRUCT_INIT(fst_file_info), after = FST_STRUCT_INIT(fst_file_info);
    fst_model *model;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_file_info(model, 0, &before, NULL), FST_OK);
    fst_model_close(model);
    for (size_t size = 0; size < sizeof text; size += 1111) {
        memset(text, 'x', size);
        text[size] = '\0';
        fst_metadata_entry entry = save_entry_of("text", text);
        fst_edit_options options = edit_of(&entry, 1);
        CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_model_file_info(model, 0, &after, NULL), FST_OK);
        CHECK_TEXT(metadata_of(model, "text"), text);
        CHECK_INT((after.header_bytes - before.header_bytes) % 4096, 0);
        CHECK(after.header_bytes < size + before.header_bytes + 4200);
        CHECK(has_bytes(path, model, 0) && has_bytes(path, model, 1));
        fst_model_close(model);
    }
}

TEST(tensors_are_renamed)
{
    const char *path = fixture_tensors("names", 3, TENSOR_BYTES);
    const char *copy = fixture_path("names-copy");
    fst_tensor_rename renames[] = {{"t0", SIZE_MAX, "t1", SIZE_MAX},
                                   {"t1", SIZE_MAX, "t0", SIZE_MAX},
                                   {"t2", SIZE_MAX, "last", 4}};
    fst_edit_options options = edit_of(NULL, 0);
    fst_error error;
    fst_model *model;
    size_t index;
    options.renames = renames;
    options.rename_count = 3;
    CHECK_INT(fst_header_edit(path, copy, &options, NULL, NULL), FST_OK);
    CHECK_INT(fst_model_open(copy, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_find(model, "t1", SIZE_MAX, &index, NULL), FST_OK);
    CHECK(index == 0 && has_bytes(copy, model, 0));
    CHECK_INT(fst_model_find(model, "last", SIZE_MAX, &index, NULL), FST_OK);
    CHECK(index == 2 && has_bytes(copy, model, 2));
    fst_model_close(model);
    CHECK_INT(fst_header_edit(copy, NULL, &options, NULL, &error), FST_E_TENSOR_NOT_FOUND);
    CHECK_TEXT(error.tensor, "t2");
    renames[0].to = "t2";
    options.rename_count = 1;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "duplicate tensor name");
    renames[0].to = "one";
    renames[1] = (fst_tensor_rename){"t0xxx", 2, "two", SIZE_MAX};
    options.rename_count = 2;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "two new names");
    CHECK_TEXT(error.tensor, "t0");
}

TEST(indexed_tensor_names_cannot_be_changed)
{
    static const uint64_t shape[] = {3};
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape, "123"),
                                 save_tensor_of("b", FST_DTYPE_U8, shape, "456")};
    fst_save_options save = save_options_of();
    fst_error error;
    save.file_count = 2;
    tensors[1].file_index = 1;
    CHECK_INT(fst_save(fixture_path("set"), tensors, 2, &save, NULL, NULL), FST_OK);
    fst_tensor_rename rename = {"a", SIZE_MAX, "c", SIZE_MAX};
    fst_metadata_entry entry = save_entry_of("k", "v");
    fst_edit_options options = edit_of(&entry, 1);
    const char *shard = fixture_path("set/model-00001-of-00002.safetensors");
    CHECK_INT(fst_header_edit(shard, NULL, &options, NULL, NULL), FST_OK);
    CHECK_INT(fst_header_edit(fixture_path("set"), NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "a sharded model");
    options.renames = &rename;
    options.rename_count = 1;
    CHECK_INT(fst_header_edit(shard, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "an index in the folder lists this file");
    CHECK_INT(fst_header_edit(shard, fixture_path("alone"), &options, NULL, NULL), FST_OK);
}

static const char *index_file(const char *name, const char *shard) {
    char text[256];
    int size = snprintf(text, sizeof text, "{\"weight_map\":{\"t0\":\"%s\"}}", shard);
    return fixture_file(name, text, (size_t)size);
}

static fst_status rename_first(const char *path, const char *target) {
    fst_tensor_rename rename = {"t0", SIZE_MAX, "c", SIZE_MAX};
    fst_edit_options options = edit_of(NULL, 0);
    options.renames = &rename;
    options.rename_count = 1;
    return fst_header_edit(path, target, &options, NULL, NULL);
}

/// Creates a folder for each path by which an index can refer to a file.
static void make_folders(void) {
    static const char *const names[] = {"blobs", "snap", "dot", "up", "up/sub", "over", "linked"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK_INT(mkdir(fixture_path(names[i]), 0777), 0);
}

TEST(indexed_names_are_found_through_links)
{
    make_folders();
    // As in the Hub's cache, where names are links to blobs.
    const char *blob = fixture_tensors("blobs/x1", 1, 10);
    CHECK_INT(symlink("../blobs/x1", fixture_path("snap/f.safetensors")), 0);
    const char *index = index_file("snap/model.safetensors.index.json", "f.safetensors");
    CHECK_INT(rename_first(fixture_path("snap/f.safetensors"), NULL), FST_E_ARGUMENT);
    CHECK_INT(rename_first(blob, fixture_path("snap/f.safetensors")), FST_E_ARGUMENT);
    CHECK_INT(rename_first(index, NULL), FST_E_ARGUMENT);
    const char *dot = fixture_tensors("dot/f.safetensors", 1, 10);
    index_file("dot/model.safetensors.index.json", "./f.safetensors");
    CHECK_INT(rename_first(dot, NULL), FST_E_ARGUMENT);
    const char *sub = fixture_tensors("up/sub/f", 1, 10);
    index_file("up/any.safetensors.index.fp16.json", "sub/f");
    CHECK_INT(rename_first(sub, NULL), FST_E_ARGUMENT);
    CHECK_INT(rename_first(fixture_path("blobs/x1"), fixture_path("up/sub/../sub/f")),
              FST_E_ARGUMENT);
    // A folder that is a link, seen from where the link is.
    fixture_tensors("linked/f", 1, 10);
    CHECK_INT(symlink("../linked", fixture_path("over/way")), 0);
    index_file("over/my.index.json", "way/f");
    CHECK_INT(rename_first(fixture_path("over/way/f"), NULL), FST_E_ARGUMENT);
    CHECK_INT(rename_first(fixture_path("linked/f"), NULL), FST_OK);
}

TEST(index_of_other_files_does_not_block_an_edit)
{
    CHECK_INT(mkdir(fixture_path("else"), 0777), 0);
    const char *path = fixture_tensors("else/f", 1, 10);
    fixture_tensors("else/g", 1, 10);
    const char *index = index_file("else/model.index.json", "g");
    fixture_file("else/notes.index.json", "no index", 8);
    CHECK_INT(rename_first(index, fixture_path("else/h")), FST_OK);
    CHECK_INT(rename_first(path, NULL), FST_OK);
    // A missing file that an index names.
    CHECK_INT(unlink(fixture_path("else/g")), 0);
    CHECK_INT(rename_first(fixture_tensors("else/i", 1, 10), fixture_path("else/g")),
              FST_E_ARGUMENT);
}

static mode_t mode_of(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? info.st_mode & 07777 : 0;
}

TEST(edit_keeps_permissions)
{
    const char *path = fixture_tensors("private", 1, 10);
    const char *copy = fixture_path("private-copy");
    CHECK_INT(chmod(path, 0600), 0);
    CHECK_INT(fst_header_edit(path, copy, NULL, NULL, NULL), FST_OK);
    CHECK_INT(mode_of(copy), 0600);
    CHECK_INT(chmod(copy, 0640), 0);
    CHECK_INT(fst_header_edit(path, copy, NULL, NULL, NULL), FST_OK);
    CHECK_INT(mode_of(copy), 0640);
}

TEST(empty_metadata_is_kept)
{
    static const char json[] = "{\"__metadata__\":{},"
                               "\"t0\":{\"dtype\":\"U8\",\"shape\":[10],\"data_offsets\":[0,10]}}";
    const char *path = fixture_model("empty-metadata", json, 10);
    fst_edit_options options = edit_of(NULL, 0);
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    fst_model *model;
    for (int clear = 0; clear < 2; clear++) {
        options.clear_metadata = clear;
        CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_OK);
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_model_file_info(model, 0, &info, NULL), FST_OK);
        CHECK_INT(info.has_metadata, 1);
        fst_model_close(model);
    }
}

#define EDIT_COUNT 150

/// Sets keys "<who>0", "<who>1", ... and repeats each edit that lost a race against another one.
static int set_keys(const char *path, char who) {
    for (int i = 0; i < EDIT_COUNT;) {
        char key[16];
        snprintf(key, sizeof key, "%c%d", who, i);
        fst_metadata_entry entry = save_entry_of(key, "v");
        fst_edit_options options = edit_of(&entry, 1);
        fst_status status = fst_header_edit(path, NULL, &options, NULL, NULL);
        if (status == FST_OK)
            i++;
        else if (status != FST_E_FILE_CHANGED)
            return 1;
    }
    return 0;
}

TEST(concurrent_edits_are_all_applied)
{
    char path[512];
    snprintf(path, sizeof path, "%s", fixture_tensors("shared", 1, 10));
    CHECK_INT(symlink(path, fixture_path("shared-link")), 0);
    int ended = -1, lost = 0;
    pid_t child = fork();
    if (child == 0) _exit(set_keys(fixture_path("shared-link"), 'a'));
    CHECK_INT(set_keys(path, 'b'), 0);
    CHECK_INT(waitpid(child, &ended, 0), child);
    CHECK_INT(ended, 0);
    fst_model *model;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    for (int i = 0; i < 2 * EDIT_COUNT; i++) {
        char key[16];
        snprintf(key, sizeof key, "%c%d", "ab"[i % 2], i / 2);
        lost += metadata_of(model, key) == NULL;
    }
    CHECK_INT(lost, 0);
    fst_model_close(model);
}

static int replace_file(void *context, uint64_t done, uint64_t total, size_t tensors, size_t all) {
    (void)done, (void)total, (void)tensors, (void)all;
    return rename(fixture_path("other"), context) == 0 ? 0 : 1;
}

static int stop(void *context, uint64_t done, uint64_t total, size_t tensors, size_t all) {
    (void)context, (void)done, (void)total, (void)tensors, (void)all;
    return 1;
}

static int tell_parent(void *context, uint64_t done, uint64_t total, size_t tensors, size_t all) {
    (void)done, (void)total, (void)tensors, (void)all;
    return write(*(int *)context, "", 1) == 1 ? 0 : 1;
}

/// The file is compared with its earlier state under the lock that is held to replace it.
TEST(edit_waits_for_a_concurrent_replacement)
{
    char path[512], byte;
    int ends[2], ended = -1;
    CHECK_INT(mkdir(fixture_path("locked"), 0777), 0);
    snprintf(path, sizeof path, "%s", fixture_tensors("locked/f", 1, 10));
    fixture_tensors("other", 1, 10);
    int lock = open(fixture_path("locked"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(flock(lock, LOCK_EX) == 0 && pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        fst_edit_options options = edit_of(NULL, 0);
        options.progress = tell_parent;
        options.progress_context = &ends[1];
        _exit((int)fst_header_edit(path, NULL, &options, NULL, NULL));
    }
    CHECK_INT(read(ends[0], &byte, 1), 1);
    usleep(100000); // an edit that does not wait for the lock has ended by then
    CHECK_INT(rename(fixture_path("other"), path), 0);
    flock(lock, LOCK_UN);
    CHECK_INT(waitpid(child, &ended, 0), child);
    CHECK_INT(WEXITSTATUS(ended), FST_E_FILE_CHANGED);
    close(lock);
    close(ends[0]);
    close(ends[1]);
}

TEST(edit_of_a_file_changed_meanwhile_is_refused)
{
    char path[512];
    snprintf(path, sizeof path, "%s", fixture_tensors("replaced", 1, TENSOR_BYTES));
    fst_metadata_entry entry = save_entry_of("k", "v");
    fst_edit_options options = edit_of(&entry, 1);
    fst_error error;
    struct stat before, after;
    options.progress = stop;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_CANCELLED);
    CHECK_INT(stat(fixture_tensors("other", 2, TENSOR_BYTES), &before), 0);
    options.progress = replace_file;
    options.progress_context = path;
    fst_status status = fst_header_edit(path, NULL, &options, NULL, &error);
    CHECK(status == FST_E_FILE_CHANGED || status == FST_E_CANCELLED);
    CHECK_INT(stat(path, &after), 0);
    CHECK_INT(after.st_ino, before.st_ino);
    CHECK_INT(save_hidden_count("."), 0);
}

TEST(arguments_are_checked)
{
    const char *path = fixture_tensors("arguments", 1, 10);
    fst_metadata_entry entry = save_entry_of(NULL, "v");
    fst_edit_options options = edit_of(&entry, 1);
    fst_tensor_rename rename = {"t0", SIZE_MAX, NULL, 0};
    fst_error error;
    CHECK_INT(fst_header_edit(NULL, NULL, NULL, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "lacks its key");
    entry = save_entry_of("\xff", "v");
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "not UTF-8");
    options = edit_of(NULL, 1);
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_E_ARGUMENT);
    options = edit_of(NULL, 0);
    options.renames = &rename;
    options.rename_count = 1;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "lacks a name");
    CHECK_INT(fst_header_edit(fixture_path("nothing"), NULL, NULL, NULL, NULL), FST_E_NOT_FOUND);
    options.promise = (fst_save_promise)7;
    CHECK_INT(fst_header_edit(path, NULL, &options, NULL, NULL), FST_E_ARGUMENT);
    // An edit without changes makes a copy.
    CHECK_INT(fst_header_edit(path, NULL, NULL, NULL, NULL), FST_OK);
}
