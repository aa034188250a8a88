// SPDX-License-Identifier: Apache-2.0
/// Calls that may take as long as storage likes, and that Ctrl-C ends the wait for.
#ifndef FSTPY_WAITED_CALL_H
#define FSTPY_WAITED_CALL_H

#include "module.h"

#include <pthread.h>

/// A call, the head of a struct with its arguments and results. Both functions run without the GIL.
typedef struct waited_call {
    void (*run)(struct waited_call *call);
    /// Of a call that nobody waits for any more, after run(): frees it and what it has made.
    void (*discard)(struct waited_call *call);
    pthread_mutex_t lock; ///< of what follows
    pthread_cond_t finished;
    int is_done, is_abandoned;
    int is_quick; ///< set by whoever makes the call: it waits for nobody, so it needs no thread
} waited_call;

/// Whether a file can be opened and its header be read without waiting for anybody: it lies on a
/// disk of this machine, and the kernel holds its name and its first page. (A thread costs more
/// than opening such a file does.)
int fstpy_path_is_at_hand(const char *path);

/// Runs the call: in the process's main thread, the one that Python's signal handlers run in, by a
/// thread that it waits for; in any other, at once. 0 with the exception of a signal handler: the
/// call is then not the caller's any more.
int fstpy_call_run(waited_call *call);

#endif
