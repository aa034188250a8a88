// SPDX-License-Identifier: Apache-2.0
/// Interface of the loader module: loads and tensors behind the public handles. The api module has
/// checked the arguments.
///
/// Knows: requests, loads, tensors, statistics.
/// Does not know: system calls that read, drivers.
/// Main types: fst_loader, fst_tensor.
#ifndef FSTI_LOAD_HANDLE_H
#define FSTI_LOAD_HANDLE_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/load_tuning.h"
#include "fastsafetensors/loader.h"

/// `options` is complete: struct_size is current, and `tuning` is set.
fst_status fsti_loader_open(fst_model *model, const fst_load_options *options, fst_loader **out,
                            fst_error *error);
size_t fsti_loader_tensor_count(const fst_loader *loader);
fst_status fsti_loader_wait(fst_loader *loader, int64_t timeout_ms, fst_error *error);
fst_status fsti_loader_next(fst_loader *loader, int64_t timeout_ms, fst_tensor **out,
                            fst_error *error);
fst_status fsti_loader_item(fst_loader *loader, size_t item_index, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error);
fst_status fsti_loader_tensor(fst_loader *loader, const char *name, size_t name_size,
                              int64_t timeout_ms, fst_tensor **out, fst_error *error);
void fsti_loader_cancel(fst_loader *loader);
void fsti_loader_close(fst_loader *loader);
fst_status fsti_loader_stats(fst_loader *loader, fst_load_stats *stats, fst_error *error);

/// Implements fst_load_counters(); `count` is not NULL.
const fst_load_counter *fsti_load_counters(size_t *count);

/// As fst_cached_view(); the index is in range, and *out is NULL.
fst_status fsti_cached_view(fst_model *model, size_t tensor_index, uint64_t begin, uint64_t end,
                            fst_tensor **out, fst_error *error);

void fsti_tensor_view(const fst_tensor *tensor, fst_tensor_view *out);
/// `target` has space for the tensor's bytes.
fst_status fsti_tensor_read(const fst_tensor *tensor, void *target, fst_error *error);
fst_tensor *fsti_tensor_ref(fst_tensor *tensor);
void fsti_tensor_unref(fst_tensor *tensor);

fst_status fsti_loader_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error);

#endif
