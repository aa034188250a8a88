# SPDX-License-Identifier: Apache-2.0
"""Memory at an address as a DLPack capsule."""

from __future__ import annotations

from typing import Any

from .._core import dlpack_at
from .st_types import Device, DeviceType, DType

# Device kinds of DLPack: https://dmlc.github.io/dlpack/latest/c_api.html
_KINDS = {DeviceType.CPU: 1, DeviceType.CUDA: 2, DeviceType.GPU: 2}
_ROCM = 10


def from_cuda_buffer(
    dev_ptr: int,
    shape: list[int],
    strides: list[int],
    dtype: DType,
    dev: Device,
    owner: Any = None,
) -> Any:
    """Return a "dltensor" capsule of memory at an address, on the CPU or a GPU.

    shape and strides count elements. owner is kept until the consumer lets go; without one the
    memory must outlive it. F4 and F8_E8M0 come as bytes; KeyError for other 8-bit floats, which
    this form of DLPack has no word for.
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
