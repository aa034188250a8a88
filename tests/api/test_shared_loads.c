// SPDX-License-Identifier: Apache-2.0
/// Loads with FST_SHARE_NODE in several processes: bytes read, memory, kills, changed files, and
/// requests that differ.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "load_fixture.h"

#define MODEL_BYTES (COUNT * BYTES)
#define WAIT_MS 60000
#define PROCESS_COUNT 8

/// Sends segments to a folder of the test, and writes the model.
static const char *use_folder(const char *name) {
    const char *folder = fixture_path(name);
    setenv("FASTSAFETENSORS_SHARE_DIR", folder, 1);
    unsetenv("FASTSAFETENSORS_SHARE_GRACE");
    unsetenv("FASTSAFETENSORS_SHARE_MAX");
    fst_model_close(open_tensors());
    return folder;
}

static size_t count_segments(const char *path) {
    DIR *folder = opendir(path);
    size_t count = 0;
    const struct dirent *entry;
    if (folder == NULL) return 0;
    while ((entry = readdir(folder)) != NULL) count += strlen(entry->d_name) == 32;
    closedir(folder);
    return count;
}

static fst_load_options shared_options(void) {
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.share = FST_SHARE_NODE;
    return options;
}

/// A load with all its tensors.
typedef struct loaded {
    fst_tensor *tensors[COUNT];
    fst_load_stats stats;
} loaded;

/// Loads and checks every byte. 0, or the number of the step that failed.
static int load_all(const fst_load_options *options, loaded *out) {
    fst_model *model;
    fst_loader *loader;
    *out = (loaded){.stats = {.struct_size = sizeof out->stats}};
    if (fst_model_open(fixture_path("tensors"), NULL, &model, NULL) != FST_OK) return 1;
    if (fst_loader_open(model, options, &loader, NULL) != FST_OK) return 2;
    fst_model_close(model);
    for (size_t i = 0; i < COUNT; i++) {
        if (fst_loader_next(loader, WAIT_MS, &out->tensors[i], NULL) != FST_OK) return 3;
        if (!options->convert && !is_tensor(out->tensors[i], i)) return 4;
    }
    if (fst_loader_stats_get(loader, &out->stats, NULL) != FST_OK) return 5;
    fst_loader_close(loader);
    return 0;
}

static void release_all(loaded *load) {
    for (size_t i = 0; i < COUNT; i++) fst_tensor_unref(load->tensors[i]);
}

/// What a child reports about its load.
typedef struct account {
    int failed_step;
    uint64_t bytes_read, shared_bytes, storage_bytes;
} account;

/// Bytes that this process has read from storage.
static uint64_t count_storage(void) {
    FILE *file = fopen("/proc/self/io", "r");
    char line[128];
    unsigned long long bytes = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "read_bytes: %llu", &bytes) == 1) break;
    if (file != NULL) fclose(file);
    return bytes;
}

/// Bytes of shared memory of a process, each divided by the number of its users.
static uint64_t count_memory(pid_t process) {
    char path[64], line[128];
    unsigned long long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)process);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "Pss: %llu kB", &kib) == 1) break;
    if (file != NULL) fclose(file);
    return kib << 10;
}

/// Children that load at the same time and then hold their tensors.
typedef struct group {
    pid_t children[PROCESS_COUNT];
    account accounts[PROCESS_COUNT];
    int gate[2], reports[2];
} group;

static void run_child(const group *all) {
    char byte;
    loaded load;
    account mine = {0};
    close(all->gate[1]);
    if (read(all->gate[0], &byte, 1) != 0) _exit(1); // until the parent closes it
    uint64_t before = count_storage();
    const fst_load_options options = shared_options();
    mine.failed_step = load_all(&options, &load);
    mine.storage_bytes = count_storage() - before;
    mine.bytes_read = load.stats.bytes_read;
    mine.shared_bytes = load.stats.shared_bytes;
    if (write(all->reports[1], &mine, sizeof mine) != (ssize_t)sizeof mine) _exit(2);
    for (;;) pause();
}

