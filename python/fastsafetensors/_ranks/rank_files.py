# SPDX-License-Identifier: Apache-2.0
"""Opens a model on the ranks of a group, of which some may lack the files."""

from __future__ import annotations

import json
from typing import Any

from .._loading.verified_open import open_files


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


def open_or_receive(files: Any, pg: Any, failure: Exception | None) -> tuple[Any, list[int]]:
    """(model, ranks that have the files). If only some hosts have them, one rank describes the
    model.

    Raises the error of the missing file if no rank has it, and an earlier failure of this rank.
    """
    model: Any = None
    is_missing = False
    try:
        if failure is not None:
            raise failure
        model = open_files(files)
    except Exception as error:
        is_missing = failure is None and isinstance(error, FileNotFoundError)
        failure = error
    state = 1 if model is not None else 0 if is_missing else 2
    has = [bytes([state])]
    if pg.size() > 1:
        has = pg.exchange(bytes([state]), "which ranks have the files")
    readers = [rank for rank, said in enumerate(has) if said[0] == 1]
    has_failed = any(said[0] == 2 for said in has)
    if failure is not None and (not readers or has_failed):
        raise failure
    if has_failed:  # another rank, which reports it in the next round: nothing is described
        return model, list(range(pg.size()))
    if len(readers) < pg.size():
        rows = []
        if model is not None and pg.rank() == readers[0]:
            rows = [[name, *model.info(at)[:3]] for at, name in enumerate(model.names())]
        texts = pg.exchange_texts(json.dumps(rows), "the tensors of the files")
        if model is None:
            model = DescribedModel(json.loads(texts[readers[0]]))
    return model, readers
