# SPDX-License-Identifier: Apache-2.0
"""Readahead for programs that read a model's tensors one by one, in approximate order."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from .._core import Loader, Model
from .load import close_load, open_load

# Maximum readahead before the program has shown that it continues.
_TRUST_BYTES = 4 << 20
# The largest window. A tensor that is kept alive may keep a window's memory.
_LARGEST_BYTES = 64 << 20
# First and largest window if the program has announced that it reads everything.
_EAGER_FIRST_BYTES = 64 << 20
_EAGER_LARGEST_BYTES = 256 << 20
# Small tensors count as 16 KiB, because planning takes time too.
_TENSORS_SHIFT = 14
# With announced reads, a tensor at most this far after the previous one continues a run. Several
# runs alternate, because files are sorted by dtype size and programs read by name.
_NEAR = 16
_RUNS = 4
# With announced reads on the CPU, a cached model is loaded at once; residency is checked for this
# many of its tensors.
_SAMPLES = 16
_EVERYTHING = 1 << 62
# A wasted byte counts this many times as much as a used one.
_WASTE_WEIGHT = 4


class _Window:
    """A load of consecutive tensors from index `first` on; `before` is the tensor before it in
    its run.
    """

    def __init__(
        self, loader: Loader, first: int, end: int, size_bytes: int, before: _Window | None
    ) -> None:
        self.loader = loader
        self.first = first
        self.end = end
        self.size_bytes = size_bytes
        self.before = before
        self.has_next = False


class _Run:
    """A run of tensors read one after the other: the last tensor, and the last window."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.window: _Window | None = None


