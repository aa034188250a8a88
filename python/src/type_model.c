// SPDX-License-Identifier: Apache-2.0
/// Model: an open model. Immutable, so many threads may use it.
#include "slice_request.h"
#include "waited_call.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/// A model, shared by the object and by calls without the GIL that may outlive it.
struct shared_model {
    fst_model *model;
    int is_in_memory; ///< a file on a file system without storage, so views need no reads
    atomic_size_t refs;
};

typedef struct model_object {
    PyObject_HEAD shared_model *shared; ///< NULL: closed
    PyObject *names;                    ///< list of str in file order, made once
} model_object;

static fst_model *model_of(PyObject *self) {
    const shared_model *shared = ((model_object *)self)->shared;
    if (shared != NULL) return shared->model;
    PyErr_SetString(fstpy_error_class(fstpy_state(Py_TYPE(self))), "File is closed");
    return NULL;
}

fst_model *fstpy_model(const shared_model *shared) { return shared->model; }

int fstpy_model_is_in_memory(const shared_model *shared) { return shared->is_in_memory; }

shared_model *fstpy_model_lock(PyObject *self) {
    if (model_of(self) == NULL) return NULL;
    shared_model *shared = ((model_object *)self)->shared;
    atomic_fetch_add(&shared->refs, 1);
    return shared;
}

void fstpy_model_drop(shared_model *shared) {
    if (shared == NULL || atomic_fetch_sub(&shared->refs, 1) != 1) return;
    fst_model_close(shared->model);
    free(shared);
}

// ---- opening ----

/// An open call. It has copies of the paths, because the caller may not wait for it.
typedef struct open_call {
    waited_call call;
    fst_open_options options;
    int is_single, is_in_memory;
    size_t path_count;
    fst_model *model;
    fst_status status;
    fst_error error;
    const char *paths[]; ///< followed by the texts
} open_call;

static void run_open(waited_call *call) {
    open_call *open = (open_call *)call;
    if (open->is_single)
        open->status = fst_model_open(open->paths[0], &open->options, &open->model, &open->error);
    else
        open->status = fst_model_open_files(open->paths, open->path_count, &open->options,
                                            &open->model, &open->error);
}

static void discard_open(waited_call *call) {
    open_call *open = (open_call *)call;
    if (open->status == FST_OK) fst_model_close(open->model);
    free(open);
}

/// Encodes the paths of a sequence to a list of bytes. NULL with an exception. *total: sum of
/// sizes.
static PyObject *encode_paths(PyObject *paths, size_t *total) {
    Py_ssize_t count = PySequence_Size(paths);
    PyObject *encoded = count < 0 ? NULL : PyList_New(0);
    *total = 0;
    for (Py_ssize_t i = 0; encoded != NULL && i < count; i++) {
        PyObject *path = PySequence_GetItem(paths, i), *bytes = NULL;
        int good = path != NULL && PyUnicode_FSConverter(path, &bytes) &&
                   PyList_Append(encoded, bytes) == 0;
        if (good) *total += (size_t)PyBytes_Size(bytes) + 1;
        Py_XDECREF(path);
        Py_XDECREF(bytes);
        if (!good) Py_CLEAR(encoded);
    }
    return encoded;
}

/// The sources to verify against: paths as bytes, each may be NULL.
enum { SOURCE_MANIFEST, SOURCE_SIGNATURE, SOURCE_KEY, SOURCE_COUNT };
typedef struct digest_sources {
    PyObject *paths[SOURCE_COUNT];
} digest_sources;

static void clear_sources(digest_sources *kept_sources) {
    for (int i = 0; i < SOURCE_COUNT; i++) Py_CLEAR(kept_sources->paths[i]);
}

static size_t count_sources(const digest_sources *kept_sources) {
    size_t size = 0;
    for (int i = 0; i < SOURCE_COUNT; i++)
        if (kept_sources->paths[i] != NULL)
            size += (size_t)PyBytes_Size(kept_sources->paths[i]) + 1;
    return size;
}

