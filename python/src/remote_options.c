// SPDX-License-Identifier: Apache-2.0
/// configure_remote(): settings for remote files.
#include "module.h"

#include <string.h>

static int read_style(const char *word, fst_remote_options *options) {
    static const char *const styles[] = {"auto", "path", "host"};
    for (int i = 0; i < FST_BUCKET_STYLE_COUNT; i++)
        if (strcmp(word, styles[i]) == 0) {
            options->bucket_style = (fst_bucket_style)i;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "unknown bucket_style '%s'; expected one of: auto, path, host",
                 word);
    return 0;
}

/// A converter for None or a path, to bytes.
static int take_folder(PyObject *object, void *out) {
    if (object == Py_None) return 1;
    return PyUnicode_FSConverter(object, out);
}

PyObject *fstpy_configure_remote(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"endpoint",          "region",
                            "access_key",        "secret_key",
                            "session_token",     "bearer_token",
                            "sas_token",         "account",
                            "ca_file",           "anonymous",
                            "bucket_style",      "connect_ms",
                            "first_byte_ms",     "stall_ms",
                            "retry_base_ms",     "retry_cap_ms",
                            "tries_max",         "connections_max",
                            "create_only",       "cache_dir",
                            "cache_bytes_max",   "cache_required",
                            "account_key",       "offline",
                            "private_redirects", NULL};
    fst_remote_options o = {.struct_size = sizeof o};
    const char *style = "auto";
    PyObject *folder = NULL;
    unsigned long long bytes_max = 0;
    fst_error error;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "|$zzzzzzzzzpsIIIIIIIpO&Kpzpp", names, &o.endpoint, &o.region,
            &o.access_key, &o.secret_key, &o.session_token, &o.bearer_token, &o.sas_token,
            &o.account, &o.ca_file, &o.anonymous, &style, &o.connect_ms, &o.first_byte_ms,
            &o.stall_ms, &o.retry_base_ms, &o.retry_cap_ms, &o.tries_max, &o.connections_max,
            &o.create_only, take_folder, &folder, &bytes_max, &o.cache_required, &o.account_key,
            &o.offline, &o.private_redirects) ||
        !read_style(style, &o)) {
        Py_XDECREF(folder);
        return NULL;
    }
    o.cache_dir = folder == NULL ? NULL : PyBytes_AsString(folder);
    o.cache_bytes_max = bytes_max;
    fst_status status = fst_remote_configure(&o, &error);
    Py_XDECREF(folder);
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    Py_RETURN_NONE;
}

static void add_object(void *context, const fst_cache_object *object) {
    PyObject **list = context;
    if (*list == NULL) return;
    PyObject *entry = Py_BuildValue(
        "{sssKsKsKsLsNsN}", "address", object->address, "size_bytes",
        (unsigned long long)object->size_bytes, "kept_bytes",
        (unsigned long long)object->kept_bytes, "disk_bytes",
        (unsigned long long)object->disk_bytes, "used_s", (long long)object->used_s, "is_whole",
        PyBool_FromLong(object->is_whole), "in_use", PyBool_FromLong(object->in_use));
    if (entry == NULL || PyList_Append(*list, entry) != 0) Py_CLEAR(*list);
    Py_XDECREF(entry);
}

PyObject *fstpy_cache_objects(PyObject *module, PyObject *args) {
    PyObject *folder = NULL, *list = NULL;
    fst_error error;
    if (!PyArg_ParseTuple(args, "O&:cache_objects", take_folder, &folder)) return NULL;
    if ((list = PyList_New(0)) != NULL &&
        fst_cache_visit(folder == NULL ? NULL : PyBytes_AsString(folder), add_object, &list,
                        &error) != FST_OK) {
        Py_CLEAR(list);
        fstpy_raise(PyModule_GetState(module), &error);
    }
    Py_XDECREF(folder);
    return list;
}

PyObject *fstpy_cache_prune(PyObject *module, PyObject *args) {
    PyObject *folder = NULL;
    unsigned long long bytes_max = 0;
    fst_cache_pruned pruned = {.struct_size = sizeof pruned};
    fst_error error;
    fst_status status;
    if (!PyArg_ParseTuple(args, "KO&:cache_prune", &bytes_max, take_folder, &folder)) return NULL;
    const char *path = folder == NULL ? NULL : PyBytes_AsString(folder);
    Py_BEGIN_ALLOW_THREADS
    status = fst_cache_prune(path, bytes_max, &pruned, &error);
    Py_END_ALLOW_THREADS
    Py_XDECREF(folder);
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    return Py_BuildValue("{sKsKsKsK}", "removed_count", (unsigned long long)pruned.removed_count,
                         "removed_bytes", (unsigned long long)pruned.removed_bytes, "left_count",
                         (unsigned long long)pruned.left_count, "left_bytes",
                         (unsigned long long)pruned.left_bytes);
}
