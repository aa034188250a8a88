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

static load_scope *scopes; ///< of all threads; protected by the GIL

static void count_fork(void) {
    atomic_fetch_add(&forks_seen, 1);
    scopes = NULL; // mostly of threads that the child lacks
}
static void register_fork_handlers(void) { (void)pthread_atfork(NULL, NULL, count_fork); }

void fstpy_loader_note_process(loader_object *object) {
    pthread_once(&fork_watch, register_fork_handlers);
    object->fork_count = atomic_load(&forks_seen);
}

static int is_of_this_process(const loader_object *object) {
    return object->fork_count == atomic_load_explicit(&forks_seen, memory_order_relaxed);
}

// ---- calls and callbacks that a thread is in ----

void fstpy_scope_enter(load_scope *scope, const void *load) {
    *scope = (load_scope){pthread_self(), load, scopes};
    scopes = scope;
}

void fstpy_scope_leave(const load_scope *scope) {
    load_scope **place = &scopes;
    while (*place != NULL && *place != scope) place = &(*place)->next;
    if (*place != NULL) *place = scope->next;
}

/// As fstpy_scope_enter(), for callers without memory for it. NULL with an exception.
static load_scope *new_scope(const void *load) {
    load_scope *scope = malloc(sizeof *scope);
    if (scope != NULL)
        fstpy_scope_enter(scope, load);
    else
        PyErr_NoMemory();
    return scope;
}

static void end_scope(load_scope *scope) {
    fstpy_scope_leave(scope);
    free(scope);
}

static int is_inside(pthread_t thread, const void *load) {
    const load_scope *scope = scopes;
    while (scope != NULL && (scope->load != load || !pthread_equal(scope->thread, thread)))
        scope = scope->next;
    return scope != NULL;
}

/// False if waiting for the end of the load would or could be a deadlock: this thread is in one of
/// its calls or callbacks, or it is in one of another load, and a thread in one of this load waits.
static int may_wait(const loader_object *object) {
    const void *memory = object->memory;
    int is_in_call = 0, must_not = 0;
    for (const load_scope *scope = scopes; scope != NULL; scope = scope->next) {
        if (scope->load == NULL) continue;
        int is_own = pthread_equal(scope->thread, pthread_self());
        is_in_call |= is_own;
        if (scope->load == object || scope->load == memory)
            must_not |= is_own || is_inside(scope->thread, NULL);
    }
    return !is_in_call || !must_not;
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

/// The load is not freed, and its memory stays.
static void keep_load(loader_object *object) {
    fst_loader *loader = object->loader;
    object->loader = NULL;
    fstpy_memory_ref(object->memory);
    fstpy_cancel(loader);
}

/// For a thread that may not wait. Without a thread that waits instead, a later close() frees the
/// load; if no reference is left for that, the cancelled load and its memory stay.
static void leave_load(loader_object *object) {
    int is_referenced = Py_REFCNT((PyObject *)object) > 0;
    if (!close_later(object, is_referenced) && !is_referenced) keep_load(object);
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
    if (object->memory != NULL && fstpy_is_ending()) {
        keep_load(object); // its threads may wait for the GIL for ever
        return;
    }
    object->loader = NULL;
    object->is_being_freed = 1;
    fstpy_scope_enter(&object->freeing, NULL);
    Py_BEGIN_ALLOW_THREADS
    fst_loader_close(loader);
    Py_END_ALLOW_THREADS
    fstpy_scope_leave(&object->freeing);
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
    load_scope *wait = new_scope(NULL);
    if (wait == NULL) return 0;
    for (;;) {
        close_unused(object);
        int is_freed = object->loader == NULL && !object->is_being_freed;
        if (is_freed || !is_of_this_process(object) || fstpy_is_ending()) break;
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&interval, NULL);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0) {
            is_good = 0;
            break;
        }
    }
    end_scope(wait);
    return is_good;
}

// ---- calls ----

fst_loader *fstpy_begin_use(PyObject *self, load_scope **scope) {
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
    *scope = new_scope(object);
    if (*scope == NULL) return NULL;
    object->uses++;
    return object->loader;
}

fst_loader *fstpy_begin_wait(PyObject *self, load_scope **scope) {
    const void *memory = ((loader_object *)self)->memory;
    if (memory == NULL || !is_inside(pthread_self(), memory)) return fstpy_begin_use(self, scope);
    PyErr_SetString(
        PyExc_RuntimeError,
        "a load's allocator, and objects that the load frees, cannot wait for the load");
    return NULL;
}

void fstpy_end_use(PyObject *self, load_scope *scope) {
    loader_object *object = (loader_object *)self;
    end_scope(scope);
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
    load_scope *scope;
    fst_loader *loader = fstpy_begin_use(self, &scope);
    if (loader == NULL) return NULL;
    fstpy_cancel(loader);
    fstpy_end_use(self, scope);
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
