// SPDX-License-Identifier: Apache-2.0
/// Fake GPU drivers with real memory, for tests. Copies and kernels run on threads, later than
/// requested, so that a missing wait shows as wrong bytes. Addresses are checked against
/// allocations. Every call can be made to fail.
#ifndef FAKE_GPU_H
#define FAKE_GPU_H

#include <stdbool.h>

/// Settings, by name, also from the environment as FAKE_GPU_<NAME> when the driver starts:
///   devices, memory (bytes a device), version, integrated, capability (90: 9.0)
///   delay_us (maximum per queued operation), fail_at (the n-th call from now fails), fail_code
///   (-77: it returns success and no result; -78: it returns when fail_code is changed), fail_stays
///   (all later calls fail, too), reported_free (not 0: what cuMemGetInfo reports), no_lock (memory
///   can't be pinned), init_code, count_code (results of cuInit and cuDeviceGetCount), no_kernels,
///   no_binaries (only PTX is accepted), no_function (the result of asking a binary for its
///   kernel), other_address (pinned memory has another address for the device), capturing (a graph
///   is being captured: calls that would end that fail with 900, unless their thread has requested
///   the relaxed mode), sticky (the result of every call from now on), gone (1: the driver has shut
///   down)
/// Costs: init_us (the start of the driver), free_us, alloc_us, module_us, lock_us and lock_mib_us
/// (one at a time), wake_us (of a
///   thread that sleeps for an event), bus_mbps (0: as fast as memory; otherwise nothing is copied,
///   and the time passes) and copy_us (cost of each copy); no_bytes: nothing is copied.
/// fake_gpu_fail() names the function that fails, by the CUDA name; NULL: any.
typedef void (*fake_gpu_set_function)(const char *name, long value);
typedef void (*fake_gpu_fail_function)(const char *function, long nth_call, long code);
/// Counters: allocations, allocated_bytes, locked_bytes, contexts (bits of devices), streams,
/// events, calls, copies, launches, copied_out, out_ahead (copies out that were queued
/// while another one was running), pageable (copies of memory that is not pinned),
/// bus_idle_us (pauses of less than 5 ms between copies, where bus_mbps is set),
/// overwritten (copies whose source was written to before they were done),
/// alloc_calls, free_calls, lock_calls, stream_calls, module_calls, modules, module_copies (by
/// threads that have loaded a module before), binaries, queries,
/// blocking_waits, broken_captures, first_copy_calls and first_copy_allocs (as they were at the
/// first copy since copies was set to 0), depth (contexts pushed by this thread), fail_left,
/// last_error (of this thread, which HIP keeps until it is read).
typedef long (*fake_gpu_get_function)(const char *name);
/// Queues a delay and then a fill of memory on a stream.
typedef void (*fake_gpu_fill_function)(void *stream, long delay_us, void *target, int byte,
                                       unsigned long size);
/// Holds a stream (0: the legacy one) until fake_gpu_let_go().
typedef void (*fake_gpu_hold_function)(void *stream);
typedef void (*fake_gpu_let_go_function)(void);
/// Whether copies to and from the device stand still.
typedef void (*fake_gpu_hold_copies_function)(bool hold);

#endif
