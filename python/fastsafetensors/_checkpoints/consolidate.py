# SPDX-License-Identifier: Apache-2.0
"""Files that several ranks have written become an ordinary Hugging Face folder."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._base.errors import printable, refuse, shown
from .._base.options import (
    check_names,
    check_no_empty_path,
    check_save_options,
    check_switch,
    parse_size,
)
from .._base.regular_files import open_regular
from .._core import Model, Writer, assign_shards
from .._loading.load import OpenLoad
from .._saving.save_options import WITH_WHOLE_BLOCKS, manifest_options, refuse_address
from .._torch.torch_installed import torch
from .._torch.torch_state import torch_dtype, torch_shape
from .._torch.torch_tensors import wrap, wrap_bytes
from .checkpoint_folders import STEM
from .checkpoint_shards import OFFSETS_KEY, StoredPart, open_parts, size_of
from .state_codec import DESCRIPTION, described_tensors

# The bytes that the kernel copies per call, and the buffer size if it cannot copy.
_KERNEL_BYTES = 64 << 20
_MEMORY_BYTES = 8 << 20
_BLOCK_BYTES = 4096  # of a file system: both places of shared blocks are multiples
# The names of a rank's tensors in a checkpoint of several ranks begin so.
_RANK = re.compile(r"rank-[0-9]+\.")
# The files of a checkpoint of CheckpointManager.
_CHECKPOINT = re.compile(re.escape(STEM) + r"(-[0-9]+-of-[0-9]+\.safetensors|\.safetensors"
                         r"(\.index\.json)?)")
# Why another method may work where copy_file_range() failed.
_REFUSALS = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EBADF}


def copy_range(source: int, target: int, size: int, begin: int, place: int) -> None:
    """Copy bytes between files: shared blocks, else by the kernel, else through a little memory."""
    in_kernel = True
    while size > 0:
        done = 0
        # The first call ends at a block, so that the next ones can share blocks.
        most = -begin % _BLOCK_BYTES or _KERNEL_BYTES
        if in_kernel:
            try:
                done = os.copy_file_range(source, target, min(size, most), begin, place)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            in_kernel = done > 0
        if not in_kernel:
            data = os.pread(source, min(size, _MEMORY_BYTES), begin)
            if not data:
                raise OSError(errno.EIO, "a file became shorter while it was copied")
            done = os.pwrite(target, data, place)
        size, begin, place = size - done, begin + done, place + done


class _Target:
    """A file that is being made; its header is there."""

    def __init__(self, path: str) -> None:
        self.model = Model(path)
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._mapping: mmap.mmap | None = None

    def _bytes(self, begin: int, count: int) -> Any:
        """Bytes of the file as a tensor, which is memory of the file itself."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self.fd, 0)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=begin)

    def view(self, name: str) -> Any:
        """A tensor of the file, as memory of the file itself."""
        dtype, shape, size, _, begin = self.model.info(self.model.find(name))
        known = torch_dtype(dtype)
        if known is None:
            raise ValueError(f"{printable(name)}: this torch has no dtype for {dtype}")
        return self._bytes(begin, size).view(known).view(torch_shape(dtype, shape))

    def put(self, data: Any, place: int) -> None:
        """Write a tensor of bytes to a place."""
        self._bytes(place, len(data)).copy_(data)

    def finish(self, durable: bool) -> None:
        """Bring what was written to the device, if so promised."""
        if self._mapping is not None:
            self._mapping.flush()
        if durable:
            os.fsync(self.fd)

    def close(self) -> None:
        """Close the file."""
        self.model.close()
        os.close(self.fd)


def _is_one_range(part: StoredPart, size: tuple[int, ...]) -> bool:
    """Whether a part is one range of the tensor's bytes: all of it, or rows."""
    return all(part.shape[d] == size[d] for d in range(1, len(size)))


