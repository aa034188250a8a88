// SPDX-License-Identifier: Apache-2.0
/// Loader: a load in progress or finished. Waits without the GIL, and checks for signals.
#include "loader_object.h"
#include "waited_call.h"

#include <stdlib.h>
#include <string.h>

/// Interval of checks for Ctrl-C.
#define SIGNAL_CHECK_MS 100
/// Loads up to this size are opened on the calling thread.
#define SMALL_LOAD_BYTES ((uint64_t)1 << 20)
/// The same for views, which probe no engines: asking which of their pages are cached takes 50 ms.
#define SMALL_VIEW_BYTES ((uint64_t)4 << 30)

static module_state *state_of(PyObject *self) { return fstpy_state(Py_TYPE(self)); }

/// Called by the load's threads without the GIL, so it only stores numbers.
static int on_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                       size_t tensors_done, size_t tensors_total) {
    load_counts *counts = context;
    atomic_store_explicit(&counts->bytes_done, bytes_done, memory_order_relaxed);
    atomic_store_explicit(&counts->bytes_total, bytes_total, memory_order_relaxed);
    atomic_store_explicit(&counts->tensors_done, tensors_done, memory_order_relaxed);
    atomic_store_explicit(&counts->tensors_total, tensors_total, memory_order_relaxed);
    return 0;
}

// ---- starting ----

/// An open call with all its data, because the caller may not wait for it.
typedef struct start_call {
    waited_call call;
    shared_model *shared;
    load_request request;
    load_counts *counts;
    fst_loader *loader;
    fst_status status;
    fst_error error;
} start_call;

static void run_start(waited_call *call) {
    start_call *start = (start_call *)call;
    start->status = fst_loader_open(fstpy_model(start->shared), &start->request.options,
                                    &start->loader, &start->error);
}

/// Frees everything except the loader.
static void free_start(start_call *start) {
    fstpy_request_clear(&start->request);
    fstpy_model_drop(start->shared);
    free(start->counts);
    free(start);
}

static void discard_start(waited_call *call) {
    start_call *start = (start_call *)call;
    if (start->status == FST_OK) fst_loader_close(start->loader);
    free_start(start);
}

static int has_destinations(const fst_load_options *options) {
    for (size_t i = 0; i < options->part_count; i++)
        if (options->parts[i].destination != NULL) return 1;
    return 0;
}

/// Bytes of the file that an item needs: those of a slice of rows, or of the whole tensor.
static uint64_t item_bytes(const fst_tensor_info *info, const fst_part *item) {
    if (item == NULL || item->begin == NULL || info->rank == 0 || info->shape[0] == 0)
        return info->size_bytes;
    for (uint32_t i = 1; i < info->rank; i++)
        if (item->begin[i] != 0 || item->end[i] < info->shape[i]) return info->size_bytes;
    uint64_t begin = item->begin[0], end = item->end[0];
    if (end <= begin || end > info->shape[0]) return 0; // empty, or an error
    return info->size_bytes / info->shape[0] * (end - begin);
}

/// Whether a load returns views, unless the system refuses them.
static int gives_views(const fst_model *model, const fst_load_options *options) {
    fst_verification verified = {.struct_size = sizeof verified};
    if (options->mode == FST_MODE_MAP) return 1;
    return options->mode == FST_MODE_AUTO && options->tuning->engine == FST_ENGINE_AUTO &&
           options->cache != FST_CACHE_BYPASS && options->budget_bytes == 0 && !options->convert &&
           options->device.kind == FST_DEVICE_CPU &&
           fst_model_verification(model, &verified, NULL) == FST_OK && verified.manifest == NULL;
}

/// Whether opening may take long. A small load only queries the file's size and reads at most 64
/// KiB that are not cached.
static int is_large(const fst_model *model, const fst_load_options *options) {
    uint64_t left = gives_views(model, options) ? SMALL_VIEW_BYTES : SMALL_LOAD_BYTES;
    size_t count = options->parts != NULL ? options->part_count : fst_model_tensor_count(model);
    for (size_t i = 0; i < count; i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        size_t index = options->parts != NULL ? options->parts[i].tensor_index : i;
        if (fst_model_tensor_info(model, index, &info, NULL) != FST_OK) return 1;
        uint64_t bytes = item_bytes(&info, options->parts == NULL ? NULL : &options->parts[i]);
        if (bytes > left) return 1;
        left -= bytes;
    }
    return 0;
}

