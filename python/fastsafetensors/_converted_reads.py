# SPDX-License-Identifier: Apache-2.0
"""Promises of whole tensors of an open model, which become another dtype as they are read.

``slice[...].to(device, dtype)`` of a library that loads a model is one load: the conversion is in
the copy that the load makes anyway, in memory of huge pages, ahead of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ._lazy_reads import Bounds, Stored
from ._lazy_tensor import LazyTensor, Reads, make_lazy
from ._open import safe_open
from ._readahead import ReadAhead
from ._torch_installed import torch
from ._torch_state import dtype_name
from ._torch_tensors import make_item
from ._view_geometry import View


class ConvertedReads:
    """Reads of promises: as they are by the open model, converted by loads of their own."""

    device = torch.device("cpu")
    keeps_promises = False

    def __init__(
        self, file: safe_open, threads: int, guard: Callable[[ConvertedReads], Reads]
    ) -> None:
        """file: open for torch and the CPU, and kept open while promises are in use.

        guard: what promises ask instead of this.
        """
        self._guarded = guard(self)
        self._file = file
        self._threads = threads
        self._lock = threading.Lock()
        self._stored: dict[str, Stored] = {}
        self._ahead: dict[str, ReadAhead] = {}

    @property
    def converts(self) -> bool:
        """Whether something was converted."""
        return bool(self._ahead)

    def promise(self, name: str) -> LazyTensor | None:
        """Return the tensor of that name, to be read; None where there is nothing to win."""
        with self._lock:
            stored = self._stored.get(name)
            if stored is None:
                stored = self._stored[name] = Stored(self._file._model, name, 0)
        if stored.dtype is None or not stored.dtype.is_floating_point or not stored.nbytes:
            return None
        return make_lazy(self._guarded, stored)

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> tuple[Any, int | None, bool]:
        """Return a box as it is in the file; what the file gives is the reader's."""
        if bounds[1] == stored.shape and not any(bounds[0]):
            return self._file._take(stored.index, stored.name), None, False
        return self._file.get_slice(stored.name)[tuple(map(slice, *bounds))], None, False

    def convert(self, stored: Stored, view: View, dtype: Any) -> Any:
        """Return a whole tensor as another dtype of floats; None: torch has to do it."""
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
                self._file._ahead.drop()  # of the file's own dtype, nobody will take it
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
            loader.close()

    def close(self) -> None:
        """Stop what is read ahead."""
        with self._lock:
            for ahead in self._ahead.values():
                ahead.close()
            self._ahead.clear()
