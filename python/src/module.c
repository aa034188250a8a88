// SPDX-License-Identifier: Apache-2.0
/// The extension module fastsafetensors._core: the C library for Python.
#include "module.h"

module_state *fstpy_state(PyTypeObject *type) { return PyType_GetModuleState(type); }

static PyObject *module_live_buffers(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    size_t count;
    uint64_t bytes;
    fst_live_buffers(&count, &bytes);
    return Py_BuildValue("(nK)", (Py_ssize_t)count, (unsigned long long)bytes);
}

static PyObject *module_keep_memory(PyObject *module, PyObject *size_object) {
    (void)module;
    unsigned long long size = PyLong_AsUnsignedLongLong(size_object);
    if (PyErr_Occurred()) return NULL;
    fst_keep_memory(size);
    Py_RETURN_NONE;
}

static PyObject *module_trim(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyLong_FromSize_t(fst_trim());
}

static PyObject *module_engines(PyObject *module, PyObject *path_object) {
    PyObject *bytes = NULL;
    if (path_object != Py_None && !PyUnicode_FSConverter(path_object, &bytes)) return NULL;
    fst_engine_info infos[FST_ENGINE_COUNT];
    size_t count;
    fst_error error;
    fst_status status = fst_engines_probe(bytes == NULL ? NULL : PyBytes_AsString(bytes), infos,
                                          FST_ENGINE_COUNT, &count, &error);
    Py_XDECREF(bytes);
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *row = Py_BuildValue("(sNNs)", infos[i].name, PyBool_FromLong(infos[i].usable),
                                      PyBool_FromLong(infos[i].chosen), infos[i].reason);
        if (row == NULL || PyList_Append(list, row) != 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *module_error_class(PyObject *module, PyObject *none) {
    (void)none;
    return Py_NewRef(fstpy_error_class(PyModule_GetState(module)));
}

static PyMethodDef module_methods[] = {
    {"error_class", module_error_class, METH_NOARGS,
     "SafetensorError, or its subclass that the safetensors package's users catch."},
    {"dlpack_probe", fstpy_dlpack_probe, METH_O,
     "A capsule of one zero of that dtype, to try what an importer takes."},
    {"dlpack_at", fstpy_dlpack_at, METH_VARARGS,
     "dlpack_at(address, shape, strides, dtype, (device kind, number), owner) -> capsule."},
    {"live_buffers", module_live_buffers, METH_NOARGS, "(buffers alive, their bytes)."},
    {"keep_memory", module_keep_memory, METH_O,
     "keep_memory(size_bytes): how much released tensor memory is kept for the next load."},
    {"trim", module_trim, METH_NOARGS, "Gives kept memory back; returns its bytes."},
    {"engines", module_engines, METH_O,
     "[(name, usable, chosen, reason)] for a path, or None for the machine."},
    {"serialize", (PyCFunction)(void (*)(void))fstpy_serialize, METH_VARARGS | METH_KEYWORDS,
     "A file's bytes; the arguments are Writer's, the path is not used."},
    {"layout", (PyCFunction)(void (*)(void))fstpy_layout, METH_VARARGS | METH_KEYWORDS,
     "(header, offset of each tensor, bytes of the file, filling tensors) without writing."},
    {"assign_shards", fstpy_assign_shards, METH_VARARGS,
     "assign_shards(sizes, groups or None, limit) -> (file of each tensor, number of files)."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, type) != 0) Py_CLEAR(type);
    return type;
}

static int fill_dtypes(PyObject *module, module_state *state) {
    PyObject *names = PyTuple_New(FST_DTYPE_COUNT);
    for (int i = 0; names != NULL && i < FST_DTYPE_COUNT; i++) {
        PyObject *name = PyUnicode_InternFromString(fst_dtype_name((fst_dtype)i));
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        state->dtype_names[i] = name;
        PyTuple_SetItem(names, i, Py_NewRef(name));
    }
    int result = names == NULL ? -1 : PyModule_AddObjectRef(module, "DTYPES", names);
    Py_XDECREF(names);
    return result;
}

static int module_exec(PyObject *module) {
    module_state *state = PyModule_GetState(module);
    state->error_class = fstpy_error_class_new();
    if (state->error_class == NULL ||
        PyModule_AddObjectRef(module, "SafetensorError", state->error_class) != 0 ||
        PyModule_AddStringConstant(module, "version", fst_version()) != 0 ||
        fill_dtypes(module, state) != 0)
        return -1;
    state->model_type = add_type(module, &fstpy_model_spec);
    state->loader_type = add_type(module, &fstpy_loader_spec);
    state->tensor_type = add_type(module, &fstpy_tensor_spec);
    state->writer_type = add_type(module, &fstpy_writer_spec);
    return state->model_type == NULL || state->loader_type == NULL || state->tensor_type == NULL ||
                   state->writer_type == NULL
               ? -1
               : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *state = PyModule_GetState(module);
    Py_VISIT(state->error_class);
    Py_VISIT(state->joined_class);
    Py_VISIT(state->joined_with);
    Py_VISIT(state->model_type);
    Py_VISIT(state->loader_type);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->writer_type);
    return 0;
}

static int module_clear(PyObject *module) {
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->error_class);
    Py_CLEAR(state->joined_class);
    Py_CLEAR(state->joined_with);
    Py_CLEAR(state->model_type);
    Py_CLEAR(state->loader_type);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->writer_type);
    for (int i = 0; i < FST_DTYPE_COUNT; i++) Py_CLEAR(state->dtype_names[i]);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

PyModuleDef fstpy_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fastsafetensors._core",
    .m_doc = "The C library behind fastsafetensors.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&fstpy_module); }
