// SPDX-License-Identifier: Apache-2.0
/// Writer: a save in progress; and functions that save, lay out and assign shards in one call.
#include "save_request.h"

#include <stdbool.h>
#include <string.h>
#include <time.h>

/// Interval of checks for Ctrl-C and of progress reports.
#define REPORT_NS ((int64_t)50 * 1000 * 1000)

typedef struct writer_object {
    PyObject_HEAD fst_writer *writer;
    PyObject *owners;     ///< objects that own the tensors' memory
    PyObject *progress;   ///< callable or NULL
    PyObject *pending[3]; ///< an exception of `progress`, or Ctrl-C
    int64_t reported_ns;
    int uses;
    int is_stepping; ///< finish(), commit() or hand_over() runs, in some thread
    int is_closed;
} writer_object;

// ---- progress and signals ----

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/// Stores the exception for the waiting call, possibly of another thread. The first one is kept.
static void keep_exception(writer_object *object) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (object->pending[0] == NULL) {
        object->pending[0] = kind;
        object->pending[1] = value;
        object->pending[2] = trace;
        return;
    }
    Py_XDECREF(kind);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/// Called often without the GIL; takes it only at intervals.
static int report(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                  size_t tensors_total) {
    writer_object *object = context;
    int64_t now = now_ns();
    if (now - object->reported_ns < REPORT_NS && done < total) return 0;
    object->reported_ns = now;
    PyGILState_STATE gil = PyGILState_Ensure();
    int stop = PyErr_CheckSignals() != 0;
    if (!stop && object->progress != NULL) {
        PyObject *result = PyObject_CallFunction(
            object->progress, "KKnn", (unsigned long long)done, (unsigned long long)total,
            (Py_ssize_t)tensors_done, (Py_ssize_t)tensors_total);
        stop = result == NULL;
        Py_XDECREF(result);
    }
    if (stop) keep_exception(object);
    PyGILState_Release(gil);
    return stop;
}

/// Raises the stored exception, if there is one.
static int raise_stored(writer_object *object) {
    if (object->pending[0] == NULL) return 0;
    PyErr_Restore(object->pending[0], object->pending[1], object->pending[2]);
    memset(object->pending, 0, sizeof object->pending);
    return 1;
}

/// The result of a call: None, or an exception. Ctrl-C raises even if everything was finished.
static PyObject *finish_call(PyObject *self, fst_status status, const fst_error *error) {
    if (raise_stored((writer_object *)self)) return NULL;
    if (status == FST_OK) Py_RETURN_NONE;
    return fstpy_raise(fstpy_state(Py_TYPE(self)), error);
}

// ---- the object ----

static fst_writer *begin_use(PyObject *self) {
    writer_object *object = (writer_object *)self;
    if (object->is_closed) {
        PyErr_SetString(fstpy_error_class(fstpy_state(Py_TYPE(self))), "Writer is closed");
        return NULL;
    }
    object->uses++;
    return object->writer;
}

/// For calls during which no other may finish or commit the files.
static fst_writer *begin_step(PyObject *self) {
    writer_object *object = (writer_object *)self;
    if (object->is_stepping) {
        PyErr_SetString(PyExc_RuntimeError,
                        "another thread is finishing this Writer: use one Writer for each save");
        return NULL;
    }
    fst_writer *writer = begin_use(self);
    if (writer != NULL) object->is_stepping = 1;
    return writer;
}

static void close_unused(writer_object *object) {
    fst_writer *writer = object->writer;
    if (!object->is_closed || object->uses > 0) return;
    object->writer = NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_writer_close(writer);
    Py_END_ALLOW_THREADS
    Py_CLEAR(object->owners);
    Py_CLEAR(object->progress);
}

static void end_use(PyObject *self) {
    writer_object *object = (writer_object *)self;
    object->uses--;
    close_unused(object);
}

static void end_step(PyObject *self) {
    ((writer_object *)self)->is_stepping = 0;
    end_use(self);
}

