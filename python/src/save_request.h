// SPDX-License-Identifier: Apache-2.0
/// The arguments of a save: from Python objects to structs of the C call.
#ifndef FSTPY_SAVE_REQUEST_H
#define FSTPY_SAVE_REQUEST_H

#include "module.h"

/// Everything that the C call points to, in few allocations.
typedef struct save_request {
    fst_save_options options;
    fst_save_tensor *tensors;
    size_t tensor_count;
    uint64_t *numbers; ///< shapes
    size_t number_count, number_capacity;
    fst_metadata_entry *metadata;
    int joins; ///< the path is a file that another process has handed over
} save_request;

/// Arguments other than path and tensors, common to all functions that save.
typedef struct save_arguments {
    PyObject *path, *rows, *owners, *progress;
} save_arguments;

/// Reads the arguments of Writer(). False with an exception. The structs borrow from the arguments.
int fstpy_save_request_read(const module_state *state, PyObject *args, PyObject *kwargs,
                            save_arguments *arguments, save_request *request);
/// Frees what fstpy_save_request_read() allocated, also after a failure.
void fstpy_save_request_clear(save_request *request);

/// A writer's statistics as a dict.
PyObject *fstpy_save_stats(const fst_save_stats *stats);

#endif
