// SPDX-License-Identifier: Apache-2.0
/// Locks and descriptors of shared segments: in forked children, and of files that others can open.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "share_fixture.h"

static const char *watched_folder;

/// Whether this process has a file in the test's folder open.
static bool has_open_files(void) {
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    bool found = false;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char target[4096];
        ssize_t size = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        if (size <= 0) continue;
        target[size] = '\0';
        found |= strncmp(target, watched_folder, strlen(watched_folder)) == 0;
    }
    if (folder != NULL) closedir(folder);
    return found;
}

static fsti_share *held, *own;

/// A program's own handler, which frees what the parent has and uses a segment itself.
static void use_share_in_child(void) {
    if (held == NULL) return;
    fsti_share_unref(held);
    own = open_share("b");
}

/// This test is the first one, because handlers run in the order of their registration.
TEST(handlers_of_the_program_may_use_segments)
{
    int status;
    CHECK_INT(pthread_atfork(NULL, NULL, use_share_in_child), 0);
    watched_folder = use_folder("handlers");
    held = open_share("a");
    CHECK(held != NULL);
    pid_t child = fork();
    if (child == 0) {
        bool is_open = own != NULL;
        fsti_share_unref(own);
        _exit(!is_open || has_open_files());
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    fsti_share_unref(held);
    held = NULL;
    CHECK_INT(list_all().count, 0);
}

static void *open_again_and_again(void *is_over) {
    while (!atomic_load((atomic_bool *)is_over)) fsti_share_unref(open_share("a"));
    return NULL;
}

/// A fork at any moment: a descriptor in a child would keep locks after the parent has closed it.
TEST(a_forked_child_has_no_descriptors)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    atomic_bool is_over = false;
    pthread_t thread;
    int failed_count = 0, status;
    watched_folder = use_folder("descriptors");
    CHECK_INT(pthread_create(&thread, NULL, open_again_and_again, &is_over), 0);
    for (int i = 0; i < 2000; i++) {
        pid_t child = fork();
        if (child == 0) _exit(has_open_files());
        waitpid(child, &status, 0);
        failed_count += status != 0;
    }
    atomic_store(&is_over, true);
    pthread_join(thread, NULL);
    CHECK_INT(failed_count, 0);
    CHECK_INT(list_all().count, 0);
}

/// Tensors are freed while other threads of a program wait.
TEST(the_end_of_a_use_does_not_wait_long_for_a_locked_folder)
{
    const char *folder = use_folder("locked");
    fsti_share *share = open_share("a");
    char path[4096];
    CHECK(share != NULL);
    snprintf(path, sizeof path, "%s/lock", folder);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fsti_share_set_lock(fd, F_WRLCK, 0, 1));
    alarm(3);
    fsti_share_unref(share);
    alarm(0);
    close(fd);
    CHECK_INT(list_all().count, 1);
    fsti_share_unref(open_share("a")); // the next user removes it
    CHECK_INT(list_all().count, 0);
}

TEST(a_lock_that_others_can_open_is_not_used)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/lock", use_folder("foreign lock"));
    fsti_share_unref(open_share("a"));
    CHECK_INT(chmod(path, 0666), 0);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "cannot be locked: Permission denied");
    CHECK_INT(unlink(path), 0);
    CHECK_INT(mkfifo(path, 0600), 0);
    CHECK(open_share("a") == NULL);
    CHECK_CONTAINS(why, "cannot be locked: Permission denied");
}
