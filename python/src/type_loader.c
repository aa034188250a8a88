// SPDX-License-Identifier: Apache-2.0
/// Loader: a load in progress or finished. Waits without the GIL, and checks for signals.
#include "load_request.h"
#include "waited_call.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/// Interval of checks for Ctrl-C.
#define SIGNAL_CHECK_MS 100
/// Loads up to this size are opened on the calling thread.
#define SMALL_LOAD_BYTES ((uint64_t)1 << 20)
/// The same for views, which probe no engines.
#define SMALL_VIEW_BYTES ((uint64_t)16 << 20)

/// Progress of a load, for waits with a callback. Separate from the object, because an abandoned
/// load may report after the object is freed.
typedef struct load_counts {
    _Atomic uint64_t bytes_done, bytes_total;
    _Atomic size_t tensors_done, tensors_total;
} load_counts;

typedef struct loader_object {
    PyObject_HEAD fst_loader *loader;
    int uses;              ///< calls running without the GIL
    int is_iterating;      ///< one of them is next(), which may release memory of another next()
    int is_closed;         ///< closed by the program; the load is freed when `uses` is 0
    caller_memory *memory; ///< caller memory, or NULL
    int has_destinations;  ///< some items have destinations
    int was_interrupted;   ///< Ctrl-C ended a wait, so nothing waits for its reads
    int is_complete;       ///< the load is complete
    unsigned fork_count;   ///< value of forks_seen when the load started
    load_counts *counts;
} loader_object;

/// Number of forks since the first process. A forked child has no load threads to wait for.
static atomic_uint forks_seen;
static pthread_once_t fork_watch = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks_seen, 1); }
static void register_fork_handlers(void) { (void)pthread_atfork(NULL, NULL, count_fork); }

static int is_of_this_process(const loader_object *object) {
    return object->fork_count == atomic_load_explicit(&forks_seen, memory_order_relaxed);
}

static module_state *state_of(PyObject *self) { return fstpy_state(Py_TYPE(self)); }

static fst_loader *begin_use(PyObject *self) {
    loader_object *object = (loader_object *)self;
    if (object->is_closed) {
        PyErr_SetString(fstpy_error_class(state_of(self)), "Loader is closed");
        return NULL;
    }
    if (!is_of_this_process(object)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this load began before fork() and only continues in the parent process. "
                        "Begin a new one");
        return NULL;
    }
    object->uses++;
    return object->loader;
}

/// For calls that wait: a load cannot go on while its allocator waits for it.
static fst_loader *begin_wait(PyObject *self) {
    if (!fstpy_allocates_for(((loader_object *)self)->memory)) return begin_use(self);
    PyErr_SetString(PyExc_RuntimeError, "a load's allocator cannot wait for the load");
    return NULL;
}

/// Without the GIL, because a thread of the load may wait for it (in an allocator) while holding
/// the load's lock.
static void cancel_load(fst_loader *loader) {
    Py_BEGIN_ALLOW_THREADS fst_loader_cancel(loader);
    Py_END_ALLOW_THREADS
}

/// Cancels the load, and has it closed by a thread. False if that thread could not be started.
static int close_later(loader_object *object) {
    if (!fstpy_close_later(object->loader, object->counts, object->memory)) return 0;
    object->loader = NULL;
    object->counts = NULL;
    object->memory = NULL;
    return 1;
}

/// Closes without waiting, unless memory of the caller could be written to after this call returns.
static int abandon_load(loader_object *object) {
    return !object->has_destinations && object->memory == NULL && close_later(object);
}

static void close_unused(loader_object *object) {
    fst_loader *loader = object->loader;
    if (!object->is_closed || loader == NULL) return;
    if (!is_of_this_process(object)) {
        object->loader = NULL; // a forked child has no threads to wait for
        return;
    }
    if (object->uses > 0) return;
    if (object->was_interrupted && abandon_load(object)) return;
    if (fstpy_allocates_for(object->memory)) {
        // Closing waits for the load's threads, of which this one may be one. Without a thread that
        // waits instead, the cancelled load stays in memory.
        if (!close_later(object)) object->loader = NULL;
        return;
    }
    object->loader = NULL;
    Py_BEGIN_ALLOW_THREADS fst_loader_close(loader);
    Py_END_ALLOW_THREADS free(object->counts);
    object->counts = NULL;
    fstpy_memory_finish(object->memory); // the callable may refer to this object
}

static void end_use(PyObject *self) {
    loader_object *object = (loader_object *)self;
    object->uses--;
    close_unused(object);
}

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
    if (options->allocator == NULL && !has_destinations(options) &&
        is_large(fstpy_model(start->shared), options))
        return fstpy_call_run(&start->call) ? 0 : -1;
    Py_BEGIN_ALLOW_THREADS run_start(&start->call);
    Py_END_ALLOW_THREADS return 0;
}