class ReadAhead:
    """Windows of tensors being loaded. Each tensor is taken from its window once.

    Windows cover consecutive tensors in the file. Readahead never exceeds what the program has
    taken so far, and is reduced after wasted windows. A window's memory is freed with the last of
    its tensors that is alive; skipped tensors are freed when the program reaches the next window
    but one. Tensors requested out of order, or again, are not found here; the caller reads them.
    """

    def __init__(
        self, model: Model, options: dict[str, Any], threads: int = 0, eager: bool = False
    ) -> None:
        """Start without windows. options: of open_load(). eager: the program reads everything."""
        self._model = model
        self._options = options
        self._threads = threads
        self._eager = eager
        self._names: list[str] = []
        self._closed = False
        self._alone_bytes = 0  # of tensors that the caller has read
        self._opened_bytes = 0  # of windows
        self._wasted_bytes = 0  # bytes of windows that were not used
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Reset in a forked process: the loads belong to its parent."""
        self._lock = threading.Lock()
        self._windows: dict[int, _Window] = {}
        self._requested = bytearray(len(self._names))
        self._runs: list[_Run] = []

    def begin(self) -> None:
        """Start with the first tensors before the program reads any, if eager."""
        with self._lock:
            if self._closed or self._runs or not self._eager:
                return
            self._list_names()
            if not self._open_cached():
                self._runs.append(_Run(-1))
                self._open(self._runs[0], 0, _EAGER_LARGEST_BYTES)

    def drop(self) -> None:
        """Stop readahead, because the program uses little of it."""
        with self._lock:
            self._eager = False
            # drop references outside the lock; a load ends with its last one
            windows = set(self._windows.values())
            for window in windows:
                self._drop(window)
            self._runs.clear()
        del windows

    def take(self, index: int) -> tuple[Loader, int] | None:
        """Return (load, item) of a tensor, or None if the caller must read it."""
        window = self._windows.pop(index, None)  # only one thread gets it
        if window is None or not window.has_next:
            window = self._advance(index, window)
            if window is None:
                return None
        self._requested[index] = 1
        return window.loader, index - window.first

    def _advance(self, index: int, window: _Window | None) -> _Window | None:
        """Open the window after the current one, or the first of a run."""
        with self._lock:
            if self._closed:
                return None
            self._list_names()
            if index >= len(self._names):
                return None  # a padding tensor: those come after the model's tensors
            if window is None and not self._requested[index]:
                window = self._begin(index)
            self._requested[index] = 1
            if window is None or window.has_next:
                return window
            window.has_next = True
            self._drop(window.before)
            window.before = None
            run = self._run_of(window)
            run.head = window.end - 1
            largest = _EAGER_LARGEST_BYTES if self._eager else _LARGEST_BYTES
            self._open(run, window.end, min(2 * window.size_bytes, largest))
            return window

    def _open_cached(self) -> bool:
        """Load the whole model at once, if its tensors are views that are cached.

        Only a sample is checked; a wrong guess loads everything for a program that reads
            everything.
        """
        options = {"mode": "auto", "cache": "auto", "device": "cpu", **self._options}
        are_views = options["mode"] != "load" and options["cache"] == "auto"
        if not self._eager or self._runs or not are_views or options["device"] != "cpu":
            return False
        last = max(len(self._names) - 1, 0)
        samples = sorted({last * at // (_SAMPLES - 1) for at in range(_SAMPLES)})
        if not all(map(self._is_cached, samples)):
            return False
        self._runs.append(_Run(-1))
        self._open(self._runs[0], 0, _EVERYTHING)
        return True

    def _is_cached(self, index: int) -> bool:
        end = self._model.nbytes(index)
        return not end or self._model.cached_view(index, 0, end) is not None

    def _list_names(self) -> None:
        if not self._names:
            self._names = self._model.names()
            self._requested = bytearray(len(self._names))

    def _begin(self, index: int) -> _Window | None:
        """Open the first window of a run that has reached a tensor; None if there is no run."""
        run = None if self._open_cached() else self._continue_run(index)
        if run is not None:
            trusted = min(max(_TRUST_BYTES, self._alone_bytes), _LARGEST_BYTES)
            self._open(run, index, _EAGER_FIRST_BYTES if self._eager else trusted)
        window = self._windows.pop(index, None)
        if window is None:
            self._alone_bytes += self._model.nbytes(index)
        return window

    def _continue_run(self, index: int) -> _Run | None:
        """Return the run that contains `index`; otherwise start one and return None."""
        reach = _NEAR if self._eager else 1
        for run in self._runs:
            if 0 < index - run.head <= reach:
                run.head = index
                return run
        run = _Run(index)
        self._runs.insert(0, run)
        for old in self._runs[_RUNS:]:
            self._drop(old.window)
        del self._runs[_RUNS:]
        return run if self._eager else None

    def _run_of(self, window: _Window) -> _Run:
        """Return the run of a window, or a new one if it is unknown."""
        for run in self._runs:
            if run.window is window:
                return run
        run = _Run(window.end - 1)
        run.window = window
        return run

    def _capacity(self) -> int:
        """Bytes for a new window: readahead must not exceed what the program has taken."""
        trust = 2 * _EAGER_LARGEST_BYTES if self._eager else _TRUST_BYTES
        waiting = sum(map(self._model.nbytes, list(self._windows)))
        taken = self._alone_bytes + self._opened_bytes - self._wasted_bytes - waiting
        return trust + taken - waiting - _WASTE_WEIGHT * self._wasted_bytes

    def _open(self, run: _Run, first: int, size_bytes: int) -> None:
        """Start loading tensors from `first` on, up to one that was requested or is being
        loaded.
        """
        capacity = size_bytes if size_bytes == _EVERYTHING else min(size_bytes, self._capacity())
        end, total, last = first, 0, first + max(size_bytes >> _TENSORS_SHIFT, 1)
        while end < min(last, len(self._names)):
            nbytes = self._model.nbytes(end)
            is_full = total + nbytes > capacity and (end > first or not self._eager)
            if is_full or self._requested[end] or end in self._windows:
                break
            total += nbytes
            end += 1
        if end == first:
            return
        names = self._names[first:end]
        loader = open_load(self._model, names, threads=self._threads, **self._options)
        run.window = _Window(loader, first, end, size_bytes, run.window)
        self._windows.update(dict.fromkeys(range(first, end), run.window))
        self._opened_bytes += total

    def _drop(self, window: _Window | None) -> None:
        """Drop unused tensors of a window and the ones before it."""
        while window is not None:
            for index in range(window.first, window.end):
                if self._windows.get(index) is window:
                    del self._windows[index]
                    self._wasted_bytes += self._model.nbytes(index)
            window = window.before

    def close(self, waits: bool = True) -> None:
        """Stop. Returned tensors stay valid. waits: wait for reads in flight."""
        with self._lock:
            self._closed = True
            windows = set(self._windows.values())
            self._windows.clear()
            self._runs.clear()
        for window in windows:
            close_load(window.loader) if waits else window.loader.abandon()


# A forked child inherits these objects. It has neither the threads that load for them nor the
# threads that held their locks.
_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


def _forget_all() -> None:
    for ahead in list(_all):
        ahead.forget()


os.register_at_fork(after_in_child=_forget_all)
