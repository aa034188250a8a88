// SPDX-License-Identifier: Apache-2.0
/// Tensors: a description and bytes, kept alive by reference counts.
#include <errno.h>
#include <string.h>

#include "load.h"

struct fst_tensor {
    fsti_refcount refs;
    fsti_header *header; ///< owns the name and the shape of a whole tensor
    fsti_buffer *buffer; ///< owns the data; NULL if the caller does
    fst_tensor_view view;
    uint64_t shape[]; ///< view.shape of a slice
};

void fsti_tensor_view(const fst_tensor *tensor, fst_tensor_view *out) { *out = tensor->view; }

fst_tensor *fsti_tensor_ref(fst_tensor *tensor) {
    if (tensor != NULL) fsti_refcount_ref(&tensor->refs);
    return tensor;
}

void fsti_tensor_unref(fst_tensor *tensor) {
    if (tensor == NULL || !fsti_refcount_unref(&tensor->refs)) return;
    fsti_buffer_unref(tensor->buffer);
    fsti_header_unref(tensor->header);
    fsti_free(tensor);
}

typedef struct tensor_copy {
    void *target;
    const fst_tensor_view *view;
} tensor_copy;

static void copy_bytes(void *context) {
    const tensor_copy *copy = context;
    fsti_copy_bytes(copy->target, copy->view->data, (size_t)copy->view->size_bytes);
}

fst_status fsti_tensor_read(const fst_tensor *tensor, void *target, fst_error *error) {
    const fst_tensor_view *view = &tensor->view;
    fsti_device *device = NULL;
    bool is_near = view->device.kind == FST_DEVICE_CPU || view->device.kind == FST_DEVICE_PINNED;
    if (view->size_bytes == 0) return FST_OK;
    if (is_near) {
        tensor_copy copy = {target, view};
        // Reading pages of a view may fail; without the guard that ends the process.
        if (fsti_io_guarded(copy_bytes, &copy, view->data, view->size_bytes)) return FST_OK;
        fsti_error_location location = FSTI_NO_LOCATION;
        location.tensor = view->name;
        location.tensor_size = view->name_size;
        location.os_errno = EIO;
        return fsti_error_set(error, FST_E_IO, location, "reading a mapped page");
    }
    FST_TRY(fsti_device_get(view->device, &device, error));
    return fsti_device_copy_out(device, target, view->data, view->size_bytes, error);
}

bool fsti_loader_needs_copy(const fst_loader *loader, const fsti_plan_item *item) {
    const fsti_tensor *tensor = &loader->files[item->file].header->tensors[item->tensor];
    if (loader->mode != FST_MODE_MAP || item->size_bytes == 0) return false;
    return item->file_offset == UINT64_MAX ||
           item->file_offset % fsti_dtype_alignment((fst_dtype)tensor->dtype) != 0;
}

/// The address of an item's bytes and a new reference to their owner; NULL: the caller owns them.
static char *locate(const fst_loader *loader, const tensor_source *source, fsti_buffer **owner) {
    const fsti_plan_item *item = source->item;
    *owner = NULL;
    if (item->destination != NULL || item->size_bytes == 0) return item->destination;
    bool is_view = source->buffer == NULL;
    *owner = fsti_buffer_ref(is_view ? loader->files[item->file].view : source->buffer);
    return is_view ? (*owner)->data + item->file_offset
                   : fsti_plan_item_address(item, source->buffer->data);
}

/// Makes a tensor for view->data. Takes over `buffer`, also on failure.
static fst_status make_tensor(fsti_header *header, fsti_buffer *buffer, const fst_tensor_view *view,
                              fst_tensor **out, fst_error *error) {
    size_t shape_bytes = view->rank * sizeof(uint64_t);
    fst_tensor *tensor = fsti_alloc(sizeof *tensor + shape_bytes);
    if (tensor == NULL) {
        fsti_buffer_unref(buffer);
        return fsti_error_memory(error, sizeof *tensor + shape_bytes);
    }
    fsti_refcount_init(&tensor->refs);
    tensor->header = fsti_header_ref(header);
    tensor->buffer = buffer;
    if (shape_bytes > 0) memcpy(tensor->shape, view->shape, shape_bytes);
    tensor->view = *view;
    tensor->view.shape = tensor->shape;
    tensor->view.writable = buffer == NULL || buffer->writable;
    *out = tensor;
    return FST_OK;
}

fst_status fsti_tensor_make(fst_loader *loader, const tensor_source *source, fst_tensor **out,
                            fst_error *error) {
    const fsti_plan_item *item = source->item;
    fsti_header *header = loader->model->files[item->file].header;
    const fsti_tensor *entry = &header->tensors[item->tensor];
    fsti_buffer *buffer;
    char *data = locate(loader, source, &buffer);
    fst_tensor_view view = {.name = fsti_header_name(header, entry),
                            .name_size = entry->name_size,
                            .dtype = source->want->dtype,
                            .rank = entry->rank,
                            .shape = item->shape,
                            .size_bytes = item->size_bytes,
                            .data = data,
                            .device = loader->device_id};
    return make_tensor(header, buffer, &view, out, error);
}

/// Whether bytes begin <= i < end of a tensor are in the page cache, and the tensor can be used as
/// it lies in the file.
static bool is_cached(const fst_model *model, model_entry position, uint64_t begin, uint64_t end) {
    const model_file *file = &model->files[position.file];
    const fsti_tensor *entry = &file->header->tensors[position.tensor];
    uint64_t first = file->header->data_begin + entry->begin, resident = 0;
    if (model->verification != NULL || begin == end) return false;
    if (first % fsti_dtype_alignment((fst_dtype)entry->dtype) != 0) return false;
    return fsti_file_resident(file->file, first + begin, first + end, &resident) &&
           resident >= end - begin;
}

fst_status fsti_cached_view(fst_model *model, size_t tensor_index, uint64_t begin, uint64_t end,
                            fst_tensor **out, fst_error *error) {
    model_entry position = fsti_model_entry(model, tensor_index);
    const model_file *file = &model->files[position.file];
    fsti_header *header = file->header;
    const fsti_tensor *entry = &header->tensors[position.tensor];
    fsti_buffer *mapping;
    char *data;
    if (begin > end || end > entry->end - entry->begin)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "range beyond the tensor");
    FST_TRY(fsti_file_check(file->file, error));
    if (!is_cached(model, position, begin, end)) return FST_OK;
    // If the system refuses the mapping the caller reads the tensor instead.
    if (fsti_model_map_tensor(model, position, &mapping, &data, NULL) != FST_OK) return FST_OK;
    fst_tensor_view view = {.name = fsti_header_name(header, entry),
                            .name_size = entry->name_size,
                            .dtype = (fst_dtype)entry->dtype,
                            .rank = entry->rank,
                            .shape = fsti_header_shape(header, entry),
                            .size_bytes = entry->end - entry->begin,
                            .data = data};
    return make_tensor(header, mapping, &view, out, error);
}
