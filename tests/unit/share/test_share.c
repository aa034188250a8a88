// SPDX-License-Identifier: Apache-2.0
/// Shared segments: claims of several processes, killed owners, damaged and foreign files, limits,
/// grace periods, and listing.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "share_fixture.h"

/// Runs `work` in a child and returns its result.
static int in_child(int (*work)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(work());
    if (waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
}

/// Starts a child that opens a segment, claims chunk 0 and sleeps. Returns when it has the claim.
static pid_t start_owner(const char *key) {
    int ends[2];
    char byte;
    if (pipe(ends) != 0) abort();
    pid_t child = fork();
    if (child == 0) {
        fsti_share *share = open_share(key);
        if (share == NULL || fsti_share_claim(share, 0) != FSTI_SHARE_CLAIMED) _exit(1);
        if (write(ends[1], "x", 1) != 1) _exit(2);
        for (;;) pause();
    }
    close(ends[1]);
    if (read(ends[0], &byte, 1) != 1) abort();
    close(ends[0]);
    return child;
}

static void end_child(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

TEST(claims_exclude_other_loads_until_the_chunk_is_done)
{
    use_folder("claims");
    fsti_share *first = open_share("a"), *second = open_share("a");
    CHECK(first != NULL && second != NULL);
    CHECK_INT(fsti_share_claim(first, 2), FSTI_SHARE_CLAIMED);
    CHECK_INT(fsti_share_claim(second, 2), FSTI_SHARE_TAKEN);
    CHECK_INT(fsti_share_claim(second, 3), FSTI_SHARE_CLAIMED);
    fsti_share_finish(first, 2);
    CHECK_INT(fsti_share_claim(second, 2), FSTI_SHARE_DONE);
    CHECK(!fsti_share_is_complete(first));
    // Claims of unfinished chunks are released when a load ends its writes.
    fsti_share_end_writes(second);
    CHECK_INT(fsti_share_claim(first, 3), FSTI_SHARE_CLAIMED);
    fsti_share_unref(first);
    fsti_share_unref(second);
    CHECK_INT(list_all().count, 0);
}

TEST(stores_to_a_private_mapping_reach_no_other)
{
    use_folder("private");
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    fill(share);
    char *one = fsti_share_map_private(share, 1, true),
         *two = fsti_share_map_private(share, 1, true);
    CHECK(one != NULL && two != NULL);
    one[5] = 99;
    CHECK_INT(two[5], 2);
    CHECK_INT(fsti_share_map_shared(share, 1)[5], 2);
    munmap(one, BATCH_BYTES);
    munmap(two, BATCH_BYTES);
    fsti_share_unref(share);
}

TEST(claims_of_a_killed_process_are_taken_over)
{
    use_folder("killed");
    pid_t owner = start_owner("a");
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    CHECK_INT(fsti_share_claim(share, 0), FSTI_SHARE_TAKEN);
    end_child(owner);
    CHECK_INT(fsti_share_claim(share, 0), FSTI_SHARE_CLAIMED);
    fsti_share_unref(share);
}

static pid_t owner_pid(const fsti_share *share) { return share->owner; }

TEST(a_forked_child_does_not_keep_the_claims_of_its_parent)
{
    use_folder("orphan");
    int ends[2];
    pid_t grandchild;
    if (pipe(ends) != 0) abort();
    pid_t owner = fork();
    if (owner == 0) {
        fsti_share *share = open_share("a");
        if (share == NULL || fsti_share_claim(share, 0) != FSTI_SHARE_CLAIMED) _exit(1);
        (void)!fork(); // the child inherits the open file
        pid_t self = getpid();
        if (self != owner_pid(share) && write(ends[1], &self, sizeof self) < 0) _exit(2);
        for (;;) pause();
    }
    CHECK_INT(read(ends[0], &grandchild, sizeof grandchild), (int)sizeof grandchild);
    end_child(owner);
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    fsti_share_step step = fsti_share_claim(share, 0);
    kill(grandchild, SIGKILL);
    CHECK_INT(step, FSTI_SHARE_CLAIMED);
    fsti_share_unref(share);
    close(ends[0]);
    close(ends[1]);
}

TEST(chunks_of_a_stopped_process_are_stalled_after_a_time_and_stay_its_own)
{
    use_folder("stopped");
    pid_t owner = start_owner("a");
    kill(owner, SIGSTOP);
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    CHECK_INT(fsti_share_claim(share, 0), FSTI_SHARE_TAKEN);
    fsti_share_stall_time(1);
    fsti_share_step stalled = fsti_share_claim(share, 0), other = fsti_share_claim(share, 1);
    fsti_share_stall_time(0);
    end_child(owner);
    CHECK_INT(stalled, FSTI_SHARE_STALLED);
    CHECK_INT(other, FSTI_SHARE_CLAIMED);
    CHECK_INT(fsti_share_claim(share, 0), FSTI_SHARE_CLAIMED);
    fsti_share_unref(share);
}

static fsti_share *inherited;

static int use_inherited(void) {
    char *data = fsti_share_map_shared(inherited, 0); // made by the parent
    int result = data == NULL || data[0] != 1;
    fsti_share_unref(inherited);
    return result;
}

TEST(a_forked_child_that_frees_its_reference_changes_nothing_for_the_parent)
{
    use_folder("fork");
    fsti_share *share = inherited = open_share("a");
    CHECK(share != NULL);
    fill(share);
    CHECK_INT(in_child(use_inherited), 0);
    visited_segments all = list_all();
    CHECK_INT(all.count, 1);
    CHECK(all.last.in_use && all.last.is_complete);
    fsti_share_unref(share);
    CHECK_INT(list_all().count, 0);
}

TEST(the_last_user_removes_the_segment_unless_there_is_a_grace_period)
{
    use_folder("grace");
    fsti_share *first = open_share("a"), *second = open_share("a");
    CHECK(first != NULL && second != NULL);
    fill(first);
    fsti_share_unref(first);
    CHECK_INT(list_all().count, 1);
    fsti_share_unref(second);
    CHECK_INT(list_all().count, 0);
    first = open_with_grace("a", 100);
    CHECK(first != NULL);
    fill(first);
    fsti_share_unref(first);
    second = open_with_grace("a", 100);
    CHECK(second != NULL && fsti_share_is_complete(second));
    fsti_share_unref(second);
    // The variable has the same effect. An incomplete segment is deleted in spite of it.
    setenv("FASTSAFETENSORS_SHARE_GRACE", "100", 1);
    first = open_share("b");
    CHECK(first != NULL);
    fsti_share_unref(first);
    CHECK_INT(list_all().count, 1);
}

/// Sets the time of the only segment's last use.
static void set_used(const char *folder, long long used_s) {
    char path[SHARE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, list_all().name);
    int fd = open(path, O_RDWR);
    if (pwrite(fd, &used_s, sizeof used_s, offsetof(share_header, used_s)) != sizeof used_s)
        abort();
    close(fd);
}

TEST(a_load_removes_segments_whose_grace_period_is_over)
{
    const char *folder = use_folder("over");
    fsti_share *share = open_with_grace("a", 100);
    CHECK(share != NULL);
    fill(share);
    fsti_share_unref(share);
    share = open_share("b");
    fsti_share_unref(share);
    CHECK_INT(list_all().count, 1);
    set_used(folder, 1000);
    // A pinned one stays.
    CHECK_INT(fsti_share_pin(NULL, list_all().name, true, NULL), FST_OK);
    fsti_share_unref(open_share("b"));
    CHECK_INT(list_all().count, 1);
    CHECK(list_all().last.is_pinned);
    CHECK_INT(fsti_share_pin(NULL, list_all().name, false, NULL), FST_OK);
    fsti_share_unref(open_share("b"));
    CHECK_INT(list_all().count, 0);
}

TEST(segments_are_bounded_together)
{
    use_folder("bound");
    setenv("FASTSAFETENSORS_SHARE_MAX", "700K", 1);
    fsti_share *first = open_with_grace("a", 100);
    CHECK(first != NULL);
    fill(first);
    // A second one fits, a third does not while both are in use.
    fsti_share *second = open_share("b");
    CHECK(second != NULL);
    CHECK(open_share("c") == NULL);
    CHECK_CONTAINS(why, "limit of 716800");
    // An unused one makes space.
    fsti_share_unref(first);
    fsti_share *third = open_share("c");
    CHECK(third != NULL);
    fsti_share_unref(second);
    fsti_share_unref(third);
    CHECK_INT(list_all().count, 0);
    setenv("FASTSAFETENSORS_SHARE_MAX", "7 GX", 1);
    CHECK(open_share("c") == NULL);
    CHECK_CONTAINS(why, "FASTSAFETENSORS_SHARE_MAX must be a size such as 40GiB");
    unsetenv("FASTSAFETENSORS_SHARE_MAX");
}

TEST(the_grace_is_a_number_of_seconds)
{
    static const char *const wrong[] = {
        "5m", "-1", "1.5", " 3", "3 ", "31622401", "99999999999999999999"};
    use_folder("grace");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv("FASTSAFETENSORS_SHARE_GRACE", wrong[i], 1);
        CHECK(open_share("a") == NULL);
        CHECK_CONTAINS(why, "FASTSAFETENSORS_SHARE_GRACE must be a number of seconds up to");
    }
    unsetenv("FASTSAFETENSORS_SHARE_GRACE");
}

TEST(a_folder_that_is_not_the_users_alone_is_refused)
{
    const char *folder = use_folder("foreign");
    fst_error error;
    CHECK_INT(mkdir(folder, 0755), 0);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "open to other users");
    CHECK_INT(fsti_share_visit(NULL, add_segment, &(visited_segments){0}, &error),
              FST_E_PERMISSION);
    CHECK_INT(chmod(folder, 0700), 0);
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    fsti_share_unref(share);
    // A link to a good folder may lead elsewhere tomorrow.
    const char *link = fixture_path("link");
    CHECK_INT(symlink(folder, link), 0);
    setenv("FASTSAFETENSORS_SHARE_DIR", link, 1);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "cannot be opened");
    static const char *const endings[] = {"/", "//", "/.", "/././/"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        char text[SHARE_PATH_BYTES];
        snprintf(text, sizeof text, "%s%s", link, endings[i]);
        setenv("FASTSAFETENSORS_SHARE_DIR", text, 1);
        CHECK(open_share("a") == NULL);
        CHECK_CONTAINS(why, "cannot be opened");
    }
    if (geteuid() != 0) SKIP("needs root for a folder of another user");
    CHECK_INT(chown(folder, 12345, 12345), 0);
    setenv("FASTSAFETENSORS_SHARE_DIR", folder, 1);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "another user owns it");
}

