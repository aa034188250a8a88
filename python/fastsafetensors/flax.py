# SPDX-License-Identifier: Apache-2.0
"""safetensors files as jax arrays: on the CPU, or wherever jax puts new arrays."""

from __future__ import annotations

from typing import Any

from . import numpy as _numpy
from ._core import Tensor
from ._types import Path, Paths

try:
    import jax.numpy as _jnp
except ImportError as error:
    raise ModuleNotFoundError(
        "fastsafetensors.flax needs jax: pip install jax", name="jax"
    ) from error

__all__ = ["load", "load_file", "save", "save_file"]


def wrap(tensor: Tensor) -> Any:
    """A jax array of a tensor's values."""
    return _jnp.asarray(_numpy.wrap(tensor))


def export(loader: Any) -> dict[str, Any]:
    """All tensors of a load as {name: jax array}."""
    tensors: dict[str, Any] = loader.export(wrap, wrap, 0)
    return tensors


def _to_numpy(tensors: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(value) for name, value in tensors.items()}


def load_file(filename: Paths, **options: Any) -> dict[str, Any]:
    """Load all tensors of a model: {name: jax.Array}; options as in fastsafetensors.numpy."""
    return {name: _jnp.asarray(value) for name, value
            in _numpy.load_file(filename, **options).items()}


def load(data: Any) -> dict[str, Any]:
    """Load all tensors of a file's bytes."""
    return {name: _jnp.asarray(value) for name, value in _numpy.load(data).items()}


def save_file(
    tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None, **options: Any
) -> None:
    """Save {name: jax.Array}; see fastsafetensors.numpy.save_file."""
    _numpy.save_file(_to_numpy(tensors), filename, metadata, **options)


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes that save_file would write."""
    return _numpy.save(_to_numpy(tensors), metadata)
