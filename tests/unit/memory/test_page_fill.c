// SPDX-License-Identifier: Apache-2.0
/// Small pages that userfaultfd(2) creates with their bytes: which bytes they have, that other
/// pages can be accessed afterwards, and calls that fail.
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory/memory.h"
#include "fill_fixture.h"
#include "fixture.h"

#define BYTES ((uint64_t)8 << 20)

static char *source_bytes(void) {
    static char bytes[BYTES];
    for (uint64_t i = 0; i < BYTES && bytes[1] == 0; i++) bytes[i] = (char)fixture_byte(i);
    return bytes;
}

/// Begins a fill of a fresh buffer of small pages. NULL if the system refuses fills.
static fsti_buffer *begin(int *fd) {
    fsti_buffer *buffer = NULL;
    source_bytes();
    alarm(60); // an access that waits for ever
    fsti_arena_keep_max(0);
    fsti_pages_fake(fill_slow_huge_pages);
    *fd = fsti_fill_open();
    if (*fd < 0 || fsti_buffer_arena(4 * BYTES, &buffer, NULL) != FST_OK) return NULL;
    fsti_buffer_choose_pages(buffer, true);
    fsti_buffer_begin_fill(buffer, *fd);
    return buffer;
}

static void finish(fsti_buffer *buffer, int fd) {
    fsti_fill_close(fd);
    fsti_buffer_unref(buffer);
    fsti_pages_fake(NULL);
    fill_failure = 0;
    alarm(0);
}

/// Fills the middle of a buffer in pieces of odd sizes. Returns the size of its whole pages.
static uint64_t fill_odd_pieces(fsti_buffer *buffer) {
    uint64_t page = fsti_page_bytes(), whole = 0;
    for (uint64_t at = 0, size = 1; at < BYTES; at += size, size = size * 3 + 1) {
        size = fsti_min(size, BYTES - at);
        char *target = buffer->data + BYTES + 5 + at;
        fsti_buffer_fill(buffer, target, source_bytes() + at, size);
        uint64_t first = fsti_align_up((uintptr_t)target, page);
        uint64_t end = fsti_align_down((uintptr_t)target + size, page);
        if (first < end) whole += end - first;
    }
    return whole;
}

static void check_bytes(const fsti_buffer *buffer) {
    CHECK(memcmp(buffer->data + BYTES + 5, source_bytes(), BYTES) == 0);
    CHECK_INT(buffer->data[0], 0);
    CHECK_INT(buffer->data[BYTES + 4], 0);
    CHECK_INT(buffer->data[2 * BYTES + 5], 0);
    CHECK_INT(buffer->data[3 * BYTES], 0);
}

TEST(pages_are_created_with_their_bytes)
{
    int fd;
    fsti_buffer *buffer = begin(&fd);
    if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
    CHECK(fsti_buffer_has_small_pages(buffer));
    fill_created_bytes = 0;
    CHECK_INT(fill_odd_pieces(buffer), fill_created_bytes);
    fsti_buffer_end_fill(buffer);
    check_bytes(buffer);
    memset(buffer->data, 3, buffer->size_bytes);
    finish(buffer, fd);
}

TEST(pages_that_exist_are_written)
{
    int fd;
    fsti_buffer *buffer = begin(&fd);
    if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
    fsti_buffer_end_fill(buffer);
    memset(buffer->data + BYTES + (1 << 20), 0, 3 << 20);
    memset(buffer->data + 2 * BYTES - (1 << 20) + 777, 0, 1);
    fsti_buffer_begin_fill(buffer, fd);
    fill_created_bytes = 0;
    fill_odd_pieces(buffer);
    CHECK(fill_created_bytes > 0 && fill_created_bytes <= BYTES - (3 << 20) - fsti_page_bytes());
    CHECK_INT(atomic_load(&buffer->fill_fd), -1); // after many such pages
    fsti_buffer_end_fill(buffer);
    check_bytes(buffer);
    finish(buffer, fd);
}

/// The rest is copied as without a fill.
TEST(a_call_that_fails_ends_the_fill)
{
    static const int failures[] = {ENOMEM, EAGAIN, ENOENT, EFAULT};
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++)
        for (int at = 0; at < 20; at += 3) {
            int fd;
            fsti_buffer *buffer = begin(&fd);
            if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
            fill_failure = failures[i];
            fill_copies_left = at;
            fill_odd_pieces(buffer);
            CHECK_INT(atomic_load(&buffer->fill_fd), -1);
            check_bytes(buffer);
            finish(buffer, fd);
        }
}

