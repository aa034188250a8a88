// SPDX-License-Identifier: Apache-2.0
/// Small reads without a loader, where the page cache has the bytes, and checks that files are
/// still the ones that were opened.
///
///     int copied = 0;
///     uint64_t begin[2] = {7, 0}, end[2] = {8, 1024};
///     float row[1024];
///     fst_part part = FST_STRUCT_INIT(fst_part);
///     part.tensor_index = 3;
///     part.begin = begin;
///     part.end = end;
///     part.destination = row;
///     part.destination_bytes = sizeof row;
///     if (fst_part_copy(model, &part, &copied, NULL) != FST_OK || !copied)
///         return 1; // use fst_loader_open() with this part
#ifndef FASTSAFETENSORS_CACHED_PART_H
#define FASTSAFETENSORS_CACHED_PART_H

#include "../loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The most bytes between the first and the last byte of a part that fst_part_copy() copies.
#define FST_PART_BYTES_MAX 262144

/// Copies a small part of a tensor to part->destination on the calling thread, if the page cache
/// has it. Sets *copied to 0, and leaves the destination unchanged, if it does not or if the kernel
/// does not report it, if the part spans more than FST_PART_BYTES_MAX, if its elements are not
/// whole bytes, or if the model is verified: use a loader then. FST_E_ARGUMENT for a part that is
/// out of range or has no begin and end (except of a scalar), or a destination of another size.
/// From any thread.
FST_API FST_NODISCARD fst_status fst_part_copy(const fst_model *model, const fst_part *part,
                                               int *copied, fst_error *error);

/// Returns a memory-mapped view of the whole tensor, as FST_MODE_MAP does, if the page cache has
/// the bytes begin <= i < end of the tensor. The mapping is private to this call. The caller
/// releases *out with fst_tensor_unref(). Sets *out to NULL if the page cache does not have the
/// bytes or the kernel does not report it, if the range is empty, if the tensor is misaligned in
/// its file, if the file can't be mapped (compressed, remote, or 16,384 such views exist, since the
/// kernel limits mappings), or if the model is verified: use a loader then. FST_E_ARGUMENT for a
/// range beyond the tensor; FST_E_FILE_CHANGED if the file has changed. From any thread.
FST_API FST_NODISCARD fst_status fst_cached_view(fst_model *model, size_t tensor_index,
                                                 uint64_t begin, uint64_t end, fst_tensor **out,
                                                 fst_error *error);

/// Checks that all files are unchanged since the model was opened, by size and time of the last
/// change. (A program that writes to a file and restores its time is not detected; a manifest
/// detects that.) FST_E_FILE_CHANGED names one that has changed. From any thread.
FST_API FST_NODISCARD fst_status fst_model_check(const fst_model *model, fst_error *error);

/// Checks that the files of several models belong to one save, for programs that open the files of
/// a set one by one (fst_model_open() and fst_model_open_files() check it themselves). Call it when
/// the last file is open and before data is loaded. Files that were not opened by a local path are
/// skipped. FST_E_FILE_CHANGED: a save replaces or has replaced files of the set; open all of them
/// again. From any thread.
FST_API FST_NODISCARD fst_status fst_models_check_save(const fst_model *const *models,
                                                       size_t model_count, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
