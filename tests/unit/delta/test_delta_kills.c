// SPDX-License-Identifier: Apache-2.0
/// An application to files is killed before every system call that it makes (a write is torn in the
/// middle), or one or all of these fail. Afterwards the folder has a known version, and its bytes.
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "delta_fixture.h"
#include "fixture.h"

typedef enum fault { FAULT_OFF, FAULT_COUNT, FAULT_KILL, FAULT_ONE, FAULT_ALL } fault;

static fault kind;
static long due;
static atomic_long calls;

/// Whether this call fails; a kill does not return.
static bool is_due(void) {
    if (kind == FAULT_OFF) return false;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (kind == FAULT_COUNT) return false;
    return number == due || (kind == FAULT_ALL && number > due);
}

/// If not -1, a process is forked before the kill and lives on; it writes its number here when it
/// runs, because a fork's handlers close the lock before.
static int worker_pipe = -1;

static void fork_worker(void) {
    if (fork() != 0) return;
    pid_t worker = getpid();
    close(STDOUT_FILENO);
    close(STDERR_FILENO);
    (void)!write(worker_pipe, &worker, sizeof worker);
    sleep(30);
    _exit(0);
}

static int fail(int os_errno) {
    if (kind == FAULT_KILL) {
        if (worker_pipe >= 0) fork_worker();
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    errno = os_errno;
    return -1;
}

ssize_t __real_pwrite64(int fd, const void *bytes, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *bytes, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *bytes, size_t size, off_t at) {
    if (!is_due()) return __real_pwrite64(fd, bytes, size, at);
    (void)!__real_pwrite64(fd, bytes, size / 2, at); // torn
    return fail(ENOSPC);
}

#define WRAP(type, name, parameters, arguments, os_errno)                                          \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters {                                                                \
        return is_due() ? (type)fail(os_errno) : __real_##name arguments;                          \
    }
WRAP(ssize_t, pread64, (int fd, void *bytes, size_t size, off_t at), (fd, bytes, size, at), EIO)
WRAP(int, rename, (const char *from, const char *to), (from, to), EIO)
WRAP(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags),
     (a, from, b, to, flags), EIO)
WRAP(int, unlink, (const char *path), (path), EIO)
WRAP(int, fdatasync, (int fd), (fd), EIO)
WRAP(int, fsync, (int fd), (fd), EIO)
WRAP(int, posix_fallocate64, (int fd, off_t at, off_t size), (fd, at, size), EIO)

static char local[600];
static bool is_chain_mixed; ///< the versions have both encodings, so there are two passes

static fst_delta *open_chain(fst_delta_encoding encoding) {
    fst_delta *delta = NULL;
    if (!is_chain_mixed) return delta_open_chain(encoding, FST_DIGEST_XXH3_128);
    const char *folders[] = {delta_make_version(1, FST_DELTA_XOR, FST_DIGEST_XXH3_128),
                             delta_make_version(2, FST_DELTA_OVERWRITE, FST_DIGEST_XXH3_128)};
    return fst_delta_open(folders, 2, &delta, NULL) == FST_OK ? delta : NULL;
}

/// Opening the chain is not part of what fails.
static fst_status apply(fst_delta_encoding encoding, uint32_t flags, fst_error *error) {
    fault wanted = kind;
    kind = FAULT_OFF;
    fst_delta *delta = open_chain(encoding);
    kind = wanted;
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    options.thread_count = 2;
    options.version = "000000";
    options.flags = flags;
    atomic_store(&calls, 0);
    fst_status status = fst_delta_apply(delta, local, &options, NULL, error);
    kind = FAULT_OFF;
    fst_delta_close(delta);
    return status;
}

static uint32_t extra_flags; ///< of applications

