# SPDX-License-Identifier: Apache-2.0
"""safetensors files as paddle tensors."""

from __future__ import annotations

import importlib
from typing import Any

from ._array_front import ArrayFront
from ._numpy_installed import numpy as _np

try:
    _paddle: Any = importlib.import_module("paddle")  # not this module, whose name is the same
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


def _move(tensor: Any, device: Any) -> Any:
    """A tensor on a device."""
    return tensor if str(device) == "cpu" else tensor.to(device)


_front = ArrayFront(_make, _to_array, _move)
wrap, export, make_item = _front.wrap, _front.export, _front.make_item
load_file, load = _front.load_file, _front.load
save_file, save = _front.save_file, _front.save