/// Opens the object's writer; with `joins`, on an existing file.
static int open_writer(PyTypeObject *type, writer_object *object, const char *path,
                       save_request *request) {
    fst_error error;
    fst_status status;
    object->reported_ns = now_ns();
    request->options.progress = report;
    request->options.progress_context = object;
    Py_BEGIN_ALLOW_THREADS
    if (request->joins)
        status = fst_writer_join(path, &request->options, &object->writer, &error);
    else
        status = fst_writer_open(path, request->tensors, request->tensor_count, &request->options,
                                 &object->writer, &error);
    Py_END_ALLOW_THREADS
    object->is_closed = status != FST_OK;
    if (status != FST_OK && !raise_stored(object)) fstpy_raise(fstpy_state(type), &error);
    return status == FST_OK;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    module_state *state = fstpy_state(type);
    save_request request = {0};
    save_arguments arguments;
    PyObject *path = NULL, *self = NULL;
    if (fstpy_save_request_read(state, args, kwargs, &arguments, &request) &&
        PyUnicode_FSConverter(arguments.path, &path))
        self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) {
        writer_object *object = (writer_object *)self;
        object->owners = Py_NewRef(arguments.owners);
        if (arguments.progress != Py_None) object->progress = Py_NewRef(arguments.progress);
        if (!open_writer(type, object, PyBytes_AsString(path), &request)) Py_CLEAR(self);
    }
    Py_XDECREF(path);
    fstpy_save_request_clear(&request);
    return self;
}

