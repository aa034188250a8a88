// SPDX-License-Identifier: Apache-2.0
/// Starts the library's threads.
#include <pthread.h>
#include <signal.h>

#include "primitives.h"

int fsti_thread_start(pthread_t *out, void *(*run)(void *context), void *context) {
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
