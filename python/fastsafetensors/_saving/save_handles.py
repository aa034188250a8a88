# SPDX-License-Identifier: Apache-2.0
"""Handles of saves that run while the program goes on, and the memory that they share."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _core
from .._base import counters
from .._base.argument_types import Path
from .._base.closing import Closing
from .._base.errors import add_location, printable, serialization_error, shown
from .._base.log import follow_logging
from .._base.options import check_count, check_save_options, check_timeout, check_word, parse_size
from .._base.representation import shown_as, with_plain_hints
from .._core import log_drain
from .background import Background
from .running_saves import running

_STAGES = ("copy", "lazy", "none")
_OVERLAPS = ("order", "supersede")
_EXITS = ("wait", "cancel")
_BLOCK_BYTES = 32 << 20


@with_plain_hints
class SaveProgress(NamedTuple):
    """How far a save is."""

    bytes_written: int
    bytes_total: int
    state: str  # "staging", "writing", "done" or "failed"


def _staging_limit(memory: int | str | None) -> int:
    """Parse a limit of staging memory, of at least one block; 0 for None."""
    limit = 0 if memory is None else parse_size("memory", memory)
    if 0 < limit < _BLOCK_BYTES:
        raise ValueError(f"memory must be at least 32 MiB, not {shown(memory)}")
    return limit


class StagingPool(Closing):
    """Memory that saves copy tensors to, kept between saves.

    Saves of one pool are written one at a time, in the order of their calls.
    """

    def __init__(self, memory: int | str | None = None, ready: int | str | None = None) -> None:
        """Open a pool.

        Args:
            memory: the most that it holds, a number of bytes or "4GiB"; at least 32 MiB. None: what
                the largest save needs.
            ready: so much is allocated now, with its pages, rather than inside the first save.

        Raises:
            ValueError: an invalid size, such as 0, a limit below 32 MiB, or `ready` above it.
            MemoryError: more than the machine has.
            TypeError: an argument of another type.
        """
        self._limit = _staging_limit(memory)
        now = 0 if ready is None else parse_size("ready", ready)
        if 0 < self._limit < now:
            raise ValueError(f"ready is {now} bytes, more than memory, which is {self._limit}")
        self._core = _core.StagingPool(self._limit, now)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""
        return self._core.nbytes()

    def close(self) -> None:
        """Give the memory back, when the saves that use it have ended."""
        self._core.close()


# The pool of saves that name none, of this process. There is no lock, because a signal handler that
# saves would wait for it for ever: each access is one operation of the dictionary.
_shared: dict[int, StagingPool] = {}


def _shared_pool() -> StagingPool:
    process = os.getpid()
    pool = _shared.get(process)
    if pool is None:
        for parent in set(_shared) - {process}:  # of a fork
            _shared.pop(parent, None)
        pool = _shared.setdefault(process, StagingPool())
    return pool


def release_staging() -> None:
    """Free the staging memory that saves without a ``pool`` argument have kept."""
    pool = _shared.pop(os.getpid(), None)
    if pool is not None:
        pool.close()


@dataclass(frozen=True)
class Staging:
    """How an asynchronous save takes the state; the arguments of save_file_async()."""

    stage: str = "copy"
    memory: int | str | None = None
    pool: StagingPool | None = None
    overlap: str = "order"
    copy_threads: int = 0
    nice: int = 0
    at_exit: str = "wait"

    def __post_init__(self) -> None:
        """Check the values, and refuse those that would have no effect."""
        for name, words in (("stage", _STAGES), ("overlap", _OVERLAPS), ("at_exit", _EXITS)):
            check_word(name, getattr(self, name), words)
        if self.pool is not None and not isinstance(self.pool, StagingPool):
            raise TypeError(f"pool must be a StagingPool, not {shown(self.pool)}")
        check_count("copy_threads", self.copy_threads)
        check_count("nice", self.nice, high=19)
        limit = _staging_limit(self.memory)
        most = 0 if self.pool is None else self.pool._limit
        if 0 < most < limit:
            raise ValueError(f"memory is {limit} bytes, and the pool holds at most {most}")
        if self.stage != "none":
            return
        for name, unset in (("memory", None), ("copy_threads", 0)):
            if getattr(self, name) != unset:
                raise ValueError(f'{name} has no effect with stage="none", which copies nothing')

    def settings(self, hooks: Hooks) -> Any:
        """Return the settings of the C call."""
        memory = _staging_limit(self.memory)
        pool = self.pool or _shared_pool()
        return (self.stage, self.overlap, self.copy_threads, self.nice, memory, pool._core,
                hooks.is_unchanged, hooks.publish)


def was_cancelled(error: BaseException | None) -> bool:
    """Whether the error of a save says that it was cancelled."""
    # Other failures have a class of their own, and a path in the text.
    return type(error) is RuntimeError and str(error).startswith("cancelled")


class SaveHandle(ABC):
    """A save that runs while the program goes on."""

    at_exit = "wait"
    _was_reported = False  # the program or the log has the error
    _name: str  # the path
    _pid: int  # of the process that started it

    def __repr__(self) -> str:
        """Return path and state."""
        state = "of the parent process" if self._is_of_parent() else self.progress.state
        return f"<SaveHandle {printable(self._name)}: {state}>"

    def is_of(self, path: Path) -> bool:
        """Whether the save was started with this path."""
        return self._name == os.fsdecode(path)

    def _is_of_parent(self) -> bool:
        """Whether the save was started before a fork(): only the parent can wait for it."""
        return self._pid != os.getpid()

    # The save's errors are returned by these two. What else they raise, such as the exception of a
    # signal handler, is not the save's.

    @abstractmethod
    def _result(self, timeout: float | None) -> Exception | None:
        """Wait for the end; return the save's error. TimeoutError: it still runs."""

    @abstractmethod
    def _staging_result(self, timeout: float | None) -> Exception | None:
        """Wait until no tensor is read any more; return the save's error."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the files are in place.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: the save still runs.
            SafetensorError: it failed; the old files are there. An OSError of its kind as well.
            TypeError, ValueError: a timeout that is not a number of seconds.
        """
        error = self._result(timeout)
        if error is not None:
            raise error

    @abstractmethod
    def done(self) -> bool:
        """Whether the save has ended, well or not."""

    def is_started(self) -> bool:
        """Whether the save runs or has ended: Ctrl-C may end the call before it starts it."""
        return True

    def cancel(self) -> bool:
        """Cancel the save, and wait for its end, which comes soon.

        A save of several ranks is cancelled on all of them or on none; the call waits until they
        have agreed, which is when the last one has written its files.

        Returns:
            True: it was cancelled, now or before, and the old files are in place; wait() raises
            RuntimeError. False: it was too late; the save has failed, which is logged, and wait()
            raises; a store did not say whether it has stored the only file, which is such a
            failure. Also in a fork's child, which can't cancel saves of its parent.
        """
        if self._is_of_parent():
            return False
        self._stop()
        was_reported = self._was_reported
        error = self.exception()
        if error is not None and not was_reported and not was_cancelled(error):
            _log_error(error.__cause__ or error)
        return was_cancelled(error)

    @abstractmethod
    def _stop(self) -> None:
        """Cancel the save if it is not too late, without waiting."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until no tensor of the call is read any more; afterwards they may change.

        Raises:
            TimeoutError: tensors are still read.
            SafetensorError: the save has failed.
            TypeError, ValueError: a timeout that is not a number of seconds.
        """
        error = self._staging_result(timeout)
        if error is not None:
            raise error

    @property
    @abstractmethod
    def progress(self) -> SaveProgress:
        """How far it is."""

    @property
    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What it did: times in nanoseconds, sizes in bytes; complete when it has ended."""

    @abstractmethod
    def _end(self) -> None:
        """Wait for the end; an error that wait() has not raised is logged."""

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the end and return the save's error, or None.

        Raises:
            TimeoutError: the save still runs.
            TypeError, ValueError: a timeout that is not a number of seconds.
        """
        return self._result(timeout)

    def before_step(self, *_args: Any) -> None:
        """Wait until the tensors may change: for optimizer.register_step_pre_hook().

        An error of the save is not raised here: wait() raises it. What a signal handler raises is.
        """
        self._staging_result(None)

    def __enter__(self) -> SaveHandle:
        """Return the handle."""
        return self

    def __exit__(self, kind: Any, *_rest: object) -> None:
        """Wait for the end; after an exception, cancel first. A failure is then logged."""
        if kind is None:
            self.wait()
            return
        self.cancel()


