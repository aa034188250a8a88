// SPDX-License-Identifier: Apache-2.0
/// DLPack export. The capsule owns a C reference, so its deleter needs neither the GIL nor an
/// interpreter: a consumer may drop it from any thread, even at exit.
#include "module.h"

#include <stdlib.h>
#include <string.h>

/// DLPack has no packed sub-byte types, so these are exported as bytes.
static dl_type type_of(fst_dtype dtype) {
    static const uint8_t codes[FST_DTYPE_COUNT] = {
        [FST_DTYPE_BOOL] = DL_BOOL,
        [FST_DTYPE_F4] = DL_UINT,
        [FST_DTYPE_F6_E2M3] = DL_UINT,
        [FST_DTYPE_F6_E3M2] = DL_UINT,
        [FST_DTYPE_U8] = DL_UINT,
        [FST_DTYPE_I8] = DL_INT,
        [FST_DTYPE_F8_E5M2] = DL_FLOAT8_E5M2,
        [FST_DTYPE_F8_E4M3] = DL_FLOAT8_E4M3FN,
        [FST_DTYPE_F8_E8M0] = DL_FLOAT8_E8M0FNU,
        [FST_DTYPE_F8_E4M3FNUZ] = DL_FLOAT8_E4M3FNUZ,
        [FST_DTYPE_F8_E5M2FNUZ] = DL_FLOAT8_E5M2FNUZ,
        [FST_DTYPE_I16] = DL_INT,
        [FST_DTYPE_U16] = DL_UINT,
        [FST_DTYPE_F16] = DL_FLOAT,
        [FST_DTYPE_BF16] = DL_BFLOAT,
        [FST_DTYPE_I32] = DL_INT,
        [FST_DTYPE_U32] = DL_UINT,
        [FST_DTYPE_F32] = DL_FLOAT,
        [FST_DTYPE_C64] = DL_COMPLEX,
        [FST_DTYPE_F64] = DL_FLOAT,
        [FST_DTYPE_I64] = DL_INT,
        [FST_DTYPE_U64] = DL_UINT,
    };
    uint32_t bits = fst_dtype_bits(dtype);
    return (dl_type){codes[dtype], (uint8_t)(bits < 8 ? 8 : bits), 1};
}

dl_device fstpy_dlpack_device(const fst_tensor_view *view) {
    // Pinned memory is exported as CPU memory; frameworks detect pinning themselves.
    if (view->device.kind == FST_DEVICE_CUDA) return (dl_device){DL_CUDA, view->device.index};
    if (view->device.kind == FST_DEVICE_HIP) return (dl_device){DL_ROCM, view->device.index};
    return (dl_device){DL_CPU, 0};
}

/// Whether dimensions, and the strides that consumers compute of them, fit into int64_t. Torch
/// frees a tensor twice if they do not, and counts a dimension of 0 as 1. Only tensors without
/// elements can be so large.
static int has_strides(const fst_tensor_view *view) {
    int64_t stride = 1;
    for (uint32_t i = view->rank; i-- > 0;) {
        if (view->shape[i] > INT64_MAX) return 0;
        int64_t size = view->shape[i] > 0 ? (int64_t)view->shape[i] : 1;
        if (i > 0 && __builtin_mul_overflow(stride, size, &stride)) return 0;
    }
    return 1;
}

/// Fills `out`; `shape` has space for the rank, at least 1. False if a dimension does not fit.
static int describe(const fst_tensor_view *view, int64_t *shape, int as_bytes, dl_tensor *out) {
    *out = (dl_tensor){.data = view->data,
                       .device = fstpy_dlpack_device(view),
                       .rank = (int32_t)view->rank,
                       .type = type_of(view->dtype),
                       .shape = shape};
    if (as_bytes || fst_dtype_bits(view->dtype) < 8) {
        out->type = (dl_type){DL_UINT, 8, 1};
        out->rank = 1;
        shape[0] = (int64_t)view->size_bytes;
        return 1;
    }
    if (!has_strides(view)) return 0;
    for (uint32_t i = 0; i < view->rank; i++) shape[i] = (int64_t)view->shape[i];
    return 1;
}

static void delete_managed(dl_managed *self) {
    fst_tensor_unref(self->context);
    free(self);
}

static void delete_versioned(dl_managed_versioned *self) {
    fst_tensor_unref(self->context);
    free(self);
}

/// Only an unconsumed capsule still has its original name.
static void destroy_capsule(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

static void destroy_versioned(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;
    dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    managed->deleter(managed);
}

/// Allocates a managed struct of `size` bytes followed by its shape. Uses malloc(), because the
/// deleter may run after the interpreter has ended.
static void *alloc_managed(fst_tensor *tensor, size_t size, size_t tensor_at, int as_bytes) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return NULL;
    char *block = calloc(1, size + ((size_t)view.rank + 1) * sizeof(int64_t));
    if (block == NULL) {
        PyErr_NoMemory();
    } else if (!describe(&view, (int64_t *)(void *)(block + size), as_bytes,
                         (dl_tensor *)(void *)(block + tensor_at))) {
        PyErr_SetString(PyExc_BufferError, "dimensions or strides exceed the limit of DLPack");
        free(block);
        block = NULL;
    }
    return block;
}

