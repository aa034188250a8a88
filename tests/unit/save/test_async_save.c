// SPDX-License-Identifier: Apache-2.0
/// Asynchronous saves: they store the state at the call, memory is
/// bounded, and whatever fails leaves the old file. Counts are asserted, never times.
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "async_fixture.h"
#include "base/primitives.h"
#include "check.h"
#include "fixture.h"

static void check_kind(const char *path, const fst_async_options *options) {
    fst_async_save *save;
    async_fill('n');
    CHECK_INT(async_start(path, options, &save), FST_OK);
    if (options->stage != FST_STAGE_COPY) CHECK_INT(fst_async_save_stage(save, -1, NULL), FST_OK);
    async_fill('x'); // the optimizer
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 0, NULL), FST_OK); // any number of times
    CHECK_INT(async_value_at(path), 'n');
    fst_async_stats stats = async_stats_of(save);
    fst_save_stats written = {.struct_size = sizeof written};
    CHECK_INT(fst_async_save_writer_stats(save, &written, NULL), FST_OK);
    CHECK_INT(stats.state, FST_ASYNC_DONE);
    // Each byte is copied once, padding included,
    CHECK(stats.bytes_staged >= async_total_bytes() && stats.bytes_staged < written.bytes_total);
    CHECK_INT(written.bytes_written, written.bytes_total); // written once,
    CHECK_INT(written.bytes_read, 0);                      // and read never
    CHECK_INT(stats.bytes_written, stats.bytes_total);
    CHECK(stats.staged_ns > 0 && stats.done_ns >= stats.staged_ns);
    fst_async_save_close(save);
}

TEST(every_stage_saves_the_state_at_the_call)
{
    for (fst_stage stage = 0; stage < FST_STAGE_COUNT; stage++)
        for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT; promise++) {
            fst_save_options save = async_save_options();
            save.promise = (fst_save_promise)promise;
            fst_async_options options = async_options_of(stage);
            options.save = &save;
            check_kind(fixture_path("plain"), &options);
            save.alignment_bytes = 4096; // padding between tensors
            check_kind(fixture_path("aligned"), &options);
            save.alignment_bytes = 0;
            options.nice = 5;
            options.thread_count = 3;
            check_kind(fixture_path("threads"), &options);
        }
}

TEST(durable_saves_are_written_from_the_staging_memory)
{
    fst_save_options save = async_save_options();
    save.engine = FST_SAVE_ENGINE_DIRECT;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.save = &save;
    fst_async_save *handle;
    async_fill('n');
    CHECK_INT(async_start(fixture_path("direct"), &options, &handle), FST_OK);
    fst_status status = fst_async_save_wait(handle, -1, NULL);
    fst_save_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_async_save_writer_stats(handle, &stats, NULL), FST_OK);
    fst_async_save_close(handle);
    if (status == FST_E_UNSUPPORTED) return; // no direct I/O here
    CHECK_INT(status, FST_OK);
    // The header's page and the partial last page; everything else is written in place.
    CHECK(stats.bytes_staged <= 2 * 4096 + MIB);
    CHECK_INT(async_value_at(fixture_path("direct")), 'n');
}

TEST(sets_are_saved_too)
{
    fst_save_tensor tensors[TENSOR_COUNT];
    fst_save_options save = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_async_save *handle;
    async_fill('s');
    async_make_tensors(tensors);
    save.file_count = 3;
    for (uint32_t i = 0; i < TENSOR_COUNT; i++) tensors[i].file_index = i % 3;
    options.save = &save;
    options.memory_bytes = 1; // the least: a ring that three files share
    CHECK_INT(
        fst_async_save_start(fixture_path("set"), tensors, TENSOR_COUNT, &options, &handle, NULL),
        FST_OK);
    async_fill('x');
    CHECK_INT(fst_async_save_wait(handle, -1, NULL), FST_OK);
    fst_async_save_close(handle);
    CHECK_INT(async_value_at(fixture_path("set")), 's');
}

