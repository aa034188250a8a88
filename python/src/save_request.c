// SPDX-License-Identifier: Apache-2.0
/// The arguments of a save: tensors, metadata, options.
#include "save_request.h"

#include <string.h>

void fstpy_save_request_clear(save_request *request) {
    PyMem_Free(request->tensors);
    PyMem_Free(request->numbers);
    PyMem_Free(request->metadata);
}

static int find_dtype(const module_state *state, PyObject *name, fst_dtype *out) {
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        // usually the same str object as in DTYPES
        *out = (fst_dtype)i;
        if (name == state->dtype_names[i]) return 1;
    }
    for (int i = 0; PyUnicode_Check(name) && i < FST_DTYPE_COUNT; i++) {
        *out = (fst_dtype)i;
        if (PyUnicode_Compare(name, state->dtype_names[i]) == 0) return 1;
    }
    PyErr_Format(PyExc_ValueError, "unknown dtype %R", name);
    return 0;
}

/// Appends a shape's numbers; pointers are set when all are there.
static int read_shape(save_request *request, PyObject *shape, uint32_t *rank) {
    Py_ssize_t count = PySequence_Size(shape);
    if (count < 0) return 0;
    if (request->number_count + (size_t)count > request->number_capacity) {
        size_t capacity = 2 * request->number_capacity + (size_t)count + 64;
        uint64_t *grown = PyMem_Realloc(request->numbers, capacity * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        request->numbers = grown;
        request->number_capacity = capacity;
    }
    *rank = (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = PySequence_GetItem(shape, i);
        uint64_t value = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
        Py_XDECREF(number);
        if (PyErr_Occurred()) return 0;
        request->numbers[request->number_count++] = value;
    }
    return 1;
}

static int read_device(PyObject *name, fst_save_tensor *tensor) {
    fst_error error;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (text == NULL) return 0;
    if (fst_device_parse(text, &tensor->device, &error) == FST_OK) return 1;
    PyErr_SetString(PyExc_ValueError, error.message);
    return 0;
}

/// Reads (name, dtype, shape, address or None, bytes[, device]).
static int read_tensor(const module_state *state, save_request *request, PyObject *row,
                       fst_save_tensor *tensor) {
    if (!PyTuple_Check(row) || PyTuple_Size(row) < 5 || PyTuple_Size(row) > 6) {
        PyErr_SetString(PyExc_TypeError,
                        "a tensor must be (name, dtype, shape, address, bytes[, device])");
        return 0;
    }
    if (PyTuple_Size(row) == 6 && !read_device(PyTuple_GetItem(row, 5), tensor)) return 0;
    Py_ssize_t size;
    tensor->name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(row, 0), &size);
    if (tensor->name == NULL) return 0;
    tensor->name_size = (size_t)size;
    PyObject *address = PyTuple_GetItem(row, 3);
    if (!find_dtype(state, PyTuple_GetItem(row, 1), &tensor->dtype) ||
        !read_shape(request, PyTuple_GetItem(row, 2), &tensor->rank))
        return 0;
    if (address != Py_None) tensor->data = PyLong_AsVoidPtr(address);
    return PyErr_Occurred() == NULL;
}

/// The size given by the caller must match shape and dtype, because that much memory will be read.
static int check_bytes(fst_save_tensor *tensor, PyObject *row) {
    unsigned long long bytes = PyLong_AsUnsignedLongLong(PyTuple_GetItem(row, 4));
    unsigned long long bits = 0, count = 1;
    if (PyErr_Occurred()) return 0;
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (__builtin_mul_overflow(count, tensor->shape[i], &count)) count = UINT64_MAX;
    if (__builtin_mul_overflow(count, fst_dtype_bits(tensor->dtype), &bits) || bits / 8 != bytes) {
        PyErr_Format(PyExc_ValueError,
                     "%s: a tensor of dtype %s and this shape does not have %llu bytes",
                     tensor->name, fst_dtype_name(tensor->dtype), bytes);
        return 0;
    }
    if (tensor->data != NULL || PyTuple_GetItem(row, 3) == Py_None) return 1;
    if (bytes > 0) {
        PyErr_Format(PyExc_ValueError, "%s: %llu bytes at address 0", tensor->name, bytes);
        return 0;
    }
    tensor->data = ""; // an empty tensor is complete
    return 1;
}

