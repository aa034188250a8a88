// SPDX-License-Identifier: Apache-2.0
/// Threads that read and write cache files, so that event loops never block on the disk. They also
/// hold tasks that wait for blocks of other processes.
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cache_private.h"

#define THREAD_COUNT_MAX 4u

/// One pool per process. A forked child has no threads and creates its own.
static struct {
    pid_t owner;
    uint32_t count;
    cache_task *ready, **ready_end, *waiting;
} pool;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void add_ready(cache_task *task) {
    task->next = NULL;
    *pool.ready_end = task;
    pool.ready_end = &task->next;
}

/// Moves due tasks to the ready list. Returns when the next one is due; 0: no task waits.
static uint64_t take_due(uint64_t now_ns) {
    uint64_t next_ns = 0;
    for (cache_task **at = &pool.waiting; *at != NULL;) {
        cache_task *task = *at;
        if (task->due_ns <= now_ns) {
            *at = task->next;
            add_ready(task);
            continue;
        }
        if (next_ns == 0 || task->due_ns < next_ns) next_ns = task->due_ns;
        at = &task->next;
    }
    return next_ns;
}

/// Waits for the next task. The lock must be held.
static cache_task *take_task(void) {
    for (;;) {
        uint64_t due_ns = take_due(fsti_now_ns());
        cache_task *task = pool.ready;
        if (task != NULL) {
            pool.ready = task->next;
            if (pool.ready == NULL)
                pool.ready_end = &pool.ready;
            else
                pthread_cond_signal(&changed); // several may have become due at once
            return task;
        }
        if (due_ns == 0) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        struct timespec until = {.tv_sec = (time_t)(due_ns / 1000000000),
                                 .tv_nsec = (long)(due_ns % 1000000000)};
        pthread_cond_timedwait(&changed, &lock, &until);
    }
}

static void *run_tasks(void *context) {
    (void)context;
    pthread_mutex_lock(&lock);
    for (;;) {
        cache_task *task = take_task();
        pthread_mutex_unlock(&lock);
        task->run(task);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

bool fsti_cache_pool_ready(void) {
    pthread_once(&once, make_condition);
    fsti_fork_lock(&lock);
    pthread_mutex_lock(&lock);
    if (pool.owner != getpid()) { // first use, or after a fork
        memset(&pool, 0, sizeof pool);
        make_condition(); // threads of the parent may be waiting on it
        pool.owner = getpid();
        pool.ready_end = &pool.ready;
    }
    uint32_t wanted = (uint32_t)fsti_min(fsti_max(fsti_cpu_count(), 2), THREAD_COUNT_MAX);
    for (pthread_t thread; pool.count < wanted; pool.count++) {
        if (fsti_thread_start(&thread, run_tasks, NULL) != 0) break;
        pthread_detach(thread);
    }
    bool is_ready = pool.count > 0;
    pthread_mutex_unlock(&lock);
    return is_ready;
}

void fsti_cache_pool_add(cache_task *task, uint64_t due_ns) {
    pthread_mutex_lock(&lock);
    task->due_ns = due_ns;
    if (due_ns == 0) {
        add_ready(task);
    } else {
        task->next = pool.waiting;
        pool.waiting = task;
    }
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

void fsti_cache_pool_wake(void) {
    pthread_mutex_lock(&lock);
    for (cache_task *task = pool.waiting; task != NULL; task = task->next) task->due_ns = 0;
    if (pool.waiting != NULL) pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}
