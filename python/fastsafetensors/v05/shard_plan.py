# SPDX-License-Identifier: Apache-2.0
"""Assigns tensors to shards and offsets, for the savers.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._base.errors import printable, shown
from .._core import layout
from .st_types import DTYPE_SIZES, DType

KEY_SHARD_INDEX = "fst.shard.index"
KEY_SHARD_COUNT = "fst.shard.count"
KEY_SHARD_SET = "fst.shard.set"
_RESERVED_KEYS = (KEY_SHARD_INDEX, KEY_SHARD_COUNT, KEY_SHARD_SET)


class ShardSetError(ValueError):
    """Shards that do not belong together, or are in the wrong order."""


@dataclass
class WriteEntry:
    """A tensor to write; source is defined by the caller.

    The shape counts the format's elements. Elements of F4 are half a byte, so its last dimension is
    even.
    """

    name: str
    dtype: DType
    shape: Sequence[int]
    nbytes: int
    source: Any = None


@dataclass
class ShardPlan:
    """A shard to write: path, entries in file order, header bytes, and the offset of each entry.

    offsets: {name: (begin, end)} from the start of the file.
    """

    path: str
    entries: list[WriteEntry]
    header: bytes
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    total_bytes: int = 0
    header_align: int = field(default=8, repr=False)


# Fills the buffers of all entries, each once, and keeps no view of them.
Fill = Callable[[list[tuple[memoryview, WriteEntry]]], None]
ShardMetadata = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


def shard_paths(base: str | os.PathLike[str], num_shards: int) -> list[str]:
    """Return the paths of a sharded model: {base}-00001-of-0000N.safetensors and so on."""
    if num_shards <= 0:
        raise ValueError("num_shards must be positive")
    return [
        f"{os.fspath(base)}-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        for index in range(num_shards)
    ]


def _check_entry(entry: WriteEntry, seen: set[str]) -> None:
    if not isinstance(entry.name, str):
        raise TypeError(f"the name of a tensor must be a str, not {shown(entry.name)}")
    if entry.name in seen or entry.name == "__metadata__":
        raise ValueError(f"duplicate or reserved tensor name: {printable(entry.name)}")
    seen.add(entry.name)
    if entry.dtype is DType.AUTO:
        raise ValueError(f"{printable(entry.name)}: AUTO is not an on-disk dtype")
    if any(size < 0 for size in entry.shape):
        raise ValueError(f"{printable(entry.name)}: shape must be nonnegative: {entry.shape}")
    if entry.dtype is DType.F4 and (not entry.shape or entry.shape[-1] % 2):
        raise ValueError(f"{printable(entry.name)}: F4 requires an even last dimension")
    count = 1
    for size in entry.shape:
        count *= size
    nbytes = count * DTYPE_SIZES[entry.dtype]
    if nbytes != entry.nbytes:
        raise ValueError(
            f"{printable(entry.name)}: {entry.dtype.value}{entry.shape} is {nbytes:g} bytes, "
            f"not {entry.nbytes}"
        )


def _check_metadata(*maps: Mapping[str, str] | None) -> None:
    for entries in maps:
        for key, value in (entries or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(f"__metadata__ entries must be strings: {key!r}")
            if key in _RESERVED_KEYS:
                raise ValueError(f"shard metadata key is reserved: {printable(key)}")


def _balance(entries: Iterable[WriteEntry], count: int) -> list[list[WriteEntry]]:
    """Assign the largest first, to the emptiest shard."""
    import heapq

    shards: list[list[WriteEntry]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        size, index = heapq.heappop(heap)
        shards[index].append(entry)
        heapq.heappush(heap, (size + entry.nbytes, index))
    return shards


def make_rows(
    entries: Sequence[WriteEntry], addresses: Mapping[str, int] | None = None
) -> list[Any]:
    """Rows of entries for the extension. Rows without addresses get their bytes later."""
    return [
        (
            entry.name,
            entry.dtype.value,
            entry.shape,
            None if addresses is None else addresses[entry.name],
            entry.nbytes,
        )
        for entry in entries
    ]


def check_paths(paths: Sequence[str]) -> None:
    """Raise ValueError unless every shard has its own file."""
    if not paths or len({os.path.abspath(path) for path in paths}) < len(paths):
        raise ValueError("paths must be nonempty and unique")


def plan_shards(
    entries: Sequence[WriteEntry],
    paths: Sequence[str],
    *,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadata | None = None,
    header_align: int = 8,
) -> list[ShardPlan]:
    """Assign entries to shards: one plan for each path, including empty ones.

    metadata is for all shards, shard0_metadata for the first, shard_metadata(entries) for each.
    They are last in the header, with index, count and a number unique to the save. The data section
    starts at a multiple of header_align bytes.
    """
    check_paths(paths)
    numbering = Numbering(list(range(len(paths))), len(paths), uuid.uuid4().hex)
    return plan_numbered(
        entries, paths, numbering, metadata, shard0_metadata, shard_metadata, header_align
    )


@dataclass
class Numbering:
    """The planned shards: their numbers, the total number, and the save's number."""

    indices: list[int]
    count: int
    set_id: str


def plan_numbered(
    entries: Sequence[WriteEntry],
    paths: Sequence[str],
    numbering: Numbering,
    metadata: Mapping[str, str] | None,
    shard0_metadata: Mapping[str, str] | None,
    shard_metadata: ShardMetadata | None,
    header_align: int,
) -> list[ShardPlan]:
    """Plan some shards of a model; otherwise like plan_shards."""
    if header_align <= 0 or header_align % 8:
        raise ValueError("header_align must be a positive multiple of 8")
    seen: set[str] = set()
    for entry in entries:
        _check_entry(entry, seen)
    _check_metadata(metadata, shard0_metadata)
    plans = []
    for at, own in enumerate(_balance(entries, len(paths))):
        index = numbering.indices[at]
        extra = dict(shard_metadata(own)) if shard_metadata is not None else {}
        _check_metadata(extra)
        merged = {
            **(metadata or {}),
            **((shard0_metadata or {}) if index == 0 else {}),
            **extra,
            KEY_SHARD_INDEX: str(index),
            KEY_SHARD_COUNT: str(numbering.count),
            KEY_SHARD_SET: numbering.set_id,
        }
        header, begins, total, _ = layout(
            None,
            make_rows(own),
            merged,
            order="given",
            metadata_last=True,
            header_alignment=header_align,
        )
        offsets = {
            entry.name: (begin, begin + entry.nbytes)
            for entry, begin in zip(own, begins, strict=True)
        }
        plans.append(ShardPlan(paths[at], own, header, offsets, total, header_align))
    return plans
