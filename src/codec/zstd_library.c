// SPDX-License-Identifier: Apache-2.0
/// Loads libzstd once per process, or uses the built-in one (meson's zstd_source), as wheels do.
#include "zstd_library.h"

static zstd_library library;

#if defined(FSTI_ZSTD_WITHIN)
#define ZSTD_WITHIN(result, name, parameters) result name parameters;
ZSTD_FUNCTIONS(ZSTD_WITHIN)
#undef ZSTD_WITHIN

static fsti_library_state find_library(char *reason, size_t reason_size) {
#define ZSTD_WITHIN(result, name, parameters) library.name = name;
    ZSTD_FUNCTIONS(ZSTD_WITHIN)
#undef ZSTD_WITHIN
    (void)reason;
    (void)reason_size;
    return FSTI_LIBRARY_FOUND;
}
#else
static fsti_library_state find_library(char *reason, size_t reason_size) {
    static const char *const names[] = {"libzstd.so.1", "libzstd.so", NULL};
#define ZSTD_SYMBOL(result, name, parameters) {#name, &library.name},
    static const fsti_library_symbol symbols[] = {ZSTD_FUNCTIONS(ZSTD_SYMBOL){NULL, NULL}};
#undef ZSTD_SYMBOL
    return fsti_library_bind(names, symbols, reason, reason_size);
}
#endif

static fsti_library optional = {
    .need = "compressed tensors need libzstd 1.4 or later (install libzstd1, or libzstd)",
    .find = find_library};

fst_status fsti_zstd_open(const zstd_library **out, fst_error *error) {
    *out = &library;
    return fsti_library_require(&optional, error);
}
