# SPDX-License-Identifier: Apache-2.0
"""The interface of frameworks whose arrays are converted from and to numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import numpy as _numpy
from .._core import Tensor
from .argument_types import Path, Paths


class ArrayApi:
    """load_file, load, save_file and save for a framework, given its conversions from and to
    numpy.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        to_array: Callable[[Any], Any],
        move: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """make: converts a numpy array; to_array: converts back.

        move: copies a framework array to a device.
        """
        self._make = make
        self._to_array = to_array
        self._move = move

    def wrap(self, tensor: Tensor) -> Any:
        """The framework's array with a tensor's values."""
        return self._make(_numpy.wrap(tensor))

    def make_item(self, loader: Any, index: int) -> Any:
        """Return item `index` of a load, waiting for its bytes."""
        return self.wrap(loader.item(index))

    def export(self, loader: Any) -> dict[str, Any]:
        """Return all tensors of a load."""
        tensors: dict[str, Any] = loader.export(self.wrap, self.wrap, 0)
        return tensors

    def load_file(self, filename: Paths, device: Any = None, **options: Any) -> dict[str, Any]:
        """Load a model's tensors; options as in fastsafetensors.numpy.

        device: the framework's name of a device (for jax a device or a Sharding, for paddle "cpu"
        or "gpu:0"); None: the framework's default.
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
            raise ValueError("a device can't be chosen: this framework decides where new tensors "
                             "are")
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
