// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of a fake driver: function names in CUDA's or (FAKE_HIP) HIP's spelling,
/// results, and the current device of the thread.
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "fake_numbers.h"
#include "fake_stream.h"

#if defined(FAKE_HIP)
#define FUNCTION(cuda, hip) __attribute__((visibility("default"))) int hip
#else
#define FUNCTION(cuda, hip) __attribute__((visibility("default"))) int cuda
#endif

enum {
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_VALUE = 1,
    NO_DEVICE = 100,
    NOT_REGISTERED = 713
};
enum { INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
/// A code that no driver has a text for.
enum { UNKNOWN_CODE = 12345 };
enum { DEVICE_COUNT_MAX = 16, CONTEXT_DEPTH_MAX = 16 };

/// The device that calls of this thread use; -1: no device (HIP's threads always have one).
int fake_current_device(void);
/// The thread has loaded a module.
extern _Thread_local bool fake_loaded_module;
/// The process that started the driver: others must not use it.
bool fake_is_owner(void);

#define BEGIN(function)                                                                            \
    do {                                                                                           \
        int begin_code = fake_call_begin(function);                                                \
        if (begin_code == NOTHING) return 0;                                                       \
        if (begin_code != 0) return begin_code;                                                    \
    } while (0)
#define BEGIN_IN_CONTEXT(function)                                                                 \
    BEGIN(function);                                                                               \
    if (fake_current_device() < 0) return INVALID_CONTEXT;                                         \
    if (!fake_is_owner()) return NOT_INITIALIZED

#define END_IN_CONTEXT(function)                                                                   \
    do {                                                                                           \
        int end_code = fake_call_end(function);                                                    \
        if (end_code != 0) return end_code;                                                        \
    } while (0);                                                                                   \
    if (fake_current_device() < 0) return INVALID_CONTEXT;                                         \
    if (!fake_is_owner()) return NOT_INITIALIZED

#endif