def _milliseconds(timeout: float | None) -> int:
    seconds = check_timeout(timeout)
    return -1 if seconds is None else int(min(seconds * 1000 + 0.999, 2.0**62))


def _log_error(error: BaseException) -> None:
    import logging

    logging.getLogger("fastsafetensors").warning(
        "an asynchronous save failed, and its result was never requested: %s", printable(error))


@shown_as("SaveHandle")
class FileSave(SaveHandle):
    """A save by the C library's own threads."""

    changed: Sequence[str] = ()  # tensors that were changed, as far as known

    def __init__(self, core: _core.AsyncSave, path: Path, at_exit: str) -> None:
        """Keep a save that start_rows() starts afterwards."""
        self._core = core
        self._name, self._pid = os.fsdecode(path), os.getpid()
        self._is_counted = self._is_withdrawn = False
        self.at_exit = at_exit
        running.add(self)

    def _result(self, timeout: float | None) -> Exception | None:
        """Wait for the end; return the save's error."""
        try:
            ended = self._core.wait(_milliseconds(timeout))
        finally:
            log_drain()
        if ended is False:
            raise TimeoutError(f"{printable(self._name)}: the save is not done yet")
        if ended is not True:
            self._was_reported = True
            return self._shown_error(ended)
        if counters.is_on and not self._is_counted:
            counters.add_save(self._core.writer_stats())
            self._is_counted = True
        return None

    def done(self) -> bool:
        """Whether the save has ended."""
        if not self.is_started():
            return self._is_withdrawn
        return self._core.stats()["state"] in ("done", "failed")

    def is_started(self) -> bool:
        """Whether the C library has the save."""
        return self._core.is_started()

    def withdraw(self) -> None:
        """Note that the start has failed."""
        self._is_withdrawn = True

    def _stop(self) -> None:
        """Cancel the save if it is not too late, without waiting."""
        if self.is_started():
            self._core.cancel()

    def _interrupt(self) -> None:
        """Cancel the save, because its call is interrupted."""
        self._stop()
        self.exception()

    def _staging_result(self, timeout: float | None) -> Exception | None:
        """Wait until no tensor is read any more; return the save's error."""
        staged = self._core.stage(_milliseconds(timeout))
        if staged is False:
            raise TimeoutError(f"{printable(self._name)}: the tensors are not staged yet")
        if staged is True:
            return None
        self.done()  # lets go of the tensors of a save that has ended
        return self._shown_error(staged)

    def _shown_error(self, error: Exception) -> Exception:
        """Return an error of the system as a SafetensorError as well, and name a changed tensor."""
        if isinstance(error, OSError):
            shown: Exception = serialization_error(error)
            shown.__cause__ = error
            return shown
        if self.changed and getattr(error, "tag", None) == "FileChanged":
            add_location(error, self.changed[0])
        return error

    @property
    def progress(self) -> SaveProgress:
        """How far it is."""
        stats = self._core.stats()
        return SaveProgress(stats["bytes_written"], stats["bytes_total"], stats["state"])

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of staging; when the save has ended, of its writer as "writer" as well."""
        stats = self._core.stats()
        if stats["state"] in ("done", "failed"):
            stats["writer"] = self._core.writer_stats()
        return stats

    def _end(self) -> None:
        """Wait for the end at the interpreter's exit, and log an error that wait() has not raised.

        The handle stays open, because a daemon thread may be in a call of it.
        """
        while self.is_started() and not self.done():
            time.sleep(0.005)
        was_reported = self._was_reported
        error = self._result(0) if self.is_started() else None
        if error is not None and not was_reported and not was_cancelled(error):
            _log_error(error.__cause__ or error)


@shown_as("SaveHandle")
class ThreadSave(SaveHandle):
    """A save whose tensors are copied, and that a thread of Python's does."""

    _error: BaseException | None = None  # also of an object whose __init__() Ctrl-C has ended

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        """Start the work. The interpreter waits for its thread at exit."""
        self._name, self._pid = name, os.getpid()
        self.result: Any = None
        self._work = work
        self._thread = Background(self._run)
        running.add(self)
        self._thread.start()
        running.note_start(self)

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and the copies with it

    def _result(self, timeout: float | None) -> Exception | None:
        """Wait for the end; return the work's error. One that is no Exception is raised."""
        seconds = check_timeout(timeout)
        self._check_process()
        if not self._thread.wait(
                None if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"{printable(self._name)}: the save is not done yet")
        self._was_reported = True
        if self._error is None or isinstance(self._error, Exception):
            return self._error
        raise self._error

    def done(self) -> bool:
        """Whether the save has ended."""
        self._check_process()
        return self._thread.has_ended()

    def is_started(self) -> bool:
        """Whether a thread does the work: Ctrl-C may end the call before."""
        return self._thread.was_started

    def _check_process(self) -> None:
        # In a fork's child the thread looks as if it had ended.
        if self._is_of_parent():
            raise RuntimeError("the save was started before fork(): it belongs to the parent")

    def _stop(self) -> None:
        """Do nothing: the work can't be cancelled."""

    def _staging_result(self, timeout: float | None) -> None:
        """Check the timeout: the tensors were copied in the call."""
        check_timeout(timeout)

    def forget_error(self) -> None:
        """The error is reported elsewhere: it is not logged."""
        self._was_reported = True

    def _end(self) -> None:
        """Wait for the end; an error that wait() has not raised is logged."""
        if self.is_started():
            self._thread.wait()
        self._log_unreported()

    def __del__(self) -> None:
        """Log an error that wait() has not raised."""
        self._log_unreported()

    def _log_unreported(self) -> None:
        if self._error is not None and not self._was_reported:
            _log_error(self._error)
            self._was_reported = True

    @property
    def progress(self) -> SaveProgress:
        """The state; bytes are not counted."""
        state = "failed" if self._error is not None else "done" if self.done() else "writing"
        return SaveProgress(0, 0, state)

    @property
    def stats(self) -> dict[str, Any]:
        """Return the state."""
        return {"state": self.progress.state}


