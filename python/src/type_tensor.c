// SPDX-License-Identifier: Apache-2.0
/// Tensor: one loaded tensor, exported by DLPack and numpy's array interface.
#include "module.h"

#include <string.h>

typedef struct tensor_object {
    PyObject_HEAD fst_tensor *tensor;
} tensor_object;

static fst_tensor_view view_of(PyObject *self) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
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

/// numpy's array protocol, version 3. Dtypes that numpy lacks are exported as unsigned integers of
/// the same width, sub-byte ones as bytes.
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

/// "cpu", "cuda:1", "hip:0" or "pinned".
static PyObject *get_device(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    switch (view.device.kind) {
    case FST_DEVICE_CUDA: return PyUnicode_FromFormat("cuda:%d", (int)view.device.index);
    case FST_DEVICE_HIP: return PyUnicode_FromFormat("hip:%d", (int)view.device.index);
    case FST_DEVICE_PINNED: return PyUnicode_FromString("pinned");
    default: return PyUnicode_FromString("cpu");
    }
}

static int is_on_device(const fst_tensor_view *view) {
    return view->device.kind == FST_DEVICE_CUDA || view->device.kind == FST_DEVICE_HIP;
}

/// Whether memory is on the CPU. False with an AttributeError, as the protocols expect.
static int is_on_cpu(const fst_tensor_view *view) {
    if (!is_on_device(view)) return 1;
    PyErr_SetString(PyExc_AttributeError, "the tensor is on a device. Use DLPack or copy_to()");
    return 0;
}

static PyObject *array_interface_of(PyObject *self, const fst_tensor_view *view);

/// The protocol for CUDA memory (version 3, as read by numba and cupy). No work is pending, so
/// stream is None.
static PyObject *get_cuda_interface(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    if (view.device.kind == FST_DEVICE_CUDA) return array_interface_of(self, &view);
    PyErr_SetString(PyExc_AttributeError, "the tensor is not on a CUDA device");
    return NULL;
}

static PyObject *get_array_interface(PyObject *self, void *closure) {
    (void)closure;
    fst_tensor_view view = view_of(self);
    return is_on_cpu(&view) ? array_interface_of(self, &view) : NULL;
}

static PyObject *array_interface_of(PyObject *self, const fst_tensor_view *tensor_view) {
    fst_tensor_view view = *tensor_view;
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

/// Checks the consumer's stream according to the array API standard. No synchronisation is needed,
/// because a returned tensor has no pending work.
static int check_stream(const fst_tensor_view *view, PyObject *stream) {
    if (stream == Py_None) return 1;
    if (!is_on_device(view)) {
        PyErr_SetString(PyExc_BufferError, "a CPU tensor has no stream");
        return 0;
    }
    long long number = PyLong_AsLongLong(stream);
    if (number == -1 && PyErr_Occurred()) return 0;
    int is_cuda = view->device.kind == FST_DEVICE_CUDA;
    // 0 is ambiguous for CUDA; 1 and 2 are invalid for ROCm.
    int good = number >= -1 && (is_cuda ? number != 0 : number != 1 && number != 2);
    if (!good) PyErr_Format(PyExc_ValueError, "%lld is not a stream of the device", number);
    return good;
}

/// Reads a tuple of two numbers; None leaves them unchanged. False with an exception.
static int read_pair(PyObject *pair, const char *what, int *first, int *second) {
    if (pair == Py_None) return 1;
    if (PyTuple_Check(pair)) return PyArg_ParseTuple(pair, "ii", first, second);
    PyErr_Format(PyExc_TypeError, "%s must be a tuple of two numbers", what);
    return 0;
}

static PyObject *tensor_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", "as_bytes", NULL};
    PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
    int as_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOp:__dlpack__", names, &stream, &version,
                                     &device, &copy, &as_bytes))
        return NULL;
    fst_tensor_view view = view_of(self);
    dl_device own = fstpy_dlpack_device(&view);
    int major = 0, minor = 0, type = own.type, id = own.id;
    if (!check_stream(&view, stream)) return NULL;
    if (!read_pair(version, "max_version", &major, &minor) ||
        !read_pair(device, "dl_device", &type, &id))
        return NULL;
    if (type != own.type || id != own.id || copy == Py_True) {
        PyErr_SetString(PyExc_BufferError,
                        "only an export to the tensor's own device without a copy is possible");
        return NULL;
    }
    fst_tensor *tensor = ((tensor_object *)self)->tensor;
    if (major >= 1) return fstpy_dlpack_capsule_versioned(fst_tensor_ref(tensor));
    if (!view.writable) {
        PyErr_SetString(PyExc_BufferError, "a read-only tensor needs DLPack 1.0");
        return NULL;
    }
    return fstpy_dlpack_capsule(fst_tensor_ref(tensor), as_bytes);
}

static PyObject *tensor_dlpack_device(PyObject *self, PyObject *none) {
    (void)none;
    fst_tensor_view view = view_of(self);
    dl_device device = fstpy_dlpack_device(&view);
    return Py_BuildValue("(ii)", (int)device.type, (int)device.id);
}

/// copy_to(address, size): copies without the GIL, from a device if necessary.
static PyObject *tensor_copy_to(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t size;
    fst_error error;
    fst_status status;
    if (!PyArg_ParseTuple(args, "Kn:copy_to", &address, &size)) return NULL;
    const fst_tensor *tensor = ((tensor_object *)self)->tensor;
    void *target = (void *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS
    status = fst_tensor_read(tensor, target, (size_t)size, &error);
    Py_END_ALLOW_THREADS
    if (status != FST_OK) return fstpy_raise(fstpy_state(Py_TYPE(self)), &error);
    return Py_NewRef(Py_None);
}

/// The struct form of numpy's protocol, several times faster than the dict.
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
    if (!is_on_cpu(&view)) return NULL;
    const char *type = typestr_of(view.dtype);
    // Sub-byte dtypes are exported as one dimension of bytes.
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
    {"writable", get_writable, NULL, "Whether its memory is writable.", NULL},
    {"device", get_device, NULL, "Its device: \"cpu\", \"cuda:1\", \"hip:0\" or \"pinned\".", NULL},
    {"__cuda_array_interface__", get_cuda_interface, NULL, "The CUDA array interface.", NULL},
    {"__array_struct__", get_array_struct, NULL, "numpy's array interface as a struct.", NULL},
    {"__array_interface__", get_array_interface, NULL, "numpy's array interface.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS,
     "A DLPack capsule, which keeps the memory alive."},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS,
     "(kind, number) of DLPack: (1, 0) is the CPU, 2 CUDA, 10 ROCm."},
    {"copy_to", tensor_copy_to, METH_VARARGS,
     "copy_to(address, size): copies all bytes to host memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, "One loaded tensor. It stays valid after its load and model are closed."},
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