TEST(a_pool_keeps_its_memory_and_its_limit)
{
    static unsigned char big[80 * MIB];
    static const uint64_t shape[] = {sizeof big};
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "big",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = shape,
                              .data = big};
    fst_staging_pool *pool;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK_INT(fst_staging_open(40 * MIB, 64 * MIB, &pool, NULL), FST_OK);
    CHECK_INT(fst_staging_bytes(pool), 40 * MIB);
    fst_save_options save_options = async_save_options();
    save_options.progress = async_hold;
    options.save = &save_options;
    options.start_timeout_ms = 20;
    options.pool = pool;
    for (int round = 0; round < 3; round++) {
        fst_async_save *save;
        memset(big, 'a' + round, sizeof big);
        atomic_store(&async_may_write, false);
        CHECK_INT(fst_async_save_start(fixture_path("big"), &tensor, 1, &options, &save, NULL),
                  FST_OK);
        do CHECK_INT(fst_async_save_stage(save, 20, NULL), FST_E_TIMEOUT); // it waits for the disk
        while (async_stats_of(save).memory_wait_count == 0); // and says so
        atomic_store(&async_may_write, true);
        CHECK_INT(fst_async_save_stage(save, -1, NULL), FST_OK);
        memset(big, 'x', sizeof big);
        fst_async_stats stats = async_stats_of(save);
        CHECK_INT(stats.memory_limit_bytes, 40 * MIB);
        CHECK(stats.memory_peak_bytes <= 40 * MIB);
        CHECK_INT(stats.bytes_staged, sizeof big);
        CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_OK);
        fst_async_save_close(save);
        CHECK_INT(fst_staging_bytes(pool), 40 * MIB);
        fst_model *model;
        fst_loader *loader;
        fst_tensor *loaded;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        CHECK_INT(fst_model_open(fixture_path("big"), NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_loader_open(model, NULL, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_tensor(loader, "big", SIZE_MAX, -1, &loaded, NULL), FST_OK);
        CHECK_INT(fst_tensor_view_get(loaded, &view, NULL), FST_OK);
        int wrong = 0;
        for (size_t i = 0; i < sizeof big; i++)
            wrong += ((const unsigned char *)view.data)[i] != 'a' + round;
        CHECK_INT(wrong, 0);
        fst_tensor_unref(loaded);
        fst_loader_close(loader);
        fst_model_close(model);
    }
    fst_staging_close(pool);
}

// ---- bad input, and failures ----

