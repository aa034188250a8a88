# SPDX-License-Identifier: Apache-2.0
"""Sharded saves with the API of fastsafetensors 0.5: balanced shards, filled in place.

    saver = ParallelSaver(num_shards=4)
    paths = saver.save(model.state_dict(), "checkpoint/model", metadata={"format": "pt"})

Shards are named ``{base}-00001-of-00004.safetensors`` and published atomically: at every instant
the complete old or new model is there. While publishing, an index is next to them; an existing
index is kept up to date.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._base.dtypes import NAMES
from .._base.errors import printable
from .._base.options import check_count, check_switch, check_timeout
from .._core import Writer
from .._ranks.agreement import Agreement, RankError
from .._ranks.process_group import ProcessGroupBase, SingleProcessGroup
from .._ranks.publish import SetTarget, outcome_known, publish_together
from .frameworks import get_framework_op
from .shard_plan import (
    KEY_SHARD_COUNT,
    KEY_SHARD_INDEX,
    KEY_SHARD_SET,
    Fill,
    Numbering,
    ShardMetadata,
    ShardPlan,
    ShardSetError,
    WriteEntry,
    check_paths,
    make_rows,
    plan_numbered,
    plan_shards,
    shard_paths,
)
from .st_types import DTYPE_SIZES, DType

__all__ = [
    "DTYPE_SIZES",
    "KEY_SHARD_COUNT",
    "KEY_SHARD_INDEX",
    "KEY_SHARD_SET",
    "ParallelSaver",
    "ShardPlan",
    "ShardSetError",
    "WriteEntry",
    "per_entry_fill",
    "plain_entry",
    "plan_shards",
    "save_sharded",
    "shard_paths",
    "tensor_fill",
    "validate_shard_set",
    "write_shards",
]

def _check_space(plans: Sequence[ShardPlan], min_free_bytes: int) -> None:
    """Check before anything is created."""
    needed: dict[str, int] = {}
    for plan in plans:
        folder = os.path.dirname(plan.path) or "."
        needed[folder] = needed.get(folder, 0) + plan.total_bytes
    for folder, size in needed.items():
        there = folder
        while not os.path.isdir(there):
            there = os.path.dirname(there) or "."
        free = shutil.disk_usage(there).free
        if size + min_free_bytes > free:
            raise OSError(
                f"not enough space in {printable(folder)}: {(size + min_free_bytes) / 2**30:.1f} "
                f"GiB needed, {free / 2**30:.1f} GiB free"
            )


def _open_writer(plan: ShardPlan, addresses: Mapping[str, int] | None, fsync: bool) -> Writer:
    metadata = json.loads(plan.header[8:]).get("__metadata__")
    os.makedirs(os.path.dirname(plan.path) or ".", exist_ok=True)
    return Writer(
        plan.path,
        make_rows(plan.entries, addresses),
        metadata,
        promise="durable" if fsync else "quick",
        order="given",
        metadata_last=True,
        header_alignment=plan.header_align,
        replace_link=True,
    )


class _Buffers:
    """The files' mapped memory as buffers for a fill, with a check that it releases them."""

    def __init__(self, plans: Sequence[ShardPlan], writers: Sequence[Writer]) -> None:
        rows = [
            (writer.map(index), entry)
            for plan, writer in zip(plans, writers, strict=True)
            for index, entry in enumerate(plan.entries)
        ]
        rows.sort(key=lambda row: -row[1].nbytes)
        self._entries = [entry for _, entry in rows]
        self._arrays = [(ctypes.c_char * entry.nbytes).from_address(at) for at, entry in rows]

    def run(self, fill: Fill) -> None:
        """Call the fill with all buffers."""
        views = [memoryview(array).cast("B") for array in self._arrays]
        try:
            fill(list(zip(views, self._entries, strict=True)))
        finally:
            for view in views:
                with contextlib.suppress(BufferError):
                    view.release()

    def find_kept(self) -> WriteEntry | None:
        """Return an entry whose buffer is still referenced."""
        alone = [(ctypes.c_char * 1)()]
        for index, entry in enumerate(self._entries):
            # More references than an array has that only a list holds.
            if sys.getrefcount(self._arrays[index]) > sys.getrefcount(alone[0]):
                return entry
        return None


