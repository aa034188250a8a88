// SPDX-License-Identifier: Apache-2.0
/// From fst_error to Python exceptions: what the system says stays an OSError of its kind, what
/// the format says is a SafetensorError.
#include "module.h"

#include <errno.h>

PyObject *fstpy_error_class_new(void) {
    return PyErr_NewExceptionWithDoc(
        "fastsafetensors.SafetensorError",
        "A safetensors file or a request for it is wrong.\n\n"
        "Attributes: tag (the error's name, as in the reference validator), file, tensor,\n"
        "byte_offset (position in the file, or None).",
        PyExc_Exception, NULL);
}

static int set_text(PyObject *object, const char *name, const char *text) {
    PyObject *value = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    int result = value == NULL ? -1 : PyObject_SetAttrString(object, name, value);
    Py_XDECREF(value);
    return result;
}

static int set_offset(PyObject *object, uint64_t offset) {
    PyObject *value =
        offset == FST_NO_OFFSET ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(offset);
    int result = value == NULL ? -1 : PyObject_SetAttrString(object, "byte_offset", value);
    Py_XDECREF(value);
    return result;
}

static PyObject *raise_format(module_state *state, const fst_error *error, PyObject *message) {
    PyObject *exception = PyObject_CallFunctionObjArgs(state->error_class, message, NULL);
    if (exception == NULL) return NULL;
    if (set_text(exception, "tag", fst_status_name(error->status)) == 0 &&
        set_text(exception, "file", error->file) == 0 &&
        set_text(exception, "tensor", error->tensor) == 0 &&
        set_offset(exception, error->byte_offset) == 0)
        PyErr_SetObject(state->error_class, exception);
    Py_DECREF(exception);
    return NULL;
}

/// OSError(errno, message, file) picks its subclass (FileNotFoundError, ..) by errno. Of a plain
/// refusal errno and path say all; Python appends the path.
static PyObject *raise_system(const fst_error *error, PyObject *message) {
    int code = error->os_errno;
    if (code == 0 && error->status == FST_E_NOT_REGULAR) code = EINVAL;
    if (code == 0 && error->status == FST_E_NO_TENSORS) code = ENOENT;
    if (error->os_errno != 0 && error->status != FST_E_IO && error->status != FST_E_NO_SPACE)
        message = PyUnicode_FromString(strerror(error->os_errno));
    else
        message = Py_NewRef(message);
    PyObject *file = PyUnicode_DecodeFSDefault(error->file);
    PyObject *arguments =
        file == NULL || message == NULL ? NULL : Py_BuildValue("(iOO)", code, message, file);
    if (arguments != NULL) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    Py_XDECREF(file);
    Py_XDECREF(message);
    return NULL;
}

static PyObject *class_of(fst_status status) {
    switch (status) {
    case FST_E_ARGUMENT:
    case FST_E_BUDGET: return PyExc_ValueError;
    case FST_E_UNSUPPORTED:
    case FST_E_CANCELLED: return PyExc_RuntimeError;
    case FST_E_TIMEOUT: return PyExc_TimeoutError;
    default: return NULL;
    }
}

PyObject *fstpy_raise(module_state *state, const fst_error *error) {
    if (error->status == FST_E_NO_MEMORY) return PyErr_NoMemory();
    PyObject *message =
        PyUnicode_DecodeUTF8(error->message, (Py_ssize_t)strlen(error->message), "replace");
    if (message == NULL) return NULL;
    PyObject *plain_class = class_of(error->status);
    switch (error->status) {
    case FST_E_NOT_FOUND:
    case FST_E_PERMISSION:
    case FST_E_NOT_REGULAR:
    case FST_E_NO_TENSORS:
    case FST_E_NO_SPACE:
    case FST_E_IO: raise_system(error, message); break;
    default:
        if (plain_class != NULL)
            PyErr_SetObject(plain_class, message);
        else
            raise_format(state, error, message);
    }
    Py_DECREF(message);
    return NULL;
}