/// Makes a complete segment that outlives its user, and opens its file.
static int make_kept(const char *folder, char path[SHARE_PATH_BYTES]) {
    fsti_share *share = open_with_grace("a", 100);
    if (share == NULL) abort();
    fill(share);
    fsti_share_unref(share);
    snprintf(path, SHARE_PATH_BYTES, "%s/%s", folder, list_all().name);
    return open(path, O_RDWR);
}

/// Whether opening the segment finds it complete; 2: it cannot be opened.
static int finds_whole(void) {
    fsti_share *share = open_with_grace("a", 100);
    if (share == NULL) return 2;
    int is_whole = fsti_share_is_complete(share);
    fsti_share_unref(share);
    return is_whole;
}

TEST(damaged_segments_are_replaced)
{
    const char *folder = use_folder("damaged");
    char path[SHARE_PATH_BYTES];
    int fd = make_kept(folder, path);
    struct stat stamp;
    CHECK_INT(finds_whole(), 1);
    // Truncated.
    CHECK_INT(fstat(fd, &stamp), 0);
    CHECK_INT(ftruncate(fd, stamp.st_size - 4096), 0);
    CHECK_INT(finds_whole(), 0);
    close(fd);
    // Truncated and made longer again: the end would read as zeros.
    fd = make_kept(folder, path);
    CHECK_INT(ftruncate(fd, 8192), 0);
    CHECK_INT(ftruncate(fd, stamp.st_size), 0);
    CHECK_INT(finds_whole(), 0);
    close(fd);
    // Two pages less, as many as the header and the states have.
    fd = make_kept(folder, path);
    CHECK_INT(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 65536, 8192), 0);
    CHECK_INT(finds_whole(), 0);
    close(fd);
    // A changed header.
    for (size_t at = 0; at < offsetof(share_header, is_pinned); at += 7) {
        char byte;
        fd = make_kept(folder, path);
        CHECK_INT(pread(fd, &byte, 1, (off_t)at), 1);
        byte ^= 0x40;
        CHECK_INT(pwrite(fd, &byte, 1, (off_t)at), 1);
        // Without the magic, the file could be of another program.
        CHECK_INT(finds_whole(), at < sizeof(((share_header *)NULL)->magic) ? 2 : 0);
        close(fd);
        (void)unlink(path);
    }
    // An empty file, left by a process that was killed while it created the segment.
    fd = make_kept(folder, path);
    CHECK_INT(ftruncate(fd, 0), 0);
    CHECK_INT(finds_whole(), 0);
    close(fd);
}

