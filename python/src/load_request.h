// SPDX-License-Identifier: Apache-2.0
/// A load request: the arguments of Model.load() in the form of the C library.
#ifndef FSTPY_LOAD_REQUEST_H
#define FSTPY_LOAD_REQUEST_H

#include "module.h"

/// Memory allocated by a Python callable. Reference-counted; requires the GIL.
typedef struct caller_memory caller_memory;
void fstpy_memory_unref(caller_memory *memory);
/// Cancels a load, and starts a thread that waits for reads in flight and closes it. The thread
/// then frees `owned` (or NULL) and gives up the reference to `memory` (or NULL). False if the
/// thread could not be started: the load is cancelled, and not closed.
int fstpy_close_later(fst_loader *loader, void *owned, caller_memory *memory);
/// Whether this thread is in a call of the load's allocator, or releases its memory, and so may be
/// a thread of the load.
int fstpy_allocates_for(const caller_memory *memory);
/// Releases the callable, because no more memory is needed. NULL is allowed.
void fstpy_memory_finish(caller_memory *memory);
/// Raises what the callable raised in its last call, once, and otherwise the error of the load.
/// `memory` may be NULL. Returns NULL.
PyObject *fstpy_load_raise(module_state *state, caller_memory *memory, const fst_error *error);

typedef struct load_request {
    fst_load_options options; ///< points to the fields below
    fst_load_tuning tuning;
    fst_part *items;
    uint64_t *numbers;
    size_t number_count, number_capacity;
    fst_allocator allocator;
    caller_memory *memory; ///< or NULL; the open load takes it over
} load_request;

/// Reads the arguments. False with an exception. Must be cleared in any case once the load is open;
/// without caller memory that needs no GIL.
int fstpy_request_read(module_state *state, const fst_model *model, PyObject *args,
                       PyObject *kwargs, load_request *request);
void fstpy_request_clear(load_request *request);

#endif
