// SPDX-License-Identifier: Apache-2.0
/// A load request: the arguments of Model.load() in the form of the C library.
#ifndef FSTPY_LOAD_REQUEST_H
#define FSTPY_LOAD_REQUEST_H

#include "module.h"

#include <pthread.h>

/// A call or a callback of a load that this thread is in. Python code that it runs, objects that it
/// frees included, may use or close loads. All of them begin and end with the GIL.
/// Not on the stack: greenlet moves stacks away while another greenlet of the thread runs.
typedef struct load_scope {
    pthread_t thread;
    const void *load; ///< the Loader or its caller_memory; NULL: a wait for the end of some load
    struct load_scope *next;
} load_scope;
void fstpy_scope_enter(load_scope *scope, const void *load);
void fstpy_scope_leave(const load_scope *scope);

/// Memory allocated by a Python callable. Reference-counted; requires the GIL.
typedef struct caller_memory caller_memory;
void fstpy_memory_ref(caller_memory *memory); ///< NULL is allowed
void fstpy_memory_unref(caller_memory *memory);
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
