// SPDX-License-Identifier: Apache-2.0
/// Optional libraries, loaded at run time into a table of functions.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "primitives.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local bool is_loading;

/// False in a child that a library's initialisation has forked, whose only thread holds the lock.
static bool begin_loading(void) {
    if (is_loading) return false;
    pthread_mutex_lock(&lock);
    is_loading = true;
    return true;
}

static void end_loading(void) {
    is_loading = false;
    pthread_mutex_unlock(&lock);
}

void fsti_library_once(atomic_bool *is_loaded, void (*load)(void)) {
    if (atomic_load_explicit(is_loaded, memory_order_acquire)) return;
    bool must_end = begin_loading();
    if (!must_end || !atomic_load(is_loaded)) load();
    atomic_store(is_loaded, true);
    if (must_end) end_loading();
}

fst_status fsti_library_require(fsti_library *library, fst_error *error) {
    if (atomic_load_explicit(&library->state, memory_order_acquire) == FSTI_LIBRARY_FOUND)
        return FST_OK;
    bool must_end = begin_loading();
    fst_status status = FST_OK;
    if (atomic_load(&library->state) == FSTI_LIBRARY_UNKNOWN)
        atomic_store(&library->state, library->find(library->reason, sizeof library->reason));
    if (atomic_load(&library->state) != FSTI_LIBRARY_FOUND)
        status = fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION, "%s%s", library->need,
                                library->reason);
    if (must_end) end_loading();
    return status;
}

bool fsti_library_is_loading(void) { return is_loading; }
void fsti_library_set_loading(bool loads) { is_loading = loads; }
void fsti_library_before_fork(void) { pthread_mutex_lock(&lock); }
void fsti_library_after_fork(void) { pthread_mutex_unlock(&lock); }

static bool bind_symbols(void *handle, const fsti_library_symbol *symbols, const char **missing) {
    for (; symbols->name != NULL; symbols++) {
        void *symbol = dlsym(handle, symbols->name);
        if (symbol == NULL) {
            *missing = symbols->name;
            return false;
        }
        // POSIX guarantees that an object pointer from dlsym() can be used as a function pointer.
        memcpy(symbols->field, &symbol, sizeof symbol);
    }
    return true;
}

fsti_library_state fsti_library_bind(const char *const *names, const fsti_library_symbol *symbols,
                                     char *reason, size_t reason_size) {
    fsti_library_state state = FSTI_LIBRARY_ABSENT;
    snprintf(reason, reason_size, ", which was not found");
    for (; *names != NULL; names++) {
        // Bare names are searched in system folders only, never in the current one. RTLD_LAZY,
        // because libcurl has thirty dependencies, and resolving all their symbols takes longer
        // than loading a small model.
        void *handle = dlopen(*names, RTLD_LAZY | RTLD_LOCAL);
        const char *missing, *text = handle == NULL ? dlerror() : NULL;
        if (handle == NULL) {
            // dlopen() has no error number, but its text ends with that of the failed call.
            if (text != NULL && strstr(text, strerror(ENOENT)) == NULL) {
                snprintf(reason, reason_size, ", which could not be loaded: %s", text);
                state = FSTI_LIBRARY_UNKNOWN;
            }
            continue;
        }
        if (bind_symbols(handle, symbols, &missing)) return FSTI_LIBRARY_FOUND;
        if (state == FSTI_LIBRARY_ABSENT)
            snprintf(reason, reason_size, ", which was not found, or too old: it lacks %s",
                     missing);
        dlclose(handle);
    }
    return state;
}
