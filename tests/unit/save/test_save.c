// SPDX-License-Identifier: Apache-2.0
/// Saves with faults: failing writes, missing memory, missing features. Every run ends with the
/// complete new or old file, and without leftovers.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "io/io.h"
#include "output/output.h"

#define COUNT 5
#define BYTES ((uint64_t)1500001)

static const fst_save_engine engines[] = {FST_SAVE_ENGINE_BUFFERED, FST_SAVE_ENGINE_DIRECT,
                                          FST_SAVE_ENGINE_URING};

static fst_status save_to(const char *path, fst_save_engine engine, uint32_t file_count,
                          fst_error *error) {
    static char *data;
    static const uint64_t shape[] = {BYTES};
    if (data == NULL && (data = malloc(COUNT * BYTES)) != NULL)
        for (uint64_t i = 0; i < COUNT * BYTES; i++) data[i] = (char)fixture_byte(i);
    fst_save_tensor tensors[COUNT];
    static const char *const names[COUNT] = {"t0", "t1", "t2", "t3", "t4"};
    for (uint32_t i = 0; i < COUNT; i++)
        tensors[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                       .name = names[i],
                                       .name_size = SIZE_MAX,
                                       .dtype = FST_DTYPE_U8,
                                       .rank = 1,
                                       .shape = shape,
                                       .data = data + i * BYTES,
                                       .file_index = file_count > 0 ? i % file_count : 0};
    fst_save_options options = {.struct_size = sizeof options,
                                .engine = engine,
                                .promise = FST_SAVE_DURABLE,
                                .thread_count = 2,
                                .file_count = file_count};
    return fst_save(path, tensors, COUNT, &options, NULL, error);
}

static void note_use(void *context, const fst_leftover *leftover) {
    *(int *)context = leftover->in_use;
}

TEST(rollback_copy_is_locked)
{
    char *kept;
    int lock, in_use = -1;
    CHECK_INT(mkdir(fixture_path("kept"), 0777), 0);
    const char *path = fixture_file("kept/model.safetensors", "old", 3);
    CHECK_INT(fsti_path_keep(path, &kept, &lock, NULL), FST_OK);
    if (kept == NULL) SKIP("no hard links here");
    CHECK_INT(fst_leftovers_visit(fixture_path("kept"), note_use, &in_use, NULL), FST_OK);
    CHECK_INT(in_use, 1);
    close(lock); // as when the save is killed
    CHECK_INT(fst_leftovers_visit(fixture_path("kept"), note_use, &in_use, NULL), FST_OK);
    CHECK_INT(in_use, 0);
    CHECK_INT(fsti_path_restore(path, kept, NULL), FST_OK);
    fsti_free(kept);
}

static int reads_back(const char *path) {
    fst_model *model;
    fst_loader *loader;
    int right = 0;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return 0;
    if (fst_loader_open(model, NULL, &loader, NULL) != FST_OK) return 0;
    for (fst_tensor *tensor; fst_loader_next(loader, -1, &tensor, NULL) == FST_OK;) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_tensor_view_get(tensor, &view, NULL) == FST_OK)
            right += fixture_matches(view.data, (uint64_t)(view.name[1] - '0') * BYTES, BYTES);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return right == COUNT;
}

static int entries(const char *name) {
    DIR *folder = opendir(fixture_path(name));
    int count = -2;
    for (; folder != NULL && readdir(folder) != NULL;) count++;
    if (folder != NULL) closedir(folder);
    return count;
}

static atomic_long writes_left;
static atomic_int write_result; ///< result of the n-th write and of all later ones

static void fail_writes(fsti_io_op *op) {
    if (!op->is_write) return;
    if (atomic_fetch_sub(&writes_left, 1) <= 0) op->result = atomic_load(&write_result);
}

/// Like the file's old content in tests below.
static int is_old(const char *path) {
    char bytes[4] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, bytes, sizeof bytes);
    if (fd >= 0) close(fd);
    return got == 3 && memcmp(bytes, "old", 3) == 0;
}