/// Opens the load, on a helper thread if that may take long. -1 with the exception of a signal
/// handler; the call then no longer belongs to the caller.
static int open_load(start_call *start) {
    const fst_load_options *options = &start->request.options;
    // Nothing may be written to caller memory after this returns.
    const fst_model *model = fstpy_model(start->shared);
    int is_there = fstpy_model_is_in_memory(start->shared) && gives_views(model, options);
    if (options->allocator == NULL && !has_destinations(options) && !is_there &&
        is_large(model, options))
        return fstpy_call_run(&start->call) ? 0 : -1;
    Py_BEGIN_ALLOW_THREADS
    run_start(&start->call);
    Py_END_ALLOW_THREADS
    return 0;
}

/// Moves an open load and its data into a Loader.
static void fill_loader(loader_object *object, start_call *start) {
    fstpy_loader_note_process(object);
    object->has_destinations = has_destinations(&start->request.options);
    object->loader = start->loader;
    object->counts = start->counts;
    object->memory = start->request.memory;
    // When all memory is allocated, release the callable, which may refer to this object and would
    // form a cycle. For a device, or with a budget, only the first batch is allocated.
    fst_device_kind kind = start->request.options.device.kind;
    int is_on_gpu = kind == FST_DEVICE_CUDA || kind == FST_DEVICE_HIP;
    if (start->request.options.budget_bytes == 0 && !is_on_gpu) fstpy_memory_finish(object->memory);
    start->counts = NULL;
    start->request.memory = NULL;
}

PyObject *fstpy_loader_new(module_state *state, shared_model *shared, PyObject *args,
                           PyObject *kwargs) {
    start_call *start = calloc(1, sizeof *start);
    load_counts *counts = calloc(1, sizeof *counts);
    if (start == NULL || counts == NULL) {
        free(start);
        free(counts);
        fstpy_model_drop(shared);
        return PyErr_NoMemory();
    }
    start->call = (waited_call){.run = run_start, .discard = discard_start};
    start->shared = shared;
    start->counts = counts;
    PyTypeObject *type = state->loader_type;
    PyObject *self = NULL;
    if (fstpy_request_read(state, fstpy_model(shared), args, kwargs, &start->request))
        self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    start->request.options.progress = on_progress;
    start->request.options.progress_context = counts;
    if (self != NULL && open_load(start) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (self != NULL && start->status == FST_OK) {
        fill_loader((loader_object *)self, start);
    } else if (self != NULL) {
        fstpy_load_raise(state, start->request.memory, &start->error);
        Py_CLEAR(self);
    }
    free_start(start);
    return self;
}

// ---- waiting ----

/// Calls progress(bytes done, total bytes, tensors done, total tensors). False with an exception.
static int report_progress(loader_object *object, PyObject *progress) {
    if (progress == NULL || progress == Py_None) return 1;
    PyObject *result = PyObject_CallFunction(
        progress, "KKnn", (unsigned long long)atomic_load(&object->counts->bytes_done),
        (unsigned long long)atomic_load(&object->counts->bytes_total),
        (Py_ssize_t)atomic_load(&object->counts->tensors_done),
        (Py_ssize_t)atomic_load(&object->counts->tensors_total));
    Py_XDECREF(result);
    return result != NULL;
}

/// Waits without the GIL until the load is complete. False with an exception. Ctrl-C, or an
/// exception of `progress` (callable, None or NULL), cancels the load.
static int wait_all(PyObject *self, fst_loader *loader, PyObject *progress) {
    loader_object *object = (loader_object *)self;
    fst_error error;
    fst_status status;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        status = fst_loader_wait(loader, SIGNAL_CHECK_MS, &error);
        Py_END_ALLOW_THREADS
        if (status == FST_OK) {
            object->is_complete = 1;
            fstpy_memory_finish(object->memory);
            // The last thread may not have reported it yet.
            atomic_store(&object->counts->bytes_done, atomic_load(&object->counts->bytes_total));
            atomic_store(&object->counts->tensors_done,
                         atomic_load(&object->counts->tensors_total));
            return report_progress(object, progress);
        }
        if (status != FST_E_TIMEOUT) break;
        object->was_interrupted = PyErr_CheckSignals() != 0;
        if (object->was_interrupted || !report_progress(object, progress)) {
            fstpy_cancel(loader);
            return 0;
        }
    }
    fstpy_load_raise(state_of(self), object->memory, &error);
    return 0;
}

