# SPDX-License-Identifier: Apache-2.0
"""Files that several ranks have written get their names: the shards first, the index last."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

INDEX = "model.safetensors.index.json"


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file or folder is on the device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def listed_files(folder: pathlib.Path) -> set[str]:
    """Names of the files that the folder's index leads to; none that lie elsewhere."""
    try:
        listed = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return {name for name in listed if os.path.basename(name) == name}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def publish(
    folder: pathlib.Path,
    files: Sequence[tuple[str | os.PathLike[str], str]],
    weight_map: Mapping[str, str],
    total_bytes: int,
    *,
    hidden: str,
    durable: bool,
    with_index: bool = True,
) -> None:
    """Rename (temporary, final) files, put the index in place, remove an earlier model's files.

    hidden: the name of the index until it is whole. with_index False: the model is one file, and an
    index of an earlier one goes.
    """
    old = listed_files(folder)
    for temporary, final in files:
        if durable:
            sync(temporary)
        os.replace(temporary, folder / final)
    if with_index:
        begun = folder / hidden
        begun.write_text(json.dumps({"metadata": {"total_size": total_bytes},
                                     "weight_map": dict(weight_map)},
                                    indent=2, sort_keys=True) + "\n")
        if durable:
            sync(begun)
        os.replace(begun, folder / INDEX)
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for name in old - {final for _, final in files}:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    if durable:
        sync(folder)
