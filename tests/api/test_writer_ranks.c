// SPDX-License-Identifier: Apache-2.0
/// Sets written by several processes: handed over, joined, published.
/// tests/unit/save/test_publish_faults.c lets each call fail.
#include <fastsafetensors.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

static const uint64_t shape_64[] = {64};

/// Writes a file of one tensor and hands it over; NULL on failure.
static fst_writer *open_rank(const char *path, const char *name, const char *bytes) {
    fst_writer *writer;
    fst_save_tensor tensor = save_tensor_of(name, FST_DTYPE_U8, shape_64, bytes);
    fst_save_options options = save_options_of();
    options.replace_link = 1;
    if (fst_writer_open(fixture_path(path), &tensor, 1, &options, &writer, NULL) != FST_OK)
        return NULL;
    bool is_hidden = fst_writer_hidden_path(writer, 0) == NULL;
    if (fst_writer_hand_over(writer, NULL) != FST_OK || !is_hidden ||
        fst_writer_hidden_path(writer, 0) == NULL || fst_writer_hidden_path(writer, 1) != NULL) {
        fst_writer_close(writer);
        return NULL;
    }
    return writer;
}

static fst_status save_ranks(const char *folder, char value, const fst_publish_options *options,
                             fst_save_stats *stats, fst_error *error) {
    char bytes[64];
    memset(bytes, value, sizeof bytes);
    char paths[2][64];
    for (size_t i = 0; i < 2; i++)
        snprintf(paths[i], sizeof paths[i], "%s/model-0000%zu-of-00002.safetensors", folder, i + 1);
    fst_writer *first = open_rank(paths[0], "a", bytes), *second = open_rank(paths[1], "b", bytes);
    const char *hidden[] = {fst_writer_hidden_path(first, 0), fst_writer_hidden_path(second, 0)};
    fst_status status = fst_set_publish(fixture_path(folder), hidden, 2, options, stats, error);
    fst_writer_close(first);
    fst_writer_close(second);
    return status;
}

TEST(files_of_ranks_become_a_sharded_model)
{
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    mkdir(fixture_path("ranks"), 0700);
    CHECK_INT(save_ranks("ranks", 'x', NULL, &stats, NULL), FST_OK);
    CHECK_INT(stats.file_count, 2);
    CHECK_INT(stats.tensor_count, 2);
    CHECK(stats.bytes_total > 128);
    CHECK_INT(save_set_value("ranks", 2), 'x');
    CHECK_INT(save_entry_count("ranks"), 3);
    CHECK_INT(save_hidden_count("ranks"), 0);
    fst_publish_options options = FST_STRUCT_INIT(fst_publish_options);
    options.promise = FST_SAVE_DURABLE;
    CHECK_INT(save_ranks("ranks", 'y', &options, &stats, NULL), FST_OK);
    CHECK(stats.sync_count >= 4);
    CHECK_INT(save_set_value("ranks", 2), 'y');
    CHECK_INT(save_hidden_count("ranks"), 0);
    // An existing index is replaced, even if none was requested.
    options.names_only = 1;
    CHECK_INT(save_ranks("ranks", 'z', &options, &stats, NULL), FST_OK);
    CHECK_INT(save_entry_count("ranks"), 3);
    unlink(fixture_path("ranks/model.safetensors.index.json"));
    CHECK_INT(save_ranks("ranks", 'w', &options, &stats, NULL), FST_OK);
    CHECK_INT(save_entry_count("ranks"), 2);
    CHECK_INT(save_set_value("ranks", 2), 'w');
}

