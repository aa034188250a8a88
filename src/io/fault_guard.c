// SPDX-License-Identifier: Apache-2.0
/// Guards copies from a mapping whose file may shrink: SIGBUS inside a guarded range makes
/// fsti_io_guarded() return false. The handler is installed once and forwards every other SIGBUS to
/// the previous handler. If the program replaces it later, fsti_io_guard_ready() returns false and
/// mappings are no longer copied.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "io_private.h"

typedef struct guarded_range {
    sigjmp_buf resume;
    const char *begin, *end;
} guarded_range;

// Static TLS model: the first access happens in the handler, where the dynamic linker must not
// allocate.
static _Thread_local guarded_range *current_range __attribute__((tls_model("initial-exec")));
static struct sigaction previous_action;
static bool handler_installed;
static pthread_once_t install_once = PTHREAD_ONCE_INIT;

/// Acts as if this handler did not exist: uses the previous handler's signal mask, and its
/// SA_RESETHAND.
static void call_previous(int signal_number, siginfo_t *info, void *context) {
    struct sigaction action = previous_action;
    sigset_t mask = action.sa_mask, before;
    if ((action.sa_flags & SA_NODEFER) == 0) sigaddset(&mask, signal_number);
    if ((action.sa_flags & (int)SA_RESETHAND) != 0) {
        previous_action.sa_flags = 0;
        previous_action.sa_handler = SIG_DFL;
    }
    pthread_sigmask(SIG_BLOCK, &mask, &before);
    if ((action.sa_flags & SA_SIGINFO) != 0)
        action.sa_sigaction(signal_number, info, context);
    else
        action.sa_handler(signal_number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void pass_on(int signal_number, siginfo_t *info, void *context) {
    bool is_plain = (previous_action.sa_flags & SA_SIGINFO) == 0;
    bool was_sent = info->si_code <= 0; // sent by kill(2) or similar, so no instruction is repeated
    if (is_plain && previous_action.sa_handler == SIG_IGN && was_sent) return;
    if (is_plain &&
        (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN)) {
        // The faulting instruction runs again and meets the default action; a sent signal is raised
        // again.
        signal(signal_number, SIG_DFL);
        if (was_sent) raise(signal_number);
        return;
    }
    call_previous(signal_number, info, context);
}

static void handle_bus_error(int signal_number, siginfo_t *info, void *context) {
    guarded_range *range = current_range;
    const char *address = info->si_addr;
    if (range != NULL && info->si_code > 0 && address >= range->begin && address < range->end)
        siglongjmp(range->resume, 1);
    pass_on(signal_number, info, context);
}

void fsti_io_guard_install(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handle_bus_error;
    // SA_NODEFER: the handler leaves by siglongjmp() without restoring a signal mask.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    // Another thread's SIGBUS may arrive before sigaction() has filled previous_action. It then
    // finds zeros, which mean the default action.
    handler_installed = sigaction(SIGBUS, &action, &previous_action) == 0;
}

bool fsti_io_guard_ready(void) {
    pthread_once(&install_once, fsti_io_guard_install);
    struct sigaction now;
    return handler_installed && sigaction(SIGBUS, NULL, &now) == 0 &&
           (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle_bus_error;
}

/// Runs the work. False if a page of the range could not be read. Must not be nested: the inner
/// call would end the outer guard.
static bool work_in_range(void (*work)(void *context), void *context, guarded_range *range) {
    if (sigsetjmp(range->resume, 0) != 0) {
        current_range = NULL;
        return false;
    }
    current_range = range;
    // Keep the compiler from moving the stores to current_range across the work.
    atomic_signal_fence(memory_order_seq_cst);
    work(context);
    atomic_signal_fence(memory_order_seq_cst);
    current_range = NULL;
    return true;
}

bool fsti_io_guarded(void (*work)(void *context), void *context, const void *begin, uint64_t size) {
    guarded_range range = {.begin = begin, .end = (const char *)begin + size};
    sigset_t bus_error, before;
    // The caller may be a thread of the program that blocks SIGBUS. The kernel then kills the
    // process instead of calling the handler, so unblock it.
    sigemptyset(&bus_error);
    sigaddset(&bus_error, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus_error, &before);
    bool succeeded = work_in_range(work, context, &range);
    if (sigismember(&before, SIGBUS) == 1) pthread_sigmask(SIG_BLOCK, &bus_error, NULL);
    return succeeded;
}