static int read_tensors(const module_state *state, PyObject *rows, save_request *request) {
    Py_ssize_t count = PySequence_Size(rows);
    if (count < 0) return 0;
    request->tensors = PyMem_Calloc((size_t)count + 1, sizeof *request->tensors);
    if (request->tensors == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    request->tensor_count = (size_t)count;
    // `rows` is a private list, so its items stay valid while borrowed.
    for (Py_ssize_t i = 0; i < count; i++)
        if (!read_tensor(state, request, PyList_GetItem(rows, i), &request->tensors[i])) return 0;
    const uint64_t *numbers = request->numbers;
    for (Py_ssize_t i = 0; i < count; i++) {
        fst_save_tensor *tensor = &request->tensors[i];
        tensor->struct_size = sizeof *tensor;
        tensor->shape = numbers;
        numbers += tensor->rank;
        if (!check_bytes(tensor, PyList_GetItem(rows, i))) return 0;
    }
    return 1;
}

static int read_pair(PyObject *key, PyObject *value, fst_metadata_entry *entry) {
    Py_ssize_t key_size, value_size;
    entry->key = PyUnicode_AsUTF8AndSize(key, &key_size);
    entry->value = entry->key == NULL ? NULL : PyUnicode_AsUTF8AndSize(value, &value_size);
    if (entry->value == NULL) return 0;
    entry->key_size = (size_t)key_size;
    entry->value_size = (size_t)value_size;
    return 1;
}

static int read_metadata(PyObject *metadata, save_request *request) {
    if (metadata == Py_None) return 1;
    if (!PyDict_Check(metadata)) {
        PyErr_SetString(PyExc_TypeError, "metadata must be a dict of str to str");
        return 0;
    }
    Py_ssize_t at = 0;
    size_t count = 0;
    PyObject *key, *value;
    request->metadata = PyMem_Calloc((size_t)PyDict_Size(metadata) + 1, sizeof *request->metadata);
    if (request->metadata == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    while (PyDict_Next(metadata, &at, &key, &value))
        if (!read_pair(key, value, &request->metadata[count++])) return 0;
    request->options.metadata = request->metadata;
    request->options.metadata_count = count;
    request->options.has_metadata = 1;
    return 1;
}

static int read_files(PyObject *file_of, save_request *request) {
    if (file_of == Py_None) return 1;
    if (PySequence_Size(file_of) != (Py_ssize_t)request->tensor_count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "file_of must have one number per tensor");
        return 0;
    }
    for (size_t i = 0; i < request->tensor_count; i++) {
        PyObject *number = PySequence_GetItem(file_of, (Py_ssize_t)i);
        unsigned long value = number == NULL ? 0 : PyLong_AsUnsignedLong(number);
        Py_XDECREF(number);
        if (PyErr_Occurred()) return 0;
        request->tensors[i].file_index = (uint32_t)value;
    }
    return 1;
}

static int read_words(const char *promise, const char *order, const char *engine,
                      fst_save_options *options) {
    static const char *const promises[] = {"quick", "durable"};
    static const char *const orders[] = {"reference", "name", "given"};
    static const char *const engines[] = {"auto", "buffered", "direct", "uring"};
    int promise_at = fstpy_find_word(promise, promises, FST_SAVE_PROMISE_COUNT, "promise");
    int order_at =
        promise_at < 0 ? -1 : fstpy_find_word(order, orders, FST_SAVE_ORDER_COUNT, "order");
    int engine_at =
        order_at < 0 ? -1 : fstpy_find_word(engine, engines, FST_SAVE_ENGINE_COUNT, "engine");
    if (engine_at < 0) return 0;
    options->promise = (fst_save_promise)promise_at;
    options->order = (fst_save_order)order_at;
    options->engine = (fst_save_engine)engine_at;
    return 1;
}

static int read_compress(const char *compress, fst_save_options *options) {
    static const char *const words[] = {"none", "float", "all"};
    int at = fstpy_find_word(compress, words, FST_COMPRESS_COUNT, "compress");
    if (at >= 0) options->compress = (fst_compress)at;
    return at >= 0;
}

int fstpy_read_digest(const char *word, fst_digest *out) {
    static const char *const words[] = {"xxh3-128", "blake3", "sha256"};
    int at = fstpy_find_word(word, words, FST_DIGEST_XXH3_64, "digest");
    if (at >= 0) *out = (fst_digest)at;
    return at >= 0;
}

/// `manifest`: bytes of a path, owned by the arguments; b"" for the default path.
static int read_manifest(PyObject *manifest, const char *digest, fst_save_options *options) {
    if (manifest == Py_None) return 1;
    if (!fstpy_read_digest(digest, &options->digest)) return 0;
    options->manifest = PyBytes_AsString(manifest);
    return options->manifest != NULL;
}

int fstpy_save_request_read(const module_state *state, PyObject *args, PyObject *kwargs,
                            save_arguments *arguments, save_request *request) {
    static char *names[] = {
        "path",      "tensors",          "metadata",      "promise", "order",        "engine",
        "alignment", "header_alignment", "metadata_last", "file_of", "file_count",   "stem",
        "threads",   "progress",         "owners",        "joins",   "others_write", "replace_link",
        "compress",  "manifest",         "digest",        NULL};
    PyObject *metadata = Py_None, *file_of = Py_None, *manifest = Py_None;
    const char *promise = "quick", *order = "reference", *engine = "auto", *compress = "none",
               *digest = "xxh3-128";
    fst_save_options *options = &request->options;
    unsigned long long alignment = 0, header_alignment = 0;
    unsigned file_count = 0, threads = 0;
    *arguments = (save_arguments){Py_None, NULL, Py_None, Py_None};
    options->struct_size = sizeof *options;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!|O$sssKKpOIzIOOpppsOs:save", names, &arguments->path, &PyList_Type,
            &arguments->rows, &metadata, &promise, &order, &engine, &alignment, &header_alignment,
            &options->metadata_last, &file_of, &file_count, &options->stem, &threads,
            &arguments->progress, &arguments->owners, &request->joins, &options->others_write,
            &options->replace_link, &compress, &manifest, &digest))
        return 0;
    options->alignment_bytes = alignment;
    options->header_alignment_bytes = header_alignment;
    options->file_count = file_count;
    options->thread_count = threads;
    return read_words(promise, order, engine, options) && read_compress(compress, options) &&
           read_manifest(manifest, digest, options) &&
           read_tensors(state, arguments->rows, request) && read_metadata(metadata, request) &&
           read_files(file_of, request);
}
