// SPDX-License-Identifier: Apache-2.0
/// Files, residency, engines and the SIGBUS guard.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "io/io_private.h"

#define FILE_BYTES ((uint64_t)300000)

static fsti_file *open_pattern(const char *name) {
    static char json[1] = "";
    // The first eight bytes are a length of zero: byte i of the file is fixture_byte(i - 8).
    const char *path = fixture_model(name, json, FILE_BYTES - 8);
    fsti_file *file = NULL;
    if (fsti_file_open(path, &file, NULL) != FST_OK) abort();
    return file;
}

static void read_everywhere(const fsti_io_engine *engine) {
    fsti_file *file = open_pattern("pattern");
    char reason[200];
    if (!engine->usable(file, reason, sizeof reason)) {
        fsti_file_unref(file);
        SKIP("the engine does not work here");
    }
    enum { DEPTH = 16 };
    void *lane;
    CHECK_INT(engine->lane_open(DEPTH, &lane, NULL), FST_OK);
    char *memory = aligned_alloc(4096, DEPTH * 8192);
    fsti_io_op reads[DEPTH];
    for (int i = 0; i < DEPTH; i++) {
        reads[i] = (fsti_io_op){
            .file = file, .offset = (uint64_t)i * 16384, .size = 8192, .buffer = memory + i * 8192};
        engine->submit(lane, &reads[i]);
    }
    for (int i = 0; i < DEPTH; i++) {
        fsti_io_op *read = engine->reap(lane);
        CHECK(read != NULL);
        CHECK_INT(read->result, 8192);
        uint64_t skip = read->offset == 0 ? 8 : 0;
        CHECK(
            fixture_matches((const char *)read->data + skip, read->offset + skip - 8, 8192 - skip));
    }
    CHECK(engine->reap(lane) == NULL);
    engine->lane_close(lane);
    free(memory);
    fsti_file_unref(file);
}

/// A file is not refused because its mapping can't be populated; its pages are read when they are
/// accessed. Here one page is unmapped, which is ENOMEM.
static fst_status map_whole(fsti_file *file, void **out) {
    fsti_map_range range = {0, fsti_file_size(file), false};
    return fsti_file_map_private(file, &range, out, NULL);
}

TEST(pages_that_cannot_be_prefaulted_are_read)
{
    fsti_file *file = open_pattern("pattern");
    void *mapping;
    uint64_t page = fsti_page_bytes();
    fixture_evict(fsti_file_path(file));
    CHECK_INT(map_whole(file, &mapping), FST_OK);
    CHECK_INT(munmap((char *)mapping + page, page), 0);
    CHECK_INT(fsti_file_populate(file, mapping, 0, 3 * page, NULL), FST_OK);
    CHECK_INT(fsti_file_populate(file, mapping, page, FILE_BYTES, NULL), FST_OK);
    fsti_io_unmap(mapping, fsti_file_size(file));
    fsti_file_unref(file);
}

TEST(pread_reads)
{
    read_everywhere(&fsti_io_engine_pread);
}
TEST(direct_reads)
{
    read_everywhere(&fsti_io_engine_direct);
}
/// A save computes digests while its writes run, before it reaps them.
TEST(a_write_by_io_uring_begins_when_it_is_submitted)
{
    char reason[200];
    void *lane;
    const char *path = fixture_path("written");
    fsti_file *file = open_pattern("pattern");
    bool works = fsti_io_engine_uring.usable(file, reason, sizeof reason);
    fsti_file_unref(file);
    if (!works) SKIP("io_uring or direct I/O does not work here");
    int fd = open(path, O_RDWR | O_CREAT | O_DIRECT, 0600);
    char *memory = aligned_alloc(4096, 8192), first = 0;
    CHECK(fd >= 0 && memory != NULL);
    memset(memory, 'w', 8192);
    CHECK_INT(fsti_io_engine_uring.lane_open(1, &lane, NULL), FST_OK);
    fsti_io_op op = {.is_write = true, .write_fd = fd, .size = 4096, .buffer = memory};
    fsti_io_engine_uring.submit(lane, &op);
    for (int i = 0; i < 5000 && first != 'w'; i++) {
        usleep(1000);
        if (pread(fd, memory + 4096, 4096, 0) == 4096) first = memory[4096];
    }
    CHECK_INT(first, 'w');
    CHECK(fsti_io_engine_uring.reap(lane) == &op);
    CHECK_INT(op.result, 4096);
    fsti_io_engine_uring.lane_close(lane);
    close(fd);
    free(memory);
}

