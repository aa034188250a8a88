// SPDX-License-Identifier: Apache-2.0
/// Initialisation of libraries that may never return from it, on a separate thread each.
#include <unistd.h>

#include "primitives.h"

/// Pause of waiting threads between two checks, at first and at most. They do not wait on a
/// condition variable, because a child that is forked meanwhile would inherit its waiters.
#define PAUSE_US_MIN 50u
#define PAUSE_US_MAX 2000u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fsti_library_start *begun; ///< all that were begun

static void *run(void *context) {
    fsti_library_start *start = context;
    fsti_library_set_loading(true); // a library may call fork() to start a program
    start->run(start->context);
    pthread_mutex_lock(&lock);
    start->state = FSTI_START_DONE;
    pthread_mutex_unlock(&lock);
    return NULL;
}

/// Starts the thread. Without one, the library is initialised by this thread. The lock is held.
static void begin(fsti_library_start *start, uint32_t limit_ms) {
    pthread_t thread;
    start->state = FSTI_START_RUNNING;
    start->deadline_ns = fsti_now_ns() + (uint64_t)limit_ms * 1000000;
    start->next = begun;
    begun = start;
    if (fsti_thread_start(&thread, run, start) == 0) {
        pthread_detach(thread);
        return;
    }
    pthread_mutex_unlock(&lock);
    run(start);
    fsti_library_set_loading(false);
    pthread_mutex_lock(&lock);
}

bool fsti_library_start_within(fsti_library_start *start, uint32_t limit_ms) {
    unsigned pause_us = PAUSE_US_MIN;
    pthread_mutex_lock(&lock);
    if (start->state == FSTI_START_NEVER) begin(start, limit_ms);
    while (start->state == FSTI_START_RUNNING && fsti_now_ns() < start->deadline_ns) {
        pthread_mutex_unlock(&lock);
        usleep(pause_us);
        if (pause_us < PAUSE_US_MAX) pause_us *= 2;
        pthread_mutex_lock(&lock);
    }
    bool is_done = start->state == FSTI_START_DONE;
    pthread_mutex_unlock(&lock);
    return is_done;
}

bool fsti_library_start_is_running(void) {
    const fsti_library_start *start = begun;
    while (start != NULL &&
           (start->state != FSTI_START_RUNNING || fsti_now_ns() >= start->deadline_ns))
        start = start->next;
    return start != NULL;
}

void fsti_library_start_wait(void) {
    pthread_mutex_lock(&lock);
    while (fsti_library_start_is_running()) {
        pthread_mutex_unlock(&lock);
        usleep(PAUSE_US_MAX);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}

void fsti_library_start_before_fork(void) { pthread_mutex_lock(&lock); }

void fsti_library_start_after_fork(void) { pthread_mutex_unlock(&lock); }
