# SPDX-License-Identifier: Apache-2.0
"""safetensors files as paddle tensors."""

from __future__ import annotations

import importlib
from typing import Any

from ._base.array_api import ArrayApi
from ._base.numpy_installed import numpy as _np
from ._loading.open import safe_open as safe_open

try:
    _paddle: Any = importlib.import_module("paddle")  # not this module, which has the same name
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.paddle needs paddle: pip install paddlepaddle", name="paddle"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """Convert a numpy array to a paddle tensor."""
    if array.dtype.name == "bfloat16":
        # paddle's numpy form of bfloat16 is its bits.
        return _paddle.to_tensor(array.view(_np.uint16), dtype="bfloat16")
    return _paddle.to_tensor(array)


def _to_array(value: Any) -> Any:
    """Convert a paddle tensor to a numpy array."""
    array = value.numpy()
    if str(value.dtype).endswith("bfloat16"):
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _move(tensor: Any, device: Any) -> Any:
    """Copy a tensor to a device."""
    return tensor if str(device) == "cpu" else tensor.to(device)


_api = ArrayApi(_make, _to_array, _move)
wrap, export, make_item = _api.wrap, _api.export, _api.make_item
load_file, load = _api.load_file, _api.load
save_file, save = _api.save_file, _api.save
