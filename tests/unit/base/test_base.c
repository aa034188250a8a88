// SPDX-License-Identifier: Apache-2.0
/// Errors, memory, arithmetic, hashes.
#include <sys/wait.h>
#include <stdatomic.h>
#include <pthread.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/primitives.h"
#include "fastsafetensors/experimental/terminal_text.h"
#include "check.h"
#include "fixture.h"

TEST(error_message_has_all_fields)
{
    fst_error error;
    fsti_error_location location = {.file = "dir/a.safetensors",
                                    .tensor = "w\x1b[31m\n",
                                    .tensor_size = 7,
                                    .byte_offset = 77,
                                    .os_errno = EIO};
    CHECK_INT(fsti_error_set(&error, FST_E_IO, location, "read %d failed", 3), FST_E_IO);
    CHECK_INT(error.byte_offset, 77);
    CHECK_INT(error.os_errno, EIO);
    CHECK_TEXT(error.tensor, "w?[31m?"); // nothing that drives a terminal
    CHECK_TEXT(error.message, "dir/a.safetensors: read 3 failed, tensor `w?[31m?`, at byte 77: "
                              "Input/output error");
    CHECK_TEXT(fsti_error_text(&error), "read 3 failed, tensor `w?[31m?`, at byte 77: "
                                        "Input/output error");
    CHECK_INT(fsti_error_set(NULL, FST_E_IO, location, "x"), FST_E_IO);
    CHECK_INT(fsti_error_set(&error, FST_E_IO, FSTI_NO_LOCATION, "x: y"), FST_E_IO);
    CHECK_TEXT(fsti_error_text(&error), "x: y"); // without a file, all of it
}

/// The kernel may lack the call (before Linux 5.14), so that pages come later.
static bool can_populate(void) {
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool can = page != MAP_FAILED && madvise(page, 4096, 23) == 0; // MADV_POPULATE_WRITE
    if (page != MAP_FAILED) munmap(page, 4096);
    return can;
}

TEST(filled_memory_has_its_pages)
{
    enum { PAGES = 1000, BYTES = PAGES * 4096 };
    unsigned char states[PAGES];
    if (!can_populate()) SKIP("no MADV_POPULATE_WRITE");
    errno = EIO;
    char *block = fsti_alloc_filled(BYTES + 4096);
    CHECK(block != NULL && errno == EIO);
    char *first = block + (4096 - (uintptr_t)block % 4096);
    CHECK_INT(mincore(first, BYTES - 4096, states), 0);
    for (int i = 0; i < PAGES - 1; i++) CHECK(states[i] & 1);
    fsti_free(block);
    fsti_alloc_fail_after(0);
    CHECK(fsti_alloc_filled(BYTES) == NULL);
    fsti_alloc_fail_after(-1);
    fsti_free(fsti_alloc_filled(0));
}

TEST(error_message_is_escaped_for_terminals)
{
    fst_error error;
    // Messages also quote bytes of files; C1 control characters are two bytes of UTF-8.
    CHECK_INT(fsti_error_set(&error, FST_E_IO, FSTI_NO_LOCATION, "bad `%s`",
                             "\x1b[31m\xc2\x9b\xc3\xa9\n"),
              FST_E_IO);
    CHECK_TEXT(error.message, "bad `?[31m?\xc3\xa9?`");
}

static int columns_of(const char *text) {
    uint32_t code;
    int columns;
    size_t size = strlen(text);
    return fsti_text_step(text, size, &code, &columns) == size ? columns : -9;
}

