// SPDX-License-Identifier: Apache-2.0
/// Converts fst_error to Python exceptions: system errors become the matching OSError subclass,
/// format errors SafetensorError.
#include "module.h"

#include <string.h>

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>

/// Pickles as SafetensorError, because a joined class cannot be found by name.
static PyObject *error_reduce(PyObject *self, PyObject *none) {
    (void)none;
    PyObject *class = (PyObject *)Py_TYPE(self), *joined = NULL;
    PyObject *mark = PyObject_GetAttrString(class, "_joined_from");
    if (mark != NULL)
        joined = class = mark;
    else
        PyErr_Clear();
    PyObject *args = PyObject_GetAttrString(self, "args");
    PyObject *state = PyObject_GetAttrString(self, "__dict__");
    PyObject *result = args == NULL || state == NULL ? NULL : PyTuple_Pack(3, class, args, state);
    Py_XDECREF(args);
    Py_XDECREF(state);
    Py_XDECREF(joined);
    return result;
}

static PyObject *with_reduce(PyObject *class) {
    static PyMethodDef reduce = {"__reduce__", error_reduce, METH_NOARGS, "For pickle."};
    if (class == NULL) return NULL;
    PyObject *method = PyDescr_NewMethod((PyTypeObject *)class, &reduce);
    int failed = method == NULL || PyObject_SetAttrString(class, "__reduce__", method) != 0;
    Py_XDECREF(method);
    if (failed) Py_CLEAR(class);
    return class;
}

/// Every error has these attributes, possibly None.
static PyObject *with_attributes(PyObject *class) {
    static const char *const names[] = {"tag", "file", "tensor"};
    PyObject *empty = PyUnicode_FromString("");
    int failed = class == NULL || empty == NULL;
    for (int i = 0; !failed && i < 3; i++)
        failed = PyObject_SetAttrString(class, names[i], empty) != 0;
    failed = failed || PyObject_SetAttrString(class, "byte_offset", Py_None) != 0;
    Py_XDECREF(empty);
    if (failed) Py_CLEAR(class);
    return class;
}

PyObject *fstpy_error_class_new(void) {
    return with_attributes(with_reduce(PyErr_NewExceptionWithDoc(
        "fastsafetensors.SafetensorError",
        "A safetensors file or a request for it is wrong.\n\n"
        "Attributes: tag (the error's name, as in the reference validator), file, tensor,\n"
        "byte_offset (position in the file, or None).",
        PyExc_Exception, NULL)));
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

/// A subclass of both SafetensorError and `existing`, created once per class.
static PyObject *join_classes(module_state *state, PyObject *existing) {
    if (state->joined_with == existing) return state->joined_class;
    PyObject *joined = PyObject_CallFunction(
        (PyObject *)&PyType_Type, "s(OO){s:s,s:s,s:O}", "SafetensorError", state->error_class,
        existing, "__module__", "fastsafetensors", "__doc__",
        "A safetensors file or a request for it is wrong.", "_joined_from", state->error_class);
    if (joined == NULL) return NULL;
    Py_XDECREF(state->joined_with);
    Py_XDECREF(state->joined_class);
    state->joined_with = Py_NewRef(existing);
    state->joined_class = joined;
    return joined;
}

PyObject *fstpy_error_class(module_state *state) {
    // Programs written for the safetensors package catch its error class.
    PyObject *name = PyUnicode_InternFromString("safetensors");
    PyObject *module = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *existing = module == NULL ? NULL : PyObject_GetAttrString(module, "SafetensorError");
    PyObject *result = state->error_class;
    if (existing != NULL && PyType_Check(existing) &&
        !PyType_IsSubtype((PyTypeObject *)existing, (PyTypeObject *)state->error_class))
        result = join_classes(state, existing);
    Py_XDECREF(existing);
    Py_XDECREF(module);
    Py_XDECREF(name);
    PyErr_Clear();
    return result == NULL ? state->error_class : result;
}

static PyObject *raise_format(module_state *state, const fst_error *error, PyObject *message) {
    PyObject *class = fstpy_error_class(state);
    PyObject *exception = PyObject_CallFunctionObjArgs(class, message, NULL);
    if (exception == NULL) return NULL;
    if (set_text(exception, "tag", fst_status_name(error->status)) == 0 &&
        set_text(exception, "file", error->file) == 0 &&
        set_text(exception, "tensor", error->tensor) == 0 &&
        set_offset(exception, error->byte_offset) == 0)
        PyErr_SetObject(class, exception);
    Py_DECREF(exception);
    return NULL;
}

/// The message without "FILE: " at its start.
static const char *text_of(const fst_error *error) {
    size_t size = strlen(error->file);
    bool has_file = size > 0 && strncmp(error->message, error->file, size) == 0 &&
                    strncmp(error->message + size, ": ", 2) == 0;
    return error->message + (has_file ? size + 2 : 0);
}

/// OSError(errno, message, file) selects its subclass (FileNotFoundError, ...) by errno. For a
/// plain system error, errno and path are enough; Python appends the path.
static PyObject *raise_system(const fst_error *error, PyObject *message) {
    int code = error->os_errno;
    if (code == 0 && error->status == FST_E_NOT_REGULAR) code = EINVAL;
    if (code == 0 && (error->status == FST_E_NO_TENSORS || error->status == FST_E_NOT_FOUND))
        code = ENOENT;
    // "open failed: REASON": a plain system error.
    bool plain = strstr(text_of(error), " failed: ") != NULL;
    if (plain && error->os_errno != 0 && error->status != FST_E_IO &&
        error->status != FST_E_NO_SPACE)
        message = PyUnicode_FromString(strerror(error->os_errno));
    else
        message = Py_NewRef(message);
    PyObject *file = PyUnicode_DecodeFSDefault(error->file);
    PyObject *arguments =
        file == NULL || message == NULL ? NULL : Py_BuildValue("(iOO)", code, message, file);
    // Create the exception here: Python 3.10 would otherwise match handlers against OSError instead
    // of the subclass that it becomes.
    PyObject *exception = arguments == NULL ? NULL : PyObject_CallObject(PyExc_OSError, arguments);
    if (exception != NULL) PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(exception);
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
    case FST_E_DEVICE:
    case FST_E_CANCELLED: return PyExc_RuntimeError;
    case FST_E_TIMEOUT: return PyExc_TimeoutError;
    case FST_E_NO_MEMORY: return PyExc_MemoryError;
    default: return NULL;
    }
}

