// SPDX-License-Identifier: Apache-2.0
/// The public functions of writer.h.
#include <string.h>

#include "api_check.h"
#include "api_save_request.h"
#include "digest/digest.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "format/format.h"
#include "save/save.h"

#define ALIGNMENT_BYTES_MAX ((uint64_t)1 << 20)

void fsti_api_save_request_clear(api_save_request *request) {
    fsti_free(request->tensors);
    fsti_free(request->metadata);
}

static fst_status check_digest(fst_digest digest, fst_error *error) {
    API_REQUIRE((unsigned)digest < FSTI_MANIFEST_DIGEST_COUNT, error,
                "digest %d is not one of those for manifests", (int)digest);
    return FST_OK;
}

static fst_status check_choices(const fst_save_options *options, fst_error *error) {
    API_REQUIRE((unsigned)options->promise < FST_SAVE_PROMISE_COUNT, error,
                "unknown promise %d; expected a value of fst_save_promise", (int)options->promise);
    API_REQUIRE((unsigned)options->order < FST_SAVE_ORDER_COUNT, error,
                "unknown order %d; expected a value of fst_save_order", (int)options->order);
    API_REQUIRE((unsigned)options->engine < FST_SAVE_ENGINE_COUNT, error,
                "unknown engine %d; expected a value of fst_save_engine", (int)options->engine);
    uint64_t alignment = options->alignment_bytes;
    API_REQUIRE((alignment & (alignment - 1)) == 0 && alignment <= ALIGNMENT_BYTES_MAX, error,
                "alignment_bytes must be a power of two, at most 1 MiB");
    API_REQUIRE(options->header_alignment_bytes % 8 == 0 &&
                    options->header_alignment_bytes <= ALIGNMENT_BYTES_MAX,
                error, "header_alignment_bytes must be a multiple of 8, at most 1 MiB");
    API_REQUIRE(options->header_alignment_bytes == 0 || alignment <= 8 ||
                    options->header_alignment_bytes % alignment == 0,
                error, "header_alignment_bytes must be a multiple of alignment_bytes");
    API_REQUIRE(options->metadata != NULL || options->metadata_count == 0, error,
                "metadata is NULL");
    API_REQUIRE(options->metadata_count < INT32_MAX, error, "too many metadata entries");
    API_REQUIRE(options->file_count <= 99999, error, "more than 99999 files");
    API_REQUIRE((unsigned)options->compress < FST_COMPRESS_COUNT, error,
                "unknown compress %d; expected a value of fst_compress", (int)options->compress);
    if (options->compress != FST_COMPRESS_NONE && options->others_write != 0)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "files written by several processes can't be compressed");
    API_REQUIRE_SWITCH(options->has_metadata, "has_metadata", error);
    API_REQUIRE_SWITCH(options->metadata_last, "metadata_last", error);
    API_REQUIRE_SWITCH(options->replace_link, "replace_link", error);
    API_REQUIRE_SWITCH(options->others_write, "others_write", error);
    FST_TRY(check_digest(options->digest, error));
    return options->file_count == 0 ? FST_OK : fsti_api_check_stem(options->stem, error);
}

static fst_status copy_metadata(api_save_request *request, fst_error *error) {
    size_t count = request->options.metadata_count;
    request->metadata = fsti_alloc((count + 1) * sizeof *request->metadata);
    if (request->metadata == NULL)
        return fsti_error_memory(error, count * sizeof *request->metadata);
    for (size_t i = 0; i < count; i++) {
        fst_metadata_entry entry = request->options.metadata[i];
        API_REQUIRE(entry.key != NULL && entry.value != NULL, error,
                    "metadata entry %zu lacks key or value", i);
        entry.key_size = fsti_api_text_size(entry.key, entry.key_size);
        entry.value_size = fsti_api_text_size(entry.value, entry.value_size);
        request->metadata[i] = entry;
    }
    request->options.metadata = request->metadata;
    return FST_OK;
}

