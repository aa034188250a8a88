// SPDX-License-Identifier: Apache-2.0
/// Argument checks shared by the public functions.
#ifndef FSTI_API_CHECK_H
#define FSTI_API_CHECK_H

#include "base/primitives.h"
#include "fastsafetensors/device.h"

#define API_REQUIRE(condition, error, ...)                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return fsti_error_set((error), FST_E_ARGUMENT, FSTI_NO_LOCATION, __VA_ARGS__);         \
    } while (0)

/// Checks the path of a folder or file to work on. An empty one would become "/" as the beginning
/// of a longer path.
#define API_REQUIRE_PATH(path, name, error)                                                        \
    do {                                                                                           \
        API_REQUIRE((path) != NULL, error, "%s is NULL", name);                                    \
        API_CHECK_PATH(path, name, error);                                                         \
    } while (0)
/// Checks a path that may be NULL.
#define API_CHECK_PATH(path, name, error)                                                          \
    do {                                                                                           \
        if ((path) != NULL && (path)[0] == '\0')                                                   \
            return fsti_error_set((error), FST_E_NOT_FOUND, FSTI_NO_LOCATION,                      \
                                  "%s is an empty path", name);                                    \
    } while (0)

/// Checks a field that is 0 or 1. Other values may get a meaning in a later version.
#define API_REQUIRE_SWITCH(value, name, error)                                                     \
    API_REQUIRE((value) == 0 || (value) == 1, error, "%s is %d; expected 0 or 1", name, (value))

/// Defers cancellation of the calling thread until the function returns, because waits inside it
/// hold locks and own memory. (pthread_setcancelstate(3))
#define API_DEFER_CANCEL                                                                           \
    __attribute__((unused, cleanup(api_restore_cancel))) int api_cancel_state = api_disable_cancel()
static inline int api_disable_cancel(void) {
    int old;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old);
    return old;
}
static inline void api_restore_cancel(const int *old) {
    int unused;
    pthread_setcancelstate(*old, &unused);
}

/// Copies a caller's struct, possibly of another version, into `size` bytes. Fields unknown to the
/// caller become zero; fields unknown to the library must be zero.
fst_status fsti_api_copy_struct(void *target, size_t size, const void *source, size_t source_size,
                                fst_error *error);

/// Checks that a caller's struct_size can be the size of a struct.
fst_status fsti_api_check_size(size_t size, fst_error *error);
/// Copies `full` (the current version, `full_size` bytes) to a caller's struct of `size` bytes:
/// truncated, or with zeros for fields that this version lacks. struct_size becomes the caller's
/// again.
fst_status fsti_api_give_struct(void *target, size_t size, const void *full, size_t full_size,
                                fst_error *error);

/// Checks the kind of a device, and that an index for the CPU is 0, or -1 as for any device.
fst_status fsti_api_check_device(fst_device device, fst_error *error);

/// Whether a sharded model may have that file name stem; NULL: the default.
fst_status fsti_api_check_stem(const char *stem, fst_error *error);

/// The size of a text in a struct of the caller: 0 (the default) or SIZE_MAX: it is NUL-terminated.
size_t fsti_api_text_size(const char *text, size_t size);
/// Copies element `index` of a caller's array of structs that begin with struct_size to `size`
/// bytes, as fsti_api_copy_struct() does. The first element has the size of all.
fst_status fsti_api_copy_element(void *target, size_t size, const void *elements, size_t index,
                                 fst_error *error);

#endif
