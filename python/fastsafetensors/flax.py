# SPDX-License-Identifier: Apache-2.0
"""safetensors files as jax arrays: on the CPU, or wherever jax puts new arrays."""

from __future__ import annotations

from typing import Any

from ._array_front import ArrayFront
from ._numpy_installed import numpy as _np

try:
    import jax as _jax
    import jax.numpy as _jnp
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.flax needs jax: pip install jax", name="jax"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """A jax array of a numpy array."""
    return _jnp.asarray(array)


def _to_array(value: Any) -> Any:
    """A numpy array of a jax array."""
    return _np.asarray(value)


_front = ArrayFront(_make, _to_array, _jax.device_put)
wrap, export, make_item = _front.wrap, _front.export, _front.make_item
load_file, load = _front.load_file, _front.load
save_file, save = _front.save_file, _front.save
