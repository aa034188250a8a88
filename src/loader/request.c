// SPDX-License-Identifier: Apache-2.0
/// From the public request to wants of the plan.
#include <string.h>

#include "load.h"

static fst_status alloc_wants(fst_loader *loader, size_t count, uint64_t slice_numbers,
                              fst_error *error) {
    loader->wants = fsti_alloc_zeroed(count, sizeof *loader->wants);
    loader->slices = fsti_alloc_zeroed((size_t)slice_numbers, sizeof *loader->slices);
    if (loader->wants == NULL || loader->slices == NULL)
        return fsti_error_memory(error, count * sizeof *loader->wants);
    return FST_OK;
}

static fst_status select_tensors(fst_loader *loader, const fst_load_options *options,
                                 fst_error *error) {
    const fst_model *model = loader->model;
    fsti_plan_selection selection = {.globs = options->globs,
                                     .glob_count = options->glob_count,
                                     .predicate = options->predicate,
                                     .predicate_context = options->predicate_context};
    bool all = selection.glob_count == 0 && selection.predicate == NULL;
    size_t count = 0;
    FST_TRY(alloc_wants(loader, model->tensor_count, 0, error));
    for (size_t i = 0; i < model->tensor_count; i++) {
        if (!all) {
            fst_tensor_info info;
            fsti_model_tensor_info(model, i, &info);
            if (!fsti_plan_selects(&selection, &info)) continue;
        }
        model_entry entry = fsti_model_entry(model, i);
        loader->wants[count++] =
            (fsti_plan_want){.file = entry.file, .tensor = entry.tensor, .tensor_index = i};
    }
    loader->plan.item_count = count;
    return FST_OK;
}

static fst_status check_item(const fst_loader *loader, const fst_request_item *item, size_t index,
                             fst_error *error) {
    const char *fault = NULL;
    if (item->tensor_index >= loader->model->entry_count)
        fault = "tensor index out of range";
    else if ((item->slice_begin == NULL) != (item->slice_end == NULL))
        fault = "slice has only one of begin and end";
    else if (item->destination != NULL && loader->options.mode == FST_MODE_MAP)
        fault = "a view can't be put into a destination";
    if (fault == NULL) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE, "item %zu: %s", index, fault);
}

static uint32_t item_rank(const fst_loader *loader, const fst_request_item *item) {
    model_entry entry = fsti_model_entry(loader->model, item->tensor_index);
    return loader->model->files[entry.file].header->tensors[entry.tensor].rank;
}

static fst_status copy_items(fst_loader *loader, const fst_load_options *options,
                             fst_error *error) {
    uint64_t slice_numbers = 0;
    for (size_t i = 0; i < options->item_count; i++) {
        const fst_request_item *item = &options->items[i];
        FST_TRY(check_item(loader, item, i, error));
        if (item->slice_begin != NULL) slice_numbers += 2u * (uint64_t)item_rank(loader, item);
    }
    FST_TRY(alloc_wants(loader, options->item_count, slice_numbers, error));
    uint64_t *numbers = loader->slices;
    for (size_t i = 0; i < options->item_count; i++) {
        const fst_request_item *item = &options->items[i];
        model_entry entry = fsti_model_entry(loader->model, item->tensor_index);
        fsti_plan_want *want = &loader->wants[i];
        *want = (fsti_plan_want){.file = entry.file,
                                 .tensor = entry.tensor,
                                 .tensor_index = item->tensor_index,
                                 .destination = item->destination,
                                 .destination_bytes = item->destination_bytes};
        uint32_t rank = item_rank(loader, item);
        if (item->slice_begin == NULL) continue;
        want->slice_begin = numbers;
        want->slice_end = numbers + rank;
        for (uint32_t d = 0; d < rank; d++) {
            numbers[d] = item->slice_begin[d];
            numbers[rank + d] = item->slice_end[d];
        }
        numbers += 2u * (size_t)rank;
    }
    loader->plan.item_count = options->item_count;
    return FST_OK;
}

/// What a tensor's elements become.
static fst_dtype target_dtype(const fst_loader *loader, const fsti_plan_want *want) {
    const fsti_header *header = loader->headers[want->file];
    fst_dtype own = (fst_dtype)header->tensors[want->tensor].dtype;
    fst_dtype wished = loader->options.dtype;
    return loader->options.convert && fsti_dtype_convertible(own, wished) ? wished : own;
}

fst_status fsti_loader_resolve(fst_loader *loader, const fst_load_options *options,
                               fst_error *error) {
    FST_TRY(options->items != NULL ? copy_items(loader, options, error)
                                   : select_tensors(loader, options, error));
    for (size_t i = 0; i < loader->plan.item_count; i++)
        loader->wants[i].dtype = target_dtype(loader, &loader->wants[i]);
    return FST_OK;
}
