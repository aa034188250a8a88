# SPDX-License-Identifier: Apache-2.0
"""Copies of torch tensors in CPU memory that is kept between saves."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Any

from .._torch.torch_installed import torch


class KeptCopies:
    """Buffers by name; a buffer is used again for a tensor of the same name, dtype and shape.

    The copies are overwritten by the next call of copy().
    """

    def __init__(self) -> None:
        """Begin without buffers."""
        self._buffers: dict[Hashable, Any] = {}
        self._free = threading.Semaphore(1)

    def acquire(self) -> None:
        """Wait until the copies of the call before were released."""
        self._free.acquire()

    def copy(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of tensors. Between acquire() and release()."""
        self.keep_only(tensors)
        return {name: self.copy_one(name, tensor) for name, tensor in tensors.items()}

    def keep_only(self, names: Container[Hashable]) -> None:
        """Give the other buffers back."""
        for name in [name for name in self._buffers if name not in names]:
            del self._buffers[name]

    def copy_one(self, name: Hashable, tensor: Any) -> Any:
        """Return the copy of a tensor."""
        source = tensor.detach()
        kept = self._buffers.get(name)
        if kept is None or kept.dtype != source.dtype or kept.shape != source.shape:
            kept = torch.empty(source.shape, dtype=source.dtype, device="cpu")
            self._buffers[name] = kept
        with torch.no_grad():
            kept.copy_(source)
        return kept

    def release(self) -> None:
        """The copies may be overwritten."""
        self._free.release()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers = {}


def copy_state(state: Any, copies: KeptCopies, name: tuple[Any, ...] = ()) -> Any:
    """Copy a state dict: dicts, lists, tensors and DTensors; other values are copied deeply."""
    if isinstance(state, Mapping):
        return {key: copy_state(value, copies, (*name, key)) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        parts = [copy_state(value, copies, (*name, at)) for at, value in enumerate(state)]
        return parts if isinstance(state, list) else tuple(parts)
    if not isinstance(state, torch.Tensor):
        return copy.deepcopy(state)
    if not hasattr(state, "to_local"):
        return copies.copy_one(name, state)
    from torch.distributed.tensor import DTensor

    sharded: Any = state
    return DTensor.from_local(
        copies.copy_one(name, sharded.to_local()), sharded.device_mesh, sharded.placements,
        run_check=False, shape=sharded.shape, stride=sharded.stride())


def _tensor_names(state: Any, name: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the names that copy_state() gives the tensors."""
    if isinstance(state, (Mapping, list, tuple)):
        below = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in below:
            yield from _tensor_names(value, (*name, key))
    elif isinstance(state, torch.Tensor):
        yield name


class StagedState(dict[str, Any]):
    """A copied state dict. When it is no longer referenced, its buffers may be used again."""


class CopyStore:
    """Buffers of the saves that run, and those that wait for the next save."""

    def __init__(self) -> None:
        """Begin without buffers."""
        self._free: list[KeptCopies] = []

    def copy(self, state: Mapping[str, Any]) -> StagedState:
        """Copy a state dict to buffers that no running save uses."""
        try:
            copies = self._free.pop()
        except IndexError:
            copies = KeptCopies()
        copies.keep_only(set(_tensor_names(state)))
        staged = StagedState(copy_state(state, copies))
        weakref.finalize(staged, self._free.append, copies).atexit = False
        return staged

    def close(self) -> None:
        """Free the buffers, those of running saves when these have ended."""
        self._free = []
