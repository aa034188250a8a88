// SPDX-License-Identifier: Apache-2.0
/// Calls of a Loader by several threads, and its close, which waits for them.
#include "loader_object.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

/// Interval at which close() looks whether other threads have left the load.
#define CLOSE_CHECK_NS 1000000

/// Number of forks since the first process.
static atomic_uint forks_seen;
static pthread_once_t fork_watch = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks_seen, 1); }
static void register_fork_handlers(void) { (void)pthread_atfork(NULL, NULL, count_fork); }

void fstpy_loader_note_process(loader_object *object) {
    pthread_once(&fork_watch, register_fork_handlers);
    object->fork_count = atomic_load(&forks_seen);
}

static int is_of_this_process(const loader_object *object) {
    return object->fork_count == atomic_load_explicit(&forks_seen, memory_order_relaxed);
}

// ---- calls and callbacks that a thread is in ----

static _Thread_local load_scope *innermost;

void fstpy_scope_enter(load_scope *scope, int *waits) {
    *scope = (load_scope){waits, innermost};
    innermost = scope;
}

/// Not always the innermost: a program may switch between stacks within a thread.
void fstpy_scope_leave(const load_scope *scope) {
    load_scope **place = &innermost;
    while (*place != NULL && *place != scope) place = &(*place)->outer;
    if (*place != NULL) *place = scope->outer;
}

static int is_inside(const int *waits) {
    const load_scope *scope = innermost;
    while (scope != NULL && scope->waits != waits) scope = scope->outer;
    return waits != NULL && scope != NULL;
}

/// Begins (1) or ends (-1) a wait, which also delays the loads in whose calls this thread is.
static void count_wait(int step) {
    for (load_scope *scope = innermost; scope != NULL; scope = scope->outer) *scope->waits += step;
}

/// False if waiting for the end of the load would or could be a deadlock: this thread is in one of
/// its calls or callbacks, or it is in one of another load, and a thread in one of this load waits.
static int may_wait(const loader_object *object) {
    const int *waits = fstpy_memory_waits(object->memory);
    if (innermost == NULL) return 1;
    if (is_inside(&object->waits) || is_inside(waits)) return 0;
    return object->waits == 0 && (waits == NULL || *waits == 0);
}

// ---- closing ----

/// A load that a separate thread closes.
typedef struct abandoned_load {
    fst_loader *loader;
    load_counts *counts;
    caller_memory *memory; ///< or NULL; a reference
    loader_object *object; ///< or NULL; a reference
} abandoned_load;

static void *close_abandoned(void *argument) {
    abandoned_load *load = argument;
    fst_loader_close(load->loader);
    if ((load->memory != NULL || load->object != NULL) && Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        if (load->object != NULL) load->object->is_being_freed = 0;
        fstpy_memory_finish(load->memory);
        fstpy_memory_unref(load->memory);
        Py_XDECREF((PyObject *)load->object);
        PyGILState_Release(gil);
    }
    free(load->counts);
    free(load);
    return NULL;
}

/// Cancels the load, and starts a thread that waits for reads in flight and closes it. If
/// `can_await`, await_end() waits for that thread. False if the thread could not be started.
static int close_later(loader_object *object, int can_await) {
    fst_loader *loader = object->loader;
    object->loader = NULL; // other threads must not close it meanwhile
    object->is_being_freed = 1;
    fstpy_cancel(loader);
    pthread_t thread;
    abandoned_load *load = malloc(sizeof *load);
    int is_started = 0;
    if (load != NULL) {
        *load = (abandoned_load){loader, object->counts, object->memory, can_await ? object : NULL};
        fstpy_memory_ref(load->memory);
        Py_XINCREF((PyObject *)load->object);
        is_started = pthread_create(&thread, NULL, close_abandoned, load) == 0;
    }
    if (is_started) {
        (void)pthread_detach(thread);
        object->counts = NULL;
        if (!can_await) object->is_being_freed = 0;
        return 1;
    }
    if (load != NULL) {
        fstpy_memory_unref(load->memory);
        Py_XDECREF((PyObject *)load->object);
    }
    free(load);
    object->loader = loader;
    object->is_being_freed = 0;
    return 0;
}

/// Closes without waiting, unless memory of the caller could be written to after this call returns.
static int abandon_load(loader_object *object) {
    return !object->has_destinations && object->memory == NULL && close_later(object, 0);
}

