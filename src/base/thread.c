// SPDX-License-Identifier: Apache-2.0
/// Starts the library's threads.
#include <pthread.h>
#include <signal.h>

#include "primitives.h"

int fsti_thread_start(pthread_t *out, void *(*run)(void *context), void *context) {
    // The program's signal handlers must not run on the library's threads: a handler may use
    // thread-local data, and a blocking call of a library thread would end with EINTR. The thread
    // inherits the mask of its creator, so the mask is set before the start; a signal that arrives
    // in between would otherwise be delivered to the new thread. Signals that the CPU raises for a
    // faulty instruction stay unblocked: the kernel kills a process that blocks them, and the
    // SIGBUS guard needs its handler.
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    sigdelset(&blocked, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failure = pthread_create(out, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}