def _fill_in_place(plans: Sequence[ShardPlan], writers: list[Writer], fill: Fill) -> None:
    """Let the caller fill the files' mapped memory."""
    buffers = _Buffers(plans, writers)
    try:
        buffers.run(fill)
    finally:
        kept = buffers.find_kept()
        if kept is not None:
            # The memory must stay mapped while it can be written; its files are never published.
            _held.append(list(writers))
            writers.clear()
    if kept is not None:
        raise ValueError(f"fill kept a view of {printable(kept.name)}. It must release all buffers")


# Writers whose memory a fill has kept, so their mappings must stay.
_held: list[list[Writer]] = []


def _set_target(paths: Sequence[str], durable: bool) -> SetTarget | None:
    """The target if the paths form a sharded model; else None."""
    base = os.fspath(paths[0]).removesuffix(f"-00001-of-{len(paths):05d}.safetensors")
    folder, stem = os.path.split(base)
    if len(paths) < 2 or stem[:1] in ("", ".") or list(paths) != shard_paths(base, len(paths)):
        return None
    return SetTarget(folder or ".", stem, durable, names_only=True)


def _publisher(
    pg: ProcessGroupBase, agreement: Agreement, every: Sequence[str], numbers: list[int],
    durable: bool,
) -> Callable[[list[Writer], Exception | None], None]:
    """Return a function that writes this rank's files, which are `numbers` of all files."""
    place = _set_target(every, durable)

    def publish(writers: list[Writer], error: Exception | None) -> None:
        if place is not None:
            own = dict(zip(numbers, writers, strict=False))  # empty after an error
            publish_together(pg, agreement, own, place, error)
            return
        # Files with other names do not form a model, so each is published separately.
        agreement.agree("the end of writing", error=error)
        try:
            for writer in writers:
                writer.commit()
        except Exception as failure:
            error = failure
        pg.wait_for_outcome()
        with outcome_known(pg, "New files may be in place"):
            agreement.agree("the publication", error=error)

    return publish


def _write(
    plans: Sequence[ShardPlan],
    fill: Fill | None,
    addresses: Mapping[str, int] | None,
    min_free_bytes: int,
    fsync: bool,
    threads: int,
    publish: Callable[[list[Writer], Exception | None], None],
) -> list[str]:
    """publish: called when everything is written, or with the error, to publish the files."""
    writers: list[Writer] = []
    try:
        try:
            _check_space(plans, min_free_bytes)
            for plan in plans:
                writers.append(_open_writer(plan, addresses, fsync))
            if fill is not None:
                _fill_in_place(plans, writers, fill)
            with ThreadPoolExecutor(max_workers=max(1, min(threads, len(writers)))) as pool:
                list(pool.map(lambda writer: writer.finish(), writers))
        except Exception as error:
            publish([], error)
            raise
        publish(writers, None)
    finally:
        for writer in writers:
            writer.close()
    return [plan.path for plan in plans]


def _check_write_options(min_free_bytes: int, fsync: bool) -> None:
    check_count("min_free_bytes", min_free_bytes, high=2**63 - 1)
    check_switch("fsync", fsync)


def write_shards(
    plans: Sequence[ShardPlan], fill: Fill, *, min_free_bytes: int = 0, fsync: bool = False
) -> list[str]:
    """Write planned shards; return their paths.

    fill([(memoryview, entry), ...]) is called once, largest entry first. It must write every buffer
    and keep no view; its exception is raised, and no file is left behind. min_free_bytes: free disk
    space to leave. fsync: wait until the bytes are on the device.
    """
    _check_write_options(min_free_bytes, fsync)
    pg = SingleProcessGroup()
    every = [plan.path for plan in plans]
    check_paths(every)
    publish = _publisher(pg, Agreement(pg), every, list(range(len(plans))), fsync)
    return _write(plans, fill, None, min_free_bytes, fsync, 8, publish)


def per_entry_fill(
    fn: Callable[[memoryview, WriteEntry], None], num_threads: int = 8
) -> Fill:
    """Create a fill from a function of one entry, run by several threads."""
    if num_threads <= 0:
        raise ValueError("num_threads must be positive")

    def fill(items: list[tuple[memoryview, WriteEntry]]) -> None:
        with ThreadPoolExecutor(max_workers=num_threads) as pool:
            for done in [pool.submit(fn, view, entry) for view, entry in items]:
                done.result()

    return fill


