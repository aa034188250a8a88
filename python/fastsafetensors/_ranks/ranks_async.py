# SPDX-License-Identifier: Apache-2.0
"""Saves a model of several ranks while the program goes on: all ranks publish it, or none.

    from fastsafetensors.distributed import save_on_ranks_async

    handle = save_on_ranks_async(my_tensors, "folder", side_group)
    ...                       # tensors may change
    handle.wait()

Each rank writes its files under temporary names, like every asynchronous save. When they are
complete, or something went wrong, the writing thread asks the other ranks. If all have written,
rank 0 publishes the files as one set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from .._base.argument_types import Path as AnyPath
from .._base.errors import serialization_error
from .._base.representation import shown_as
from .._core import error_class
from .._saving.background import OneTimeEvent
from .._saving.save_handles import (
    FileSave,
    Hooks,
    SaveHandle,
    Staging,
    StagingPool,
    ThreadSave,
    start_rows,
    was_cancelled,
)
from .._saving.save_options import WITH_WHOLE_BLOCKS, promise_word
from .._torch.tensor_memory import watch_changes
from .._torch.torch_state import check_tensors, make_rows
from .agreement import Agreement, RankError
from .publish import SetTarget, publish_hidden
from .ranks_save import check_unique, make_request, missing_count, remove_folders
from .shard_rows import stem_of
from .torch_group import open_group

__all__ = ["save_on_ranks_async"]

_WRITTEN, _FAILED, _CANCELLED = 0, 1, 2


class _State(NamedTuple):
    """What a rank says at the end of writing."""

    state: int
    missing: int  # folders that it has found missing
    has_interrupted: bool  # whether Ctrl-C has interrupted calls of saves that others may be in
    number: int  # the step, or else the number of the call
    is_step: bool


_STATE = struct.Struct("<BB?q?")
_STEP_MAX = 2**63 - 1
_FOLDERS_MAX = 255  # of a count in a byte

_LOOK_SECONDS = 1.0  # how often a save that waits looks whether those before it still exist


class _GroupSaves:
    """The saves of a group that this rank has called.

    Each access is one operation of a list, a dictionary or a counter, without a lock, because a
    signal handler may save between any two.
    """

    def __init__(self) -> None:
        """No save was called."""
        # Those that have not ended, in the order of their calls: one uses the group when those
        # before it have ended. The references are weak: a save whose call was interrupted, and
        # that nothing will end, blocks no other.
        self.queue: list[weakref.ref[JointSave]] = []
        self.numbers = itertools.count()
        self.ahead = 0  # by how many calls other ranks are ahead
        # Set while a failed save removes its folders: a new call waits, to find them or not.
        self.removal: OneTimeEvent | None = None
        # Steps that other ranks have saved in vain while this one was at an earlier step.
        self.passed_steps = range(0)
        # Calls that Ctrl-C has ended here, and that another rank may have made: {number: folder}.
        self.interrupted: dict[int, str] = {}

    def forget_interrupted(self, before: int) -> None:
        """Forget the calls before this number: all ranks have come to it."""
        for number in list(self.interrupted):
            if number < before:
                self.interrupted.pop(number, None)


_saves: weakref.WeakKeyDictionary[Any, _GroupSaves] = weakref.WeakKeyDictionary()


def _saves_of(group: Any) -> _GroupSaves:
    with contextlib.suppress(TypeError):
        return _saves.setdefault(group, _GroupSaves())
    return _GroupSaves()  # no group, or another object, which is an error in publish()


def forget_steps(group: Any) -> None:
    """Accept earlier steps again: the ranks have resumed."""
    _saves_of(group).passed_steps = range(0)


def wait_for_saves(group: Any, before: weakref.ref[JointSave] | None = None) -> None:
    """Wait until no save uses a group, or none that was called before another one."""
    queue = _saves_of(group).queue
    for one in list(queue):
        if one is before:
            return
        joint = one()
        while joint is not None and not joint.end.wait(_LOOK_SECONDS):
            joint = None  # if this was the last reference, the save was abandoned
            joint = one()
        if joint is None:
            with contextlib.suppress(ValueError):
                queue.remove(one)


class Rows(NamedTuple):
    """Tensors in the form that the library saves."""

    rows: list[Any]
    metadata: dict[str, str]
    options: dict[str, Any]  # of the library: files, owners
    is_unchanged: Callable[[], bool] | None = None


@dataclass(eq=False)
class JointSave:
    """The part of a save in which the ranks take part together.

    The ranks use the group in the order of their calls. A caller of enter() calls leave() after any
    exception, also KeyboardInterrupt.
    """

    group: Any
    timeout: float | None = None
    # Where the files go; None: an argument is invalid, and the save will fail.
    place: SetTarget | None = None
    lines: list[str] = field(default_factory=list)  # on which all ranks must agree
    names: list[list[Any]] = field(default_factory=list)  # [name, bytes] of this rank's tensors
    is_cancelled: bool = False
    error: Exception | None = None
    result: str | None = None  # the path of the index, or of the only file

    def __post_init__(self) -> None:
        """Enter no queue yet."""
        # It calls publish() if it was started, and keeps this object until then. Not kept longer:
        # the error of a save whose handle is dropped is logged when its core is freed.
        self.core: _core.AsyncSave | None = None
        self._was_started = False
        # Taken once: by publish(), or by leave() of a call that was interrupted.
        self._use = threading.Lock()
        self._missing = 0  # folders to make, by what this rank or another has found
        self._missing_here = 0
        self.end = OneTimeEvent()
        self._place_in_queue: weakref.ref[JointSave] = weakref.ref(self)
        self._step: int | None = None
        # The number of the call among those of the group, once it is taken. A list, because
        # extend() is one step, which Ctrl-C can't separate.
        self._taken: list[int] = []

    def set_target(self, place: SetTarget, lines: list[str], timeout: float | None,
                   step: int | None = None) -> None:
        """Say where the files go, and look which folders this save makes.

        step: ranks that come to different steps fail, and those of the earlier one catch up.
        """
        self._step, self.lines, self.timeout = step, lines, timeout
        # Set before the look at `removal`: a thread that removes folders from now on keeps this one
        # (see _unused_folders()), and one that has begun before is waited for.
        self.place = place
        removal = _saves_of(self.group).removal
        if removal is not None:
            removal.wait()
        self._missing = self._missing_here = min(missing_count(Path(place.folder)), _FOLDERS_MAX)

    @property
    def is_started(self) -> bool:
        """Whether a thread of the library will call publish()."""
        core = self.core
        return self._was_started or (core is not None and core.is_started())

    def enter(self) -> None:
        """Enter the queue behind the saves of earlier calls, once."""
        if not self._taken:
            saves = _saves_of(self.group)
            self._take_number(saves)
            saves.queue.append(self._place_in_queue)

    def _take_number(self, saves: _GroupSaves) -> None:
        """Take a number and keep it."""
        self._taken.extend(itertools.islice(saves.numbers, 1))

    def leave(self) -> None:
        """Take no part, because Ctrl-C has ended the call. A save that is started was cancelled.

        The others hear of it in this rank's next save, or fail at their time limit.
        """
        if not self.is_started and self._use.acquire(blocking=False):
            saves = _saves_of(self.group)
            if not self._taken:
                self._take_number(saves)
            if self._step is None:
                saves.interrupted[self._taken[0]] = self._folder_name()
            self._give_up_place()

    def _folder_name(self) -> str:
        # Hosts may mount the file system at different places.
        return "" if self.place is None else Path(self.place.folder).name

    def _give_up_place(self) -> None:
        self.end.set()
        with contextlib.suppress(ValueError):  # it has not entered
            _saves_of(self.group).queue.remove(self._place_in_queue)

    def publish(self, paths: list[str] | None, error: Exception | None) -> str | None:
        """Publish the files of all ranks. Called once by a thread of the library, on every rank.

        paths: temporary paths of this rank's files; None: its part has failed with `error`.
        Returns None, or why nothing was published. Then self.error is set.
        """
        self._was_started = True
        return self._take_part(paths, error)

    def _take_part(self, paths: list[str] | None, error: Exception | None) -> str | None:
        if not self._use.acquire(blocking=False):
            self._delete(paths or [])
            self.error = self.error or RuntimeError("cancelled")
            return "cancelled"
        try:
            self.enter()
            wait_for_saves(self.group, self._place_in_queue)
            self.result = self._publish(paths or [], _as_ours(error))
            return None
        except Exception as failure:
            self.error = _as_ours(failure)
            return str(failure) or type(failure).__name__
        finally:
            self.core = None
            self._give_up_place()

    def fail(self, error: Exception | None) -> None:
        """Take part without files; raise what went wrong on any rank."""
        self._take_part([] if error is None else None, error)
        if self.error is not None:
            raise self.error

    def refuse(self, error: Exception) -> None:
        """Let the save fail on all ranks, and wait until they have heard of it.

        The thread takes part also if Ctrl-C ends the wait.
        """
        handle = EmptySave(self, "", error)
        handle.forget_error()
        handle.exception()

    def _publish(self, paths: list[str], error: Exception | None) -> str:
        pg = open_group(self.group, self.timeout)
        pg.limit_waits()
        agreement = Agreement(pg)
        state = _FAILED if error is not None else _WRITTEN
        if self.is_cancelled or was_cancelled(error):
            state = _CANCELLED
        try:
            # If another rank is in a different call, both get a RankError, and no messages follow.
            states = self._exchange_states(pg, agreement, state)
        except Exception:
            self._delete(paths)
            with self._keep_calls_waiting():
                self._remove_folders(min(self._missing_here, self._unused_folders()))
            raise
        try:
            if _CANCELLED in states:
                rank = states.index(_CANCELLED)
                raise RuntimeError("cancelled" if state == _CANCELLED
                                   else f"cancelled by rank {rank}")
            agreement.agree("a sharded save", self.lines, error)
            texts = pg.exchange_texts(json.dumps([self.names, len(paths)]), "the names")
            every = [json.loads(text) for text in texts]
            check_unique([rows for rows, _ in every])  # the same error on all ranks
        except Exception:
            self._withdraw(pg, paths)
            raise
        assert self.place is not None
        first = sum(count for _, count in every[: pg.rank()])
        hidden = {first + at: os.path.basename(path) for at, path in enumerate(paths)}
        publish_hidden(pg, agreement, hidden, self.place)
        is_single = sum(count for _, count in every) == 1
        name = f"{self.place.stem}.safetensors"
        return os.path.join(self.place.folder, name if is_single else f"{name}.index.json")

    def _withdraw(self, pg: Any, paths: list[str]) -> None:
        """Delete the files of all ranks before any is published, and the folders made for them.

        No rank goes on until all have: it may use the folders in its next save. Every rank deletes,
        because the folders differ if the save failed for that reason. Folders that a later save of
        some rank writes to already are kept.
        """
        self._delete(paths)
        with self._keep_calls_waiting():
            unused = self._meet(pg, self._unused_folders())
            if unused == 0:
                return
            is_first = pg.rank() == 0 or pg.has_lost_ranks
            self._remove_folders(min(self._missing if is_first else self._missing_here, unused))
            self._meet(pg)

    @contextlib.contextmanager
    def _keep_calls_waiting(self) -> Iterator[None]:
        """Context in which folders are removed: calls of new saves wait until it ends."""
        saves = _saves_of(self.group)
        removal = saves.removal = OneTimeEvent()
        try:
            yield
        finally:
            saves.removal = None
            removal.set()

    def _remove_folders(self, count: int) -> None:
        if self.place is not None:
            remove_folders(Path(self.place.folder), count)

    @staticmethod
    def _delete(paths: list[str]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _unused_folders(self) -> int:
        """Count the folders, from the innermost one, that no other save of this rank writes to.

        A save without a place has made none yet, and will wait until the folders are removed.
        """
        if self.place is None:
            return _FOLDERS_MAX
        folder = Path(self.place.folder)
        others = [one() for one in list(_saves_of(self.group).queue)]
        used = [Path(one.place.folder) for one in others
                if one is not None and one is not self and one.place is not None]
        for count, mine in enumerate((folder, *folder.parents)[:_FOLDERS_MAX]):
            if any(other.is_relative_to(mine) for other in used):
                return count
        return _FOLDERS_MAX

    def _meet(self, pg: Any, number: int = 0) -> int:
        """Wait for the other ranks, if none is lost. Return the lowest number of those met."""
        if pg.size() > 1 and not pg.has_lost_ranks:
            with contextlib.suppress(RankError):
                messages = pg.exchange(bytes([number]), "the end of the save")
                return int(min(message[0] for message in messages))
        return number

    def _exchange_states(self, pg: Any, agreement: Agreement, state: int) -> list[int]:
        """Wait until all ranks have come to the end of writing this save; return their states.

        Raises:
            RankError: another rank's call of this save was interrupted.
        """
        if pg.size() == 1:
            return [state]
        saves = _saves_of(self.group)
        if self._step is not None and self._step in saves.passed_steps:
            raise RankError(
                f"ranks differ: another one has gone on to step {saves.passed_steps.stop - 1}")
        saves.passed_steps = range(0)
        while True:
            agreement.agree("the end of writing a save")
            every = [_State(*_STATE.unpack(message)) for message in
                     pg.exchange(_STATE.pack(*self._own_state(state, saves)), "the end of writing")]
            late = self._late_ranks(pg, saves, every)
            if pg.rank() in late:
                raise RankError(late[pg.rank()])
            if not late:
                break
        if not any(one.is_step for one in every):
            saves.ahead += max(one.number for one in every) - every[pg.rank()].number
        saves.forget_interrupted(self._taken[0])
        # Other ranks may have made folders before this one looked, so what one of them has found
        # missing was made by this save. (save_on_ranks() looks on all ranks before any makes one.)
        self._missing = max(one.missing for one in every)
        return [one.state for one in every]

    def _own_state(self, state: int, saves: _GroupSaves) -> _State:
        number = self._taken[0] + saves.ahead if self._step is None else min(self._step, _STEP_MAX)
        return _State(state, self._missing, bool(saves.interrupted), number,
                      self._step is not None)

    def _late_ranks(self, pg: Any, saves: _GroupSaves, every: list[_State]) -> dict[int, str]:
        """Return {rank: why its save fails}, because another rank is not in the same call.

        The other ranks wait for the next save of these.
        """
        if all(one.is_step for one in every):
            return self._differing_steps(saves, [one.number for one in every])
        if any(one.is_step for one in every) or not any(one.has_interrupted for one in every):
            return {}
        interrupted = [[number + saves.ahead, name]
                       for number, name in list(saves.interrupted.items())]
        texts = pg.exchange_texts(json.dumps([self._folder_name(), interrupted]),
                                  "interrupted saves")
        said = [json.loads(text) for text in texts]
        return {rank: f"Ctrl-C has interrupted the call of this save on rank {other}"
                for rank, (one, (folder, _)) in enumerate(zip(every, said, strict=True))
                for other, (_, calls) in enumerate(said)
                # The folder of a call that ended early is not known.
                if any(number == one.number and (name == folder or "" in (name, folder))
                       for number, name in calls)}

    def _differing_steps(self, saves: _GroupSaves, steps: list[int]) -> dict[int, str]:
        """The saves of all ranks fail if their steps differ."""
        first, last = min(steps), max(steps)
        if first == last:
            return {}
        if self._step is not None:
            saves.passed_steps = range(self._step + 1, last + 1)
        why = (f"ranks differ: rank {steps.index(first)} is at step {first}, "
               f"rank {steps.index(last)} at step {last}")
        return dict.fromkeys(range(len(steps)), why)


@shown_as("SaveHandle")
class RanksSave(FileSave):
    """This rank's part of a save of several ranks."""

    def __init__(self, core: _core.AsyncSave, path: AnyPath, at_exit: str, joint: JointSave
                 ) -> None:
        """Keep a save that start_rows() starts afterwards."""
        self._joint = joint
        super().__init__(core, path, at_exit)

    @property
    def result(self) -> str | None:
        """The absolute path of the index, or of the only file; None until the save has ended."""
        return self._joint.result

    def _result(self, timeout: float | None) -> Exception | None:
        """Wait until the files of all ranks are in place; return the save's error."""
        error = super()._result(timeout)
        return error if error is None else self._joint.error or error

    def _stop(self) -> None:
        """Cancel the save on all ranks, unless they have agreed to publish it."""
        self._joint.is_cancelled = True
        super()._stop()

    def _interrupt(self) -> None:
        """Cancel the save, and do not wait for the other ranks."""
        self._stop()


