// SPDX-License-Identifier: Apache-2.0
/// Settings and counters of tests, and the checks before each driver call: requested failures,
/// sticky errors, a driver that was shut down, graph capture.
#ifndef FAKE_NUMBERS_H
#define FAKE_NUMBERS_H

#include <stdbool.h>

/// X(identifier, name, value at the start): settings, then counters.
#define FAKE_NUMBERS(X)                                                                            \
    X(DEVICES, "devices", 2)                                                                       \
    X(MEMORY, "memory", 1l << 32)                                                                  \
    X(VERSION, "version", 12040)                                                                   \
    X(INTEGRATED, "integrated", 0)                                                                 \
    X(CAPABILITY, "capability", 90)                                                                \
    X(DELAY_US, "delay_us", 0)                                                                     \
    X(FAIL_AT, "fail_at", 0)                                                                       \
    X(FAIL_CODE, "fail_code", 999)                                                                 \
    X(FAIL_STAYS, "fail_stays", 0)                                                                 \
    X(REPORTED_FREE, "reported_free", 0)                                                           \
    X(NO_LOCK, "no_lock", 0)                                                                       \
    X(INIT_CODE, "init_code", 0)                                                                   \
    X(COUNT_CODE, "count_code", 0)                                                                 \
    X(INIT_US, "init_us", 0)                                                                       \
    X(NO_KERNELS, "no_kernels", 0)                                                                 \
    X(NO_BINARIES, "no_binaries", 0)                                                               \
    X(NO_FUNCTION, "no_function", 0)                                                               \
    X(NO_BYTES, "no_bytes", 0)                                                                     \
    X(OTHER_ADDRESS, "other_address", 0)                                                           \
    X(MISALIGNED, "misaligned", 0)                                                                 \
    X(ALIGNED_FIRST, "aligned_first", 0)                                                           \
    X(STUCK_PINS, "stuck_pins", 0)                                                                 \
    X(BAD_NAME, "bad_name", 0)                                                                     \
    X(CAPTURING, "capturing", 0)                                                                   \
    X(STICKY, "sticky", 0)                                                                         \
    X(GONE, "gone", 0)                                                                             \
    X(FREE_US, "free_us", 0)                                                                       \
    X(ALLOC_US, "alloc_us", 0)                                                                     \
    X(MODULE_US, "module_us", 0)                                                                   \
    X(LOCK_US, "lock_us", 0)                                                                       \
    X(LOCK_MIB_US, "lock_mib_us", 0)                                                               \
    X(WAKE_US, "wake_us", 0)                                                                       \
    X(COPY_US, "copy_us", 0)                                                                       \
    X(BUS_MBPS, "bus_mbps", 0)                                                                     \
    X(ALLOCATIONS, "allocations", 0)                                                               \
    X(ALLOCATED_BYTES, "allocated_bytes", 0)                                                       \
    X(LOCKED_BYTES, "locked_bytes", 0)                                                             \
    X(CONTEXTS, "contexts", 0)                                                                     \
    X(RESETS, "resets", 0)                                                                         \
    X(STREAMS, "streams", 0)                                                                       \
    X(EVENTS, "events", 0)                                                                         \
    X(CALLS, "calls", 0)                                                                           \
    X(COPIES, "copies", 0)                                                                         \
    X(LAUNCHES, "launches", 0)                                                                     \
    X(ALLOC_CALLS, "alloc_calls", 0)                                                               \
    X(FREE_CALLS, "free_calls", 0)                                                                 \
    X(LOCK_CALLS, "lock_calls", 0)                                                                 \
    X(STREAM_CALLS, "stream_calls", 0)                                                             \
    X(MODULE_CALLS, "module_calls", 0)                                                             \
    X(MODULES, "modules", 0)                                                                       \
    X(MODULE_COPIES, "module_copies", 0)                                                           \
    X(BINARIES, "binaries", 0)                                                                     \
    X(QUERIES, "queries", 0)                                                                       \
    X(BLOCKING_WAITS, "blocking_waits", 0)                                                         \
    X(BROKEN_CAPTURES, "broken_captures", 0)                                                       \
    X(FIRST_COPY_CALLS, "first_copy_calls", 0)                                                     \
    X(FIRST_COPY_ALLOCS, "first_copy_allocs", 0)                                                   \
    X(COPIED_OUT, "copied_out", 0)                                                                 \
    X(OUT_AHEAD, "out_ahead", 0)                                                                   \
    X(BUS_IDLE_US, "bus_idle_us", 0)                                                               \
    X(OVERWRITTEN, "overwritten", 0)                                                               \
    X(PAGEABLE, "pageable", 0)

enum {
#define FAKE_IDENTIFIER(identifier, name, value) identifier,
    FAKE_NUMBERS(FAKE_IDENTIFIER)
#undef FAKE_IDENTIFIER
        NUMBER_COUNT
};

long fake_number(int index);
void fake_number_set(int index, long value);
/// Returns what it was.
long fake_number_add(int index, long value);
void fake_number_or(int index, long bits);
/// FAKE_GPU_<NAME> of the environment.
void fake_numbers_read(void);
/// The result of a call before it starts; 0: continue.
int fake_call_begin(const char *function);
/// As the code of a requested failure: the call returns success and no result.
enum { NOTHING = -77 };
/// The same for calls that free something. A failure would leak it, so none is injected.
int fake_call_end(const char *function);
/// The code of a call that failed, which becomes the thread's last error, as HIP keeps it.
int fake_error(int code);
int fake_last_error(void);
/// Returns it, and forgets it.
int fake_error_take(void);
/// Sleeps; nothing for 0.
void fake_sleep_us(long us);
/// The thread's mode of capture: swapped.
void fake_capture_exchange(int *mode);

#endif
