// SPDX-License-Identifier: Apache-2.0
/// Weight deltas for fastsafetensors.deltas: thin calls of weight_delta.h. Handles are capsules,
/// which close what they hold.
#include "module.h"

#include <stdlib.h>

#define DELTA_CAPSULE "fst_delta"
#define CHANGE_CAPSULE "fst_delta_change"

static void close_delta(PyObject *capsule) {
    fst_delta_close(PyCapsule_GetPointer(capsule, DELTA_CAPSULE));
}

static void drop_change(PyObject *capsule) {
    fst_delta_change *change = PyCapsule_GetPointer(capsule, CHANGE_CAPSULE);
    Py_BEGIN_ALLOW_THREADS
    fst_delta_drop(change);
    Py_END_ALLOW_THREADS
}

PyObject *fstpy_delta_open(PyObject *module, PyObject *list) {
    fst_delta *delta = NULL;
    fst_error error;
    fst_status status;
    if (!PyTuple_Check(list)) return PyErr_Format(PyExc_TypeError, "expected a tuple of bytes");
    Py_ssize_t count = PyTuple_Size(list);
    const char **folders = calloc((size_t)count + 1, sizeof *folders);
    if (folders == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++)
        if ((folders[i] = PyBytes_AsString(PyTuple_GetItem(list, i))) == NULL) {
            free(folders);
            return NULL;
        }
    Py_BEGIN_ALLOW_THREADS
    status = fst_delta_open(folders, (size_t)count, &delta, &error);
    Py_END_ALLOW_THREADS
    free(folders);
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    PyObject *capsule = PyCapsule_New(delta, DELTA_CAPSULE, close_delta);
    if (capsule == NULL) fst_delta_close(delta);
    return capsule;
}

/// {what the library says of the chain}.
PyObject *fstpy_delta_info(PyObject *module, PyObject *capsule) {
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    fst_error error;
    fst_delta *delta = PyCapsule_GetPointer(capsule, DELTA_CAPSULE);
    if (delta == NULL) return NULL;
    if (fst_delta_info_get(delta, &info, &error) != FST_OK)
        return fstpy_raise(PyModule_GetState(module), &error);
    return Py_BuildValue("{s:s,s:s,s:n,s:n,s:K,s:s,s:s}", "base_version", info.base_version,
                         "version", info.version, "versions", (Py_ssize_t)info.version_count,
                         "tensors", (Py_ssize_t)info.tensor_count, "stored_bytes",
                         (unsigned long long)info.stored_bytes, "encoding",
                         info.encoding == FST_DELTA_XOR ? "xor" : "overwrite", "checksum",
                         fst_digest_name(info.digest));
}

