# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: saved in the background, pruned, found again.

    from fastsafetensors.training import CheckpointManager

    with CheckpointManager("checkpoints", every=100, keep_last=3) as manager:
        start = manager.resume({"model": model, "optimizer": optimizer, "rng": RNG})
        for step in range(start, steps):
            ...
            manager.save(step + 1, {"model": model, "optimizer": optimizer, "rng": RNG})

A checkpoint is a folder ``step-N`` with one set of safetensors files that holds everything, put in
place in one step when it is complete.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ._base.errors import append_text, printable
from ._base.options import check_switch
from ._base.paths import absolute_path
from ._checkpoints.checkpoint_folders import (
    LISTINGS,
    STEM,
    Checkpoint,
    Meaning,
    by_metric,
    clean_up,
    deleted_too_fast,
    find_newest,
    make_folder,
    meaning_of,
    read_all,
    read_checkpoint,
    verify_checkpoint,
)
from ._checkpoints.checkpoint_ranks import Ranks, start_alone
from ._checkpoints.manager_options import check_manager_options
from ._checkpoints.old_checkpoints import OldCheckpoints
from ._checkpoints.state_codec import encode_state
from ._checkpoints.trainer import make_trainer_callback
from ._checkpoints.training_state import (
    RNG,
    check_loaded,
    check_state,
    check_targets,
    load_into,
    metadata_of,
    states_of,
    step_number,
)
from ._checkpoints.watcher import Watcher, Watchers
from ._saving.running_saves import running
from ._saving.save_handles import SaveHandle, StagingPool, was_cancelled

__all__ = ["RNG", "Checkpoint", "CheckpointManager", "trainer_callback"]

_log = logging.getLogger("fastsafetensors")
_Read = TypeVar("_Read")
_EARLIER = "an earlier checkpoint failed"  # start of the message to other ranks