TEST(arguments_are_checked)
{
    fst_async_save *save = (void *)1;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_save_tensor tensors[TENSOR_COUNT];
    fst_async_stats stats = {.struct_size = 1};
    fst_staging_pool *pool;
    async_fill('n');
    async_make_tensors(tensors);
    CHECK_INT(fst_async_save_start(NULL, tensors, 1, NULL, &save, NULL), FST_E_ARGUMENT);
    CHECK(save == NULL);
    CHECK_INT(fst_async_save_start("x", tensors, 1, NULL, NULL, NULL), FST_E_ARGUMENT);
    options.stage = FST_STAGE_COUNT;
    CHECK_INT(async_start("x", &options, &save), FST_E_ARGUMENT);
    options = async_options_of(FST_STAGE_COPY);
    options.overlap = FST_OVERLAP_COUNT;
    CHECK_INT(async_start("x", &options, &save), FST_E_ARGUMENT);
    options = async_options_of(FST_STAGE_COPY);
    options.nice = 20;
    CHECK_INT(async_start("x", &options, &save), FST_E_ARGUMENT);
    options = async_options_of(FST_STAGE_COPY);
    options.struct_size = 3;
    CHECK_INT(async_start("x", &options, &save), FST_E_ARGUMENT);
    fst_error error;
    const char *other = fixture_path("other-model");
    fst_save_options save_options = async_save_options();
    CHECK_INT(async_save_sync(other), FST_OK);
    save_options.manifest = other;
    options = async_options_of(FST_STAGE_COPY);
    options.save = &save_options;
    CHECK_INT(fst_async_save_start(fixture_path("own-model"), tensors, 1, &options, &save, &error),
              FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "would overwrite a model");
    tensors[2].data = NULL;
    CHECK_INT(fst_async_save_start("x", tensors, TENSOR_COUNT, NULL, &save, &error),
              FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "tensor 2 has no data");
    CHECK_INT(fst_async_save_stage(NULL, 0, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_async_save_wait(NULL, 0, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_async_save_stats_get(NULL, &stats, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_async_save_writer_stats(NULL, NULL, NULL), FST_E_ARGUMENT);
    fst_async_save_cancel(NULL);
    fst_async_save_close(NULL);
    fst_staging_close(NULL);
    CHECK_INT(fst_staging_bytes(NULL), 0);
    CHECK_INT(fst_staging_open(0, 0, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_staging_open(0, UINT64_MAX / 4, &pool, NULL), FST_E_NO_MEMORY);
    CHECK_INT(fst_staging_open(0, UINT64_MAX, &pool, &error), FST_E_NO_MEMORY);
    CHECK(strstr(error.message, "18446744073709551615") != NULL);
    CHECK(pool == NULL);
}

TEST(others_parts_are_refused)
{
    fst_save_options save = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_async_save *handle;
    save.others_write = 1;
    options.save = &save;
    CHECK_INT(async_start(fixture_path("others"), &options, &handle), FST_E_UNSUPPORTED);
}

TEST(what_the_disk_refuses_is_an_error_of_the_handle)
{
    fst_async_save *save;
    fst_error error;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK_INT(async_start(fixture_path("none/file"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, -1, &error), FST_E_NOT_FOUND);
    CHECK_CONTAINS(error.message, "none");
    CHECK_INT(async_stats_of(save).state, FST_ASYNC_FAILED);
    CHECK(fst_async_save_stage(save, -1, NULL) != FST_OK);
    fst_async_save_close(save);
}

/// Large files are refused by the system from here on.
static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

TEST(a_disk_that_fills_leaves_the_old_file)
{
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    async_fill('o');
    CHECK_INT(async_save_sync(fixture_path("full")), FST_OK);
    async_fill('n');
    signal(SIGXFSZ, SIG_IGN);
    limit_files(1 << 20);
    CHECK_INT(async_start(fixture_path("full"), &options, &save), FST_OK);
    CHECK(fst_async_save_wait(save, -1, NULL) != FST_OK);
    limit_files(RLIM_INFINITY);
    CHECK_INT(async_value_at(fixture_path("full")), 'o');
    fst_async_save_close(save);
}

static int say_changed(void *context) {
    usleep(100000); // a writer that does not wait for the answer is done by then
    atomic_fetch_add((atomic_int *)context, 1);
    return 0;
}

TEST(a_change_meanwhile_fails_the_save)
{
    for (fst_stage stage = 0; stage < FST_STAGE_COUNT; stage++) {
        atomic_int asked = 0;
        fst_async_save *save;
        fst_error error;
        fst_async_options options = async_options_of(stage);
        options.is_unchanged = say_changed;
        options.context = &asked;
        async_fill('o');
        CHECK_INT(async_save_sync(fixture_path("changed")), FST_OK);
        async_fill('n');
        CHECK_INT(async_start(fixture_path("changed"), &options, &save), FST_OK);
        CHECK_INT(fst_async_save_wait(save, -1, &error), FST_E_FILE_CHANGED);
        CHECK_INT(atomic_load(&asked), 1);
        CHECK_INT(async_value_at(fixture_path("changed")), 'o');
        fst_async_save_close(save);
    }
}

TEST(a_change_before_the_barrier_is_noticed)
{
    // What comes late in the file, behind more than the ring of 32 MiB holds.
    static unsigned char big[80 * MIB];
    static const uint64_t shape[] = {sizeof big};
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "big",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = shape,
                              .data = big};
    fst_async_options options = async_options_of(FST_STAGE_NONE);
    fst_async_save *save;
    CHECK_INT(fst_async_save_start(fixture_path("late"), &tensor, 1, &options, &save, NULL),
              FST_OK);
    memset(big + 78 * MIB, 1, 2 * MIB);
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_E_FILE_CHANGED);
    fst_async_save_close(save);
    CHECK_INT(access(fixture_path("late"), F_OK), -1);
}

TEST(a_changed_tensor_between_unchanged_ones_is_noticed)
{
    static unsigned char bytes[82 * MIB];
    // Sizes around that of tensors that are sampled whole; the second one is changed in its middle.
    static const uint64_t middle[] = {100, 4096, 30000}, first[] = {50, 2000, 0};
    for (int i = 0; i < 3; i++) {
        uint64_t sizes[] = {78 * MIB + 1000, middle[i], 2 * MIB};
        const char *names[] = {"a", "b", "c"};
        fst_save_tensor tensors[3];
        for (int t = 0; t < 3; t++)
            tensors[t] = (fst_save_tensor){.struct_size = sizeof *tensors,
                                           .name = names[t],
                                           .name_size = SIZE_MAX,
                                           .dtype = FST_DTYPE_U8,
                                           .rank = 1,
                                           .shape = &sizes[t],
                                           .data = bytes + (t == 0   ? 0
                                                            : t == 1 ? 79
                                                                     : 80) *
                                                               MIB};
        fst_async_options options = async_options_of(FST_STAGE_NONE);
        fst_async_save *save;
        CHECK_INT(fst_async_save_start(fixture_path("small"), tensors, 3, &options, &save, NULL),
                  FST_OK);
        bytes[79 * MIB + first[i]] ^= 1;
        CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_E_FILE_CHANGED);
        fst_async_save_close(save);
    }
}

TEST(memory_that_is_freed_meanwhile_is_an_error)
{
    uint64_t bytes = 128 * MIB; // more than the ring of 32 MiB holds
    char *gone = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "gone",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = &bytes,
                              .data = gone};
    fst_async_options options = async_options_of(FST_STAGE_NONE);
    fst_async_save *save;
    CHECK_INT(fst_async_save_start(fixture_path("gone"), &tensor, 1, &options, &save, NULL),
              FST_OK);
    munmap(gone + bytes / 2, bytes / 2);
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_E_FILE_CHANGED);
    fst_async_save_close(save);
    CHECK_INT(access(fixture_path("gone"), F_OK), -1);
    munmap(gone, bytes / 2);
}

