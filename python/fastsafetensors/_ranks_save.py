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
from ._core import Writer
from ._publish import SetPlace, publish_together
from ._saving import manifest_options, refuse_address
from ._torch_state import check_tensors, make_rows
from ._types import Path
from .v05.frameworks import get_framework_op

__all__ = ["save_on_ranks"]


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
    manifest: bool | Path = False,
    timeout: float | None = None,
) -> str:
    """Save tensors of all ranks as one sharded model.

    Each rank writes its own tensors to model-RANK-of-RANKS.safetensors, under a hidden name; when
    all have, rank 0 publishes them with their index, as every save of a set does: at every instant
    the folder has the old model or the new one, whoever dies. An error on one rank is one on all.
    All ranks must see the folder.

    Args:
        tensors: {name: tensor} of this rank.
        folder: is made if it is not there.
        group: a torch.distributed group, None: alone.
        metadata: of every file; without it, {"format": "pt"}.
        durable: wait until files and folder are on the device.
        manifest: as in save_file, of the set; rank 0 reads the files of all for it.
        timeout: seconds to wait for other ranks, None: the group's own.

    Returns:
        The path of the index, or of the one file of a rank that is alone.

    Raises:
        ValueError: a name on two ranks.
        RankError: what happened on another rank.
        NotImplementedError: an address (s3://..): several ranks can't write one set there.
    """
    refuse_address(folder)
    pg = get_framework_op("pytorch").get_process_group(group, timeout)
    agreement = Agreement(pg)
    place, rank, ranks = pathlib.Path(folder), pg.rank(), pg.size()
    name = f"model-{rank + 1:05d}-of-{ranks:05d}" if ranks > 1 else "model"
    failure: Exception | None = None
    mine: list[list[Any]] = []
    try:
        check_tensors(tensors, metadata)
        place.mkdir(parents=True, exist_ok=True)
        mine = [[key, tensor.nbytes] for key, tensor in tensors.items()]
    except Exception as error:
        failure = error
    options = manifest_options(manifest)
    agreement.agree("a sharded save", [f"{ranks} files", f"metadata {metadata}",
                                       f"manifest {options}"], failure)
    made = SetPlace(str(place), "model", durable, manifest=options)
    every = [json.loads(text) for text in pg.exchange_texts(json.dumps(mine), "the names")]
    writers: dict[int, Writer] = {}
    try:
        try:
            _check_unique(every)
            rows, owners = make_rows(tensors, far=True)
            writers[rank] = Writer(
                place / f"{name}.safetensors", rows,
                {"format": "pt"} if metadata is None else metadata,
                promise="durable" if durable else "quick", owners=owners, replace_link=True)
        except Exception as error:
            failure = error
        publish_together(pg, agreement, writers, made, failure)
    finally:
        for writer in writers.values():
            writer.close()
    return str(place / ("model.safetensors.index.json" if ranks > 1 else "model.safetensors"))
