# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the ends of saves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .._saving.save_handles import SaveHandle


class Watcher(threading.Thread):
    """Waits for the end of a save, notes how it was, and does what follows a good end."""

    def __init__(
        self, handle: SaveHandle, note: Callable[[], int | None], follow: Callable[[int], None]
    ) -> None:
        """Keep the calls: `note` waits, and returns what `follow` is given, or None."""
        # The interpreter's exit joins threads that are no daemons before it cancels saves.
        super().__init__(name="fastsafetensors checkpoints", daemon=handle.at_exit == "cancel")
        self.handle, self._note, self._follow = handle, note, follow
        self._noted = threading.Event()
        # Can be waited for again after Ctrl-C, unlike by join().
        self.ended = threading.Event()

    def run(self) -> None:
        """Do it."""
        try:
            try:
                found = self._note()
            finally:
                self._noted.set()
            if found is not None:
                self._follow(found)
        finally:
            self.ended.set()

    def note_end(self) -> None:
        """Return when the end of the save is noted, if it has ended."""
        if self.handle.done():
            self._noted.wait()