/// Starts the children, and returns when all have loaded.
static void start_group(group *all) {
    if (pipe(all->gate) != 0 || pipe(all->reports) != 0) abort();
    for (size_t i = 0; i < PROCESS_COUNT; i++) {
        all->children[i] = fork();
        if (all->children[i] == 0) run_child(all);
    }
    close(all->gate[0]);
    close(all->gate[1]);
    for (size_t i = 0; i < PROCESS_COUNT; i++)
        if (read(all->reports[0], &all->accounts[i], sizeof(account)) != (ssize_t)sizeof(account))
            abort();
    close(all->reports[0]);
    close(all->reports[1]);
}

static void end_group(const group *all) {
    for (size_t i = 0; i < PROCESS_COUNT; i++) kill(all->children[i], SIGKILL);
    for (size_t i = 0; i < PROCESS_COUNT; i++) waitpid(all->children[i], NULL, 0);
}

TEST(eight_processes_read_every_byte_once_and_hold_it_once)
{
    const char *folder = use_folder("eight");
    fixture_evict(fixture_path("tensors"));
    group all;
    start_group(&all);
    uint64_t bytes_read = 0, storage_bytes = 0, memory_bytes = 0, own_bytes = 0;
    int failed_step = 0;
    bool is_complete = true;
    for (size_t i = 0; i < PROCESS_COUNT; i++) {
        const account *one = &all.accounts[i];
        if (failed_step == 0) failed_step = one->failed_step;
        is_complete &= one->bytes_read + one->shared_bytes == MODEL_BYTES;
        bytes_read += one->bytes_read;
        storage_bytes += one->storage_bytes;
        memory_bytes += count_memory(all.children[i]);
    }
    end_group(&all);
    // A process that loads nothing.
    pid_t idle = fork();
    if (idle == 0)
        for (;;) pause();
    own_bytes = count_memory(idle);
    kill(idle, SIGKILL);
    waitpid(idle, NULL, 0);
    CHECK_INT(failed_step, 0);
    CHECK(is_complete);
    CHECK_INT(bytes_read, MODEL_BYTES);
    CHECK(storage_bytes <= MODEL_BYTES / 100 * 105);
    // What each process has besides is a few megabytes; without sharing it would be 128 MB.
    CHECK(CHECK_SANITIZED ||
          memory_bytes <= MODEL_BYTES / 100 * 105 + PROCESS_COUNT * (own_bytes + (4u << 20)));
    // All were killed. The next load cleans up.
    CHECK_INT(count_segments(folder), 1);
    loaded load;
    const fst_load_options options = shared_options();
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_INT(load.stats.bytes_read, 0);
    CHECK_INT(load.stats.shared_bytes, MODEL_BYTES);
    release_all(&load);
    CHECK_INT(count_segments(folder), 0);
}

TEST(stores_to_a_tensor_reach_no_other_load)
{
    use_folder("stores");
    const fst_load_options options = shared_options();
    loaded first, second;
    CHECK_INT(load_all(&options, &first), 0);
    CHECK_INT(load_all(&options, &second), 0);
    CHECK_INT(second.stats.shared_bytes, MODEL_BYTES);
    CHECK_CONTAINS(second.stats.reason, "in memory that the node's processes share");
    fst_tensor_view view = view_of(first.tensors[3]);
    CHECK(view.writable);
    memset(view.data, 0, view.size_bytes);
    CHECK(is_tensor(second.tensors[3], 3));
    loaded third;
    CHECK_INT(load_all(&options, &third), 0);
    release_all(&first);
    release_all(&second);
    release_all(&third);
}

TEST(a_segment_outlives_its_last_user_by_the_grace_period)
{
    const char *folder = use_folder("grace");
    fst_load_options options = shared_options();
    options.share_grace_s = 100;
    loaded load;
    CHECK_INT(load_all(&options, &load), 0);
    release_all(&load);
    CHECK_INT(count_segments(folder), 1);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_INT(load.stats.bytes_read + load.stats.read_count, 0);
    CHECK_INT(load.stats.shared_bytes, MODEL_BYTES);
    release_all(&load);
    // The value of the last load counts.
    options.share_grace_s = 0;
    CHECK_INT(load_all(&options, &load), 0);
    release_all(&load);
    CHECK_INT(count_segments(folder), 0);
}

