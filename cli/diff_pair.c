// SPDX-License-Identifier: Apache-2.0
/// Compares pairs of tensors, loading the same pieces of both ahead.
#include "diff_pair.h"

#include <math.h>
#include <string.h>

#define PIECE_BYTES ((uint64_t)8 << 20)
#define BUDGET_BYTES ((uint64_t)48 << 20)

typedef void (*piece_visitor)(void *context, const fst_tensor_view *a, const fst_tensor_view *b);

static fst_status open_side(tensor_pair *pair, int side, const fst_dtype *dtype, fst_loader **out,
                            fst_error *error) {
    cli_pieces_of(&pair->pieces, pair->indexes[side]);
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .order = FST_ORDER_REQUEST,
                                .parts = pair->pieces.items,
                                .part_count = pair->pieces.count,
                                .budget_bytes = BUDGET_BYTES,
                                .tuning = &cli_unmapped_reads};
    if (dtype != NULL) {
        options.convert = 1;
        options.dtype = *dtype;
    }
    // A sub-byte tensor that cannot be split may exceed the budget.
    if (pair->pieces.count == 1) options.budget_bytes = 0;
    return fst_loader_open(pair->models[side], &options, out, error);
}

/// Visits the pieces of both sides together, converted to `dtype` unless it is NULL.
static fst_status visit_pieces(tensor_pair *pair, const fst_dtype *dtype, piece_visitor visit,
                               void *context, fst_error *error) {
    fst_loader *loaders[2] = {NULL, NULL};
    fst_status status = FST_OK;
    for (int side = 0; side < 2 && status == FST_OK; side++)
        status = open_side(pair, side, dtype, &loaders[side], error);
    for (size_t i = 0; i < pair->pieces.count && status == FST_OK; i++) {
        fst_tensor *tensors[2] = {NULL, NULL};
        fst_tensor_view views[2] = {FST_STRUCT_INIT(fst_tensor_view),
                                    FST_STRUCT_INIT(fst_tensor_view)};
        for (int side = 0; side < 2 && status == FST_OK; side++) {
            status = fst_loader_next(loaders[side], -1, &tensors[side], error);
            if (status == FST_OK) status = fst_tensor_view_get(tensors[side], &views[side], error);
        }
        if (status == FST_OK) visit(context, &views[0], &views[1]);
        fst_tensor_unref(tensors[0]);
        fst_tensor_unref(tensors[1]);
    }
    fst_loader_close(loaders[0]);
    fst_loader_close(loaders[1]);
    return status;
}

static void visit_bytes(void *context, const fst_tensor_view *a, const fst_tensor_view *b) {
    bool *same = context;
    if (*same && memcmp(a->data, b->data, a->size_bytes) != 0) *same = false;
}

/// Also true for two infinities and for two NaNs of any bits, whose differences are NaN.
static bool same_values(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

/// The difference of element `i`; 0: equal. False if the dtype has no numbers.
static bool compare_element(const fst_tensor_view *a, const fst_tensor_view *b, uint64_t i,
                            double *difference) {
    double left, right;
    if (cli_is_integer(a->dtype)) {
        uint64_t keys[2] = {cli_integer_key(a, i), cli_integer_key(b, i)};
        *difference = (double)(keys[0] > keys[1] ? keys[0] - keys[1] : keys[1] - keys[0]);
        return true;
    }
    if (!cli_value_at(a, i, &left) || !cli_value_at(b, i, &right)) return false;
    *difference = same_values(left, right) ? 0 : fabs(left - right);
    return true;
}

static void visit_values(void *context, const fst_tensor_view *a, const fst_tensor_view *b) {
    value_summary *summary = context;
    uint64_t bits = fst_dtype_bits(a->dtype);
    if (a->dtype != b->dtype || a->size_bytes != b->size_bytes) return;
    for (uint64_t i = 0; i < a->size_bytes * 8 / bits; i++) {
        double difference;
        if (!compare_element(a, b, i, &difference)) return;
        summary->known = true;
        summary->element_count++;
        if (difference == 0) continue;
        summary->differing++;
        if (diff_exceeds(difference, summary->max)) summary->max = difference;
        summary->sum += difference;
    }
}

bool diff_pair_cut(tensor_pair *pair) {
    // Pieces are sized by their values as 64-bit numbers, to stay within the budget, and by the
    // smaller element, whose bytes must be whole.
    uint64_t bits[2] = {fst_dtype_bits(pair->infos[0].dtype), fst_dtype_bits(pair->infos[1].dtype)};
    int least = bits[1] < bits[0];
    return cli_pieces_cut(&pair->pieces, &pair->infos[least], bits[least],
                          PIECE_BYTES * bits[least] / 64);
}

void diff_pair_clear(tensor_pair *pair) { cli_pieces_clear(&pair->pieces); }

fst_status diff_pair_bytes(tensor_pair *pair, bool *same, fst_error *error) {
    *same = true;
    return pair->pieces.count > 0 ? visit_pieces(pair, NULL, visit_bytes, same, error) : FST_OK;
}

fst_status diff_pair_values(tensor_pair *pair, value_summary *summary, fst_error *error) {
    fst_dtype wide[2] = {cli_value_dtype(pair->infos[0].dtype),
                         cli_value_dtype(pair->infos[1].dtype)};
    *summary = (value_summary){.known = pair->pieces.count == 0}; // no elements, so no difference
    // Signed and unsigned integers are compared as signed ones, if they fit.
    if (wide[0] != wide[1] && wide[0] != FST_DTYPE_F64 && wide[1] != FST_DTYPE_F64)
        wide[0] = FST_DTYPE_I64;
    return pair->pieces.count > 0 ? visit_pieces(pair, &wide[0], visit_values, summary, error)
                                  : FST_OK;
}
