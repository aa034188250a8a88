// SPDX-License-Identifier: Apache-2.0
/// The order of asynchronous saves: saves of one pool or one path form a chain, and a synchronous
/// save comes after those of its path.
#include <string.h>
#include <unistd.h>

#include "async_state.h"

/// How often a save that waits for an earlier one looks whether it was cancelled itself.
#define TURN_CHECK_MS 20

/// Saves that run, the latest first.
static struct {
    pthread_mutex_t lock;
    fst_async_save *first;
    pid_t owner;
} running = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t running_once = PTHREAD_ONCE_INIT;
static void register_running(void) { fsti_fork_lock(&running.lock); }

/// Whether this thread writes an asynchronous save. A callback of it may publish files itself.
static _Thread_local bool writes_save;
void fsti_async_note_thread(void) { writes_save = true; }

/// Whether two saves may replace the same files. Sets in one folder share an index.
static bool are_same_place(const save_place *one, const save_place *other) {
    if (one->target == NULL || other->target == NULL)
        return fsti_location_is_same(one->path, other->path);
    if (!one->is_set && !other->is_set) return strcmp(one->target, other->target) == 0;
    size_t size = (size_t)(fsti_path_name(one->target) - one->target);
    return size == (size_t)(fsti_path_name(other->target) - other->target) &&
           memcmp(one->target, other->target, size) == 0;
}

static bool must_precede(const fst_async_save *earlier, const fst_async_save *save) {
    return earlier->pool == save->pool || are_same_place(&earlier->place, &save->place);
}

void fsti_async_enter(fst_async_save *save) {
    pthread_once(&running_once, register_running);
    pthread_mutex_lock(&running.lock);
    if (running.owner != getpid()) { // of a fork's parent: they do not run here
        running.owner = getpid();
        running.first = NULL;
    }
    for (fst_async_save *other = running.first; other != NULL; other = other->next_running) {
        if (!must_precede(other, save)) continue;
        fsti_refcount_ref(&other->refs);
        save->previous = other;
        break;
    }
    save->next_running = running.first;
    running.first = save;
    pthread_mutex_unlock(&running.lock);
}

/// A save that runs, was started earlier, and must end first; referenced, or NULL. Several may
/// match that are not in one chain: the same files, and different pools.
static fst_async_save *earlier_of(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *other = save->next_running;
    while (other != NULL && !must_precede(other, save)) other = other->next_running;
    if (other != NULL) fsti_refcount_ref(&other->refs);
    pthread_mutex_unlock(&running.lock);
    return other;
}

/// Gives the pool back now, not with the handle, which the program may keep.
static void give_pool_back(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_staging_pool *pool = save->pool;
    save->pool = NULL;
    pthread_mutex_unlock(&running.lock);
    fsti_staging_pool_unref(pool);
}

bool fsti_async_end(fst_async_save *save) {
    give_pool_back(save);
    pthread_mutex_lock(&running.lock);
    fst_async_save **at = &running.first;
    while (*at != NULL && *at != save) at = &(*at)->next_running;
    if (*at != NULL) *at = save->next_running;
    save->next_running = NULL; // no longer kept up to date
    // Under both locks: when a save that waited for this one goes on, this one has ended.
    pthread_mutex_lock(&save->lock);
    save->is_ended = true;
    save->done_ns = fsti_now_ns() - save->start_ns;
    bool is_unheard = fsti_async_is_unheard(save);
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
    pthread_mutex_unlock(&running.lock);
    return is_unheard;
}

/// The save before this one, referenced, or NULL.
static fst_async_save *previous_of(fst_async_save *save) {
    pthread_mutex_lock(&save->lock);
    fst_async_save *previous = save->previous;
    if (previous != NULL) fsti_refcount_ref(&previous->refs);
    pthread_mutex_unlock(&save->lock);
    return previous;
}

/// The list has the latest save first, so one pass also finds saves
/// that must precede a predecessor.
fst_async_save *fsti_async_next_to_copy(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *next = save;
    for (fst_async_save *other = save->next_running; other != NULL; other = other->next_running)
        if (!atomic_load(&other->is_copied) && must_precede(other, next)) next = other;
    fsti_refcount_ref(&next->refs);
    pthread_mutex_unlock(&running.lock);
    return next;
}

uint64_t fsti_async_next_check(void) { return fsti_now_ns() + (uint64_t)TURN_CHECK_MS * 1000000; }

void fsti_async_await_a_little(fst_async_save *earlier) {
    struct timespec deadline = fsti_deadline_after(TURN_CHECK_MS);
    pthread_mutex_lock(&earlier->lock);
    if (!earlier->is_ended) pthread_cond_timedwait(&earlier->changed, &earlier->lock, &deadline);
    pthread_mutex_unlock(&earlier->lock);
}

/// Waits a little for the end of `previous`. When it has ended, the save before it, which it may
/// have left running, takes its place.
static void await_previous(fst_async_save *save, fst_async_save *previous) {
    struct timespec deadline = fsti_deadline_after(TURN_CHECK_MS);
    pthread_mutex_lock(&previous->lock);
    if (!previous->is_ended) pthread_cond_timedwait(&previous->changed, &previous->lock, &deadline);
    bool is_ended = previous->is_ended;
    fst_async_save *before = previous->previous;
    if (is_ended && before != NULL) fsti_refcount_ref(&before->refs);
    pthread_mutex_unlock(&previous->lock);
    if (!is_ended) return;
    pthread_mutex_lock(&running.lock);
    bool precedes = before != NULL && must_precede(before, save);
    pthread_mutex_unlock(&running.lock);
    if (!precedes) { // of the previous save's pool or file alone; earlier_of() finds others
        fsti_async_unref(before);
        before = NULL;
    }
    pthread_mutex_lock(&save->lock);
    save->previous = before;
    pthread_mutex_unlock(&save->lock);
    fsti_async_unref(previous);
}

fst_status fsti_async_await_turn(fst_async_save *save, fst_error *error) {
    bool supersedes = save->options.overlap == FST_OVERLAP_SUPERSEDE;
    for (;;) {
        fst_async_save *previous = previous_of(save);
        fst_async_save *earlier = previous == NULL ? earlier_of(save) : previous;
        bool is_over = earlier == NULL || atomic_load(&save->is_cancelled);
        if (!is_over && supersedes) fsti_async_save_cancel(earlier);
        if (!is_over && previous != NULL) await_previous(save, previous);
        if (!is_over && previous == NULL) fsti_async_await_a_little(earlier);
        fsti_async_unref(earlier);
        if (is_over) break;
    }
    if (!atomic_load(&save->is_cancelled)) return FST_OK;
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
}

bool fsti_async_must_wait(void) {
    pthread_once(&running_once, register_running);
    pthread_mutex_lock(&running.lock);
    bool is_busy = running.owner == getpid() && running.first != NULL;
    pthread_mutex_unlock(&running.lock);
    return is_busy && !writes_save;
}

fst_async_save *fsti_async_earlier_at(const save_place *place, uint64_t start_ns) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *other = running.first;
    while (other != NULL && (other->start_ns > start_ns || !are_same_place(&other->place, place)))
        other = other->next_running;
    if (other != NULL) fsti_refcount_ref(&other->refs);
    pthread_mutex_unlock(&running.lock);
    return other;
}
