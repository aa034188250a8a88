# SPDX-License-Identifier: Apache-2.0
"""safetensors files as mlx arrays."""

from __future__ import annotations

from typing import Any

import numpy as _np

from . import numpy as _numpy
from ._core import Tensor
from ._types import Path, Paths

try:
    import mlx.core as _mx
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.mlx needs mlx: pip install mlx", name="mlx"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """One of mlx's own from a numpy array."""
    if array.dtype.name == "bfloat16":
        # mlx reads no bfloat16 of ml_dtypes: its bits go over as integers.
        return _mx.array(array.view(_np.uint16)).view(_mx.bfloat16)
    return _mx.array(array)


def _to_array(value: Any) -> Any:
    """A numpy array of one of mlx's own."""
    if value.dtype == _mx.bfloat16:
        import ml_dtypes

        return _np.array(value.view(_mx.uint16)).view(ml_dtypes.bfloat16)
    return _np.array(value)


def wrap(tensor: Tensor) -> Any:
    """One of mlx's own of a tensor's values."""
    return _make(_numpy.wrap(tensor))


def export(loader: Any) -> dict[str, Any]:
    """All tensors of a load."""
    tensors: dict[str, Any] = loader.export(wrap, wrap, 0)
    return tensors


def load_file(filename: Paths, **options: Any) -> dict[str, Any]:
    """Load all tensors of a model; options as in fastsafetensors.numpy."""
    return {name: _make(a) for name, a in _numpy.load_file(filename, **options).items()}


def load(data: Any) -> dict[str, Any]:
    """Load all tensors of a file's bytes."""
    return {name: _make(array) for name, array in _numpy.load(data).items()}


def save_file(
    tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None, **options: Any
) -> None:
    """Save arrays; see fastsafetensors.numpy.save_file."""
    arrays = {name: _to_array(value) for name, value in tensors.items()}
    _numpy.save_file(arrays, filename, metadata, **options)


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write."""
    return _numpy.save({name: _to_array(value) for name, value in tensors.items()}, metadata)
