// SPDX-License-Identifier: Apache-2.0
/// Giving memory back. The driver's calls for that wait for all that the device does, and whoever
/// drops a tensor may hold a lock that the device's work waits for (an interpreter's, with several
/// devices in one process): so a thread of its own calls them. It ends when nothing is left.
#include <unistd.h>

#include "gpu_private.h"

typedef struct parting {
    struct parting *next;
    const fsti_device *device;
    void *data;
    fsti_buffer *beneath; ///< of locked memory; NULL: memory of the device
} parting;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    parting *first, **last;
    bool is_running;
    pid_t owner;
} leaving = {.lock = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_once_t leaving_once = PTHREAD_ONCE_INIT;
static void register_leaving(void) { fsti_fork_lock(&leaving.lock); }

static void give_back(const parting *one) {
    if (fsti_device_enter_once_more(one->device)) {
        if (one->beneath != NULL)
            one->device->api->host_unregister(one->data);
        else
            one->device->api->memory_free((uint64_t)(uintptr_t)one->data);
        fsti_device_leave(one->device);
    }
    fsti_buffer_unref(one->beneath);
}

static void *run_leaving(void *argument) {
    (void)argument;
    pthread_mutex_lock(&leaving.lock);
    while (leaving.first != NULL) {
        parting *one = leaving.first;
        leaving.first = one->next;
        pthread_mutex_unlock(&leaving.lock);
        give_back(one);
        fsti_free(one);
        pthread_mutex_lock(&leaving.lock);
    }
    leaving.is_running = false;
    pthread_cond_broadcast(&leaving.done);
    pthread_mutex_unlock(&leaving.lock);
    return NULL;
}

/// A thread that nobody joins. False when there is none to be had.
static bool start_thread(void) {
    pthread_t thread;
    if (fsti_thread_start(&thread, run_leaving, NULL) != 0) return false;
    pthread_detach(thread);
    return true;
}

/// In a fork's child the thread is not there, and what it had to give back is the parent's. The
/// lock is held.
static void take_over(void) {
    if (leaving.owner == getpid()) return;
    leaving.first = NULL;
    leaving.is_running = false;
    leaving.owner = getpid();
    pthread_cond_init(&leaving.done, NULL); // the parent may have waited on it
}

void fsti_gpu_part(const fsti_device *device, void *data, fsti_buffer *beneath) {
    // A forked child owns nothing of the driver's: there is nothing to be said to it.
    if (device->api->owner != getpid()) {
        fsti_buffer_unref(beneath);
        return;
    }
    parting here = {.device = device, .data = data, .beneath = beneath};
    parting *one = fsti_alloc(sizeof *one);
    pthread_once(&leaving_once, register_leaving);
    pthread_mutex_lock(&leaving.lock);
    take_over();
    bool queued = one != NULL && (leaving.is_running || start_thread());
    if (queued) {
        if (leaving.first == NULL) leaving.last = &leaving.first;
        *one = here;
        *leaving.last = one;
        leaving.last = &one->next;
        leaving.is_running = true;
    }
    pthread_mutex_unlock(&leaving.lock);
    if (queued) return;
    fsti_free(one);
    give_back(&here);
}

bool fsti_device_settle(void) {
    pthread_mutex_lock(&leaving.lock);
    bool any = leaving.is_running && leaving.owner == getpid();
    while (leaving.is_running && leaving.owner == getpid())
        pthread_cond_wait(&leaving.done, &leaving.lock);
    pthread_mutex_unlock(&leaving.lock);
    return any;
}