TEST(uring_reads)
{
    read_everywhere(&fsti_io_engine_uring);
}
TEST(mmap_reads)
{
    read_everywhere(&fsti_io_engine_mmap);
}

TEST(irregular_files_are_refused)
{
    fsti_file *file;
    fst_error error;
    CHECK_INT(fsti_file_open(fixture_path("none"), &file, &error), FST_E_NOT_FOUND);
    CHECK_INT(fsti_file_open(fixture_path("."), &file, &error), FST_E_NOT_REGULAR);
    CHECK_CONTAINS(error.message, "folder");
    const char *fifo = fixture_path("fifo");
    CHECK_INT(mkfifo(fifo, 0600), 0);
    CHECK_INT(fsti_file_open(fifo, &file, &error), FST_E_NOT_REGULAR); // without blocking
    CHECK_CONTAINS(error.message, "FIFO");
    CHECK_INT(fsti_file_open("/dev/null", &file, &error), FST_E_NOT_REGULAR);
    CHECK_CONTAINS(error.message, "device");
    const char *secret = fixture_file("secret", "x", 1);
    chmod(secret, 0);
    // Root can read everything, so become another user for this test.
    uid_t user = geteuid();
    if (user != 0 || seteuid(65534) == 0) {
        CHECK_INT(fsti_file_open(secret, &file, &error), FST_E_PERMISSION);
        CHECK_INT(seteuid(user), 0);
    }
}

TEST(change_is_noticed)
{
    fsti_file *file = open_pattern("changing");
    const char *path = fixture_path("changing");
    fst_error error;
    CHECK_INT(fsti_file_check(file, &error), FST_OK);
    // Replaced by rename: our descriptor still reads the old file, whole.
    const char *other = fixture_file("other", "abc", 3);
    CHECK_INT(rename(other, path), 0);
    CHECK_INT(fsti_file_check(file, &error), FST_OK);
    fsti_file_unref(file);
    file = open_pattern("changing");
    CHECK_INT(truncate(path, 100), 0);
    CHECK_INT(fsti_file_check(file, &error), FST_E_FILE_CHANGED);
    CHECK_CONTAINS(error.message, "now 100");
    fsti_file_unref(file);
    file = open_pattern("changing");
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1000}};
    CHECK_INT(utimensat(AT_FDCWD, path, times, 0), 0);
    CHECK_INT(fsti_file_check(file, &error), FST_E_FILE_CHANGED);
    fsti_file_unref(file);
}

TEST(writers_are_noticed)
{
    fsti_file *file = open_pattern("written");
    const unsigned hidden[] = {0, FSTI_TEST_NO_PROC};
    for (size_t i = 0; i < 2; i++) {
        fsti_io_test_disable(hidden[i]);
        CHECK(!fsti_file_has_writer(file));
        int fd = open(fixture_path("written"), O_RDWR);
        CHECK(fd >= 0);
        CHECK(fsti_file_has_writer(file));
        close(fd);
        CHECK(!fsti_file_has_writer(file));
    }
    fsti_io_test_disable(0);
    fsti_file_unref(file);
}

enum { STREAM_BYTES = 8 << 20 };
static uint64_t resident_ahead; ///< of the last MiB, when its first block was read

/// A busy disk may take a while.
static void look_ahead(fsti_io_op *read) {
    const uint64_t bytes = 1 << 20;
    if (read->offset != STREAM_BYTES / 2) return;
    for (int i = 0; i < 3000 && resident_ahead < bytes; i++) {
        usleep(1000);
        (void)fsti_file_resident(read->file, STREAM_BYTES - bytes, STREAM_BYTES, &resident_ahead);
    }
}

/// Streams the file in two halves: -1 if it can't be evicted, else whether all of it was read.
static int stream_halves(const char *path, uint64_t *read_count) {
    fsti_file *file;
    fsti_file_stream *stream;
    uint64_t bytes = 0;
    *read_count = 0;
    fixture_evict(path);
    if (fsti_file_open(path, &file, NULL) != FST_OK) return 0;
    bool evicts = fsti_file_resident(file, 0, STREAM_BYTES, &bytes) && bytes == 0;
    bool is_read =
        fsti_stream_open(file, UINT64_MAX, &stream, NULL) == FST_OK &&
        fsti_stream_read(stream, 0, STREAM_BYTES / 2, read_count, NULL) == FST_OK &&
        fsti_stream_read(stream, STREAM_BYTES / 2, STREAM_BYTES, read_count, NULL) == FST_OK;
    fsti_stream_close(stream);
    is_read = is_read && fsti_file_resident(file, 0, STREAM_BYTES, &bytes);
    fsti_file_unref(file);
    return evicts ? is_read && bytes == STREAM_BYTES : -1;
}

