// SPDX-License-Identifier: Apache-2.0
/// Reading a mapping whose file may shrink: SIGBUS inside a guarded range becomes a false return.
/// The handler is installed once and hands every other SIGBUS to whoever was there before; if
/// somebody replaces it later, the guard reports itself gone and mappings are no longer copied.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "io_private.h"

typedef struct guarded_range {
    sigjmp_buf resume;
    const char *begin, *end;
} guarded_range;

// Static TLS: the handler must not be the first to touch it and so make the linker allocate.
static _Thread_local guarded_range *current_range __attribute__((tls_model("initial-exec")));
static struct sigaction previous_action;
static bool handler_installed;
static pthread_once_t install_once = PTHREAD_ONCE_INIT;

static void pass_on(int signal_number, siginfo_t *info, void *context) {
    if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
        previous_action.sa_sigaction(signal_number, info, context);
    } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
        previous_action.sa_handler(signal_number);
    } else {
        // The faulting instruction runs again and meets the default action.
        signal(signal_number, SIG_DFL);
    }
}

static void handle_bus_error(int signal_number, siginfo_t *info, void *context) {
    guarded_range *range = current_range;
    const char *address = info->si_addr;
    if (range != NULL && address >= range->begin && address < range->end)
        siglongjmp(range->resume, 1);
    pass_on(signal_number, info, context);
}

static void install_handler(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handle_bus_error;
    // SA_NODEFER: the jump out of the handler then needs no signal mask to be restored.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    handler_installed = sigaction(SIGBUS, &action, &previous_action) == 0;
}

bool fsti_io_guard_ready(void) {
    pthread_once(&install_once, install_handler);
    struct sigaction now;
    return handler_installed && sigaction(SIGBUS, NULL, &now) == 0 &&
           (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle_bus_error;
}

bool fsti_io_guarded(void (*work)(void *context), void *context, const void *begin, uint64_t size) {
    guarded_range range = {.begin = begin, .end = (const char *)begin + size};
    if (sigsetjmp(range.resume, 0) != 0) {
        current_range = NULL;
        return false;
    }
    current_range = &range;
    // The stores to current_range must not move across the work.
    atomic_signal_fence(memory_order_seq_cst);
    work(context);
    atomic_signal_fence(memory_order_seq_cst);
    current_range = NULL;
    return true;
}