@shown_as("SaveHandle")
class EmptySave(ThreadSave):
    """The part of a rank that has nothing to write, or that has failed before it wrote."""

    def __init__(self, joint: JointSave, name: str, error: Exception | None = None) -> None:
        """Start to wait for the other ranks."""
        self._joint = joint

        def work() -> str | None:
            joint.fail(error)
            return joint.result

        try:
            joint.enter()
            super().__init__(work, name)
        except BaseException:
            joint.leave()
            raise

    def _stop(self) -> None:
        """Cancel the save on all ranks, unless they have agreed to publish it."""
        self._joint.is_cancelled = True


def _as_ours(error: Exception | None) -> Any:
    """Return the error of a system call as a SafetensorError as well."""
    if isinstance(error, OSError) and not isinstance(error, error_class()):
        return serialization_error(error)
    return error


def start_joint(joint: JointSave, data: Rows, staging: Staging) -> SaveHandle:
    """Start this rank's part of a save, which has entered; joint.place is set.

    An error of the start is the handle's, because the other ranks must learn of it.
    """
    def make_handle(core: _core.AsyncSave, path: AnyPath, at_exit: str) -> RanksSave:
        joint.core = core
        return RanksSave(core, path, at_exit, joint)

    assert joint.place is not None
    joint.names = [[row[0], row[4]] for row in data.rows]
    try:
        return start_rows(joint.place.folder, data.rows, data.metadata, staging,
                          Hooks(data.is_unchanged, joint.publish, make_handle),
                          promise=promise_word(joint.place.durable), **data.options)
    except Exception as error:
        if joint.is_started:  # a signal handler has raised it
            raise
        return EmptySave(joint, joint.place.folder, error)