static fst_status copy_tensors(api_save_request *request, const fst_save_tensor *tensors,
                               size_t count, fst_error *error) {
    uint32_t file_count = request->options.file_count > 0 ? request->options.file_count : 1;
    API_REQUIRE(tensors != NULL || count == 0, error, "tensors is NULL");
    API_REQUIRE(count < INT32_MAX, error, "too many tensors");
    request->tensors = fsti_alloc((count + 1) * sizeof *request->tensors);
    if (request->tensors == NULL) return fsti_error_memory(error, count * sizeof *tensors);
    for (size_t i = 0; i < count; i++) {
        fst_save_tensor tensor;
        FST_TRY(fsti_api_copy_element(&tensor, sizeof tensor, tensors, i, error));
        API_REQUIRE(tensor.name != NULL, error, "tensor %zu has no name", i);
        API_REQUIRE((unsigned)tensor.dtype < FST_DTYPE_COUNT, error,
                    "tensor %zu: unknown dtype %d; expected a value of fst_dtype", i,
                    (int)tensor.dtype);
        FST_TRY(fsti_api_check_device(tensor.device, error));
        API_REQUIRE(tensor.shape != NULL || tensor.rank == 0, error, "tensor %zu has no shape", i);
        API_REQUIRE(tensor.file_index < file_count, error,
                    "tensor %zu: file_index %u is out of range: there are %u files", i,
                    tensor.file_index, file_count);
        tensor.name_size = fsti_api_text_size(tensor.name, tensor.name_size);
        API_REQUIRE(tensor.name_size <= INT32_MAX, error, "tensor %zu: its name is too long", i);
        request->tensors[i] = tensor;
    }
    return FST_OK;
}

/// Refuses real tensors that readers would hide. The metadata key FSTI_PADDING_KEY makes readers
/// hide tensors that look like padding. A caller who copies the metadata of an aligned file passes
/// the key on, even if this file has no padding.
static fst_status check_padding_names(const api_save_request *request, size_t count,
                                      fst_error *error) {
    size_t size = strlen(FSTI_PADDING_KEY);
    bool is_marked = false;
    for (size_t i = 0; i < request->options.metadata_count; i++)
        is_marked = is_marked || (request->metadata[i].key_size == size &&
                                  memcmp(request->metadata[i].key, FSTI_PADDING_KEY, size) == 0);
    for (size_t i = 0; is_marked && i < count; i++) {
        const fst_save_tensor *tensor = &request->tensors[i];
        API_REQUIRE(
            !fsti_padding_like(tensor->name, tensor->name_size, tensor->dtype, tensor->rank), error,
            "tensor %zu has the name and dtype of a padding tensor. Leave out the metadata "
            "key " FSTI_PADDING_KEY,
            i);
    }
    return FST_OK;
}

fst_status fsti_api_save_request_read(const fst_save_options *options,
                                      const fst_save_tensor *tensors, size_t tensor_count,
                                      api_save_request *out, fst_error *error) {
    out->options.struct_size = sizeof out->options;
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&out->options, sizeof out->options, options,
                                     options->struct_size, error));
    FST_TRY(check_choices(&out->options, error));
    FST_TRY(copy_metadata(out, error));
    FST_TRY(copy_tensors(out, tensors, tensor_count, error));
    return check_padding_names(out, tensor_count, error);
}

fst_status fst_writer_open(const char *path, const fst_save_tensor *tensors, size_t tensor_count,
                           const fst_save_options *options, fst_writer **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE_PATH(path, "path", error);
    api_save_request request = {0};
    fst_status status = fsti_api_save_request_read(options, tensors, tensor_count, &request, error);
    if (status == FST_OK)
        status =
            fsti_writer_open(path, request.tensors, tensor_count, &request.options, out, error);
    fsti_api_save_request_clear(&request);
    return status;
}

fst_status fst_writer_write(fst_writer *writer, size_t tensor_index, uint64_t offset,
                            const void *data, size_t size_bytes, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(writer != NULL, error, "writer is NULL");
    API_REQUIRE(tensor_index < fsti_writer_tensor_count(writer), error,
                "tensor index %zu is out of range: there are %zu tensors", tensor_index,
                fsti_writer_tensor_count(writer));
    API_REQUIRE(data != NULL || size_bytes == 0, error, "data is NULL");
    return fsti_writer_write(writer, tensor_index, offset, data, size_bytes, error);
}

fst_status fst_writer_map(fst_writer *writer, size_t tensor_index, void **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    API_REQUIRE(writer != NULL, error, "writer is NULL");
    API_REQUIRE(tensor_index < fsti_writer_tensor_count(writer), error,
                "tensor index %zu is out of range: there are %zu tensors", tensor_index,
                fsti_writer_tensor_count(writer));
    return fsti_writer_map(writer, tensor_index, out, error);
}

fst_status fst_writer_finish(fst_writer *writer, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(writer != NULL, error, "writer is NULL");
    return fsti_writer_finish(writer, error);
}

fst_status fst_writer_commit(fst_writer *writer, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(writer != NULL, error, "writer is NULL");
    return fsti_writer_commit(writer, error);
}

void fst_writer_cancel(fst_writer *writer) {
    API_DEFER_CANCEL;
    if (writer != NULL) fsti_writer_cancel(writer);
}

void fst_writer_close(fst_writer *writer) {
    API_DEFER_CANCEL;
    fsti_writer_close(writer);
}

const char *fst_writer_path(const fst_writer *writer, uint32_t file_index) {
    return writer == NULL ? NULL : fsti_writer_path(writer, file_index);
}

