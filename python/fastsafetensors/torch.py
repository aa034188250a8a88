# SPDX-License-Identifier: Apache-2.0
"""safetensors files as torch tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch as _torch

from ._core import DTYPES, Model, Tensor, dlpack_probe
from ._types import Path

__all__ = ["load_file"]

# The format's dtypes by torch's names. torch has no 6-bit floats: their packed bytes are uint8.
_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# The importer behind torch.from_dlpack, without its checks of objects that are no capsules.
_import_capsule = getattr(_torch._C, "_from_dlpack", _torch.utils.dlpack.from_dlpack)


def torch_dtype(dtype: str) -> Any | None:
    """torch's dtype for the format's dtype name, or None where this torch has none."""
    return getattr(_torch, _TORCH_NAMES.get(dtype, "?"), None)


def dtype_name(dtype: Any) -> str | None:
    """Return the format's name of a torch dtype (a name stays one, None is None)."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    for name in _TORCH_NAMES:
        if torch_dtype(name) is dtype:
            return name
    raise ValueError(f"the format has no dtype {dtype}")


@cache
def capsule_mask() -> int:
    """Which dtypes this torch imports as they are: bit d for dtype d, found by trying each."""
    mask = 0
    for number, dtype in enumerate(DTYPES):
        try:
            imported = _import_capsule(dlpack_probe(dtype))
        except (RuntimeError, BufferError, TypeError):
            continue
        if imported.dtype is torch_dtype(dtype) and dtype != "F4":
            mask |= 1 << number
    return mask


def wrap(tensor: Tensor) -> Any:
    """A torch tensor on the memory of `tensor`, whatever its dtype: no bytes are copied.

    Dtypes that torch can't import come as bytes and are viewed; 6-bit floats stay bytes (one
    dimension), and so does what this version of torch does not know. A 4-bit float tensor halves
    its last dimension, because torch counts pairs.
    """
    number = DTYPES.index(tensor.dtype)
    if capsule_mask() >> number & 1:
        return _import_capsule(tensor.__dlpack__())
    target = torch_dtype(tensor.dtype)
    shape = list(tensor.shape)
    if tensor.nbytes == 0:
        if tensor.dtype == "F4" and shape and shape[-1] % 2 == 0:
            shape[-1] //= 2
        return _torch.empty(shape, dtype=target or _torch.uint8)
    data = _import_capsule(tensor.__dlpack__(as_bytes=True))
    if tensor.dtype == "F4":
        if target is None or not shape or shape[-1] % 2:
            return data
        shape[-1] //= 2
    elif target is None:
        return data
    return data.view(target).reshape(shape)


def export(loader: Any, device: Any = "cpu") -> dict[str, Any]:
    """All tensors of a load as {name: torch tensor} on `device`."""
    tensors: dict[str, Any] = loader.export(_import_capsule, wrap, capsule_mask())
    if _torch.device(device).type == "cpu":
        return tensors
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def load_file(
    filename: Path | list[Path],
    device: Any = "cpu",
    *,
    mode: str = "auto",
    engine: str = "auto",
    threads: int = 0,
    dtype: Any = None,
) -> dict[str, Any]:
    """Load all tensors of a model: {name: torch.Tensor} in file order.

    filename: a file, an index, a folder, or a list of files (names must then be unique).
    device: where the tensors go, as torch takes it.
    mode: "load" reads into memory of our own; "map" gives views of the file (writes stay
    private); "auto" maps what is in the page cache nearly whole and loads everything else.
    dtype: what elements become on the way, a torch dtype or the format's name ("BF16"): floats
    become any float type (rounded to nearest even), integers wider ones; other tensors stay.
    engine, threads: force how "load" reads; see `fastsafetensors engines` for what works.

    The tensors own their memory. Raises SafetensorError for a bad file, OSError of its kind for
    what the system refuses.
    """
    model = Model(filename)
    loader = model.load(mode=mode, engine=engine, threads=threads, dtype=dtype_name(dtype))
    try:
        return export(loader, device)
    finally:
        loader.close()
        model.close()