/// Applies in a child that is killed before call `number`. True when it came to its end.
static bool apply_killed(fst_delta_encoding encoding, long number) {
    delta_write_checkpoint(local, 0);
    fst_delta_close(open_chain(encoding)); // made before, once
    pid_t child = fork();
    if (child == 0) {
        fst_error error;
        kind = FAULT_KILL;
        due = number;
        _exit(apply(encoding, FST_DELTA_DURABLE | extra_flags, &error) == FST_OK ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Whether the folder's note names a version, and the files have its bytes.
static bool is_consistent(int *state) {
    char version[FST_DELTA_VERSION_BYTES], expected[16];
    int is_interrupted;
    fst_error error;
    *state = delta_find_state(local);
    if (fst_delta_version(local, version, &is_interrupted, &error) != FST_OK) return false;
    snprintf(expected, sizeof expected, "%06d", *state);
    bool is_noted = strcmp(version, expected) == 0 || (version[0] == '\0' && *state == 0);
    return *state >= 0 && !is_interrupted && is_noted;
}

static fst_status recover(bool backward, fst_delta_stats *stats) {
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    fst_error error;
    options.flags = backward ? FST_DELTA_ROLL_BACK : 0;
    *stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_status status = fst_delta_recover(local, &options, stats, &error);
    if (status != FST_OK) fprintf(stderr, "# %s\n", error.message);
    return status;
}

/// Kills before every fourth call (all of them where everything is tested, few under a sanitizer);
/// by turns the work is undone and finished. Returns how many kills there were, or -1.
static long kill_everywhere(fst_delta_encoding encoding) {
    long number = 1, recovered = 0, count = 0, step = check_share() == 1 ? 1 : 4;
    if (CHECK_SANITIZED) step = 13;
    for (; !apply_killed(encoding, number); number += step) {
        fst_delta_stats stats;
        int state, before = delta_find_state(local);
        bool backward = count++ % 2 == 1;
        bool is_good = recover(backward, &stats) == FST_OK && is_consistent(&state);
        if (!is_good) printf("# kill %ld: state %d, then %d\n", number, before, state);
        if (!is_good) return -1;
        recovered += stats.recovered != 0;
        // A folder that was complete needs no change; otherwise it has the requested version.
        if (before < 0 && state != (backward ? 0 : 2)) return -1;
    }
    return recovered > 0 ? count : -1;
}

TEST(every_kill_leaves_a_version_that_is_known)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    long of_xor = kill_everywhere(FST_DELTA_XOR),
         of_overwrite = kill_everywhere(FST_DELTA_OVERWRITE);
    printf("# %ld kills with xor, %ld with overwrite\n", of_xor, of_overwrite);
    CHECK(of_xor + of_overwrite >= (CHECK_SANITIZED ? 20 : 100));
}

TEST(kills_while_files_are_replaced)
{
    long number = 1, mixed = 0;
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    extra_flags = FST_DELTA_NEW_FILES;
    delta_write_checkpoint(local, 0);
    kind = FAULT_COUNT;
    CHECK_INT(apply(FST_DELTA_XOR, FST_DELTA_DURABLE | extra_flags, &error), FST_OK);
    // The names change at the end: there every call is tried.
    long last = atomic_load(&calls) - 15;
    long step = CHECK_SANITIZED ? 30 : 6;
    while (!apply_killed(FST_DELTA_XOR, number)) {
        if (number < last)
            number = number + step < last ? number + step : last;
        else
            number++;
        fst_delta_stats stats;
        int state, before = delta_find_state(local);
        CHECK_INT(recover(false, &stats), FST_OK);
        CHECK(is_consistent(&state));
        CHECK(before == state || (before < 0 && state == 2) || (before == 0 && state == 2));
        mixed += before < 0;
    }
    extra_flags = 0;
    CHECK(number > 20);
    CHECK(mixed > 0);
    CHECK_INT(delta_find_state(local), 2);
    // The next application has deleted the leftovers.
    char path[700];
    snprintf(path, sizeof path, "%s/part0.safetensors.delta-tmp", local);
    CHECK(access(path, F_OK) != 0);
    printf("# %ld kills, %ld of them between two renames\n", number - 1, mixed);
}

/// Kills at some call in the middle of the work: the files are of two versions. The search for such
/// a call takes time, so it continues where the last one with this encoding ended.
static bool kill_in_the_middle(fst_delta_encoding encoding) {
    static long numbers[FST_DELTA_ENCODING_COUNT];
    long *number = &numbers[encoding];
    if (*number == 0) *number = 20;
    for (; *number < 1000; ++*number) {
        if (apply_killed(encoding, *number)) return false;
        if (delta_find_state(local) < 0) return true;
    }
    return false;
}

/// A second kill, while the first one is being recovered from.
static bool recover_killed(bool backward, long number) {
    pid_t child = fork();
    if (child == 0) {
        fst_delta_stats stats;
        kind = FAULT_KILL;
        due = number;
        atomic_store(&calls, 0);
        _exit(recover(backward, &stats) == FST_OK ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(a_kill_during_recovery_is_recovered_from)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++)
        for (int backward = 0; backward < 2; backward++)
            for (long number = 1;; number += CHECK_SANITIZED ? 90 : 23) {
                fst_delta_stats stats;
                int state;
                CHECK(kill_in_the_middle((fst_delta_encoding)encoding));
                bool is_done = recover_killed(backward != 0, number);
                CHECK_INT(recover(backward != 0, &stats), FST_OK);
                CHECK(is_consistent(&state));
                CHECK_INT(state, backward ? 0 : 2);
                if (is_done) break;
            }
}

/// As a pool of workers does, which are forked while a thread applies a delta.
TEST(a_child_of_a_killed_process_does_not_keep_its_lock)
{
    int ends[2];
    pid_t worker = 0;
    fst_delta_stats stats;
    if (CHECK_SANITIZED) SKIP("the thread sanitizer does not follow threads of a fork");
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    CHECK_INT(pipe(ends), 0);
    worker_pipe = ends[1];
    CHECK(!apply_killed(FST_DELTA_XOR, 90));
    worker_pipe = -1;
    CHECK_INT(read(ends[0], &worker, sizeof worker), sizeof worker);
    CHECK_INT(recover(false, &stats), FST_OK);
    CHECK_INT(stats.recovered, 1);
    CHECK_INT(kill(worker, SIGKILL), 0);
    CHECK_INT(delta_find_state(local), 2);
    close(ends[0]);
    close(ends[1]);
}

static bool has_file(const char *name) {
    char path[700];
    snprintf(path, sizeof path, "%s/.weight_sync/%s", local, name);
    return access(path, F_OK) == 0;
}

/// After a kill between the note of the new version and the end of the journal.
TEST(a_roll_back_begins_by_removing_the_note)
{
    long last = 1, mixed = 0;
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    delta_write_checkpoint(local, 0);
    kind = FAULT_COUNT;
    CHECK_INT(apply(FST_DELTA_XOR, FST_DELTA_DURABLE, &error), FST_OK);
    last = atomic_load(&calls);
    do CHECK(!apply_killed(FST_DELTA_XOR, last--));
    while (!has_file("journal") || !has_file("state.json"));
    last++;
    for (long number = 1;; number += CHECK_SANITIZED ? 200 : 17) {
        char version[FST_DELTA_VERSION_BYTES];
        int is_interrupted, state;
        fst_delta_stats stats;
        CHECK(!apply_killed(FST_DELTA_XOR, last));
        bool is_done = recover_killed(true, number);
        CHECK_INT(fst_delta_version(local, version, &is_interrupted, &error), FST_OK);
        CHECK(!is_interrupted || version[0] == '\0');
        if (delta_find_state(local) < 0) mixed++;
        if (delta_find_state(local) < 0) CHECK(!has_file("state.json"));
        CHECK_INT(recover(true, &stats), FST_OK);
        CHECK(is_consistent(&state));
        if (is_done) break;
    }
    CHECK(mixed > 0);
}

TEST(nothing_is_written_where_there_is_nothing_to_recover)
{
    fst_delta_stats stats;
    fst_error error;
    char path[700];
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    delta_write_checkpoint(local, 0);
    CHECK_INT(apply(FST_DELTA_XOR, 0, &error), FST_OK);
    snprintf(path, sizeof path, "%s/.weight_sync/lock", local);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(recover(false, &stats), FST_OK);
    CHECK(!has_file("lock"));
}

TEST(what_was_done_is_not_done_again)
{
    fst_delta_stats stats;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    uint64_t whole = delta_sizes[0] + delta_sizes[1] + delta_sizes[2];
    CHECK(!apply_killed(FST_DELTA_XOR, 90));
    CHECK_INT(recover(false, &stats), FST_OK);
    CHECK_INT(stats.recovered, 1);
    CHECK(stats.bytes_written < whole);
    CHECK_INT(delta_find_state(local), 2);
}

TEST(an_apply_after_a_kill_finishes_and_goes_on)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    CHECK(kill_in_the_middle(FST_DELTA_XOR));
    const char *folders[] = {delta_make_version(1, FST_DELTA_XOR, FST_DIGEST_XXH3_128),
                             delta_make_version(2, FST_DELTA_XOR, FST_DIGEST_XXH3_128)};
    fst_delta *delta;
    CHECK_INT(fst_delta_open(folders, 2, &delta, &error), FST_OK);
    CHECK_INT(fst_delta_apply(delta, local, NULL, NULL, &error), FST_OK);
    fst_delta_close(delta);
    CHECK_INT(delta_find_state(local), 2);
}

TEST(tensors_of_a_finished_pass_are_counted_once)
{
    fst_error error;
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    long number = 20;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    is_chain_mixed = true;
    do CHECK(!apply_killed(FST_DELTA_XOR, number++));
    while (delta_find_state(local) >= 0); // in the first pass
    fst_delta *delta = open_chain(FST_DELTA_XOR);
    is_chain_mixed = false;
    CHECK_INT(fst_delta_apply(delta, local, NULL, &stats, &error), FST_OK);
    fst_delta_close(delta);
    CHECK_INT(stats.recovered, 1);
    CHECK_INT(stats.tensor_count, 3);
    CHECK_INT(delta_find_state(local), 2);
}

/// apply() names the version before the update.
TEST(the_same_call_after_a_kill_finishes)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++) {
        CHECK(kill_in_the_middle((fst_delta_encoding)encoding));
        CHECK_INT(apply((fst_delta_encoding)encoding, 0, &error), FST_OK);
        CHECK_INT(delta_find_state(local), 2);
    }
}

