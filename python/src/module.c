// SPDX-License-Identifier: Apache-2.0
/// The extension module fastsafetensors._core: the C library for Python.
#include "module.h"

#include <stdbool.h>
#include <string.h>

module_state *fstpy_state(PyTypeObject *type) { return PyType_GetModuleState(type); }

int fstpy_is_main_interpreter(void) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 1;
    PyErr_SetString(PyExc_RuntimeError, "Python buffers can only be used in the main interpreter");
    return 0;
}

static PyObject *module_live_buffers(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    size_t count;
    uint64_t bytes;
    fst_memory_live(&count, &bytes);
    return Py_BuildValue("(nK)", (Py_ssize_t)count, (unsigned long long)bytes);
}

/// A size as text in bytes; None if it is not text of a size.
static PyObject *module_size_of_text(PyObject *module, PyObject *object) {
    (void)module;
    uint64_t size;
    Py_ssize_t length = 0;
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    PyErr_Clear();
    bool has_size = text != NULL && strlen(text) == (size_t)length && fst_size_parse(text, &size);
    if (!has_size) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(size);
}

static PyObject *module_keep_memory(PyObject *module, PyObject *size_object) {
    (void)module;
    unsigned long long size = PyLong_AsUnsignedLongLong(size_object);
    if (PyErr_Occurred()) return NULL;
    fst_memory_keep(size);
    Py_RETURN_NONE;
}

static PyObject *module_trim(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    // Waits for work of a device that still uses released memory.
    PyThreadState *state = PyEval_SaveThread();
    uint64_t bytes = fst_memory_trim();
    PyEval_RestoreThread(state);
    return PyLong_FromUnsignedLongLong(bytes);
}

/// More than the number of engines.
#define ENGINE_INFO_COUNT_MAX 32

