// SPDX-License-Identifier: Apache-2.0
/// Tensor: one loaded tensor, shown to frameworks by DLPack and by numpy's array interface.
#include "module.h"

#include <string.h>

typedef struct tensor_object {
    PyObject_HEAD fst_tensor *tensor;
} tensor_object;

static fst_tensor_view view_of(PyObject *self) {
    fst_tensor_view view = {0};
    if (fst_tensor_view_get(((tensor_object *)self)->tensor, &view, NULL) != FST_OK)
        memset(&view, 0, sizeof view);
    return view;
}

PyObject *fstpy_tensor_wrap(module_state *state, fst_tensor *tensor) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->tensor_type, Py_tp_alloc);
    PyObject *self = allocate(state->tensor_type, 0);
    if (self == NULL) {
        fst_tensor_unref(tensor);
        return NULL;
    }
    ((tensor_object *)self)->tensor = tensor;
    return self;
}

static void tensor_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    fst_tensor_unref(((tensor_object *)self)->tensor);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyObject *fstpy_shape(const uint64_t *shape, uint32_t rank) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)rank);
    for (uint32_t i = 0; tuple != NULL && i < rank; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(shape[i]);
        if (number == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, number) != 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *get_name(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    return PyUnicode_DecodeUTF8(view.name, (Py_ssize_t)view.name_size, NULL);
}

static PyObject *get_dtype(PyObject *self, void *closure) {
    (void)closure;
    return Py_NewRef(fstpy_state(Py_TYPE(self))->dtype_names[view_of(self).dtype]);
}

static PyObject *get_shape(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    return fstpy_shape(view.shape, view.rank);
}

static PyObject *get_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(view_of(self).size_bytes);
}

static PyObject *get_data_ptr(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(view_of(self).data);
}

static PyObject *get_writable(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(view_of(self).writable);
}

/// numpy's protocol, version 3. Types that numpy lacks are shown as unsigned integers of their
/// width, sub-byte types as bytes.
static const char *typestr_of(fst_dtype dtype) {
    switch (dtype) {
    case FST_DTYPE_BOOL: return "|b1";
    case FST_DTYPE_I8: return "|i1";
    case FST_DTYPE_I16: return "<i2";
    case FST_DTYPE_U16:
    case FST_DTYPE_BF16: return "<u2";
    case FST_DTYPE_F16: return "<f2";
    case FST_DTYPE_I32: return "<i4";
    case FST_DTYPE_U32: return "<u4";
    case FST_DTYPE_F32: return "<f4";
    case FST_DTYPE_C64: return "<c8";
    case FST_DTYPE_F64: return "<f8";
    case FST_DTYPE_I64: return "<i8";
    case FST_DTYPE_U64: return "<u8";
    default: return "|u1";
    }
}

static PyObject *get_array_interface(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    uint64_t bytes[1] = {view.size_bytes};
    int packed = fst_dtype_bits(view.dtype) < 8;
    PyObject *shape = packed ? fstpy_shape(bytes, 1) : fstpy_shape(view.shape, view.rank);
    if (shape == NULL) return NULL;
    // numpy refuses a null pointer even for no bytes.
    unsigned long long address =
        (unsigned long long)(uintptr_t)(view.data == NULL ? (void *)self : view.data);
    return Py_BuildValue("{s:N,s:s,s:(KN),s:i}", "shape", shape, "typestr", typestr_of(view.dtype),
                         "data", address, PyBool_FromLong(!view.writable), "version", 3);
}

static PyObject *tensor_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", "as_bytes", NULL};
    PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
    int as_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOp:__dlpack__", names, &stream, &version,
                                     &device, &copy, &as_bytes))
        return NULL;
    if (stream != Py_None) {
        PyErr_SetString(PyExc_BufferError, "a CPU tensor has no stream");
        return NULL;
    }
    int major = 0, minor = 0, type = 1, id = 0;
    if (version != Py_None && !PyArg_ParseTuple(version, "ii", &major, &minor)) return NULL;
    if (device != Py_None && !PyArg_ParseTuple(device, "ii", &type, &id)) return NULL;
    if (type != 1 || copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "only an export to the CPU without a copy is possible");
        return NULL;
    }
    fst_tensor *tensor = ((tensor_object *)self)->tensor;
    if (major >= 1) return fstpy_dlpack_capsule_versioned(fst_tensor_ref(tensor));
    if (!view_of(self).writable) {
        PyErr_SetString(PyExc_BufferError, "a read-only tensor needs DLPack 1.0");
        return NULL;
    }
    return fstpy_dlpack_capsule(fst_tensor_ref(tensor), as_bytes);
}