/// Copies the paths to `text`, and sets the options' pointers.
static void point_sources(const digest_sources *kept_sources, char *text,
                          fst_open_options *options) {
    const char **const places[SOURCE_COUNT] = {
        [SOURCE_MANIFEST] = &options->manifest,
        [SOURCE_SIGNATURE] = &options->signature,
        [SOURCE_KEY] = &options->public_key,
    };
    for (int i = 0; i < SOURCE_COUNT; i++) {
        if (kept_sources->paths[i] == NULL) continue;
        size_t size = (size_t)PyBytes_Size(kept_sources->paths[i]) + 1;
        *places[i] = memcpy(text, PyBytes_AsString(kept_sources->paths[i]), size);
        text += size;
    }
}

static open_call *make_open(PyObject *paths, const fst_open_options *options,
                            const digest_sources *kept_sources, int is_single) {
    size_t total;
    PyObject *encoded = encode_paths(paths, &total);
    if (encoded == NULL) return NULL;
    size_t count = (size_t)PyList_Size(encoded);
    total += count_sources(kept_sources);
    open_call *open = calloc(1, sizeof *open + count * sizeof *open->paths + total + 1);
    if (open == NULL) PyErr_NoMemory();
    char *text = open == NULL ? NULL : (char *)&open->paths[count];
    for (size_t i = 0; open != NULL && i < count; i++) {
        const PyObject *bytes = PyList_GetItem(encoded, (Py_ssize_t)i);
        size_t size = (size_t)PyBytes_Size((PyObject *)(uintptr_t)bytes) + 1;
        memcpy(text, PyBytes_AsString((PyObject *)(uintptr_t)bytes), size);
        open->paths[i] = text;
        text += size;
    }
    Py_DECREF(encoded);
    if (open == NULL) return NULL;
    open->call = (waited_call){.run = run_open, .discard = discard_open};
    // Manifests and signatures may lie elsewhere.
    int is_verified = count_sources(kept_sources) > 0 || (options->flags & FST_OPEN_VERIFY) != 0;
    open->call.is_quick =
        count == 1 && !is_verified && fstpy_path_is_cached(open->paths[0], &open->is_in_memory);
    open->options = *options;
    point_sources(kept_sources, text, &open->options);
    open->is_single = is_single;
    open->path_count = count;
    return open;
}

/// An object for an open model, which it takes over.
static PyObject *wrap_model(PyTypeObject *type, fst_model *model, int is_in_memory) {
    shared_model *shared = malloc(sizeof *shared);
    PyObject *self =
        shared == NULL ? PyErr_NoMemory() : ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        free(shared);
        fst_model_close(model);
        return NULL;
    }
    shared->model = model;
    shared->is_in_memory = is_in_memory;
    atomic_init(&shared->refs, 1);
    ((model_object *)self)->shared = shared;
    return self;
}

/// The argument verify=: False and None for no, True for a source next to the model, the path of a
/// manifest, or (manifest or None, signature, public key).
static int read_verify(PyObject *verify, fst_open_options *options, digest_sources *kept_sources) {
    *kept_sources = (digest_sources){{NULL}};
    if (verify == NULL || verify == Py_None || verify == Py_False) return 1;
    if (verify == Py_True) options->flags |= FST_OPEN_VERIFY;
    if (verify == Py_True) return 1;
    if (!PyTuple_Check(verify))
        return PyUnicode_FSConverter(verify, &kept_sources->paths[SOURCE_MANIFEST]);
    for (int i = 0; i < SOURCE_COUNT; i++) {
        PyObject *path = PyTuple_GetItem(verify, i);
        if (path == Py_None && i == SOURCE_MANIFEST) {
            options->flags |= FST_OPEN_VERIFY;
        } else if (path == NULL || !PyUnicode_FSConverter(path, &kept_sources->paths[i])) {
            clear_sources(kept_sources);
            return 0;
        }
    }
    return 1;
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"paths", "lenient", "verify", "parts", NULL};
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    PyObject *paths, *verify = NULL;
    digest_sources kept_sources;
    int lenient = 0, parts = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|pOp:Model", names, &paths, &lenient, &verify,
                                     &parts))
        return NULL;
    if (lenient) options.flags |= FST_OPEN_LENIENT;
    if (parts) options.flags |= FST_OPEN_PARTS;
    if (!read_verify(verify, &options, &kept_sources)) return NULL;
    int is_single = !PyList_Check(paths) && !PyTuple_Check(paths);
    PyObject *sequence = is_single ? PyTuple_Pack(1, paths) : Py_NewRef(paths);
    open_call *open =
        sequence == NULL ? NULL : make_open(sequence, &options, &kept_sources, is_single);
    Py_XDECREF(sequence);
    clear_sources(&kept_sources);
    if (open == NULL || !fstpy_call_run(&open->call)) return NULL;
    PyObject *self = open->status == FST_OK ? wrap_model(type, open->model, open->is_in_memory)
                                            : fstpy_raise(fstpy_state(type), &open->error);
    free(open);
    return self;
}