def save_on_ranks_async(
    tensors: dict[str, Any],
    folder: str | os.PathLike[str],
    group: Any = None,
    metadata: dict[str, str] | None = None,
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    stage: str = "copy",
    memory: int | str | None = None,
    pool: StagingPool | None = None,
    copy_threads: int = 0,
    nice: int = 0,
    durable: bool = False,
    manifest: bool | AnyPath = False,
    overlap: str = "order",
    at_exit: str = "wait",
    timeout: float | None = None,
) -> SaveHandle:
    """Start save_on_ranks(), and return while threads of the library write.

    The files have the state at the call. A rank that fails, is cancelled or dies fails the save on
    all ranks, at wait().

    Args:
        tensors: {name: tensor} of this rank.
        folder: is made if it is not there. A relative path is resolved in the call.
        group: a torch.distributed group with a CPU backend (gloo) that nothing else uses while the
            save runs: threads exchange messages over it. None: alone.
        metadata: of every file; without it, {"format": "pt"}.
        filename_pattern: as in save_on_ranks.
        stage: as in fastsafetensors.torch.save_file_async, like the next parameters.
        memory: the most staging memory of this rank.
        pool: a StagingPool that provides the memory.
        copy_threads: threads that copy.
        nice: lowers the priority of the writing threads.
        durable: files and folder are on the device when the save has ended.
        manifest: as in save_file, of the set.
        overlap: "order" or "supersede". A save that is superseded on one rank is on all.
        at_exit: "wait" or "cancel".
        timeout: as in save_on_ranks.

    Returns:
        The handle. ``result`` is the absolute path of the index, or of the one file.

    Raises:
        NotImplementedError: a URL.
        KeyboardInterrupt: Ctrl-C; the save is cancelled. The call counts as this rank's: the saves
            of the other ranks fail when this rank comes to its next save, or at their time limit,
            after which a new group is needed. A call that is repeated on this rank alone is joined
            with the next one of the others.
        TypeError, ValueError: an argument of another type, or out of range. The call waits for the
            other ranks, whose saves then fail as well.
    """
    joint: JointSave | None = None
    try:
        joint = JointSave(group)
        joint.enter()
        try:
            request = make_request(folder, metadata, durable, manifest, timeout)
            staging = Staging(stage, memory, pool, overlap, copy_threads, nice, at_exit)
            place = SetTarget(str(request.folder), stem_of(filename_pattern), durable,
                              manifest=request.fixed_manifest)
            joint.set_target(place, [f"metadata {metadata}", f"manifest {request.manifest}",
                                     f"names {place.stem}", f"durable {place.durable}"],
                             request.timeout)
        except Exception as error:
            joint.refuse(error)  # the other ranks wait to hear of it
            raise
        try:
            check_tensors(tensors, metadata)
            is_unchanged = None if stage == "copy" else watch_changes(tensors)
            rows, owners = make_rows(tensors, on_device=True)
        except Exception as error:
            return EmptySave(joint, place.folder, error)
        data = Rows(rows, {"format": "pt"} if metadata is None else metadata,
                    {"file_of": [0] * len(rows), "file_count": 1, "stem": place.stem,
                     "owners": owners, **WITH_WHOLE_BLOCKS}, is_unchanged)
        return start_joint(joint, data, staging)
    except BaseException:
        (joint or JointSave(group)).leave()  # nothing if the other ranks have heard of the error
        raise
