# SPDX-License-Identifier: Apache-2.0
"""The low-level functions of the safetensors package: specs and bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from .._base.argument_types import Path
from .._base.dtypes import NAMES
from .._base.options import check_names
from .._core import Model
from .._core import serialize as _serialize
from .._loading.load import OpenLoad
from .._loading.memory_models import open_bytes
from .save_options import save_rows


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype (torch's name), shape, and the address of its bytes."""

    dtype: str
    shape: list[int]
    data_ptr: int
    data_len: int


def _rows(tensor_dict: dict[str, TensorSpec]) -> list[Any]:
    rows = []
    for name, spec in tensor_dict.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(
                f"argument 'tensor_dict': '{type(spec).__name__}' object is not an instance of "
                "'TensorSpec'"
            )
        dtype = NAMES.get(spec.dtype, spec.dtype)
        shape = list(spec.shape)
        if dtype == "F4" and shape:
            shape[-1] *= 2
        rows.append((name, dtype, shape, spec.data_ptr, spec.data_len))
    return rows


def serialize(
    tensor_dict: dict[str, TensorSpec], metadata: dict[str, str] | None = None
) -> bytes:
    """Return the bytes of a file of these tensors."""
    check_names(tensor_dict, metadata)
    return _serialize(None, _rows(tensor_dict), metadata)


def serialize_file(
    tensor_dict: dict[str, TensorSpec], filename: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write these tensors to a file, as save_file does."""
    check_names(tensor_dict, metadata)
    save_rows(filename, _rows(tensor_dict), metadata)


def _decoded(model: Model) -> list[bytearray]:
    """Return the bytes of a compressed model's tensors."""
    result = []
    with OpenLoad(model, None, mode="load") as loader:
        for index in range(len(loader)):
            tensor = loader.item(index)
            content = bytearray(tensor.nbytes)
            if content:
                target = (ctypes.c_char * len(content)).from_buffer(content)
                tensor.copy_to(ctypes.addressof(target), len(content))
            result.append(content)
    return result


def deserialize(bytes: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, {"dtype", "shape", "data": bytearray}) of each tensor of a file's bytes."""
    with open_bytes(bytes) as model:
        view = memoryview(bytes).cast("B")
        decoded = _decoded(model) if model.is_compressed else None
        result = []
        for index, name in enumerate(model.names()):
            dtype, shape, size, _, offset = model.info(index)
            content = decoded[index] if decoded else bytearray(view[offset : offset + size])
            result.append((name, {"dtype": dtype, "shape": list(shape), "data": content}))
        return result
