// SPDX-License-Identifier: Apache-2.0
/// Loads libzstd once per process, or uses the built-in one (meson's zstd_source), as wheels do.
#include "zstd_library.h"

static atomic_bool is_searched;
static zstd_library library;
static bool is_found;
static const char *missing; ///< a function that an old version lacks

#if defined(FSTI_ZSTD_WITHIN)
#define ZSTD_WITHIN(result, name, parameters) result name parameters;
ZSTD_FUNCTIONS(ZSTD_WITHIN)
#undef ZSTD_WITHIN

static void find_library(void) {
#define ZSTD_WITHIN(result, name, parameters) library.name = name;
    ZSTD_FUNCTIONS(ZSTD_WITHIN)
#undef ZSTD_WITHIN
    is_found = true;
}
#else
static void find_library(void) {
    static const char *const names[] = {"libzstd.so.1", "libzstd.so", NULL};
#define ZSTD_SYMBOL(result, name, parameters) {#name, &library.name},
    static const fsti_library_symbol symbols[] = {ZSTD_FUNCTIONS(ZSTD_SYMBOL){NULL, NULL}};
#undef ZSTD_SYMBOL
    is_found = fsti_library_bind(names, symbols, &missing);
}
#endif

fst_status fsti_zstd_open(const zstd_library **out, fst_error *error) {
    fsti_library_once(&is_searched, find_library);
    *out = &library;
    if (is_found) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "compressed tensors need libzstd 1.4 or later (install libzstd1, or "
                          "libzstd), which was not found%s%s",
                          missing == NULL ? "" : ", or too old: it lacks ",
                          missing == NULL ? "" : missing);
}
