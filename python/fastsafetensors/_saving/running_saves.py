# SPDX-License-Identifier: Apache-2.0
"""The saves of this process that have not ended, and its exit, which waits for them."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._core import log_drain
from .background import wait_at_exit

if TYPE_CHECKING:
    from .save_handles import SaveHandle


class _Running:
    """Saves that have not ended: their handles live, and the interpreter's exit ends them.

    There is no lock, because a signal handler that saves would wait for it for ever: each access is
    one operation of the set.
    """

    def __init__(self) -> None:
        self._handles: set[SaveHandle] = set()
        # Saves that have failed. The exit logs the errors of those whose handles the program keeps.
        self._failed: list[weakref.ref[SaveHandle]] = []
        self._of_thread = threading.local()
        self._is_watching = False
        self.is_over = False  # the interpreter's exit no longer waits for a save

    def add(self, handle: SaveHandle) -> None:
        """Add a save that is about to start; those that have ended go.

        Raises:
            RuntimeError: the interpreter ends, and no other thread can go on.
        """
        if sys.is_finalizing():
            raise RuntimeError("the interpreter ends: no asynchronous save can begin any more")
        begun = getattr(self._of_thread, "begun", None)
        if begun is not None:
            begun.append(handle)
        self._handles.add(handle)
        self._watch_child()
        ended = [other for other in list(self._handles) if other is not handle and other.done()]
        self._handles.difference_update(ended)
        failed = [weakref.ref(other) for other in ended
                  if other.is_started() and other.progress.state == "failed"]
        if failed:
            self._failed = [one for one in self._failed if one() is not None] + failed

    @contextlib.contextmanager
    def begun(self) -> Iterator[collections.deque[SaveHandle]]:
        """The saves that this thread adds in the context.

        A caller that Ctrl-C has interrupted finds in it the save that it has started. If a signal
        handler enters the context once more, its saves are not among them.
        """
        outer = getattr(self._of_thread, "begun", None)
        # Limited, because an exception of a handler may skip the reset below.
        handles: collections.deque[SaveHandle] = collections.deque(maxlen=256)
        self._of_thread.begun = handles
        try:
            yield handles
        finally:
            self._of_thread.begun = outer

    def note_start(self, handle: SaveHandle) -> None:
        """Wait for the end of a new save, and log its error, if the exit would not.

        The exit has waited for the saves that it found. Later ones are those of atexit handlers
        that were registered earlier, and of threads: the interpreter does not wait for daemon ones,
        and a process of multiprocessing waits for its threads only after end_in_child().
        """
        if self.is_over or _is_exiting():
            handle._end()

    def _watch_child(self) -> None:
        """End the saves of a forked process of multiprocessing: it calls no atexit handler."""
        if self._is_watching or not _is_child():
            return
        from multiprocessing.util import Finalize

        self._is_watching = True
        Finalize(None, self.end_in_child, exitpriority=0)

    def forget(self) -> None:
        """In a fork's child: they are the parent's."""
        self._handles, self._failed = set(), []
        self._is_watching = self.is_over = False

    def end_in_child(self) -> None:
        """At the end of a process of multiprocessing: its threads may still use their handles."""
        self.is_over = True
        try:
            wait_at_exit()
        finally:
            handles = list(self._handles)
            for handle in handles:
                if handle.at_exit == "cancel":
                    handle._stop()
            for handle in handles:
                _await(handle)

    def end(self) -> None:
        """At the interpreter's exit, when only daemon threads run, which may use their handles."""
        self.is_over = True
        handles, self._handles = self._handles, set()
        for handle in handles:
            if handle.at_exit == "cancel":
                handle._stop()
        kept = [failed() for failed in self._failed]
        for handle in (*handles, *filter(None, kept)):
            handle._end()
        log_drain()


running = _Running()


def _is_child() -> bool:
    """Whether multiprocessing has made this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_exiting() -> bool:
    """Whether a process of multiprocessing has come to its end."""
    if not _is_child():
        return False
    from multiprocessing.util import is_exiting

    return bool(is_exiting())


def _await(handle: SaveHandle) -> None:
    while handle.is_started() and not handle.done():
        time.sleep(0.005)


atexit.register(running.end)
atexit.register(wait_at_exit)  # is called first
os.register_at_fork(after_in_child=running.forget)
# Imported by a handler of the exit: no handler that is registered now is called.
running.is_over = (threading.current_thread() is threading.main_thread()
                   and not threading.main_thread().is_alive())
