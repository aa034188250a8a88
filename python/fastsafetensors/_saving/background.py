# SPDX-License-Identifier: Apache-2.0
"""Work on threads that Ctrl-C cannot leave half started."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections.abc import Callable


class OneTimeEvent:
    """Something that happens once, and for which threads wait.

    threading.Event holds a lock while Python code runs, in which a signal handler that waits or
    sets would wait for ever. This class holds none.
    """

    def __init__(self) -> None:
        """It has not happened."""
        self._is_set = False
        self._waiters: list[_thread.LockType] = []  # held; set() releases them

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened."""
        self._is_set = True
        for waiter in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # another call has released it
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened. Returns whether it has; False after the time."""
        if self._is_set:
            return True
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            # set() finds the waiter in the list, or has set the flag before.
            if not self._is_set:
                waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_set


class Background:
    """Work that is done once, on another thread.

    threading.Thread.start() waits for the new thread. An exception of a signal handler in that wait
    may leave a lock held, and then the thread, and the interpreter's exit, wait for ever. start()
    of this class does not wait, and may be called again after such an exception.
    """

    def __init__(self, work: Callable[[], object], *, waits_at_exit: bool = True) -> None:
        """Keep the work, for which the interpreter's exit waits or not."""
        self._work, self._waits_at_exit = work, waits_at_exit
        self._once = threading.Lock()
        self._ended = OneTimeEvent()
        self.was_started = False
        self._has_begun = False

    def start(self) -> None:
        """Have the work done, unless a thread does it already."""
        self.was_started = True
        if self._has_begun:
            return
        if self._waits_at_exit:
            _awaited.add(self)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads
            self._run()

    def _run(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        self._has_begun = True
        try:
            self._work()
        finally:
            self._ended.set()
            _awaited.discard(self)

    def has_ended(self) -> bool:
        """Whether the work is done."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the work is done. Returns whether it is; False after the time."""
        self.start()
        return self._ended.wait(seconds)


_awaited: set[Background] = set()


def wait_at_exit() -> None:
    """Wait for all work that the interpreter's exit waits for."""
    for one in list(_awaited):
        one.wait()


os.register_at_fork(after_in_child=_awaited.clear)
