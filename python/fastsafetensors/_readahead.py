# SPDX-License-Identifier: Apache-2.0
"""Reading ahead of programs that take a model's tensors one by one, in order or nearly so."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ._core import Loader, Model
from ._load import open_load

# What may be on its way before the program has shown by what it takes that it goes on.
_TRUST_BYTES = 4 << 20
# The largest window. One tensor that a program keeps may keep a window's memory.
_LARGEST_BYTES = 64 << 20
# The first and the largest window where the program has said that it takes everything.
_EAGER_FIRST_BYTES = 64 << 20
_EAGER_LARGEST_BYTES = 256 << 20
# Of small tensors a window has as many as if they were of 16 KiB: planning costs time, too.
_TENSORS_SHIFT = 14
# An eager program's tensor, at most this many after the one before, continues a run. Several runs
# take turns: files are sorted by the size of their dtypes first, programs ask in order of names.
_NEAR = 16
_RUNS = 4
# An eager program of a model on the CPU gets all of it by one load where the page cache has it: of
# the model's tensors these many are looked for.
_SAMPLES = 16
_EVERYTHING = 1 << 62
# A byte that nobody has taken counts as many times as one that somebody has.
_WASTE_WEIGHT = 4


class _Window:
    """A load of consecutive tensors, from the index `first` on; `before` it in its run came one."""

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
    """Tensors that are taken one after the other: the last one, and the last window."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.window: _Window | None = None


class ReadAhead:
    """Windows of tensors on their way; each tensor is handed out of its window once.

    Windows are opened for tensors that follow each other in the file. What is on its way is never
    more than what the program has taken, and less where windows turned out to be of no use. A
    window's memory goes with the last of its tensors that somebody holds; tensors that the program
    has passed by go when it comes to the next window but one. What is asked for out of order, or
    again, is not found here: the caller reads it by itself.
    """

    def __init__(
        self, model: Model, options: dict[str, Any], threads: int = 0, eager: bool = False
    ) -> None:
        """Begin without windows. options: of open_load(). eager: the program takes everything."""
        self._model = model
        self._options = options
        self._threads = threads
        self._eager = eager
        self._names: list[str] = []
        self._closed = False
        self._alone_bytes = 0  # of tensors that the caller has read by itself
        self._opened_bytes = 0  # of windows
        self._wasted_bytes = 0  # of windows, what nobody has taken
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Begin anew, in a forked process: the loads belong to the one that it was forked from."""
        self._lock = threading.Lock()
        self._windows: dict[int, _Window] = {}
        self._asked = bytearray(len(self._names))
        self._runs: list[_Run] = []

    def begin(self) -> None:
        """Begin with the first tensors, before the program takes any. Of eager ones."""
        with self._lock:
            if self._closed or self._runs or not self._eager:
                return
            self._list_names()
            if not self._open_cached():
                self._runs.append(_Run(-1))
                self._open(self._runs[0], 0, _EAGER_LARGEST_BYTES)

    def drop(self) -> None:
        """Let go of what is on its way: the program turned out to want little of it."""
        with self._lock:
            self._eager = False
            windows = set(self._windows.values())  # loads end with who holds them last, unlocked
            for window in windows:
                self._drop(window)
            self._runs.clear()
        del windows

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
            self._list_names()
            if index >= len(self._names):
                return None  # a filler of alignment: behind the model's tensors
            if window is None and not self._asked[index]:
                window = self._begin(index)
            self._asked[index] = 1
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
        """Begin with all of the model, once, where its tensors are views that the page cache has.

        As far as some of them show: a wrong guess is a load of all for who takes all.
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
        return not end or self._model.view_range(index, 0, end) is not None

    def _list_names(self) -> None:
        if not self._names:
            self._names = self._model.names()
            self._asked = bytearray(len(self._names))

    def _begin(self, index: int) -> _Window | None:
        """Open the first window of a run that has come to a tensor; None where there is none."""
        run = None if self._open_cached() else self._continue_run(index)
        if run is not None:
            self._open(run, index, _EAGER_FIRST_BYTES if self._eager else _TRUST_BYTES)
        window = self._windows.pop(index, None)
        if window is None:
            self._alone_bytes += self._model.nbytes(index)
        return window

    def _continue_run(self, index: int) -> _Run | None:
        """Return the run that has come to `index`; None, and a new run, where none has."""
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
        """Return the run that a window belongs to; a new one where that is no longer known."""
        for run in self._runs:
            if run.window is window:
                return run
        run = _Run(window.end - 1)
        run.window = window
        return run

    def _room(self) -> int:
        """Bytes that a new window may have: no more may be waiting than the program has taken."""
        trust = 2 * _EAGER_LARGEST_BYTES if self._eager else _TRUST_BYTES
        waiting = sum(map(self._model.nbytes, list(self._windows)))
        taken = self._alone_bytes + self._opened_bytes - self._wasted_bytes - waiting
        return trust + taken - waiting - _WASTE_WEIGHT * self._wasted_bytes

    def _open(self, run: _Run, first: int, size_bytes: int) -> None:
        """Begin to load tensors from `first` on, up to one that was asked for or is on its way."""
        room = size_bytes if size_bytes == _EVERYTHING else min(size_bytes, self._room())
        end, total, last = first, 0, first + max(size_bytes >> _TENSORS_SHIFT, 1)
        while end < min(last, len(self._names)):
            nbytes = self._model.nbytes(end)
            is_full = total + nbytes > room and (end > first or not self._eager)
            if is_full or self._asked[end] or end in self._windows:
                break
            total += nbytes
            end += 1
        if end == first:
            return
        names = self._names[first:end]
        options = dict(self._options)
        if size_bytes == _EVERYTHING:
            options["populate"] = True  # its pages, by threads, while the program does other things
        loader = open_load(self._model, names, threads=self._threads, **options)
        run.window = _Window(loader, first, end, size_bytes, run.window)
        self._windows.update(dict.fromkeys(range(first, end), run.window))
        self._opened_bytes += total

    def _drop(self, window: _Window | None) -> None:
        """Let go of what nobody has taken from a window and the ones before it."""
        while window is not None:
            for index in range(window.first, window.end):
                if self._windows.get(index) is window:
                    del self._windows[index]
                    self._wasted_bytes += self._model.nbytes(index)
            window = window.before

    def close(self, waits: bool = True) -> None:
        """Stop; tensors handed out stay valid. waits: for reads that are in flight."""
        with self._lock:
            self._closed = True
            windows = set(self._windows.values())
            self._windows.clear()
            self._runs.clear()
        for window in windows:
            window.loader.close() if waits else window.loader.abandon()


# Forked processes have the objects, but neither the threads of their loads nor the locks' holders.
_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


def _forget_all() -> None:
    for ahead in list(_all):
        ahead.forget()


os.register_at_fork(after_in_child=_forget_all)