TEST(text_that_a_terminal_may_be_shown)
{
    static const char *const hidden[] = {"\x01",
                                         "\x1b",
                                         "\r",
                                         "\n",
                                         "\t",
                                         "\x7f",
                                         "\xc2\x80",
                                         "\xc2\x9b",
                                         "\xc2\xad",
                                         "\xd8\x9c",
                                         "\xe2\x80\x8b",
                                         "\xe2\x80\x8d",
                                         "\xe2\x80\x8e",
                                         "\xe2\x80\x8f",
                                         "\xe2\x80\xa8",
                                         "\xe2\x80\xa9",
                                         "\xe2\x80\xaa",
                                         "\xe2\x80\xae",
                                         "\xe2\x81\xa0",
                                         "\xe2\x81\xa6",
                                         "\xe2\x81\xa9",
                                         "\xef\xbb\xbf",
                                         "\xf3\xa0\x81\x81",
                                         "\xef\xb8\x8f"};
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++)
        CHECK_INT(columns_of(hidden[i]), -1);
    CHECK_INT(columns_of("a"), 1);
    CHECK_INT(columns_of(" "), 1);
    CHECK_INT(columns_of("\xc3\xa9"), 1);         // e with an acute accent
    CHECK_INT(columns_of("\xcc\x81"), 0);         // a combining acute accent
    CHECK_INT(columns_of("\xe5\xb1\x82"), 2);     // a Chinese character
    CHECK_INT(columns_of("\xf0\x9f\x98\x80"), 2); // an emoji
    // What is not UTF-8: a byte at a time.
    static const char *const invalid[] = {"\x80",         "\xff",         "\xc0\x80",
                                          "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                          "\xe2\x80",     "\xf0\x9f\x98"};
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        uint32_t code;
        int columns;
        CHECK_INT(fsti_text_step(invalid[i], strlen(invalid[i]), &code, &columns), 1);
        CHECK_INT(columns, -1);
        CHECK(code == FST_TEXT_INVALID);
    }
}

TEST(error_message_is_truncated_to_its_buffer)
{
    char name[4096];
    memset(name, 'n', sizeof name);
    fst_error error;
    fsti_error_location location = {.tensor = name, .tensor_size = sizeof name, .byte_offset = 1};
    CHECK_INT(fsti_error_set(&error, FST_E_IO, location, "%.4000s", name), FST_E_IO);
    CHECK_INT(strlen(error.message), sizeof error.message - 1);
    CHECK_INT(strlen(error.tensor), sizeof error.tensor - 1);
}

TEST(location_can_be_added_later)
{
    fst_error error;
    fsti_error_location file = {.file = "a", .byte_offset = FST_NO_OFFSET};
    fsti_error_location location = {.tensor = "t", .tensor_size = 1, .byte_offset = 9};
    CHECK_INT(fsti_error_set(&error, FST_E_FILE_CHANGED, file, "changed"), FST_E_FILE_CHANGED);
    fsti_error_locate(&error, &location);
    CHECK_TEXT(error.message, "a: changed, tensor `t`, at byte 9");
    CHECK_TEXT(error.tensor, "t");
    CHECK_INT(error.byte_offset, 9);
    fsti_error_locate(NULL, &location);
}