def _torch_name(framework: str) -> None:
    if framework not in ("pytorch", "pt", "torch", "paddle"):
        raise ValueError(f"Unknown framework name: {printable(framework)}")


def _torch_view(view: memoryview) -> Any:
    from .._torch.torch_installed import torch

    return torch.frombuffer(view, dtype=torch.uint8)


def _copy_source(view: memoryview, entry: WriteEntry, framework: str) -> None:
    if entry.nbytes == 0:
        return
    if framework == "paddle":
        view[:] = entry.source.numpy().tobytes()
        return
    from .._torch.torch_installed import torch
    from .._torch.torch_state import plain

    _torch_view(view).copy_(plain(entry.source).reshape(-1).view(torch.uint8))


def tensor_fill(num_threads: int = 8, *, framework: str = "pytorch") -> Fill:
    """Create a fill that copies each entry's source, a framework tensor."""
    _torch_name(framework)
    return per_entry_fill(
        lambda view, entry: _copy_source(view, entry, framework), num_threads
    )


def _paddle_dtype(tensor: Any) -> DType:
    name = str(tensor.dtype).rpartition(".")[2]  # its names are numpy's
    if name not in NAMES:
        raise ValueError(f"the format has no dtype {tensor.dtype}")
    return DType(NAMES[name])


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """Describe a tensor unchanged. Only dense ones (see fastsafetensors.torch.save_file)."""
    _torch_name(framework)
    if framework == "paddle":
        array = tensor.numpy()
        return WriteEntry(name, _paddle_dtype(tensor), list(array.shape), array.nbytes, tensor)
    from .._torch.torch_state import check_dense, dtype_name

    check_dense(name, tensor)
    dtype = DType(dtype_name(tensor.dtype))
    shape = list(tensor.shape)
    if dtype is DType.F4 and shape:
        shape[-1] *= 2
    return WriteEntry(name, dtype, shape, tensor.numel() * tensor.element_size(), tensor)


def save_sharded(
    entries: Sequence[WriteEntry],
    base: str | os.PathLike[str],
    *,
    num_shards: int = 16,
    fill: Fill | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadata | None = None,
    header_align: int = 8,
) -> list[str]:
    """Plan and write entries as num_shards files; see plan_shards and write_shards."""
    saver = ParallelSaver(
        num_shards=num_shards,
        framework=framework,
        shard_metadata=shard_metadata,
        fill=fill,
        min_free_bytes=min_free_bytes,
        fsync=fsync,
    )
    return saver.save_entries(
        entries,
        base,
        metadata=metadata,
        shard0_metadata=shard0_metadata,
        header_align=header_align,
    )


