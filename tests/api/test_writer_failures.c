// SPDX-License-Identifier: Apache-2.0
/// Saves that fail: bytes written twice or never, forks, cancellation, kills, permissions.
#include <errno.h>
#include <fastsafetensors.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

static const uint64_t shape_64k[] = {65536}, shape_3[] = {3};

static fst_writer *open_stream(const char *path) {
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_64k, NULL);
    fst_writer *writer = NULL;
    if (fst_writer_open(path, &tensor, 1, NULL, &writer, NULL) != FST_OK) return NULL;
    return writer;
}

TEST(overlapping_writes_are_named)
{
    static const char half[32768];
    fst_error error;
    fst_writer *writer = open_stream(fixture_path("twice"));
    CHECK(writer != NULL);
    CHECK_INT(fst_writer_write(writer, 0, 0, half, sizeof half, NULL), FST_OK);
    CHECK_INT(fst_writer_write(writer, 0, 100, half, sizeof half, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "bytes 100 to 32768 of the tensor were already written");
    CHECK_TEXT(error.tensor, "t");
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "bytes 32768 to 65536 of the tensor were never written");
    CHECK_TEXT(error.tensor, "t");
    // The missing bytes may still be written, in any order.
    CHECK_INT(fst_writer_write(writer, 0, 50000, half, 15536, NULL), FST_OK);
    CHECK_INT(fst_writer_write(writer, 0, 40000, half, 10001, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "bytes 50000 to 50001");
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "bytes 32768 to 50000");
    CHECK_INT(fst_writer_write(writer, 0, 32768, half, 17232, NULL), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    fst_writer_close(writer);
}

TEST(many_gaps_are_tracked)
{
    if (CHECK_SANITIZED_THREADS) SKIP("one thread; slow under the thread sanitizer");
    char byte[1] = {7};
    fst_writer *writer = open_stream(fixture_path("holes"));
    CHECK(writer != NULL);
    for (uint64_t at = 0; at < 65536; at += 2)
        CHECK_INT(fst_writer_write(writer, 0, 65534 - at, byte, 1, NULL), FST_OK);
    CHECK_INT(fst_writer_write(writer, 0, 40000, byte, 1, NULL), FST_E_ARGUMENT);
    for (uint64_t at = 1; at < 65536; at += 2)
        CHECK_INT(fst_writer_write(writer, 0, at, byte, 1, NULL), FST_OK);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    fst_writer_close(writer);
}

TEST(statistics_without_struct_size_are_refused_first)
{
    const char *path = fixture_file("stats", "old", 3);
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    fst_save_stats stats = {0};
    CHECK_INT(fst_save(path, &tensor, 1, NULL, &stats, NULL), FST_E_ARGUMENT);
    CHECK(save_file_holds("stats", "old", 3));
    stats.struct_size = 100000;
    CHECK_INT(fst_save(path, &tensor, 1, NULL, &stats, NULL), FST_E_ARGUMENT);
    CHECK(save_file_holds("stats", "old", 3));
}

TEST(failed_mapping_writes_no_bytes)
{
    if (CHECK_SANITIZED) SKIP("sanitizers need the address space");
    struct rlimit before, limit;
    const uint64_t shape[] = {(uint64_t)256 << 20};
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape, NULL);
    fst_writer *writer;
    void *memory;
    CHECK_INT(getrlimit(RLIMIT_AS, &before), 0);
    CHECK_INT(fst_writer_open(fixture_path("unmapped"), &tensor, 1, NULL, &writer, NULL), FST_OK);
    limit = before;
    limit.rlim_cur = (rlim_t)64 << 20;
    CHECK_INT(setrlimit(RLIMIT_AS, &limit), 0);
    fst_status status = fst_writer_map(writer, 0, &memory, NULL);
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    fst_status finished = fst_writer_finish(writer, NULL);
    fst_writer_close(writer);
    if (status == FST_OK) SKIP("address space is not limited here");
    CHECK_INT(finished, FST_E_ARGUMENT);
}

TEST(statistics_unknown_to_the_library_are_zero)
{
    struct {
        fst_save_stats known;
        unsigned char more[64];
    } stats;
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    memset(&stats, 0xff, sizeof stats);
    stats.known.struct_size = sizeof stats;
    CHECK_INT(fst_save(fixture_path("newer"), &tensor, 1, NULL, &stats.known, NULL), FST_OK);
    CHECK_INT(stats.known.struct_size, sizeof stats);
    CHECK_INT(stats.known.tensor_count, 1);
    for (size_t i = 0; i < sizeof stats.more; i++) CHECK_INT(stats.more[i], 0);
}

