# SPDX-License-Identifier: Apache-2.0
"""Saves a model whose tensors are distributed over ranks: one file per rank, in parallel.

    from fastsafetensors.distributed import save_on_ranks

    save_on_ranks(my_tensors, "folder", dist.group.WORLD)

For pipeline and expert parallelism, where each tensor is complete on one rank. For tensors divided
over ranks (DTensors) use fastsafetensors.checkpoint, which writes parts of common files.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any, NamedTuple

from .._base.argument_types import Path
from .._base.options import check_no_empty_path, check_switch, check_timeout
from .._base.paths import absolute_path
from .._core import Writer
from .._saving.save_options import (
    WITH_WHOLE_BLOCKS,
    fixed_manifest,
    manifest_options,
    promise_word,
    refuse_address,
)
from .._torch.torch_state import check_tensors, make_rows
from .agreement import Agreement
from .publish import SetTarget, publish_together
from .shard_rows import stem_of
from .torch_group import open_group

__all__ = ["save_on_ranks"]


def check_unique(every: list[list[list[Any]]]) -> None:
    """ValueError for a name that two ranks have."""
    seen: dict[str, int] = {}
    for rank, rows in enumerate(every):
        for name, _ in rows:
            if name in seen:
                raise ValueError(f"duplicate tensor {name!r} on ranks {seen[name]} and {rank}")
            seen[name] = rank


def missing_count(folder: pathlib.Path) -> int:
    """Count the folders to make: the folder itself, and parents."""
    return sum(not path.exists() for path in (folder, *folder.parents))


def remove_folders(folder: pathlib.Path, count: int) -> None:
    """Remove folders that the save has made, if they are empty and another rank has not."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no system has such a name
        for path in (folder, *folder.parents)[:count]:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()


class _Request(NamedTuple):
    """The checked arguments of a save. Paths are absolute as of the call."""

    folder: pathlib.Path
    metadata: dict[str, str] | None
    durable: bool
    manifest: dict[str, Any]  # manifest_options() as given, on which all ranks must agree
    fixed_manifest: dict[str, Any]  # the same with an absolute path
    timeout: float | None
    stem: str = "model"  # of the files' names


def make_request(
    folder: str | os.PathLike[str],
    metadata: dict[str, str] | None,
    durable: bool,
    manifest: bool | Path,
    timeout: float | None,
) -> _Request:
    """Check the arguments of a save."""
    check_no_empty_path("folder", folder)
    check_switch("durable", durable)
    refuse_address(folder)
    options = manifest_options(manifest)
    return _Request(absolute_path(folder), metadata, durable, options, fixed_manifest(options),
                    check_timeout(timeout))


def save_on_ranks(
    tensors: dict[str, Any],
    folder: str | os.PathLike[str],
    group: Any = None,
    metadata: dict[str, str] | None = None,
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    durable: bool = False,
    manifest: bool | Path = False,
    timeout: float | None = None,
) -> str:
    """Save tensors of all ranks as one sharded model.

    Each rank writes its own tensors to model-RANK-of-RANKS.safetensors under a temporary name. When
    all are finished, rank 0 publishes them with an index, atomically like every sharded save: at
    every instant the folder has the old or the new model, even if a rank is killed. An error on one
    rank is an error on all. All ranks must see the folder.

    Args:
        tensors: {name: tensor} of this rank.
        folder: created if missing; a failed save removes what it created.
        group: a torch.distributed group; None: a single process.
        metadata: of every file; {"format": "pt"} by default.
        filename_pattern: for file names, as in save_safetensors_sharded; {suffix} is the number of
            the rank.
        durable: wait until files and folder are on the device.
        manifest: as in save_file, for the whole model; rank 0 reads all files for it.
        timeout: seconds to wait for other ranks, in all; None: the group's timeout for each wait.
            The publication does not count: the ranks wait for rank 0 as long as the group allows,
            and rank 0 has the timeout once more to hear of the others. Where a wait fails then, the
            RankError says that the new model is, or may be, in place.

    Returns:
        The path of the index, or of the only file of a single process.

    Raises:
        ValueError: two ranks have the same name.
        RankError: an error on another rank.
        NotImplementedError: a URL (s3://...), which several ranks cannot save to.
        TypeError: an argument of another type.
    """
    request, failure = None, None
    try:
        request = make_request(folder, metadata, durable, manifest, timeout)._replace(
            stem=stem_of(filename_pattern))
    except Exception as error:  # the other ranks wait to hear of it
        failure = error
    name = _save(tensors, request, group, failure)
    return str(pathlib.Path(os.fsdecode(folder)) / name)


def _save(
    tensors: dict[str, Any],
    request: _Request | None,
    group: Any,
    failure: Exception | None = None,
) -> str:
    """Run a save; return the name of the index or of the only file.

    failure: an earlier error of this rank, which all ranks raise. Only then may request be None.
    """
    pg = open_group(group, request and request.timeout)
    pg.limit_waits()
    agreement = Agreement(pg)
    rank, ranks = pg.rank(), pg.size()
    stem = "model" if request is None else request.stem
    name = f"{stem}-{rank + 1:05d}-of-{ranks:05d}" if ranks > 1 else stem
    mine: list[list[Any]] = []
    lines: list[str] = []
    missing = 0
    try:
        if failure is not None:
            raise failure
        assert request is not None
        check_tensors(tensors, request.metadata)
        missing = missing_count(request.folder)
        mine = [[key, tensor.nbytes] for key, tensor in tensors.items()]
        lines = [f"{ranks} files", f"metadata {request.metadata}", f"manifest {request.manifest}",
                 f"names {stem}", f"durable {request.durable}"]
    except Exception as error:
        failure = error
    agreement.agree("a sharded save", lines, failure)
    assert request is not None
    made = SetTarget(str(request.folder), stem, request.durable,
                     manifest=request.fixed_manifest)
    every = [json.loads(text) for text in
             pg.exchange_texts(json.dumps([mine, missing]), "the names")]
    # All ranks have looked before any makes a folder, so what one of them has seen was there.
    missing = min(count for _, count in every)
    writers: dict[int, Writer] = {}
    is_saved = False
    try:
        try:
            check_unique([rows for rows, _ in every])
            request.folder.mkdir(parents=True, exist_ok=True)
            rows, owners = make_rows(tensors, on_device=True)
            writers[rank] = Writer(
                request.folder / f"{name}.safetensors", rows,
                {"format": "pt"} if request.metadata is None else request.metadata,
                promise=promise_word(request.durable), owners=owners, replace_link=True,
                **WITH_WHOLE_BLOCKS)
        except Exception as error:
            failure = error
        publish_together(pg, agreement, writers, made, failure)
        is_saved = True
    finally:
        for writer in writers.values():
            writer.close()
        # The last rank that closes its file finds the folder empty.
        if not is_saved:
            remove_folders(request.folder, missing)
    return f"{stem}.safetensors{'.index.json' if ranks > 1 else ''}"