static void model_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    fstpy_model_drop(((model_object *)self)->shared);
    Py_XDECREF(((model_object *)self)->names);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *model_close(PyObject *self, PyObject *none) {
    (void)none;
    model_object *object = (model_object *)self;
    fstpy_model_drop(object->shared);
    object->shared = NULL;
    Py_CLEAR(object->names);
    Py_RETURN_NONE;
}

// ---- contents ----

static PyObject *model_verification(PyObject *self, PyObject *none) {
    (void)none;
    static const char *const sources[] = {"manifest", "bundle",  "sums",
                                          "hub",      "sidecar", "tensors"};
    fst_verification found = FST_STRUCT_INIT(fst_verification);
    fst_model *model = model_of(self);
    if (model == NULL) return NULL;
    if (fst_model_verification(model, &found, NULL) != FST_OK || found.manifest == NULL)
        Py_RETURN_NONE;
    PyObject *path = PyUnicode_DecodeFSDefault(found.manifest);
    PyObject *result = path == NULL ? NULL
                                    : Py_BuildValue("{s:O,s:s,s:s,s:k,s:n}", "manifest", path,
                                                    "source", sources[found.source], "algorithm",
                                                    fst_digest_name(found.digest), "chunk_bytes",
                                                    (unsigned long)found.chunk_bytes, "files",
                                                    (Py_ssize_t)found.file_count);
    Py_XDECREF(path);
    return result;
}