fst_status fst_writer_stats_get(const fst_writer *writer, fst_save_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(writer != NULL && stats != NULL, error, "writer or stats is NULL");
    fst_save_stats full = {.struct_size = sizeof full};
    // The handle is const for the caller, but reading the counters locks its mutex.
    FST_TRY(fsti_writer_stats((fst_writer *)(uintptr_t)writer, &full, error));
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_save(const char *path, const fst_save_tensor *tensors, size_t tensor_count,
                    const fst_save_options *options, fst_save_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    fst_writer *writer;
    // Check before anything is replaced, because afterwards nothing may fail.
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    FST_TRY(fst_writer_open(path, tensors, tensor_count, options, &writer, error));
    fst_status status = fst_writer_commit(writer, error);
    if (status == FST_OK && stats != NULL) status = fst_writer_stats_get(writer, stats, error);
    fst_writer_close(writer);
    return status;
}

/// Checks the arguments of compressing and decompressing; fills *own completely.
static fst_status read_pack_options(const char *path, const char *target,
                                    const fst_pack_options *options, fst_pack_options *own,
                                    fst_error *error) {
    *own = (fst_pack_options){.struct_size = sizeof *own};
    API_REQUIRE_PATH(path, "path", error);
    API_REQUIRE_PATH(target, "target", error);
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(own, sizeof *own, options, options->struct_size, error));
    API_REQUIRE((unsigned)own->promise < FST_SAVE_PROMISE_COUNT, error,
                "unknown promise %d; expected a value of fst_save_promise", (int)own->promise);
    API_REQUIRE((unsigned)own->compress < FST_COMPRESS_COUNT, error,
                "unknown compress %d; expected a value of fst_compress", (int)own->compress);
    FST_TRY(check_digest(own->digest, error));
    if (own->compress == FST_COMPRESS_NONE) own->compress = FST_COMPRESS_FLOAT;
    return FST_OK;
}

fst_status fst_file_compress(const char *path, const char *target, const fst_pack_options *options,
                             fst_save_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    fst_pack_options own;
    fst_save_stats full = {.struct_size = sizeof full};
    // Check before anything is replaced, because afterwards nothing may fail.
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    FST_TRY(read_pack_options(path, target, options, &own, error));
    FST_TRY(fsti_file_compress(path, target, &own, &full, error));
    if (stats == NULL) return FST_OK;
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_file_decompress(const char *path, const char *target,
                               const fst_pack_options *options, fst_save_stats *stats,
                               fst_error *error) {
    API_DEFER_CANCEL;
    fst_pack_options own;
    fst_save_stats full = {.struct_size = sizeof full};
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    FST_TRY(read_pack_options(path, target, options, &own, error));
    FST_TRY(fsti_file_decompress(path, target, &own, &full, error));
    if (stats == NULL) return FST_OK;
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

/// Copies the changes and measures strings that are given without a size. A NULL value deletes the
/// key.
static fst_status copy_changes(fst_edit_options *options, fst_metadata_entry *metadata,
                               fst_tensor_rename *renames, fst_error *error) {
    for (size_t i = 0; i < options->metadata_count; i++) {
        metadata[i] = options->metadata[i];
        API_REQUIRE(metadata[i].key != NULL, error, "metadata entry %zu lacks its key", i);
        metadata[i].key_size = fsti_api_text_size(metadata[i].key, metadata[i].key_size);
        if (metadata[i].value != NULL)
            metadata[i].value_size = fsti_api_text_size(metadata[i].value, metadata[i].value_size);
    }
    for (size_t i = 0; i < options->rename_count; i++) {
        renames[i] = options->renames[i];
        API_REQUIRE(renames[i].from != NULL && renames[i].to != NULL, error,
                    "rename %zu lacks a name", i);
        renames[i].from_size = fsti_api_text_size(renames[i].from, renames[i].from_size);
        renames[i].to_size = fsti_api_text_size(renames[i].to, renames[i].to_size);
    }
    options->metadata = metadata;
    options->renames = renames;
    return FST_OK;
}

static fst_status check_edit(const fst_edit_options *options, fst_error *error) {
    API_REQUIRE((unsigned)options->promise < FST_SAVE_PROMISE_COUNT, error,
                "unknown promise %d; expected a value of fst_save_promise", (int)options->promise);
    API_REQUIRE(options->metadata != NULL || options->metadata_count == 0, error,
                "metadata is NULL");
    API_REQUIRE(options->metadata_count < INT32_MAX, error, "too many metadata entries");
    API_REQUIRE(options->renames != NULL || options->rename_count == 0, error, "renames is NULL");
    API_REQUIRE_SWITCH(options->clear_metadata, "clear_metadata", error);
    API_REQUIRE(options->metadata_count < INT32_MAX && options->rename_count < INT32_MAX, error,
                "too many changes");
    return check_digest(options->digest, error);
}

fst_status fst_header_edit(const char *path, const char *target, const fst_edit_options *options,
                           fst_save_stats *stats, fst_error *error) {
    API_DEFER_CANCEL;
    fst_edit_options own = {.struct_size = sizeof own};
    fst_save_stats full = {.struct_size = sizeof full};
    API_REQUIRE_PATH(path, "path", error);
    API_CHECK_PATH(target, "target", error);
    // Check before anything is replaced, because afterwards nothing may fail.
    if (stats != NULL) FST_TRY(fsti_api_check_size(stats->struct_size, error));
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&own, sizeof own, options, options->struct_size, error));
    FST_TRY(check_edit(&own, error));
    fst_metadata_entry *metadata = fsti_alloc((own.metadata_count + 1) * sizeof *metadata);
    fst_tensor_rename *renames = fsti_alloc((own.rename_count + 1) * sizeof *renames);
    fst_status status = FST_OK;
    if (metadata == NULL || renames == NULL)
        status = fsti_error_memory(error, own.metadata_count * sizeof *metadata);
    else
        status = copy_changes(&own, metadata, renames, error);
    if (status == FST_OK) status = fsti_header_edit(path, target, &own, &full, error);
    fsti_free(metadata);
    fsti_free(renames);
    if (status != FST_OK || stats == NULL) return status;
    return fsti_api_give_struct(stats, stats->struct_size, &full, sizeof full, error);
}

