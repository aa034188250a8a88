# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint and the parts of tensors in them, for fastsafetensors.checkpoint.

torch's HuggingFaceStorageWriter(save_distributed=True) writes one file per rank. A tensor
distributed over ranks is in several files under the same name, and each file's metadata has the
offsets of its part.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from .._base.errors import printable
from .._core import Model, check_save, error_class
from .._loading.verified_open import open_files

OFFSETS_KEY = "DCP_SHARDING_INFO"


class StoredPart(NamedTuple):
    """A tensor of a file: a tensor of the checkpoint, or a part of one."""

    model: Model
    number: int
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _open(path: Any) -> list[Model]:
    try:
        return [open_files(path)]
    except error_class() as error:
        if getattr(error, "tag", "") != "DuplicateTensor" or not os.path.isdir(path):
            raise
        folder, models = os.fsdecode(path), list[Model]()
        try:
            for name in sorted(os.listdir(folder)):
                if name.endswith(".safetensors") and not name.startswith("."):
                    models.append(open_files(os.path.join(folder, name)))
            check_save(models)
            if not any(OFFSETS_KEY in (model.metadata(0) or {}) for model in models):
                raise error  # variants of one model, not parts of a tensor
        except BaseException:
            for model in models:
                model.close()
            raise
        return models


def _offsets_of(model: Model, name: str, index: int) -> tuple[int, ...]:
    """The offset of a file's tensor in the checkpoint's tensor."""
    _, shape, _, file, _ = model.info(index)
    text = (model.metadata(file) or {}).get(OFFSETS_KEY)
    if text is None:
        return (0,) * len(shape)
    offsets: Any = None
    try:
        offsets = json.loads(text)[name]["saved_offsets"]
        good = len(offsets) == len(shape) and all(
            type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
    except (KeyError, TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"{printable(model.file(file)[0])}: {OFFSETS_KEY} in the metadata has "
                         f"no offsets for {printable(name)}, whose shape is {list(shape)}")
    return tuple(offsets)


def _are_disjoint(parts: list[StoredPart]) -> bool:
    """Whether no element is in two parts. The parts are not empty and have dimensions."""
    along = max(range(len(parts[0].shape)), key=lambda d: len({part.offsets[d] for part in parts}))
    rows = sorted(parts, key=lambda part: part.offsets[along])
    for at, one in enumerate(rows):
        end = one.offsets[along] + one.shape[along]
        for after in range(at + 1, len(rows)):
            other = rows[after]
            if other.offsets[along] >= end:
                break
            if all(o < b + n and b < o + m for b, n, o, m in zip(
                    one.offsets, one.shape, other.offsets, other.shape, strict=True)):
                return False
    return True


def _check(name: str, parts: list[StoredPart]) -> None:
    """Refuse parts that do not form one tensor: different dtypes, gaps or overlaps."""
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        raise ValueError(f"{printable(name)}: its parts have different dtypes or ranks")
    size = size_of(parts)
    filled = [part for part in parts if prod(part.shape) > 0]
    # Parts that are disjoint and together as large as the tensor have no gaps.
    if prod(size) != sum(prod(part.shape) for part in filled) or (
            len(filled) > 1 and not _are_disjoint(filled)):
        raise ValueError(f"{printable(name)}: its {len(parts)} parts do not make up a tensor of "
                         f"{list(size)}: is a file missing?")


def size_of(parts: list[StoredPart]) -> tuple[int, ...]:
    """Return the shape of the tensor that the parts form."""
    return tuple(map(max, zip(*(
        tuple(offset + size for offset, size in zip(part.offsets, part.shape, strict=True))
        for part in parts), strict=True)))


@contextlib.contextmanager
def open_parts(path: Any) -> Iterator[dict[str, list[StoredPart]]]:
    """Open a checkpoint as a context manager: {name: its parts}, in file order.

    Raises:
        ValueError: parts that do not match, or invalid offsets.
        SafetensorError, OSError: as when opening a model.
    """
    models = _open(path)
    try:
        found: dict[str, list[StoredPart]] = {}
        for model in models:
            for index, name in enumerate(model.names()):
                dtype, shape, *_ = model.info(index)
                offsets = _offsets_of(model, name, index)
                found.setdefault(name, []).append(StoredPart(model, index, dtype, offsets, shape))
        for name, parts in found.items():
            _check(name, parts)
        yield found
    finally:
        for model in models:
            model.close()
