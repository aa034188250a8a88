# SPDX-License-Identifier: Apache-2.0
"""Changed elements of the tensors of a weight delta: Delta.patches()."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .. import _core
from .._base.argument_types import Path
from .._base.dtypes import WORDS
from .._base.errors import printable, refuse

# Tensors whose patches are made while the caller uses the one before.
_PATCHES_AHEAD = 2
# The bits of NaNs without the sign: all from the first to the last.
_NANS = {
    "F64": (0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF), "F32": (0x7F800001, 0x7FFFFFFF),
    "F16": (0x7C01, 0x7FFF), "BF16": (0x7F81, 0x7FFF),
}
_FLOATS = set(_NANS)
_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2,
}


@dataclass(frozen=True)
class Patch:
    """Changed elements of one checkpoint tensor, with the fields of vLLM's CheckpointWeightPatch.

    name: the tensor's name in the checkpoint. shape: the whole tensor's. dtype: of `values`, a
    torch or numpy dtype. values: one-dimensional, absolute new values. indices: flat positions of
    the values, ascending and unique, int32 or int64; None: `values` is the whole flattened tensor.
    vLLM loads sparse and dense patches in separate calls.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    values: Any
    indices: Any | None


class PatchMaker:
    """Makes the patch of one tensor after the other, on several threads."""

    def __init__(
        self, delta: Any, checkpoint: Path, framework: str, indices: str, dense: bool,
        nan_is_dense: bool,
    ) -> None:
        self._delta, self._framework = delta, framework
        self._model = _core.Model(os.fspath(checkpoint))
        self._indices, self._dense, self._nan_is_dense = indices, dense, nan_is_dense

    def __call__(self, position: int, name: str) -> Patch:
        index = self._model.find(name)
        if index < 0:
            refuse(f"the delta changes tensor `{printable(name)}`, which the checkpoint lacks",
                   "TensorNotFound")
        dtype, shape, *_ = self._model.info(index)
        with_old = self._model.load([name])
        old = next(iter(with_old))
        try:
            return self._make(position, name, old, dtype, tuple(shape))
        finally:
            with_old.close()

    def _make(
        self, position: int, name: str, old: Any, dtype: str, shape: tuple[int, ...]
    ) -> Patch:
        element = _ELEMENT_BYTES.get(dtype, 1)
        count = old.nbytes // element
        wide = self._indices == "int64" or count >= 1 << 31
        dense = self._dense or (self._nan_is_dense and dtype not in _FLOATS)
        dense = dense or dtype.startswith(("F4", "F6_", "C"))
        call = (self._delta, position, old.data_ptr, old.nbytes, element, 8 if wide else 4)
        indices, values = _core.delta_patch(*call, dense)
        made = self._wrap(name, dtype, shape, values, indices, wide)
        if indices is not None and self._nan_is_dense and self._has_nan(
            dtype, values, made.values
        ):
            _, values = _core.delta_patch(*call, True)
            made = self._wrap(name, dtype, shape, values, None, wide)
        return made

    def _has_nan(self, dtype: str, values: bytearray, made: Any) -> bool:
        """Whether one of the values is a NaN: for numpy by its bits, because it lacks dtypes."""
        if self._framework == "torch":
            return bool(made.isnan().any())
        import numpy

        first, last = _NANS[dtype]
        element = _ELEMENT_BYTES[dtype]
        magnitudes = numpy.frombuffer(values, f"uint{8 * element}") & ((1 << 8 * element - 1) - 1)
        return bool(((magnitudes >= first) & (magnitudes <= last)).any())

    def _wrap(
        self, name: str, dtype: str, shape: tuple[int, ...], values: bytearray,
        indices: bytearray | None, wide: bool,
    ) -> Patch:
        if self._framework == "numpy":
            import numpy

            kind = _numpy_kind(dtype)
            made: Any = numpy.frombuffer(values, kind)
            places: Any = None if indices is None else numpy.frombuffer(
                indices, numpy.int64 if wide else numpy.int32)
        else:
            from .._torch.torch_installed import torch
            from .._torch.torch_state import torch_dtype

            kind = torch_dtype(dtype) or torch.uint8
            made = _torch_buffer(torch, values, kind)
            places = None if indices is None else _torch_buffer(
                torch, indices, torch.int64 if wide else torch.int32)
        return Patch(name, shape, kind, made, places)


def _numpy_kind(dtype: str) -> Any:
    """Return numpy's dtype, of ml_dtypes where it is installed, else unsigned integers."""
    import numpy

    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 - registers its names with numpy
    with contextlib.suppress(TypeError):
        return numpy.dtype(WORDS.get(dtype, "uint8"))
    return numpy.dtype(f"uint{8 * _ELEMENT_BYTES.get(dtype, 1)}")


def _torch_buffer(torch: Any, values: bytearray, kind: Any) -> Any:
    # torch refuses an empty buffer.
    return torch.frombuffer(values, dtype=kind) if values else torch.empty(0, dtype=kind)


def make_ahead(make: PatchMaker, names: list[str]) -> Iterator[Patch]:
    with ThreadPoolExecutor(_PATCHES_AHEAD, "fastsafetensors-patch") as pool:
        running: deque[Future[Patch]] = deque()
        try:
            for position, name in enumerate(names):
                running.append(pool.submit(make, position, name))
                if len(running) > _PATCHES_AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
