// SPDX-License-Identifier: Apache-2.0
/// AsyncSave: a save that runs while the program goes on; StagingPool: the memory that is kept
/// between such saves.
#include "save_request.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/// Interval of checks for Ctrl-C.
#define SIGNAL_CHECK_MS 50

// ---- StagingPool ----

typedef struct pool_object {
    PyObject_HEAD fst_staging_pool *pool; ///< NULL: closed
    int uses;                             ///< saves that are being started without the GIL
    int is_closed;                        ///< closed by the program; freed when `uses` is 0
} pool_object;

static void close_unused_pool(pool_object *object) {
    fst_staging_pool *pool = object->pool;
    if (!object->is_closed || object->uses > 0) return;
    object->pool = NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_staging_close(pool);
    Py_END_ALLOW_THREADS
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", "ready", NULL};
    unsigned long long limit = 0, ready = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|KK:StagingPool", names, &limit, &ready))
        return NULL;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    pool_object *object = (pool_object *)self;
    fst_error error;
    fst_status status;
    Py_BEGIN_ALLOW_THREADS
    status = fst_staging_open(limit, ready, &object->pool, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) {
        fstpy_raise(fstpy_state(type), &error);
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *pool_close(PyObject *self, PyObject *none) {
    (void)none;
    ((pool_object *)self)->is_closed = 1;
    close_unused_pool((pool_object *)self);
    Py_RETURN_NONE;
}

static PyObject *pool_nbytes(PyObject *self, PyObject *none) {
    (void)none;
    return PyLong_FromUnsignedLongLong(fst_staging_bytes(((pool_object *)self)->pool));
}

static void pool_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    fst_staging_close(((pool_object *)self)->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef pool_methods[] = {
    {"close", pool_close, METH_NOARGS, "Free the memory when the saves that use it have ended."},
    {"nbytes", pool_nbytes, METH_NOARGS, "Bytes that the pool holds."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_new, (void *)pool_new},
    {Py_tp_dealloc, (void *)pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_doc, "Staging memory that is kept between asynchronous saves."},
    {0, NULL},
};

PyType_Spec fstpy_pool_spec = {"fastsafetensors._core.StagingPool", sizeof(pool_object), 0,
                               Py_TPFLAGS_DEFAULT, pool_slots};

// ---- AsyncSave ----

typedef struct async_object {
    PyObject_HEAD fst_async_save *save; ///< NULL: not started, or closed
    PyObject *owners;                   ///< keeps the tensors' memory until it is staged
    PyObject *is_unchanged;             ///< callable or NULL
    int uses, is_closed;
    int is_starting; ///< start() runs, or has succeeded
} async_object;

/// Releases the tensors when the save no longer reads them or calls is_unchanged().
static void release_tensors(async_object *object) {
    Py_CLEAR(object->owners);
    Py_CLEAR(object->is_unchanged);
}

/// The question whether the tensors are unchanged.
typedef struct unchanged_question {
    PyObject *callable;
    const fst_async_save *save; ///< that the library asks for
    int is_unchanged;
} unchanged_question;

/// Calls the program's function. The GIL is held.
static void call_unchanged(unchanged_question *question) {
    PyObject *answer = PyObject_CallFunction(question->callable, NULL);
    question->is_unchanged = answer != NULL && PyObject_IsTrue(answer) == 1;
    if (PyErr_Occurred()) PyErr_WriteUnraisable(question->callable);
    Py_XDECREF(answer);
}

static void *answer_unchanged(void *context) {
    (void)fst_async_save_serve(((unchanged_question *)context)->save);
    PyGILState_STATE gil = PyGILState_Ensure();
    call_unchanged(context);
    PyGILState_Release(gil);
    return NULL;
}

/// Called once, by a thread of the library, or by one that waits for it without the GIL. Another
/// thread calls the program's function: in the main thread signal handlers would run meanwhile, and
/// their exceptions would be taken for the answer, or they would wait for this very save.
static int ask_unchanged(void *context) {
    unchanged_question question = {.save = fst_async_save_serve(NULL)};
    pthread_t thread;
    (void)fst_async_save_serve(question.save);
    PyGILState_STATE gil = PyGILState_Ensure();
    question.callable = Py_NewRef(((async_object *)context)->is_unchanged);
    int is_asked = 0;
    if (!fstpy_is_ending()) { // then no other thread would get the GIL
        Py_BEGIN_ALLOW_THREADS
        is_asked = pthread_create(&thread, NULL, answer_unchanged, &question) == 0;
        if (is_asked) pthread_join(thread, NULL);
        Py_END_ALLOW_THREADS
    }
    if (!is_asked) call_unchanged(&question);
    Py_DECREF(question.callable);
    PyGILState_Release(gil);
    return question.is_unchanged;
}

/// What a save that other processes take part in calls at its end.
typedef struct publish_call {
    PyObject *callable;
    module_state *state;
} publish_call;

static PyObject *list_paths(const char *const *paths, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *path = PyUnicode_DecodeFSDefault(paths[i]);
        if (path == NULL || PyList_SetItem(list, (Py_ssize_t)i, path) != 0) Py_CLEAR(list);
    }
    return list;
}

/// The exception of an error, as an object.
static PyObject *make_exception(module_state *state, const fst_error *error) {
    PyObject *kind, *value, *trace;
    fstpy_raise(state, error);
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    Py_XDECREF(kind);
    Py_XDECREF(trace);
    return value;
}

/// Returns what the program's function returns: None, or a text that says why nothing was
/// published.
static PyObject *ask_publish(const publish_call *call, fst_status status, const char *const *paths,
                             size_t path_count, const fst_error *error) {
    PyObject *first = status == FST_OK ? list_paths(paths, path_count) : Py_NewRef(Py_None);
    PyObject *second = status == FST_OK ? Py_NewRef(Py_None) : make_exception(call->state, error);
    PyObject *answer = NULL;
    if (first != NULL && second != NULL)
        answer = PyObject_CallFunctionObjArgs(call->callable, first, second, NULL);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return answer;
}

/// Called once, by a thread of the library without the GIL.
static fst_status call_publish(void *context, fst_status status, const char *const *paths,
                               size_t path_count, fst_error *error) {
    publish_call *call = context;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = ask_publish(call, status, paths, path_count, error);
    bool is_published = answer == Py_None;
    if (answer == NULL) PyErr_WriteUnraisable(call->callable);
    if (!is_published && status == FST_OK) {
        const char *why = answer == NULL ? NULL : PyUnicode_AsUTF8AndSize(answer, NULL);
        *error = (fst_error){.status = FST_E_IO, .byte_offset = FST_NO_OFFSET};
        snprintf(error->message, sizeof error->message, "%s",
                 why == NULL ? "the set of files was not published" : why);
        status = FST_E_IO;
        PyErr_Clear();
    }
    Py_XDECREF(answer);
    Py_DECREF(call->callable);
    PyMem_Free(call);
    PyGILState_Release(gil);
    return is_published ? FST_OK : status;
}

/// Sets the options for a callable. The call frees what it needs; if it is never made, the caller
/// calls drop_publish().
static int set_publish(module_state *state, PyObject *callable, fst_async_options *options) {
    publish_call *call = PyMem_Malloc(sizeof *call);
    if (call == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    *call = (publish_call){Py_NewRef(callable), state};
    options->publish = call_publish;
    options->publish_context = call;
    return 1;
}

static void drop_publish(const fst_async_options *options) {
    publish_call *call = options->publish_context;
    if (call == NULL) return;
    Py_DECREF(call->callable);
    PyMem_Free(call);
}

static fst_async_save *begin_use(PyObject *self) {
    async_object *object = (async_object *)self;
    if (object->is_closed) {
        PyErr_SetString(fstpy_error_class(fstpy_state(Py_TYPE(self))), "AsyncSave is closed");
        return NULL;
    }
    if (object->save == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "AsyncSave is not started");
        return NULL;
    }
    object->uses++;
    return object->save;
}

static void close_unused(async_object *object) {
    fst_async_save *save = object->save;
    if (!object->is_closed || object->uses > 0) return;
    object->save = NULL;
    // Without the GIL, because closing may wait for a thread that needs it in ask_unchanged().
    Py_BEGIN_ALLOW_THREADS
    fst_async_save_close(save);
    Py_END_ALLOW_THREADS
    release_tensors(object);
}

static void end_use(PyObject *self) {
    ((async_object *)self)->uses--;
    close_unused((async_object *)self);
}

/// `settings`: (stage, overlap, threads, nice, memory, pool or None, callable or None that checks
/// whether tensors are unchanged, callable or None that publishes).
static int read_settings(module_state *state, PyObject *settings, fst_async_options *options,
                         async_object *object) {
    static const char *const stages[] = {"copy", "lazy", "none"};
    static const char *const overlaps[] = {"order", "supersede"};
    const char *stage, *overlap;
    PyObject *pool, *is_unchanged, *publish;
    unsigned long long memory;
    if (!PyArg_ParseTuple(settings, "ssIIKOOO", &stage, &overlap, &options->thread_count,
                          &options->nice, &memory, &pool, &is_unchanged, &publish))
        return 0;
    int stage_at = fstpy_find_word(stage, stages, FST_STAGE_COUNT, "stage");
    int overlap_at =
        stage_at < 0 ? -1 : fstpy_find_word(overlap, overlaps, FST_OVERLAP_COUNT, "overlap");
    if (overlap_at < 0) return 0;
    options->stage = (fst_stage)stage_at;
    options->overlap = (fst_overlap)overlap_at;
    options->memory_bytes = memory;
    options->start_timeout_ms = SIGNAL_CHECK_MS;
    if (pool != Py_None) {
        if (!PyObject_TypeCheck(pool, state->pool_type)) {
            PyErr_SetString(PyExc_TypeError, "pool must be a StagingPool");
            return 0;
        }
        options->pool = ((pool_object *)pool)->is_closed ? NULL : ((pool_object *)pool)->pool;
        if (options->pool == NULL) {
            PyErr_SetString(PyExc_ValueError, "the StagingPool is closed");
            return 0;
        }
    }
    if (is_unchanged != Py_None) {
        object->is_unchanged = Py_NewRef(is_unchanged);
        options->is_unchanged = ask_unchanged;
        options->context = object;
    }
    return publish == Py_None || set_publish(state, publish, options);
}

/// Starts the save with the GIL released. False with an exception.
static int start_save(PyObject *self, PyObject *settings, const char *path, save_request *request) {
    async_object *object = (async_object *)self;
    module_state *state = fstpy_state(Py_TYPE(self));
    fst_async_options options = {.struct_size = sizeof options, .save = &request->options};
    fst_async_save *save = NULL;
    fst_error error;
    fst_status status;
    if (!read_settings(state, settings, &options, object)) return 0;
    pool_object *pool = options.pool == NULL ? NULL : (pool_object *)PyTuple_GetItem(settings, 5);
    if (pool != NULL) pool->uses++; // another thread may close it meanwhile
    Py_BEGIN_ALLOW_THREADS
    status = fst_async_save_start(path, request->tensors, request->tensor_count, &options, &save,
                                  &error);
    Py_END_ALLOW_THREADS
    object->save = save;
    if (pool != NULL) {
        pool->uses--;
        close_unused_pool(pool);
    }
    if (status == FST_OK) return 1;
    drop_publish(&options);
    fstpy_raise(state, &error);
    return 0;
}

/// start(settings, path, rows, metadata, ...): the settings, then the arguments of Writer. The
/// object exists before, so that the program can cancel the save however this call ends.
static PyObject *async_start(PyObject *self, PyObject *args, PyObject *kwargs) {
    async_object *object = (async_object *)self;
    save_request request = {0};
    save_arguments arguments;
    PyObject *path = NULL, *settings = PyTuple_GetItem(args, 0);
    PyObject *rest = settings == NULL ? NULL : PyTuple_GetSlice(args, 1, PyTuple_Size(args));
    int is_started = 0;
    if (rest == NULL) return NULL;
    if (!PyTuple_Check(settings)) {
        PyErr_SetString(PyExc_TypeError, "settings must be a tuple");
    } else if (object->is_starting || object->is_closed) {
        PyErr_SetString(PyExc_RuntimeError, "AsyncSave can be started once");
    } else {
        object->is_starting = 1;
        object->uses++;
        if (fstpy_save_request_read(fstpy_state(Py_TYPE(self)), rest, kwargs, &arguments,
                                    &request) &&
            PyUnicode_FSConverter(arguments.path, &path)) {
            object->owners = Py_NewRef(arguments.owners);
            is_started = start_save(self, settings, PyBytes_AsString(path), &request);
        }
        if (!is_started) {
            release_tensors(object);
            object->is_starting = 0;
        }
        end_use(self);
    }
    Py_XDECREF(path);
    Py_DECREF(rest);
    fstpy_save_request_clear(&request);
    return is_started ? Py_NewRef(Py_None) : NULL;
}

static PyObject *async_is_started(PyObject *self, PyObject *none) {
    (void)none;
    const async_object *object = (async_object *)self;
    return PyBool_FromLong(object->save != NULL || object->is_closed);
}

static int async_traverse(PyObject *self, visitproc visit, void *arg) {
    async_object *object = (async_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(object->owners);
    Py_VISIT(object->is_unchanged);
    return 0;
}

static int async_clear(PyObject *self) {
    ((async_object *)self)->is_closed = 1;
    close_unused((async_object *)self);
    return 0;
}

static void async_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject *kind, *value, *trace;
    PyObject_GC_UnTrack(self);
    // Closing may copy the rest of a lazy save and call is_unchanged(), which Python can't run with
    // an exception set, such as the Ctrl-C that has dropped the last reference.
    PyErr_Fetch(&kind, &value, &trace);
    async_clear(self);
    release_tensors((async_object *)self);
    PyErr_Restore(kind, value, trace);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

typedef fst_status (*async_wait)(fst_async_save *save, int64_t timeout_ms, fst_error *error);

/// Waits in pieces, so that an exception of a signal handler ends the wait (not the save) and is
/// raised. Returns True, False at the timeout, or the error of the save.
static PyObject *wait_for(PyObject *self, PyObject *timeout_object, async_wait wait) {
    int64_t left = PyLong_AsLongLong(timeout_object);
    if (PyErr_Occurred()) return NULL;
    fst_async_save *save = begin_use(self);
    if (save == NULL) return NULL;
    fst_error error;
    fst_status status;
    int is_interrupted = 0;
    do {
        int64_t piece = left < 0 || left > SIGNAL_CHECK_MS ? SIGNAL_CHECK_MS : left;
        Py_BEGIN_ALLOW_THREADS
        status = wait(save, piece, &error);
        Py_END_ALLOW_THREADS
        is_interrupted = PyErr_CheckSignals() != 0;
        if (left > 0) left -= piece;
    } while (status == FST_E_TIMEOUT && left != 0 && !is_interrupted);
    PyObject *result = NULL;
    if (!is_interrupted && (status == FST_OK || status == FST_E_TIMEOUT))
        result = Py_NewRef(status == FST_OK ? Py_True : Py_False);
    else if (!is_interrupted)
        result = make_exception(fstpy_state(Py_TYPE(self)), &error);
    end_use(self);
    return result;
}

static PyObject *async_wait_end(PyObject *self, PyObject *timeout) {
    PyObject *result = wait_for(self, timeout, fst_async_save_wait);
    if (result != NULL && result != Py_False) release_tensors((async_object *)self);
    return result;
}

static PyObject *async_stage(PyObject *self, PyObject *timeout) {
    PyObject *result = wait_for(self, timeout, fst_async_save_stage);
    if (result == Py_True) release_tensors((async_object *)self);
    return result;
}

static PyObject *async_cancel(PyObject *self, PyObject *none) {
    (void)none;
    fst_async_save *save = begin_use(self);
    if (save == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_async_save_cancel(save);
    Py_END_ALLOW_THREADS
    end_use(self);
    Py_RETURN_NONE;
}

static PyObject *async_close(PyObject *self, PyObject *none) {
    (void)none;
    async_clear(self);
    Py_RETURN_NONE;
}

static PyObject *async_stats(PyObject *self, PyObject *none) {
    (void)none;
    static const char *const states[] = {"staging", "writing", "done", "failed"};
    static const char *const stages[] = {"copy", "lazy", "none"};
    fst_async_save *save = begin_use(self);
    if (save == NULL) return NULL;
    fst_error error;
    fst_async_stats s = {.struct_size = sizeof s};
    fst_status status;
    Py_BEGIN_ALLOW_THREADS
    status = fst_async_save_stats_get(save, &s, &error);
    Py_END_ALLOW_THREADS
    end_use(self);
    if (status != FST_OK) return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    if (s.state == FST_ASYNC_DONE || s.state == FST_ASYNC_FAILED)
        release_tensors((async_object *)self);
#define NUMBER(name) #name, (unsigned long long)s.name
    return Py_BuildValue("{s:s,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "state",
                         states[s.state], "stage", stages[s.stage], NUMBER(blocked_ns),
                         NUMBER(staged_ns), NUMBER(done_ns), NUMBER(bytes_total),
                         NUMBER(bytes_written), NUMBER(bytes_staged), NUMBER(memory_limit_bytes),
                         NUMBER(memory_peak_bytes), NUMBER(memory_wait_count),
                         NUMBER(memory_wait_ns), NUMBER(thread_count));
#undef NUMBER
}

static PyObject *async_writer_stats(PyObject *self, PyObject *none) {
    (void)none;
    fst_async_save *save = begin_use(self);
    if (save == NULL) return NULL;
    fst_error error;
    fst_save_stats s = {.struct_size = sizeof s};
    fst_status status = fst_async_save_writer_stats(save, &s, &error);
    end_use(self);
    if (status != FST_OK) return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return fstpy_save_stats(&s);
}

static PyMethodDef async_methods[] = {
    {"start", (PyCFunction)(void (*)(void))async_start, METH_VARARGS | METH_KEYWORDS,
     "Start the save; once."},
    {"is_started", async_is_started, METH_NOARGS, "Whether the save was started."},
    {"stage", async_stage, METH_O,
     "Wait until nothing reads the tensors any more. True; False: timeout; the save's error."},
    {"wait", async_wait_end, METH_O, "Wait for the end. True; False: timeout; the save's error."},
    {"cancel", async_cancel, METH_NOARGS,
     "Stop the save soon, unless its files are already published."},
    {"stats", async_stats, METH_NOARGS, "Statistics of the save."},
    {"writer_stats", async_writer_stats, METH_NOARGS, "Statistics of its writer."},
    {"close", async_close, METH_NOARGS, "Release the handle; the save continues."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot async_slots[] = {
    {Py_tp_dealloc, (void *)async_dealloc},
    {Py_tp_traverse, (void *)async_traverse},
    {Py_tp_clear, (void *)async_clear},
    {Py_tp_methods, async_methods},
    {Py_tp_doc, "A save that runs while the program goes on."},
    {0, NULL},
};

PyType_Spec fstpy_async_spec = {"fastsafetensors._core.AsyncSave", sizeof(async_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, async_slots};
