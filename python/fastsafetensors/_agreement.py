# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on what comes next before they do it: a mistake of one is an error on all.

Each collective of the loaders is preceded by a round of 16 bytes a rank: a digest of what the rank
is about to do, and whether it can. Only when these differ are the descriptions themselves
exchanged, to name the first difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from .v05.frameworks import ProcessGroupBase


class RankError(RuntimeError):
    """Another rank failed or left, ranks asked for different things, or one did not come."""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Say in a RankError what this rank was doing."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{what}: {error}") from error


_GOOD, _FAILED, _LEFT = 0, 1, 2


def _first_difference(what: str, lines: list[Sequence[str]]) -> str:
    """Say where the description of a rank first differs from rank 0's."""
    for rank, other in enumerate(lines):
        for at in range(max(len(lines[0]), len(other))):
            first = lines[0][at] if at < len(lines[0]) else "nothing"
            second = other[at] if at < len(other) else "nothing"
            if first != second:
                return f"ranks differ in {what}: rank 0 has {first}; rank {rank} has {second}"
    return f"ranks differ in {what}"


class Agreement:
    """The rounds of a group. All ranks call the same functions in the same order.

    Usable from one thread at a time, as collectives are.
    """

    def __init__(self, pg: ProcessGroupBase) -> None:
        """Agree among the ranks of a group; nothing is done in a group of one."""
        self._pg = pg
        self.rounds = 0

    def agree(
        self, what: str, lines: Sequence[str] = (), error: BaseException | None = None
    ) -> None:
        """Return when all ranks came with the same `what` and lines, and none with an error.

        Raises the own error; RankError for another rank's, for a difference, and for ranks that do
        not come within the group's timeout.
        """
        try:
            if self._pg.size() > 1:
                self._round(what, list(lines), _GOOD if error is None else _FAILED, error)
            elif error is not None:
                raise error
        finally:
            del error  # its frames lead here: what they hold must not wait for a collector

    def leave(self, why: str) -> None:
        """Tell ranks that wait for the next round that this one does not come any more."""
        if self._pg.size() > 1:
            self._round("leaving", [why], _LEFT, None)

    def end(self) -> None:
        """Finish: a rank that has left by now has had everything as well."""
        if self._pg.size() > 1:
            self._round("the end", [], _GOOD, None, may_leave=True)

    def _round(
        self,
        what: str,
        lines: list[str],
        status: int,
        error: BaseException | None,
        may_leave: bool = False,
    ) -> None:
        self.rounds += 1
        digest = hashlib.blake2b("\n".join([what, *lines]).encode(errors="surrogatepass"),
                                 digest_size=15).digest()
        mine = bytes([status]) + digest
        came = self._pg.exchange(mine, what)
        statuses = {rank[0] for rank in came}
        same = len({rank[1:] for rank in came}) == 1
        if came and statuses == {_GOOD} and same:
            return
        left = [rank for rank, message in enumerate(came) if message[0] == _LEFT]
        if status == _LEFT or (may_leave and left and statuses <= {_GOOD, _LEFT}):
            self._tell(what, lines, error)
            return
        try:
            texts = self._tell(what, lines, error)
            raise self._explain(what, came, texts) if error is None else error
        finally:
            del error

    def _tell(self, what: str, lines: list[str], error: BaseException | None) -> list[Any]:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        message = json.dumps({"what": what, "lines": lines, "error": text})
        return [json.loads(text) for text in self._pg.exchange_texts(message, what)]

    def _explain(self, what: str, came: list[bytes], texts: list[Any]) -> RankError:
        for rank, (message, text) in enumerate(zip(came, texts, strict=True)):
            if message[0] == _FAILED:
                return RankError(f"rank {rank} failed in {text['what']}: {text['error']}")
            if message[0] == _LEFT:
                return RankError(f"rank {rank} has left ({text['lines'][0]}), while this one came "
                                 f"to {what}")
        for rank, text in enumerate(texts):
            if text["what"] != texts[0]["what"]:
                return RankError(f"ranks do different things: rank 0 came to {texts[0]['what']}, "
                                 f"rank {rank} to {text['what']}")
        return RankError(_first_difference(what, [text["lines"] for text in texts]))
