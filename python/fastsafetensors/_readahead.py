# SPDX-License-Identifier: Apache-2.0
"""Reading ahead of programs that take a model's tensors one by one, in order or nearly so."""

from __future__ import annotations

import threading
from typing import Any

from ._core import Loader, Model

# A first window and the largest, in bytes: the size doubles from one to the next.
_FIRST_BYTES = 16 << 20
_LARGEST_BYTES = 256 << 20
# Of small tensors a window has as many as if they were of 16 KiB: planning costs time, too.
_TENSORS_SHIFT = 14
# A tensor at most this many after the one before it continues a run. Several runs may take turns:
# files are sorted by the size of their dtypes first, programs ask in the order of names.
_NEAR = 16
_RUNS = 4


class _Window:
    """A load of consecutive tensors, of which `first` is the first one's index."""

    def __init__(self, loader: Loader, first: int, end: int, size_bytes: int) -> None:
        self.loader = loader
        self.first = first
        self.end = end
        self.size_bytes = size_bytes
        self.has_next = False


class ReadAhead:
    """Windows of tensors on their way; each tensor is handed out of its window once.

    A window's memory goes with the last of its tensors that somebody holds. What is asked for out
    of order, or again, is not found here: the caller reads it by itself.
    """

    def __init__(
        self, model: Model, options: dict[str, Any], threads: int = 0, eager: bool = False
    ) -> None:
        """Begin without windows. options: of Model.load(). eager: the program takes everything."""
        self._model = model
        self._options = options
        self._threads = threads
        self._eager = eager
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._windows: dict[int, _Window] = {}
        self._asked: bytearray = bytearray()
        self._heads: list[int] = []
        self._closed = False

    def _continues(self, index: int) -> bool:
        """Tell whether a run has come to `index`; note that it has."""
        for at, head in enumerate(self._heads):
            if 0 < index - head <= _NEAR:
                self._heads[at] = index
                return True
        self._heads.insert(0, index)
        del self._heads[_RUNS:]
        return self._eager

    def _open(self, first: int, size_bytes: int) -> None:
        """Begin to load tensors from `first` on, up to one that was asked for or is on its way."""
        end, total, count = first, 0, size_bytes >> _TENSORS_SHIFT
        while end < len(self._names) and not self._asked[end] and end not in self._windows:
            nbytes = self._model.nbytes(end)
            if end > first and (total + nbytes > size_bytes or end - first >= count):
                break
            total += nbytes
            end += 1
        if end == first:
            return
        names = self._names[first:end]
        loader = self._model.load(names, threads=self._threads, **self._options)
        window = _Window(loader, first, end, size_bytes)
        self._windows.update(dict.fromkeys(range(first, end), window))

    def take(self, index: int) -> tuple[Loader, int] | None:
        """Return (load, item) of a tensor, or None where the caller has to read it."""
        window = self._windows.pop(index, None)  # of threads, one gets it
        if window is None or not window.has_next:
            window = self._advance(index, window)
        if window is None:
            return None
        self._asked[index] = 1
        return window.loader, index - window.first

    def _advance(self, index: int, window: _Window | None) -> _Window | None:
        """Open the window behind one that is being used, or the first of a run."""
        with self._lock:
            if self._closed:
                return None
            if not self._names:
                self._names = self._model.names()
                self._asked = bytearray(len(self._names))
            if window is None and not self._asked[index] and self._continues(index):
                self._open(index, _FIRST_BYTES * (4 if self._eager else 1))
                window = self._windows.pop(index, None)
            self._asked[index] = 1
            if window is not None and not window.has_next:
                window.has_next = True
                self._open(window.end, min(2 * window.size_bytes, _LARGEST_BYTES))
            return window

    def close(self) -> None:
        """Stop; tensors handed out stay valid."""
        with self._lock:
            self._closed = True
            windows = set(self._windows.values())
            self._windows.clear()
        for window in windows:
            window.loader.close()