TEST(a_write_that_fails_leaves_the_old_file)
{
    CHECK_INT(mkdir(fixture_path("faults"), 0700), 0);
    static const int results[] = {-EIO, -ENOSPC, -EDQUOT, 0};
    for (size_t e = 0; e < sizeof engines / sizeof *engines; e++)
        for (size_t r = 0; r < sizeof results / sizeof *results; r++) {
            fst_status status = FST_E_IO;
            long nth;
            for (nth = 0; status != FST_OK && nth < 100; nth++) {
                const char *path = fixture_file("faults/model", "old", 3);
                fst_error error = {0};
                atomic_store(&writes_left, nth);
                atomic_store(&write_result, results[r]);
                fsti_io_fault_hook_set(fail_writes);
                status = save_to(path, engines[e], 0, &error);
                fsti_io_fault_hook_set(NULL);
                if (status == FST_E_UNSUPPORTED) break;
                if (status == FST_OK) {
                    CHECK(reads_back(path));
                } else {
                    bool full = results[r] == -ENOSPC || results[r] == -EDQUOT;
                    CHECK_INT(status, full ? FST_E_NO_SPACE : FST_E_IO);
                    CHECK_CONTAINS(error.file, "faults/model");
                    CHECK(is_old(path));
                }
                CHECK_INT(entries("faults"), 1);
            }
            CHECK(nth > 2 || status == FST_E_UNSUPPORTED);
        }
}

static atomic_long odd_writes;

/// Every other write is short or interrupted.
static void shorten_writes(fsti_io_op *op) {
    long n = atomic_fetch_add(&odd_writes, 1);
    if (!op->is_write || op->result <= 0) return;
    if (n % 3 == 0) op->result = op->result > 4096 ? 4096 : 1;
}

TEST(short_writes_are_completed)
{
    for (size_t e = 0; e < sizeof engines / sizeof *engines; e++) {
        fsti_io_fault_hook_set(shorten_writes);
        fst_status status = save_to(fixture_path("short"), engines[e], 0, NULL);
        fsti_io_fault_hook_set(NULL);
        if (status == FST_E_UNSUPPORTED) continue;
        CHECK_INT(status, FST_OK);
        CHECK(reads_back(fixture_path("short")));
    }
}

/// The first write of whole slots is refused, as a driver does that wants another alignment.
static void refuse_once(fsti_io_op *op) {
    if (op->is_write && op->size == 2 << 20 && atomic_fetch_sub(&writes_left, 1) == 1)
        op->result = -EINVAL;
}

static fst_save_tensor byte_tensor(const uint64_t *shape, const char *data) {
    return (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                             .name = "t",
                             .name_size = SIZE_MAX,
                             .dtype = FST_DTYPE_U8,
                             .rank = 1,
                             .shape = shape,
                             .data = data};
}

TEST(failed_direct_write_switches_to_buffered)
{
    uint64_t shape[] = {(uint64_t)96 << 20};
    char *data = calloc(1, shape[0]);
    fst_save_tensor tensor = byte_tensor(shape, data);
    fst_save_options options = {.struct_size = sizeof options, .promise = FST_SAVE_DURABLE};
    fst_save_stats stats = {.struct_size = sizeof stats};
    atomic_store(&writes_left, 1);
    fsti_io_fault_hook_set(refuse_once);
    fst_status status = fst_save(fixture_path("demoted"), &tensor, 1, &options, &stats, NULL);
    fsti_io_fault_hook_set(NULL);
    CHECK_INT(status, FST_OK);
    unlink(fixture_path("demoted"));
    free(data);
    if (strcmp(stats.engine, "uring") != 0) SKIP("no ring here");
    CHECK_CONTAINS(stats.reason, "then buffered, because a direct write failed");
    CHECK(stats.bytes_direct <= (uint64_t)8 * (2 << 20)); // what was in flight
}

TEST(every_failed_allocation_keeps_the_old_file)
{
    CHECK_INT(mkdir(fixture_path("memory"), 0700), 0);
    for (uint32_t file_count = 0; file_count <= 2; file_count += 2)
        for (size_t e = 0; e < sizeof engines / sizeof *engines; e++) {
            fst_status status = FST_E_NO_MEMORY;
            long live = fsti_alloc_live();
            for (long n = 0; status != FST_OK && n < 400; n = check_next(n)) {
                const char *path = file_count > 0 ? fixture_path("memory/set")
                                                  : fixture_file("memory/file", "old", 3);
                fst_error error = {0};
                fsti_alloc_fail_after(n);
                status = save_to(path, engines[e], file_count, &error);
                fsti_alloc_fail_after(-1);
                if (status == FST_E_UNSUPPORTED) break;
                CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
                CHECK_INT(fsti_alloc_live(), live);
                if (status == FST_OK)
                    CHECK(reads_back(path));
                else if (file_count == 0)
                    CHECK(is_old(path));
            }
            CHECK(status == FST_OK || status == FST_E_UNSUPPORTED);
        }
    // Without memory for tidying up the new set is in place, and the next save tidies up.
    CHECK_INT(save_to(fixture_path("memory/set"), FST_SAVE_ENGINE_AUTO, 2, NULL), FST_OK);
    CHECK_INT(entries("memory/set"), 3);
}