TEST(unpublished_files_are_deleted_with_the_writer)
{
    static const char bytes[64] = {0};
    mkdir(fixture_path("back"), 0700);
    fst_writer *writer = open_rank("back/model-00001-of-00002.safetensors", "a", bytes);
    CHECK_INT(save_hidden_count("back"), 1);
    CHECK_INT(fst_writer_hand_over(writer, NULL), FST_OK); // once more changes nothing
    size_t count;
    CHECK_INT(fst_leftovers_remove(fixture_path("back"), &count, NULL, NULL), FST_OK);
    CHECK_INT(count, 0); // the process that made it still runs
    fst_writer_close(writer);
    CHECK_INT(save_entry_count("back"), 0);

    // An index refers to it: a save was killed while it published.
    writer = open_rank("back/model-00001-of-00001.safetensors", "a", bytes);
    const char *name = strrchr(fst_writer_hidden_path(writer, 0), '/') + 1;
    FILE *index = fopen(fixture_path("back/model.safetensors.index.json"), "we");
    fprintf(index, "{\"weight_map\":{\"a\":\"%s\"}}", name);
    fclose(index);
    fst_writer_close(writer);
    CHECK_INT(save_hidden_count("back"), 1);
    unlink(fixture_path("back/model.safetensors.index.json"));
    CHECK_INT(fst_leftovers_remove(fixture_path("back"), &count, NULL, NULL), FST_OK);
    CHECK_INT(count, 1);
}