TEST(a_cancelled_save_leaves_the_old_file)
{
    for (unsigned round = 0; round < (check_share() > 1 ? 12 : 60); round++) {
        fst_async_save *save;
        fst_async_options options = async_options_of((fst_stage)(round % FST_STAGE_COUNT));
        async_fill('o');
        CHECK_INT(async_save_sync(fixture_path("cancelled")), FST_OK);
        async_fill('n');
        CHECK_INT(async_start(fixture_path("cancelled"), &options, &save), FST_OK);
        usleep(round * 200);
        fst_async_save_cancel(save);
        fst_status status = fst_async_save_wait(save, -1, NULL);
        CHECK(status == FST_OK || status == FST_E_CANCELLED);
        CHECK_INT(async_value_at(fixture_path("cancelled")), status == FST_OK ? 'n' : 'o');
        fst_async_save_close(save);
    }
}

static atomic_int logged;
static void count_warnings(void *context, fst_log_level level, const char *line) {
    (void)context;
    if (level == FST_LOG_WARNING && strstr(line, "never requested") != NULL)
        atomic_fetch_add(&logged, 1);
}

TEST(an_error_that_nobody_asks_for_is_logged)
{
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_log_set(count_warnings, NULL, FST_LOG_WARNING);
    CHECK_INT(async_start(fixture_path("none/file"), &options, &save), FST_OK);
    fst_async_save_close(save);
    for (int i = 0; i < 5000 && atomic_load(&logged) == 0; i++) usleep(1000);
    CHECK_INT(atomic_load(&logged), 1);
    CHECK_INT(async_start(fixture_path("none/file"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_E_NOT_FOUND);
    fst_async_save_close(save);
    fst_log_set(NULL, NULL, FST_LOG_WARNING);
    CHECK_INT(atomic_load(&logged), 1);
}

TEST(a_child_of_fork_has_no_saves)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    fst_staging_pool *pool;
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK_INT(fst_staging_open(0, 32 * MIB, &pool, NULL), FST_OK);
    options.pool = pool;
    async_fill('f');
    CHECK_INT(async_start(fixture_path("forked"), &options, &save), FST_OK);
    pid_t child = fork();
    if (child == 0) {
        fst_async_save *own;
        int wrong = fst_async_save_wait(save, -1, NULL) != FST_E_UNSUPPORTED;
        wrong += fst_async_save_stage(save, -1, NULL) != FST_E_UNSUPPORTED;
        wrong += async_stats_of(save).bytes_total != UINT64_MAX;
        fst_async_save_cancel(save);
        fst_async_save_close(save);
        wrong += async_start(fixture_path("child"), &options, &own) != FST_E_UNSUPPORTED;
        fst_staging_close(pool);
        options.pool = NULL;
        wrong += async_start(fixture_path("child"), &options, &own) != FST_OK;
        wrong += own != NULL && fst_async_save_wait(own, -1, NULL) != FST_OK;
        wrong += async_value_at(fixture_path("child")) != 'f';
        _exit(wrong);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("forked")), 'f');
    fst_async_save_close(save);
    fst_staging_close(pool);
}

/// A set that this process publishes in place of several.
typedef struct joint_set {
    const char *folder;
    fst_status answer, status; ///< what the call returns, and what it was given
    size_t path_count;
    int call_count;
} joint_set;

static fst_status publish_joint_set(void *context, fst_status status, const char *const *paths,
                                    size_t path_count, fst_error *error) {
    joint_set *set = context;
    set->call_count++;
    set->status = status;
    set->path_count = path_count;
    if (status != FST_OK) return status;
    if (set->answer != FST_OK) {
        *error = (fst_error){.status = set->answer, .message = "another process has failed"};
        return set->answer;
    }
    return fst_set_publish(set->folder, paths, path_count, NULL, NULL, error);
}

