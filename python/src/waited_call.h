// SPDX-License-Identifier: Apache-2.0
/// Calls that may block on storage, and whose wait Ctrl-C ends.
#ifndef FSTPY_WAITED_CALL_H
#define FSTPY_WAITED_CALL_H

#include "module.h"

#include <pthread.h>

/// A call: the first member of a struct with its arguments and results. Both functions run without
/// the GIL.
typedef struct waited_call {
    void (*run)(struct waited_call *call);
    /// Frees an abandoned call and its results, after run().
    void (*discard)(struct waited_call *call);
    pthread_mutex_t lock; ///< protects the fields below
    pthread_cond_t finished;
    int is_done, is_abandoned;
    int is_quick; ///< set by the caller: the call never blocks, so it needs no thread
} waited_call;

/// Whether a file can be opened and its header read without blocking: it is on a local disk, and
/// its name and first page are cached. (Starting a thread costs more than opening such a file.)
/// *is_memory: then, whether it is on a file system without storage, tmpfs or ramfs.
int fstpy_path_is_cached(const char *path, int *is_memory);

/// Runs the call: on the main thread, where Python's signal handlers run, through a helper thread;
/// on other threads directly. 0 with the exception of a signal handler: the call then no longer
/// belongs to the caller.
int fstpy_call_run(waited_call *call);

#endif