/// In a child: the status that `run` ends with, at most 250 seconds later; -1 for anything else.
static int in_child(int (*run)(fst_writer *writer), fst_writer *writer) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(250);
        _exit(run(writer));
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int save_without_stdin(fst_writer *writer) {
    fst_save_tensor tensors[2] = {save_tensor_of("a", FST_DTYPE_U8, shape_64k, NULL)};
    static char bytes[65536];
    tensors[0].data = bytes;
    fst_save_options options = save_options_of();
    (void)writer;
    for (int engine = 0; engine < FST_SAVE_ENGINE_COUNT; engine++) {
        options.engine = (fst_save_engine)engine;
        close(0); // the next descriptor is 0
        fst_status status = fst_save(fixture_path("stdin"), tensors, 1, &options, NULL, NULL);
        if (status != FST_OK && status != FST_E_UNSUPPORTED) return 1;
        close(0);
        fst_writer *open = NULL;
        if (fst_writer_open(fixture_path("stdin"), tensors, 1, &options, &open, NULL) != FST_OK)
            return 2;
        close(0);
        (void)!fst_writer_commit(open,
                                 NULL); // its file was closed, which is an error and not a crash
        fst_writer_close(open);
    }
    return 0;
}

TEST(descriptor_0_is_valid)
{
    CHECK_INT(in_child(save_without_stdin, NULL), 0);
}

static int use_in_child(fst_writer *writer) {
    fst_error error;
    if (fst_writer_write(writer, 0, 0, "x", 1, &error) != FST_E_UNSUPPORTED) return 1;
    if (strstr(error.message, "fork") == NULL) return 2;
    void *memory;
    if (fst_writer_map(writer, 0, &memory, NULL) != FST_E_UNSUPPORTED) return 3;
    if (fst_writer_finish(writer, NULL) != FST_E_UNSUPPORTED) return 4;
    if (fst_writer_commit(writer, NULL) != FST_E_UNSUPPORTED) return 5;
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    if (fst_writer_stats_get(writer, &stats, NULL) != FST_E_UNSUPPORTED) return 6;
    fst_writer_close(writer);
    return 0;
}

TEST(forked_child_leaves_the_save_to_its_parent)
{
    static const char bytes[65536];
    for (int engine = 0; engine < FST_SAVE_ENGINE_COUNT; engine++) {
        fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_64k, NULL);
        fst_save_options options = save_options_of();
        options.engine = (fst_save_engine)engine;
        fst_writer *writer;
        CHECK_INT(fst_writer_open(fixture_path("fork"), &tensor, 1, &options, &writer, NULL),
                  FST_OK);
        fst_status first = fst_writer_write(writer, 0, 0, bytes, 40000, NULL);
        if (first == FST_OK) {
            CHECK_INT(in_child(use_in_child, writer), 0);
            CHECK_INT(fst_writer_write(writer, 0, 40000, bytes, 25536, NULL), FST_OK);
            CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
        } else {
            CHECK_INT(first, FST_E_UNSUPPORTED);
        }
        fst_writer_close(writer);
    }
    CHECK_INT(save_hidden_count("."), 0);
}

static void *cancel_soon(void *writer) {
    fst_writer_cancel(writer);
    return NULL;
}

TEST(cancel_from_another_thread_ends_a_save)
{
    static const char bytes[65536];
    const char *path = fixture_file("cancelled", "old", 3);
    fst_writer *writer = open_stream(path);
    CHECK(writer != NULL);
    CHECK_INT(fst_writer_write(writer, 0, 0, bytes, sizeof bytes, NULL), FST_OK);
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, cancel_soon, writer), 0);
    pthread_join(thread, NULL);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_E_CANCELLED);
    fst_writer_close(writer);
    CHECK(save_file_holds("cancelled", "old", 3));
    CHECK_INT(save_hidden_count("."), 0);
    fst_writer_cancel(NULL);
}

TEST(file_stems_invalid_in_an_index_are_refused)
{
    static const char *const stems[] = {"mod\xe9le", ".hidden", "", "a/b"};
    fst_save_tensor tensors[2] = {save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz"),
                                  save_tensor_of("b", FST_DTYPE_U8, shape_3, "xyz")};
    tensors[1].file_index = 1;
    fst_save_options options = save_options_of();
    options.file_count = 2;
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        options.stem = stems[i];
        CHECK_INT(fst_save(fixture_path("stems"), tensors, 2, &options, NULL, NULL),
                  FST_E_ARGUMENT);
    }
    CHECK(access(fixture_path("stems"), F_OK) != 0);
    options.stem = "mod\xc3\xa8le";
    CHECK_INT(fst_save(fixture_path("stems"), tensors, 2, &options, NULL, NULL), FST_OK);
    fst_model *model;
    CHECK_INT(fst_model_open(fixture_path("stems"), NULL, &model, NULL), FST_OK);
    fst_model_close(model);
}

