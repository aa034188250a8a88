# SPDX-License-Identifier: Apache-2.0
"""Slices of a model's tensors, read on demand, and ahead of use when the access order is known.

Cached bytes are not read but mapped from the page cache. Layers are expected to be accessed alike:
slices taken from ``layers.0.q`` are expected from ``layers.1.q``. Expected slices are read
together, in windows ahead of the program. A wrong guess costs time, but never a wrong byte.

Invariants: `_lock` protects all state except the files, which are opened without it. Threads wait
for loads without it. A window is dropped when its slices were taken or passed. It is marked as
dropped before its load is cancelled, so that a waiting thread reads the slice separately.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import mul, sub
from typing import Any, NamedTuple

from .._base.errors import add_location
from .._core import Loader, Model, Tensor, error_class
from .._loading.load import close_load, open_load
from .._torch.torch_installed import torch
from .._torch.torch_state import format_box, torch_dtype_of, torch_shape
from .._torch.torch_tensors import from_bytes, make_item, spread
from .view_geometry import packed_strides

MEMORY_LIMIT_BYTES = 256 << 20
# Smaller slices that cannot be views are copied by the requesting thread if they are cached.
_SMALL_BYTES = 64 << 10
# Size of the first window that follows an earlier load's order, which may differ now: recorded
# slices that are passed over are forgotten, and windows double.
_FIRST_BYTES = 4 << 20
# A program that goes back resumes the recorded order if the next tensor is this near.
_NEAR = 16
_LAYER = re.compile(r"\.(\d+)(?=\.)")

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
# Slices taken of a layer's tensor: {name without its layer, dtype, shape: slices}. The slices are
# keys, in the order of use.
Habits = dict[tuple[str, str, tuple[int, ...]], dict[Bounds, None]]


class ReadResult(NamedTuple):
    """A slice of a stored tensor that was read."""

    tensor: Any  # plain
    # Of the stored tensor in `tensor`, in elements; None: `tensor` is the packed slice.
    offset: int | None
    is_shared: bool  # writing to its memory changes what others read


class Stored:
    """A tensor in the files."""

    __slots__ = ("name", "index", "format_dtype", "dtype", "shape", "element_bytes", "nbytes",
                 "habit", "place", "lock", "pitches", "file", "file_offset")

    def __init__(self, model: Model, name: str, place: int) -> None:
        """Look the tensor up; place: its position in the order in which the program gets them."""
        self.name, self.place = name, place
        self.index = model.find(name)
        self.format_dtype, shape, self.nbytes, self.file, self.file_offset = model.info(self.index)
        self.dtype = torch_dtype_of(self.format_dtype, shape)
        self.shape = torch_shape(self.format_dtype, shape)
        self.element_bytes = 0 if self.dtype is None else self.dtype.itemsize
        self.pitches = packed_strides(self.shape)
        self.habit = (_LAYER.sub(".*", name, count=1), self.format_dtype, self.shape)
        self.lock = threading.RLock()

    def size_of(self, bounds: Bounds) -> int:
        """Size of a slice in bytes."""
        return int(self.element_bytes * prod(map(sub, bounds[1], bounds[0])))


def in_layers(names: Sequence[str]) -> list[str]:
    """Names in layer order: first those without a layer, then layer by layer."""
    def layer(name: str) -> int:
        found = _LAYER.search(name)
        return -1 if found is None else int(found.group(1))

    return sorted(names, key=layer)


class _Window:
    """A load of expected slices."""

    def __init__(self, loader: Loader, first: int, end: int) -> None:
        self.loader = loader
        self.first, self.end = first, end  # positions of the tensors
        self.before: _Window | None = None
        self.is_last = True
        self.is_dropped = False  # its loader is closed, possibly while a thread waits for it


class LazyReads:
    """Reads slices of one model from any thread, and counts bytes read and needed."""

    stays_lazy = True

    def __init__(
        self, model: Model, options: dict[str, Any], *, names: Sequence[str],
        memory_limit: int = MEMORY_LIMIT_BYTES, ahead: bool = True, habits: Habits | None = None,
        expects: Callable[[str], bool] | None = None,
    ) -> None:
        """Start without windows.

        options: of open_load(). names: in the order in which the program gets them. habits: the
        access order of an earlier load, to continue. expects: whether a name will be used.
        """
        self.model = model
        self._options = options
        kind, _, number = str(options.get("device", "cpu")).partition(":")
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number))
        self.stored = {name: Stored(model, name, at) for at, name in enumerate(names)}
        self._order = list(self.stored.values())
        # Two windows, and the tensor that the program uses.
        largest = max((stored.nbytes for stored in self._order), default=0)
        self._window_bytes = (memory_limit - min(largest, memory_limit // 2)) // 2
        self._ahead = ahead and memory_limit > 0
        self._free_bytes = min(_FIRST_BYTES, self._window_bytes) if habits else self._window_bytes
        self._habits: Habits = {} if habits is None else habits
        self._expects = expects
        # Loads may return views of the files, which all tensors share.
        self._shares = options.get("device", "cpu") == "cpu" and options.get("mode") != "load"
        self._files: dict[tuple[int, Any, int], Any] = {}  # by file, dtype and alignment
        self._uses_page_cache = self._shares and options.get("cache", "auto") == "auto"
        self.bytes_needed = 0
        self._bytes_read = 0
        self.loads = 0
        self.boxes_ahead = 0
        self.forget()
        _instances.add(self)

    def forget(self) -> None:
        """Reset in a forked process: the loads belong to its parent."""
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, Bounds], tuple[_Window, int]] = {}
        self._window: _Window | None = None
        self._kept: tuple[Stored, Bounds, Any] | None = None
        self._last_back = -1
        for stored in self._order:
            stored.lock = threading.RLock()

    @property
    def bytes_read(self) -> int:
        """Bytes read by loads, including gaps between slices and wrong guesses."""
        with self._lock:
            window, running = self._window, 0
            while window is not None:
                running += int(window.loader.stats()["bytes_read"])
                window = window.before
            return self._bytes_read + running

    def check_options(self) -> None:
        """Raise a load's errors for invalid options, before anything is requested."""
        for stored in self._order:
            if stored.dtype is not None and stored.shape:
                none = (0,) * len(stored.shape)
                open_load(self.model, [self._item(stored, (none, none))], **self._options).close()
                return

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> ReadResult:
        """Read a slice. Raises a load's errors with file, tensor and rank.

        Private memory that a caller copies from is kept until something else is read, because an
        expert with several places on a rank is copied several times.
        """
        try:
            return self._read(stored, bounds, to_copy)
        except (error_class(), OSError) as error:
            add_location(error, stored.name)
            raise

    def _read(
        self, stored: Stored, bounds: Bounds, to_copy: bool
    ) -> ReadResult:
        size = stored.size_of(bounds)
        if not self._shares:
            kept = self._reuse_kept(stored, bounds, size)
            if kept is not None:
                return kept
        resident = self._find_resident(stored, bounds) if self._uses_page_cache else None
        with self._lock:
            self.bytes_needed += size
            found = self._expected.pop((stored.place, bounds), None)
            if found is not None:
                self._follow_use(found[0])
            elif resident is not None:
                self._learn(stored, bounds)
            else:
                found = self._find_absent(stored, bounds)
        if resident is not None:
            return ReadResult(*resident, True)
        tensor = None
        if found is not None:
            try:
                tensor = make_item(found[0].loader, found[1])
            except (error_class(), OSError, MemoryError):
                self._abandon(found[0])  # it may belong to another tensor, so read this one alone
            except (RuntimeError, ValueError):  # cancelled, or closed
                if not found[0].is_dropped:
                    raise
        if tensor is None:
            tensor = self._read_alone(stored, bounds, size)
        if not to_copy or self._shares:
            return ReadResult(tensor, None, self._shares)
        with self._lock:
            self._kept = (stored, bounds, tensor)
        return ReadResult(tensor, None, True)

    def _reuse_kept(
        self, stored: Stored, bounds: Bounds, size: int
    ) -> ReadResult | None:
        """Return the slice that was copied last; drop it if it is another one."""
        with self._lock:
            if self._kept is None:
                return None
            last, box, tensor = self._kept
            is_whole = box[1] == stored.shape and not any(box[0])
            if last is stored and (box == bounds or is_whole):
                self.bytes_needed += size
                offset = int(tensor.storage_offset()) if is_whole else None
                return ReadResult(tensor, offset, True)
            self._kept = None  # free it before allocating the next one
            return None

    def _find_resident(self, stored: Stored, bounds: Bounds) -> tuple[Any, int] | None:
        """Return (the file's elements, the tensor's offset) if the slice is in the page cache."""
        pitches, size = stored.pitches, stored.element_bytes
        first = sum(map(mul, bounds[0], pitches))
        end = sum(map(mul, bounds[1], pitches)) - sum(pitches)
        view = self.model.cached_view(stored.index, first * size, (end + 1) * size)
        if view is None:  # not in the page cache
            return None
        # One tensor per file and dtype, because one per stored tensor would be slow to create.
        begin, phase = divmod(stored.file_offset, size)
        key = (stored.file, stored.dtype, phase)
        elements = self._files.get(key)
        if elements is None:
            count = (self.model.file(stored.file)[1] - phase) // size
            mapped = self._map_file(stored)
            elements = spread(mapped, phase - stored.file_offset, count * size, stored.dtype)
            self._files[key] = elements
        return elements, begin

    def _map_file(self, stored: Stored) -> Tensor:
        """Return a stored tensor in a private mapping of its whole file, which it keeps alive."""
        loader = open_load(self.model, [stored.name], mode="map")
        try:
            return loader.item(0)
        finally:
            loader.close()

    def convert(self, stored: Stored, view: Any, dtype: Any) -> Any:
        """Leave conversion to torch: readahead keeps the file's dtype."""
        return None

    def _read_alone(self, stored: Stored, bounds: Bounds, size: int) -> Any:
        if self._uses_page_cache and size <= _SMALL_BYTES:
            key = tuple(map(slice, *bounds))
            copied = self.model.copy_slice(stored.index, key) if key else None
            if copied is not None:
                tensor = from_bytes(copied[0], stored.format_dtype, copied[1])
                if tensor is not None:
                    with self._lock:
                        self._bytes_read += size
                    return tensor
        options = self._options
        if self._uses_page_cache:  # for the other ranks of this host, as readahead does
            options = {**options, "cache": "keep"}
        loader = open_load(self.model, [self._item(stored, bounds)], **options)
        with self._lock:
            self.loads += 1
        try:
            tensor = make_item(loader, 0)
            with self._lock:
                self._bytes_read += int(loader.stats()["bytes_read"])
            return tensor
        finally:
            close_load(loader)

    def _item(self, stored: Stored, bounds: Bounds) -> Any:
        if bounds[1] == stored.shape and not any(bounds[0]):
            return stored.name
        return (stored.name, *format_box(stored.format_dtype, *bounds))

    def _learn(self, stored: Stored, bounds: Bounds) -> bool:
        """Record a slice; return whether it is new."""
        known = self._habits.setdefault(stored.habit, {})
        is_new = bounds not in known
        known[bounds] = None
        return is_new

    def _find_absent(self, stored: Stored, bounds: Bounds) -> tuple[_Window, int] | None:
        """Record the slice, and start a window with it if it was expected."""
        is_new = self._learn(stored, bounds)
        if not self._ahead or is_new or self._is_read_past(stored.place):
            return None
        self._open(stored.place, (stored, bounds))
        return self._expected.pop((stored.place, bounds), None)

    def _is_read_past(self, place: int) -> bool:
        """Tell whether the current windows skip a tensor, because it was not expected then.

        A tensor before them is probably a single reuse, unless the program continues from there.
        """
        window = self._window
        if window is None or place >= window.end:
            return False
        if (window.before or window).first <= place:
            return True
        continues = 0 < place - self._last_back <= _NEAR and self._last_back >= 0
        self._last_back = place
        return not continues

    def _follow_use(self, window: _Window) -> None:
        """Keep one window ahead of the one in use."""
        if window.is_last and self._ahead:
            self._open(window.end, None)

    def _open(self, first: int, required: tuple[Stored, Bounds] | None) -> None:
        """Start reading expected slices from a position on, up to the size of a window."""
        if self._window is not None:
            self._window.is_last = False
            self._drop(self._window.before)
            self._window.before = None
        capacity = self._free_bytes
        self._free_bytes = min(2 * self._free_bytes, self._window_bytes)
        picked = [required] if required is not None else []
        total = 0 if required is None else required[0].size_of(required[1])
        place = first
        while place < len(self._order):
            boxes, size = self._expect(self._order[place], required)
            if picked and total + size > capacity:
                break
            picked += boxes
            total += size
            place += 1
        if not picked:
            return
        items = [self._item(*one) for one in picked]
        try:
            loader = open_load(self.model, items, **self._options)
        except (error_class(), OSError, MemoryError):
            # A caller that needs one of these slices gets the error from its own read.
            self._ahead = False
            return
        self.loads += 1
        self.boxes_ahead += len(picked)
        window = _Window(loader, first, place)
        window.before = self._window
        self._window = window
        for number, (stored, bounds) in enumerate(picked):
            self._expected[stored.place, bounds] = (window, number)

    def _expect(
        self, stored: Stored, required: tuple[Stored, Bounds] | None
    ) -> tuple[list[tuple[Stored, Bounds]], int]:
        """Expected slices of a tensor, and their size."""
        known = self._habits.get(stored.habit)
        if not known or (self._expects is not None and not self._expects(stored.name)):
            return [], 0
        # A copy, because another load of the same model may record concurrently.
        boxes = [(stored, bounds) for bounds in list(known)
                 if (stored, bounds) != required and (stored.place, bounds) not in self._expected]
        return boxes, sum(stored.size_of(bounds) for _, bounds in boxes)

    def _drop(self, window: _Window | None) -> None:
        """Drop slices of a window that were not taken; if needed later, they are read alone."""
        while window is not None:
            for place, bounds in [key for key, (of, _) in self._expected.items() if of is window]:
                del self._expected[place, bounds]
                # it was not used again
                self._habits.get(self._order[place].habit, {}).pop(bounds, None)
            self._end(window)
            window = window.before

    def _end(self, window: _Window) -> None:
        if window.is_dropped:
            return
        self._bytes_read += int(window.loader.stats()["bytes_read"])
        window.is_dropped = True  # set it first, because cancelling wakes waiting threads
        close_load(window.loader)

    def _abandon(self, window: _Window) -> None:
        with self._lock:
            for key in [key for key, (of, _) in self._expected.items() if of is window]:
                del self._expected[key]

    def close(self) -> None:
        """Drop readahead. Returned tensors stay valid, and can still read."""
        with self._lock:
            self._ahead = False
            self._files.clear()
            self._expected.clear()
            self._kept = None
            window, self._window = self._window, None
            while window is not None:
                self._end(window)
                window = window.before


# A forked child inherits these objects. It has neither the threads that load for them nor the
# threads that held their locks.
_instances: weakref.WeakSet[LazyReads] = weakref.WeakSet()


def _forget_all() -> None:
    for reads in list(_instances):
        reads.forget()


os.register_at_fork(after_in_child=_forget_all)
