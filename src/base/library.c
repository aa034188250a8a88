// SPDX-License-Identifier: Apache-2.0
/// Optional libraries, loaded at run time into a table of functions.
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "primitives.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local bool is_loading;

void fsti_library_once(atomic_bool *is_loaded, void (*load)(void)) {
    if (atomic_load_explicit(is_loaded, memory_order_acquire)) return;
    if (is_loading) { // in a child that `load` has forked, whose only thread holds the lock
        load();
        atomic_store(is_loaded, true);
        return;
    }
    pthread_mutex_lock(&lock);
    is_loading = true;
    if (!atomic_load(is_loaded)) load();
    atomic_store(is_loaded, true);
    is_loading = false;
    pthread_mutex_unlock(&lock);
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

bool fsti_library_bind(const char *const *names, const fsti_library_symbol *symbols,
                       const char **missing) {
    for (; *names != NULL; names++) {
        // Bare names are searched in system folders only, never in the current one. RTLD_LAZY,
        // because libcurl has thirty dependencies, and resolving all their symbols takes longer
        // than loading a small model.
        void *handle = dlopen(*names, RTLD_LAZY | RTLD_LOCAL);
        if (handle == NULL) continue;
        if (bind_symbols(handle, symbols, missing)) return true;
        dlclose(handle);
    }
    return false;
}
