# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the ends of saves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .._saving.background import Background
from .._saving.save_handles import SaveHandle


class Watcher(Background):
    """Waits for the end of a save, notes how it was, and does what follows a good end."""

    def __init__(
        self, handle: SaveHandle, note: Callable[[], int | None], follow: Callable[[int], None]
    ) -> None:
        """Keep the calls: `note` waits, and returns what `follow` is given, or None."""
        super().__init__(self._watch, handle.at_exit)
        self.handle, self._note, self._follow = handle, note, follow
        self._noted = threading.Event()

    def _watch(self) -> None:
        try:
            found = self._note()
        finally:
            self._noted.set()
        if found is not None:
            self._follow(found)

    def note_end(self) -> None:
        """Return when the end of the save is noted, if it has ended."""
        if self.handle.done():
            self.start()
            self._noted.wait()