TEST(a_changed_file_is_a_new_segment)
{
    use_folder("changed");
    fst_load_options options = shared_options();
    options.share_grace_s = 100;
    loaded load;
    CHECK_INT(load_all(&options, &load), 0);
    release_all(&load);
    // The same bytes and times, written again.
    struct stat stamp;
    char byte;
    int fd = open(fixture_path("tensors"), O_RDWR);
    CHECK_INT(fstat(fd, &stamp), 0);
    CHECK_INT(pread(fd, &byte, 1, stamp.st_size - 1), 1);
    CHECK_INT(pwrite(fd, &byte, 1, stamp.st_size - 1), 1);
    const struct timespec times[2] = {stamp.st_atim, stamp.st_mtim};
    CHECK_INT(futimens(fd, times), 0);
    close(fd);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_INT(load.stats.bytes_read, MODEL_BYTES);
    release_all(&load);
    CHECK_INT(fst_segment_drop(NULL, NULL, NULL, NULL), FST_OK);
}

/// A large write() changes the times first and the bytes later, and a store through a mapping
/// changes the times only if its page was clean.
TEST(files_that_are_open_for_writing_are_not_shared)
{
    const char *folder = use_folder("written");
    fst_load_options options = shared_options();
    loaded load;
    options.share_grace_s = 100;
    int fd = open(fixture_path("tensors"), O_RDWR);
    CHECK(fd >= 0);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_CONTAINS(load.stats.reason, "in memory of this process: a process has a file open for");
    CHECK_INT(count_segments(folder), 0);
    release_all(&load);
    void *mapping = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(mapping != MAP_FAILED);
    close(fd);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_CONTAINS(load.stats.reason, "a process has a file open for writing");
    release_all(&load);
    CHECK_INT(munmap(mapping, 4096), 0);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_INT(count_segments(folder), 1);
    release_all(&load);
    // A segment that others may go on using is no use while the file is changed.
    fd = open(fixture_path("tensors"), O_RDWR);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_INT(load.stats.bytes_read, MODEL_BYTES);
    release_all(&load);
    close(fd);
    CHECK_INT(fst_segment_drop(NULL, NULL, NULL, NULL), FST_OK);
}