/// Applies version 1 of an XOR chain, or the chain of 1 and 2. `version`: the caller's.
static fst_status apply_some(size_t count, const char *version, fst_error *error) {
    const char *folders[] = {delta_make_version(1, FST_DELTA_XOR, FST_DIGEST_XXH3_128),
                             delta_make_version(2, FST_DELTA_XOR, FST_DIGEST_XXH3_128)};
    fst_delta *delta;
    fst_status status = fst_delta_open(folders, count, &delta, error);
    if (status != FST_OK) return status;
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    options.version = version;
    status = fst_delta_apply(delta, local, &options, NULL, error);
    fst_delta_close(delta);
    return status;
}

TEST(a_version_of_the_chain_before_the_current_one_is_accepted)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    delta_write_checkpoint(local, 0);
    CHECK_INT(apply_some(1, "000000", &error), FST_OK);
    CHECK_INT(apply_some(2, "000002", &error), FST_E_VERSION);
    CHECK_INT(apply_some(2, "7", &error), FST_E_VERSION);
    CHECK_INT(apply_some(2, "000000", &error), FST_OK);
    CHECK_INT(delta_find_state(local), 2);
}

/// Lets call `number` fail (or all from there on); afterwards the folder is consistent, at the
/// latest when it has been recovered.
static bool survives(fst_delta_encoding encoding, fault wanted, long number, bool *is_done) {
    fst_error error = {0};
    fst_delta_stats stats;
    int state;
    delta_write_checkpoint(local, 0);
    kind = wanted;
    due = number;
    fst_status status = apply(encoding, 0, &error);
    *is_done = atomic_load(&calls) < number;
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    if (fst_delta_version(local, version, &is_interrupted, NULL) != FST_OK) return false;
    if (status == FST_OK && is_interrupted) return false;
    if (status != FST_OK && error.message[0] == '\0') return false;
    if (status != FST_OK && is_interrupted && strstr(error.message, "apply again") == NULL)
        return false; // the message says what ends this state
    if (recover(number % 2 == 1, &stats) != FST_OK) return false;
    bool is_good = is_consistent(&state) && (status == FST_OK) == (state == 2 && !is_interrupted);
    if (!is_good && !*is_done)
        printf("# call %ld: %s; state %d, interrupted %d\n", number,
               status == FST_OK ? "ok" : error.message, state, is_interrupted);
    return is_good;
}

