// SPDX-License-Identifier: Apache-2.0
/// Interface of the save module: layouts, saves and shard plans behind the public handles. The api
/// module has checked the arguments. Independent of loads.
///
/// Knows: layouts, sources, targets, journals.
/// Does not know: loads, devices other than through the snapshot.
/// Main types: fst_writer, fst_async_save.
#ifndef FSTI_SAVE_H
#define FSTI_SAVE_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/async_save.h"
#include "fastsafetensors/experimental/save_layout.h"
#include "fastsafetensors/experimental/shared_save.h"

/// `options` is complete: struct_size is current; name sizes are set.
fst_status fsti_writer_open(const char *path, const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_writer **out, fst_error *error);
fst_status fsti_writer_write(fst_writer *writer, size_t tensor_index, uint64_t offset,
                             const void *data, size_t size_bytes, fst_error *error);
fst_status fsti_writer_map(fst_writer *writer, size_t tensor_index, void **out, fst_error *error);
fst_status fsti_writer_finish(fst_writer *writer, fst_error *error);
fst_status fsti_writer_commit(fst_writer *writer, fst_error *error);
void fsti_writer_cancel(fst_writer *writer);
void fsti_writer_close(fst_writer *writer);
const char *fsti_writer_path(const fst_writer *writer, uint32_t file_index);
fst_status fsti_writer_stats(fst_writer *writer, fst_save_stats *stats, fst_error *error);
size_t fsti_writer_tensor_count(const fst_writer *writer);

fst_status fsti_writer_hand_over(fst_writer *writer, fst_error *error);
const char *fsti_writer_hidden_path(const fst_writer *writer, uint32_t file_index);
/// `options` as in fsti_writer_open().
fst_status fsti_writer_join(const char *path, const fst_save_options *options, fst_writer **out,
                            fst_error *error);
/// Implements fst_set_publish(). `options` is complete: struct_size is current.
fst_status fsti_set_publish(const char *folder, const char *const *paths, size_t path_count,
                            const fst_publish_options *options, fst_save_stats *stats,
                            fst_error *error);

/// A checked request: options complete, struct_size is this version's, name sizes are set.
typedef struct fsti_async_request {
    const char *path;
    const fst_save_tensor *tensors;
    size_t tensor_count;
    fst_async_options options; ///< `save` is never NULL
} fsti_async_request;
fst_status fsti_async_save_start(const fsti_async_request *request, fst_async_save **out,
                                 fst_error *error);
fst_status fsti_async_save_stage(fst_async_save *save, int64_t timeout_ms, fst_error *error);
fst_status fsti_async_save_wait(fst_async_save *save, int64_t timeout_ms, fst_error *error);
void fsti_async_save_cancel(fst_async_save *save);
/// Implements fst_async_save_serve().
const fst_async_save *fsti_async_set_callback_save(const fst_async_save *save);
void fsti_async_save_close(fst_async_save *save);
fst_status fsti_async_save_stats(fst_async_save *save, fst_async_stats *stats, fst_error *error);
fst_status fsti_async_save_writer_stats(fst_async_save *save, fst_save_stats *stats,
                                        fst_error *error);

/// Implements fst_header_edit(). `options` is complete: struct_size is current; sizes are set.
fst_status fsti_header_edit(const char *path, const char *target, const fst_edit_options *options,
                            fst_save_stats *stats, fst_error *error);

/// Implements fst_file_compress() and fst_file_decompress(). `options` is complete.
fst_status fsti_file_compress(const char *path, const char *target, const fst_pack_options *options,
                              fst_save_stats *stats, fst_error *error);
fst_status fsti_file_decompress(const char *path, const char *target,
                                const fst_pack_options *options, fst_save_stats *stats,
                                fst_error *error);

/// Implements fst_leftovers_visit() and fst_leftovers_remove().
fst_status fsti_leftovers_list(const char *path, fst_leftover_callback visit, void *context,
                               fst_error *error);
fst_status fsti_leftovers_clean(const char *path, size_t *count, uint64_t *size_bytes,
                                fst_error *error);

/// Implements fst_shards_assign().
fst_status fsti_shards_assign(const fst_shard_item *items, size_t item_count,
                              uint64_t file_bytes_max, uint32_t *file_of, uint32_t *file_count,
                              fst_error *error);

fst_status fsti_layout_open(const fst_save_tensor *tensors, size_t tensor_count,
                            const fst_save_options *options, fst_layout **out, fst_error *error);
const char *fsti_layout_header(const fst_layout *layout, size_t *size_bytes);
size_t fsti_layout_tensor_count(const fst_layout *layout);
void fsti_layout_tensor(const fst_layout *layout, size_t tensor_index, uint64_t *offset,
                        uint64_t *size_bytes);
uint64_t fsti_layout_file_bytes(const fst_layout *layout);
size_t fsti_layout_padding_count(const fst_layout *layout);
void fsti_layout_close(fst_layout *layout);

#endif
