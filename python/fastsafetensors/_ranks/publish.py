# SPDX-License-Identifier: Apache-2.0
"""Publishes a sharded model written by several ranks, atomically, from one of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._base.errors import serialization_error
from .._core import Writer, publish_set
from .agreement import Agreement, RankError


@dataclass(frozen=True)
class SetTarget:
    """The target of a sharded model: STEM-00001-of-0000N.safetensors in a folder."""

    folder: str
    stem: str
    durable: bool
    names_only: bool = False
    manifest: Mapping[str, Any] = field(default_factory=dict)  # of manifest_options()
    # What rank 0 does once the model is in place, before the others hear of it. Raises nothing.
    follow: Callable[[], None] | None = None


def _hand_over(writers: Mapping[int, Writer]) -> dict[int, str]:
    """{number of the file: its temporary name}, completely written."""
    try:
        return {number: os.path.basename(writer.hand_over()[0])
                for number, writer in writers.items()}
    except OSError as error:
        raise serialization_error(error) from error


@contextlib.contextmanager
def outcome_known(pg: Any, state: str) -> Iterator[None]:
    """Add to the error of a failed wait which model is in the folder."""
    try:
        yield
    except RankError as error:
        if not pg.has_lost_ranks:
            raise
        raise RankError(f"{error}. {state}") from error


_MAY_BE_NEW = "The new model may be in place: rank 0 publishes it when all ranks have written"
_IS_NEW = "The new model is in place"


def publish_together(
    pg: Any,
    agreement: Agreement,
    writers: Mapping[int, Writer],
    place: SetTarget,
    error: Exception | None = None,
) -> None:
    """Write the files of all ranks, {number: writer} on each; then rank 0 publishes them.

    The writers must stay open until this returns; closing one deletes its file, if it was not
    published. error: an earlier failure on this rank.
    """
    hidden: dict[int, str] = {}
    if error is None:
        try:
            hidden = _hand_over(writers)
        except Exception as failure:
            error = failure
    try:
        publish_hidden(pg, agreement, hidden, place, error)
    except Exception:
        # If a rank is lost, the model may be in place, or about to be.
        if not pg.has_lost_ranks:
            for name in hidden.values():
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(place.folder, name))
        raise


def publish_hidden(
    pg: Any,
    agreement: Agreement,
    hidden: Mapping[int, str],
    place: SetTarget,
    error: Exception | None = None,
) -> None:
    """Let rank 0 publish the files of all ranks, {number: temporary name} on each.

    error: an earlier failure on this rank. Until rank 0 publishes, an error on any rank is an error
    on all, and the old model is intact. Then the others wait for its outcome as long as the group
    allows: a time limit of theirs would make an error of a model that is in place.
    """
    agreement.agree("the end of writing", error=error)
    every: dict[str, str] = {}
    # Only rank 0 knows that it has not published: it does so after this.
    is_publisher = pg.rank() == 0
    with contextlib.nullcontext() if is_publisher else outcome_known(pg, _MAY_BE_NEW):
        for text in pg.exchange_texts(json.dumps(hidden), "the names of the written files"):
            every.update(json.loads(text))
    if is_publisher:
        try:
            paths = [os.path.join(place.folder, every[str(at)]) for at in range(len(every))]
            publish_set(place.folder, paths, place.stem, place.durable, place.names_only,
                        place.manifest.get("manifest"), place.manifest.get("digest", "xxh3-128"))
            if place.follow is not None:
                place.follow()
        except Exception as failure:
            error = failure
    pg.wait_for_outcome()
    if error is not None:
        agreement.agree("the publication", error=error)
    with outcome_known(pg, _IS_NEW if is_publisher else _MAY_BE_NEW):
        agreement.agree("the publication")
