# SPDX-License-Identifier: Apache-2.0
"""safetensors files as tensorflow tensors."""

from __future__ import annotations

from typing import Any

from ._base.array_api import ArrayApi
from ._loading.open import safe_open as safe_open

try:
    import tensorflow as _tf
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.tensorflow needs tensorflow: pip install tensorflow", name="tensorflow"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """Convert a numpy array to a tensorflow tensor."""
    return _tf.convert_to_tensor(array)


def _to_array(value: Any) -> Any:
    """Convert a tensorflow tensor to a numpy array."""
    return value.numpy()


_api = ArrayApi(_make, _to_array)
wrap, export, make_item = _api.wrap, _api.export, _api.make_item
load_file, load = _api.load_file, _api.load
save_file, save = _api.save_file, _api.save