class ParallelSaver:
    """Save state dicts as a fixed number of shards of similar size, written in parallel.

    For programs written for fastsafetensors 0.5. New ones use save_on_ranks().

    num_threads: number of shards (or entries, with a fill) processed in parallel.
    shard_metadata, fill, min_free_bytes, fsync: as in plan_shards and write_shards.
    group: a torch.distributed group whose ranks save together: each passes its own tensors and
    writes the shards RANK, RANK + ranks, ... Files are published when all ranks have
    finished, and an error on one rank is an error on all.
    timeout: seconds that a save waits for other ranks, in all; None: the group's own for each wait.
    As in save_on_ranks(), the publication does not count.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: ShardMetadata | None = None,
        fill: Fill | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
        group: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Check and store the settings, without writing."""
        if num_shards <= 0:
            raise ValueError("num_shards must be positive")
        if num_threads <= 0:
            raise ValueError("num_threads must be positive")
        _check_write_options(min_free_bytes, fsync)
        check_timeout(timeout)
        _torch_name(framework)
        self.num_shards = num_shards
        self.framework = framework
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
        self.fill = fill
        self.min_free_bytes = min_free_bytes
        self.fsync = fsync
        self._pg: ProcessGroupBase = SingleProcessGroup()
        if group is not None:
            self._pg = get_framework_op(framework).get_process_group(group, timeout)
        self._agreement = Agreement(self._pg)
        if num_shards < self._pg.size():
            raise ValueError(f"num_shards must be at least the {self._pg.size()} ranks")

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Save {name: tensor}; return the paths. Shared and unpacked tensors are copied."""
        self._pg.limit_waits()
        try:
            entries = [plain_entry(name, tensor, framework=self.framework)
                       for name, tensor in tensors.items()]
        except Exception as error:
            self._exchange_names([], error)
            raise
        return self.save_entries(
            entries,
            base,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            header_align=header_align,
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Save entries: with the fill, or else from their sources."""
        self._pg.limit_waits()
        rank, ranks = self._pg.rank(), self._pg.size()
        fill, addresses = self.fill, None
        owners: list[Any] = []
        try:
            every = shard_paths(base, self.num_shards)
            names = [str(entry.name) for entry in entries]
            if fill is None and self.framework != "paddle":
                addresses = _source_addresses(entries, owners)
            elif fill is None:
                fill = tensor_fill(self.num_threads, framework=self.framework)
        except Exception as error:
            self._exchange_names([], error)
            raise
        try:
            numbering = self._number(names, rank, ranks)
            plans = plan_numbered(
                entries, [every[index] for index in numbering.indices], numbering, metadata,
                shard0_metadata, self.shard_metadata, header_align,
            )
        except RankError:
            raise
        except Exception as error:
            self._agreement.agree("a parallel save", error=error)
            raise
        self._agreement.agree(
            "a parallel save",  # hosts may see the folder under other paths
            [f"{self.num_shards} shards called {os.path.basename(os.fspath(base))!r}",
             f"metadata {metadata}, {shard0_metadata}"],
        )
        _write(
            plans, fill, addresses, self.min_free_bytes, self.fsync, self.num_threads,
            _publisher(self._pg, self._agreement, every, numbering.indices, self.fsync),
        )
        return every

    def _exchange_names(self, names: list[str], error: Exception | None) -> list[Any]:
        """Exchange with all ranks what each one saves, or its error."""
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        own = json.dumps([uuid.uuid4().hex, names, failure])
        return [json.loads(text) for text in self._pg.exchange_texts(own, "the names to save")]

    def _number(self, names: list[str], rank: int, ranks: int) -> Numbering:
        """Return this rank's shards. ValueError for a name on two ranks."""
        said = self._exchange_names(names, None)
        for other, (_, _, failure) in enumerate(said):
            if failure:
                raise RankError(f"rank {other} failed in a parallel save: {failure}")
        seen: dict[str, int] = {}
        for other, (_, names, _) in enumerate(said):
            for name in names:
                if seen.setdefault(name, other) != other:
                    raise ValueError(
                        f"duplicate tensor {name!r} on ranks {seen[name]} and {other}")
        return Numbering(list(range(rank, self.num_shards, ranks)), self.num_shards, said[0][0])


def _source_addresses(entries: Sequence[WriteEntry], owners: list[Any]) -> dict[str, int]:
    """Addresses of the bytes of torch sources; owners keeps them alive."""
    from .._torch.tensor_memory import address_of
    from .._torch.torch_state import plain

    addresses = {}
    for entry in entries:
        if entry.source is None:
            raise ValueError(f"{printable(entry.name)}: an entry without a source needs a fill")
        tensor = plain(entry.source)
        if tensor.nbytes != entry.nbytes:
            raise ValueError(f"{printable(entry.name)}: the source has {tensor.nbytes} bytes")
        owners.append(tensor)
        addresses[entry.name] = address_of(entry.name, tensor)
    return addresses


def validate_shard_set(metas: Sequence[Any]) -> None:
    """Raise ShardSetError unless these are all shards of one save, in order.

    metas: SafeTensorsMetadata of each shard, in the order of use.
    """
    if not metas:
        raise ShardSetError("no shards")
    sets = []
    for index, meta in enumerate(metas):
        found = meta.metadata or {}
        try:
            own, count = int(found[KEY_SHARD_INDEX]), int(found[KEY_SHARD_COUNT])
            sets.append(found[KEY_SHARD_SET])
        except (KeyError, ValueError, TypeError):
            raise ShardSetError(f"{printable(meta.src)}: not a shard of a written set") from None
        if own != index or count != len(metas):
            raise ShardSetError(
                f"{printable(meta.src)}: shard {own} of {count}, expected {index} of {len(metas)}"
            )
    if len(set(sets)) > 1:
        raise ShardSetError(f"shards were written separately: {sorted(set(sets))}")