fst_status fst_shards_assign(const fst_shard_item *items, size_t item_count,
                             uint64_t file_bytes_max, uint32_t *file_of, uint32_t *file_count,
                             fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(file_count != NULL, error, "file_count is NULL");
    *file_count = 0;
    API_REQUIRE((items != NULL && file_of != NULL) || item_count == 0, error,
                "items or file_of is NULL");
    API_REQUIRE(item_count < INT32_MAX, error, "too many tensors");
    return fsti_shards_assign(items, item_count, file_bytes_max, file_of, file_count, error);
}

fst_status fst_layout_open(const fst_save_tensor *tensors, size_t tensor_count,
                           const fst_save_options *options, fst_layout **out, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(out != NULL, error, "out is NULL");
    *out = NULL;
    api_save_request request = {0};
    fst_status status = fsti_api_save_request_read(options, tensors, tensor_count, &request, error);
    if (status == FST_OK)
        status = fsti_layout_open(request.tensors, tensor_count, &request.options, out, error);
    fsti_api_save_request_clear(&request);
    return status;
}

const char *fst_layout_header(const fst_layout *layout, size_t *size_bytes) {
    size_t size = 0;
    const char *header = layout == NULL ? NULL : fsti_layout_header(layout, &size);
    if (size_bytes != NULL) *size_bytes = size;
    return header;
}

fst_status fst_layout_tensor(const fst_layout *layout, size_t tensor_index, uint64_t *offset,
                             uint64_t *size_bytes, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(layout != NULL && offset != NULL && size_bytes != NULL, error,
                "layout, offset or size_bytes is NULL");
    API_REQUIRE(tensor_index < fsti_layout_tensor_count(layout), error,
                "tensor index %zu is out of range: there are %zu tensors", tensor_index,
                fsti_layout_tensor_count(layout));
    fsti_layout_tensor(layout, tensor_index, offset, size_bytes);
    return FST_OK;
}

uint64_t fst_layout_file_bytes(const fst_layout *layout) {
    return layout == NULL ? 0 : fsti_layout_file_bytes(layout);
}

size_t fst_layout_padding_count(const fst_layout *layout) {
    return layout == NULL ? 0 : fsti_layout_padding_count(layout);
}

void fst_layout_close(fst_layout *layout) {
    API_DEFER_CANCEL;
    fsti_layout_close(layout);
}

fst_status fst_leftovers_visit(const char *path, fst_leftover_callback visit, void *context,
                               fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE_PATH(path, "path", error);
    API_REQUIRE(visit != NULL, error, "callback is NULL");
    return fsti_leftovers_list(path, visit, context, error);
}

fst_status fst_leftovers_remove(const char *path, size_t *count, uint64_t *size_bytes,
                                fst_error *error) {
    API_DEFER_CANCEL;
    size_t own_count;
    uint64_t own_size_bytes;
    API_REQUIRE_PATH(path, "path", error);
    fst_status status = fsti_leftovers_clean(path, &own_count, &own_size_bytes, error);
    if (count != NULL) *count = own_count;
    if (size_bytes != NULL) *size_bytes = own_size_bytes;
    return status;
}
