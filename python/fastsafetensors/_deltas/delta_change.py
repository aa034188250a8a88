# SPDX-License-Identifier: Apache-2.0
"""The change of a running model by a weight delta."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import _core
from .._base.representation import shown_as
from .delta_memory import Place, named_tensors


def _call_all(steps: list[Callable[[], None]]) -> tuple[list[Callable[[], None]], Any]:
    """Call all, in order, whatever is raised meanwhile, also by signal handlers.

    One that an exception has ended is called a second time. Returns those that have failed twice,
    and the first exception.
    """
    waiting, left, raised, again = steps[::-1], [], None, None
    while waiting:
        try:
            while waiting:
                waiting[-1]()
                waiting.pop()
        except BaseException as error:
            raised = raised or error
            if waiting and waiting[-1] is again:
                left.append(waiting.pop())
            again = waiting[-1] if waiting else None
    return left, raised


@shown_as("Change", "fastsafetensors.deltas")
class Change:
    """Verified new bytes of a running model's tensors, for commit(). Not for two threads.

    The memory of these bytes is freed by drop(), by the end of a `with` block, or with the object.
    """

    def __init__(
        self, delta: Any, source: Any, wanted: list[str], threads: int, version: str | None
    ) -> None:
        """See Delta.prepare(). source: a mapping or a module."""
        tensors = named_tensors("tensors", source)
        places: list[Place] = []
        rows = []
        for name in wanted:
            if name not in tensors:
                raise KeyError(f"the delta changes {name!r}, which is not among the tensors")
            place = Place(name, tensors[name])
            places.append(place)
            rows.append((name, place.address, place.nbytes))
        self._change: Any = _core.delta_prepare(delta, rows, threads, version)
        self._source, self._places, self._is_begun = source, places, False
        # To be called by commit(); None: it has called them, or the change was dropped.
        self._left: list[Callable[[], None]] | None = [
            partial(_core.delta_commit, self._change), *(place.finish for place in places)]

    def commit(self) -> None:
        """Copy the new bytes into the tensors, once. Pause the engine for this call.

        Freeing the memory, which can take as long, is left to drop(), after the pause. An exception
        of a signal handler, such as KeyboardInterrupt, is raised before anything or after all was
        written; if several handlers raise, some tensors may be left. After an exception commit()
        may be called again, before drop(): it writes what is missing.

        Raises:
            ValueError: the change was committed or dropped; a tensor or its memory was exchanged or
                freed after prepare(), as offloading does. Nothing was written.
            RuntimeError: torch could not copy to a tensor. The others are written.
        """
        if self._left is None:
            raise ValueError("the change was already committed or dropped")
        if not self._is_begun:
            current = named_tensors("tensors", self._source)
            for place in self._places:
                place.check(current)
        self._is_begun = True
        left, raised = _call_all(self._left)
        self._left = left or None
        if raised is not None:
            raise raised

    def drop(self) -> None:
        """Free the new bytes; those that were not committed are never used. Repeatable."""
        self._left = self._change = None
        self._source, self._places = {}, []

    def __enter__(self) -> Change:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the new bytes."""
        self.drop()