class Hooks(NamedTuple):
    """What a save calls."""

    # Whether the tensors are what they were at the call; None: they are copied before it returns.
    is_unchanged: Callable[[], bool] | None = None
    # Called by the writing thread instead of putting the files in place, with their temporary
    # paths, or with None and the error. Returns None if they are in place then, else why not.
    publish: Callable[[list[str] | None, Exception | None], str | None] | None = None
    make_handle: Callable[[_core.AsyncSave, Path, str], FileSave] = FileSave


def start_rows(
    path: Path,
    rows: list[Any],
    metadata: dict[str, str] | None,
    staging: Staging,
    hooks: Hooks | None = None,
    **options: Any,
) -> FileSave:
    """Start a save of rows; return its handle when the tensors are staged as asked."""
    options, hooks = check_save_options(options), hooks or Hooks()
    follow_logging()
    # The handle is there before the save, so that Ctrl-C at any moment finds what it cancels.
    handle = hooks.make_handle(_core.AsyncSave(), path, staging.at_exit)
    handle.changed = getattr(hooks.is_unchanged, "changed", ())
    try:
        log_drain()  # failures of saves whose handles the program has dropped
        handle._core.start(staging.settings(hooks), path, rows, metadata, **options)
        # While the interpreter ends, is_unchanged() cannot be called later.
        if staging.stage == "copy" or running.is_over:
            handle.before_step()  # an error is the handle's
    except BaseException as error:
        if not handle.is_started():
            handle.withdraw()
            if isinstance(error, OSError) and error.errno is not None:  # not a signal handler's
                raise serialization_error(error) from error
            raise
        handle._interrupt()  # a signal handler has raised it
        raise
    running.note_start(handle)
    return handle