static void save_joint_set(joint_set *set, const char *folder, bool is_cancelled,
                           fst_status wanted) {
    fst_save_tensor tensors[TENSOR_COUNT];
    fst_save_options save = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_async_save *handle;
    fst_error error;
    async_make_tensors(tensors);
    set->folder = folder;
    save.file_count = 2;
    for (uint32_t i = 0; i < TENSOR_COUNT; i++) tensors[i].file_index = i % 2;
    save.progress = is_cancelled ? async_hold : NULL;
    options.save = &save;
    options.publish = publish_joint_set;
    options.publish_context = set;
    atomic_store(&async_may_write, false);
    CHECK_INT(fst_async_save_start(folder, tensors, TENSOR_COUNT, &options, &handle, NULL), FST_OK);
    if (is_cancelled) fst_async_save_cancel(handle);
    atomic_store(&async_may_write, true);
    fst_status status = fst_async_save_wait(handle, -1, &error);
    fst_async_save_close(handle);
    CHECK_INT(set->call_count, 1);
    CHECK_INT(status, wanted);
    if (status != FST_OK) CHECK_INT(error.status, wanted);
}

TEST(a_joint_set_is_published_by_the_program)
{
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", fixture_path("joint"));
    for (int round = 0; round < 2; round++) {
        joint_set set = {0};
        async_fill((unsigned char)('j' + round));
        save_joint_set(&set, folder, false, FST_OK);
        CHECK_INT(set.path_count, 2);
        CHECK_INT(async_value_at(folder), 'j' + round);
    }
    // Whatever goes wrong, the old set stays.
    async_fill('x');
    joint_set failed = {.answer = FST_E_IO}, cancelled = {0};
    save_joint_set(&failed, folder, false, FST_E_IO);
    CHECK_INT(failed.path_count, 2);
    save_joint_set(&cancelled, folder, true, FST_E_CANCELLED);
    CHECK_INT(cancelled.status, FST_E_CANCELLED);
    CHECK_INT(cancelled.path_count, 0);
    CHECK_INT(async_value_at(folder), 'k');
    // Nor does any file stay where there was no set; another process may use the folder.
    snprintf(folder, sizeof folder, "%s", fixture_path("unjoined"));
    failed.call_count = 0;
    save_joint_set(&failed, folder, false, FST_E_IO);
    CHECK_INT(rmdir(folder), 0);
}

TEST(the_process_that_publishes_makes_the_manifest)
{
    fst_save_options save = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_async_save *handle;
    save.manifest = "";
    options.save = &save;
    options.publish = publish_joint_set;
    CHECK_INT(async_start(fixture_path("manifest"), &options, &handle), FST_E_UNSUPPORTED);
    CHECK(handle == NULL);
}

TEST(timeouts_end_waits)
{
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.memory_bytes = 1;
    options.start_timeout_ms = 1;
    async_fill('t');
    CHECK_INT(async_start(fixture_path("late"), &options, &save), FST_OK);
    fst_status status = FST_E_TIMEOUT;
    while (status == FST_E_TIMEOUT) status = fst_async_save_stage(save, 1, NULL);
    CHECK_INT(status, FST_OK);
    async_fill('x');
    status = FST_E_TIMEOUT;
    while (status == FST_E_TIMEOUT) status = fst_async_save_wait(save, 1, NULL);
    CHECK_INT(status, FST_OK);
    CHECK_INT(async_value_at(fixture_path("late")), 't');
    fst_async_save_close(save);
}

TEST(no_memory_at_any_allocation)
{
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    async_fill('o');
    CHECK_INT(async_save_sync(fixture_path("poor")), FST_OK);
    long live = fsti_alloc_live();
    for (long n = 0;; n += check_share() == 1 ? 1 : CHECK_SANITIZED_THREADS ? 7 : 3) {
        fst_async_save *save;
        async_fill('n');
        fsti_alloc_fail_after(n);
        fst_status status = async_start(fixture_path("poor"), &options, &save);
        if (status == FST_OK) status = fst_async_save_wait(save, -1, NULL);
        fsti_alloc_fail_after(-1);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        if (save != NULL) fst_async_save_close(save);
        // The writing thread may still be leaving.
        for (int i = 0; i < 5000 && fsti_alloc_live() != live; i++) usleep(1000);
        CHECK_INT(fsti_alloc_live(), live);
        CHECK_INT(async_value_at(fixture_path("poor")), status == FST_OK ? 'n' : 'o');
        if (status == FST_OK) break;
    }
}
