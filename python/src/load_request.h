// SPDX-License-Identifier: Apache-2.0
/// A load's request: what Model.load() was called with, in the C library's terms.
#ifndef FSTPY_LOAD_REQUEST_H
#define FSTPY_LOAD_REQUEST_H

#include "module.h"

/// Memory that a callable of Python's gives. Counted; with the GIL.
typedef struct caller_memory caller_memory;
void fstpy_memory_unref(caller_memory *memory);
/// No more will be asked for: lets go of the callable. NULL is allowed.
void fstpy_memory_finish(caller_memory *memory);

typedef struct load_request {
    fst_load_options options; ///< points to what follows
    fst_load_tuning tuning;
    fst_request_item *items;
    uint64_t *numbers;
    size_t number_count, number_capacity;
    fst_allocator allocator;
    caller_memory *memory; ///< or NULL; the load takes it over when it is open
} load_request;

/// Reads the arguments; false with an exception. To be cleared in any case, when the load is open:
/// without the GIL too, where no memory is given.
int fstpy_request_read(module_state *state, const fst_model *model, PyObject *args,
                       PyObject *kwargs, load_request *request);
void fstpy_request_clear(load_request *request);

#endif