static PyObject *module_engines(PyObject *module, PyObject *path_object) {
    PyObject *bytes = NULL;
    if (path_object != Py_None && !PyUnicode_FSConverter(path_object, &bytes)) return NULL;
    fst_engine_info infos[ENGINE_INFO_COUNT_MAX] = {FST_STRUCT_INIT(fst_engine_info)};
    size_t count;
    fst_error error;
    fst_status status;
    const char *path = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    Py_BEGIN_ALLOW_THREADS
    status = fst_engines_probe(path, infos, ENGINE_INFO_COUNT_MAX, &count, &error);
    Py_END_ALLOW_THREADS
    if (count > ENGINE_INFO_COUNT_MAX) count = ENGINE_INFO_COUNT_MAX;
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

static PyObject *module_device_count(PyObject *module, PyObject *kind_object) {
    fst_device device;
    fst_error error;
    int count;
    (void)module;
    const char *kind = PyUnicode_AsUTF8AndSize(kind_object, NULL);
    if (kind == NULL) return NULL;
    if (fst_device_parse(kind, &device, &error) != FST_OK) {
        PyErr_SetString(PyExc_ValueError, error.message);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    count = (int)fst_device_count(device.kind);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(count);
}

static PyObject *module_device_info(PyObject *module, PyObject *name_object) {
    fst_device device;
    fst_error error;
    fst_status status;
    fst_device_info info = {.struct_size = sizeof info};
    const char *name = PyUnicode_AsUTF8AndSize(name_object, NULL);
    if (name == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = fst_device_parse(name, &device, &error);
    if (status == FST_OK) status = fst_device_info_get(device, &info, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    return Py_BuildValue("{s:s,s:i,s:i,s:N,s:N,s:s,s:K,s:K}", "name", info.name, "index",
                         (int)info.index, "driver_version", (int)info.driver_version, "unified",
                         PyBool_FromLong(info.unified), "converts", PyBool_FromLong(info.converts),
                         "converts_reason", info.converts_reason, "memory_bytes",
                         (unsigned long long)info.memory_bytes, "memory_free",
                         (unsigned long long)info.memory_free);
}

static PyObject *module_pinned_bytes(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyLong_FromUnsignedLongLong(fst_memory_pinned());
}

static PyObject *module_error_class(PyObject *module, PyObject *none) {
    (void)none;
    return Py_NewRef(fstpy_error_class(PyModule_GetState(module)));
}

/// As in the messages of the library.
static PyObject *module_printable_text(PyObject *module, PyObject *text) {
    char *bytes;
    Py_ssize_t left;
    int columns;
    (void)module;
    // It has '?' for surrogates, which UTF-8 does not have. It may be an object that Python shares.
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "replace");
    if (encoded == NULL || PyBytes_AsStringAndSize(encoded, &bytes, &left) != 0) {
        Py_XDECREF(encoded);
        return NULL;
    }
    char *begin = PyMem_Malloc((size_t)left + 1), *out = begin;
    if (begin == NULL) {
        Py_DECREF(encoded);
        return PyErr_NoMemory();
    }
    for (size_t step; (step = fst_text_step(bytes, (size_t)left, NULL, &columns)) > 0;
         bytes += step, left -= (Py_ssize_t)step) {
        if (columns < 0) {
            *out++ = '?';
            continue;
        }
        memcpy(out, bytes, step);
        out += step;
    }
    PyObject *result = PyUnicode_FromStringAndSize(begin, out - begin);
    PyMem_Free(begin);
    Py_DECREF(encoded);
    return result;
}

int fstpy_is_ending(void) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *function = PySys_GetObject("is_finalizing");
    PyObject *answer = function == NULL ? NULL : PyObject_CallNoArgs(function);
    int is_so = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Restore(type, value, traceback);
    return is_so;
}

static PyMethodDef module_methods[] = {
    {"error_class", module_error_class, METH_NOARGS,
     "SafetensorError, or the subclass for the safetensors package's users."},
    {"printable_text", module_printable_text, METH_O,
     "printable_text(text): the text with '?' for what a terminal must not get."},
    {"dlpack_probe", fstpy_dlpack_probe, METH_O,
     "A capsule with one zero of that dtype, to test an importer."},
    {"dlpack_at", fstpy_dlpack_at, METH_VARARGS,
     "dlpack_at(address, shape, strides, dtype, (device kind, number), owner) -> capsule."},
    {"live_buffers", module_live_buffers, METH_NOARGS, "(buffers alive, their bytes)."},
    {"size_of_text", module_size_of_text, METH_O,
     "size_of_text(text): the bytes that a text such as '1.5 GiB' means, or None."},
    {"keep_memory", module_keep_memory, METH_O,
     "keep_memory(size_bytes): the most released tensor memory to keep for later loads."},
    {"trim", module_trim, METH_NOARGS, "Releases kept memory; returns its bytes."},
    {"log_start", fstpy_log_start, METH_VARARGS,
     "Sends log lines up to a level (0 to 2) to a function of (level, text)."},
    {"log_stop", fstpy_log_stop, METH_NOARGS, "Stops that, after the pending lines."},
    {"log_drain", fstpy_log_drain, METH_NOARGS, "Sends the pending lines to the function."},
    {"check_save", fstpy_check_save, METH_O,
     "Raises if the files of open models may belong to two saves."},
    {"cache_objects", fstpy_cache_objects, METH_VARARGS, NULL},
    {"cache_prune", fstpy_cache_prune, METH_VARARGS, NULL},
    {"configure_remote", (PyCFunction)(void (*)(void))fstpy_configure_remote,
     METH_VARARGS | METH_KEYWORDS, "Sets remote options; see fastsafetensors.remote."},
    {"engines", module_engines, METH_O,
     "[(name, usable, chosen, reason)] for a path, or None for the host."},
    {"device_count", module_device_count, METH_O,
     "The number of devices of a kind (\"cuda\", \"hip\") that this process can use."},
    {"device_info", module_device_info, METH_O,
     "A dict that describes a device. Opens the device."},
    {"pinned_bytes", module_pinned_bytes, METH_NOARGS, "Bytes pinned for loads to devices."},
    {"serialize", (PyCFunction)(void (*)(void))fstpy_serialize, METH_VARARGS | METH_KEYWORDS,
     "A file as bytes; arguments as for Writer, the path is not used."},
    {"layout", (PyCFunction)(void (*)(void))fstpy_layout, METH_VARARGS | METH_KEYWORDS,
     "(header, offset of each tensor, file size, padding tensors) without writing."},
    {"assign_shards", fstpy_assign_shards, METH_VARARGS,
     "assign_shards(sizes, groups or None, limit) -> (file of each tensor, number of files)."},
    {"publish_set", fstpy_publish_set, METH_VARARGS,
     "publish_set(folder, temporary paths, stem, durable, without index, manifest, digest): "
     "publishes "
     "the files of hand_over()."},
    {"edit_header", fstpy_edit_header, METH_VARARGS,
     "edit_header(path, target or None, {key: value or None}, {old name: new}, clear, durable, "
     "manifest, digest)."},
    {"delta_open", fstpy_delta_open, METH_O, "delta_open((folder, ...)) -> delta."},
    {"delta_info", fstpy_delta_info, METH_O, "A dict that describes a delta."},
    {"delta_tensors", fstpy_delta_tensors, METH_O, "[(name, versions, compressed bytes)]."},
    {"delta_apply", fstpy_delta_apply, METH_VARARGS,
     "delta_apply(delta or None, checkpoint, flags, threads, version) -> statistics."},
    {"delta_version", fstpy_delta_version, METH_O,
     "delta_version(checkpoint) -> (version, whether an update was interrupted)."},
    {"delta_prepare", fstpy_delta_prepare, METH_VARARGS,
     "delta_prepare(delta, [(name, address, bytes)], threads, version) -> change."},
    {"delta_commit", fstpy_delta_commit, METH_O, "delta_commit(change), whose memory it keeps."},
    {"delta_patch", fstpy_delta_patch, METH_VARARGS,
     "delta_patch(delta, index, address, bytes, element, index, dense) -> (indices, values)."},
    {"delta_make", fstpy_delta_make, METH_VARARGS,
     "delta_make(old, folder, new, version, base, encoding, checksum, dialect, level, threads, "
     "durable) -> statistics."},
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
    state->pool_type = add_type(module, &fstpy_pool_spec);
    state->async_type = add_type(module, &fstpy_async_spec);
    return state->model_type == NULL || state->loader_type == NULL || state->tensor_type == NULL ||
                   state->writer_type == NULL || state->pool_type == NULL ||
                   state->async_type == NULL
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
    Py_VISIT(state->pool_type);
    Py_VISIT(state->async_type);
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
    Py_CLEAR(state->pool_type);
    Py_CLEAR(state->async_type);
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
