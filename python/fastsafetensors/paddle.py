# SPDX-License-Identifier: Apache-2.0
"""safetensors files as paddle tensors."""

from __future__ import annotations

from typing import Any

import numpy as _np

from . import numpy as _numpy
from ._core import Tensor
from ._types import Path, Paths

try:
    import paddle as _paddle
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.paddle needs paddle: pip install paddlepaddle", name="paddle"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """One of paddle's own from a numpy array."""
    if array.dtype.name == "bfloat16":
        # paddle's numpy side of bfloat16 is its bits.
        return _paddle.to_tensor(array.view(_np.uint16), dtype="bfloat16")
    return _paddle.to_tensor(array)


def _to_array(value: Any) -> Any:
    """A numpy array of one of paddle's own."""
    array = value.numpy()
    if str(value.dtype).endswith("bfloat16"):
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def wrap(tensor: Tensor) -> Any:
    """One of paddle's own of a tensor's values."""
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
    """Save tensors; see fastsafetensors.numpy.save_file."""
    arrays = {name: _to_array(value) for name, value in tensors.items()}
    _numpy.save_file(arrays, filename, metadata, **options)


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write."""
    return _numpy.save({name: _to_array(value) for name, value in tensors.items()}, metadata)
