# SPDX-License-Identifier: Apache-2.0
"""Saving a model whose tensors are spread over ranks: a file a rank, written at the same time.

    from fastsafetensors.distributed import save_on_ranks

    save_on_ranks(my_tensors, "folder", dist.group.WORLD)

For pipeline and expert parallelism, where each tensor is whole on one rank. Tensors that are cut
over ranks (DTensors) are saved by fastsafetensors.checkpoint, which writes ranges of common files.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from ._agreement import Agreement
from ._publish import INDEX, publish
from ._torch_state import check_tensors
from .torch import save_file
from .v05.frameworks import get_framework_op

__all__ = ["save_on_ranks"]

_TEMPORARY = ".fastsafetensors-rank-"


def _check_unique(every: list[list[list[Any]]]) -> None:
    """ValueError for a name on two ranks."""
    seen: dict[str, int] = {}
    for rank, rows in enumerate(every):
        for name, _ in rows:
            if name in seen:
                raise ValueError(f"{name!r} is on rank {seen[name]} and on rank {rank}")
            seen[name] = rank


def save_on_ranks(
    tensors: dict[str, Any],
    folder: str | os.PathLike[str],
    group: Any = None,
    metadata: dict[str, str] | None = None,
    *,
    durable: bool = False,
    timeout: float | None = None,
) -> str:
    """Save tensors of all ranks as one sharded model.

    Each rank writes its own tensors to model-RANK-of-RANKS.safetensors, under a hidden name; when
    all have, rank 0 gives the files their names, the index last. An error on one rank is one on
    all, and that or a rank that dies leaves the folder's old model as it was. All ranks must see
    the folder.

    Args:
        tensors: {name: tensor} of this rank.
        folder: is made if it is not there.
        group: a torch.distributed group, None: alone.
        metadata: of every file; without it, {"format": "pt"}.
        durable: wait until files and folder are on the device.
        timeout: seconds to wait for other ranks, None: the group's own.

    Returns:
        The path of the index.

    Raises:
        ValueError: a name on two ranks.
        RankError: what happened on another rank.
    """
    pg = get_framework_op("pytorch").get_process_group(group, timeout)
    agreement = Agreement(pg)
    place, rank, ranks = pathlib.Path(folder), pg.rank(), pg.size()
    temporary = [place / f"{_TEMPORARY}{number}.safetensors" for number in range(ranks)]
    final = [f"model-{number + 1:05d}-of-{ranks:05d}.safetensors" for number in range(ranks)]
    failure: Exception | None = None
    mine: list[list[Any]] = []
    try:
        check_tensors(tensors, metadata)
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(f"{_TEMPORARY}*") if rank == 0 else []:
            left.unlink()  # of a save that was interrupted; nobody has begun to write yet
        mine = [[name, tensor.nbytes] for name, tensor in tensors.items()]
    except Exception as error:
        failure = error
    agreement.agree("a sharded save", [f"{ranks} files", f"metadata {metadata}"], failure)
    every = [json.loads(text) for text in pg.exchange_texts(json.dumps(mine), "the names")]
    try:
        try:
            _check_unique(every)
            save_file(tensors, temporary[rank], {"format": "pt"} if metadata is None else metadata,
                      durable=durable)
        except Exception as error:
            failure = error
        agreement.agree("the end of writing", error=failure)
        try:
            if rank == 0:
                weight_map = {name: final[at] for at, rows in enumerate(every) for name, _ in rows}
                total = sum(size for rows in every for _, size in rows)
                publish(place, list(zip(temporary, final, strict=True)), weight_map, total,
                        hidden=f"{_TEMPORARY}index", durable=durable)
        except Exception as error:
            failure = error
        agreement.agree("the new names", error=failure)
    except BaseException:
        temporary[rank].unlink(missing_ok=True)
        raise
    return str(place / INDEX)
