# SPDX-License-Identifier: Apache-2.0
"""Reads of a stored tensor as another dtype, for views such as `view(torch.uint8)`."""

from __future__ import annotations

from math import prod
from operator import mul, sub
from typing import Any, Protocol

from .._torch.torch_installed import torch
from .lazy_reads import Bounds, ReadResult, Stored
from .view_geometry import packed_strides


class Reads(Protocol):
    """The source of a lazy tensor's bytes."""

    device: Any
    stays_lazy: bool  # False: to() returns a plain tensor

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> ReadResult:
        """Read a slice. to_copy: only used for a copy, so its memory may be reused."""
        ...

    def convert(self, stored: Stored, view: Any, dtype: Any) -> Any:
        """Return a view converted to another dtype; None: leave it to torch."""


class _Reinterpreted(Stored):
    """A stored tensor whose bytes are elements of another dtype.

    The last dimension has the bytes of the stored tensor's dimensions from `kept` on.
    """

    __slots__ = ("base", "kept", "row_bytes")

    def __init__(self, base: Stored, dtype: Any, kept: int) -> None:
        self.base, self.kept = base, kept
        for name in ("name", "place", "index", "nbytes", "file", "file_offset", "habit",
                     "format_dtype"):
            setattr(self, name, getattr(base, name))
        # What a step in the first of those dimensions skips.
        self.row_bytes = prod(base.shape[kept + 1:]) * base.element_bytes
        self.dtype, self.element_bytes = dtype, dtype.itemsize
        last = prod(base.shape[kept:]) * base.element_bytes // dtype.itemsize
        self.shape = (*base.shape[:kept], last)
        self.pitches = packed_strides(self.shape)

    @property
    def lock(self) -> Any:  # type: ignore[override]
        """The lock of the stored tensor, which a forked child replaces."""
        return self.base.lock

    def cover(self, bounds: Bounds) -> tuple[Bounds, int]:
        """The stored elements that contain a slice, and the bytes before it in each row."""
        base, kept, (begin, end) = self.base, self.kept, bounds
        if not base.shape:
            return ((), ()), begin[-1] * self.element_bytes
        first, skipped = divmod(begin[-1] * self.element_bytes, self.row_bytes)
        last = -(-end[-1] * self.element_bytes // self.row_bytes)
        inner = base.shape[kept + 1:]
        return ((*begin[:-1], first, *(0 for _ in inner)), (*end[:-1], last, *inner)), skipped


class _ReinterpretedReads:
    """Reads elements of the stored dtype and returns them as elements of another one."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self.device, self.stays_lazy = reads.device, reads.stays_lazy

    def read(
        self, stored: Any, bounds: Bounds, to_copy: bool = False
    ) -> ReadResult:
        """Return (plain tensor, offset or None, whether its memory is shared), as other reads."""
        base, old, new = stored.base, stored.base.element_bytes, stored.element_bytes
        (begin, end), skipped = stored.cover(bounds)
        data, offset, is_shared = self._reads.read(base, (begin, end), to_copy)
        if offset is not None and offset * old % new == 0:
            whole = data.as_strided((prod(base.shape),), (1,), offset).view(stored.dtype)
            return ReadResult(whole, int(whole.storage_offset()), is_shared)
        if offset is not None:
            data = data.as_strided(tuple(map(sub, end, begin)), base.pitches,
                                   offset + sum(map(mul, begin, base.pitches)))
        sizes = tuple(map(sub, bounds[1], bounds[0]))
        rows = data.contiguous().reshape(*sizes[:-1], -1).view(torch.uint8)
        rows = rows.narrow(-1, skipped, sizes[-1] * new)
        if rows.storage_offset() % new or not rows.is_contiguous():
            rows = rows.clone(memory_format=torch.contiguous_format)
        return ReadResult(rows.view(stored.dtype), None, is_shared)

    def convert(self, stored: Stored, view: Any, dtype: Any) -> Any:
        """Leave conversion to torch."""
        return None


def reinterpret(reads: Reads, stored: Stored, dtype: Any) -> tuple[Reads, Stored] | None:
    """Return what reads a stored tensor as another dtype; None: they are not whole elements."""
    if isinstance(stored, _Reinterpreted):  # its bytes are the same
        reads, stored = reads._reads, stored.base  # type: ignore[attr-defined]
    if dtype == stored.dtype:
        return reads, stored
    # The last dimensions whose bytes are whole elements of the dtype become one.
    for kept in range(max(len(stored.shape) - 1, 0), -1, -1):
        if prod(stored.shape[kept:]) * stored.element_bytes % dtype.itemsize == 0:
            return _ReinterpretedReads(reads), _Reinterpreted(stored, dtype, kept)
    return None
