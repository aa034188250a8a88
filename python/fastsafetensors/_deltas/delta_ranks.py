# SPDX-License-Identifier: Apache-2.0
"""Ranks that load one model agree on the version of its weights before they apply deltas.

A trainer may publish a version while the ranks begin to load, and the hosts of shared storage may
see it at different times. So the ranks exchange the versions that each of them can have, and take
the newest one that all can. An error of one rank is an error on all.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from .. import deltas
from .._base.errors import refuse
from .._ranks.agreement import Agreement, RankError
from .delta_manifest import finish_update
from .delta_source import find_chain, plain_version

# How long a rank waits for others, which may be applying a delta.
_WAIT_SECONDS, _STEP_SECONDS = 600.0, 0.1
# How many ranks an error describes.
_RANKS_SHOWN = 8


def _default_group() -> Any:
    """Return the default group of torch.distributed, if it has several ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    from .._ranks.torch_group import open_group

    return open_group(dist.group.WORLD, _WAIT_SECONDS)


def _reachable(folder: str, source: str) -> list[str]:
    """Return the plain versions that a checkpoint can have, its own first.

    An update that was killed is finished first. "" is a checkpoint without a note.
    """
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        note = deltas.version_of(folder)
        try:
            if note.interrupted:
                finish_update(os.fsencode(folder))  # pull() or reading() compares the files
                continue
            break
        except TimeoutError:  # another process is at it
            if time.monotonic() >= end:
                raise
            time.sleep(_STEP_SECONDS)
    if not os.path.isdir(source):
        return ["" if note.version is None else plain_version(note.version)]
    chain = find_chain(source, note.version)
    unnoted = [""] if note.version is None and chain.start != "" else []
    return [*unnoted, chain.start, *(version for version, _ in chain.versions)]


def _describe(versions: list[str]) -> str:
    """Return the first and the last version that a rank can have."""
    named = [version for version in versions if version]
    if not named:
        return "no version known"
    return named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"


class VersionAgreement:
    """The version of one checkpoint folder on all ranks of the default group."""

    def __init__(self, folder: str, source: str) -> None:
        """Find the version to load: the newest one that all ranks can have."""
        self._folder, self._source = folder, source
        self._group = _default_group()
        self._target: str | None = None
        if self._group is not None:
            self._target = self._agree()

    def _agree(self) -> str:
        mine: list[str] = []
        with self.step("the versions of the weights"):
            mine = _reachable(self._folder, self._source)
        every = [json.loads(text) for text in self._group.exchange_texts(
            json.dumps(mine), "the version of the weights")]
        for version in reversed(every[0]):
            if all(version in other for other in every):
                return str(version)
        known = "; ".join(f"rank {rank}: {_describe(versions)}"
                          for rank, versions in enumerate(every[:_RANKS_SHOWN]))
        raise RankError(f"{self._folder}: no version of the weights can be loaded by "
                        f"all ranks ({known})")

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do something on all ranks: an error of one of them is an error on all."""
        error: BaseException | None = None
        try:
            yield
        except Exception as own:
            if self._group is None:
                raise
            error = own
        if self._group is not None:
            try:
                Agreement(self._group).agree(what, error=error)
            finally:
                error = None  # its traceback refers to this frame

    def pull(self, threads: int) -> dict[str, Any] | None:
        """Apply the versions up to the one that was agreed on."""
        if not os.path.isdir(self._source) or self._target == "":
            return None
        return deltas.pull(self._folder, self._source, threads=threads, until=self._target)

    def check(self, note: deltas.VersionNote) -> None:
        """Refuse a version other than the agreed one: another engine has gone on meanwhile."""
        if self._target is None or note.version is None:
            return
        if plain_version(note.version) != self._target:
            refuse(f"{self._folder}: another engine has applied version "
                   f"{note.version} while the ranks of this one agreed on {self._target}. Load "
                   "again", "VersionMismatch")