TEST(streams_fill_the_page_cache)
{
    static const unsigned hidden[] = {0, FSTI_TEST_NO_PROC, FSTI_TEST_NO_AHEAD};
    const char *path = fixture_tensors("stream", 1, STREAM_BYTES);
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        uint64_t read_count;
        resident_ahead = 0;
        fsti_io_test_disable(hidden[i]);
        if (hidden[i] == FSTI_TEST_NO_AHEAD) fsti_io_fault_hook_set(look_ahead);
        int result = stream_halves(path, &read_count);
        fsti_io_fault_hook_set(NULL);
        fsti_io_test_disable(0);
        if (result < 0) SKIP("this file system does not evict on request");
        CHECK_INT(result, 1);
        // The kernel may return less than was asked for.
        CHECK(read_count >= STREAM_BYTES >> 18 && read_count <= (STREAM_BYTES >> 18) + 4);
        // Without readahead the kernel is advised of the whole half before it is read.
        if (hidden[i] == FSTI_TEST_NO_AHEAD) CHECK_INT(resident_ahead, 1 << 20);
    }
}

/// A part of a file costs its own bytes, whatever window the device is read ahead by.
TEST(streams_do_not_read_past_their_end)
{
    enum { MIB = 1 << 20 };
    const char *path = fixture_tensors("part", 1, 64 * MIB);
    fsti_file *file;
    fsti_file_stream *stream;
    uint64_t bytes, read_count = 0;
    fixture_evict(path);
    CHECK_INT(fsti_file_open(path, &file, NULL), FST_OK);
    if (!fsti_file_resident(file, MIB, 60 * MIB, &bytes) || bytes > 0) {
        fsti_file_unref(file);
        SKIP("this file system does not evict on request");
    }
    CHECK_INT(fsti_stream_open(file, 7 * MIB, &stream, NULL), FST_OK);
    CHECK_INT(fsti_stream_read(stream, MIB, 4 * MIB, &read_count, NULL), FST_OK);
    CHECK_INT(fsti_stream_read(stream, 4 * MIB, 7 * MIB, &read_count, NULL), FST_OK);
    fsti_stream_close(stream);
    CHECK_INT(read_count, 24);
    CHECK(fsti_file_resident(file, MIB, 7 * MIB, &bytes));
    CHECK_INT(bytes, 6 * MIB);
    CHECK(fsti_file_resident(file, 8 * MIB, 60 * MIB, &bytes));
    CHECK_INT(bytes, 0);
    fsti_file_unref(file);
}

/// Counting the pages of tmpfs takes as long as mapping them, and they need no reads. Holes are not
/// resident: mapping them would allocate them.
TEST(files_in_memory_are_resident_without_holes)
{
    enum { PAGE = 4096, BYTES = 256 * PAGE, TMPFS = 0x01021994 };
    char path[] = "/dev/shm/fastsafetensors-XXXXXX";
    static const char page[PAGE] = "x";
    struct statfs info;
    int fd = statfs("/dev/shm", &info) == 0 && info.f_type == TMPFS ? mkstemp(path) : -1;
    if (fd < 0) SKIP("/dev/shm is not a writable tmpfs");
    for (int holes = 1; holes >= 0; holes--) {
        fsti_file *file;
        uint64_t bytes;
        CHECK_INT(ftruncate(fd, BYTES), 0);
        for (off_t at = holes * PAGE; at < BYTES; at += PAGE)
            CHECK_INT(pwrite(fd, page, PAGE, at), PAGE);
        CHECK_INT(fsti_file_open(path, &file, NULL), FST_OK);
        CHECK(fsti_file_resident(file, 0, BYTES, &bytes));
        CHECK_INT(bytes, BYTES - holes * PAGE);
        CHECK_INT(fsti_io_file_is_memory(file), holes == 0);
        fsti_io_request request = {.buffer_bytes = BYTES};
        fsti_io_facts facts;
        fsti_io_probe(file, &request, &facts);
        CHECK_INT(facts.copies_mapping, holes); // small pages are copied by read(2)
        fsti_file_unref(file);
    }
    close(fd);
    unlink(path);
}