TEST(a_call_that_fails_rolls_back)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++)
        for (int wanted = FAULT_ONE; wanted <= FAULT_ALL; wanted++) {
            bool is_done = false;
            for (long number = 1; !is_done; number += 1 + 3 * (long)check_share())
                CHECK(survives((fst_delta_encoding)encoding, (fault)wanted, number, &is_done) ||
                      is_done);
        }
}

/// If neither the note nor the journal can be removed, the folder stays interrupted.
TEST(a_failure_before_the_first_change_says_what_ends_this_state)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    bool is_done = false;
    for (long number = 1; number < 16; number++)
        CHECK(survives(FST_DELTA_XOR, FAULT_ALL, number, &is_done));
}

static const char *copy_path(void) {
    static char path[700];
    snprintf(path, sizeof path, "%s/part0.safetensors.delta-tmp", local);
    return path;
}

static bool has_copies(void) { return access(copy_path(), F_OK) == 0; }

/// Kills an update by new files when its copies are there, and (`is_last`) the new version has its
/// note already.
static bool kill_with_copies(bool is_last) {
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    extra_flags = FST_DELTA_NEW_FILES;
    bool is_found = false;
    for (long number = is_last ? 30 : 10; !is_found && number < 1000; number++) {
        if (apply_killed(FST_DELTA_XOR, number)) break;
        if (fst_delta_version(local, version, &is_interrupted, NULL) != FST_OK) break;
        is_found = has_copies() && !is_interrupted && (version[0] != '\0') == is_last;
    }
    extra_flags = 0;
    return is_found;
}

