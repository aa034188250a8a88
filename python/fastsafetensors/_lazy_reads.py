# SPDX-License-Identifier: Apache-2.0
"""Boxes of a model's tensors, read when they are asked for, and ahead of that where it is clear.

What the page cache has is not read at all: it is used where it lies. What was asked of one layer is
expected of the next ones: of ``layers.1.q`` the boxes that were taken of ``layers.0.q``. Boxes that
are expected are read together, in windows ahead of the program. A wrong guess costs time, never a
wrong byte.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import mul, sub
from typing import Any

from ._core import Loader, Model, error_class
from ._errors import add_place
from ._load import open_load
from ._torch_installed import torch
from ._torch_state import format_box, torch_dtype, torch_shape
from ._torch_tensors import from_bytes, make_item, spread
from ._view_geometry import packed_strides

MEMORY_LIMIT_BYTES = 256 << 20
# Boxes below this that are no views are copied by the thread that asks where the page cache has
# them.
_SMALL_BYTES = 64 << 10
# The first window of what an earlier load has taken, which may be another way through the model:
# what it had is forgotten where this one passes it by, and windows grow twofold.
_FIRST_BYTES = 4 << 20
# A program that goes back takes up its way from there when the next tensor is this near.
_NEAR = 16
_LAYER = re.compile(r"\.(\d+)(?=\.)")

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
# What was taken of a tensor of some layer: {name without its layer, dtype, shape: boxes}. The boxes
# are keys, in the order in which they were taken.
Habits = dict[tuple[str, str, tuple[int, ...]], dict[Bounds, None]]


class Stored:
    """A tensor of the files."""

    __slots__ = ("name", "index", "format_dtype", "dtype", "shape", "element_bytes", "nbytes",
                 "habit", "place", "lock", "pitches", "file", "file_offset")

    def __init__(self, model: Model, name: str, place: int) -> None:
        """Look into the header; place: in the order in which the program gets the tensors."""
        self.name, self.place = name, place
        self.index = model.find(name)
        self.format_dtype, shape, self.nbytes, self.file, self.file_offset = model.info(self.index)
        self.dtype = torch_dtype(self.format_dtype)
        self.shape = torch_shape(self.format_dtype, shape)
        self.element_bytes = 0 if self.dtype is None else self.dtype.itemsize
        self.pitches = packed_strides(self.shape)
        self.habit = (_LAYER.sub(".*", name, count=1), self.format_dtype, self.shape)
        self.lock = threading.RLock()

    def size_of(self, bounds: Bounds) -> int:
        """Bytes of a box."""
        return int(self.element_bytes * prod(map(sub, bounds[1], bounds[0])))


def in_layers(names: Sequence[str]) -> list[str]:
    """Names in the order of their layers: what has none first, then layer by layer."""
    def layer(name: str) -> int:
        found = _LAYER.search(name)
        return -1 if found is None else int(found.group(1))

    return sorted(names, key=layer)


class _Window:
    """A load of boxes that are expected."""

    def __init__(self, loader: Loader, first: int, end: int) -> None:
        self.loader = loader
        self.first, self.end = first, end  # places of the tensors
        self.before: _Window | None = None
        self.is_last = True
        self.is_dropped = False  # its loader is closed, maybe under who waits for a box


class LazyReads:
    """Reads of boxes from one model, by any thread; counts what was read and what was needed."""

    keeps_promises = True

    def __init__(
        self, model: Model, options: dict[str, Any], *, names: Sequence[str],
        memory_limit: int = MEMORY_LIMIT_BYTES, ahead: bool = True, habits: Habits | None = None,
        expects: Callable[[str], bool] | None = None,
    ) -> None:
        """Begin without windows.

        options: of open_load(). names: in the order in which the program gets them. habits: of an
        earlier load, gone on with. expects: whether a name will be used at all, for all it is
        known.
        """
        self.model = model
        self._options = options
        kind, _, number = str(options.get("device", "cpu")).partition(":")
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number))
        self.stored = {name: Stored(model, name, at) for at, name in enumerate(names)}
        self._order = list(self.stored.values())
        self._limit = memory_limit
        self._ahead = ahead and memory_limit > 0
        self._room = min(_FIRST_BYTES, memory_limit // 2) if habits else memory_limit // 2
        self._habits: Habits = {} if habits is None else habits
        self._expects = expects
        # What loads give may be views of the files, which all of them share.
        self._shares = options.get("device", "cpu") == "cpu" and options.get("mode") != "load"
        self._files: dict[tuple[int, Any, int], Any] = {}  # by file, dtype and phase
        self._looks = self._shares and options.get("cache", "auto") == "auto"
        self.bytes_needed = 0
        self._bytes_read = 0
        self.loads = 0
        self.boxes_ahead = 0
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Begin anew, in a forked process: the loads belong to the one that it was forked from."""
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, Bounds], tuple[_Window, int]] = {}
        self._window: _Window | None = None
        self._kept: tuple[Stored, Bounds, Any] | None = None
        self._last_back = -1
        for stored in self._order:
            stored.lock = threading.RLock()

    @property
    def bytes_read(self) -> int:
        """Bytes that loads have read, what lies between boxes and was guessed wrongly with them."""
        with self._lock:
            window, running = self._window, 0
            while window is not None:
                running += int(window.loader.stats()["bytes_read"])
                window = window.before
            return self._bytes_read + running

    def check_options(self) -> None:
        """Raise what a load raises for an option that is none, before anything is asked for."""
        for stored in self._order:
            if stored.dtype is not None and stored.shape:
                none = (0,) * len(stored.shape)
                open_load(self.model, [self._item(stored, (none, none))], **self._options).close()
                return

    def read(
        self, stored: Stored, bounds: Bounds, to_copy: bool = False
    ) -> tuple[Any, int | None, bool]:
        """Return (tensor, where the stored one begins in it, whether its memory is shared).

        It is a plain tensor: of the file's elements, the stored one's among them, or (None) the
        box, packed. Who writes to shared memory changes what others read. Raises what loads raise:
        the file, the tensor and the rank are named.

        What somebody copies out of memory that nobody else has is kept until something else is
        read: an expert with several places on a rank is read once.
        """
        try:
            return self._read(stored, bounds, to_copy)
        except (error_class(), OSError) as error:
            add_place(error, stored.name)
            raise

    def _read(
        self, stored: Stored, bounds: Bounds, to_copy: bool
    ) -> tuple[Any, int | None, bool]:
        size = stored.size_of(bounds)
        if not self._shares:
            kept = self._take_kept(stored, bounds, size)
            if kept is not None:
                return kept
        at_hand = self._look(stored, bounds) if self._looks else None
        with self._lock:
            self.bytes_needed += size
            found = self._expected.pop((stored.place, bounds), None)
            if found is not None:
                self._hit(found[0])
            elif at_hand is not None:
                self._learn(stored, bounds)
            else:
                found = self._miss(stored, bounds)
        if at_hand is not None:
            return (*at_hand, True)
        tensor = None
        if found is not None:
            try:
                tensor = make_item(found[0].loader, found[1])
            except (error_class(), OSError, MemoryError):
                self._give_up(found[0])  # it may be another tensor's; this one is read alone
            except (RuntimeError, ValueError):  # cancelled, or closed
                if not found[0].is_dropped:
                    raise
        if tensor is None:
            tensor = self._read_alone(stored, bounds, size)
        if not to_copy or self._shares:
            return tensor, None, self._shares
        with self._lock:
            self._kept = (stored, bounds, tensor)
        return tensor, None, True

    def _take_kept(
        self, stored: Stored, bounds: Bounds, size: int
    ) -> tuple[Any, int | None, bool] | None:
        """Return a box that was copied just now; let go of what is kept where it is another's."""
        with self._lock:
            if self._kept is None:
                return None
            last, box, tensor = self._kept
            is_whole = box[1] == stored.shape and not any(box[0])
            if last is stored and (box == bounds or is_whole):
                self.bytes_needed += size
                return tensor, int(tensor.storage_offset()) if is_whole else None, True
            self._kept = None  # before the next one takes memory
            return None

    def _look(self, stored: Stored, bounds: Bounds) -> tuple[Any, int] | None:
        """Return (the file's elements, where the tensor begins) where the page cache has the box.
        """
        pitches, size = stored.pitches, stored.element_bytes
        first = sum(map(mul, bounds[0], pitches))
        end = sum(map(mul, bounds[1], pitches)) - sum(pitches)
        view = self.model.view_range(stored.index, first * size, (end + 1) * size)
        if view is None:
            return None
        # One tensor a file and dtype: as many as there are tensors would be slow to make and keep.
        begin, phase = divmod(stored.file_offset, size)
        key = (stored.file, stored.dtype, phase)
        elements = self._files.get(key)
        if elements is None:
            count = (self.model.file(stored.file)[1] - phase) // size
            elements = spread(view, phase - stored.file_offset, count * size, stored.dtype)
            self._files[key] = elements
        return elements, begin

    def convert(self, stored: Stored, view: Any, dtype: Any) -> Any:
        """Leave it to torch: what is read ahead is as it is in the file."""
        return None

    def _read_alone(self, stored: Stored, bounds: Bounds, size: int) -> Any:
        if self._looks and size <= _SMALL_BYTES:
            key = tuple(map(slice, *bounds))
            copied = self.model.copy_slice(stored.index, key) if key else None
            if copied is not None:
                tensor = from_bytes(copied[0], stored.format_dtype, copied[1])
                if tensor is not None:
                    with self._lock:
                        self._bytes_read += size
                    return tensor
        loader = open_load(self.model, [self._item(stored, bounds)], **self._options)
        with self._lock:
            self.loads += 1
        try:
            tensor = make_item(loader, 0)
            with self._lock:
                self._bytes_read += int(loader.stats()["bytes_read"])
            return tensor
        finally:
            loader.close()

    def _item(self, stored: Stored, bounds: Bounds) -> Any:
        if bounds[1] == stored.shape and not any(bounds[0]):
            return stored.name
        return (stored.name, *format_box(stored.format_dtype, *bounds))

    def _learn(self, stored: Stored, bounds: Bounds) -> bool:
        """Remember what was taken; tell whether it is new."""
        known = self._habits.setdefault(stored.habit, {})
        is_new = bounds not in known
        known[bounds] = None
        return is_new

    def _miss(self, stored: Stored, bounds: Bounds) -> tuple[_Window, int] | None:
        """Learn, and begin a window with the box if there is something to expect behind it."""
        is_new = self._learn(stored, bounds)
        if not self._ahead or is_new or self._is_passed(stored.place):
            return None
        self._open(stored.place, (stored, bounds))
        return self._expected.pop((stored.place, bounds), None)

    def _is_passed(self, place: int) -> bool:
        """Tell whether the windows on their way go past a tensor, which was not expected then.

        One that lies before them is used once more, by itself, unless the program goes on there.
        """
        window = self._window
        if window is None or place >= window.end:
            return False
        if (window.before or window).first <= place:
            return True
        goes_on = 0 < place - self._last_back <= _NEAR and self._last_back >= 0
        self._last_back = place
        return not goes_on

    def _hit(self, window: _Window) -> None:
        """Keep one window ahead of the one that is being used."""
        if window.is_last and self._ahead:
            self._open(window.end, None)

    def _open(self, first: int, must: tuple[Stored, Bounds] | None) -> None:
        """Begin to read what is expected from a place on, at most half of the limit."""
        if self._window is not None:
            self._window.is_last = False
            self._drop(self._window.before)
            self._window.before = None
        room, self._room = self._room, min(2 * self._room, self._limit // 2)
        picked = [must] if must is not None else []
        total = 0 if must is None else must[0].size_of(must[1])
        place = first
        while place < len(self._order):
            boxes, size = self._expect(self._order[place], must)
            if picked and total + size > room:
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
            self._ahead = False  # whoever needs one of them is told; nobody else
            return
        self.loads += 1
        self.boxes_ahead += len(picked)
        window = _Window(loader, first, place)
        window.before = self._window
        self._window = window
        for number, (stored, bounds) in enumerate(picked):
            self._expected[stored.place, bounds] = (window, number)

    def _expect(
        self, stored: Stored, must: tuple[Stored, Bounds] | None
    ) -> tuple[list[tuple[Stored, Bounds]], int]:
        """Boxes that are expected of a tensor, and their bytes."""
        known = self._habits.get(stored.habit)
        if not known or (self._expects is not None and not self._expects(stored.name)):
            return [], 0
        # A copy, made at once: another load of the same model may learn meanwhile.
        boxes = [(stored, bounds) for bounds in list(known)
                 if (stored, bounds) != must and (stored.place, bounds) not in self._expected]
        return boxes, sum(stored.size_of(bounds) for _, bounds in boxes)

    def _drop(self, window: _Window | None) -> None:
        """Let go of what nobody has taken of a window; what is taken late is read alone."""
        while window is not None:
            for place, bounds in [key for key, (of, _) in self._expected.items() if of is window]:
                del self._expected[place, bounds]
                self._habits.get(self._order[place].habit, {}).pop(bounds, None)  # it is no habit
            self._end(window)
            window = window.before

    def _end(self, window: _Window) -> None:
        if window.is_dropped:
            return
        self._bytes_read += int(window.loader.stats()["bytes_read"])
        window.is_dropped = True  # first: who waits is woken by what follows
        window.loader.close()

    def _give_up(self, window: _Window) -> None:
        with self._lock:
            for key in [key for key, (of, _) in self._expected.items() if of is window]:
                del self._expected[key]

    def close(self) -> None:
        """Let go of what was read ahead; tensors handed out stay valid, and may still read."""
        with self._lock:
            self._ahead = False
            self._files.clear()
            self._expected.clear()
            self._kept = None
            window, self._window = self._window, None
            while window is not None:
                self._end(window)
                window = window.before


# Forked processes have the objects, but neither the threads of their loads nor the locks' holders.
_all: weakref.WeakSet[LazyReads] = weakref.WeakSet()


def _forget_all() -> None:
    for reads in list(_all):
        reads.forget()


os.register_at_fork(after_in_child=_forget_all)
