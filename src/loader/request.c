// SPDX-License-Identifier: Apache-2.0
/// Resolves the public request to requests of the plan.
#include <string.h>

#include "load.h"

/// `all`: each of the `count` requests will be written.
static fst_status alloc_wants(fst_loader *loader, size_t count, bool all, uint64_t slice_numbers,
                              fst_error *error) {
    loader->wants = all ? fsti_alloc_filled(count * sizeof *loader->wants)
                        : fsti_alloc_zeroed(count, sizeof *loader->wants);
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
    FST_TRY(alloc_wants(loader, model->tensor_count, all, 0, error));
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

static fst_status check_part(const fst_loader *loader, const fst_part *part, size_t index,
                             fst_error *error) {
    const char *fault = NULL;
    if (part->tensor_index >= loader->model->entry_count)
        fault = "tensor index out of range";
    else if ((part->begin == NULL) != (part->end == NULL))
        fault = "a slice needs both begin and end";
    else if (part->destination != NULL && loader->options.mode == FST_MODE_MAP)
        fault = "a mapped tensor can't have a destination";
    if (fault == NULL) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "part %zu: %s", index, fault);
}

static uint32_t part_rank(const fst_loader *loader, const fst_part *part) {
    model_entry entry = fsti_model_entry(loader->model, part->tensor_index);
    return loader->model->files[entry.file].header->tensors[entry.tensor].rank;
}

static fst_status copy_parts(fst_loader *loader, const fst_load_options *options,
                             fst_error *error) {
    uint64_t slice_numbers = 0;
    for (size_t i = 0; i < options->part_count; i++) {
        const fst_part *part = &options->parts[i];
        FST_TRY(check_part(loader, part, i, error));
        if (part->begin != NULL) slice_numbers += 2u * (uint64_t)part_rank(loader, part);
    }
    FST_TRY(alloc_wants(loader, options->part_count, true, slice_numbers, error));
    uint64_t *numbers = loader->slices;
    for (size_t i = 0; i < options->part_count; i++) {
        const fst_part *part = &options->parts[i];
        model_entry entry = fsti_model_entry(loader->model, part->tensor_index);
        fsti_plan_want *want = &loader->wants[i];
        *want = (fsti_plan_want){.file = entry.file,
                                 .tensor = entry.tensor,
                                 .tensor_index = part->tensor_index,
                                 .destination = part->destination,
                                 .destination_bytes = part->destination_bytes};
        uint32_t rank = part_rank(loader, part);
        if (part->begin == NULL) continue;
        want->slice_begin = numbers;
        want->slice_end = numbers + rank;
        for (uint32_t d = 0; d < rank; d++) {
            numbers[d] = part->begin[d];
            numbers[rank + d] = part->end[d];
        }
        numbers += 2u * (size_t)rank;
    }
    loader->plan.item_count = options->part_count;
    return FST_OK;
}

/// The dtype of a tensor after conversion.
static fst_dtype target_dtype(const fst_loader *loader, const fsti_plan_want *want) {
    const fsti_header *header = loader->files[want->file].header;
    fst_dtype own = (fst_dtype)header->tensors[want->tensor].dtype;
    fst_dtype wished = loader->options.dtype;
    return loader->options.convert && fsti_dtype_convertible(own, wished) ? wished : own;
}

fst_status fsti_loader_resolve(fst_loader *loader, const fst_load_options *options,
                               fst_error *error) {
    FST_TRY(options->parts != NULL ? copy_parts(loader, options, error)
                                   : select_tensors(loader, options, error));
    for (size_t i = 0; i < loader->plan.item_count; i++)
        loader->wants[i].dtype = target_dtype(loader, &loader->wants[i]);
    return FST_OK;
}