TEST(without_userfaultfd_bytes_are_copied)
{
    int fd;
    fsti_buffer *buffer;
    fill_is_refused = true;
    CHECK_INT(fsti_fill_open(), -1);
    fill_is_refused = false;
    buffer = begin(&fd);
    if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
    fsti_buffer_end_fill(buffer);
    fill_created_bytes = 0;
    fsti_buffer_begin_fill(buffer, -1);
    fill_odd_pieces(buffer);
    CHECK_INT(fill_created_bytes, 0);
    check_bytes(buffer);
    finish(buffer, fd);
}

TEST(bytes_outside_of_the_buffer_are_copied)
{
    int fd;
    char target[4096] = {0};
    fsti_buffer *buffer = begin(&fd);
    if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
    fsti_buffer_fill(buffer, target, source_bytes(), sizeof target);
    fsti_buffer_fill(NULL, target, source_bytes(), sizeof target);
    fsti_buffer_fill(buffer, buffer->data, source_bytes(), 0);
    CHECK(memcmp(target, source_bytes(), sizeof target) == 0);
    finish(buffer, fd);
}

typedef struct share {
    fsti_buffer *buffer;
    uint64_t first;
} share;

static void *fill_share(void *argument) {
    const share *own = argument;
    enum { PIECE = 70001, THREADS = 8 };
    for (uint64_t at = own->first * PIECE; at < BYTES; at += (uint64_t)THREADS * PIECE) {
        uint64_t size = fsti_min(PIECE, BYTES - at);
        fsti_buffer_fill(own->buffer, own->buffer->data + BYTES + 5 + at, source_bytes() + at,
                         size);
    }
    return NULL;
}

enum { THREADS_MAX = 8 };

/// Runs `fill` in `count` threads, each with a share that begins `step` after the one before.
static void run_threads(fsti_buffer *buffer, void *(*fill)(void *), unsigned count, uint64_t step) {
    pthread_t threads[THREADS_MAX];
    share shares[THREADS_MAX];
    for (unsigned t = 0; t < count; t++) {
        shares[t] = (share){buffer, t * step};
        CHECK_INT(pthread_create(&threads[t], NULL, fill, &shares[t]), 0);
    }
    for (unsigned t = 0; t < count; t++) pthread_join(threads[t], NULL);
}

/// Their pieces share pages. In the second half, a call fails.
TEST(threads_fill_one_buffer)
{
    for (int i = 0; i < 20; i++) {
        int fd;
        fsti_buffer *buffer = begin(&fd);
        if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
        fill_failure = i < 10 ? 0 : ENOMEM;
        fill_copies_left = 5 * i;
        run_threads(buffer, fill_share, 8, 1);
        fsti_buffer_end_fill(buffer);
        check_bytes(buffer);
        finish(buffer, fd);
    }
}

static pthread_barrier_t all_ready;

static void *fill_part(void *argument) {
    const share *own = argument;
    pthread_barrier_wait(&all_ready);
    fsti_buffer_fill(own->buffer, own->buffer->data + own->first, source_bytes() + own->first,
                     BYTES / 4);
    return NULL;
}

/// While one thread ends the fill, the others notice at any point of their work.
TEST(a_fill_may_end_while_other_threads_write)
{
    for (int i = 0; i < 400; i++) {
        int fd;
        fsti_buffer *buffer = begin(&fd);
        if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
        fill_failure = ENOMEM;
        fill_copies_left = i % 8;
        pthread_barrier_init(&all_ready, NULL, 4);
        run_threads(buffer, fill_part, 4, BYTES / 4);
        pthread_barrier_destroy(&all_ready);
        CHECK(memcmp(buffer->data, source_bytes(), BYTES) == 0);
        fsti_buffer_end_fill(buffer);
        finish(buffer, fd);
    }
}

/// A child has the memory, but no fill, and not the file by which it could write to its parent.
TEST(a_forked_child_can_access_all_pages)
{
    int fd, status = -1;
    fsti_buffer *buffer = begin(&fd);
    if (buffer == NULL) SKIP("the system refuses userfaultfd(2)");
    fsti_buffer_fill(buffer, buffer->data, source_bytes(), BYTES / 2);
    pid_t child = fork();
    if (child == 0) {
        struct stat attributes;
        alarm(20);
        if (fstat(fd, &attributes) == 0 || errno != EBADF) _exit(2);
        memset(buffer->data + BYTES / 2, 3, buffer->size_bytes - BYTES / 2);
        _exit(memcmp(buffer->data, source_bytes(), BYTES / 2) == 0 ? 0 : 1);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    fill_created_bytes = 0;
    CHECK_INT(fill_odd_pieces(buffer), fill_created_bytes);
    fsti_buffer_end_fill(buffer);
    CHECK(memcmp(buffer->data + BYTES + 5, source_bytes(), BYTES) == 0);
    finish(buffer, fd);
}
