// SPDX-License-Identifier: Apache-2.0
/// Runs calls on helper threads. An idle helper waits briefly for the next call, so that opening
/// many files does not start a thread for each.
#include "waited_call.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#ifndef RESOLVE_CACHED
#define RESOLVE_CACHED 0x20 // Linux 5.12
#endif

/// Interval of checks for Ctrl-C.
#define SIGNAL_CHECK_MS 100
/// How long an idle helper waits.
#define IDLE_MS 100

static struct {
    pthread_mutex_t lock;
    pthread_cond_t handed_over;
    waited_call *next; ///< waiting for a helper
    int idle_count;    ///< idle helpers
} helpers = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t helpers_once = PTHREAD_ONCE_INIT;

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/// In a forked child there are no helpers, and the lock's owner does not exist.
static void clear_helpers(void) {
    pthread_mutex_init(&helpers.lock, NULL);
    init_condition(&helpers.handed_over);
    helpers.next = NULL;
    helpers.idle_count = 0;
}

static void init_helpers(void) {
    init_condition(&helpers.handed_over);
    (void)pthread_atfork(NULL, NULL, clear_helpers);
}

static int wait_for(pthread_cond_t *condition, pthread_mutex_t *lock, long milliseconds) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += milliseconds / 1000;
    time.tv_nsec += milliseconds % 1000 * 1000000;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return pthread_cond_timedwait(condition, lock, &time);
}

static void run_call(waited_call *call) {
    call->run(call);
    pthread_mutex_lock(&call->lock);
    call->is_done = 1;
    // Read now: after the unlock the waiting thread may free a call that it has not abandoned.
    int is_abandoned = call->is_abandoned;
    pthread_cond_signal(&call->finished);
    pthread_mutex_unlock(&call->lock);
    if (is_abandoned) call->discard(call);
}

static void *help(void *first) {
    for (waited_call *call = first; call != NULL;) {
        run_call(call);
        pthread_mutex_lock(&helpers.lock);
        helpers.idle_count++;
        int failure = 0;
        while (helpers.next == NULL && failure == 0)
            failure = wait_for(&helpers.handed_over, &helpers.lock, IDLE_MS);
        call = helpers.next;
        helpers.next = NULL;
        helpers.idle_count--;
        pthread_mutex_unlock(&helpers.lock);
    }
    return NULL;
}

static int start_helper(waited_call *call) {
    pthread_t thread;
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGBUS); // from a file that shrinks while it is read
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    sigdelset(&blocked, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failure = pthread_create(&thread, NULL, help, call);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure == 0) (void)pthread_detach(thread);
    return failure == 0;
}

/// Passes the call to a helper. False if none can be started.
static int hand_over(waited_call *call) {
    pthread_once(&helpers_once, init_helpers);
    pthread_mutex_lock(&helpers.lock);
    int is_taken = helpers.idle_count > 0 && helpers.next == NULL;
    if (is_taken) {
        helpers.next = call;
        pthread_cond_signal(&helpers.handed_over);
    }
    pthread_mutex_unlock(&helpers.lock);
    return is_taken || start_helper(call);
}

/// Waits briefly. True if the call is done.
static int wait_briefly(waited_call *call) {
    pthread_mutex_lock(&call->lock);
    int failure = 0;
    while (!call->is_done && failure == 0)
        failure = wait_for(&call->finished, &call->lock, SIGNAL_CHECK_MS);
    int is_done = call->is_done;
    pthread_mutex_unlock(&call->lock);
    return is_done;
}

/// Leaves the call to its helper. False if it was finished meanwhile.
static int abandon(waited_call *call) {
    pthread_mutex_lock(&call->lock);
    int is_left = !call->is_done;
    call->is_abandoned = is_left;
    pthread_mutex_unlock(&call->lock);
    return is_left;
}

static void clear_call(waited_call *call) {
    pthread_mutex_destroy(&call->lock);
    pthread_cond_destroy(&call->finished);
}

/// Waits, with the GIL held between waits. 1: done; 0 with an exception.
static int await_call(waited_call *call) {
    int is_done = 0;
    pid_t owner = getpid();
    while (!is_done) {
        Py_BEGIN_ALLOW_THREADS
        is_done = wait_briefly(call);
        Py_END_ALLOW_THREADS
        if (is_done) break;
        int is_raised = PyErr_CheckSignals() != 0;
        if (getpid() != owner) { // a signal handler has forked: the helper belongs to the parent
            if (!is_raised)
                PyErr_SetString(PyExc_RuntimeError,
                                "a signal handler forked the process while a model was being "
                                "opened. Open it again in the child");
            return 0;
        }
        if (!is_raised) continue;
        if (abandon(call)) return 0;
        clear_call(call);
        call->discard(call);
        return 0;
    }
    clear_call(call);
    return 1;
}

static int is_on_memory_system(int fd) {
    enum { TMPFS = 0x01021994, RAMFS = (int)0x858458f6 }; // linux/magic.h
    struct statfs info;
    return fstatfs(fd, &info) == 0 && ((int)info.f_type == TMPFS || (int)info.f_type == RAMFS);
}

int fstpy_path_is_cached(const char *path, int *is_memory) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_CACHED};
    struct statx info = {0};
    char bytes[8];
    struct iovec target = {bytes, sizeof bytes};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0) return 0;
    int flags = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
    int is_file = statx(fd, "", flags, STATX_TYPE, &info) == 0 && S_ISREG(info.stx_mode);
    int is_local = is_file && info.stx_dev_major != 0; // 0: network, FUSE and stacked file systems
    *is_memory = is_file && !is_local && is_on_memory_system(fd);
    close(fd);
    fd = is_local || *is_memory ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    *is_memory &= fd >= 0;
    if (fd < 0) return 0;
    // Else these two reads start readahead, which later reads nearby continue.
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    uint64_t size = 0;
    int wait_flags = *is_memory ? 0 : RWF_NOWAIT; // tmpfs does not know it
    int is_there = preadv2(fd, &target, 1, 0, wait_flags) == (ssize_t)sizeof bytes;
    memcpy(&size, bytes, is_there ? sizeof size : 0);
    // Check the header's last page too. The length before the header is little-endian; for other
    // files, such as an index of files elsewhere, and on big-endian machines, no such byte is
    // found.
    target.iov_len = 1;
    is_there = is_there && size > 0 && size < INT32_MAX &&
               preadv2(fd, &target, 1, (off_t)(size + 7), wait_flags) == 1;
    *is_memory &= is_there;
    close(fd);
    return is_there;
}

int fstpy_call_run(waited_call *call) {
    int is_main = getpid() == (pid_t)syscall(SYS_gettid), is_given = 0;
    call->is_done = call->is_abandoned = 0;
    if (is_main && !call->is_quick) {
        pthread_mutex_init(&call->lock, NULL);
        init_condition(&call->finished);
        is_given = hand_over(call);
        if (is_given) return await_call(call);
        clear_call(call);
    }
    Py_BEGIN_ALLOW_THREADS
    call->run(call);
    Py_END_ALLOW_THREADS
    return 1;
}
