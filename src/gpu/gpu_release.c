// SPDX-License-Identifier: Apache-2.0
/// Releasing device memory on a separate thread. The driver's free functions wait for all work of
/// the device, and a thread that drops a tensor may hold a lock that this work waits for (such as
/// the GIL, with several devices in one process). The thread ends when the queue is empty.
#include <unistd.h>

#include "gpu_private.h"

typedef struct pending_release {
    struct pending_release *next;
    const fsti_device *device;
    void *data;
    fsti_buffer *pinned; ///< pinned memory; NULL: device memory
} pending_release;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    pending_release *first, **last;
    bool is_running;
    pid_t owner;
} release_queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_once_t release_queue_once = PTHREAD_ONCE_INIT;
static void register_release_queue(void) { fsti_fork_lock(&release_queue.lock); }

/// Calls that did not unpin memory.
static atomic_uint stuck_count;
/// After so many, no more memory is pinned: none of it might come back.
#define STUCK_COUNT_MAX 4u

bool fsti_gpu_may_pin(void) { return atomic_load(&stuck_count) < STUCK_COUNT_MAX; }

bool fsti_gpu_unpin_pages(const fsti_device *device, void *data) {
    int code = device->api->host_unregister(data);
    // A context that was reset has unpinned its memory already.
    if (code == 0 || code == GPU_NOT_REGISTERED) return true;
    if (atomic_fetch_add(&stuck_count, 1) + 1 == STUCK_COUNT_MAX)
        fsti_log(FST_LOG_WARNING,
                 "the driver of %s does not unpin memory (error %d); no more memory is pinned",
                 device->name, code);
    return false;
}

void fsti_gpu_unpin(const fsti_device *device, fsti_buffer *memory) {
    if (fsti_gpu_unpin_pages(device, memory->data)) fsti_buffer_unref(memory);
}

static void release_now(const pending_release *one) {
    // Without a context nothing can be unpinned, so pinned memory stays mapped (fsti_gpu_unpin()).
    if (!fsti_device_enter_again(one->device)) return;
    if (one->pinned != NULL)
        fsti_gpu_unpin(one->device, one->pinned);
    else
        one->device->api->memory_free((uint64_t)(uintptr_t)one->data);
    fsti_device_leave(one->device);
}

static void *run_release_queue(void *argument) {
    (void)argument;
    pthread_mutex_lock(&release_queue.lock);
    while (release_queue.first != NULL) {
        pending_release *one = release_queue.first;
        release_queue.first = one->next;
        pthread_mutex_unlock(&release_queue.lock);
        release_now(one);
        fsti_free(one);
        pthread_mutex_lock(&release_queue.lock);
    }
    // The flag changes under the lock under which the queue was found empty. So a caller either
    // adds its memory before, or sees the flag and starts another thread.
    release_queue.is_running = false;
    pthread_cond_broadcast(&release_queue.done);
    pthread_mutex_unlock(&release_queue.lock);
    return NULL;
}

/// Starts a detached thread. False on failure.
static bool start_thread(void) {
    pthread_t thread;
    if (fsti_thread_start(&thread, run_release_queue, NULL) != 0) return false;
    pthread_detach(thread);
    return true;
}

/// After fork() the thread does not exist, and queued memory belongs to the parent. The lock must
/// be held.
static void reset_after_fork(void) {
    if (release_queue.owner == getpid()) return;
    release_queue.first = NULL;
    release_queue.is_running = false;
    release_queue.owner = getpid();
    pthread_cond_init(&release_queue.done, NULL); // the parent may have been waiting on it
}

void fsti_gpu_release_later(const fsti_device *device, void *data, fsti_buffer *pinned) {
    // A forked child owns no driver resources, so there is nothing to release.
    if (device->api->owner != getpid()) {
        fsti_buffer_unref(pinned);
        return;
    }
    pending_release release = {.device = device, .data = data, .pinned = pinned};
    pending_release *one = fsti_alloc(sizeof *one);
    pthread_once(&release_queue_once, register_release_queue);
    pthread_mutex_lock(&release_queue.lock);
    reset_after_fork();
    bool queued = one != NULL && (release_queue.is_running || start_thread());
    if (queued) {
        if (release_queue.first == NULL) release_queue.last = &release_queue.first;
        *one = release;
        *release_queue.last = one;
        release_queue.last = &one->next;
        release_queue.is_running = true;
    }
    pthread_mutex_unlock(&release_queue.lock);
    if (queued) return;
    fsti_free(one);
    release_now(&release);
}

bool fsti_device_wait_released(void) {
    pthread_mutex_lock(&release_queue.lock);
    bool any = release_queue.is_running && release_queue.owner == getpid();
    while (release_queue.is_running && release_queue.owner == getpid())
        pthread_cond_wait(&release_queue.done, &release_queue.lock);
    pthread_mutex_unlock(&release_queue.lock);
    return any;
}
