// SPDX-License-Identifier: Apache-2.0
/// The door of the loader room: loads and tensors behind the public handles.
/// Arguments have been checked by the api room.
#ifndef FSTI_LOADER_H
#define FSTI_LOADER_H

#include "base/base.h"
#include "fastsafetensors/experimental.h"
#include "fastsafetensors/loader.h"

/// `options` is complete: struct_size is this version's, and `tuning` is there.
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

/// As fst_range_view(); the index is in range, *out is NULL.
fst_status fsti_range_view(fst_model *model, const fst_range *range, fst_tensor **out,
                           fst_error *error);

void fsti_tensor_view(const fst_tensor *tensor, fst_tensor_view *out);
/// `target` has room for the tensor's bytes.
fst_status fsti_tensor_read(const fst_tensor *tensor, void *target, fst_error *error);
fst_tensor *fsti_tensor_ref(fst_tensor *tensor);
void fsti_tensor_unref(fst_tensor *tensor);

fst_status fsti_loader_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error);

#endif
