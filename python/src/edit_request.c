// SPDX-License-Identifier: Apache-2.0
/// Edits a file's header: metadata and tensor names, without loading tensors.
#include "module.h"

#include <stdlib.h>
#include <time.h>

/// Interval of checks for Ctrl-C during a long copy.
#define SIGNAL_CHECK_NS ((int64_t)50 * 1000 * 1000)

/// Runs on the calling thread without the GIL. An exception stays in the thread's state.
static int check_signals(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                         size_t tensors_total) {
    (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    int64_t *checked_ns = context;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (now_ns - *checked_ns < SIGNAL_CHECK_NS) return 0;
    *checked_ns = now_ns;
    PyGILState_STATE gil = PyGILState_Ensure();
    int stop = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return stop;
}

/// The UTF-8 of a str, or NULL for None if that is allowed. False with an exception.
static int read_text(PyObject *object, int allows_none, const char **text, size_t *size) {
    Py_ssize_t length = 0;
    *text = NULL;
    if (!(allows_none && object == Py_None)) {
        if ((*text = PyUnicode_AsUTF8AndSize(object, &length)) == NULL) return 0;
    }
    *size = (size_t)length;
    return 1;
}

/// The lists of pairs in the form of the C library.
typedef struct edit_lists {
    fst_metadata_entry *entries;
    fst_tensor_rename *renames;
} edit_lists;

static int read_pairs(PyObject *metadata, PyObject *renames, edit_lists *lists,
                      fst_edit_options *options) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    lists->entries = calloc((size_t)PyDict_Size(metadata) + 1, sizeof *lists->entries);
    lists->renames = calloc((size_t)PyDict_Size(renames) + 1, sizeof *lists->renames);
    if (lists->entries == NULL || lists->renames == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    while (PyDict_Next(metadata, &at, &key, &value)) {
        fst_metadata_entry *entry = &lists->entries[options->metadata_count++];
        if (!read_text(key, 0, &entry->key, &entry->key_size) ||
            !read_text(value, 1, &entry->value, &entry->value_size))
            return 0;
    }
    at = 0;
    while (PyDict_Next(renames, &at, &key, &value)) {
        fst_tensor_rename *rename = &lists->renames[options->rename_count++];
        if (!read_text(key, 0, &rename->from, &rename->from_size) ||
            !read_text(value, 0, &rename->to, &rename->to_size))
            return 0;
    }
    options->metadata = lists->entries;
    options->renames = lists->renames;
    return 1;
}

/// Both paths are encoded. Returns None, or NULL with an exception.
static PyObject *edit(module_state *state, const char *path, const char *target,
                      const fst_edit_options *options) {
    fst_error error;
    fst_status status;
    Py_BEGIN_ALLOW_THREADS
    status = fst_header_edit(path, target, options, NULL, &error);
    Py_END_ALLOW_THREADS
    if (PyErr_Occurred()) return NULL;
    return status == FST_OK ? Py_NewRef(Py_None) : fstpy_raise(state, &error);
}

/// `manifest`: bytes of a path, b"" for the default path, or None.
static int read_manifest(PyObject *manifest, const char *digest, fst_edit_options *options) {
    if (manifest == Py_None) return 1;
    options->manifest = PyBytes_AsString(manifest);
    return options->manifest != NULL && fstpy_read_digest(digest, &options->digest);
}

PyObject *fstpy_edit_header(PyObject *module, PyObject *args) {
    PyObject *path = NULL, *target_object, *target = NULL, *metadata, *renames, *result = NULL;
    PyObject *manifest;
    const char *digest;
    int clears, durable;
    int64_t checked_ns = 0;
    edit_lists lists = {NULL, NULL};
    if (!PyArg_ParseTuple(args, "O&OO!O!ppOs:edit_header", PyUnicode_FSConverter, &path,
                          &target_object, &PyDict_Type, &metadata, &PyDict_Type, &renames, &clears,
                          &durable, &manifest, &digest)) {
        Py_XDECREF(path);
        return NULL;
    }
    fst_edit_options options = FST_STRUCT_INIT(fst_edit_options);
    options.promise = durable ? FST_SAVE_DURABLE : FST_SAVE_QUICK;
    options.clear_metadata = clears;
    options.progress = check_signals;
    options.progress_context = &checked_ns;
    if ((target_object == Py_None || PyUnicode_FSConverter(target_object, &target)) &&
        read_pairs(metadata, renames, &lists, &options) &&
        read_manifest(manifest, digest, &options))
        result = edit(PyModule_GetState(module), PyBytes_AsString(path),
                      target == NULL ? NULL : PyBytes_AsString(target), &options);
    free(lists.entries);
    free(lists.renames);
    Py_DECREF(path);
    Py_XDECREF(target);
    return result;
}