static PyObject *loader_wait(PyObject *self, PyObject *args) {
    PyObject *progress = NULL;
    if (!PyArg_ParseTuple(args, "|O:wait", &progress)) return NULL;
    load_scope *scope;
    fst_loader *loader = fstpy_begin_wait(self, &scope);
    if (loader == NULL) return NULL;
    int good = wait_all(self, loader, progress);
    fstpy_end_use(self, scope);
    return good ? Py_NewRef(Py_None) : NULL;
}

/// Waits for the next tensor. NULL at the end, or with an exception.
static PyObject *take_next(PyObject *self, fst_loader *loader) {
    fst_error error;
    fst_tensor *tensor;
    fst_status status;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        status = fst_loader_next(loader, SIGNAL_CHECK_MS, &tensor, &error);
        Py_END_ALLOW_THREADS
        if (status != FST_E_TIMEOUT) break;
        if (PyErr_CheckSignals() != 0) {
            ((loader_object *)self)->was_interrupted = 1;
            fstpy_cancel(loader);
            return NULL;
        }
    }
    if (status == FST_OK) return fstpy_tensor_wrap(state_of(self), tensor);
    if (status == FST_END) return NULL;
    return fstpy_load_raise(state_of(self), ((loader_object *)self)->memory, &error);
}

/// The next tensor, for one thread at a time. A signal handler within the call is another one.
static PyObject *loader_iternext(PyObject *self) {
    loader_object *object = (loader_object *)self;
    if (object->is_iterating) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is waiting for the next tensor of this "
                                            "load: iterate over it in one thread at a time");
        return NULL;
    }
    load_scope *scope;
    fst_loader *loader = fstpy_begin_wait(self, &scope);
    if (loader == NULL) return NULL;
    object->is_iterating = 1;
    PyObject *result = take_next(self, loader);
    object->is_iterating = 0;
    fstpy_end_use(self, scope);
    return result;
}

/// Item `index`; NULL with an exception. Releases the GIL only if there is a wait, including reads
/// of items that cannot be mapped.
static fst_tensor *take_item(PyObject *self, fst_loader *loader, size_t index) {
    fst_error error;
    fst_tensor *tensor;
    fst_status status = FST_E_TIMEOUT;
    if (((loader_object *)self)->is_complete)
        status = fst_loader_tensor_at(loader, index, 0, &tensor, &error);
    while (status == FST_E_TIMEOUT) {
        Py_BEGIN_ALLOW_THREADS
        status = fst_loader_tensor_at(loader, index, SIGNAL_CHECK_MS, &tensor, &error);
        Py_END_ALLOW_THREADS
        if (status == FST_E_TIMEOUT && PyErr_CheckSignals() != 0) {
            ((loader_object *)self)->was_interrupted = 1;
            return NULL;
        }
    }
    if (status == FST_OK) return tensor;
    fstpy_load_raise(state_of(self), ((loader_object *)self)->memory, &error);
    return NULL;
}

static PyObject *loader_item(PyObject *self, PyObject *index_object) {
    size_t index = PyLong_AsSize_t(index_object);
    if (PyErr_Occurred()) return NULL;
    load_scope *scope;
    fst_loader *loader = fstpy_begin_wait(self, &scope);
    if (loader == NULL) return NULL;
    fst_tensor *tensor = take_item(self, loader, index);
    PyObject *result = tensor == NULL ? NULL : fstpy_tensor_wrap(state_of(self), tensor);
    fstpy_end_use(self, scope);
    return result;
}