/// Kills an update in place when only its undo file is left to be removed.
static bool kill_with_undo(void) {
    char version[FST_DELTA_VERSION_BYTES], path[700];
    int is_interrupted;
    snprintf(path, sizeof path, "%s/.weight_sync/undo", local);
    for (long number = 30; number < 1000; number++) {
        if (apply_killed(FST_DELTA_XOR, number)) return false;
        if (fst_delta_version(local, version, &is_interrupted, NULL) != FST_OK) return false;
        if (version[0] != '\0' && !is_interrupted && access(path, F_OK) == 0) return true;
    }
    return false;
}

/// The same call after a kill in the last step succeeds once, as after other kills.
TEST(a_call_with_nothing_to_do_removes_old_files)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    for (int is_new = 0; is_new < 2; is_new++) {
        uint32_t flags = is_new ? FST_DELTA_NEW_FILES : 0;
        CHECK(is_new ? kill_with_copies(true) : kill_with_undo());
        CHECK_INT(apply(FST_DELTA_XOR, flags, &error), FST_OK);
        CHECK(!has_copies());
        CHECK_INT(apply(FST_DELTA_XOR, flags, &error), FST_E_VERSION);
        CHECK_INT(delta_find_state(local), 2);
    }
}

/// The list of copies is not replaced while one of them cannot be removed.
TEST(copies_that_cannot_be_removed_stay_listed)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    CHECK(kill_with_copies(false));
    CHECK_INT(unlink(copy_path()), 0);
    CHECK_INT(mkdir(copy_path(), 0700), 0); // unlink() fails
    CHECK(apply(FST_DELTA_XOR, FST_DELTA_NEW_FILES, &error) != FST_OK);
    CHECK_INT(rmdir(copy_path()), 0);
    FILE *copy = fopen(copy_path(), "w");
    CHECK(copy != NULL && fclose(copy) == 0);
    CHECK_INT(apply(FST_DELTA_XOR, FST_DELTA_NEW_FILES, &error), FST_OK);
    CHECK(!has_copies());
    CHECK_INT(delta_find_state(local), 2);
}

/// Until the new version has its note, a failure puts the old files back.
TEST(a_call_that_fails_puts_the_old_files_back)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    bool is_done = false;
    int failed = 0;
    for (long number = 1; !is_done; number += CHECK_SANITIZED ? 3 : 1) {
        fst_error error = {0};
        fst_delta_stats stats;
        int state;
        delta_write_checkpoint(local, 0);
        kind = FAULT_ONE;
        due = number;
        fst_status status = apply(FST_DELTA_XOR, FST_DELTA_NEW_FILES | FST_DELTA_DURABLE, &error);
        is_done = atomic_load(&calls) < number;
        bool is_noted = is_consistent(&state);
        // Removing the list of renames is the last step, after the note of the new version.
        bool is_last = status != FST_OK && state == 2;
        CHECK(is_noted || is_last);
        CHECK(is_noted || strstr(error.message, "apply again") != NULL);
        CHECK(is_last || (status == FST_OK) == (state == 2));
        failed += status != FST_OK;
        CHECK_INT(recover(false, &stats), FST_OK);
        CHECK(is_consistent(&state));
        CHECK(!has_copies());
        CHECK_INT(state == 2, status == FST_OK || is_last);
    }
    CHECK(failed > (CHECK_SANITIZED ? 7 : 20));
}

TEST(an_allocation_that_fails_rolls_back)
{
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    fst_delta *delta = delta_open_chain(FST_DELTA_OVERWRITE, FST_DIGEST_ADLER32);
    fst_status status = FST_E_NO_MEMORY;
    for (long number = 0; status != FST_OK; number += check_share()) {
        int state;
        delta_write_checkpoint(local, 0);
        long live = fsti_alloc_live();
        fsti_alloc_fail_after(number);
        status = fst_delta_apply(delta, local, NULL, NULL, &error);
        fsti_alloc_fail_after(-1);
        CHECK_INT(fsti_alloc_live(), live);
        char version[FST_DELTA_VERSION_BYTES];
        int is_interrupted;
        CHECK_INT(fst_delta_version(local, version, &is_interrupted, NULL), FST_OK);
        // All later allocations fail as well, so the roll-back may fail, but says so.
        CHECK(!is_interrupted || strstr(error.message, "could not be rolled back") != NULL);
        fst_delta_stats stats;
        CHECK_INT(recover(false, &stats), FST_OK);
        CHECK(is_consistent(&state));
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        CHECK(number < 10000);
    }
    fst_delta_close(delta);
}
