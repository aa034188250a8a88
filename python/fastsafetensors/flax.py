# SPDX-License-Identifier: Apache-2.0
"""safetensors files as jax arrays, on the CPU or on jax's default device."""

from __future__ import annotations

from typing import Any

from ._base.array_api import ArrayApi
from ._base.numpy_installed import numpy as _np
from ._loading.open import safe_open as safe_open

try:
    import jax as _jax
    import jax.numpy as _jnp
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.flax needs jax: pip install jax", name="jax"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def _make(array: Any) -> Any:
    """Convert a numpy array to a jax array."""
    return _jnp.asarray(array)


def _to_array(value: Any) -> Any:
    """Convert a jax array to a numpy array."""
    return _np.asarray(value)


_api = ArrayApi(_make, _to_array, _jax.device_put)
wrap, export, make_item = _api.wrap, _api.export, _api.make_item
load_file, load = _api.load_file, _api.load
save_file, save = _api.save_file, _api.save
