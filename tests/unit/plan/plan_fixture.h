// SPDX-License-Identifier: Apache-2.0
/// Headers for plans, and a simple planner to compare with.
#ifndef PLAN_FIXTURE_H
#define PLAN_FIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

/// A header of tensors of any shape, one behind the other.
typedef struct model {
    fsti_header header;
    fsti_tensor tensors[64];
    uint64_t shapes[256];
    char names[64];
    uint64_t shape_count;
} model;

static inline void add_tensor(model *m, fst_dtype dtype, uint32_t rank, const uint64_t *shape) {
    fsti_header *header = &m->header;
    fsti_tensor *tensor = &m->tensors[header->tensor_count++];
    uint64_t count = 1, bytes = 0;
    for (uint32_t i = 0; i < rank; i++) {
        m->shapes[m->shape_count + i] = shape[i];
        count *= shape[i];
    }
    if (fsti_dtype_size(dtype, count, &bytes) != FST_OK) abort();
    *tensor = (fsti_tensor){.begin = header->data_bytes,
                            .end = header->data_bytes + bytes,
                            .shape_at = (uint32_t)m->shape_count,
                            .rank = rank,
                            .name_size = 1,
                            .dtype = (uint8_t)dtype};
    m->shape_count += rank;
    header->data_bytes += bytes;
}

static inline void init_model(model *m, uint64_t data_begin) {
    memset(m, 0, sizeof *m);
    m->names[0] = 't';
    m->header = (fsti_header){
        .tensors = m->tensors, .shapes = m->shapes, .bytes = m->names, .data_begin = data_begin};
}

static const fsti_plan_rules plain_rules = {
    .order = FST_ORDER_FILE, .batch_bytes_max = UINT64_MAX, .gaps = {4096, 4096}};

/// Plans without conversion: every want keeps its tensor's dtype.
static inline fst_status make_plan(const fsti_plan_file *files, fsti_plan_want *wants, size_t count,
                                   const fsti_plan_rules *rules, fsti_plan *plan,
                                   fst_error *error) {
    for (size_t i = 0; i < count; i++)
        wants[i].dtype = (fst_dtype)files[wants[i].file].header->tensors[wants[i].tensor].dtype;
    return fsti_plan_make(files, wants, count, rules, plan, error);
}

#endif
