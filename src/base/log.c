// SPDX-License-Identifier: Apache-2.0
/// Log lines to the program's callback.
#include <sched.h>
#include <stdio.h>

#include "primitives.h"

#define LINE_BYTES_MAX 1024
/// Retries of a reader that races with a change. After that the line is dropped, so that no thread
/// can hang, not even in a child forked in the middle of a change.
#define READ_TRIES_MAX 1000

/// Retries of a writer, with the same reason. Four stores never take this long.
#define CHANGE_TRIES_MAX 100000

/// The current callback. Writers make `change` odd while they update it (a sequence lock), so
/// readers need no lock: a load must not wait for another load's log line.
static struct {
    atomic_uint change;
    _Atomic(fst_log_callback) callback;
    _Atomic(void *) context;
    atomic_int level;
} target;

void fsti_log_set(fst_log_callback callback, void *context, fst_log_level level) {
    unsigned change = atomic_load(&target.change);
    // If the number stays odd, the writer was in a thread that does not exist after fork().
    for (unsigned tries = 0; tries < CHANGE_TRIES_MAX; tries++) {
        if (change % 2 == 0 && atomic_compare_exchange_weak(&target.change, &change, change + 1))
            break;
        sched_yield();
        change = atomic_load(&target.change);
    }
    change &= ~1u;
    atomic_store(&target.callback, callback);
    atomic_store(&target.context, context);
    atomic_store(&target.level, (int)level);
    atomic_store(&target.change, change + 2);
}

/// The callback for lines of that level, or NULL.
static fst_log_callback find_target(fst_log_level level, void **context) {
    for (unsigned tries = 0; tries < READ_TRIES_MAX; tries++) {
        unsigned change = atomic_load(&target.change);
        fst_log_callback callback = atomic_load(&target.callback);
        *context = atomic_load(&target.context);
        bool wanted = (int)level <= atomic_load(&target.level);
        if (change % 2 == 0 && change == atomic_load(&target.change))
            return wanted ? callback : NULL;
    }
    return NULL;
}

bool fsti_log_wants(fst_log_level level) {
    void *context;
    return find_target(level, &context) != NULL;
}

void fsti_log(fst_log_level level, const char *format, ...) {
    void *context;
    fst_log_callback callback = find_target(level, &context);
    if (callback == NULL) return;
    char line[LINE_BYTES_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fsti_text_make_printable(line);
    callback(context, level, line);
}
