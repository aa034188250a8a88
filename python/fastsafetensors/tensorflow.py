# SPDX-License-Identifier: Apache-2.0
"""safetensors files as tensorflow tensors."""

from __future__ import annotations

from typing import Any

from ._array_front import ArrayFront

try:
    import tensorflow as _tf
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.tensorflow needs tensorflow: pip install tensorflow", name="tensorflow"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """One of tensorflow's own from a numpy array."""
    return _tf.convert_to_tensor(array)


def _to_array(value: Any) -> Any:
    """A numpy array of one of tensorflow's own."""
    return value.numpy()


_front = ArrayFront(_make, _to_array)
wrap, export, make_item = _front.wrap, _front.export, _front.make_item
load_file, load = _front.load_file, _front.load
save_file, save = _front.save_file, _front.save
