// SPDX-License-Identifier: Apache-2.0
/// Stand-ins for the GPU drivers, with real memory behind them, for tests. Copies and kernels
/// happen on threads, later than they are asked for, so that what is not waited for shows as wrong
/// bytes; addresses are checked against what was allocated; any call can be made to fail.
#ifndef FAKE_GPU_H
#define FAKE_GPU_H

/// Settings, by name, also from the environment as FAKE_GPU_<NAME> when the driver starts:
///   devices, memory (bytes a device), version, integrated, delay_us (most, a queued operation),
///   fail_at (the n-th call from now fails), fail_code, no_lock (memory can't be locked),
///   init_code, no_kernels, other_address (locked memory has another address for the device)
/// fake_gpu_fail() names the function that fails, by the CUDA name; NULL: any.
typedef void (*fake_gpu_set_function)(const char *name, long value);
typedef void (*fake_gpu_fail_function)(const char *function, long nth_call, long code);
/// Counters: allocations, allocated_bytes, locked_bytes, contexts (bits of devices), streams,
/// events, calls, copies, launches, depth (contexts pushed by this thread), fail_left.
typedef long (*fake_gpu_get_function)(const char *name);
/// Queues a delay and then a fill of memory on a stream.
typedef void (*fake_gpu_fill_function)(void *stream, long delay_us, void *target, int byte,
                                       unsigned long size);

#endif
