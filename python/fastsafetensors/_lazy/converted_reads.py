# SPDX-License-Identifier: Apache-2.0
"""Lazy reads of whole tensors, converted to another dtype while they are read.

When a library calls ``slice[...].to(device, dtype)``, one load does both: the conversion is part of
the copy that the load makes anyway, into memory with huge pages, ahead of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .._loading.load import close_load
from .._loading.open import safe_open
from .._loading.readahead import ReadAhead
from .._torch.torch_installed import torch
from .._torch.torch_state import dtype_name
from .._torch.torch_tensors import make_item
from .lazy_dtypes import Reads
from .lazy_reads import Bounds, ReadResult, Stored
from .lazy_tensor import LazyTensor, make_lazy
from .view_geometry import View


class ConvertedReads:
    """Reads for lazy tensors: through the open model, or converted through separate loads."""

    device = torch.device("cpu")
    stays_lazy = False

    def __init__(
        self, file: safe_open, threads: int, guard: Callable[[ConvertedReads], Reads]
    ) -> None:
        """file: open for torch on the CPU, and kept open while lazy tensors use it.

        guard: the reads that lazy tensors use in place of this object.
        """
        self._guarded = guard(self)
        self._file = file
        self._threads = threads
        self._lock = threading.Lock()
        self._stored: dict[str, Stored] = {}
        self._ahead: dict[str, ReadAhead] = {}

    @property
    def converts(self) -> bool:
        """Whether any tensor was converted."""
        return bool(self._ahead)

    def promise(self, name: str) -> LazyTensor | None:
        """Return a lazy tensor of that name; None if it would gain nothing."""
        with self._lock:
            stored = self._stored.get(name)
            if stored is None:
                stored = self._stored[name] = Stored(self._file._model, name, 0)
        if stored.dtype is None or not stored.dtype.is_floating_point or not stored.nbytes:
            return None
        return make_lazy(self._guarded, stored)

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> ReadResult:
        """Return a slice unchanged. Its memory belongs to the reader."""
        if bounds[1] == stored.shape and not any(bounds[0]):
            return ReadResult(self._file._read_whole(stored.index, stored.name), None, False)
        part = self._file.get_slice(stored.name)[tuple(map(slice, *bounds))]
        return ReadResult(part, None, False)

    def convert(self, stored: Stored, view: View, dtype: Any) -> Any:
        """Return a whole tensor converted to another float dtype; None: leave it to torch."""
        is_whole = view == View(stored.shape, stored.pitches, 0)
        if not is_whole or not dtype.is_floating_point or stored.format_dtype == "F4":
            return None
        try:
            wanted = dtype_name(dtype)
        except ValueError:
            return None
        with self._lock:
            ahead = self._ahead.get(str(wanted))
            if ahead is None:
                self._file._ahead.drop()  # tensors in the file's dtype will not be used
                options = {**self._file._options, "mode": "load", "dtype": wanted}
                ahead = ReadAhead(self._file._model, options, self._threads, eager=True)
                self._ahead[str(wanted)] = ahead
        found = ahead.take(stored.index)
        if found is not None:
            return make_item(*found)
        options = {**self._file._options, "mode": "load", "dtype": wanted}
        loader = self._file._model.load([stored.name], threads=self._threads, **options)
        try:
            return make_item(loader, 0)
        finally:
            close_load(loader)

    def close(self) -> None:
        """Stop readahead."""
        with self._lock:
            for ahead in self._ahead.values():
                ahead.close()
            self._ahead.clear()
