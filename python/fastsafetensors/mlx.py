# SPDX-License-Identifier: Apache-2.0
"""safetensors files as mlx arrays."""

from __future__ import annotations

from typing import Any

from ._base.array_api import ArrayApi
from ._base.numpy_installed import numpy as _np
from ._loading.open import safe_open as safe_open

try:
    import mlx.core as _mx
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.mlx needs mlx: pip install mlx", name="mlx"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """Convert a numpy array to an mlx array."""
    if array.dtype.name == "bfloat16":
        # mlx does not accept ml_dtypes' bfloat16, so its bits are passed as integers.
        return _mx.array(array.view(_np.uint16)).view(_mx.bfloat16)
    return _mx.array(array)


def _to_array(value: Any) -> Any:
    """Convert an mlx array to a numpy array."""
    if value.dtype == _mx.bfloat16:
        import ml_dtypes

        return _np.array(value.view(_mx.uint16)).view(ml_dtypes.bfloat16)
    return _np.array(value)


_api = ArrayApi(_make, _to_array)
wrap, export, make_item = _api.wrap, _api.export, _api.make_item
load_file, load = _api.load_file, _api.load
save_file, save = _api.save_file, _api.save