static PyObject *make_names(const fst_model *model) {
    size_t count = fst_model_tensor_count(model);
    PyObject *names = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; names != NULL && i < count; i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        PyObject *name = NULL;
        if (fst_model_tensor_info(model, i, &info, NULL) == FST_OK)
            name = PyUnicode_DecodeUTF8(info.name, (Py_ssize_t)info.name_size, NULL);
        if (name == NULL || PyList_SetItem(names, (Py_ssize_t)i, name) != 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *model_names(PyObject *self, PyObject *none) {
    (void)none;
    model_object *object = (model_object *)self;
    fst_model *model = model_of(self);
    if (model == NULL) return NULL;
    if (object->names == NULL && (object->names = make_names(model)) == NULL) return NULL;
    return PyList_GetSlice(object->names, 0, PY_SSIZE_T_MAX); // a copy, owned by the caller
}

static PyObject *model_find(PyObject *self, PyObject *name) {
    fst_model *model = model_of(self);
    Py_ssize_t size;
    const char *text = model == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, &size);
    if (text == NULL) return NULL;
    size_t index;
    if (fst_model_find(model, text, (size_t)size, &index, NULL) != FST_OK)
        return PyLong_FromLong(-1);
    return PyLong_FromSize_t(index);
}

static PyObject *model_nbytes(PyObject *self, PyObject *index_object) {
    fst_model *model = model_of(self);
    fst_error error;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    size_t index = model == NULL ? 0 : PyLong_AsSize_t(index_object);
    if (model == NULL || PyErr_Occurred()) return NULL;
    if (fst_model_tensor_info(model, index, &info, &error) != FST_OK)
        return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return PyLong_FromUnsignedLongLong(info.size_bytes);
}

static PyObject *model_info(PyObject *self, PyObject *index_object) {
    fst_model *model = model_of(self);
    fst_error error;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    size_t index = model == NULL ? 0 : PyLong_AsSize_t(index_object);
    if (model == NULL || PyErr_Occurred()) return NULL;
    module_state *state = fstpy_state(Py_TYPE(self));
    if (fst_model_tensor_info(model, index, &info, &error) != FST_OK)
        return fstpy_raise(state, &error);
    PyObject *shape = fstpy_shape(info.shape, info.rank);
    if (shape == NULL) return NULL;
    return Py_BuildValue("(ONKIK)", state->dtype_names[info.dtype], shape,
                         (unsigned long long)info.size_bytes, (unsigned)info.file_index,
                         (unsigned long long)info.file_offset);
}

/// Bytes of the selection, if it is small enough to copy; else 0.
static uint64_t selected_bytes(const fst_tensor_info *info, const slice_request *slice) {
    uint64_t bytes = 0;
    if (slice->count == 0 || slice->is_whole) return 0;
    if (fst_dtype_tensor_bytes(info->dtype, &slice->count, 1, &bytes, NULL) != FST_OK) return 0;
    return bytes <= FST_PART_BYTES_MAX ? bytes : 0;
}

static PyObject *copy_slice(module_state *state, fst_model *model, size_t index, PyObject *key) {
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_error error;
    slice_request slice;
    int copied = 0;
    if (fst_model_tensor_info(model, index, &info, &error) != FST_OK)
        return fstpy_raise(state, &error);
    if (!fstpy_read_slice(key, &info, &slice)) Py_RETURN_NONE;
    fst_part part = {.struct_size = sizeof part,
                     .tensor_index = index,
                     .begin = slice.begin,
                     .end = slice.end,
                     .destination_bytes = selected_bytes(&info, &slice)};
    if (part.destination_bytes == 0) Py_RETURN_NONE;
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)part.destination_bytes);
    if (bytes == NULL) return NULL;
    part.destination = PyByteArray_AsString(bytes);
    // With the GIL, because cached bytes are copied.
    fst_status status = fst_part_copy(model, &part, &copied, &error);
    if (status == FST_OK && copied)
        return Py_BuildValue("(NN)", bytes, fstpy_shape(slice.shape, slice.rank));
    Py_DECREF(bytes);
    if (status != FST_OK) return fstpy_raise(state, &error);
    Py_RETURN_NONE;
}

static PyObject *model_copy_slice(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "copy_slice() takes an index and a key");
    size_t index = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred()) return NULL;
    // Keep the model open: __index__ of a slice's element may close the file.
    shared_model *shared = fstpy_model_lock(self);
    if (shared == NULL) return NULL;
    PyObject *result = copy_slice(fstpy_state(Py_TYPE(self)), shared->model, index, args[1]);
    fstpy_model_drop(shared);
    return result;
}

/// cached_view(index, begin, end): a view of the whole tensor if bytes begin <= i < end of it are
/// in the page cache, else None.
static PyObject *model_cached_view(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    size_t index;
    uint64_t begin = 0, end = 0;
    fst_tensor *tensor = NULL;
    fst_error error;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "cached_view() takes an index, begin and end");
    index = PyLong_AsSize_t(args[0]);
    if (!PyErr_Occurred()) begin = PyLong_AsUnsignedLongLong(args[1]);
    if (!PyErr_Occurred()) end = PyLong_AsUnsignedLongLong(args[2]);
    fst_model *model = PyErr_Occurred() ? NULL : model_of(self);
    if (model == NULL) return NULL;
    module_state *state = fstpy_state(Py_TYPE(self));
    // Keeps the interpreter's lock: the call does not wait.
    if (fst_cached_view(model, index, begin, end, &tensor, &error) != FST_OK)
        return fstpy_raise(state, &error);
    if (tensor == NULL) Py_RETURN_NONE;
    return fstpy_tensor_wrap(state, tensor);
}