// ---- all tensors at once ----

static PyObject *name_of(PyObject *self, const fst_tensor *tensor, fst_dtype *dtype) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_error error;
    if (fst_tensor_view_get(tensor, &view, &error) != FST_OK)
        return fstpy_raise(state_of(self), &error);
    *dtype = view.dtype;
    PyObject *name = PyUnicode_DecodeUTF8(view.name, (Py_ssize_t)view.name_size, NULL);
    if (name != NULL) PyUnicode_InternInPlace(&name);
    return name;
}

/// How tensors become values of the dict: through the importer as capsules if the mask has the
/// dtype, otherwise through the fallback as Tensors.
typedef struct export_kind {
    PyObject *importer, *fallback;
    unsigned long mask;
} export_kind;

/// Takes over one reference of `tensor`.
static PyObject *make_value(PyObject *self, fst_tensor *tensor, fst_dtype dtype,
                            const export_kind *kind) {
    int by_capsule = (kind->mask >> dtype & 1) != 0;
    PyObject *shown =
        by_capsule ? fstpy_dlpack_capsule(tensor, 0) : fstpy_tensor_wrap(state_of(self), tensor);
    if (shown == NULL) return NULL;
    // Creating thousands of objects would start full garbage collections, which cost several times
    // as much; none of the new objects is garbage. Importers are C functions, so no other thread
    // runs meanwhile and sees the collector disabled.
    int collects = by_capsule && PyGC_Disable();
    PyObject *value =
        PyObject_CallFunctionObjArgs(by_capsule ? kind->importer : kind->fallback, shown, NULL);
    if (collects) PyGC_Enable();
    Py_DECREF(shown);
    return value;
}

static int export_item(PyObject *self, fst_loader *loader, size_t index, const export_kind *kind,
                       PyObject *result) {
    fst_tensor *tensor = take_item(self, loader, index);
    fst_dtype dtype = FST_DTYPE_U8;
    if (tensor == NULL) return 0;
    PyObject *name = name_of(self, tensor, &dtype);
    if (name == NULL) {
        fst_tensor_unref(tensor);
        return 0;
    }
    PyObject *value = make_value(self, tensor, dtype, kind);
    int good = value != NULL && PyDict_SetItem(result, name, value) == 0;
    Py_XDECREF(value);
    Py_DECREF(name);
    return good;
}

/// make(index, importer, fallback, mask): waits for one tensor and converts it.
static PyObject *loader_make(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "make() takes index, importer, fallback and mask");
        return NULL;
    }
    size_t index = PyLong_AsSize_t(args[0]);
    export_kind kind = {args[1], args[2], PyErr_Occurred() ? 0 : PyLong_AsUnsignedLong(args[3])};
    if (PyErr_Occurred()) return NULL;
    load_scope *scope;
    fst_loader *loader = fstpy_begin_wait(self, &scope);
    if (loader == NULL) return NULL;
    fst_tensor *tensor = take_item(self, loader, index);
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    PyObject *result = NULL;
    fst_error error;
    if (tensor != NULL && fst_tensor_view_get(tensor, &view, &error) == FST_OK) {
        result = make_value(self, tensor, view.dtype, &kind);
    } else if (tensor != NULL) {
        fst_tensor_unref(tensor);
        fstpy_raise(state_of(self), &error);
    }
    fstpy_end_use(self, scope);
    return result;
}

static PyObject *loader_export(PyObject *self, PyObject *args) {
    export_kind kind;
    if (!PyArg_ParseTuple(args, "OOk:export", &kind.importer, &kind.fallback, &kind.mask))
        return NULL;
    load_scope *scope;
    fst_loader *loader = fstpy_begin_wait(self, &scope);
    if (loader == NULL) return NULL;
    PyObject *result = wait_all(self, loader, NULL) ? PyDict_New() : NULL;
    size_t count = fst_loader_tensor_count(loader);
    for (size_t i = 0; result != NULL && i < count; i++)
        if (!export_item(self, loader, i, &kind, result)) Py_CLEAR(result);
    fstpy_end_use(self, scope);
    return result;
}

