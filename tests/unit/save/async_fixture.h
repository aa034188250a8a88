// SPDX-License-Identifier: Apache-2.0
/// What tests of asynchronous saves share: a few tensors of odd sizes, all of one byte.
#ifndef ASYNC_FIXTURE_H
#define ASYNC_FIXTURE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"

#define MIB ((uint64_t)1 << 20)
#define TENSOR_COUNT 7

extern const uint64_t async_sizes[TENSOR_COUNT];
/// Bytes of all tensors.
uint64_t async_total_bytes(void);
/// Sets every byte of every tensor.
void async_fill(unsigned char value);
void async_make_tensors(fst_save_tensor *out);
fst_save_options async_save_options(void);
fst_async_options async_options_of(fst_stage stage);
/// Starts a save of the tensors.
fst_status async_start(const char *path, const fst_async_options *options, fst_async_save **out);
/// bytes_total is UINT64_MAX after an error.
fst_async_stats async_stats_of(fst_async_save *save);
/// The byte that every tensor of a model is made of; -1: mixed, missing, or unreadable.
int async_value_at(const char *path);
/// Saves the tensors, and waits.
fst_status async_save_sync(const char *path);

/// A progress callback that holds the writing thread up until the atomic_bool `context`, or with
/// NULL `async_may_write`, is true.
int async_hold(void *context, uint64_t done, uint64_t total, size_t tensors_done,
               size_t tensors_total);
extern atomic_bool async_may_write;
/// A thread that sets `async_may_write` after 50 ms.
void *async_release_soon(void *unused);

#endif
