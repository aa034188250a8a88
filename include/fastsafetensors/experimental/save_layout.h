// SPDX-License-Identifier: Apache-2.0
/// Planning a save without writing: the layout of one file, and the distribution of tensors to
/// several files.
///
///     fst_layout *layout;
///     size_t header_bytes;
///     if (fst_layout_open(tensors, tensor_count, NULL, &layout, NULL) != FST_OK) return 1;
///     const char *header = fst_layout_header(layout, &header_bytes);
///     fwrite(header, 1, header_bytes, stdout);
///     fst_layout_close(layout);
#ifndef FASTSAFETENSORS_SAVE_LAYOUT_H
#define FASTSAFETENSORS_SAVE_LAYOUT_H

#include "../writer.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The layout of one file. It never changes: any number of threads may read one at once.
typedef struct fst_layout fst_layout;

/// Computes the layout of the file that fst_save() would write. On success *out is a layout, to be
/// closed with fst_layout_close().
FST_API FST_NODISCARD fst_status fst_layout_open(const fst_save_tensor *tensors,
                                                 size_t tensor_count,
                                                 const fst_save_options *options, fst_layout **out,
                                                 fst_error *error);

/// Returns the bytes before the data section (length field, JSON, padding), which belong to the
/// layout, and sets *size_bytes to their number. NULL for NULL.
FST_API const char *fst_layout_header(const fst_layout *layout, size_t *size_bytes);

/// Sets *offset to the position of a tensor's first byte in the file, and *size_bytes to its size.
FST_API FST_NODISCARD fst_status fst_layout_tensor(const fst_layout *layout, size_t tensor_index,
                                                   uint64_t *offset, uint64_t *size_bytes,
                                                   fst_error *error);

/// Returns the size of the whole file in bytes; 0 for NULL.
FST_API uint64_t fst_layout_file_bytes(const fst_layout *layout);

/// Returns the number of padding tensors; 0 for NULL.
FST_API size_t fst_layout_padding_count(const fst_layout *layout);

/// Frees a layout. NULL is allowed.
FST_API void fst_layout_close(fst_layout *layout);

/// What fst_shards_assign() needs to know of a tensor.
typedef struct fst_shard_item {
    uint64_t size_bytes;
    uint64_t group; ///< tensors of one non-zero group share memory: same file, counted once
} fst_shard_item;

/// Distributes tensors to files of at most `file_bytes_max` bytes as Hugging Face's libraries do:
/// in the given order, a new file when the next tensor does not fit, a larger tensor alone in a
/// file; a group is placed with its first tensor. Sets file_of[i] to 0 to *file_count - 1.
FST_API FST_NODISCARD fst_status fst_shards_assign(const fst_shard_item *items, size_t item_count,
                                                   uint64_t file_bytes_max, uint32_t *file_of,
                                                   uint32_t *file_count, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
