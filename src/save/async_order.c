// SPDX-License-Identifier: Apache-2.0
/// The order of asynchronous saves: a save waits for earlier ones with its pool or its files, and a
/// synchronous save for those of its files.
#include <unistd.h>

#include "async_state.h"

/// How often a save that waits for an earlier one looks whether it was cancelled itself.
#define TURN_CHECK_MS 20
/// The least time between the orders of two saves that callbacks have not started.
#define ORDER_STEP_NS 256u

/// Saves that run, the latest first.
static struct {
    pthread_mutex_t lock;
    fst_async_save *first;
    pid_t owner;
} running = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t running_once = PTHREAD_ONCE_INIT;
static void register_running(void) { fsti_fork_lock(&running.lock); }

/// The save that this thread calls the program for; NULL: none.
static _Thread_local const fst_async_save *callback_save;

const fst_async_save *fsti_async_set_callback_save(const fst_async_save *save) {
    const fst_async_save *before = callback_save;
    callback_save = save;
    return before;
}

bool fsti_async_in_callback(void) {
    return callback_save != NULL && callback_save->owner == getpid();
}

bool fsti_async_in_cancelled_callback(void) {
    return fsti_async_in_callback() && atomic_load(&callback_save->is_cancelled);
}

static bool must_precede(const fst_async_save *earlier, const fst_async_save *save) {
    return earlier->pool == save->pool || fsti_async_are_same_place(&earlier->place, &save->place);
}

/// Whether a save must wait for another one that runs, perhaps because of a third one.
static bool must_wait_for(fst_async_save *save, const fst_async_save *other) {
    pthread_mutex_lock(&running.lock);
    for (fst_async_save *one = running.first; one != NULL; one = one->next_running)
        one->must_end_first = one == save;
    for (fst_async_save *later = save; later != NULL; later = later->next_running)
        for (fst_async_save *one = later->next_running; later->must_end_first && one != NULL;
             one = one->next_running)
            one->must_end_first = one->must_end_first || must_precede(one, later);
    bool is_found = false;
    for (fst_async_save *one = running.first; one != NULL; one = one->next_running)
        is_found = is_found || (one == other && one->must_end_first);
    pthread_mutex_unlock(&running.lock);
    return is_found;
}

bool fsti_async_is_blocked(fst_async_save *save) {
    if (!fsti_async_in_callback() || save->has_own_memory) return false;
    return save == callback_save || must_wait_for(save, callback_save);
}

/// A new save's place in the list, in a callback of a save: right before that one.
static fst_async_save **enter_nested(fst_async_save *save, fst_async_save *caller) {
    fst_async_save *older = caller->next_running;
    save->order_ns = caller->order_ns - ORDER_STEP_NS / 2;
    if (older != NULL) save->order_ns = fsti_max(save->order_ns, older->order_ns + 1);
    save->order_ns = fsti_min(save->order_ns, caller->order_ns - 1);
    return &caller->next_running;
}

static fst_async_save **enter_last(fst_async_save *save) {
    save->order_ns = fsti_now_ns();
    if (running.first != NULL)
        save->order_ns = fsti_max(save->order_ns, running.first->order_ns + ORDER_STEP_NS);
    return &running.first;
}

/// The save that runs and that this thread calls the program for.
static fst_async_save *caller_of_thread(void) {
    fst_async_save *one = fsti_async_in_callback() ? running.first : NULL;
    while (one != NULL && one != callback_save) one = one->next_running;
    return one;
}

void fsti_async_enter(fst_async_save *save) {
    pthread_once(&running_once, register_running);
    pthread_mutex_lock(&running.lock);
    if (running.owner != getpid()) { // of a fork's parent: they do not run here
        running.owner = getpid();
        running.first = NULL;
    }
    fst_async_save *caller = caller_of_thread();
    fst_async_save **at = caller == NULL ? enter_last(save) : enter_nested(save, caller);
    save->next_running = *at;
    *at = save;
    pthread_mutex_unlock(&running.lock);
}

/// The latest save that runs, was started earlier, and must end first; referenced, or NULL.
static fst_async_save *earlier_of(const fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *other = save->next_running;
    while (other != NULL && !must_precede(other, save)) other = other->next_running;
    if (other != NULL) fsti_refcount_ref(&other->refs);
    pthread_mutex_unlock(&running.lock);
    return other;
}

/// Saves that have only a manifest in common are of different models.
static bool is_superseded(const fst_async_save *earlier, const fst_async_save *save) {
    return earlier->pool == save->pool || fsti_async_are_same_model(&earlier->place, &save->place);
}

void fsti_async_cancel_earlier(fst_async_save *save) {
    for (;;) {
        pthread_mutex_lock(&running.lock);
        fst_async_save *other = save->next_running;
        while (other != NULL && (atomic_load(&other->is_cancelled) || !is_superseded(other, save)))
            other = other->next_running;
        if (other != NULL) fsti_refcount_ref(&other->refs);
        pthread_mutex_unlock(&running.lock);
        if (other == NULL) break;
        fsti_async_save_cancel(other);
        fsti_async_unref(other);
    }
}

void fsti_async_note_publishing(fst_async_save *save, bool is_publishing) {
    pthread_mutex_lock(&running.lock);
    save->is_publishing = is_publishing;
    pthread_mutex_unlock(&running.lock);
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

fst_status fsti_async_await_turn(fst_async_save *save, fst_error *error) {
    while (!atomic_load(&save->is_cancelled)) {
        fst_async_save *earlier = earlier_of(save);
        if (earlier == NULL) return FST_OK;
        fsti_async_await_a_little(earlier);
        fsti_async_unref(earlier);
    }
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
}

uint64_t fsti_async_order_ns(void) {
    pthread_once(&running_once, register_running);
    pthread_mutex_lock(&running.lock);
    bool is_busy = running.owner == getpid() && running.first != NULL;
    uint64_t latest = is_busy ? running.first->order_ns + 1 : 0;
    pthread_mutex_unlock(&running.lock);
    return is_busy && fsti_async_in_callback() ? callback_save->order_ns : latest;
}

fst_async_save *fsti_async_earlier_at(const save_place *place, uint64_t order_ns, bool publishes) {
    pthread_mutex_lock(&running.lock);
    // What is published is perhaps the files of a save, for which later saves wait.
    for (fst_async_save *other = running.first; publishes && other != NULL;
         other = other->next_running)
        if (other->is_publishing && fsti_async_are_same_place(&other->place, place))
            order_ns = fsti_min(order_ns, other->order_ns);
    fst_async_save *other = running.first;
    while (other != NULL &&
           (other->order_ns >= order_ns || !fsti_async_are_same_place(&other->place, place)))
        other = other->next_running;
    if (other != NULL) fsti_refcount_ref(&other->refs);
    pthread_mutex_unlock(&running.lock);
    return other;
}
