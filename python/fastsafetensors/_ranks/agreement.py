# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on the next step before it starts, so that one rank's error is an error on all.

Before each collective of the loaders, the ranks exchange 16 bytes: whether the rank can do the next
step, and digests of the step and of what it needs for it. Only if these differ do they exchange
full descriptions, to name the first difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._base.errors import printable
from .._base.representation import shown_as
from .process_group import ProcessGroupBase


@shown_as("RankError", "fastsafetensors")
class RankError(RuntimeError):
    """Another rank failed or exited, ranks requested different things, or a rank never joined."""

    def __init__(self, message: object = "") -> None:
        """Keep the message, which may have names and paths of other ranks."""
        super().__init__(printable(message))


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Add to a RankError what this rank was doing."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{what}: {error}") from error


# What a rank says of itself. Before a load it also says whether it could map the files, and whether
# it lacks them: then it has no lines, because it can't describe what it will load.
GOOD, _FAILED, _ENDED, MAPS, LACKS = range(5)
_STEP_BYTES, _LINES_BYTES = 5, 10


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()


def _first_difference(what: str, lines: Mapping[int, Sequence[str]]) -> str:
    """Describe where a rank's lines first differ from the first rank's."""
    base = min(lines)
    for rank, other in lines.items():
        for at in range(max(len(lines[base]), len(other))):
            first = lines[base][at] if at < len(lines[base]) else "nothing"
            second = other[at] if at < len(other) else "nothing"
            if first != second:
                return f"ranks differ in {what}: rank {base} has {first}; rank {rank} has {second}"
    return f"ranks differ in {what}"


class Agreement:
    """The agreement rounds of a group. All ranks call the same functions in the same order.

    For one thread at a time, like collectives.
    """

    def __init__(self, pg: ProcessGroupBase) -> None:
        """Agree among the ranks of a group. A group of one does nothing."""
        self._pg = pg

    def agree(
        self,
        what: str,
        lines: Sequence[str] = (),
        error: BaseException | None = None,
        state: int = GOOD,
    ) -> list[int]:
        """Return every rank's state when all arrived with the same `what` and lines, and without an
        error. Ranks that say LACKS have no lines.

        Raises this rank's own error; RankError for an error of another rank, for a difference, and
        for ranks that do not arrive within the group's timeout.
        """
        try:
            if self._pg.size() > 1:
                return self._round(what, list(lines), state if error is None else _FAILED, error)
            if error is not None:
                raise error
            return [state]
        finally:
            del error  # its traceback refers to this frame, which would keep its locals alive

    def leave(self, why: str) -> None:
        """Notify ranks in the next round that this one has ended."""
        if self._pg.size() > 1:
            self._round("leaving", [why], _ENDED, None)

    def end(self) -> None:
        """Finish. Ranks that have already exited have completed the round as well."""
        if self._pg.size() > 1:
            self._round("the end", [], GOOD, None, may_leave=True)

    def _round(
        self,
        what: str,
        lines: list[str],
        status: int,
        error: BaseException | None,
        may_leave: bool = False,
    ) -> list[int]:
        said = _digest(what, _STEP_BYTES) + _digest("\n".join(lines), _LINES_BYTES)
        came = self._pg.exchange(bytes([status]) + said, what)
        statuses = [rank[0] for rank in came]
        steps = {rank[1 : 1 + _STEP_BYTES] for rank in came}
        differs = len(steps) > 1 or len({rank[1:] for rank in came if rank[0] != LACKS}) > 1
        if came and not differs and _FAILED not in statuses and _ENDED not in statuses:
            return statuses
        left = [rank for rank, message in enumerate(came) if message[0] == _ENDED]
        if status == _ENDED or (may_leave and left and {*statuses} <= {GOOD, _ENDED}):
            self._send(what, lines, error)
            return statuses
        try:
            texts = self._send(what, lines, error)
            raise self._explain(what, came, texts) if error is None else error
        finally:
            del error

    def _send(self, what: str, lines: list[str], error: BaseException | None) -> list[Any]:
        text = "" if error is None else type(error).__name__
        with contextlib.suppress(Exception):  # of an error without a text: the others wait for it
            text += "" if error is None else f": {error}"
        message = json.dumps({"what": what, "lines": lines, "error": text})
        return [json.loads(text) for text in self._pg.exchange_texts(message, what)]

    def _explain(self, what: str, came: list[bytes], texts: list[Any]) -> RankError:
        for rank, (message, text) in enumerate(zip(came, texts, strict=True)):
            if message[0] == _FAILED:
                return RankError(f"rank {rank} failed in {text['what']}: {text['error']}")
            if message[0] == _ENDED:
                return RankError(f"rank {rank} has left ({text['lines'][0]}), while this one came "
                                 f"to {what}")
        for rank, text in enumerate(texts):
            if text["what"] != texts[0]["what"]:
                return RankError(f"ranks do different things: rank 0 came to {texts[0]['what']}, "
                                 f"rank {rank} to {text['what']}")
        return RankError(_first_difference(what, {
            rank: text["lines"] for rank, text in enumerate(texts) if came[rank][0] != LACKS}))