/// The statistics as a dict, with the names of the public header.
static PyObject *stats_dict(const fst_load_stats *stats) {
    size_t count;
    const fst_load_counter *counters = fst_load_counters(&count);
    PyObject *result =
        Py_BuildValue("{s:s,s:s,s:s,s:I,s:n}", "mode", stats->mode, "engine", stats->engine,
                      "reason", stats->reason, "thread_count", (unsigned)stats->thread_count,
                      "tensor_count", (Py_ssize_t)stats->tensor_count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        uint64_t value;
        memcpy(&value, (const char *)stats + counters[i].offset, sizeof value);
        PyObject *number = PyLong_FromUnsignedLongLong(value);
        if (number == NULL || PyDict_SetItemString(result, counters[i].name, number) != 0)
            Py_CLEAR(result);
        Py_XDECREF(number);
    }
    return result;
}

static PyObject *loader_stats(PyObject *self, PyObject *none) {
    (void)none;
    load_scope *scope;
    fst_loader *loader = fstpy_begin_use(self, &scope);
    if (loader == NULL) return NULL;
    fst_error error;
    fst_load_stats s = {.struct_size = sizeof s};
    fst_status status;
    // A thread of the load may wait for the GIL (in an allocator) while holding the load's lock.
    Py_BEGIN_ALLOW_THREADS
    status = fst_loader_stats_get(loader, &s, &error);
    Py_END_ALLOW_THREADS
    fstpy_end_use(self, scope);
    if (status != FST_OK) return fstpy_raise(state_of(self), &error);
    return stats_dict(&s);
}

static Py_ssize_t loader_length(PyObject *self) {
    const loader_object *object = (loader_object *)self;
    return (Py_ssize_t)fst_loader_tensor_count(object->is_closed ? NULL : object->loader);
}

static PyMethodDef loader_methods[] = {
    {"wait", loader_wait, METH_VARARGS,
     "wait(progress=None): waits for all bytes, without the GIL. progress(bytes done, "
     "total bytes, tensors done, total tensors) is called ten times a second and at the end."},
    {"item", loader_item, METH_O, "Tensor `index` of the request. Waits for its bytes."},
    {"make", (PyCFunction)(void (*)(void))loader_make, METH_FASTCALL,
     "make(index, importer, fallback, mask): one tensor, as by export()."},
    {"export", loader_export, METH_VARARGS,
     "export(importer, fallback, mask) -> {name: importer(capsule) or fallback(Tensor)}, "
     "when all are loaded; bit d of mask: the importer supports dtype d."},
    {"stats", loader_stats, METH_NOARGS, "Statistics of the load: a dict."},
    {"cancel", fstpy_loader_cancel, METH_NOARGS, "Stops the load soon."},
    {"close", fstpy_loader_close, METH_NOARGS,
     "Stops and frees the load, and waits for that: afterwards nothing writes to memory of the "
     "program. Tensors stay valid. May be called twice. Inside a call of the load in the same "
     "thread (a signal handler during wait(), `progress`, its allocator) it only stops the load, "
     "which is freed when its calls have returned: memory must stay valid until then, or until "
     "close() returns outside. It waits for calls in other threads, with their callbacks "
     "(`progress`, an importer, the allocator), which must therefore not wait for the thread that "
     "calls close(), nor for a lock that it holds. When the interpreter ends, the load is only "
     "stopped if threads that it would wait for have ended."},
    {"abandon", fstpy_loader_abandon, METH_NOARGS, "Closes without waiting for reads in flight."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot loader_slots[] = {
    {Py_tp_doc, "A load. Iteration returns tensors as they arrive."},
    {Py_tp_dealloc, fstpy_loader_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, loader_iternext},
    {Py_tp_methods, loader_methods},
    {Py_sq_length, loader_length},
    {0, NULL},
};

PyType_Spec fstpy_loader_spec = {
    .name = "fastsafetensors._core.Loader",
    .basicsize = sizeof(loader_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = loader_slots,
};
