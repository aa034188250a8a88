# SPDX-License-Identifier: Apache-2.0
"""Memory at an address as a DLPack capsule.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .._core import dlpack_at
from .st_types import Device, DeviceType, DType

# Device kinds of DLPack: https://dmlc.github.io/dlpack/latest/c_api.html
_KINDS = {DeviceType.CPU: 1, DeviceType.CUDA: 2, DeviceType.GPU: 2}
_ROCM = 10



# ---- the C structs, for programs that parse capsules ----


class DLDevice(ctypes.Structure):
    """A device."""

    kDLCPU, kDLCUDA, kDLROCM = 1, 2, 10  # noqa: N815 - DLPack's names
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


class c_DLDataType(ctypes.Structure):  # noqa: N801 - the name that programs know
    """An element type."""

    # noqa below: DLPack's names, as 0.5 has them. STDataToDL: (type_code, bits, lanes).
    kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLBool = 0, 1, 2, 4, 6  # noqa: N815
    STDataToDL = {  # noqa: N815, RUF012
        DType.BOOL: (6, 8, 1),
        **{DType(f"I{bits}"): (0, bits, 1) for bits in (8, 16, 32, 64)},
        **{DType(f"U{bits}"): (1, bits, 1) for bits in (8, 16, 32, 64)},
        **{DType(f"F{bits}"): (2, bits, 1) for bits in (16, 32, 64)},
        DType.BF16: (4, 16, 1), DType.F8_E8M0: (1, 8, 1), DType.F4: (1, 8, 1),
    }
    _fields_ = (("type_code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """A tensor description."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", c_DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """A tensor and its deleter."""

    _fields_ = (
        ("dl_tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


def from_cuda_buffer(
    dev_ptr: int,
    shape: list[int],
    strides: list[int],
    dtype: DType,
    dev: Device,
    owner: Any = None,
) -> Any:
    """Return a "dltensor" capsule of memory at an address, on the CPU or a GPU.

    shape and strides count elements. owner is kept alive until the consumer frees the tensor;
    without it the memory must outlive the tensor. F4 and F8_E8M0 are exported as bytes; KeyError
    for other 8-bit floats, which this DLPack version lacks.
    """
    if dtype in (DType.F8_E4M3, DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ):
        raise KeyError(dtype)
    shown = DType.U8 if dtype in (DType.F4, DType.F8_E8M0) else dtype
    kind = _KINDS[dev.type]
    if kind == 2 and _is_rocm():
        kind = _ROCM
    return dlpack_at(
        dev_ptr, list(shape), list(strides), shown.value, (kind, dev.index or 0), owner
    )


def _is_rocm() -> bool:
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and getattr(torch.version, "hip", None) is not None
