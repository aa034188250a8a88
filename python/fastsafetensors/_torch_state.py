# SPDX-License-Identifier: Apache-2.0
"""torch tensors as rows for the writer: what can be saved, and what shares memory."""

from __future__ import annotations

from typing import Any

import torch as _torch

# The format's dtypes by torch's names. torch has no 6-bit floats: their packed bytes are uint8.
TORCH_NAMES = {
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

_FORMAT_NAMES = {
    getattr(_torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(_torch, name)
}


def torch_dtype(dtype: str) -> Any | None:
    """torch's dtype for the format's dtype name, or None where this torch has none."""
    return getattr(_torch, TORCH_NAMES.get(dtype, "?"), None)


def dtype_name(dtype: Any) -> str | None:
    """Return the format's name of a torch dtype (a name stays one, None is None)."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    name = _FORMAT_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"the format has no dtype {dtype}")
    return name


def storage_ptr(tensor: Any) -> int:
    """Address of the memory that a tensor is a view of; 0 where it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: Any) -> int:
    """Bytes of the memory that a tensor is a view of; 0 where it has none."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return 0


def _span(tensor: Any) -> tuple[int, int]:
    """First and last + 1 byte that a tensor reaches."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (reach + 1) * tensor.element_size()


def find_shared(tensors: dict[str, Any]) -> list[set[str]]:
    """Names of tensors that share bytes, in groups. Disjoint views of one memory share nothing."""
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta":
            begin, end = _span(tensor)
            spans.setdefault(tensor.device, []).append((begin, end, name))
    groups = []
    for rows in spans.values():
        rows.sort()
        group: set[str] = set()
        reach = -1
        for begin, end, name in rows:
            if begin >= reach:
                if len(group) > 1:
                    groups.append(group)
                group = set()
            group.add(name)
            reach = max(reach, end)
        if len(group) > 1:
            groups.append(group)
    return groups


def check_dense(name: str, tensor: Any) -> None:
    """Raise for a tensor that has no plain bytes."""
    if tensor.layout is not _torch.strided:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{[name]}` which this library does not "
            "support: make it dense with `.to_dense()` first."
        )
    if tensor.device.type == "meta":
        raise NotImplementedError(
            f"Cannot copy out of meta tensor; no data! `{name}` is on the meta device: load or "
            "make its values first."
        )
    if tensor.is_quantized:
        raise ValueError(
            f"`{name}` is quantized: save `.int_repr()` and the scales, or `.dequantize()` it."
        )
    if tensor.dtype not in _FORMAT_NAMES:
        raise ValueError(f"`{name}` is {tensor.dtype}, which the format has no dtype for.")


def plain(tensor: Any) -> Any:
    """The tensor as packed bytes in CPU memory: itself, wherever it is that already."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.to("cpu")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def make_row(name: str, tensor: Any) -> tuple[str, str, Any, int, int]:
    """Describe a dense, contiguous CPU tensor for the writer."""
    dtype = _FORMAT_NAMES[tensor.dtype]
    shape = tensor.shape
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return name, dtype, shape, tensor.data_ptr(), tensor.nbytes


def _far_row(name: str, tensor: Any, streams: set[Any]) -> Any:
    """Describe a packed tensor on a GPU that the writer reads by itself, else None."""
    from ._gpu import load_options, wait_for_stream

    if not (tensor.is_cuda and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return None
    options = load_options(tensor.device)
    if not options:
        return None
    if tensor.device not in streams:
        wait_for_stream(tensor.device)
        streams.add(tensor.device)
    return (*make_row(name, tensor), options["device"])


def make_rows(tensors: dict[str, Any], far: bool = False) -> tuple[list[Any], list[Any]]:
    """(rows, tensors that keep the memory) of a checked dict.

    far: tensors on GPUs stay there, and the writer reads them by blocks.
    """
    rows, owners = [], []
    streams: set[Any] = set()
    strided, cpu = _torch.strided, _torch.device("cpu")
    for name, tensor in tensors.items():
        dtype = _FORMAT_NAMES.get(tensor.dtype)
        simple = (
            dtype is not None
            and dtype != "F4"
            and tensor.layout is strided
            and tensor.device == cpu
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )
        if not simple:
            check_dense(name, tensor)
            row = _far_row(name, tensor, streams) if far else None
            if row is not None:
                rows.append(row)
                owners.append(tensor)
                continue
            tensor = plain(tensor)
        owners.append(tensor)
        rows.append(
            (name, dtype, tensor.shape, tensor.data_ptr(), tensor.nbytes)
            if simple
            else make_row(name, tensor)
        )
    return rows, owners


def check_tensors(tensors: Any, metadata: Any) -> None:
    """Raise what the reference raises for a dict that it can't save."""
    from ._saving import check_names

    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    sparse = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, _torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
        if tensor.layout is not _torch.strided:
            sparse.append(name)
    check_names(tensors, metadata)
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support: make them dense with `.to_dense()` first."
        )
    shared = find_shared(tensors)
    if shared:
        raise RuntimeError(
            f"Some tensors share memory, and would be on disk twice and no longer shared after "
            f"loading: {shared}. Save the model with `save_model`, or `.clone()` them."
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed: "
                "pack it with `.contiguous()`, or save the tensor that it is a view of."
            )


def _covers_storage(tensor: Any) -> bool:
    return bool(
        tensor.data_ptr() == storage_ptr(tensor) and tensor.nbytes == storage_size(tensor)
    )


def find_tied(state: dict[str, Any]) -> dict[str, str]:
    """{name to leave out: name that is kept} of tensors that share bytes.

    Of each group the first name (sorted) that covers its memory is kept, as the reference does;
    a group in which none does is a RuntimeError, because saving one would lose the others.
    """
    tied = {}
    by_storage: dict[Any, set[str]] = {}
    for name, tensor in state.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) and storage_size(tensor):
            by_storage.setdefault((tensor.device, storage_ptr(tensor)), set()).add(name)
    for names in by_storage.values():
        group = {name: state[name] for name in names}
        if len(group) < 2 or not find_shared(group):
            continue
        complete = sorted(name for name in group if _covers_storage(group[name]))
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no "
                f"suitable name to keep for saving amongst: {set(group)}. None is covering the "
                "entire storage: saving one would lose what the others hold."
            )
        tied.update({name: complete[0] for name in sorted(group) if name != complete[0]})
    return tied
