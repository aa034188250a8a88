# SPDX-License-Identifier: Apache-2.0
"""Opens a model on the ranks of a group, of which some may lack the files, for the same load."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .._loading.verified_open import chosen, open_files
from .agreement import GOOD, LACKS, MAPS, Agreement
from .process_group import ProcessGroupBase


class DescribedModel:
    """A model that this rank cannot open, as described by another rank."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self._rows = [(dtype, tuple(shape), size) for _, dtype, shape, size in rows]
        self._names = [name for name, *_ in rows]
        self._indices = {name: index for index, name in enumerate(self._names)}

    def names(self) -> list[str]:
        return self._names

    def find(self, name: str) -> int:
        return self._indices.get(name, -1)

    def info(self, index: int) -> tuple[Any, ...]:
        return self._rows[index]

    def close(self) -> None:
        """Nothing to close."""


class RankLoad(Protocol):
    """A rank's part of a load."""

    def describe(self) -> list[str]:
        """Lines on which all ranks must agree."""
        ...

    def can_map(self) -> bool:
        """Whether this rank could map the files."""
        ...


_Load = TypeVar("_Load", bound=RankLoad)
_T = TypeVar("_T")
_STEP = "the sharded load"


def open_on_ranks(
    files: Any,
    pg: ProcessGroupBase,
    prepare: Callable[[Any, list[int]], _Load],
    failure: Exception | None,
) -> tuple[Any, _Load, bool]:
    """Open a model on the ranks of a group, which then agree on what they load of it.

    Args:
        files: as for open_files(). If some ranks lack them, another rank describes the model;
            within verifying() it is an error.
        pg: the group.
        prepare: makes this rank's part of the load, given the model and the ranks with files.
        failure: an earlier error of this rank, which all ranks raise.

    Returns:
        The model, to be closed; what `prepare` returned; and whether all ranks run on one host and
        can map the files.
    """
    agreement, error = Agreement(pg), failure
    model = load = None
    lines: list[str] = []
    state = GOOD
    if failure is None:
        model, error = _attempt(lambda: open_files(files))
        # Verified bytes do not come from other ranks, which may not have verified them.
        if isinstance(error, FileNotFoundError) and chosen(None) is False:
            state = LACKS
    if model is not None:
        told, error = _attempt(lambda: _prepare(prepare, model, pg))
        load, lines, state = told or (None, lines, state)
    try:
        states = agreement.agree(_STEP, lines, None if state == LACKS else error, state)
        readers = [rank for rank, said in enumerate(states) if said != LACKS]
        if error is not None and not readers:
            raise error
        if len(readers) < pg.size():
            model, load = _receive(model, readers, pg, prepare, agreement)
        assert load is not None
        return model, load, pg.is_on_one_host and all(said == MAPS for said in states)
    except BaseException:
        if model is not None:
            model.close()
        raise
    finally:
        del error  # its traceback refers to this frame


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return a call's result, or its error."""
    try:
        return call(), None
    except Exception as error:  # the other ranks wait to hear of it
        return None, error


def _prepare(
    prepare: Callable[[Any, list[int]], _Load], model: Any, pg: ProcessGroupBase
) -> tuple[_Load, list[str], int]:
    """Return a rank's part of the load if all ranks have the files, its lines, and its state."""
    load = prepare(model, list(range(pg.size())))
    # All ranks must come to the same answer, so one that does not know the hosts says no.
    maps = not pg.has_missed_hosts and load.can_map()
    return load, load.describe(), MAPS if maps else GOOD


def _receive(
    model: Any,
    readers: list[int],
    pg: ProcessGroupBase,
    prepare: Callable[[Any, list[int]], _Load],
    agreement: Agreement,
) -> tuple[Any, _Load]:
    """Send the first reader's description of the model to the ranks that lack it, and agree again.
    """
    rows = []
    if pg.rank() == readers[0]:
        rows = [[name, *model.info(at)[:3]] for at, name in enumerate(model.names())]
    texts = pg.exchange_texts(json.dumps(rows), "the tensors of the files")
    try:
        if model is None:
            model = DescribedModel(json.loads(texts[readers[0]]))
        load = prepare(model, readers)
        lines = load.describe()
    except Exception as error:
        agreement.agree(_STEP, error=error)
        raise
    agreement.agree(_STEP, lines)
    return model, load
