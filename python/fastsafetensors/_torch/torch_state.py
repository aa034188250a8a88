# SPDX-License-Identifier: Apache-2.0
"""torch tensors as rows for the writer: which can be saved, and which share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._base.dtypes import WORDS
from .._base.errors import printable
from .._base.options import check_names, check_switch
from .tensor_memory import (
    PLAIN,
    address_of,
    check_memory,
    find_shared,
    find_tied,
    settle,
    settled,
)
from .torch_installed import torch as _torch

_FORMAT_NAMES = {
    getattr(_torch, name): dtype for dtype, name in WORDS.items() if hasattr(_torch, name)
}


# {the format's name: torch's dtype}, for dtypes that this torch has.
DTYPES_BY_NAME = {dtype: known for known, dtype in _FORMAT_NAMES.items()}


def torch_dtype(dtype: str) -> Any | None:
    """Return torch's dtype for the format's name, or None if this torch lacks it."""
    return DTYPES_BY_NAME.get(dtype)


def _has_pairs(dtype: str, shape: Sequence[int]) -> bool:
    """Tell whether torch has a tensor of the format as pairs of 4-bit floats."""
    return dtype == "F4" and len(shape) > 0 and shape[-1] % 2 == 0


def torch_dtype_of(dtype: str, shape: Sequence[int]) -> Any | None:
    """Return torch's dtype of a tensor; None: it only has the bytes."""
    return None if dtype == "F4" and not _has_pairs(dtype, shape) else torch_dtype(dtype)


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return torch's shape for a format shape; torch counts pairs of 4-bit floats."""
    return (*shape[:-1], shape[-1] // 2) if _has_pairs(dtype, shape) else tuple(shape)


def format_box(
    dtype: str, begin: Sequence[int], end: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Convert a range in torch's shape, of a tensor that torch has, to the format's."""
    first, last = list(begin), list(end)
    if dtype == "F4" and first:
        first[-1], last[-1] = 2 * first[-1], 2 * last[-1]
    return first, last


def dtype_name(dtype: Any) -> str | None:
    """Return the format's name of a torch dtype (names and None are unchanged)."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    name = _FORMAT_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"the format has no dtype {dtype}")
    return name


def check_nested(name: str, tensor: Any) -> None:
    """Raise an error of the reference's class for a nested tensor (of parts of several shapes)."""
    if tensor.is_nested:
        kind = ValueError if tensor.layout is not _torch.strided else RuntimeError
        raise kind(
            f"`{printable(name)}` is a nested tensor, and the format has only tensors of one "
            "shape: save its `.values()` and `.offsets()`, or `.to_padded_tensor(0.0)`."
        )


def check_dense(name: str, tensor: Any) -> None:
    """Raise for a tensor without plain bytes."""
    if tensor.layout is not _torch.strided:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{[name]}` which this library does not "
            "support: make it dense with `.to_dense()` first."
        )
    if tensor.device.type == "meta":
        raise NotImplementedError(
            f"Cannot copy out of meta tensor; no data! `{printable(name)}` is on the meta "
            "device: load or make its values first."
        )
    if tensor.is_quantized:
        raise ValueError(
            f"`{printable(name)}` is quantized: save `.int_repr()` and the scales, or "
            "`.dequantize()` it."
        )
    if tensor.dtype not in _FORMAT_NAMES:
        raise ValueError(f"`{printable(name)}` has dtype {tensor.dtype}, "
                         "which the format does not have.")
    check_memory(name, tensor)


def plain(tensor: Any) -> Any:
    """Return the tensor as packed bytes in CPU memory, without a copy if it is that already."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.to("cpu")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def make_row(name: str, tensor: Any) -> tuple[str, str, Any, int, int]:
    """Describe a dense, contiguous CPU tensor for the writer."""
    dtype = _FORMAT_NAMES[tensor.dtype]
    shape = tuple(tensor.shape)
    if hasattr(tensor, "format_dtype"):  # packed elements without a torch dtype
        dtype, shape = tensor.format_dtype, tensor.format_shape
    elif dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return name, dtype, shape, address_of(name, tensor), tensor.nbytes


def _device_row(name: str, tensor: Any, streams: set[Any]) -> Any:
    """Describe a packed GPU tensor that the writer can read itself, else None."""
    from .gpu import load_options, wait_for_stream

    if not (tensor.is_cuda and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return None
    options = load_options(tensor.device)
    if not options:
        return None
    if tensor.device not in streams:
        wait_for_stream(tensor.device)
        streams.add(tensor.device)
    return (*make_row(name, tensor), options["device"])


def make_rows(tensors: dict[str, Any], on_device: bool = False) -> tuple[list[Any], list[Any]]:
    """(rows, tensors that own the memory) of a checked dict.

    on_device: tensors on GPUs stay there, and the writer reads them in blocks.
    """
    rows, owners = [], []
    streams: set[Any] = set()
    strided, cpu = _torch.strided, _torch.device("cpu")
    for name, given in tensors.items():
        tensor = settle(given)
        dtype = _FORMAT_NAMES.get(tensor.dtype)
        simple = (
            dtype is not None
            and dtype != "F4"
            and type(tensor) in PLAIN
            and tensor.layout is strided
            and tensor.device == cpu
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )
        if not simple:
            check_dense(name, tensor)
            row = _device_row(name, tensor, streams) if on_device else None
            if row is not None:
                rows.append(row)
                owners.append(tensor)
                continue
            tensor = plain(tensor)
        owners.append(tensor)
        rows.append(
            # The garbage collector ignores tuples of plain numbers, but not a torch.Size.
            (name, dtype, tuple(tensor.shape), address_of(name, tensor), tensor.nbytes)
            if simple
            else make_row(name, tensor)
        )
    return rows, owners


def check_kinds(tensors: Any) -> None:
    """Raise the reference's error for a value other than a mapping of names to tensors."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, _torch.Tensor):
            raise ValueError(
                f"Key `{printable(str(name))}` is invalid, expected torch.Tensor but received "
                f"{type(tensor)}"
            )
        check_nested(name, tensor)


def check_tensors(tensors: Any, metadata: Any) -> None:
    """Raise the reference's error for a dict that cannot be saved."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    check_kinds(tensors)
    sparse = [name for name, tensor in tensors.items() if tensor.layout is not _torch.strided]
    check_names(tensors, metadata)
    tensors = settled(tensors)
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support: make them dense with `.to_dense()` first."
        )
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN:
            check_dense(name, tensor)
    shared = find_shared(tensors)
    if shared:
        raise RuntimeError(
            f"Some tensors share memory, and would be on disk twice and no longer shared after "
            f"loading: {shared}. Save the model with `save_model`, or `.clone()` them."
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{printable(name)}` which is "
                "not allowed: pack it with `.contiguous()`, or save the tensor that it is a view "
                "of."
            )


def model_state(
    model: Any, metadata: dict[str, str] | None, force_contiguous: bool
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return (the tensors of a module to save, each memory once; the metadata with their ties)."""
    check_switch("force_contiguous", force_contiguous)
    if not callable(getattr(model, "state_dict", None)):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    state = model.state_dict()
    check_kinds(state)
    check_names(state, metadata)
    state = settled(state)
    tied = find_tied(state)
    if tied:
        metadata = {**(metadata or {})}
        for name, kept in tied.items():
            metadata.setdefault(name, kept)
    kept_tensors = {name: tensor for name, tensor in state.items() if name not in tied}
    if force_contiguous:
        for name, tensor in kept_tensors.items():
            check_dense(name, tensor)
        kept_tensors = {name: plain(tensor) for name, tensor in kept_tensors.items()}
    return kept_tensors, metadata
