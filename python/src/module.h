// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of the extension. Limited API of Python 3.10; only public C headers.
#ifndef FSTPY_MODULE_H
#define FSTPY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>

#include "dlpack_abi.h"

/// State of the module, one per interpreter.
typedef struct module_state {
    PyObject *error_class; ///< SafetensorError
    /// A subclass that also derives from the safetensors package's class, and that class; or NULL.
    PyObject *joined_class, *joined_with;
    PyTypeObject *model_type, *loader_type, *tensor_type, *writer_type, *pool_type, *async_type;
    PyObject *dtype_names[FST_DTYPE_COUNT]; ///< interned str
} module_state;

extern PyModuleDef fstpy_module;

/// Whether this is the main interpreter; false with an exception otherwise. Callbacks from library
/// threads can only use the main one.
int fstpy_is_main_interpreter(void);

/// The state of the module to which `type` belongs.
module_state *fstpy_state(PyTypeObject *type);

/// Sets the Python exception for a failed call; returns NULL.
PyObject *fstpy_raise(module_state *state, const fst_error *error);
/// The class to raise: SafetensorError or, once the safetensors package is imported, a subclass of
/// its class too. Borrowed.
PyObject *fstpy_error_class(module_state *state);
/// Creates SafetensorError.
PyObject *fstpy_error_class_new(void);

/// Takes over one reference of `tensor`.
PyObject *fstpy_tensor_wrap(module_state *state, fst_tensor *tensor);
/// The index of an option's value among `words`. -1 with a ValueError that names `what`.
int fstpy_find_word(const char *word, const char *const *words, int count, const char *what);
/// Reads the name of a digest for manifests. 0 with an exception.
int fstpy_read_digest(const char *word, fst_digest *out);
/// A tensor's device in terms of DLPack.
dl_device fstpy_dlpack_device(const fst_tensor_view *view);
PyObject *fstpy_dlpack_capsule(fst_tensor *tensor, int as_bytes);
/// The versioned capsule ("dltensor_versioned").
PyObject *fstpy_dlpack_capsule_versioned(fst_tensor *tensor);
/// A capsule with one zero element of a dtype, to test what an importer supports.
PyObject *fstpy_dlpack_probe(PyObject *module, PyObject *dtype_name);

/// A capsule for memory at an address; see _core.pyi.
PyObject *fstpy_dlpack_at(PyObject *module, PyObject *args);

/// A shape as a tuple of int.
PyObject *fstpy_shape(const uint64_t *shape, uint32_t rank);

extern PyType_Spec fstpy_model_spec, fstpy_loader_spec, fstpy_tensor_spec, fstpy_writer_spec,
    fstpy_pool_spec, fstpy_async_spec;

/// Functions that save; see _core.pyi.
PyObject *fstpy_serialize(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *fstpy_layout(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *fstpy_assign_shards(PyObject *module, PyObject *args);
PyObject *fstpy_edit_header(PyObject *module, PyObject *args);
PyObject *fstpy_publish_set(PyObject *module, PyObject *args);
/// Forwards log lines to Python; see log_bridge.c.
PyObject *fstpy_log_start(PyObject *module, PyObject *args);
PyObject *fstpy_log_stop(PyObject *module, PyObject *none);
PyObject *fstpy_log_drain(PyObject *module, PyObject *none);
PyObject *fstpy_check_save(PyObject *module, PyObject *list);
PyObject *fstpy_cache_objects(PyObject *module, PyObject *args);
PyObject *fstpy_cache_prune(PyObject *module, PyObject *args);
PyObject *fstpy_configure_remote(PyObject *module, PyObject *args, PyObject *kwargs);

/// Weight deltas; see _core.pyi and delta_request.c.
PyObject *fstpy_delta_open(PyObject *module, PyObject *list);
PyObject *fstpy_delta_info(PyObject *module, PyObject *capsule);
PyObject *fstpy_delta_tensors(PyObject *module, PyObject *capsule);
PyObject *fstpy_delta_apply(PyObject *module, PyObject *args);
PyObject *fstpy_delta_version(PyObject *module, PyObject *path);
PyObject *fstpy_delta_prepare(PyObject *module, PyObject *args);
PyObject *fstpy_delta_commit(PyObject *module, PyObject *capsule);
PyObject *fstpy_delta_patch(PyObject *module, PyObject *args);
PyObject *fstpy_delta_make(PyObject *module, PyObject *args);

/// Whether the interpreter is ending: threads of Python no longer run, and any thread that waits
/// for the GIL does not get it.
int fstpy_is_ending(void);

/// The model of a Model object, kept open for a call without the GIL even if another thread closes
/// it meanwhile. NULL with an exception. May be released by any thread.
typedef struct shared_model shared_model;
shared_model *fstpy_model_lock(PyObject *self);
void fstpy_model_drop(shared_model *shared);
fst_model *fstpy_model(const shared_model *shared);
int fstpy_model_is_in_memory(const shared_model *shared);

/// Opens a loader on a model and releases the model; see Model.load in _core.pyi.
PyObject *fstpy_loader_new(module_state *state, shared_model *shared, PyObject *args,
                           PyObject *kwargs);

#endif