/// Moves an open load and its data into a Loader.
static void fill_loader(loader_object *object, start_call *start) {
    pthread_once(&fork_watch, register_fork_handlers);
    object->fork_count = atomic_load(&forks_seen);
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
        Py_BEGIN_ALLOW_THREADS status = fst_loader_wait(loader, SIGNAL_CHECK_MS, &error);
        Py_END_ALLOW_THREADS if (status == FST_OK) {
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
            cancel_load(loader);
            return 0;
        }
    }
    fstpy_load_raise(state_of(self), object->memory, &error);
    return 0;
}

static PyObject *loader_wait(PyObject *self, PyObject *args) {
    PyObject *progress = NULL;
    if (!PyArg_ParseTuple(args, "|O:wait", &progress)) return NULL;
    fst_loader *loader = begin_wait(self);
    if (loader == NULL) return NULL;
    int good = wait_all(self, loader, progress);
    end_use(self);
    return good ? Py_NewRef(Py_None) : NULL;
}

/// Waits for the next tensor. NULL at the end, or with an exception.
static PyObject *take_next(PyObject *self, fst_loader *loader) {
    fst_error error;
    fst_tensor *tensor;
    fst_status status;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS status = fst_loader_next(loader, SIGNAL_CHECK_MS, &tensor, &error);
        Py_END_ALLOW_THREADS if (status != FST_E_TIMEOUT) break;
        if (PyErr_CheckSignals() != 0) {
            ((loader_object *)self)->was_interrupted = 1;
            cancel_load(loader);
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
    fst_loader *loader = begin_wait(self);
    if (loader == NULL) return NULL;
    object->is_iterating = 1;
    PyObject *result = take_next(self, loader);
    object->is_iterating = 0;
    end_use(self);
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
        Py_BEGIN_ALLOW_THREADS status =
            fst_loader_tensor_at(loader, index, SIGNAL_CHECK_MS, &tensor, &error);
        Py_END_ALLOW_THREADS if (status == FST_E_TIMEOUT && PyErr_CheckSignals() != 0) {
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
    fst_loader *loader = begin_wait(self);
    if (loader == NULL) return NULL;
    fst_tensor *tensor = take_item(self, loader, index);
    PyObject *result = tensor == NULL ? NULL : fstpy_tensor_wrap(state_of(self), tensor);
    end_use(self);
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
    fst_loader *loader = begin_wait(self);
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
    end_use(self);
    return result;
}

static PyObject *loader_export(PyObject *self, PyObject *args) {
    export_kind kind;
    if (!PyArg_ParseTuple(args, "OOk:export", &kind.importer, &kind.fallback, &kind.mask))
        return NULL;
    fst_loader *loader = begin_wait(self);
    if (loader == NULL) return NULL;
    PyObject *result = wait_all(self, loader, NULL) ? PyDict_New() : NULL;
    size_t count = fst_loader_tensor_count(loader);
    for (size_t i = 0; result != NULL && i < count; i++)
        if (!export_item(self, loader, i, &kind, result)) Py_CLEAR(result);
    end_use(self);
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
    fst_loader *loader = begin_use(self);
    if (loader == NULL) return NULL;
    fst_error error;
    fst_load_stats s = {.struct_size = sizeof s};
    fst_status status;
    // A thread of the load may wait for the GIL (in an allocator) while holding the load's lock.
    Py_BEGIN_ALLOW_THREADS status = fst_loader_stats_get(loader, &s, &error);
    Py_END_ALLOW_THREADS end_use(self);
    if (status != FST_OK) return fstpy_raise(state_of(self), &error);
    return stats_dict(&s);
}

static PyObject *loader_cancel(PyObject *self, PyObject *none) {
    (void)none;
    fst_loader *loader = begin_use(self);
    if (loader == NULL) return NULL;
    cancel_load(loader);
    end_use(self);
    Py_RETURN_NONE;
}

static PyObject *loader_close(PyObject *self, PyObject *none) {
    (void)none;
    loader_object *object = (loader_object *)self;
    if (!object->is_closed && object->uses > 0 && is_of_this_process(object)) {
        object->uses++; // other threads may end their calls, and close, meanwhile
        cancel_load(object->loader);
        object->uses--;
    }
    object->is_closed = 1;
    close_unused(object);
    Py_RETURN_NONE;
}

/// For callers that cannot wait: after Ctrl-C, reads in flight may take long.
static PyObject *loader_abandon(PyObject *self, PyObject *none) {
    ((loader_object *)self)->was_interrupted = 1;
    return loader_close(self, none);
}

static void loader_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((loader_object *)self)->is_closed = 1;
    close_unused((loader_object *)self);
    fstpy_memory_unref(((loader_object *)self)->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
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
    {"cancel", loader_cancel, METH_NOARGS, "Stops the load soon."},
    {"close", loader_close, METH_NOARGS,
     "Stops and frees the load. Tensors stay valid. May be called twice."},
    {"abandon", loader_abandon, METH_NOARGS, "Closes without waiting for reads in flight."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot loader_slots[] = {
    {Py_tp_doc, "A load. Iteration returns tensors as they arrive."},
    {Py_tp_dealloc, loader_dealloc},
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