/// Whether a status becomes an OSError.
static bool is_system(fst_status status) {
    switch (status) {
    case FST_E_NOT_FOUND:
    case FST_E_PERMISSION:
    case FST_E_NOT_REGULAR:
    case FST_E_NO_TENSORS:
    case FST_E_NO_SPACE:
    case FST_E_IO: return true;
    default: return false;
    }
}

static PyObject *decode(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/// Decodes a message about arguments, which has the words of C, with the words of Python.
static PyObject *decode_words(const char *text) {
    static const char *const words[][2] = {
        {"the budget is ", "memory is "},
        {"Set a budget, or map the files", "Use open_stream(memory=...) or mode=\"map\""},
        {"Set a budget, or load fewer", "Use open_stream(memory=...), or load fewer"},
        {"alignment_bytes", "alignment"},
        {"FST_CACHE_KEEP", "cache=\"keep\""},
        {"FST_CACHE_BYPASS", "cache=\"bypass\""},
        {"use NULL for the environment's", "use None for the environment's"}};
    PyObject *message = decode(text);
    for (size_t i = 0; message != NULL && i < sizeof words / sizeof *words; i++) {
        if (strstr(text, words[i][0]) == NULL) continue;
        PyObject *from = decode(words[i][0]), *to = decode(words[i][1]);
        PyObject *changed =
            from == NULL || to == NULL ? NULL : PyUnicode_Replace(message, from, to, -1);
        Py_XDECREF(from);
        Py_XDECREF(to);
        Py_DECREF(message);
        message = changed;
    }
    return message;
}

/// Of a header fault: begins like the reference's message, which names no file, and ends with the
/// kind: "Error while deserializing header: MEANING: FILE: what happened (KIND)".
static PyObject *make_header_message(const fst_error *error) {
    const char *text = text_of(error), *meaning = fst_status_meaning(error->status);
    const char *name = fst_status_name(error->status);
    char begin[256];
    size_t size = strlen(meaning);
    if (error->status == FST_E_INVALID_OFFSET)
        snprintf(begin, sizeof begin, "%s `%.150s`: ", meaning, error->tensor);
    else
        snprintf(begin, sizeof begin, "%s: ", meaning);
    if (strncmp(text, meaning, size) == 0) text += size + strspn(text + size, ":, ");
    PyObject *first = decode(begin), *rest = decode(text), *file = decode(error->file);
    PyObject *message = NULL;
    if (first != NULL && rest != NULL && file != NULL)
        message = PyUnicode_FromFormat("Error while deserializing header: %U%U%s%U (%s)", first,
                                       file, error->file[0] == '\0' ? "" : ": ", rest, name);
    Py_XDECREF(first);
    Py_XDECREF(rest);
    Py_XDECREF(file);
    return message;
}

/// A system error gets the path from OSError, which appends it. A SafetensorError ends with its
/// kind.
static PyObject *make_message(const fst_error *error) {
    if (error->status >= FST_E_HEADER_TOO_SMALL &&
        error->status <= FST_E_METADATA_INCOMPLETE_BUFFER)
        return make_header_message(error);
    if (is_system(error->status)) return decode(text_of(error));
    if (class_of(error->status) != NULL) return decode_words(error->message);
    char text[sizeof error->message + 64];
    snprintf(text, sizeof text, "%s [%s]", error->message, fst_status_name(error->status));
    return decode(text);
}

PyObject *fstpy_raise(module_state *state, const fst_error *error) {
    PyObject *message = make_message(error);
    if (message == NULL) return NULL;
    PyObject *plain_class = class_of(error->status);
    if (is_system(error->status))
        raise_system(error, message);
    else if (plain_class != NULL)
        PyErr_SetObject(plain_class, message);
    else
        raise_format(state, error, message);
    Py_DECREF(message);
    return NULL;
}

int fstpy_find_word(const char *word, const char *const *words, int count, const char *what) {
    for (int i = 0; i < count; i++)
        if (strcmp(word, words[i]) == 0) return i;
    char choices[256] = "";
    for (int i = 0; i < count; i++) {
        size_t used = strlen(choices);
        snprintf(choices + used, sizeof choices - used, "%s%s", i == 0 ? "" : ", ", words[i]);
    }
    PyErr_Format(PyExc_ValueError, "unknown %s '%s'; expected one of: %s", what, word, choices);
    return -1;
}