/// For a thread that may not wait. Without a thread that waits instead, a later close() frees the
/// load; if no reference is left for that, the cancelled load and its memory stay.
static void leave_load(loader_object *object) {
    int is_referenced = Py_REFCNT((PyObject *)object) > 0;
    if (close_later(object, is_referenced) || is_referenced) return;
    fstpy_memory_ref(object->memory);
    object->loader = NULL;
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
    if (!may_wait(object)) {
        leave_load(object);
        return;
    }
    object->loader = NULL;
    object->is_being_freed = 1;
    count_wait(1);
    Py_BEGIN_ALLOW_THREADS
    fst_loader_close(loader);
    Py_END_ALLOW_THREADS
    count_wait(-1);
    object->is_being_freed = 0;
    free(object->counts);
    object->counts = NULL;
    fstpy_memory_finish(object->memory); // the callable may refer to this object
}

/// Waits until the load is freed, by this thread or another. False with the exception of a signal
/// handler; the load is then freed by the last call that leaves it.
static int await_end(loader_object *object) {
    const struct timespec interval = {.tv_nsec = CLOSE_CHECK_NS};
    int is_good = 1;
    count_wait(1);
    for (;;) {
        close_unused(object);
        int is_freed = object->loader == NULL && !object->is_being_freed;
        if (is_freed || !is_of_this_process(object)) break;
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&interval, NULL);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0) {
            is_good = 0;
            break;
        }
    }
    count_wait(-1);
    return is_good;
}

// ---- calls ----

fst_loader *fstpy_begin_use(PyObject *self, load_scope *scope) {
    loader_object *object = (loader_object *)self;
    module_state *state = fstpy_state(Py_TYPE(self));
    if (object->is_closed) {
        PyErr_SetString(fstpy_error_class(state), "Loader is closed");
        return NULL;
    }
    if (!is_of_this_process(object)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this load began before fork() and only continues in the parent process. "
                        "Begin a new one");
        return NULL;
    }
    object->uses++;
    fstpy_scope_enter(scope, &object->waits);
    return object->loader;
}

fst_loader *fstpy_begin_wait(PyObject *self, load_scope *scope) {
    if (!is_inside(fstpy_memory_waits(((loader_object *)self)->memory)))
        return fstpy_begin_use(self, scope);
    PyErr_SetString(
        PyExc_RuntimeError,
        "a load's allocator, and objects that the load frees, cannot wait for the load");
    return NULL;
}

void fstpy_end_use(PyObject *self, load_scope *scope) {
    loader_object *object = (loader_object *)self;
    fstpy_scope_leave(scope);
    object->uses--;
    close_unused(object);
}

/// Without the GIL, because a thread of the load may wait for it (in an allocator) while holding
/// the load's lock.
void fstpy_cancel(fst_loader *loader) {
    Py_BEGIN_ALLOW_THREADS
    fst_loader_cancel(loader);
    Py_END_ALLOW_THREADS
}

PyObject *fstpy_loader_cancel(PyObject *self, PyObject *none) {
    (void)none;
    load_scope scope;
    fst_loader *loader = fstpy_begin_use(self, &scope);
    if (loader == NULL) return NULL;
    fstpy_cancel(loader);
    fstpy_end_use(self, &scope);
    Py_RETURN_NONE;
}

/// Ends the calls of other threads soon, and lets no more begin.
static void stop_calls(loader_object *object) {
    if (!object->is_closed && object->uses > 0 && is_of_this_process(object)) {
        object->uses++; // other threads may end their calls, and close, meanwhile
        fstpy_cancel(object->loader);
        object->uses--;
    }
    object->is_closed = 1;
}

PyObject *fstpy_loader_close(PyObject *self, PyObject *none) {
    (void)none;
    loader_object *object = (loader_object *)self;
    stop_calls(object);
    if (!may_wait(object))
        close_unused(object);
    else if (!await_end(object))
        return NULL;
    Py_RETURN_NONE;
}

/// For callers that cannot wait: after Ctrl-C, reads in flight may take long.
PyObject *fstpy_loader_abandon(PyObject *self, PyObject *none) {
    loader_object *object = (loader_object *)self;
    object->was_interrupted = 1;
    if (object->has_destinations || object->memory != NULL) return fstpy_loader_close(self, none);
    stop_calls(object);
    close_unused(object);
    Py_RETURN_NONE;
}

void fstpy_loader_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((loader_object *)self)->is_closed = 1;
    close_unused((loader_object *)self);
    fstpy_memory_unref(((loader_object *)self)->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}