/// [(name, versions that change it, compressed bytes)], by name.
PyObject *fstpy_delta_tensors(PyObject *module, PyObject *capsule) {
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    fst_error error;
    fst_delta *delta = PyCapsule_GetPointer(capsule, DELTA_CAPSULE);
    if (delta == NULL) return NULL;
    if (fst_delta_info_get(delta, &info, &error) != FST_OK)
        return fstpy_raise(PyModule_GetState(module), &error);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < info.tensor_count; i++) {
        fst_delta_tensor tensor = FST_STRUCT_INIT(fst_delta_tensor);
        PyObject *row = NULL;
        if (fst_delta_tensor_get(delta, i, &tensor, &error) == FST_OK)
            row = Py_BuildValue("(s#nK)", tensor.name, (Py_ssize_t)tensor.name_size,
                                (Py_ssize_t)tensor.version_count,
                                (unsigned long long)tensor.stored_bytes);
        if (row == NULL || PyList_Append(list, row) != 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *stats_dict(const fst_delta_stats *stats) {
    return Py_BuildValue("{s:n,s:K,s:K,s:K,s:K,s:K,s:I,s:i,s:d}", "tensors",
                         (Py_ssize_t)stats->tensor_count, "tensor_bytes",
                         (unsigned long long)stats->tensor_bytes, "bytes_read",
                         (unsigned long long)stats->bytes_read, "bytes_written",
                         (unsigned long long)stats->bytes_written, "stored_bytes",
                         (unsigned long long)stats->stored_bytes, "bytes_hashed",
                         (unsigned long long)stats->bytes_hashed, "threads", stats->thread_count,
                         "recovered", stats->recovered, "seconds", (double)stats->total_ns / 1e9);
}

/// delta_apply(delta or None, checkpoint, flags, threads, version or None) -> stats. None: finish
/// what was interrupted.
PyObject *fstpy_delta_apply(PyObject *module, PyObject *args) {
    PyObject *capsule;
    const char *checkpoint, *version;
    unsigned flags, threads;
    fst_delta *delta = NULL;
    fst_error error;
    fst_status status;
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    if (!PyArg_ParseTuple(args, "OyIIz:delta_apply", &capsule, &checkpoint, &flags, &threads,
                          &version))
        return NULL;
    if (capsule != Py_None && (delta = PyCapsule_GetPointer(capsule, DELTA_CAPSULE)) == NULL)
        return NULL;
    options.flags = flags;
    options.thread_count = threads;
    options.version = version;
    Py_BEGIN_ALLOW_THREADS
    status = delta == NULL ? fst_delta_recover(checkpoint, &options, &stats, &error)
                           : fst_delta_apply(delta, checkpoint, &options, &stats, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    return stats_dict(&stats);
}

/// delta_version(checkpoint) -> (version or "", whether an update was interrupted).
PyObject *fstpy_delta_version(PyObject *module, PyObject *path) {
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    fst_error error;
    const char *checkpoint = PyBytes_AsString(path);
    if (checkpoint == NULL) return NULL;
    if (fst_delta_version(checkpoint, version, &is_interrupted, &error) != FST_OK)
        return fstpy_raise(PyModule_GetState(module), &error);
    return Py_BuildValue("(sN)", version, PyBool_FromLong(is_interrupted));
}

/// Rows of (name, address, bytes); *out is to be freed. The names belong to the rows.
static int read_memory(PyObject *rows, fst_delta_memory **out, size_t *count) {
    Py_ssize_t row_count = PyList_Size(rows);
    if (row_count < 0) return 0;
    *count = (size_t)row_count;
    *out = calloc((size_t)row_count + 1, sizeof **out);
    if (*out == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t i = 0; i < row_count; i++) {
        unsigned long long address, size;
        const char *name;
        if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "sKK", &name, &address, &size)) {
            free(*out);
            return 0;
        }
        (*out)[i] = (fst_delta_memory){
            .name = name, .data = (void *)(uintptr_t)address, .size_bytes = size};
    }
    return 1;
}

/// delta_prepare(delta, rows, threads, version or None) -> change.
PyObject *fstpy_delta_prepare(PyObject *module, PyObject *args) {
    PyObject *capsule, *rows;
    const char *version;
    unsigned threads;
    fst_delta_memory *memory;
    size_t count;
    fst_error error;
    fst_status status;
    fst_delta_change *change = NULL;
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    if (!PyArg_ParseTuple(args, "OO!Iz:delta_prepare", &capsule, &PyList_Type, &rows, &threads,
                          &version))
        return NULL;
    fst_delta *delta = PyCapsule_GetPointer(capsule, DELTA_CAPSULE);
    if (delta == NULL || !read_memory(rows, &memory, &count)) return NULL;
    options.thread_count = threads;
    options.version = version;
    Py_BEGIN_ALLOW_THREADS
    status = fst_delta_prepare(delta, memory, count, &options, &change, &error);
    Py_END_ALLOW_THREADS
    free(memory);
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    PyObject *out = PyCapsule_New(change, CHANGE_CAPSULE, drop_change);
    if (out == NULL) fst_delta_drop(change);
    return out;
}

/// delta_commit(change): copies the new bytes.
PyObject *fstpy_delta_commit(PyObject *module, PyObject *capsule) {
    (void)module;
    fst_delta_change *change = PyCapsule_GetPointer(capsule, CHANGE_CAPSULE);
    if (change == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_delta_commit(change);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/// Bytes of a patch as an object that owns a copy of them.
static PyObject *take_bytes(const void *bytes, uint64_t size) {
    return PyByteArray_FromStringAndSize(bytes, (Py_ssize_t)size);
}

/// delta_patch(delta, index, address, bytes, element bytes, index bytes, dense) ->
/// (indices or None, values): bytearrays.
PyObject *fstpy_delta_patch(PyObject *module, PyObject *args) {
    PyObject *capsule;
    Py_ssize_t index;
    unsigned long long address, size;
    fst_error error;
    fst_status status;
    fst_delta_patch patch = FST_STRUCT_INIT(fst_delta_patch);
    fst_delta_patch_options options = FST_STRUCT_INIT(fst_delta_patch_options);
    if (!PyArg_ParseTuple(args, "OnKKIIp:delta_patch", &capsule, &index, &address, &size,
                          &options.element_bytes, &options.index_bytes, &options.dense))
        return NULL;
    fst_delta *delta = PyCapsule_GetPointer(capsule, DELTA_CAPSULE);
    if (delta == NULL) return NULL;
    options.old = (const void *)(uintptr_t)address;
    options.size_bytes = size;
    Py_BEGIN_ALLOW_THREADS
    status = fst_delta_patch_make(delta, (size_t)index, &options, &patch, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) return fstpy_raise(PyModule_GetState(module), &error);
    PyObject *indices = patch.indices == NULL
                            ? Py_NewRef(Py_None)
                            : take_bytes(patch.indices, patch.element_count * options.index_bytes);
    PyObject *values = take_bytes(patch.values, patch.element_count * options.element_bytes);
    fst_delta_patch_clear(&patch);
    if (indices != NULL && values != NULL) return Py_BuildValue("(NN)", indices, values);
    Py_XDECREF(indices);
    Py_XDECREF(values);
    return NULL;
}

static const char *const encoding_words[] = {"xor", "overwrite"};
static const char *const checksum_words[] = {"adler32", "xxh3-128", "blake3"};
static const fst_digest checksums[] = {FST_DIGEST_ADLER32, FST_DIGEST_XXH3_128, FST_DIGEST_BLAKE3};
static const char *const dialect_words[] = {"sglang", "modelexpress"};

static PyObject *make_delta(module_state *state, const char *old, const char *folder,
                            const fst_delta_make_options *options) {
    fst_error error;
    fst_status status;
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    Py_BEGIN_ALLOW_THREADS
    status = fst_delta_make(old, folder, options, &stats, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) return fstpy_raise(state, &error);
    return stats_dict(&stats);
}

/// delta_make(old, folder, new: bytes | rows | delta, version, base, encoding, checksum, dialect,
/// level, threads, durable) -> stats.
PyObject *fstpy_delta_make(PyObject *module, PyObject *args) {
    PyObject *made, *result = NULL;
    const char *old, *folder, *encoding, *checksum, *dialect;
    unsigned threads;
    int durable;
    fst_delta_memory *memory = NULL;
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    if (!PyArg_ParseTuple(args, "yyOsssssiIp:delta_make", &old, &folder, &made, &options.version,
                          &options.base_version, &encoding, &checksum, &dialect, &options.level,
                          &threads, &durable))
        return NULL;
    int at_encoding = fstpy_find_word(encoding, encoding_words, 2, "encoding");
    int at_checksum =
        at_encoding < 0 ? -1 : fstpy_find_word(checksum, checksum_words, 3, "checksum");
    int at_dialect = at_checksum < 0 ? -1 : fstpy_find_word(dialect, dialect_words, 2, "dialect");
    if (at_dialect < 0) return NULL;
    options.encoding = (fst_delta_encoding)at_encoding;
    options.digest = checksums[at_checksum];
    options.dialect = (fst_delta_dialect)at_dialect;
    options.thread_count = threads;
    options.flags = durable ? FST_DELTA_DURABLE : 0;
    if (PyBytes_Check(made)) {
        options.checkpoint = PyBytes_AsString(made);
    } else if (PyList_Check(made)) {
        if (!read_memory(made, &memory, &options.tensor_count)) return NULL;
        options.tensors = memory;
    } else if ((options.delta = PyCapsule_GetPointer(made, DELTA_CAPSULE)) == NULL) {
        return NULL;
    }
    result = make_delta(PyModule_GetState(module), old, folder, &options);
    free(memory);
    return result;
}