TEST(only_handed_over_files_are_published)
{
    static const char bytes[64] = {0};
    fst_error error;
    mkdir(fixture_path("here"), 0700);
    mkdir(fixture_path("there"), 0700);
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape_64, bytes);
    CHECK_INT(fst_save(fixture_path("here/mine.safetensors"), &tensor, 1, NULL, NULL, NULL),
              FST_OK);
    const char *mine[] = {fixture_path("here/mine.safetensors")};
    CHECK_INT(fst_set_publish(fixture_path("here"), mine, 1, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK(strstr(error.message, "returned by fst_writer_hand_over") != NULL);
    CHECK_INT(access(fixture_path("here/mine.safetensors"), F_OK), 0);

    fst_writer *writer = open_rank("there/model.safetensors", "a", bytes);
    const char *elsewhere[] = {fst_writer_hidden_path(writer, 0)};
    CHECK_INT(fst_set_publish(fixture_path("here"), elsewhere, 1, NULL, NULL, &error),
              FST_E_ARGUMENT);
    CHECK(strstr(error.message, "not in the folder") != NULL);
    // A file that is given twice. It has no tensors, so these do not give it away.
    fst_writer *empty = NULL;
    CHECK_INT(fst_writer_open(fixture_path("there/empty.safetensors"), NULL, 0, NULL, &empty, NULL),
              FST_OK);
    CHECK_INT(fst_writer_hand_over(empty, NULL), FST_OK);
    const char *repeated[] = {fst_writer_hidden_path(empty, 0), fst_writer_hidden_path(empty, 0)};
    CHECK_INT(fst_set_publish(fixture_path("there"), repeated, 2, NULL, NULL, &error),
              FST_E_ARGUMENT);
    CHECK(strstr(error.message, "given twice") != NULL);
    fst_writer_close(empty);
    // The same tensor twice: nothing is published, and the temporary files are deleted.
    fst_writer *other = open_rank("there/model-2.safetensors", "a", bytes);
    const char *twice[] = {fst_writer_hidden_path(writer, 0), fst_writer_hidden_path(other, 0)};
    CHECK_INT(fst_set_publish(fixture_path("there"), twice, 2, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK(strcmp(error.tensor, "a") == 0);
    fst_writer_close(writer);
    fst_writer_close(other);
    CHECK_INT(save_entry_count("there"), 0);
    // A file that was deleted.
    const char *gone[] = {fixture_path("there/.model.safetensors.0123456789abcdef.tmp")};
    CHECK_INT(fst_set_publish(fixture_path("there"), gone, 1, NULL, NULL, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_set_publish(fixture_path("there"), gone, 0, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_set_publish(NULL, gone, 1, NULL, NULL, &error), FST_E_ARGUMENT);
    fst_publish_options options = FST_STRUCT_INIT(fst_publish_options);
    options.stem = "a/b";
    CHECK_INT(fst_set_publish(fixture_path("there"), gone, 1, &options, NULL, &error),
              FST_E_ARGUMENT);
}

/// Two tensors in a file each, without their bytes.
static fst_writer *make_parts(const char *folder, fst_save_promise promise) {
    fst_writer *maker;
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_64, NULL),
                                 save_tensor_of("b", FST_DTYPE_U8, shape_64, NULL)};
    tensors[1].file_index = 1;
    fst_save_options options = save_options_of();
    options.file_count = 2;
    options.others_write = 1;
    options.promise = promise;
    if (fst_writer_open(fixture_path(folder), tensors, 2, &options, &maker, NULL) != FST_OK)
        return NULL;
    if (fst_writer_hand_over(maker, NULL) == FST_OK) return maker;
    fst_writer_close(maker);
    return NULL;
}

/// In its own process: half of a file's bytes, by write or mapping.
static int write_half(const char *path, size_t half, bool by_map) {
    pid_t child = fork();
    if (child == 0) {
        char bytes[32];
        fst_writer *part;
        void *memory;
        memset(bytes, 'p', sizeof bytes);
        fst_save_options options = FST_STRUCT_INIT(fst_save_options);
        options.promise = FST_SAVE_DURABLE;
        if (fst_writer_join(path, &options, &part, NULL) != FST_OK) _exit(1);
        if (by_map && fst_writer_map(part, 0, &memory, NULL) != FST_OK) _exit(2);
        if (by_map) memcpy((char *)memory + 32 * half, bytes, 32);
        if (!by_map && fst_writer_write(part, 0, 32 * half, bytes, 32, NULL) != FST_OK) _exit(3);
        if (fst_writer_hand_over(part, NULL) != FST_E_ARGUMENT) _exit(4);
        if (fst_writer_commit(part, NULL) != FST_E_ARGUMENT) _exit(5);
        if (fst_writer_finish(part, NULL) != FST_OK) _exit(6);
        fst_writer_close(part);
        _exit(access(path, F_OK) == 0 ? 0 : 7);
    }
    int status;
    waitpid(child, &status, 0);
    return status;
}

TEST(other_ranks_write_parts_of_a_file)
{
    for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT; promise++) {
        fst_writer *maker = make_parts("parts", (fst_save_promise)promise);
        for (uint32_t file = 0; file < 2; file++)
            for (size_t half = 0; half < 2; half++)
                CHECK_INT(write_half(fst_writer_hidden_path(maker, file), half, half == 1), 0);
        CHECK_INT(fst_writer_commit(maker, NULL), FST_OK);
        fst_writer_close(maker);
        CHECK_INT(save_set_value("parts", 2), 'p');
        CHECK_INT(save_entry_count("parts"), 3);
        CHECK_INT(save_hidden_count("parts"), 0);
    }
    fst_writer_close(make_parts("new", FST_SAVE_QUICK)); // another process gave up
    CHECK_INT(access(fixture_path("new"), F_OK), -1);
    CHECK_INT(save_set_value("parts", 2), 'p');
}

TEST(missing_bytes_are_refused_unless_the_file_was_handed_over)
{
    fst_error error = {0};
    fst_writer *writer;
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape_64, NULL);
    fst_save_options options = save_options_of();
    const char *path = fixture_path("alone.safetensors");
    char bytes[64] = {0};
    options.others_write = 1;
    CHECK_INT(fst_save(path, &tensor, 1, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "never written");
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_write(writer, 0, 0, bytes, 32, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "bytes 32 to 64");
    CHECK_INT(fst_writer_write(writer, 0, 32, bytes, 32, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "is committed");
    fst_writer_close(writer);
    // A finished file can still be handed over.
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_finish(writer, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "never written");
    CHECK_INT(fst_writer_hand_over(writer, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    fst_writer_close(writer);
}

/// Hands a file over in a process that ends at once; its path is in `path`.
static void hand_over_and_end(char *path, size_t size) {
    int ends[2];
    if (pipe(ends) != 0) abort();
    pid_t child = fork();
    if (child == 0) {
        fst_writer *maker = make_parts("ended", FST_SAVE_QUICK);
        const char *hidden = maker == NULL ? "" : fst_writer_hidden_path(maker, 0);
        _exit(write(ends[1], hidden, strlen(hidden) + 1) > 1 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (read(ends[0], path, size) <= 1) abort();
    close(ends[0]);
    close(ends[1]);
}

static void check_join(const char *path, const char *text) {
    fst_writer *part;
    fst_error error = {0};
    CHECK_INT(fst_writer_join(path, NULL, &part, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, text);
    CHECK(part == NULL && access(path, F_OK) == 0);
}

TEST(only_files_that_a_running_process_shares_are_joined)
{
    char copy[4096], ended[4096];
    fst_writer *part, *writer, *maker = make_parts("shared", FST_SAVE_QUICK);
    fst_error error;
    snprintf(copy, sizeof copy, "%s", fixture_path("shared/.m.0123456789abcdef.tmp"));
    CHECK_INT(rename(fixture_tensors("plain", 1, 64), copy), 0);
    check_join(copy, "no running save owns the file");
    int fd = open(copy, O_RDONLY | O_CLOEXEC);
    CHECK_INT(flock(fd, LOCK_EX), 0);
    check_join(copy, "not handed over with others_write");
    close(fd);
    unlink(copy);
    CHECK_INT(link(fst_writer_hidden_path(maker, 0), copy), 0);
    check_join(copy, "hard links");
    unlink(copy);
    CHECK_INT(fst_writer_join(fst_writer_hidden_path(maker, 0), NULL, &part, &error), FST_OK);
    fst_writer_close(part);
    fst_writer_close(maker);
    fst_save_tensor tensor = save_tensor_of("a", FST_DTYPE_U8, shape_64, copy);
    const char *path = fixture_path("unshared.safetensors");
    CHECK_INT(fst_writer_open(path, &tensor, 1, NULL, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_hand_over(writer, &error), FST_OK);
    check_join(fst_writer_hidden_path(writer, 0), "not handed over with others_write");
    fst_writer_close(writer);
    hand_over_and_end(ended, sizeof ended);
    check_join(ended, "no running save owns the file");
    size_t count;
    uint64_t bytes;
    CHECK_INT(fst_leftovers_remove(fixture_path("ended"), &count, &bytes, NULL), FST_OK);
    CHECK_INT(count, 2);
}

TEST(invalid_joins_are_refused)
{
    fst_writer *part;
    fst_error error;
    CHECK_INT(fst_writer_join(fixture_path("none"), NULL, &part, &error), FST_E_NOT_FOUND);
    CHECK(part == NULL);
    CHECK_INT(fst_writer_join(NULL, NULL, &part, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_join("x", NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_hand_over(NULL, &error), FST_E_ARGUMENT);
    fst_writer *maker = make_parts("more", FST_SAVE_QUICK);
    CHECK_INT(fst_writer_join(fst_writer_hidden_path(maker, 0), NULL, &part, NULL), FST_OK);
    CHECK_INT(fst_writer_write(part, 0, 60, "12345", 5, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_write(part, 0, 60, "1234", 4, NULL), FST_OK);
    CHECK_INT(fst_writer_write(part, 0, 60, "1234", 4, NULL), FST_OK); // overlaps are not counted
    fst_writer_close(part);
    // A model in place is not written into, and the temporary file's own name is not the model's.
    CHECK_INT(fst_writer_join(fst_writer_path(maker, 0), NULL, &part, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_writer_commit(maker, NULL), FST_OK);
    CHECK_INT(fst_writer_join(fst_writer_path(maker, 0), NULL, &part, &error), FST_E_ARGUMENT);
    CHECK(strstr(error.message, "fst_writer_hidden_path") != NULL && part == NULL);
    fst_writer_close(maker);
}