PyObject *fstpy_dlpack_capsule(fst_tensor *tensor, int as_bytes) {
    dl_managed *managed =
        alloc_managed(tensor, sizeof *managed, offsetof(dl_managed, tensor), as_bytes);
    if (managed == NULL) {
        fst_tensor_unref(tensor);
        return NULL;
    }
    managed->context = tensor;
    managed->deleter = delete_managed;
    PyObject *capsule = PyCapsule_New(managed, "dltensor", destroy_capsule);
    if (capsule == NULL) delete_managed(managed);
    return capsule;
}

PyObject *fstpy_dlpack_capsule_versioned(fst_tensor *tensor) {
    dl_managed_versioned *managed =
        alloc_managed(tensor, sizeof *managed, offsetof(dl_managed_versioned, tensor), 0);
    if (managed == NULL) {
        fst_tensor_unref(tensor);
        return NULL;
    }
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_tensor_view_get(tensor, &view, NULL) == FST_OK && !view.writable)
        managed->flags = DL_FLAG_READ_ONLY;
    managed->major = 1;
    managed->context = tensor;
    managed->deleter = delete_versioned;
    PyObject *capsule = PyCapsule_New(managed, "dltensor_versioned", destroy_versioned);
    if (capsule == NULL) delete_versioned(managed);
    return capsule;
}

/// For foreign memory the capsule holds its owner, an object of the main interpreter.
static void delete_foreign(dl_managed *self) {
    if (self->context != NULL && Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF((PyObject *)self->context);
        PyGILState_Release(gil);
    }
    free(self);
}

/// Reads `count` numbers of a list into `target`. False with an exception.
static int read_dimensions(PyObject *list, int64_t *target, Py_ssize_t count) {
    if (PySequence_Size(list) != count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "the number of strides must equal the number of dimensions");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = PySequence_GetItem(list, i);
        target[i] = number == NULL ? 0 : PyLong_AsLongLong(number);
        Py_XDECREF(number);
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

static int find_type(const module_state *state, PyObject *name, dl_type *out) {
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        *out = type_of((fst_dtype)i);
        if (PyObject_RichCompareBool(name, state->dtype_names[i], Py_EQ) == 1) return 1;
    }
    PyErr_Format(PyExc_ValueError, "unknown dtype %R", name);
    return 0;
}

PyObject *fstpy_dlpack_at(PyObject *module, PyObject *args) {
    unsigned long long address;
    PyObject *shape, *strides, *dtype, *owner;
    int kind, number;
    dl_type type;
    if (!PyArg_ParseTuple(args, "KOOU(ii)O:dlpack_at", &address, &shape, &strides, &dtype, &kind,
                          &number, &owner))
        return NULL;
    Py_ssize_t rank = PySequence_Size(shape);
    if (owner != Py_None && !fstpy_is_main_interpreter()) return NULL;
    if (rank < 0 || !find_type(PyModule_GetState(module), dtype, &type)) return NULL;
    dl_managed *managed = calloc(1, sizeof *managed + 2 * (size_t)rank * sizeof(int64_t) + 1);
    if (managed == NULL) return PyErr_NoMemory();
    int64_t *numbers = (int64_t *)(void *)(managed + 1);
    managed->tensor = (dl_tensor){.data = (void *)(uintptr_t)address,
                                  .device = {kind, number},
                                  .rank = (int32_t)rank,
                                  .type = type,
                                  .shape = numbers,
                                  .strides = numbers + rank};
    managed->deleter = delete_foreign;
    if (!read_dimensions(shape, numbers, rank) || !read_dimensions(strides, numbers + rank, rank)) {
        free(managed);
        return NULL;
    }
    if (owner != Py_None) managed->context = Py_NewRef(owner);
    PyObject *capsule = PyCapsule_New(managed, "dltensor", destroy_capsule);
    if (capsule == NULL) delete_foreign(managed);
    return capsule;
}

PyObject *fstpy_dlpack_probe(PyObject *module, PyObject *dtype_name) {
    static uint64_t zero; // the contents of every probe; never written
    module_state *state = PyModule_GetState(module);
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        int equal = PyObject_RichCompareBool(dtype_name, state->dtype_names[i], Py_EQ);
        if (equal < 0) return NULL;
        if (!equal) continue;
        uint64_t one = 1;
        fst_tensor_view view = {.struct_size = sizeof view,
                                .dtype = (fst_dtype)i,
                                .rank = 1,
                                .shape = &one,
                                .size_bytes = 1,
                                .data = &zero};
        dl_managed *managed = calloc(1, sizeof *managed + sizeof(int64_t));
        if (managed == NULL) return PyErr_NoMemory();
        describe(&view, (int64_t *)(void *)(managed + 1), 0, &managed->tensor);
        managed->deleter = delete_managed;
        PyObject *capsule = PyCapsule_New(managed, "dltensor", destroy_capsule);
        if (capsule == NULL) delete_managed(managed);
        return capsule;
    }
    PyErr_Format(PyExc_ValueError, "unknown dtype %R", dtype_name);
    return NULL;
}
