// SPDX-License-Identifier: Apache-2.0
/// The log of decisions: to the program's callback, or to nobody.
#include <sched.h>
#include <stdio.h>

#include "base.h"

#define LINE_BYTES_MAX 1024
/// A reader gives up after so many meetings with a change: a line is lost, nobody hangs, not even
/// in a child that was forked in the middle of one.
#define READ_TRIES_MAX 1000

/// Likewise who changes it: nobody takes so long for four stores.
#define CHANGE_TRIES_MAX 100000

/// Where lines go. Written as a whole under `change` (odd while it is being written), read without
/// a lock: a load must not wait for another one's log.
static struct {
    atomic_uint change;
    _Atomic(fst_log_callback) callback;
    _Atomic(void *) context;
    atomic_int level;
} target;

void fsti_log_set(fst_log_callback callback, void *context, fst_log_level level) {
    unsigned change = atomic_load(&target.change);
    // An odd number that stays is of a thread that this process was forked without.
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

/// The callback for lines of that level; NULL: nobody wants them.
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
