// SPDX-License-Identifier: Apache-2.0
#include "slice_request.h"

/// Assigns the parts of an index expression to dimensions; NULL: the whole dimension (for an
/// Ellipsis, and missing ones at the end). 0: not supported here.
static int spread_parts(PyObject *key, Py_ssize_t rank, PyObject **by_dimension) {
    int is_tuple = PyTuple_CheckExact(key);
    Py_ssize_t count = is_tuple ? PyTuple_Size(key) : 1, skipped = 0, dots = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = is_tuple ? PyTuple_GetItem(key, i) : key;
        if (part == Py_Ellipsis) {
            if (dots++ > 0) return 0;
            skipped = rank - count; // an Ellipsis counts as a part
        } else if (i + skipped < rank) {
            by_dimension[i + skipped] = part;
        } else {
            return 0;
        }
    }
    return count - dots <= rank;
}

static int keep_dimension(slice_request *out, uint32_t dimension, uint64_t first, uint64_t last) {
    out->begin[dimension] = first;
    out->end[dimension] = last;
    out->shape[out->rank++] = last - first;
    out->count *= last - first;
    return 1;
}

static int read_slice(PyObject *part, uint64_t size, uint32_t dimension, slice_request *out) {
    Py_ssize_t first, last, step;
    if (PySlice_Unpack(part, &first, &last, &step) != 0) {
        PyErr_Clear(); // invalid numbers are reported by the general planner
        return 0;
    }
    if (step != 1) return 0;
    Py_ssize_t count = PySlice_AdjustIndices((Py_ssize_t)size, &first, &last, step);
    out->is_whole = out->is_whole && (uint64_t)count == size;
    return keep_dimension(out, dimension, (uint64_t)first, (uint64_t)(first + count));
}

static int read_number(PyObject *part, uint64_t size, uint32_t dimension, slice_request *out) {
    int overflow;
    long long at = PyLong_AsLongLongAndOverflow(part, &overflow);
    if (at < 0) at += (long long)size;
    if (overflow != 0 || at < 0 || (uint64_t)at >= size) return 0;
    out->begin[dimension] = (uint64_t)at;
    out->end[dimension] = (uint64_t)at + 1;
    out->is_whole = 0;
    return 1;
}

int fstpy_read_slice(PyObject *key, const fst_tensor_info *info, slice_request *out) {
    PyObject *parts[FSTPY_SLICE_RANK_MAX] = {NULL};
    *out = (slice_request){.count = 1, .is_whole = 1};
    if (info->rank > FSTPY_SLICE_RANK_MAX) return 0;
    if (!spread_parts(key, (Py_ssize_t)info->rank, parts)) return 0;
    for (uint32_t d = 0; d < info->rank; d++) {
        int known = 0;
        if (parts[d] == NULL)
            known = keep_dimension(out, d, 0, info->shape[d]);
        else if (PyLong_CheckExact(parts[d]))
            known = read_number(parts[d], info->shape[d], d, out);
        else if (PySlice_Check(parts[d]))
            known = read_slice(parts[d], info->shape[d], d, out);
        if (!known) return 0;
    }
    return 1;
}
