# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the ends of saves."""

from __future__ import annotations

from collections.abc import Callable

from .._saving.background import Background, OneTimeEvent
from .._saving.save_handles import SaveHandle


class Watcher(Background):
    """Waits for the end of a save, notes how it was, and does what follows."""

    def __init__(
        self, handle: SaveHandle, note: Callable[[], None], follow: Callable[[], None]
    ) -> None:
        """Keep the calls: `note` waits for the end, and `follow` is called after it."""
        super().__init__(self._watch, waits_at_exit=handle.at_exit == "wait")
        self.handle, self._note, self._follow = handle, note, follow
        self._noted = OneTimeEvent()

    def _watch(self) -> None:
        try:
            self._note()
        finally:
            self._noted.set()
        self._follow()

    def note_end(self) -> None:
        """Return when the end of the save is noted, if it has ended."""
        if self.handle.done():
            self.start()
            self._noted.wait()


class Watchers:
    """The watchers of the saves of a manager that have not ended.

    A signal handler that saves may call a method at any moment of another one. Each access is
    therefore one operation of a set, and no lock is held.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._all: set[Watcher] = set()
        self._handles: set[SaveHandle] = set()  # of saves that may still read tensors

    def add(self, watcher: Watcher) -> None:
        """Add a watcher, and start it; those of saves that have ended go."""
        self._handles.add(watcher.handle)
        self._all.add(watcher)
        watcher.start()
        self._handles.difference_update([one for one in list(self._handles) if one.done()])
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._all.difference_update([one for one in list(self._all) if one.has_ended()])

    def start(self, handle: SaveHandle) -> bool:
        """Start the watcher of a save whose start was interrupted; False: it has none."""
        found = [one for one in list(self._all) if one.handle is handle]
        for one in found:
            one.start()
        return bool(found)

    def before_step(self) -> None:
        """Wait until the tensors of all saves may change."""
        handles = list(self._handles)
        for handle in handles:
            handle.before_step()
        self._handles.difference_update(handles)

    def forget_handles(self) -> None:
        """Let go of the handles: no tensor is read any more."""
        self._handles.clear()

    def note_ends(self) -> None:
        """Return when the ends of all saves that have ended are noted."""
        for one in list(self._all):
            one.note_end()

    def wait(self) -> None:
        """Wait until all saves have ended, and what follows them is done."""
        for one in list(self._all):
            one.wait()
        self._forget_ended()
