# SPDX-License-Identifier: Apache-2.0
"""safetensors files as mlx arrays."""

from __future__ import annotations

from typing import Any

from ._array_front import ArrayFront
from ._numpy_installed import numpy as _np

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


_front = ArrayFront(_make, _to_array)
wrap, export, make_item = _front.wrap, _front.export, _front.make_item
load_file, load = _front.load_file, _front.load
save_file, save = _front.save_file, _front.save
