// SPDX-License-Identifier: Apache-2.0
#include "fake_numbers.h"

#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_gpu.h"

#define EXPORT __attribute__((visibility("default")))

enum { DEINITIALIZED = 4, CAPTURE_UNSUPPORTED = 900, CAPTURE_RELAXED = 2, HANGS = -78 };

typedef struct number {
    const char *name;
    atomic_long value;
} number;

static number numbers[NUMBER_COUNT] = {
#define FAKE_ROW(identifier, name, value) [identifier] = {name, value},
    FAKE_NUMBERS(FAKE_ROW)
#undef FAKE_ROW
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char fail_function[64];
static _Thread_local int capture_mode; // 0: global, as every thread begins

long fake_number(int index) { return atomic_load(&numbers[index].value); }
void fake_number_set(int index, long value) { atomic_store(&numbers[index].value, value); }
long fake_number_add(int index, long value) {
    return atomic_fetch_add(&numbers[index].value, value);
}
void fake_number_or(int index, long bits) { atomic_fetch_or(&numbers[index].value, bits); }

static number *find_number(const char *name) {
    for (int i = 0; i < NUMBER_COUNT; i++)
        if (strcmp(numbers[i].name, name) == 0) return &numbers[i];
    fprintf(stderr, "fake GPU: no number is called %s\n", name);
    abort();
}

EXPORT void fake_gpu_set(const char *name, long value) {
    atomic_store(&find_number(name)->value, value);
}

EXPORT void fake_gpu_fail(const char *function, long nth, long code) {
    pthread_mutex_lock(&lock);
    snprintf(fail_function, sizeof fail_function, "%s", function == NULL ? "" : function);
    pthread_mutex_unlock(&lock);
    fake_number_set(FAIL_CODE, code);
    fake_number_set(FAIL_AT, nth);
}

long fake_depth(void);

EXPORT long fake_gpu_get(const char *name) {
    if (strcmp(name, "depth") == 0) return fake_depth();
    if (strcmp(name, "last_error") == 0) return fake_last_error();
    if (strcmp(name, "fail_left") == 0) return fake_number(FAIL_AT);
    return atomic_load(&find_number(name)->value);
}

void fake_numbers_read(void) {
    for (int i = 0; i < NUMBER_COUNT; i++) {
        char name[64] = "FAKE_GPU_";
        for (size_t k = 0; numbers[i].name[k] != '\0'; k++)
            name[9 + k] = (char)toupper(numbers[i].name[k]);
        const char *value = getenv(name);
        if (value != NULL) atomic_store(&numbers[i].value, atol(value));
    }
}

void fake_sleep_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    if (us > 0) nanosleep(&time, NULL);
}

void fake_capture_exchange(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
}

/// Calls that end a capture anywhere in the process, made by a thread whose mode is not relaxed:
/// those that may wait for the device, or that make or unmake what a graph may use.
static bool is_unsafe(const char *function) {
    static const char *const names[] = {
        "cuMemAlloc",       "cuMemFree",           "cuMemHostRegister",   "cuMemHostUnregister",
        "cuEventQuery",     "cuEventSynchronize",  "cuStreamSynchronize", "cuStreamDestroy",
        "cuModuleLoadData", "cuModuleGetFunction", "cuMemGetInfo"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], function) == 0) return true;
    return false;
}

/// Rules without an injected failure: 0, or the call's result.
static int broken_rule(const char *function) {
    fake_number_add(CALLS, 1);
    if (fake_number(GONE) != 0) return DEINITIALIZED;
    // An error of the device stays until the process ends; contexts are still pushed and popped,
    // and HIP knows the thread's device.
    if (fake_number(STICKY) != 0 && strncmp(function, "cuCtx", 5) != 0 &&
        strcmp(function, "hipGetDevice") != 0)
        return (int)fake_number(STICKY);
    if (fake_number(CAPTURING) != 0 && capture_mode != CAPTURE_RELAXED && is_unsafe(function)) {
        fake_number_add(BROKEN_CAPTURES, 1);
        return CAPTURE_UNSUPPORTED;
    }
    return 0;
}

static int asked_failure(const char *function) {
    if (fake_number(FAIL_AT) == 0) return 0;
    pthread_mutex_lock(&lock);
    // Whoever can't have the context can't give anything back either: only when it is named.
    bool is_any = fail_function[0] == '\0' && strcmp(function, "cuCtxPushCurrent") != 0;
    bool is_named = is_any || strcmp(fail_function, function) == 0;
    bool fails = is_named && fake_number(FAIL_AT) > 0 && fake_number_add(FAIL_AT, -1) == 1;
    pthread_mutex_unlock(&lock);
    if (fails && fake_number(FAIL_STAYS) != 0) fake_number_set(STICKY, fake_number(FAIL_CODE));
    if (!fails || fake_number(FAIL_CODE) != HANGS) return fails ? (int)fake_number(FAIL_CODE) : 0;
    while (fake_number(FAIL_CODE) == HANGS) fake_sleep_us(1000);
    return 0;
}

static _Thread_local int last_error;

int fake_error(int code) {
    if (code != 0) last_error = code;
    return code;
}

int fake_last_error(void) { return last_error; }

int fake_error_take(void) {
    int code = last_error;
    last_error = 0;
    return code;
}

int fake_call_begin(const char *function) {
    int code = broken_rule(function);
    if (code == 0) code = asked_failure(function);
    return code == NOTHING ? code : fake_error(code);
}

int fake_call_end(const char *function) { return fake_error(broken_rule(function)); }
