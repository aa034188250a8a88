// SPDX-License-Identifier: Apache-2.0
/// What the files of the extension share. Limited API of Python 3.10; the public C header only.
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
    /// The same, derived from the safetensors package's class as well, and that class; or NULL.
    PyObject *joined_class, *joined_with;
    PyTypeObject *model_type, *loader_type, *tensor_type, *writer_type;
    PyObject *dtype_names[FST_DTYPE_COUNT]; ///< interned str
} module_state;

extern PyModuleDef fstpy_module;

/// Whether this is the main interpreter; else false with an exception. What the library calls from
/// threads of its own finds that one only.
int fstpy_is_main_interpreter(void);

/// The state of the module that `type` was made for.
module_state *fstpy_state(PyTypeObject *type);

/// Sets the Python exception for a failed call; returns NULL.
PyObject *fstpy_raise(module_state *state, const fst_error *error);
/// The class to raise: SafetensorError, or once the safetensors package is loaded a subclass of
/// that which its users catch. Borrowed.
PyObject *fstpy_error_class(module_state *state);
/// Creates SafetensorError.
PyObject *fstpy_error_class_new(void);

/// Takes over one reference of `tensor`.
PyObject *fstpy_tensor_wrap(module_state *state, fst_tensor *tensor);
/// A capsule "dltensor" whose deleter only drops a C reference; takes over one of
/// `tensor`. As bytes: one dimension of uint8, for importers that lack the dtype.
/// The number of a word of a request among `words`; -1 with a ValueError that says `what`.
int fstpy_find_word(const char *word, const char *const *words, int count, const char *what);
/// A word of fst_digest that manifests are of; 0 with an exception.
int fstpy_read_digest(const char *word, fst_digest *out);
/// Where DLPack says that a tensor lies.
dl_device fstpy_dlpack_device(const fst_tensor_view *view);
PyObject *fstpy_dlpack_capsule(fst_tensor *tensor, int as_bytes);
/// The versioned capsule ("dltensor_versioned").
PyObject *fstpy_dlpack_capsule_versioned(fst_tensor *tensor);
/// A capsule of one element of zeros of that dtype, to try what an importer takes.
PyObject *fstpy_dlpack_probe(PyObject *module, PyObject *dtype_name);

/// Memory at an address as a capsule; see _core.pyi.
PyObject *fstpy_dlpack_at(PyObject *module, PyObject *args);

/// A tuple of int of a shape.
PyObject *fstpy_shape(const uint64_t *shape, uint32_t rank);

extern PyType_Spec fstpy_model_spec, fstpy_loader_spec, fstpy_tensor_spec, fstpy_writer_spec;

/// Functions of the module that save; see _core.pyi.
PyObject *fstpy_serialize(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *fstpy_layout(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *fstpy_assign_shards(PyObject *module, PyObject *args);
PyObject *fstpy_edit_header(PyObject *module, PyObject *args);
PyObject *fstpy_publish_set(PyObject *module, PyObject *args);
PyObject *fstpy_cache_objects(PyObject *module, PyObject *args);
PyObject *fstpy_cache_prune(PyObject *module, PyObject *args);
PyObject *fstpy_configure_remote(PyObject *module, PyObject *args, PyObject *kwargs);

/// The model of a Model object for a call that lets go of the GIL, kept open until it is dropped
/// even if another thread closes it meanwhile; NULL with an exception. Dropped by any thread.
typedef struct shared_model shared_model;
shared_model *fstpy_model_hold(PyObject *self);
void fstpy_model_drop(shared_model *shared);
fst_model *fstpy_model(const shared_model *shared);

/// Opens a loader on a model, which it drops; see Model.load in _core.pyi for the arguments.
PyObject *fstpy_loader_new(module_state *state, shared_model *shared, PyObject *args,
                           PyObject *kwargs);

#endif