TEST(errno_picks_the_status)
{
    static const struct {
        int code;
        fst_status status;
    } cases[] = {{ENOENT, FST_E_NOT_FOUND},  {ENOTDIR, FST_E_NOT_FOUND},
                 {EACCES, FST_E_PERMISSION}, {EISDIR, FST_E_NOT_REGULAR},
                 {ENOMEM, FST_E_NO_MEMORY},  {EIO, FST_E_IO}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_INT(fsti_error_errno(NULL, cases[i].code, "f", "open"), cases[i].status);
}

TEST(status_names)
{
    CHECK_TEXT(fsti_status_name(FST_E_INVALID_OFFSET), "InvalidOffset");
    CHECK_TEXT(fsti_status_name((fst_status)9999), "Unknown");
    CHECK_TEXT(fsti_status_name((fst_status)-1), "Unknown");
    for (int i = 0; i <= FST_END; i++) CHECK(fsti_status_meaning((fst_status)i)[0] != '\0');
}

TEST(injected_allocation_failures)
{
    long live = fsti_alloc_live();
    fsti_alloc_fail_after(2);
    void *a = fsti_alloc(1), *b = fsti_alloc_zeroed(2, 2), *c = fsti_alloc(1);
    fsti_alloc_fail_after(-1);
    CHECK(a != NULL && b != NULL && c == NULL);
    CHECK_INT(fsti_alloc_live(), live + 2);
    fsti_free(a);
    fsti_free(b);
    CHECK_INT(fsti_alloc_live(), live);
}

TEST(arrays_grow_to_their_limit)
{
    int *array = NULL;
    size_t capacity = 0, count = 0;
    while (fsti_array_reserve((void **)&array, &capacity, count, sizeof *array, 100))
        array[count++] = 7;
    CHECK_INT(count, 100);
    fsti_free(array);
}

TEST(checked_arithmetic)
{
    uint64_t out;
    CHECK(fsti_mul(UINT64_MAX, 1, &out) && out == UINT64_MAX);
    CHECK(!fsti_mul(UINT64_MAX / 2 + 1, 2, &out));
    CHECK(!fsti_add(UINT64_MAX, 1, &out));
    CHECK_INT(fsti_align_up(4097, 4096), 8192);
    CHECK_INT(fsti_align_down(4097, 4096), 4096);
}

TEST(sizes_as_people_type_them)
{
    static const struct {
        const char *text;
        uint64_t size_bytes;
    } good[] = {{"0", 0},
                {" 12 ", 12},
                {"3B", 3},
                {"2k", 2048},
                {"2KB", 2000},
                {"2 kib", 2048},
                {"1.5GiB", (uint64_t)3 << 29},
                {"0.0000000001T", 0},
                {"1.999999999999K", 2047},
                {"18446744073709551615", UINT64_MAX},
                {"16777215T", (uint64_t)16777215 << 40}};
    static const char *const bad[] = {"",
                                      " ",
                                      "K",
                                      "-1",
                                      "+1",
                                      "1.",
                                      ".5",
                                      "1..5",
                                      "1e3",
                                      "0x10",
                                      "1KX",
                                      "1iB",
                                      "1Kibs",
                                      "1 K B",
                                      "1\tK",
                                      "1P",
                                      "16777216T",
                                      "18446744073709551616",
                                      "18446744073709551615.9K"};
    uint64_t size;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        CHECK(fsti_size_parse(good[i].text, &size));
        CHECK_INT(size, good[i].size_bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!fsti_size_parse(bad[i], &size));
}

TEST(hash_depends_on_every_byte_and_the_key)
{
    char text[70];
    memset(text, 'a', sizeof text);
    for (size_t size = 0; size <= 64; size++) {
        uint64_t hash = fsti_hash(text, size, 1);
        CHECK(hash == fsti_hash(text, size, 1));
        CHECK(hash != fsti_hash(text, size, 2));
        CHECK(hash != fsti_hash(text, size + 1, 1));
        for (size_t i = 0; i < size; i++) {
            text[i] ^= 1;
            CHECK(hash != fsti_hash(text, size, 1));
            text[i] ^= 1;
        }
    }
    CHECK(fsti_hash_key() != 0 && fsti_hash_key() == fsti_hash_key());
}

/// The number of CPUs of a fake machine, all of which may be used; 0: the real one.
static size_t fake_processor_count;

/// In place of the C library's.
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    if (fake_processor_count == 0) {
        memset(set, 0, size);
        return syscall(SYS_sched_getaffinity, pid, size, set) < 0 ? -1 : 0;
    }
    if (size * 8 < fake_processor_count) { // as kernels of more processors do
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, size);
    for (size_t i = 0; i < fake_processor_count; i++) CPU_SET_S(i, size, set);
    return 0;
}

TEST(processors)
{
    CHECK(fsti_cpu_count() >= 1);
    fsti_cgroup_fake("/nonexistent", "/nonexistent"); // no quota
    static const size_t counts[] = {1, 48, 1024, 1025, 5000, 65536};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        fake_processor_count = counts[i];
        CHECK_INT(fsti_cpu_count(), counts[i]);
    }
    fake_processor_count = 0;
    fsti_cgroup_fake(NULL, NULL);
}

static atomic_bool has_loaded, is_load_over;

/// As a driver may, which starts a program to load its kernel module.
static void load_and_fork(void) {
    usleep(100000);
    pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, NULL, 0);
}

static void *fork_often(void *unused) {
    (void)unused;
    while (!atomic_load(&is_load_over)) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        waitpid(child, NULL, 0);
    }
    return NULL;
}