/// Small copies leave their pages mapped, up to a limit.
TEST(kept_pages_are_limited)
{
    enum { MIB = 1 << 20 };
    const char *path = fixture_tensors("kept", 1, MIB);
    fsti_file *file;
    CHECK_INT(fsti_file_open(path, &file, NULL), FST_OK);
    CHECK(fsti_io_file_mapping(file) != NULL);
    // Each range counts with the huge pages in which it lies.
    for (int i = 0; i < 16; i++) CHECK(fsti_io_keep_mapped(file, MIB, 3 * MIB));
    CHECK(!fsti_io_keep_mapped(file, 0, 1));
    CHECK(fsti_io_keep_mapped(file, 0, 64 * MIB)); // all were unmapped, so the count began again
    CHECK(!fsti_io_keep_mapped(file, 0, 1));
    fsti_file_unref(file);
}

/// The number that the next descriptor will have.
static int next_descriptor(void) {
    int fd = dup(STDIN_FILENO);
    if (fd >= 0) close(fd);
    return fd;
}

TEST(streams_do_not_reopen_cache_dropping_files)
{
    if (access("/dev/shm", W_OK) != 0) SKIP("no /dev/shm");
    char memory[] = "/dev/shm/fst-test-XXXXXX";
    int fd = mkstemp(memory);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    close(fd);
    const char *paths[] = {memory, fixture_file("reopened", "abc", 3)};
    for (int i = 0; i < 2; i++) {
        fsti_file *file;
        fsti_file_stream *stream;
        CHECK_INT(fsti_file_open(paths[i], &file, NULL), FST_OK);
        int before = next_descriptor();
        CHECK_INT(fsti_stream_open(file, UINT64_MAX, &stream, NULL), FST_OK);
        CHECK_INT(next_descriptor(), before + 1 + i); // one to nowhere
        fsti_stream_close(stream);
        CHECK_INT(next_descriptor(), before);
        fsti_file_unref(file);
    }
    unlink(memory);
}

TEST(residency_by_cachestat_and_mincore)
{
    fsti_file *file = open_pattern("resident");
    for (int hidden = 0; hidden < 2; hidden++) {
        fsti_io_test_disable(hidden ? FSTI_TEST_NO_CACHESTAT : 0);
        fixture_warm(fixture_path("resident"));
        uint64_t bytes;
        CHECK(fsti_file_resident(file, 0, FILE_BYTES, &bytes));
        CHECK_INT(bytes, FILE_BYTES);
        CHECK(fsti_file_resident(file, 5000, 5000, &bytes));
        CHECK_INT(bytes, 0);
        fixture_evict(fixture_path("resident"));
        CHECK(fsti_file_resident(file, 0, FILE_BYTES, &bytes));
        if (bytes > 0) {
            fsti_io_test_disable(0);
            fsti_file_unref(file);
            SKIP("this file system does not evict on request");
        }
    }
    fsti_io_test_disable(0);
    fsti_file_unref(file);
}

/// 0 if nothing wrong is reported about a file that was evicted.
static int query_as_other_user(void *context) {
    uint64_t bytes;
    for (unsigned hidden = 0; hidden < 2; hidden++) {
        fsti_io_test_disable(hidden ? FSTI_TEST_NO_CACHESTAT : 0);
        bool known = fsti_file_resident(context, 0, FILE_BYTES, &bytes);
        if (bytes > 0 || (hidden && known)) return 1;
    }
    return 0;
}

TEST(residency_of_other_users_files_is_unknown)
{
    fsti_file *file = open_pattern("foreign");
    uint64_t bytes;
    fixture_evict(fixture_path("foreign"));
    bool evicts = fsti_file_resident(file, 0, FILE_BYTES, &bytes) && bytes == 0;
    int result = evicts ? fixture_as_other_user(query_as_other_user, file) : -1;
    fsti_file_unref(file);
    if (result < 0) SKIP("needs root, and a file system that evicts on request");
    CHECK_INT(result, 0);
}

TEST(tmpfs_is_not_read_direct)
{
    if (access("/dev/shm", W_OK) != 0) SKIP("no /dev/shm");
    char path[] = "/dev/shm/fst-test-XXXXXX", reason[200];
    int fd = mkstemp(path);
    if (fd < 0) SKIP("no file can be made in /dev/shm");
    CHECK_INT(write(fd, "x", 1), 1);
    close(fd);
    fsti_file *file;
    CHECK_INT(fsti_file_open(path, &file, NULL), FST_OK);
    unlink(path);
    CHECK(!fsti_io_engine_direct.usable(file, reason, sizeof reason));
    CHECK_CONTAINS(reason, "memory");
    fsti_file_unref(file);
}

