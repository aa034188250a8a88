// SPDX-License-Identifier: Apache-2.0
/// Blocking waits for a request, which poll the caller's cancellation.
#include <pthread.h>
#include <time.h>

#include "http.h"

#define WATCH_NS 100000000
/// Timeout of requests after a cancellation.
#define LAST_REQUEST_MS 2000u

typedef struct request_wait {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
    atomic_bool stop;
} request_wait;

/// Runs on the event loop's thread. Signals before it unlocks, because after that the waiter may
/// return, and `wait` is on its stack.
static void wake_waiter(http_request *request) {
    request_wait *wait = request->context;
    pthread_mutex_lock(&wait->lock);
    wait->is_done = true;
    pthread_cond_signal(&wait->changed);
    pthread_mutex_unlock(&wait->lock);
}

bool fsti_http_wait(pthread_cond_t *changed, pthread_mutex_t *lock) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WATCH_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    return pthread_cond_timedwait(changed, lock, &until) == 0;
}

/// Waits until the request ends; if the watch cancels, that is soon. Returns the watch's status.
/// Called with the lock held, and releases it.
static fst_status wait_watched(request_wait *wait, const fsti_http_watch *watch,
                               const atomic_bool *stop, fst_error *error) {
    fst_status status = FST_OK;
    while (!wait->is_done) {
        if (fsti_http_wait(&wait->changed, &wait->lock) || status != FST_OK) continue;
        pthread_mutex_unlock(&wait->lock);
        status = watch->ask(watch->context, 0, error);
        if (status != FST_OK || (stop != NULL && atomic_load(stop)))
            atomic_store(&wait->stop, true);
        pthread_mutex_lock(&wait->lock);
    }
    return status;
}

fsti_http_watch fsti_http_cleanup_watch(const fsti_http_watch *watch) {
    bool is_over =
        watch != NULL && watch->ask != NULL && watch->ask(watch->context, 0, NULL) != FST_OK;
    if (is_over) return (fsti_http_watch){.bound_ms = LAST_REQUEST_MS};
    return watch == NULL ? (fsti_http_watch){.ask = NULL} : *watch;
}

void fsti_request_run(http_request *request) {
    request_wait wait = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false};
    const fsti_http_watch *watch = request->watch;
    const atomic_bool *stop = request->stop;
    fst_error error = {0};
    fst_status status = FST_OK;
    bool is_watched = watch != NULL && watch->ask != NULL;
    if (watch != NULL && watch->bound_ms > 0) request->bound_ms = watch->bound_ms;
    if (is_watched) request->stop = &wait.stop;
    request->context = &wait;
    request->done = wake_waiter;
    fsti_request_begin(request);
    pthread_mutex_lock(&wait.lock);
    if (is_watched) status = wait_watched(&wait, watch, stop, &error);
    while (!wait.is_done) pthread_cond_wait(&wait.changed, &wait.lock);
    pthread_mutex_unlock(&wait.lock);
    request->stop = stop;
    if (status == FST_OK || request->status != FST_E_CANCELLED) return;
    request->status = status;
    request->error = error;
}