static PyObject *tensor_dlpack_device(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    return Py_BuildValue("(ii)", 1, 0);
}

/// numpy's struct of the same protocol: several times faster to take than the dictionary.
/// https://numpy.org/doc/stable/reference/arrays.interface.html#c-struct-access
typedef struct array_struct {
    int two, rank;
    char kind;
    int item_bytes, flags;
    Py_ssize_t *shape, *strides;
    void *data;
    PyObject *description;
    Py_ssize_t numbers[]; ///< shape, then strides
} array_struct;

#define ARRAY_PACKED 0x1
#define ARRAY_ALIGNED 0x100
#define ARRAY_NATIVE 0x200
#define ARRAY_WRITEABLE 0x400

static void free_array_struct(PyObject *capsule) {
    PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

/// numpy keeps the Tensor itself alive, not the capsule.
static PyObject *get_array_struct(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    const char *type = typestr_of(view.dtype);
    // Sub-byte types are shown as their bytes, in one dimension.
    Py_ssize_t bytes = (Py_ssize_t)view.size_bytes;
    int is_flat = fst_dtype_bits(view.dtype) < 8, rank = is_flat ? 1 : (int)view.rank;
    size_t size = sizeof(array_struct) + 2 * (size_t)rank * sizeof(Py_ssize_t);
    array_struct *made = PyMem_Calloc(1, size);
    if (made == NULL) return PyErr_NoMemory();
    made->two = 2;
    made->rank = rank;
    made->kind = type[1];
    made->item_bytes = type[2] - '0';
    made->flags = ARRAY_PACKED | ARRAY_NATIVE | (view.writable ? ARRAY_WRITEABLE : 0) |
                  ((uintptr_t)view.data % (uintptr_t)made->item_bytes == 0 ? ARRAY_ALIGNED : 0);
    made->shape = made->numbers;
    made->strides = made->numbers + rank;
    made->data = view.data;
    Py_ssize_t stride = made->item_bytes;
    for (int i = rank - 1; i >= 0; i--) {
        made->shape[i] = is_flat ? bytes : (Py_ssize_t)view.shape[i];
        made->strides[i] = stride;
        stride *= made->shape[i];
    }
    PyObject *capsule = PyCapsule_New(made, NULL, free_array_struct);
    if (capsule == NULL) PyMem_Free(made);
    return capsule;
}

static PyObject *tensor_repr(PyObject *self) {
    PyObject *name = get_name(self, NULL), *shape = get_shape(self, NULL);
    PyObject *text = name == NULL || shape == NULL
                         ? NULL
                         : PyUnicode_FromFormat("<fastsafetensors.Tensor %R %s %R>", name,
                                                fst_dtype_name(view_of(self).dtype), shape);
    Py_XDECREF(name);
    Py_XDECREF(shape);
    return text;
}

static PyGetSetDef tensor_getset[] = {
    {"name", get_name, NULL, "Name in the file.", NULL},
    {"dtype", get_dtype, NULL, "The format's dtype name, e.g. 'BF16'.", NULL},
    {"shape", get_shape, NULL, "Shape in elements, a tuple of int.", NULL},
    {"nbytes", get_nbytes, NULL, "Size in bytes.", NULL},
    {"data_ptr", get_data_ptr, NULL, "Address of the first byte.", NULL},
    {"writable", get_writable, NULL, "Whether its memory may be written to.", NULL},
    {"__array_struct__", get_array_struct, NULL, "numpy's array interface as a struct.", NULL},
    {"__array_interface__", get_array_interface, NULL, "numpy's array interface.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS,
     "A DLPack capsule that keeps the memory alive by itself."},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, "(1, 0): the CPU."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, "One loaded tensor. It owns its memory, whatever is closed before it."},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_repr, tensor_repr},
    {Py_tp_getset, tensor_getset},
    {Py_tp_methods, tensor_methods},
    {0, NULL},
};

PyType_Spec fstpy_tensor_spec = {
    .name = "fastsafetensors._core.Tensor",
    .basicsize = sizeof(tensor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tensor_slots,
};