static volatile char sink;

static void touch_last_page(void *context) {
    const char *mapping = context;
    sink = mapping[FILE_BYTES - 1];
}

TEST(guard_survives_a_file_that_shrinks)
{
#ifdef __SANITIZE_THREAD__
    SKIP("the thread sanitizer does not support jumps out of its signal handlers");
#endif
    fsti_file *file = open_pattern("shrinking");
    void *mapping;
    CHECK(fsti_io_guard_ready());
    CHECK_INT(map_whole(file, &mapping), FST_OK);
    CHECK(fsti_io_guarded(touch_last_page, mapping, mapping, FILE_BYTES));
    CHECK_INT(truncate(fixture_path("shrinking"), 4096), 0);
    CHECK(!fsti_io_guarded(touch_last_page, mapping, mapping, FILE_BYTES));
    CHECK(!fsti_io_guarded(touch_last_page, mapping, mapping, FILE_BYTES)); // and once more
    fst_error error;
    // An emulator may ignore the advice; populating threads also check the file afterwards.
    fst_status status = fsti_file_populate(file, mapping, 0, FILE_BYTES, &error);
    if (status == FST_OK) status = fsti_file_check(file, &error);
    CHECK_INT(status, FST_E_FILE_CHANGED);
    fsti_io_unmap(mapping, FILE_BYTES);
    fsti_file_unref(file);
}

TEST(guard_works_with_a_blocked_signal)
{
#ifdef __SANITIZE_THREAD__
    SKIP("the thread sanitizer does not support jumps out of its signal handlers");
#endif
    fsti_file *file = open_pattern("blocked");
    void *mapping;
    sigset_t blocked, now;
    static char first_bytes[FILE_BYTES]; // not a mapping of the file, so nothing is lost
    CHECK(fsti_io_guard_ready());
    CHECK_INT(map_whole(file, &mapping), FST_OK);
    CHECK_INT(truncate(fixture_path("blocked"), 4096), 0);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGBUS);
    CHECK_INT(pthread_sigmask(SIG_BLOCK, &blocked, NULL), 0);
    CHECK(!fsti_io_guarded(touch_last_page, mapping, mapping, FILE_BYTES));
    CHECK(fsti_io_guarded(touch_last_page, first_bytes, mapping, FILE_BYTES));
    // The program's mask is its own again, after a fault and without one.
    CHECK_INT(pthread_sigmask(SIG_UNBLOCK, &blocked, &now), 0);
    CHECK_INT(sigismember(&now, SIGBUS), 1);
    CHECK(fsti_io_guarded(touch_last_page, first_bytes, mapping, FILE_BYTES));
    CHECK_INT(pthread_sigmask(SIG_BLOCK, NULL, &now), 0);
    CHECK_INT(sigismember(&now, SIGBUS), 0);
    fsti_io_unmap(mapping, FILE_BYTES);
    fsti_file_unref(file);
}

static volatile sig_atomic_t foreign_signals;

static void count_signal(int number) {
    (void)number;
    foreign_signals++;
}

TEST(guard_reports_being_replaced)
{
    struct sigaction mine = {.sa_handler = count_signal}, before;
    CHECK(fsti_io_guard_ready());
    CHECK_INT(sigaction(SIGBUS, &mine, &before), 0);
    CHECK(!fsti_io_guard_ready());
    CHECK_INT(sigaction(SIGBUS, &before, NULL), 0);
    CHECK(fsti_io_guard_ready());
}

/// How a child ends that sends itself SIGBUS after the guard was installed over `before`.
static int send_to_child(void (*before)(int)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        // The parent's guard is installed already: put another disposition beneath a new one.
        signal(SIGBUS, before);
        fsti_io_guard_install();
        raise(SIGBUS);
        _exit(before == count_signal ? 50 + foreign_signals : 50);
    }
    return waitpid(child, &status, 0) == child ? status : -1;
}

TEST(guard_forwards_sent_signals)
{
#ifdef __SANITIZE_THREAD__
    SKIP("the thread sanitizer handles signals itself");
#endif
    foreign_signals = 0;
    int status = send_to_child(SIG_DFL);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS); // as without us
    status = send_to_child(SIG_IGN);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 50);
    status = send_to_child(count_signal);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 51);
}