TEST(new_folder_is_synced_and_removed_after_failure)
{
    fst_save_tensor tensors[2] = {save_tensor_of("a", FST_DTYPE_U8, shape_3, "xyz"),
                                  save_tensor_of("b", FST_DTYPE_U8, shape_3, "xyz")};
    tensors[1].file_index = 1;
    fst_save_options options = save_options_of();
    options.file_count = 2;
    options.promise = FST_SAVE_DURABLE;
    fst_writer *writer;
    CHECK_INT(fst_writer_open(fixture_path("new/er/est"), tensors, 2, &options, &writer, NULL),
              FST_OK);
    CHECK_INT(access(fixture_path("new/er/est"), F_OK), 0);
    fst_writer_close(writer);
    CHECK(access(fixture_path("new"), F_OK) != 0);
    CHECK_INT(fst_save(fixture_path("new/er"), tensors, 2, &options, NULL, NULL), FST_OK);
    uint64_t huge[] = {(uint64_t)1 << 60};
    tensors[0].shape = huge;
    CHECK_INT(fst_writer_open(fixture_path("new/est"), tensors, 2, &options, &writer, NULL),
              FST_E_NO_SPACE);
    CHECK(access(fixture_path("new/est"), F_OK) != 0);
    CHECK_INT(access(fixture_path("new/er"), F_OK), 0);
}

// ---- permissions ----

static int save_as_nobody(fst_writer *writer) {
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    (void)writer;
    if (setgid(65534) != 0 || setuid(65534) != 0) return 77;
    return fst_save(fixture_path("rights/file"), &tensor, 1, NULL, NULL, NULL) == FST_OK ? 0 : 1;
}

TEST(save_never_widens_permissions)
{
    static const struct {
        mode_t before, after;
    } rows[] = {{0666, 0666}, {0646, 0644}, {0606, 0600},
                {0676, 0666}, {0626, 0622}, {04777, 0777}};
    if (geteuid() != 0) SKIP("only root can give files away and become somebody else");
    char *folder = realpath(fixture_path("."), NULL);
    CHECK(folder != NULL && chmod(folder, 0711) == 0);
    free(folder);
    CHECK_INT(mkdir(fixture_path("rights"), 0777), 0);
    CHECK_INT(chmod(fixture_path("rights"), 0777), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct stat info;
        const char *path = fixture_file("rights/file", "old", 3);
        CHECK_INT(chown(path, 0, 0), 0);
        CHECK_INT(chmod(path, rows[i].before), 0);
        int code = in_child(save_as_nobody, NULL);
        if (code == 77) SKIP("this user can't be changed here");
        CHECK_INT(code, 0);
        CHECK_INT(stat(path, &info), 0);
        CHECK_INT(info.st_uid, 65534);
        CHECK_INT(info.st_mode & 07777, rows[i].after);
        CHECK_INT(unlink(path), 0);
    }
}

/// An access control list in the kernel's format: version 2, then (tag, permissions, id) for each
/// entry.
typedef struct access_list {
    uint32_t version;
    struct {
        uint16_t tag, rights;
        uint32_t id;
    } entries[5];
} access_list;

TEST(default_access_list_never_widens_permissions)
{
    // user::rwx, user:1001:rwx, group::r-x, mask::rwx, other::---
    static const access_list list = {2,
                                     {{1, 7, UINT32_MAX},
                                      {2, 7, 1001},
                                      {4, 5, UINT32_MAX},
                                      {16, 7, UINT32_MAX},
                                      {32, 0, UINT32_MAX}}};
    char found[256];
    struct stat info;
    CHECK_INT(mkdir(fixture_path("list"), 0700), 0);
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    const char *path = fixture_file("list/file", "old", 3);
    CHECK_INT(chmod(path, 0640), 0);
    if (setxattr(fixture_path("list"), "system.posix_acl_default", &list, sizeof list, 0) != 0)
        SKIP("the file system has no access lists");
    CHECK_INT(fst_save(path, &tensor, 1, NULL, NULL, NULL), FST_OK);
    CHECK(getxattr(path, "system.posix_acl_access", found, sizeof found) < 0);
    CHECK_INT(stat(path, &info), 0);
    CHECK_INT(info.st_mode & 07777, 0640);
    // An existing file's own list is kept.
    CHECK_INT(setxattr(path, "system.posix_acl_access", &list, sizeof list, 0), 0);
    CHECK_INT(fst_save(path, &tensor, 1, NULL, NULL, NULL), FST_OK);
    CHECK_INT(getxattr(path, "system.posix_acl_access", found, sizeof found), sizeof list);
    CHECK(memcmp(found, &list, sizeof list) == 0);
}

