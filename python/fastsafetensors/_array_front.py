# SPDX-License-Identifier: Apache-2.0
"""The interface of frameworks whose arrays come from numpy's and go back to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import numpy as _numpy
from ._core import Tensor
from ._types import Path, Paths


class ArrayFront:
    """load_file, load, save_file, save for a framework, by its way to and from numpy."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        to_array: Callable[[Any], Any],
        move: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """make: one of the framework's own from a numpy array; to_array: the way back.

        move: one of the framework's own on a device.
        """
        self._make = make
        self._to_array = to_array
        self._move = move

    def wrap(self, tensor: Tensor) -> Any:
        """One of the framework's own of a tensor's values."""
        return self._make(_numpy.wrap(tensor))

    def make_item(self, loader: Any, index: int) -> Any:
        """Item `index` of a load, once its bytes are there."""
        return self.wrap(loader.item(index))

    def export(self, loader: Any) -> dict[str, Any]:
        """All tensors of a load."""
        tensors: dict[str, Any] = loader.export(self.wrap, self.wrap, 0)
        return tensors

    def load_file(self, filename: Paths, device: Any = None, **options: Any) -> dict[str, Any]:
        """Load a model's tensors; options as in fastsafetensors.numpy.

        device: where they go, in the framework's own words (of jax a device or a Sharding, of
        paddle "cpu" or "gpu:0"); None: where it puts new ones.
        """
        arrays = _numpy.load_file(filename, **options)
        return {name: self._put(array, device) for name, array in arrays.items()}

    def load(self, data: Any, device: Any = None) -> dict[str, Any]:
        """Load all tensors of a file's bytes; device as in load_file()."""
        return {name: self._put(array, device) for name, array in _numpy.load(data).items()}

    def _put(self, array: Any, device: Any) -> Any:
        made = self._make(array)
        if device is None:
            return made
        if self._move is None:
            raise ValueError("this framework's tensors are made where it puts new ones")
        return self._move(made, device)

    def save_file(
        self,
        tensors: dict[str, Any],
        filename: Path,
        metadata: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Save tensors by name; see fastsafetensors.numpy.save_file."""
        arrays = {name: self._to_array(value) for name, value in tensors.items()}
        _numpy.save_file(arrays, filename, metadata, **options)

    def save(self, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
        """Return the bytes that save_file would write."""
        arrays = {name: self._to_array(value) for name, value in tensors.items()}
        return _numpy.save(arrays, metadata)