static int writer_traverse(PyObject *self, visitproc visit, void *arg) {
    writer_object *object = (writer_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(object->owners);
    Py_VISIT(object->progress);
    for (int i = 0; i < 3; i++) Py_VISIT(object->pending[i]);
    return 0;
}

/// Like a dropped writer, a garbage-collected one is closed without publishing.
static int writer_clear(PyObject *self) {
    writer_object *object = (writer_object *)self;
    object->is_closed = 1;
    close_unused(object);
    for (int i = 0; i < 3; i++) Py_CLEAR(object->pending[i]);
    return 0;
}

static void writer_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    writer_object *object = (writer_object *)self;
    object->is_closed = 1;
    close_unused(object);
    for (int i = 0; i < 3; i++) Py_XDECREF(object->pending[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/// Takes an address, because Python's limited API has no buffers before 3.11.
static PyObject *writer_write(PyObject *self, PyObject *args) {
    Py_ssize_t index, size;
    unsigned long long offset, address;
    if (!PyArg_ParseTuple(args, "nKKn:write", &index, &offset, &address, &size)) return NULL;
    if (address == 0 && size > 0) {
        PyErr_SetString(PyExc_ValueError, "bytes at address 0");
        return NULL;
    }
    fst_writer *writer = begin_use(self);
    if (writer == NULL) return NULL;
    fst_error error;
    fst_status status;
    const void *data = (const void *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS
    status = fst_writer_write(writer, (size_t)index, offset, data, (size_t)size, &error);
    Py_END_ALLOW_THREADS
    PyObject *result = finish_call(self, status, &error);
    end_use(self);
    return result;
}

static PyObject *writer_map(PyObject *self, PyObject *index_object) {
    Py_ssize_t index = PyLong_AsSsize_t(index_object);
    if (PyErr_Occurred()) return NULL;
    fst_writer *writer = begin_step(self);
    if (writer == NULL) return NULL;
    fst_error error;
    void *address;
    fst_status status = fst_writer_map(writer, (size_t)index, &address, &error);
    end_step(self);
    if (status != FST_OK) return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return PyLong_FromVoidPtr(address);
}

typedef fst_status (*writer_step)(fst_writer *writer, fst_error *error);

static PyObject *run_step(PyObject *self, writer_step step) {
    fst_writer *writer = begin_step(self);
    if (writer == NULL) return NULL;
    fst_error error;
    fst_status status;
    Py_BEGIN_ALLOW_THREADS
    status = step(writer, &error);
    Py_END_ALLOW_THREADS
    PyObject *result = finish_call(self, status, &error);
    end_step(self);
    return result;
}

static PyObject *writer_finish(PyObject *self, PyObject *none) {
    (void)none;
    return run_step(self, fst_writer_finish);
}

static PyObject *writer_commit(PyObject *self, PyObject *none) {
    (void)none;
    return run_step(self, fst_writer_commit);
}

/// Returns the temporary paths by which other processes open the files.
static PyObject *writer_hand_over(PyObject *self, PyObject *none) {
    PyObject *paths = NULL, *done = run_step(self, fst_writer_hand_over);
    (void)none;
    fst_writer *writer = done == NULL ? NULL : begin_step(self);
    Py_XDECREF(done);
    if (writer == NULL) return NULL;
    paths = PyList_New(0);
    const char *path;
    for (uint32_t i = 0; paths != NULL && (path = fst_writer_hidden_path(writer, i)) != NULL; i++) {
        PyObject *text = PyUnicode_DecodeFSDefault(path);
        if (text == NULL || PyList_Append(paths, text) != 0) Py_CLEAR(paths);
        Py_XDECREF(text);
    }
    end_step(self);
    return paths;
}

static PyObject *writer_close(PyObject *self, PyObject *none) {
    (void)none;
    writer_object *object = (writer_object *)self;
    object->is_closed = 1;
    close_unused(object);
    Py_RETURN_NONE;
}

static PyObject *writer_paths(PyObject *self, PyObject *none) {
    (void)none;
    fst_writer *writer = begin_step(self);
    PyObject *paths = writer == NULL ? NULL : PyList_New(0);
    const char *path;
    for (uint32_t i = 0; paths != NULL && (path = fst_writer_path(writer, i)) != NULL; i++) {
        PyObject *text = PyUnicode_DecodeFSDefault(path);
        if (text == NULL || PyList_Append(paths, text) != 0) Py_CLEAR(paths);
        Py_XDECREF(text);
    }
    if (writer != NULL) end_step(self);
    return paths;
}

PyObject *fstpy_save_stats(const fst_save_stats *stats) {
#define NUMBER(name) #name, (unsigned long long)stats->name
    return Py_BuildValue(
        "{s:s,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "engine",
        stats->engine, "reason", stats->reason, NUMBER(file_count), NUMBER(tensor_count),
        NUMBER(padding_count), NUMBER(bytes_total), NUMBER(bytes_written), NUMBER(bytes_direct),
        NUMBER(bytes_staged), NUMBER(write_count), NUMBER(sync_count), NUMBER(stage_bytes),
        NUMBER(total_ns), NUMBER(sync_ns), NUMBER(bytes_hashed), NUMBER(bytes_read));
#undef NUMBER
}

static PyObject *writer_stats(PyObject *self, PyObject *none) {
    (void)none;
    fst_writer *writer = begin_use(self);
    if (writer == NULL) return NULL;
    fst_error error;
    fst_save_stats stats = {.struct_size = sizeof stats};
    fst_status status = fst_writer_stats_get(writer, &stats, &error);
    end_use(self);
    if (status != FST_OK) return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return fstpy_save_stats(&stats);
}

// ---- functions of the module ----

/// Bytes copied between signal checks, about 5 ms.
#define SIGNAL_BYTES ((uint64_t)16 << 20)

/// Bytes objects being filled without the GIL.
typedef struct fill_state {
    PyThreadState *thread;
    uint64_t since; ///< bytes since the last signal check
} fill_state;

/// Copies bytes, or zeros without a source. False with the exception of a signal handler.
static bool fill(fill_state *filling, char *target, const void *source, uint64_t size) {
    for (uint64_t done = 0; done < size;) {
        uint64_t rest = size - done, room = SIGNAL_BYTES - filling->since;
        size_t step = (size_t)(rest < room ? rest : room);
        if (source == NULL)
            memset(target + done, 0, step);
        else
            memcpy(target + done, (const char *)source + done, step);
        done += step;
        filling->since += step;
        if (filling->since < SIGNAL_BYTES) continue;
        filling->since = 0;
        PyEval_RestoreThread(filling->thread);
        bool stopped = PyErr_CheckSignals() != 0;
        filling->thread = PyEval_SaveThread();
        if (stopped) return false;
    }
    return true;
}

static PyObject *layout_bytes(const fst_layout *layout, const save_request *request) {
    uint64_t size = fst_layout_file_bytes(layout);
    PyObject *result = size > PY_SSIZE_T_MAX ? PyErr_NoMemory()
                                             : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (result == NULL) return NULL;
    fill_state filling = {.thread = PyEval_SaveThread()};
    char *target = PyBytes_AsString(result);
    size_t header_size;
    const char *header = fst_layout_header(layout, &header_size);
    bool good = fill(&filling, target, header, header_size);
    if (good && fst_layout_padding_count(layout) > 0)
        good = fill(&filling, target + header_size, NULL, size - header_size);
    for (size_t i = 0; good && i < request->tensor_count; i++) {
        uint64_t offset = 0, bytes = 0;
        if (fst_layout_tensor(layout, i, &offset, &bytes, NULL) == FST_OK)
            good = fill(&filling, target + offset, request->tensors[i].data, bytes);
    }
    PyEval_RestoreThread(filling.thread);
    if (!good) Py_CLEAR(result);
    return result;
}

static PyObject *layout_tuple(const fst_layout *layout, const save_request *request) {
    PyObject *offsets = PyList_New((Py_ssize_t)request->tensor_count);
    for (size_t i = 0; offsets != NULL && i < request->tensor_count; i++) {
        uint64_t offset = 0, bytes = 0;
        PyObject *number = NULL;
        if (fst_layout_tensor(layout, i, &offset, &bytes, NULL) == FST_OK)
            number = PyLong_FromUnsignedLongLong(offset);
        if (number == NULL || PyList_SetItem(offsets, (Py_ssize_t)i, number) != 0)
            Py_CLEAR(offsets);
    }
    if (offsets == NULL) return NULL;
    size_t header_size;
    const char *header = fst_layout_header(layout, &header_size);
    return Py_BuildValue("(y#NKn)", header, (Py_ssize_t)header_size, offsets,
                         (unsigned long long)fst_layout_file_bytes(layout),
                         (Py_ssize_t)fst_layout_padding_count(layout));
}

static PyObject *with_layout(PyObject *module, PyObject *args, PyObject *kwargs, int as_bytes) {
    module_state *state = PyModule_GetState(module);
    save_request request = {0};
    save_arguments arguments;
    PyObject *result = NULL;
    if (fstpy_save_request_read(state, args, kwargs, &arguments, &request)) {
        fst_error error;
        fst_layout *layout;
        if (fst_layout_open(request.tensors, request.tensor_count, &request.options, &layout,
                            &error) != FST_OK) {
            fstpy_raise(state, &error);
        } else {
            result = as_bytes ? layout_bytes(layout, &request) : layout_tuple(layout, &request);
            fst_layout_close(layout);
        }
    }
    fstpy_save_request_clear(&request);
    return result;
}

PyObject *fstpy_serialize(PyObject *module, PyObject *args, PyObject *kwargs) {
    return with_layout(module, args, kwargs, 1);
}

PyObject *fstpy_layout(PyObject *module, PyObject *args, PyObject *kwargs) {
    return with_layout(module, args, kwargs, 0);
}

/// Reads sizes and groups into items. False with an exception.
static int read_items(PyObject *sizes, PyObject *groups, fst_shard_item *items, size_t count) {
    int grouped = groups != Py_None;
    if (grouped && PySequence_Size(groups) != (Py_ssize_t)count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the lists have different lengths");
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *size = PySequence_GetItem(sizes, (Py_ssize_t)i);
        PyObject *group = grouped ? PySequence_GetItem(groups, (Py_ssize_t)i) : NULL;
        items[i].size_bytes = size == NULL ? 0 : PyLong_AsUnsignedLongLong(size);
        items[i].group = group == NULL ? 0 : PyLong_AsUnsignedLongLong(group);
        Py_XDECREF(size);
        Py_XDECREF(group);
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

static PyObject *file_list(const uint32_t *file_of, size_t count, uint32_t file_count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(file_of[i]);
        if (number == NULL || PyList_SetItem(list, (Py_ssize_t)i, number) != 0) Py_CLEAR(list);
    }
    return list == NULL ? NULL : Py_BuildValue("(NI)", list, (unsigned)file_count);
}

PyObject *fstpy_assign_shards(PyObject *module, PyObject *args) {
    PyObject *sizes, *groups, *result = NULL;
    unsigned long long limit;
    if (!PyArg_ParseTuple(args, "OOK:assign_shards", &sizes, &groups, &limit)) return NULL;
    Py_ssize_t count = PySequence_Size(sizes);
    if (count < 0) return NULL;
    fst_shard_item *items = PyMem_Calloc((size_t)count + 1, sizeof *items);
    uint32_t *file_of = PyMem_Calloc((size_t)count + 1, sizeof *file_of), file_count;
    fst_error error;
    if (items == NULL || file_of == NULL)
        PyErr_NoMemory();
    else if (!read_items(sizes, groups, items, (size_t)count))
        result = NULL;
    else if (fst_shards_assign(items, (size_t)count, limit, file_of, &file_count, &error) == FST_OK)
        result = file_list(file_of, (size_t)count, file_count);
    else
        fstpy_raise(PyModule_GetState(module), &error);
    PyMem_Free(items);
    PyMem_Free(file_of);
    return result;
}

/// Encodes a list of paths, each to be released. NULL with an exception.
static PyObject **encode_paths(PyObject *list, size_t count) {
    PyObject **encoded = PyMem_Calloc(count + 1, sizeof *encoded);
    if (encoded == NULL) PyErr_NoMemory();
    for (size_t i = 0; encoded != NULL && i < count; i++) {
        if (PyUnicode_FSConverter(PyList_GetItem(list, (Py_ssize_t)i), &encoded[i])) continue;
        while (i-- > 0) Py_DECREF(encoded[i]);
        PyMem_Free(encoded);
        return NULL;
    }
    return encoded;
}

static PyObject *publish(PyObject *module, const char *folder, PyObject **encoded, size_t count,
                         const fst_publish_options *options) {
    fst_error error;
    fst_status status;
    const char **paths = PyMem_Calloc(count + 1, sizeof *paths);
    if (paths == NULL) return PyErr_NoMemory();
    for (size_t i = 0; i < count; i++) paths[i] = PyBytes_AsString(encoded[i]);
    Py_BEGIN_ALLOW_THREADS
    status = fst_set_publish(folder, paths, count, options, NULL, &error);
    Py_END_ALLOW_THREADS
    PyMem_Free(paths);
    return status == FST_OK ? Py_NewRef(Py_None) : fstpy_raise(PyModule_GetState(module), &error);
}

PyObject *fstpy_publish_set(PyObject *module, PyObject *args) {
    PyObject *folder = NULL, *list, *result = NULL;
    fst_publish_options options = FST_STRUCT_INIT(fst_publish_options);
    int durable = 0;
    PyObject *manifest = Py_None; // bytes owned by the arguments
    const char *digest = "xxh3-128";
    if (!PyArg_ParseTuple(args, "O&O!sppOs:publish_set", PyUnicode_FSConverter, &folder,
                          &PyList_Type, &list, &options.stem, &durable, &options.names_only,
                          &manifest, &digest) ||
        !fstpy_read_digest(digest, &options.digest) ||
        (manifest != Py_None && (options.manifest = PyBytes_AsString(manifest)) == NULL)) {
        Py_XDECREF(folder);
        return NULL;
    }
    options.promise = durable ? FST_SAVE_DURABLE : FST_SAVE_QUICK;
    size_t count = (size_t)PyList_Size(list);
    PyObject **encoded = encode_paths(list, count);
    if (encoded != NULL) {
        result = publish(module, PyBytes_AsString(folder), encoded, count, &options);
        for (size_t i = 0; i < count; i++) Py_DECREF(encoded[i]);
        PyMem_Free(encoded);
    }
    Py_DECREF(folder);
    return result;
}

static PyMethodDef writer_methods[] = {
    {"write", writer_write, METH_VARARGS, "write(index, offset, address, bytes)."},
    {"map", writer_map, METH_O,
     "map(index): address of the tensor's bytes in the new file, valid until finish()."},
    {"finish", writer_finish, METH_NOARGS, "Writes and checks everything, without publishing it."},
    {"commit", writer_commit, METH_NOARGS, "Finishes if necessary, and publishes the files."},
    {"hand_over", writer_hand_over, METH_NOARGS,
     "Finishes if necessary; returns the temporary paths, for publish_set() or Writer(joins=)."},
    {"close", writer_close, METH_NOARGS, "Ends the save. Deletes it unless it was committed."},
    {"paths", writer_paths, METH_NOARGS, "Paths of the files and of the index, if any."},
    {"stats", writer_stats, METH_NOARGS, "Statistics of the save: a dict."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "A save. See _core.pyi for the arguments."},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

PyType_Spec fstpy_writer_spec = {
    .name = "fastsafetensors._core.Writer",
    .basicsize = sizeof(writer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = writer_slots,
};
