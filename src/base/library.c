// SPDX-License-Identifier: Apache-2.0
/// Libraries that are found at run time: a table of functions is filled, or the library is done
/// without.
#include <dlfcn.h>
#include <string.h>

#include "base.h"

static bool bind_symbols(void *handle, const fsti_library_symbol *symbols, const char **missing) {
    for (; symbols->name != NULL; symbols++) {
        void *symbol = dlsym(handle, symbols->name);
        if (symbol == NULL) {
            *missing = symbols->name;
            return false;
        }
        // A pointer to an object becomes one to a function, as POSIX promises for dlsym's results.
        memcpy(symbols->field, &symbol, sizeof symbol);
    }
    return true;
}

bool fsti_library_bind(const char *const *names, const fsti_library_symbol *symbols,
                       const char **missing) {
    for (; *names != NULL; names++) {
        // Bare names: the system's own folders, never the current one. Bound as functions are
        // called, as in programs that link these libraries: libcurl brings thirty more, and to
        // bind all that they might call takes longer than a small model on its way.
        void *handle = dlopen(*names, RTLD_LAZY | RTLD_LOCAL);
        if (handle == NULL) continue;
        if (bind_symbols(handle, symbols, missing)) return true;
        dlclose(handle);
    }
    return false;
}