class CheckpointManager:
    """Saves checkpoints into a folder while training goes on, and deletes old ones."""

    def __init__(
        self,
        folder: str | bytes | os.PathLike[Any],
        *,
        every: int = 1,
        keep_last: int | None = None,
        keep_best: int = 0,
        best: str = "min",
        group: Any = None,
        ranks: str = "each",
        max_shard_size: int | str = "100GB",
        stage: str = "copy",
        memory: int | str | None = None,
        ready: int | str | None = None,
        durable: bool = True,
        manifest: bool = True,
        overlap: str = "order",
        at_exit: str = "wait",
        timeout: float | None = None,
    ) -> None:
        """Open a folder of checkpoints, and delete what killed runs have left in it.

        That is: temporary files of saves, and folders step-N with nothing else. Incomplete sets of
        files, temporary files that an index lists, and files of other programs stay.

        Args:
            folder: is made if it is not there. A relative path is resolved now: the manager keeps
                to its folder when the program changes the current one. Use one manager at a time:
                a second one may delete the folder that the first has made for a save and not yet
                put files in.
            every: save() does something at multiples of this step.
            keep_last: after a save, so many checkpoints up to its step are kept, and the one that
                resume() loaded; None: all. Checkpoints of higher steps and those that latest() or
                resume() passed over are neither counted nor deleted.
            keep_best: with keep_last, so many of those with the best metric are kept as well. NaN
                is no metric. Over ranks, the metric of rank 0 counts.
            best: "min" or "max": which metric is better, for keep_best and best().
            group: a torch.distributed group with a CPU backend (gloo) that nothing else uses. All
                of its ranks must see the folder, make a manager with the same arguments, and call
                save() and resume() in the same order. A checkpoint is complete when all ranks have
                written their files; an error on one rank is an error on all. None: one process.
            ranks: "each": every rank saves its own state, and resumes from it, in a group of the
                same size. "first": rank 0 saves its state, and all ranks resume from it.
            max_shard_size: most bytes of tensors in a file; by default nearly always one.
            stage: "copy" or "lazy", as in fastsafetensors.torch.save_file_async; with "lazy",
                register before_step() with the optimizer.
            memory: the most staging memory, as in StagingPool.
            ready: so much of it is allocated now, as in StagingPool.
            durable: a checkpoint counts as saved when its files are on the device, and so are the
                entries of the folders that were made for it.
            manifest: checkpoints are saved with checksums, for resume(verify=True). A failure of
                that alone is a warning in the log. For a group rank 0 reads all files for it.
            overlap: "order" or "supersede", as in save_file_async.
            at_exit: "wait" or "cancel", as in save_file_async.
            timeout: seconds to wait for other ranks, in a call and at the end of a save; None: the
                group's timeout for each message. A rank that is later fails this save and the
                later ones, until a manager with a new group is made.

        Raises:
            TypeError, ValueError: an argument of another type, or out of range; a URL.
            OSError: the folder can't be made or read.
            RankError: an error on another rank, or other arguments there.
        """
        self._ranks = Ranks(group, ranks, timeout)
        retention = {"every": every, "keep_last": keep_last, "keep_best": keep_best, "best": best}
        self._options: dict[str, Any] = {
            "durable": durable, "manifest": manifest, "stage": stage, "overlap": overlap,
            "at_exit": at_exit, "max_shard_size": max_shard_size,
            "filename_pattern": STEM + "{suffix}.safetensors"}
        described = {**retention, **self._options, "ranks": ranks}
        with self._ranks.agreement_after("CheckpointManager()", **described):
            self._ranks.check_arguments()
            check_manager_options(folder, retention, self._options)
            self._pool = StagingPool(memory, ready)
            self.folder = absolute_path(folder)
            if self._ranks.rank == 0:
                make_folder(self.folder, durable)
                clean_up(self.folder)
        self.every = int(every)
        self._best, self._old = best, OldCheckpoints(self, keep_last, keep_best, best)
        # For the watchers. A call of the program's holds neither while a signal handler, which may
        # save and wait, can run.
        self._lock, self._pruning = threading.RLock(), threading.Lock()
        self._pid, self._is_closed = os.getpid(), False
        # "failure" of a save; "refusal", which repeats a failure that another rank has raised.
        self._errors: dict[str, Exception] = {}
        self._watchers = Watchers()
        self._saving: set[tuple[int, int]] = set()  # steps and numbers of running saves
        self._good: set[tuple[int, int]] = set()  # those that have ended well: to be followed
        self._numbers = itertools.count(1)
        self._last_saved = (0, 0)  # the last of them that has ended well: its number, and its step
        self._passed_over: set[int] = set()
        self._resumed: int | None = None

    # ---- saving ----

    def _check_usable(self) -> None:
        """RuntimeError in a fork's child, whose parent does the saves; ValueError when closed."""
        if self._pid != os.getpid():
            raise RuntimeError("the CheckpointManager was made before fork(): its saves belong to "
                               "the parent. Make one in this process")
        if self._is_closed:
            raise ValueError("the CheckpointManager is closed. Make another one")

    def should_save(self, step: int) -> bool:
        """Whether save() does something at a step, an integer of at least 0."""
        return step_number(step) % self.every == 0

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metric: float | None = None,
        *,
        force: bool = False,
    ) -> SaveHandle | None:
        """Start to save a checkpoint; the state is that at the call.

        Args:
            step: its number, an integer of at least 0.
            state: {name: what has a state_dict(), or nested dicts, lists and tuples of tensors,
                NumPy arrays, int, float, bool, str, bytes and None}. The versions of modules that a
                state_dict() has as its _metadata are saved as well.
            metric: a number, for keep_best.
            force: save although `every` does not ask for it.

        In a group with keep_last, a step that was saved before waits for the saves before it.

        Returns:
            The handle, or None where nothing was to be saved.

        Raises:
            SafetensorError: the checkpoint before this one failed; this one was not begun.
            TypeError: state that is not a mapping or can't be saved; a wrong step or metric.
            ValueError: a negative step; the name "fastsafetensors.metadata"; the manager is closed;
                a sparse, quantized or complex128 tensor.
            NotImplementedError, RuntimeError: a meta tensor, a DTensor; a manager from before fork.
        """
        if self._ranks.group is not None:
            return self._save_together(step, state, metric, force)
        check_switch("force", force)
        check_state(state)
        step = step_number(step)
        if not force and not self.should_save(step):
            return None
        self._check_usable()
        self.check()
        tensors = encode_state(states_of(state))
        return self._begin((step, next(self._numbers)), lambda: start_alone(
            self._place_of(step), tensors, metadata_of(step, metric), self._pool, self._options))

    def _save_together(
        self, step: Any, state: Mapping[str, Any], metric: float | None, force: bool
    ) -> SaveHandle | None:
        """save() of a group: what fails here must fail on all ranks."""
        self._check_usable()
        try:
            number = step_number(step)
            check_switch("force", force)
        except Exception as error:
            if self.every == 1:  # else the other ranks may have nothing to save now
                self._ranks.refuse(self._ranks.join(), error)
            raise
        if not force and not self.should_save(number):
            return None
        joint = self._ranks.join()
        refusal: Exception | None = None
        try:
            joint.enter()
            try:
                key = (number, next(self._numbers))
                self._wait_for_pruning(number)
                self._ranks.set_step(joint, self._place_of(number), number, self._options,
                                     partial(self._old.prune, key))
                try:
                    self._check_saves()
                except Exception as error:
                    refusal = RuntimeError(f"{_EARLIER}: {error}")
                    raise
                check_state(state)
                return self._begin(key, lambda: self._ranks.start(
                    joint, states_of(state), metadata_of(number, metric), self._pool,
                    self._options))
            except Exception as error:
                if not joint.is_started:
                    self._ranks.refuse(joint, refusal or error)
                raise
        except BaseException as error:
            if not isinstance(error, Exception):
                joint.leave()
            raise

    def _place_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _wait_for_pruning(self, step: int) -> None:
        """Wait until rank 0 has renamed old checkpoints, if that may concern a step."""
        if self._old.keep_last is not None and self._ranks.rank > 0 and (
                self._place_of(step).exists() or self._is_saving(step)):
            self._watchers.wait()

    def _begin(self, key: tuple[int, int], start: Callable[[], SaveHandle]) -> SaveHandle:
        """Start a save, and watch it, also if Ctrl-C ends the call meanwhile."""
        with running.begun() as begun:
            try:
                self._saving.add(key)
                with self._lock:
                    pass  # the thread of an earlier save may be deleting its empty folder
                if self._ranks.rank == 0:
                    self._old.note_begin(key)
                handle = start()
                self._watch(handle, key)
            except BaseException:
                own = [one for one in begun if one.is_of(self._place_of(key[0]))]
                if not own or not own[-1].is_started():
                    self._saving.discard(key)
                elif not self._watchers.start(own[-1]):
                    self._watch(own[-1], key)
                raise
        return handle

    def _watch(self, handle: SaveHandle, key: tuple[int, int]) -> None:
        """Let a thread wait for the end, note a failure, and delete what is not kept."""
        self._watchers.add(Watcher(handle, partial(self._note, handle, key), self._follow))

    def _is_saving(self, step: int) -> bool:
        return any(number == step for number, _ in list(self._saving))

    def _note(self, handle: SaveHandle, key: tuple[int, int]) -> None:
        """Wait for the end of a save, and note how it was."""
        error, (step, number) = handle.exception(), key
        with self._lock:
            self._saving.discard(key)
            if error is not None:
                # A failed save leaves an empty folder at most. Another save of the step may use it;
                # ranks delete it together.
                if not self._is_saving(step) and self._ranks.group is None:
                    with contextlib.suppress(OSError):
                        (self.folder / f"step-{step}").rmdir()
                if not was_cancelled(error):
                    self._errors["refusal" if _EARLIER in str(error) else "failure"] = error
                    _log.warning("the checkpoint of step %d failed: %s", step, printable(error))
                    append_text(error, f"in the checkpoint of step {step}")
                return
            self._errors.pop("refusal", None)  # of an earlier step, whose failure was raised
            self._passed_over.discard(step)
            if self._ranks.group is None:
                self._good.add(key)
            # The thread of an earlier save may run after that of a later one.
            self._last_saved = max(self._last_saved, (number, step))

    def _next_good(self) -> tuple[int, int] | None:
        """Return the first save to be followed, if no save before it is still to be noted."""
        with self._lock:
            good, running_ones = list(self._good), list(self._saving)
            first = min(good + running_ones, key=lambda key: key[1], default=None)
            return first if first in good else None

    def _follow(self) -> None:
        """Delete what is not kept, after good saves in the order of the calls."""
        with self._pruning:
            while (key := self._next_good()) is not None:
                self._good.discard(key)
                self._old.prune(key, self._next_good())
            self._old.delete_hidden()

    def before_step(self, *_args: Any) -> None:
        """Wait until tensors may change: for optimizer.register_step_pre_hook()."""
        self._watchers.before_step()

    def check(self) -> None:
        """Raise what went wrong with a checkpoint, once. RuntimeError in a fork's child."""
        if self._pid != os.getpid():
            self._check_usable()
        self._check_saves()
        if (refusal := self._errors.pop("refusal", None)) is not None:
            raise refusal

    def _check_saves(self) -> None:
        """Raise what made a save fail, once.

        Not that another rank has refused one because it raised such a failure: save() would refuse
        the next one in turn, and so on.
        """
        self._watchers.note_ends()
        if (failure := self._errors.pop("failure", None)) is not None:
            raise failure

    def wait(self) -> None:
        """Wait until all checkpoints are saved and old ones deleted; raise what went wrong."""
        if self._pid != os.getpid():
            self._check_usable()
        self._watchers.wait()
        self.check()

    def close(self) -> None:
        """Wait, and give the staging memory back. In a fork's child: nothing."""
        if self._pid != os.getpid():
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._watchers.forget_handles()
            self._pool.close()

    def __enter__(self) -> CheckpointManager:
        """Return the manager."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait; a failure of a checkpoint, which is logged, does not hide an exception."""
        try:
            self.close()
        except Exception:
            if kind is None:
                raise

    # ---- what is there ----

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the oldest first. A warning names unreadable ones."""
        return read_all(self.folder)

    def latest(self, *, verify: bool = False) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step, or None.

        One that can't be read is passed over, with a warning.

        Args:
            verify: one whose bytes differ from its manifest, or that has no manifest, is passed
                over as well. A save that was killed after its files were in place has none.

        Raises:
            OSError, MemoryError: none is returned, although one may be whole: it could not be read
                for that reason, or, with verify, has no manifest (FileNotFoundError).
            SafetensorError: another process deletes checkpoints faster than they can be read.
            TypeError: an argument of another type.
        """
        check_switch("verify", verify)
        return self._read_newest(verify, lambda checkpoint: checkpoint)

    def _read_newest(self, verify: bool, read: Callable[[Checkpoint], _Read]) -> _Read | None:
        """Return what `read` returns of the complete checkpoint of the highest step, or None."""
        for _ in range(LISTINGS):  # again if another process has deleted what was listed
            unreadable: Exception | None = None
            for step, path in find_newest(self.folder):
                try:
                    return read(self._checkpoint_of(step, verify))
                except Exception as error:
                    if meaning_of(error) is Meaning.UNRELATED:
                        raise
                    if not path.is_dir():
                        break
                    self._pass_over(step, error)
                    if meaning_of(error) is Meaning.UNREADABLE:
                        unreadable = unreadable or error
            else:
                if unreadable is not None:
                    raise unreadable
                return None
        raise deleted_too_fast(self.folder)

    def _pass_over(self, step: int, error: Exception) -> None:
        _log.warning("%s is passed over: %s", printable(self._place_of(step)), printable(error))
        self._passed_over.add(step)

    def best(self) -> Checkpoint | None:
        """Return the one of checkpoints() with the best metric, or None."""
        rated = by_metric(self.checkpoints(), self._best)
        return rated[0] if rated else None

    def _checkpoint_of(self, step: int, verify: bool) -> Checkpoint:
        """Return the checkpoint of a step, verified on request."""
        checkpoint = read_checkpoint(self._place_of(step), step)
        if verify:
            verify_checkpoint(checkpoint)
        return checkpoint

    def _check_there(self, step: int) -> None:
        """Refuse a step that was asked for and has no checkpoint."""
        if self._is_gone(step):
            steps = ", ".join(str(one.step) for one in self.checkpoints()) or "none"
            raise FileNotFoundError(2, f"no checkpoint of step {step} (there are: {steps})",
                                    str(self._place_of(step)))

    def resume(
        self, state: Mapping[str, Any], *, step: int | None = None, verify: bool = False
    ) -> int:
        """Load a complete checkpoint into what is given; return its step, 0 without one.

        Waits for saves that run.

        Args:
            state: {name: value}, names as in save(). What has a load_state_dict() is given the
                saved state. Dicts, lists and tensors get the saved contents in place, tensors in
                their own dtype; other plain values, such as numbers, are replaced in `state`. Names
                that the checkpoint has beyond these are left.
            step: the checkpoint to load; None: the latest. Later checkpoints stay, and latest()
                still returns them until they are saved again or deleted.
            verify: compare every byte with the manifest first; a damaged checkpoint is passed over,
                or an error if `step` asks for it.

        In a group, all ranks load the same step, the latest that all can read; verify= compares
        the bytes that a rank reads.

        An error of a load_state_dict(), such as that of a module with other parameters, or of
        copying to a tensor, such as a sparse one, is raised unchanged. Entries of `state` before it
        are then loaded, and those after it are not.

        Raises:
            KeyError: the checkpoint lacks a name; nothing was changed.
            TypeError: a state that is not a mapping, or one that can't be changed and has plain
                values; a DTensor, or a module with DTensors; a module or optimizer whose name has
                no dict in the checkpoint; nothing was changed.
            ValueError: a tensor of another shape, without memory, or of a dtype that can't hold
                the values (float to int, int to a smaller int, finite floats that would become
                infinite); a checkpoint of several ranks, and the group has another number; nothing
                was changed.
            FileNotFoundError: there is no checkpoint of `step`, or with verify no manifest.
            OSError, MemoryError: as for latest().
            SafetensorError: the checkpoint of `step` is incomplete or damaged; another process
                deletes checkpoints faster than they can be read.
            TypeError, ValueError: a step that cannot be used as an integer, or a negative one.
            RankError: an error on another rank.
        """
        if self._ranks.group is not None:
            return self._resume_together(state, step, verify)
        check_switch("verify", verify)
        check_state(state)
        check_targets(state)
        if self._pid == os.getpid():
            self._watchers.wait()
        if step is None:
            found = self._read_newest(verify, self._load)
        else:
            self._check_there(step_number(step))
            found = self._load(self._checkpoint_of(step_number(step), verify))
        if found is None:
            return 0
        checkpoint, loaded = found
        check_loaded(state, loaded, checkpoint.path)
        self._resumed = checkpoint.step
        load_into(state, loaded)
        return checkpoint.step

    def _load(self, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
        return checkpoint, self._ranks.read(checkpoint, verify=False)

    def _resume_together(self, state: Mapping[str, Any], step: Any, verify: bool) -> int:
        """resume() of a group, which no running save may use meanwhile."""
        self._check_usable()
        self._watchers.wait()
        gone: Exception | None = None
        for _ in range(LISTINGS):  # again if another process has deleted what was listed
            with self._ranks.agreement_after("resume()", step=step, verify=verify):
                check_switch("verify", verify)
                check_state(state)
                check_targets(state)
                steps = ([number for number, _ in find_newest(self.folder)] if step is None
                         else [step_number(step)])
            unreadable: Exception | None = None
            for number, loaded, refused, meaning in self._ranks.read_steps(
                    steps, partial(self._read_part, verify=verify, asked=step is not None),
                    self._is_gone):
                if refused is None:
                    self._load_together(state, loaded, number)
                    return number
                if step is not None or meaning is Meaning.UNRELATED:
                    raise refused
                gone = refused
                if meaning is Meaning.GONE:
                    break
                self._pass_over(number, refused)
                if meaning is Meaning.UNREADABLE:
                    unreadable = unreadable or refused
            else:
                if unreadable is not None:
                    raise unreadable
                return 0
        raise deleted_too_fast(self.folder, f", or rank 0 lists other ones: {printable(gone)}")

    def _is_gone(self, step: int) -> bool:
        return not self._place_of(step).is_dir()

    def _read_part(self, step: int, *, verify: bool, asked: bool) -> dict[str, Any]:
        """Read this rank's state."""
        if asked:
            self._check_there(step)
        return self._ranks.read(self._checkpoint_of(step, verify=False), verify)

    def _load_together(self, state: Mapping[str, Any], loaded: dict[str, Any], step: int) -> None:
        """Load on all ranks, or on none if the state does not fit on one."""
        with self._ranks.agreement_after(f"the state of step {step}"):
            check_loaded(state, loaded, self._place_of(step))
        self._resumed = step
        with self._ranks.agreement_after(f"loading the state of step {step}"):
            load_into(state, loaded)


def trainer_callback(manager: CheckpointManager, **more: Any) -> Any:
    """Return a transformers.TrainerCallback that saves with a manager.

    It saves the model, optimizer, scheduler, random number generators and the trainer's state at
    the end of steps that the manager's ``every`` asks for, and waits at the end of the training.
    Set save_strategy="no" in the TrainingArguments. To go on, before train():
    ``manager.resume({"model": model, "optimizer": ..., "scheduler": ...})``. The Trainer counts
    its steps from 0 again; checkpoints count on from the one that was resumed, or saved last by the
    manager. The metric is the eval_loss of an evaluation at the same step. Put callbacks that
    request an evaluation before this one: a step is saved without a metric if the request comes
    after its end. With load_best_model_at_end, the last step is saved before the best model is
    loaded, or not at all if a later callback stops the training at the end of its last epoch or
    in its last evaluation.

    Args:
        manager: where to save; its stage may be "lazy".
        more: further state, {name: what has a state_dict()}; not "model", "optimizer",
            "scheduler" or "trainer".

    Raises:
        ImportError: transformers is not installed.
        ValueError: a name of the trainer's own state.
    """
    return make_trainer_callback(manager, {"rng": RNG, **more})
