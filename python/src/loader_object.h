// SPDX-License-Identifier: Apache-2.0
/// The Loader object, and its use and close by several threads.
#ifndef FSTPY_LOADER_OBJECT_H
#define FSTPY_LOADER_OBJECT_H

#include "load_request.h"

#include <stdatomic.h>

/// Progress of a load, for waits with a callback. Separate from the object, because an abandoned
/// load may report after the object is freed.
typedef struct load_counts {
    _Atomic uint64_t bytes_done, bytes_total;
    _Atomic size_t tensors_done, tensors_total;
} load_counts;

typedef struct loader_object {
    PyObject_HEAD fst_loader *loader;
    int uses;              ///< calls running without the GIL
    int is_iterating;      ///< one of them is next(), which may release memory of another next()
    int is_closed;         ///< closed by the program; the load is freed when `uses` is 0
    int is_being_freed;    ///< a thread frees the load; `loader` is NULL already
    caller_memory *memory; ///< caller memory, or NULL
    int has_destinations;  ///< some items have destinations
    int was_interrupted;   ///< Ctrl-C ended a wait, so nothing waits for its reads
    int is_complete;       ///< the load is complete
    unsigned fork_count;   ///< forks since the first process when the load started
    load_counts *counts;
    load_scope freeing; ///< the wait of the thread that frees the load
} loader_object;

/// Records the process that the load began in. A forked child has no load threads to wait for.
void fstpy_loader_note_process(loader_object *object);

/// Begins a call of the load, to be ended by fstpy_end_use(). NULL with an exception.
fst_loader *fstpy_begin_use(PyObject *self, load_scope **scope);
/// For calls that wait: a load cannot go on while its allocator waits for it.
fst_loader *fstpy_begin_wait(PyObject *self, load_scope **scope);
void fstpy_end_use(PyObject *self, load_scope *scope);
/// Cancels without the GIL.
void fstpy_cancel(fst_loader *loader);

PyObject *fstpy_loader_cancel(PyObject *self, PyObject *none);
PyObject *fstpy_loader_close(PyObject *self, PyObject *none);
PyObject *fstpy_loader_abandon(PyObject *self, PyObject *none);
void fstpy_loader_dealloc(PyObject *self);

#endif
