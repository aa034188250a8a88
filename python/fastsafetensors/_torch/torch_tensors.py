# SPDX-License-Identifier: Apache-2.0
"""Results of a load as torch tensors that share its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from .._base.dtypes import check_dtype, converted_dtype
from .._core import DTYPES, Model, Tensor, dlpack_at, dlpack_probe
from .._loading.request import choose_names
from .._loading.verified_open import Verify, open_files
from .gpu import load_options
from .tensor_memory import plainly
from .torch_installed import torch as _torch
from .torch_state import torch_dtype, torch_dtype_of, torch_shape

# The importer behind torch.from_dlpack, without its checks for other objects.
_import_capsule = getattr(_torch._C, "_from_dlpack", _torch.from_dlpack)


@cache
def capsule_mask() -> int:
    """Which dtypes this torch can import: bit d for dtype d, found by trying each."""
    mask = 0
    for number, dtype in enumerate(DTYPES):
        try:
            imported = _import_capsule(dlpack_probe(dtype))
        except (RuntimeError, BufferError, TypeError):
            continue
        if imported.dtype is torch_dtype(dtype) and dtype != "F4":
            mask |= 1 << number
    return mask


def _device_of(tensor: Tensor) -> str:
    """torch's device of a tensor; its "cuda" includes ROCm."""
    kind, _, number = tensor.device.partition(":")
    return f"cuda:{number}" if kind in ("cuda", "hip") else "cpu"


# Functions that return the same bytes, possibly elsewhere.
_SAME_BYTES = {
    *(getattr(_torch.Tensor, name)
      for name in ("clone", "contiguous", "cpu", "cuda", "detach", "pin_memory", "to")),
    *(getattr(_torch, name) for name in ("clone", "detach")),
    getattr(_torch.Tensor.data, "__get__"),  # noqa: B009 - a getter to some checkers
}


class PackedTensor(_torch.Tensor):  # type: ignore[misc]
    """Bytes of elements without a torch dtype. When saved, they get their original dtype.

    format_dtype, format_shape: the format's. Copies, also on other devices, keep them; parts and
    computed results are plain tensors of bytes.
    """

    format_dtype: str
    format_shape: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call torch's function, which returns plain tensors."""
        with plainly():
            result = func(*args, **(kwargs or {}))
        own: Any = args[0] if args else None
        is_copy = func in _SAME_BYTES and isinstance(own, cls)
        if not is_copy or result.dtype != _torch.uint8:
            return result
        return _packed(result, own.format_dtype, own.format_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the bytes and their format."""
        return memo.setdefault(id(self), self.clone())


def _packed(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    packed = data.as_subclass(PackedTensor)
    packed.format_dtype, packed.format_shape = dtype, shape
    return packed


def wrap_bytes(tensor: Tensor) -> Any:
    """Return the bytes of `tensor`, which is not empty, as a torch tensor of uint8."""
    return _import_capsule(tensor.__dlpack__(as_bytes=True))


def wrap(tensor: Tensor) -> Any:
    """Return a torch tensor for `tensor` of any dtype, without copying bytes.

    Dtypes that torch cannot import are imported as bytes and viewed. 6-bit floats, and dtypes that
    this torch lacks, stay bytes (a PackedTensor of one dimension). The last dimension of a 4-bit
    float tensor is halved, because torch counts pairs.
    """
    number = DTYPES.index(tensor.dtype)
    if capsule_mask() >> number & 1:
        return _import_capsule(tensor.__dlpack__())
    if tensor.nbytes == 0:
        return _torch.empty(torch_shape(tensor.dtype, tensor.shape), device=_device_of(tensor),
                            dtype=torch_dtype(tensor.dtype) or _torch.uint8)
    return shape_bytes(wrap_bytes(tensor), tensor.dtype, tensor.shape)


def shape_bytes(data: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return the bytes of a tensor of the format, which is not empty, as wrap() does."""
    target = torch_dtype_of(dtype, shape)
    if target is None:
        return _packed(data, dtype, tuple(shape))
    return data.view(target).reshape(torch_shape(dtype, shape))


def spread(view: Tensor, offset: int, size: int, dtype: Any) -> Any:
    """Return memory around a view, from `offset` of it on, as a tensor that keeps the view
    alive.
    """
    where = (1, 0)  # the CPU
    capsule = dlpack_at(view.data_ptr + offset, (size,), (1,), "U8", where, view)
    return _import_capsule(capsule).view(dtype)


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Any | None:
    """Return a tensor over `data`, which it keeps alive; None if torch lacks the dtype."""
    target = torch_dtype(dtype)
    if target is None:
        return None
    try:
        return _torch.frombuffer(data, dtype=target).reshape(shape)
    except AssertionError:  # FakeTensorMode: results of a load have their shape already
        return None


def export(loader: Any, device: Any = "cpu") -> dict[str, Any]:
    """All tensors of a load as {name: torch tensor} on `device`, copied there if necessary."""
    tensors: dict[str, Any] = loader.export(_import_capsule, wrap, capsule_mask())
    if device in (None, "cpu") or load_options(device) or _torch.device(device).type == "cpu":
        return tensors
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def load_meta(
    filename: Any, names: Any = None, keep: Any = None, dtype: str | None = None,
    verify: Verify | None = None,
) -> dict[str, Any]:
    """Tensors on the meta device as a load would return them; only headers are read."""
    with contextlib.closing(open_files(filename, verify)) as model:
        return meta_tensors(model, choose_names(model, names, keep), dtype)


def meta_tensors(
    model: Model, names: list[str] | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Tensors of an open model, all or by name, on the meta device."""
    result = {}
    for name in model.names() if names is None else names:
        own, shape, size, *_ = model.info(model.find(name))
        check_dtype([(name, own)], dtype)
        made = converted_dtype(own, dtype)
        known = torch_dtype(made)
        if max(shape, default=0) >= 1 << 63:
            raise BufferError("dimensions or strides do not fit into 64 bits")
        result[name] = _torch.empty(
            (size,) if known is None else torch_shape(made, shape),
            dtype=known or _torch.uint8, device="meta",
        )
    return result


def make_item(loader: Any, index: int) -> Any:
    """Return item `index` of a load as a torch tensor, waiting for its bytes."""
    return loader.make(index, _import_capsule, wrap, capsule_mask())