def _rows_at_a_time(shape: tuple[int, ...], size_bytes: int, memory: int) -> int:
    """How many rows fit the memory: a multiple of 4 if rows of 4- or 6-bit floats end in a byte."""
    least = 4 if size_bytes % shape[0] else 1
    return max(1, memory // max(1, size_bytes // shape[0]) // least) * least


@contextlib.contextmanager
def _existing(path: str) -> Iterator[None]:
    """A file of an open model that is gone was replaced by a save."""
    try:
        yield
    except FileNotFoundError:
        refuse(f"{path}: a save replaced the file while it was copied", "FileChanged", path)


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _identities(stored: dict[str, list[StoredPart]]) -> dict[str, tuple[int, ...]]:
    """Return what the paths of the models' files lead to now."""
    models = {part.model for parts in stored.values() for part in parts}
    paths = {model.file(index)[0] for model in models for index in range(model.file_count)}
    found = {}
    for path in paths:
        if "://" not in path:
            with _existing(path):
                found[path] = _identity(os.stat(path))
    return found


@contextlib.contextmanager
def _open_steady(source: Any) -> Iterator[tuple[dict[str, list[StoredPart]], Any]]:
    """Open the parts and yield them with the identities of their files.

    They are opened twice: if the paths lead to the same files after both, then the second models
    have just these files open.
    """
    with open_parts(source) as stored:
        before = _identities(stored)
    with open_parts(source) as stored:
        found = _identities(stored)
        for path in sorted({*before, *found}):
            if before.get(path) != found.get(path):
                refuse(f"{path}: a save replaced the file while it was opened", "FileChanged", path)
        yield stored, found


class _Copier:
    """Brings parts to their places."""

    def __init__(self, memory: int, identities: dict[str, tuple[int, ...]]) -> None:
        """identities: of the local files of the models that are open."""
        self._memory = memory
        self._sources: dict[str, int] = {}
        self._identities = identities

    def _source(self, path: str) -> int:
        if path not in self._sources:
            with _existing(path):
                self._sources[path] = source = open_regular(path)
            if _identity(os.fstat(source)) != self._identities[path]:
                refuse(f"{path}: a save replaced the file while it was copied", "FileChanged", path)
        return self._sources[path]

    def close(self) -> None:
        for source in self._sources.values():
            os.close(source)

    def put(self, row: Any, part: StoredPart, target: _Target) -> None:
        """Bring a part of a tensor, which is the row of the target."""
        name, _, size, *_ = row
        _, shape, size_bytes, file, begin = part.model.info(part.number)
        if size_bytes == 0:
            return
        if not _is_one_range(part, size):
            if part.dtype == "F4":
                raise ValueError(f"{printable(name)}: 4-bit floats that are cut along another "
                                 "dimension than the first can't be put together")
            self._put_pieces(part, target.view(name))
            return
        place = target.model.info(target.model.find(name))[4]
        if shape:
            before, rest = divmod(part.offsets[0] * size_bytes, shape[0])
            if rest:
                raise ValueError(f"{printable(name)}: a part begins within a byte")
            place += before
        path = part.model.file(file)[0]
        if part.model.is_compressed or "://" in path:
            self._put_bytes(part, target, place)
        else:
            copy_range(self._source(path), target.fd, size_bytes, begin, place)

    def _rows_of(self, part: StoredPart) -> Iterator[tuple[int, int, Any]]:
        """Yield (first, last, tensor) of rows of a part, as many as the memory holds.

        The caller lets go of them before it asks for the next ones.
        """
        name = part.model.names()[part.number]
        _, shape, size_bytes, *_ = part.model.info(part.number)
        rows = _rows_at_a_time(shape, size_bytes, self._memory)
        for first in range(0, shape[0], rows):
            last = min(first + rows, shape[0])
            item = (name, [first, *[0] * (len(shape) - 1)], [last, *shape[1:]])
            with OpenLoad(part.model, [item], mode="load") as loader:
                yield first, last, next(iter(loader))

    def _put_bytes(self, part: StoredPart, target: _Target, place: int) -> None:
        """Read a part that is one range of the tensor, and write it to its place."""
        if not part.shape:
            name = part.model.names()[part.number]
            with OpenLoad(part.model, [name], mode="load") as loader:
                target.put(wrap_bytes(next(iter(loader))), place)
            return
        for _, _, rows in self._rows_of(part):
            data = wrap_bytes(rows)
            target.put(data, place)
            place += len(data)
            del rows, data

    def _put_pieces(self, part: StoredPart, view: Any) -> None:
        """Read a part that is many ranges of the tensor, and write it to its places."""
        for first, last, rows in self._rows_of(part):
            key = (slice(part.offsets[0] + first, part.offsets[0] + last),
                   *(slice(o, o + n) for o, n in zip(part.offsets[1:], part.shape[1:],
                                                      strict=True)))
            view[key].copy_(wrap(rows))
            del rows


def _check_target(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError for a folder that has a checkpoint of CheckpointManager in it.

    Its manifest would be replaced, and a folder of two sets can't be opened.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(os.fsdecode(folder))
        if any(_CHECKPOINT.fullmatch(name) for name in names):
            raise ValueError(f"{printable(os.fsdecode(folder))} has a checkpoint of "
                             "CheckpointManager in it: use another folder")


def _check_beside(stored: dict[str, list[StoredPart]], folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if the source has files of torch's writer in the target folder.

    The save does not remove them, and a folder of two sets can't be opened.
    """
    paths = set()
    for part in (part for parts in stored.values() for part in parts):
        file = part.model.info(part.number)[3]
        if OFFSETS_KEY in (part.model.metadata(file) or {}):
            paths.add(part.model.file(file)[0])
    for path in paths:
        with contextlib.suppress(OSError):
            if os.path.samefile(os.path.dirname(path) or ".", os.fsdecode(folder)):
                raise ValueError(f"{printable(os.fsdecode(folder))} has files of torch's writer, "
                                 "which the save does not remove: use another folder")


@contextlib.contextmanager
def _targets(paths: list[str]) -> Iterator[list[_Target]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(_Target(path))) for path in paths]


def _chosen(stored: dict[str, list[StoredPart]], prefix: str) -> dict[str, list[StoredPart]]:
    """Return the tensors whose names begin so, without it.

    A checkpoint of CheckpointManager has a tensor of several names under the first of them; its
    description has the others.
    """
    match = _RANK.match(prefix)
    rank = match[0] if match and match[0] + DESCRIPTION in stored else ""
    described = rank + DESCRIPTION
    chosen = {name[len(prefix):]: parts for name, parts in stored.items()
              if name.startswith(prefix) and not (prefix and name == described)}
    if not prefix or described not in stored:
        return chosen
    with OpenLoad(stored[described][0].model, [described], mode="load") as loader:
        paths = described_tensors(wrap(next(iter(loader))))
    for path, name in paths:
        if rank + name not in stored:
            raise ValueError(f"the checkpoint has no tensor {printable(rank + name)}, which "
                             f"{DESCRIPTION!r} has")
        if (rank + path).startswith(prefix):
            chosen.setdefault((rank + path)[len(prefix):], stored[rank + name])
    return chosen


def consolidate(
    source: Any,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    metadata: dict[str, str] | None = None,
    *,
    prefix: str = "",
    alignment: int | str = 0,
    memory: int | str = "256MiB",
    durable: bool = False,
    manifest: bool | str | os.PathLike[str] = False,
) -> str:
    """Make an ordinary Hugging Face folder of what several ranks have written.

    The bytes go from file to file: blocks are shared where the file system does that (XFS, btrfs),
    else the kernel copies them. Tensors that are compressed, or cut along another dimension than
    the first, go through buffers and a mapping of the new file, whose pages the kernel writes out
    when it needs the memory. As with every save, the folder has the old model or the new one at
    every instant.

    Args:
        source: what FastSafetensorsReader reads: a folder of save_on_ranks(), of
            FastSafetensorsWriter or of torch's HuggingFaceStorageWriter(save_distributed=True); a
            checkpoint of CheckpointManager.
        folder: where to; it is made if it is not there. Files of other models in it stay, and a
            folder of two models can't be opened.
        max_shard_size: most bytes of tensors in a file.
        metadata: of every file; without it, {"format": "pt"}.
        prefix: only tensors whose names begin so, without it ("model." of a checkpoint of
            CheckpointManager, "rank-0.model." if each rank has saved its state). A tensor of
            several names is written under each of them.
        alignment: as in save_file. 0: tensors of whole blocks of 4096 bytes come first, and begin
            at multiples of 4096. Blocks are shared of tensors that do so in the source as well: in
            files of save_on_ranks(), FastSafetensorsWriter and CheckpointManager.
        memory: most bytes of memory for tensors that are cut along other dimensions than the first
            and for compressed files; one row at least.
        durable: wait until files and folder are on the device.
        manifest: as in save_file, of the set; the files are read for it.

    Returns:
        The path of the index, or of the one file.

    Raises:
        ValueError: parts that do not make up a tensor; no tensor with the prefix; with a prefix,
            a damaged checkpoint of CheckpointManager; an invalid size; a folder with a checkpoint
            of CheckpointManager, or with the files of torch's writer that are the source.
        SafetensorError, OSError: a file can't be read or written. The folder is unchanged.
        TypeError: an argument of another type.
    """
    check_no_empty_path("folder", folder)
    refuse_address(folder)
    check_switch("durable", durable)
    check_names((), metadata)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be text, not {shown(prefix)}")
    _check_target(folder)
    limit, budget = parse_size("max_shard_size", max_shard_size), parse_size("memory", memory)
    layout = check_save_options({"alignment": alignment}) if alignment else WITH_WHOLE_BLOCKS
    with _open_steady(source) as (stored, identities), contextlib.closing(
            _Copier(budget, identities)) as copier:
        _check_beside(stored, folder)
        chosen = _chosen(stored, prefix)
        if not chosen:
            raise ValueError(f"no tensor's name begins with {prefix!r}")
        rows: list[Any] = []
        for name, parts in chosen.items():
            size = size_of(parts) if parts[0].shape else ()
            total = sum(part.model.nbytes(part.number) for part in parts)
            rows.append((name, parts[0].dtype, size, None, total))
        file_of, count = assign_shards([row[4] for row in rows], None, limit)
        writer = Writer(folder, rows, {"format": "pt"} if metadata is None else metadata,
                        promise="durable" if durable else "quick", file_of=file_of,
                        file_count=max(count, 1), others_write=True, **layout,
                        **manifest_options(manifest))
        with contextlib.closing(writer):
            with _targets(writer.hand_over()) as targets:
                for row, parts, number in zip(rows, chosen.values(), file_of, strict=True):
                    for part in parts:
                        copier.put(row, part, targets[number])
                for target in targets:
                    target.finish(durable)
            for model in {id(part.model): part.model for parts in chosen.values()
                          for part in parts}.values():
                model.check()  # the files are those that were opened
            writer.commit()
            return str(Path(writer.paths()[-1]))
