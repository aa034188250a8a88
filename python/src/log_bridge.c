// SPDX-License-Identifier: Apache-2.0
/// Connects the library's log to Python's logging.
///
/// Lines come from any thread, possibly while locks of the library are held, so the callback never
/// waits for the GIL but queues the line. The package forwards queued lines when a call that opens,
/// loads or saves files starts, and when it ends: never between two bytecodes of other code, which
/// may hold a lock that a log handler needs.
#include "module.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define LINE_COUNT_MAX 64
#define LINE_BYTES_MAX 1024

typedef struct log_line {
    int level;
    char text[LINE_BYTES_MAX];
} log_line;

static struct {
    pthread_mutex_t lock; ///< protects the fields below; never held while Python code runs
    bool is_on;
    size_t first, count, lost_count;
    log_line lines[LINE_COUNT_MAX];
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER};
static PyObject *emit; ///< protected by the GIL: called with (level, text)
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/// Removes the first line of the queue. False if the queue is empty.
static bool take_line(log_line *out) {
    pthread_mutex_lock(&queue.lock);
    bool found = queue.count > 0, lost = !found && queue.lost_count > 0;
    if (found) {
        *out = queue.lines[queue.first];
        queue.first = (queue.first + 1) % LINE_COUNT_MAX;
        queue.count--;
    } else if (lost) {
        out->level = FST_LOG_WARNING;
        snprintf(out->text, sizeof out->text, "%zu log lines were lost", queue.lost_count);
        queue.lost_count = 0;
    }
    pthread_mutex_unlock(&queue.lock);
    return found || lost;
}

/// Passes all lines to Python. -1 with the exception of a signal handler.
static int drain(void) {
    log_line line;
    while (emit != NULL && take_line(&line)) {
        PyObject *text = PyUnicode_DecodeUTF8(line.text, (Py_ssize_t)strlen(line.text), "replace");
        PyObject *function = Py_NewRef(emit);
        PyObject *done =
            text == NULL ? NULL : PyObject_CallFunction(function, "iO", line.level, text);
        Py_XDECREF(text);
        if (done == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
            Py_DECREF(function);
            return -1;
        }
        if (done == NULL) PyErr_WriteUnraisable(function);
        Py_DECREF(function);
        Py_XDECREF(done);
    }
    return 0;
}

/// The library's callback.
static void put_line(void *context, fst_log_level level, const char *text) {
    (void)context;
    pthread_mutex_lock(&queue.lock);
    if (queue.is_on && queue.count < LINE_COUNT_MAX) {
        log_line *line = &queue.lines[(queue.first + queue.count++) % LINE_COUNT_MAX];
        line->level = (int)level;
        snprintf(line->text, sizeof line->text, "%s", text);
    } else if (queue.is_on)
        queue.lost_count++;
    pthread_mutex_unlock(&queue.lock);
}

/// A forked child logs nothing, because the lock may be held by a thread that does not exist there.
static void clear_queue(void) {
    pthread_mutex_init(&queue.lock, NULL);
    queue.is_on = false;
    queue.count = queue.lost_count = 0;
    fst_log_set(NULL, NULL, FST_LOG_WARNING);
}

static void register_fork_handlers(void) { (void)pthread_atfork(NULL, NULL, clear_queue); }

static void switch_queue(bool is_on) {
    pthread_mutex_lock(&queue.lock);
    queue.is_on = is_on;
    if (!is_on) queue.count = queue.lost_count = 0;
    pthread_mutex_unlock(&queue.lock);
}

PyObject *fstpy_log_start(PyObject *module, PyObject *args) {
    PyObject *function;
    int level;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi:log_start", &function, &level)) return NULL;
    if (!fstpy_is_main_interpreter()) return NULL;
    if (level < FST_LOG_WARNING || level > FST_LOG_DEBUG) {
        PyErr_SetString(PyExc_ValueError, "the level must be 0, 1 or 2");
        return NULL;
    }
    pthread_once(&fork_once, register_fork_handlers);
    PyObject *before = emit;
    emit = Py_NewRef(function);
    Py_XDECREF(before);
    switch_queue(true);
    fst_log_set(put_line, NULL, (fst_log_level)level);
    Py_RETURN_NONE;
}

PyObject *fstpy_log_stop(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    if (drain() != 0) return NULL;
    fst_log_set(NULL, NULL, FST_LOG_WARNING);
    switch_queue(false);
    Py_CLEAR(emit);
    Py_RETURN_NONE;
}

PyObject *fstpy_log_drain(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    if (drain() != 0) return NULL;
    Py_RETURN_NONE;
}