TEST(files_of_other_programs_are_never_deleted)
{
    const char *folder = use_folder("others");
    const char *const names[] = {"00000000000000000000000000000000",
                                 "d41d8cd98f00b204e9800998ecf8427e"};
    char path[SHARE_PATH_BYTES];
    CHECK_INT(mkdir(folder, 0700), 0);
    setenv("FASTSAFETENSORS_SHARE_MAX", "400K", 1);
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        int fd = open(path, O_RDWR | O_CREAT, 0600);
        CHECK_INT(write(fd, "my only copy", i * 12), (int)(i * 12));
        close(fd);
    }
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    CHECK(open_share("b") == NULL); // looks for space
    fsti_share_unref(share);
    CHECK_INT(fsti_share_drop(NULL, NULL, &(fst_segments_dropped){0}, NULL), FST_OK);
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        CHECK_INT(access(path, F_OK), 0);
    }
}

TEST(files_that_others_can_open_are_not_used)
{
    const char *folder = use_folder("rights");
    char path[SHARE_PATH_BYTES], other[SHARE_PATH_BYTES];
    close(make_kept(folder, path));
    CHECK_INT(chmod(path, 0640), 0);
    CHECK_INT(finds_whole(), 2);
    CHECK_CONTAINS(why, "the shared segment cannot be used: Permission denied");
    CHECK_INT(chmod(path, 0600), 0);
    CHECK_INT(finds_whole(), 1);
    // A hard link could lie in a folder that another user can write to.
    snprintf(other, sizeof other, "%s/other", folder);
    CHECK_INT(link(path, other), 0);
    CHECK_INT(finds_whole(), 2);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(symlink(other, path), 0);
    CHECK_INT(finds_whole(), 2);
    CHECK_INT(unlink(path), 0);
    // A FIFO must not block.
    CHECK_INT(mkfifo(path, 0600), 0);
    CHECK_INT(finds_whole(), 2);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(mkdir(path, 0700), 0);
    CHECK_INT(finds_whole(), 2);
}