TEST(a_library_may_fork_while_it_is_loaded)
{
    pthread_t thread;
    if (CHECK_SANITIZED) SKIP("the thread sanitizer does not follow threads of a fork");
    alarm(60); // a deadlock
    CHECK_INT(pthread_create(&thread, NULL, fork_often, NULL), 0);
    fsti_library_once(&has_loaded, load_and_fork);
    atomic_store(&is_load_over, true);
    pthread_join(thread, NULL);
    alarm(0);
    CHECK(atomic_load(&has_loaded));
}

static fsti_library_state find_nothing(char *reason, size_t reason_size) {
    static const char *const names[] = {"libfst-is-not-there.so.1", NULL};
    static const fsti_library_symbol symbols[] = {{NULL, NULL}};
    return fsti_library_bind(names, symbols, reason, reason_size);
}

static fsti_library_state find_maths(char *reason, size_t reason_size) {
    static const char *const names[] = {"libm.so.6", NULL};
    static double (*square_root)(double number);
    static const fsti_library_symbol symbols[] = {{"sqrt", &square_root}, {NULL, NULL}};
    return fsti_library_bind(names, symbols, reason, reason_size);
}

/// A library that is missing stays missing; one that cannot be opened now is tried again.
TEST(a_library_is_tried_again_when_descriptors_were_short)
{
    fst_error error;
    fsti_library absent = {.need = "this needs a library", .find = find_nothing};
    CHECK_INT(fsti_library_require(&absent, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "this needs a library, which was not found");
    CHECK_INT(atomic_load(&absent.state), FSTI_LIBRARY_ABSENT);
    fsti_library maths = {.need = "this needs libm", .find = find_maths};
    fixture_limit_descriptors(true);
    fst_status status = fsti_library_require(&maths, &error);
    fixture_limit_descriptors(false);
    if (status == FST_OK) SKIP("libm was loaded before");
    CHECK_INT(status, FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, strerror(EMFILE));
    CHECK_INT(fsti_library_require(&maths, &error), FST_OK);
}

TEST(a_child_does_not_have_locks_of_files)
{
    char path[] = "/tmp/test_base.XXXXXX";
    int status;
    close(mkstemp(path));
    int fd = fsti_lockable_open(path, O_RDWR), other = fsti_lockable_open(path, O_RDWR);
    CHECK_INT(fsti_lockable_lock(fd), 0);
    CHECK_INT(fsti_lockable_lock(other), EWOULDBLOCK);
    pid_t child = fork();
    if (child == 0) {
        // Also one that is not locked yet.
        bool are_closed = fcntl(fd, F_GETFD) == -1 && fcntl(other, F_GETFD) == -1;
        fsti_lockable_close(fd); // by code that the child has inherited
        _exit(are_closed ? 0 : 1);
    }
    waitpid(child, &status, 0);
    CHECK_INT(status, 0);
    CHECK_INT(fsti_lockable_lock(other), EWOULDBLOCK); // the child has not unlocked it
    fsti_lockable_close(fd);
    CHECK_INT(fcntl(fd, F_GETFD), -1);
    CHECK_INT(fsti_lockable_lock(other), 0);
    fsti_lockable_close(other);
    unlink(path);
    CHECK_INT(fsti_lockable_open(path, O_RDWR), -1);
    CHECK_INT(errno, ENOENT);
}

/// The list of these files grows, and is freed with the last one.
TEST(many_files_with_locks)
{
    enum { COUNT = 200 };
    int files[COUNT];
    long live = fsti_alloc_live();
    for (int i = 0; i < COUNT; i++) {
        files[i] = i % 2 == 0 ? fsti_lockable_open("/", O_RDONLY)
                              : fsti_lockable_open_at(AT_FDCWD, "/", O_RDONLY, 0);
        CHECK(files[i] >= 0);
    }
    for (int i = 0; i < COUNT; i++) fsti_lockable_close(files[i]);
    CHECK_INT(fsti_alloc_live(), live);
    int fd = fsti_lockable_open("/", O_RDONLY);
    CHECK(fd >= 0);
    DIR *folder = fdopendir(fd);
    CHECK(folder != NULL);
    fsti_lockable_close_folder(folder);
    CHECK_INT(fcntl(fd, F_GETFD), -1);
    CHECK_INT(fsti_alloc_live(), live);
}