static PyObject *model_check(PyObject *self, PyObject *none) {
    (void)none;
    fst_error error;
    fst_model *model = model_of(self);
    if (model == NULL) return NULL;
    if (fst_model_check(model, &error) != FST_OK)
        return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    Py_RETURN_NONE;
}

/// Keeps the models of a sequence open. Returns their number, or -1 with an exception. The caller
/// frees *out.
static Py_ssize_t lock_models(const module_state *state, PyObject *list, shared_model ***out) {
    Py_ssize_t count = PySequence_Size(list), kept_sources = 0;
    *out = count < 0 ? NULL : calloc((size_t)count + 1, sizeof **out);
    if (*out == NULL && count >= 0) PyErr_NoMemory();
    while (*out != NULL && kept_sources < count) {
        PyObject *item = PySequence_GetItem(list, kept_sources);
        if (item != NULL && !PyObject_TypeCheck(item, state->model_type))
            PyErr_SetString(PyExc_TypeError, "a list of models is expected");
        shared_model *shared = PyErr_Occurred() ? NULL : fstpy_model_lock(item);
        Py_XDECREF(item);
        if (shared == NULL) break;
        (*out)[kept_sources++] = shared;
    }
    return PyErr_Occurred() ? -1 : kept_sources;
}

PyObject *fstpy_check_save(PyObject *module, PyObject *list) {
    fst_error error;
    module_state *state = PyModule_GetState(module);
    shared_model **shared;
    fst_status status = FST_OK;
    Py_ssize_t count = lock_models(state, list, &shared);
    const fst_model **models = count < 0 ? NULL : calloc((size_t)count + 1, sizeof *models);
    for (Py_ssize_t i = 0; models != NULL && i < count; i++) models[i] = shared[i]->model;
    if (models != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = fst_models_check_save(models, (size_t)count, &error);
        Py_END_ALLOW_THREADS
    } else if (count >= 0)
        PyErr_NoMemory();
    for (size_t i = 0; shared != NULL && shared[i] != NULL; i++) fstpy_model_drop(shared[i]);
    free(shared);
    free(models);
    if (PyErr_Occurred()) return NULL;
    if (status != FST_OK) return fstpy_raise(state, &error);
    Py_RETURN_NONE;
}

static PyObject *metadata_dict(const fst_model *model, size_t file_index, size_t count) {
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < count; i++) {
        fst_metadata_entry entry;
        PyObject *key = NULL, *value = NULL;
        if (fst_model_metadata(model, file_index, i, &entry, NULL) == FST_OK) {
            key = PyUnicode_DecodeUTF8(entry.key, (Py_ssize_t)entry.key_size, NULL);
            value = PyUnicode_DecodeUTF8(entry.value, (Py_ssize_t)entry.value_size, NULL);
        }
        if (key == NULL || value == NULL || PyDict_SetItem(result, key, value) != 0)
            Py_CLEAR(result);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return result;
}

/// Reads a file's description by number. Returns the model; NULL with an exception.
static fst_model *read_file_info(PyObject *self, PyObject *index_object, size_t *index,
                                 fst_file_info *info) {
    fst_model *model = model_of(self);
    fst_error error;
    *index = model == NULL ? 0 : PyLong_AsSize_t(index_object);
    if (model == NULL || PyErr_Occurred()) return NULL;
    if (fst_model_file_info(model, *index, info, &error) == FST_OK) return model;
    fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return NULL;
}

static PyObject *model_metadata(PyObject *self, PyObject *index_object) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    size_t index;
    const fst_model *model = read_file_info(self, index_object, &index, &info);
    if (model == NULL) return NULL;
    if (!info.has_metadata) Py_RETURN_NONE;
    return metadata_dict(model, index, info.metadata_count);
}

