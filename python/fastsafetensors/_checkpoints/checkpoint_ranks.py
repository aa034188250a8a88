# SPDX-License-Identifier: Apache-2.0
"""The ranks of a CheckpointManager: they save one set of files per step, and resume together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._base.errors import printable, shown
from .._base.options import check_timeout
from .._ranks.agreement import Agreement
from .._ranks.publish import SetTarget
from .._ranks.ranks_async import (
    EmptySave,
    JointSave,
    Rows,
    forget_steps,
    start_joint,
    wait_for_saves,
)
from .._ranks.shard_rows import plan_shards, start_shards
from .._ranks.torch_group import open_group
from .._saving.save_handles import SaveHandle, Staging, StagingPool
from .._saving.save_options import WITH_WHOLE_BLOCKS, manifest_options, promise_word, with_ties
from .._torch.tensor_memory import watch_changes
from .checkpoint_folders import STEM, Checkpoint, Meaning, meaning_of, rank_prefix
from .state_codec import encode_state


def _staging(options: Mapping[str, Any], pool: StagingPool) -> Staging:
    return Staging(options["stage"], pool=pool, overlap=options["overlap"],
                   at_exit=options["at_exit"])


def start_alone(place: Path, tensors: dict[str, Any], metadata: dict[str, str], pool: StagingPool,
                options: Mapping[str, Any]) -> SaveHandle:
    """Start the save of a process without a group."""
    return start_shards(place, tensors, metadata, _staging(options, pool),
                        options["max_shard_size"], options["filename_pattern"],
                        promise=promise_word(options["durable"]), **WITH_WHOLE_BLOCKS,
                        **manifest_options(options["manifest"]))


class OtherGroupSizeError(ValueError):
    """A checkpoint that another number of ranks has saved."""

    def __init__(self, message: str, ranks: int) -> None:
        """Keep their number."""
        super().__init__(message)
        self.ranks = ranks


class StepRead(NamedTuple):
    """What became of reading one step on all ranks."""

    step: int
    found: Any  # what this rank has read; None after an error
    error: Exception | None  # this rank's own, or a RankError with the errors of the others
    meaning: Meaning  # the most important one of all ranks' errors


class Ranks:
    """The ranks of a group. All of them call the same methods in the same order."""

    def __init__(self, group: Any, who: str, timeout: float | None) -> None:
        """Keep the group.

        who: "each": every rank saves its state; "first": rank 0 saves its state for all.
        """
        self.group, self._who, self._timeout = group, who, None
        self._failure: Exception | None = None
        try:
            self._timeout = check_timeout(timeout)
            if who not in ("each", "first"):
                raise ValueError(f"ranks must be 'each' or 'first', not {shown(who)}")
        except Exception as error:  # for check_arguments(): the other ranks wait to hear of it
            self._failure = error
        self._begin()

    def check_arguments(self) -> None:
        """Raise what is wrong with the arguments."""
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> Agreement:
        """Begin a step in which the ranks exchange messages, when no save does so any more."""
        wait_for_saves(self.group)
        forget_steps(self.group)
        self._pg = open_group(self.group, self._timeout)
        self._pg.limit_waits()
        self.rank, self.size = self._pg.rank(), self._pg.size()
        return Agreement(self._pg)

    @contextlib.contextmanager
    def agreement_after(self, what: str, **values: Any) -> Iterator[None]:
        """Return from the block when all ranks have; an error in it is raised on all ranks.

        values: must have the same text on all ranks; an error of making it is like one in the
            block.
        """
        failure: Exception | None = None
        lines: list[str] = []
        try:
            yield
            lines = [f"{name} {value}" for name, value in values.items()]
        except Exception as error:
            failure = error
        self._begin().agree(what, lines, failure)

    def prefix(self) -> str:
        """What the names of this rank's tensors begin with."""
        return rank_prefix(self.rank) if self._who == "each" and self.size > 1 else ""

    def metadata(self) -> dict[str, str]:
        """What the files say of the ranks."""
        return {"ranks": str(self.size)} if self.prefix() else {}

    # ---- saving ----

    def join(self) -> JointSave:
        """Prepare a save."""
        return JointSave(self.group, self._timeout)

    def set_step(self, joint: JointSave, place: Path, step: int, options: Mapping[str, Any],
                 follow: Callable[[], None]) -> None:
        """Say which step is saved, and what rank 0 does before the others hear of its end."""
        target = SetTarget(str(place), STEM, options["durable"],
                           manifest=manifest_options(options["manifest"]), follow=follow)
        joint.set_target(target, [f"{place.name}, by {self._who}"], self._timeout, step)

    def refuse(self, joint: JointSave, error: Exception) -> None:
        """Let the save fail on all ranks, in a thread."""
        EmptySave(joint, "", error).forget_error()

    def start(self, joint: JointSave, state: Mapping[str, Any], metadata: dict[str, str],
              pool: StagingPool, options: Mapping[str, Any]) -> SaveHandle:
        """Start this rank's part of a save."""
        assert joint.place is not None
        if self._who == "first" and self.rank > 0:
            return EmptySave(joint, joint.place.folder)
        prefix = self.prefix()
        tensors = {prefix + name: tensor for name, tensor in encode_state(state).items()}
        stage = options["stage"]
        is_unchanged = None if stage == "copy" else watch_changes(tensors)
        rows, more, tied = plan_shards(tensors, options["max_shard_size"],
                                       options["filename_pattern"], metadata)
        data = Rows(rows, with_ties({**metadata, **self.metadata()}, tied),
                    {**more, **WITH_WHOLE_BLOCKS}, is_unchanged)
        return start_joint(joint, data, _staging(options, pool))

    # ---- resuming ----

    def read(self, checkpoint: Checkpoint, verify: bool) -> dict[str, Any]:
        """Read this rank's state."""
        if checkpoint.ranks not in (1, self.size):
            here = "this is one process" if self.group is None else f"this group has {self.size}"
            raise OtherGroupSizeError(
                f"{printable(checkpoint.path)} was saved by {checkpoint.ranks} ranks, and {here}: "
                "read it with Checkpoint.load(rank=...)", checkpoint.ranks)
        rank = self.rank if checkpoint.ranks > 1 else None
        return checkpoint.load(rank=rank, verify=verify)

    def read_steps(
        self, steps: list[int], read: Callable[[int], Any], is_gone: Callable[[int], bool]
    ) -> Iterator[StepRead]:
        """Read the steps of rank 0 on all ranks, one after the other.

        Raises:
            OtherGroupSizeError: on all ranks: another number of them has saved the step.
        """
        agreement = self._begin()
        texts = self._pg.exchange_texts(json.dumps(steps), "the checkpoints")
        for step in json.loads(texts[0]):
            failure: Exception | None = None
            other_size: OtherGroupSizeError | None = None
            found = None
            try:
                found = read(step)
            except OtherGroupSizeError as error:
                other_size = error
            except Exception as error:
                failure = error
            try:
                # The message has the path, which may differ.
                size = "this group" if other_size is None else f"{other_size.ranks} ranks"
                agreement.agree(f"reading the checkpoint of step {step}", [size], failure)
            except Exception as error:
                if self._pg.has_lost_ranks:
                    raise
                meaning = meaning_of(failure)
                with contextlib.suppress(Exception):  # the other ranks wait for the meaning
                    if failure is not None and is_gone(step):
                        meaning = max(meaning, Meaning.GONE)
                said = self._pg.exchange(bytes([meaning]), f"the error of step {step}")
                yield StepRead(step, None, error, Meaning(max(one[0] for one in said)))
            else:
                if other_size is not None:
                    raise other_size
                yield StepRead(step, found, None, Meaning.NOTHING_WRONG)