static int open_with_limit(void) {
    // With the default action the signal would end the process.
    struct rlimit limit = {BATCH_BYTES, BATCH_BYTES};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    if (open_share("a") != NULL) return 2;
    return strstr(why, "File too large") != NULL ? 0 : 3;
}

TEST(a_limit_on_file_sizes_ends_no_process)
{
    use_folder("fsize");
    CHECK_INT(in_child(open_with_limit), 0);
}

TEST(dropping_and_pinning_find_segments_by_the_beginning_of_their_names)
{
    use_folder("drop");
    fst_error error;
    fst_segments_dropped dropped = {.struct_size = sizeof dropped};
    CHECK_INT(fsti_share_drop(NULL, NULL, &dropped, NULL), FST_OK); // no folder yet
    CHECK_INT(dropped.count, 0);
    fsti_share *used = open_share("used");
    CHECK(used != NULL);
    fill(used);
    char name[SHARE_NAME_BYTES];
    memcpy(name, list_all().name, sizeof name);
    CHECK_INT(fsti_share_pin(NULL, "zz", true, &error), FST_E_NOT_FOUND);
    CHECK_CONTAINS(error.message, "no shared segment's name begins with zz");
    name[6] = '\0';
    CHECK_INT(fsti_share_pin(NULL, name, true, NULL), FST_OK);
    CHECK(list_all().last.is_pinned);
    CHECK_INT(fsti_share_pin(NULL, name, false, NULL), FST_OK);
    CHECK(!list_all().last.is_pinned);
    // The process that uses it keeps it, and does not delete a later segment with the same name.
    CHECK_INT(fsti_share_drop(NULL, name, &dropped, NULL), FST_OK);
    CHECK_INT(dropped.count, 1);
    CHECK(dropped.memory_bytes >= BATCH_COUNT * BATCH_BYTES);
    CHECK_INT(list_all().count, 0);
    fsti_share *next = open_share("used");
    CHECK(next != NULL && !fsti_share_is_complete(next));
    CHECK(fsti_share_is_complete(used));
    fsti_share_unref(used);
    CHECK_INT(list_all().count, 1);
    // A prefix that matches several segments.
    fsti_share *more[20];
    char key[2] = "a";
    for (size_t i = 0; i < 20; i++, key[0]++) CHECK((more[i] = open_share(key)) != NULL);
    char digit[2] = {list_all().name[0], '\0'};
    size_t same = 0;
    for (size_t i = 0; i < 20; i++) same += more[i]->name[0] == digit[0];
    if (same > 1) {
        CHECK_INT(fsti_share_pin(NULL, digit, true, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "Give more digits");
    }
    for (size_t i = 0; i < 20; i++) fsti_share_unref(more[i]);
    fsti_share_unref(next);
    CHECK_INT(list_all().count, 0);
}

TEST(a_pinned_segment_outlives_its_users)
{
    use_folder("pinned");
    fsti_share *share = open_share("a");
    CHECK(share != NULL);
    fill(share);
    CHECK_INT(fsti_share_pin(NULL, list_all().name, true, NULL), FST_OK);
    fsti_share_unref(share);
    CHECK_INT(list_all().count, 1);
    share = open_share("a");
    CHECK(share != NULL && fsti_share_is_complete(share));
    fsti_share_unref(share);
    CHECK_INT(fsti_share_drop(NULL, NULL, &(fst_segments_dropped){0}, NULL), FST_OK);
    CHECK_INT(list_all().count, 0);
}

TEST(a_folder_that_cannot_be_used_says_why)
{
    const char *folder = use_folder("unusable");
    char path[SHARE_PATH_BYTES + 100];
    fst_error error;
    CHECK_INT(mkdir(folder, 0700), 0);
    snprintf(path, sizeof path, "%s/lock", folder);
    CHECK_INT(mkdir(path, 0700), 0);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "cannot be locked: Is a directory");
    CHECK_INT(fsti_share_visit(NULL, add_segment, &(visited_segments){0}, &error),
              FST_E_NOT_REGULAR);
    CHECK_CONTAINS(error.message, "locking the folder of segments");
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    setenv("FASTSAFETENSORS_SHARE_DIR", path, 1);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "the name of the folder for shared segments is too long");
    CHECK_INT(fsti_share_visit(NULL, add_segment, &(visited_segments){0}, &error), FST_E_ARGUMENT);
    setenv("FASTSAFETENSORS_SHARE_DIR", fixture_path("no/such/folder"), 1);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "cannot be opened: No such file");
}

TEST(sizes_beyond_every_memory_are_refused)
{
    use_folder("sizes");
    const uint64_t huge[2] = {SHARE_DATA_BYTES_MAX, SHARE_DATA_BYTES_MAX + 1};
    for (uint32_t count = 1; count <= 2; count++) {
        const fsti_share_request request = {.key = "k",
                                            .key_bytes = 1,
                                            .label = "",
                                            .batch_bytes = huge,
                                            .batch_count = count,
                                            .chunk_count = 1};
        CHECK(fsti_share_open(&request, why, sizeof why) == NULL);
        CHECK_CONTAINS(why, count == 1 ? "limit of" : "too large for a shared segment");
    }
}

TEST(every_allocation_may_fail)
{
    use_folder("memory");
    for (long i = 0; i < 20; i++) {
        fsti_alloc_fail_after(i);
        fsti_share *share = open_share("a");
        fsti_alloc_fail_after(-1);
        if (share == NULL) CHECK(strstr(why, "memory") != NULL);
        fsti_share_unref(share);
        CHECK_INT(list_all().count, 0);
    }
}
