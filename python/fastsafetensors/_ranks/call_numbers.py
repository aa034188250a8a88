# SPDX-License-Identifier: Apache-2.0
"""Numbers of a group's calls, by which ranks notice that one of them has skipped a call.

A rank whose call was interrupted (Ctrl-C) takes no part in it, while the other ranks still wait.
Its next call must not answer their earlier one.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any

from ..v05.frameworks import ProcessGroupBase
from .agreement import Agreement, RankError


class CallNumbers:
    """The numbers of a group's calls on this rank.

    Without a lock, because a signal handler may take a number at any moment.
    """

    def __init__(self) -> None:
        """Begin with 1."""
        self._next = itertools.count(1)
        self._behind = 0  # how far the last call was behind another rank's; 0: it was not

    def take(self) -> int:
        """Return the number of a call; the first thing that a call does."""
        return next(self._next)

    def note(self, number: int, highest: int) -> None:
        """Note this rank's and the highest number of the calls that met.

        A rank that was interrupted is ahead once: it waits until the others come to its call. If
        two calls are behind as far, this rank has made fewer calls, and skips as many numbers.
        """
        behind, self._behind = self._behind, highest - number
        if behind > 0 and behind == self._behind:
            self.skip(behind)

    def skip(self, count: int) -> None:
        """Take numbers for no call, because the ranks have made different numbers of calls."""
        for _ in range(count):
            next(self._next)
        self._behind = 0


_of_groups: weakref.WeakKeyDictionary[Any, CallNumbers] = weakref.WeakKeyDictionary()


def numbers_of(group: Any) -> CallNumbers:
    """Return the numbers of a group."""
    with contextlib.suppress(TypeError):
        return _of_groups.setdefault(group, CallNumbers())
    return CallNumbers()  # no group, or another object, which is an error elsewhere


def take_number(group: Any) -> int:
    """Return the number of a call that uses a group; the first thing that the call does."""
    return numbers_of(group).take()


def exchange_numbers(pg: ProcessGroupBase, number: int) -> list[int]:
    """Return the number of each rank's call."""
    if pg.size() == 1:
        return [number]
    said = pg.exchange(number.to_bytes(8, "little"), "the number of the call")
    return [int.from_bytes(message, "little") for message in said]


def meet_same_call(pg: ProcessGroupBase, agreement: Agreement, own: CallNumbers, number: int,
                   what: str) -> None:
    """Return when all ranks are in the same save; RankError if this one can't be.

    A rank that is ahead has skipped a call that others are still in. Theirs fails, and it waits for
    their next one. No messages follow an error.
    """
    while True:
        agreement.agree(what)  # if another rank is in a different call, both get a RankError
        numbers = exchange_numbers(pg, number)
        highest = max(numbers)
        own.note(number, highest)
        if number < highest:
            raise RankError(f"rank {numbers.index(highest)} has left this save: it is in call "
                            f"{highest} of the group, and this is call {number}")
        if min(numbers) == highest:
            return