TEST(missing_system_features_are_optional)
{
    static const unsigned hidden[] = {FSTI_TEST_NO_TMPFILE, FSTI_TEST_NO_URING, FSTI_TEST_NO_DIRECT,
                                      FSTI_TEST_NO_TMPFILE | FSTI_TEST_NO_DIRECT};
    CHECK_INT(mkdir(fixture_path("lacks"), 0700), 0);
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        fsti_io_test_disable(hidden[i]);
        fst_status one = save_to(fixture_path("lacks/model"), FST_SAVE_ENGINE_AUTO, 0, NULL);
        fst_status set = save_to(fixture_path("lacks/set"), FST_SAVE_ENGINE_AUTO, 3, NULL);
        fst_status forced = save_to(fixture_path("lacks/x"), FST_SAVE_ENGINE_URING, 0, NULL);
        fsti_io_test_disable(0);
        CHECK_INT(one, FST_OK);
        CHECK_INT(set, FST_OK);
        if ((hidden[i] & (FSTI_TEST_NO_URING | FSTI_TEST_NO_DIRECT)) != 0)
            CHECK_INT(forced, FST_E_UNSUPPORTED);
        CHECK(reads_back(fixture_path("lacks/model")));
        CHECK(reads_back(fixture_path("lacks/set")));
        unlink(fixture_path("lacks/x"));
        CHECK_INT(entries("lacks"), 2);
        CHECK_INT(entries("lacks/set"), 4);
    }
}

static fst_writer *open_writer(const char *path, uint32_t file_count) {
    static const uint64_t shape[] = {4};
    static const char data[4] = "abcd";
    fst_writer *writer = NULL;
    fst_save_tensor tensor = byte_tensor(shape, data);
    fst_save_options options = {.struct_size = sizeof options, .file_count = file_count};
    return fst_writer_open(path, &tensor, 1, &options, &writer, NULL) == FST_OK ? writer : NULL;
}
static fst_writer *open_set(const char *folder) { return open_writer(folder, 1); }
static fst_writer *open_file(const char *path) { return open_writer(path, 0); }

/// It may look empty, because the other save's file has no name yet.
TEST(a_failed_save_keeps_the_new_folder_of_another_one)
{
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/inner", fixture_path("new-folder"));
    for (int last = 0; last < 2; last++) { // whether the other one fails as well
        fst_writer *failed = open_set(folder), *other = open_set(folder);
        CHECK(failed != NULL && other != NULL);
        fst_writer_close(failed);
        if (last == 0) {
            CHECK_INT(fst_writer_commit(other, NULL), FST_OK);
            CHECK_INT(unlinkat(AT_FDCWD, fixture_path("new-folder/inner/model.safetensors"), 0), 0);
        }
        fst_writer_close(other);
        if (last == 0) CHECK_INT(rmdir(folder), 0);
        if (last == 0) CHECK_INT(rmdir(fixture_path("new-folder")), 0);
    }
    CHECK(access(fixture_path("new-folder"), F_OK) != 0);
}

TEST(a_failed_save_keeps_a_parent_folder_in_use)
{
    char inner[4096], file[4096];
    snprintf(inner, sizeof inner, "%s/inner", fixture_path("parent"));
    snprintf(file, sizeof file, "%s/file", fixture_path("parent"));
    fst_writer *failed = open_set(inner), *other = open_file(file);
    CHECK(failed != NULL && other != NULL);
    fst_writer_close(failed);
    CHECK_INT(fst_writer_commit(other, NULL), FST_OK);
    fst_writer_close(other);
    CHECK(access(inner, F_OK) != 0);
    CHECK_INT(access(file, F_OK), 0);
}