// ---- what killed saves leave ----

static void count_leftover(void *context, const fst_leftover *leftover) {
    int *counts = context;
    counts[leftover->in_use ? 1 : 0]++;
    counts[2] += leftover->size_bytes > 0;
}

static int die_with_hidden_file(fst_writer *writer) {
    (void)writer;
    // Like a killed save without O_TMPFILE: a temporary file without a lock.
    int fd = open(fixture_path("left/.model.safetensors.0123456789abcdef.tmp"),
                  O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    return write(fd, "half", 4) == 4 ? 0 : 1;
}

TEST(leftovers_of_killed_saves_are_removed)
{
    int counts[3] = {0};
    size_t count;
    uint64_t size_bytes;
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    CHECK_INT(mkdir(fixture_path("left"), 0700), 0);
    CHECK_INT(in_child(die_with_hidden_file, NULL), 0);
    fixture_file("left/.model.safetensors.0123456789ABCDEF.tmp", "x", 1); // not one of ours
    fixture_file("left/.other.safetensors.0123456789abcdef.tmp", "x", 1);
    CHECK_INT(fst_leftovers_visit(fixture_path("left"), count_leftover, counts, NULL), FST_OK);
    CHECK_INT(counts[0], 2);
    CHECK_INT(counts[1], 0);
    CHECK_INT(counts[2], 2);
    // The next save of the same target deletes its own leftovers and no others.
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    CHECK_INT(fst_save(fixture_path("left/model.safetensors"), &tensor, 1, NULL, &stats, NULL),
              FST_OK);
    CHECK_INT(stats.leftover_count, 1);
    CHECK_INT(save_hidden_count("left"), 2);
    CHECK_INT(
        fst_leftovers_remove(fixture_path("left/other.safetensors"), &count, &size_bytes, NULL),
        FST_OK);
    CHECK_INT(count, 1);
    CHECK_INT(size_bytes, 1);
    CHECK_INT(save_hidden_count("left"), 1);
    CHECK_INT(fst_leftovers_remove(fixture_path("nowhere/x"), NULL, NULL, NULL), FST_E_NOT_FOUND);
    CHECK_INT(fst_leftovers_visit(NULL, count_leftover, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_leftovers_visit(fixture_path("left"), NULL, NULL, NULL), FST_E_ARGUMENT);
}

TEST(temporary_file_named_by_an_index_is_kept)
{
    int counts[3] = {0};
    size_t count;
    CHECK_INT(mkdir(fixture_path("used"), 0700), 0);
    fixture_model("used/.model-00001-of-00001.safetensors.0123456789abcdef.tmp",
                  "{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    static const char index[] =
        "{\"weight_map\":{\"t\":\".model-00001-of-00001.safetensors.0123456789abcdef.tmp\"}}";
    fixture_file("used/model.safetensors.index.json", index, sizeof index - 1);
    CHECK_INT(fst_leftovers_visit(fixture_path("used"), count_leftover, counts, NULL), FST_OK);
    CHECK_INT(counts[0], 0);
    CHECK_INT(counts[1], 1);
    CHECK_INT(fst_leftovers_remove(fixture_path("used"), &count, NULL, NULL), FST_OK);
    CHECK_INT(count, 0);
    fst_model *model;
    // Nor does a save of a file of that name remove it.
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    CHECK_INT(fst_save(fixture_path("used/model-00001-of-00001.safetensors"), &tensor, 1, NULL,
                       NULL, NULL),
              FST_OK);
    CHECK_INT(fst_model_open(fixture_path("used"), NULL, &model, NULL), FST_OK);
    fst_model_close(model);
}

TEST(files_of_a_running_save_are_kept)
{
    int counts[3] = {0};
    fst_writer *writer = open_stream(fixture_path("living"));
    CHECK(writer != NULL);
    // The file is locked or has no name.
    CHECK_INT(fst_leftovers_visit(fixture_path("living"), count_leftover, counts, NULL), FST_OK);
    CHECK_INT(counts[0], 0);
    fst_writer_close(writer);
}