TEST(other_requests_use_other_segments)
{
    const char *folder = use_folder("requests");
    fst_load_options whole = shared_options(), reversed = whole;
    fst_part parts[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        parts[i] = (fst_part){.struct_size = sizeof *parts, .tensor_index = COUNT - 1 - i};
    reversed.parts = parts;
    reversed.part_count = COUNT;
    reversed.order = FST_ORDER_REQUEST;
    fst_model *model;
    fst_loader *loader;
    loaded load;
    CHECK_INT(load_all(&whole, &load), 0);
    CHECK_INT(fst_model_open(fixture_path("tensors"), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &reversed, &loader, NULL), FST_OK);
    CHECK_INT(count_segments(folder), 2);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *tensor;
        CHECK_INT(fst_loader_tensor_at(loader, i, WAIT_MS, &tensor, NULL), FST_OK);
        CHECK(is_tensor(tensor, COUNT - 1 - i));
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    release_all(&load);
    CHECK_INT(count_segments(folder), 0);
}

/// Loads in a child that may be killed; the child's result.
static pid_t start_load(void) {
    pid_t child = fork();
    if (child != 0) return child;
    loaded load;
    const fst_load_options options = shared_options();
    int failed_step = load_all(&options, &load);
    if (failed_step == 0) release_all(&load);
    _exit(failed_step);
}

TEST(killed_processes_harm_no_other)
{
    const char *folder = use_folder("kills");
    uint64_t state = 7;
    for (unsigned round = 0; round < CHECK_ROUNDS(200); round++) {
        pid_t children[4];
        for (size_t i = 0; i < 4; i++) children[i] = start_load();
        const struct timespec pause = {.tv_nsec = (long)(fixture_random(&state) % 30000000)};
        nanosleep(&pause, NULL);
        size_t killed = round % 3 + 1; // one to three of four
        for (size_t i = 0; i < killed; i++) kill(children[i], SIGKILL);
        for (size_t i = 0; i < 4; i++) {
            int status;
            CHECK_INT(waitpid(children[i], &status, 0), children[i]);
            if (i < killed) continue;
            CHECK(WIFEXITED(status));
            CHECK_INT(WEXITSTATUS(status), 0);
        }
    }
    // At most what a killed process left is there, and the next load removes it.
    loaded load;
    const fst_load_options options = shared_options();
    CHECK_INT(load_all(&options, &load), 0);
    release_all(&load);
    CHECK_INT(count_segments(folder), 0);
}

TEST(loads_without_shared_memory_say_why)
{
    const char *folder = use_folder("own");
    fst_load_options options = shared_options();
    loaded load;
    CHECK_INT(mkdir(folder, 0755), 0);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_CONTAINS(load.stats.reason, "in memory of this process: the folder for shared segments");
    release_all(&load);
    CHECK_INT(chmod(folder, 0700), 0);
    setenv("FASTSAFETENSORS_SHARE_MAX", "1M", 1);
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_CONTAINS(load.stats.reason, "limit of 1048576");
    release_all(&load);
    unsetenv("FASTSAFETENSORS_SHARE_MAX");
    // Mapped tensors share the page cache.
    options.mode = FST_MODE_AUTO;
    CHECK_INT(load_all(&options, &load), 0);
    CHECK_CONTAINS(load.stats.reason, "shared through the page cache");
    release_all(&load);
    CHECK_INT(count_segments(folder), 0);
}

/// The segment is mapped twice, and a copy of this process needs the space once.
TEST(loads_fit_in_a_limited_address_space)
{
    use_folder("limited");
    const fst_load_options options = shared_options();
    struct rlimit before, limited;
    loaded load;
    unsigned long pages;
    if (CHECK_SANITIZED) SKIP("a sanitizer's own memory is beyond any limit");
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    CHECK_INT(getrlimit(RLIMIT_AS, &before), 0);
    limited = before;
    limited.rlim_cur = pages * 4096 + MODEL_BYTES * 3 / 2;
    CHECK_INT(setrlimit(RLIMIT_AS, &limited), 0);
    int failed_step = load_all(&options, &load);
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    CHECK_INT(failed_step, 0);
    CHECK_CONTAINS(load.stats.reason, "in memory of this process: the address space is limited");
    release_all(&load);
}

TEST(bytes_of_the_program_are_not_shared)
{
    const char *folder = use_folder("source");
    const fst_load_options options = shared_options();
    size_t size = MODEL_BYTES + 8192;
    char *bytes = malloc(size);
    int fd = open(fixture_path("tensors"), O_RDONLY);
    CHECK(bytes != NULL);
    ssize_t got = read(fd, bytes, size);
    close(fd);
    fst_source source = {.struct_size = sizeof source, .data = bytes, .size_bytes = (uint64_t)got};
    fst_model *model;
    fst_loader *loader;
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, WAIT_MS, NULL), FST_OK);
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
    free(bytes);
    CHECK_CONTAINS(stats.reason, "nothing identifies the version of a file");
    CHECK_INT(count_segments(folder), 0);
}

TEST(options_that_exclude_shared_memory_are_refused)
{
    use_folder("refused");
    fst_model *model = open_tensors();
    fst_loader *loader;
    fst_error error;
    char byte;
    fst_part part = {.struct_size = sizeof part, .destination = &byte, .destination_bytes = BYTES};
    fst_load_options wrong[5];
    for (size_t i = 0; i < 5; i++) wrong[i] = shared_options();
    wrong[0].budget_bytes = 1 << 24;
    wrong[1].device.kind = FST_DEVICE_CUDA;
    wrong[2].parts = &part;
    wrong[2].part_count = 1;
    wrong[3].share = (fst_share)FST_SHARE_COUNT;
    wrong[4].share = FST_SHARE_OFF;
    wrong[4].share_grace_s = 1;
    static const char *const words[] = {"a budget has no effect on shared memory",
                                        "shared memory is on the CPU", "part 0 has a destination",
                                        "unknown share 2", "share_grace_s has no effect"};
    for (size_t i = 0; i < 5; i++) {
        CHECK_INT(fst_loader_open(model, &wrong[i], &loader, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, words[i]);
    }
    fst_model_close(model);
}
