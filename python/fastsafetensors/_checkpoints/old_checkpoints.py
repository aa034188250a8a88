# SPDX-License-Identifier: Apache-2.0
"""Deletes the checkpoints that keep_last and keep_best of a CheckpointManager do not keep."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .._base.errors import printable
from .checkpoint_folders import (
    Checkpoint,
    Meaning,
    by_metric,
    delete_hidden,
    hide,
    meaning_of,
    read_checkpoint,
)

_log = logging.getLogger("fastsafetensors")


class OldCheckpoints:
    """The old checkpoints of a manager. In a group, those of rank 0's."""

    def __init__(self, manager: Any, keep_last: int | None, keep_best: int, best: str) -> None:
        """Keep the manager; keep_last None: nothing is deleted."""
        self._manager, self.keep_last = manager, keep_last
        self._keep_best, self._best = keep_best, best
        # Steps and numbers of saves, from their begin until a save of that number or a higher one
        # is followed by prune(); and the steps among them that were in place before.
        self._begun: set[tuple[int, int]] = set()
        self._in_place: set[int] = set()
        self._hidden: list[Path] = []  # renamed, to be deleted

    def note_begin(self, key: tuple[int, int]) -> None:
        """Note that a save begins, (step, number)."""
        if self.keep_last is None:
            return
        step, manager = key[0], self._manager
        is_first = step not in self._begun_steps()
        self._begun.add(key)
        with manager._lock:
            pass  # the thread of an earlier save may be renaming the folder
        if not is_first:
            return
        try:
            read_checkpoint(manager.folder / f"step-{step}", step)
        except Exception as error:
            if meaning_of(error) is Meaning.UNRELATED:
                raise
            self._in_place.discard(step)
        else:
            if step not in manager._passed_over:
                self._in_place.add(step)

    def _begun_steps(self) -> set[int]:
        return {step for step, _ in list(self._begun)}

    def prune(self, key: tuple[int, int], following: tuple[int, int] | None = None) -> None:
        """Rename what is not kept, after a good save, (step, number).

        In a group, rank 0 does so before the other ranks hear of the save's end.

        Only a checkpoint that is known to be readable may push out another one, and not one that a
        later save has put in place. Higher steps belong to a run before this one, which has begun
        again at a lower step.

        following: the next good save, for which this is called next. If its step is not lower, it
            deletes as much, and the folder is not read twice.
        """
        if self.keep_last is None:
            return
        (saved, number), manager = key, self._manager
        self._begun.difference_update([one for one in list(self._begun) if one[1] <= number])
        self._in_place.add(saved)
        manager._passed_over.discard(saved)
        if following is not None and following[0] >= saved:
            return
        try:
            found = manager.checkpoints()
        except OSError as refused:
            _log.warning("old checkpoints in %s can't be deleted: %s",
                         printable(manager.folder), printable(refused))
            return
        excluded = (self._begun_steps() - self._in_place) | manager._passed_over
        counted = [one for one in found if one.step <= saved and one.step not in excluded]
        kept = {saved, manager._resumed, *(one.step for one in counted[-self.keep_last:])}
        kept |= {one.step for one in by_metric(counted, self._best)[: self._keep_best]}
        for one in counted:
            if one.step not in kept:
                self._hide(one)

    def _hide(self, old: Checkpoint) -> None:
        """Rename a checkpoint before its files are deleted, so that it is complete or not there.

        It stays if a later save of its step has begun.
        """
        with self._manager._lock:  # save() waits for the renaming, not for the deletion
            self._in_place.discard(old.step)
            if old.step not in self._begun_steps():
                try:
                    self._hidden.append(hide(old))
                except OSError as refused:
                    _log.warning("%s can't be deleted: %s", printable(old.path), printable(refused))

    def delete_hidden(self) -> None:
        """Delete the files of the renamed checkpoints."""
        while self._hidden:
            delete_hidden(self._hidden.pop())