static PyObject *model_file(PyObject *self, PyObject *index_object) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    size_t index;
    if (read_file_info(self, index_object, &index, &info) == NULL) return NULL;
    PyObject *path = PyUnicode_DecodeFSDefault(info.path);
    if (path == NULL) return NULL;
    return Py_BuildValue("(NKKnI)", path, (unsigned long long)info.size_bytes,
                         (unsigned long long)info.header_bytes, (Py_ssize_t)info.tensor_count,
                         (unsigned)info.header_reads);
}

static PyObject *model_load(PyObject *self, PyObject *args, PyObject *kwargs) {
    shared_model *shared = fstpy_model_lock(self);
    if (shared == NULL) return NULL;
    return fstpy_loader_new(fstpy_state(Py_TYPE(self)), shared, args, kwargs);
}

static PyObject *get_file_count(PyObject *self, void *closure) {
    (void)closure;
    fst_model *model = model_of(self);
    return model == NULL ? NULL : PyLong_FromSize_t(fst_model_file_count(model));
}

static PyObject *get_is_compressed(PyObject *self, void *closure) {
    (void)closure;
    fst_model *model = model_of(self);
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    if (model == NULL) return NULL;
    for (size_t i = 0; fst_model_file_info(model, i, &info, NULL) == FST_OK; i++)
        if (info.compressed_count > 0 || info.stored_bytes != info.size_bytes) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

static Py_ssize_t model_length(PyObject *self) {
    fst_model *model = model_of(self);
    return model == NULL ? -1 : (Py_ssize_t)fst_model_tensor_count(model);
}

static PyGetSetDef model_getset[] = {
    {"file_count", get_file_count, NULL, "Number of files.", NULL},
    {"is_compressed", get_is_compressed, NULL,
     "Whether a file is compressed. Offsets then are those in the original file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef model_methods[] = {
    {"names", model_names, METH_NOARGS, "Names of all tensors in file order: a new list."},
    {"verification", model_verification, METH_NOARGS,
     "What the model is verified with: manifest, algorithm, chunk_bytes, files; or None."},
    {"find", model_find, METH_O, "Index of the tensor of that name, or -1."},
    {"nbytes", model_nbytes, METH_O, "Bytes of tensor `index` in the file."},
    {"info", model_info, METH_O,
     "(dtype, shape, bytes, file index, offset from the start of the file) of tensor `index`."},
    {"copy_slice", (PyCFunction)(void (*)(void))model_copy_slice, METH_FASTCALL,
     "copy_slice(index, key): (bytearray, shape) of the part of tensor `index` that numbers, "
     "slices of step 1 and an Ellipsis select; None for other keys, large parts, whole tensors, "
     "and bytes "
     "that are not in the page cache."},
    {"cached_view", (PyCFunction)(void (*)(void))model_cached_view, METH_FASTCALL,
     "cached_view(index, begin, end): a view of the whole tensor `index` if the page cache has its "
     "bytes from begin to end; else None."},
    {"check", model_check, METH_NOARGS,
     "Raises if the size or time of a file changed since it was opened."},
    {"metadata", model_metadata, METH_O, "__metadata__ of file `index`, or None."},
    {"file", model_file, METH_O,
     "(path, bytes, header bytes, tensors, header reads) of file `index`."},
    {"load", (PyCFunction)(void (*)(void))model_load, METH_VARARGS | METH_KEYWORDS,
     "Starts a load; see Loader."},
    {"close", model_close, METH_NOARGS,
     "Closes the files. Tensors stay valid. May be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot model_slots[] = {
    {Py_tp_doc, "Model(paths, lenient=False)\n\n"
                "`paths`: a path (file, index or folder), or a list of files."},
    {Py_tp_new, model_new},
    {Py_tp_dealloc, model_dealloc},
    {Py_tp_getset, model_getset},
    {Py_tp_methods, model_methods},
    {Py_sq_length, model_length},
    {0, NULL},
};

PyType_Spec fstpy_model_spec = {
    .name = "fastsafetensors._core.Model",
    .basicsize = sizeof(model_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = model_slots,
};
