# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint for Hugging Face folders: reading and writing, on any number of
ranks.

    import torch.distributed.checkpoint as dcp
    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter

    dcp.save(state_dict, storage_writer=FastSafetensorsWriter(folder))
    dcp.load(state_dict, storage_reader=FastSafetensorsReader(folder))

The folder contains whole tensors, whatever the sharding: three ranks can load what four have saved,
and so can other safetensors readers. All ranks write their parts of the files in parallel, and read
only the parts that they need. Only tensors are saved; other state is an error (store it
separately).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

# First, because its error says what to install.
from ._torch.torch_installed import torch  # isort: skip
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ._base.errors import printable
from ._base.options import check_count, check_names, check_no_empty_path, parse_size
from ._base.paths import absolute_path, fixed_location
from ._base.representation import format_paths
from ._checkpoints.checkpoint_shards import StoredPart, open_parts, size_of
from ._checkpoints.consolidate import consolidate
from ._checkpoints.kept_copies import CopyStore
from ._core import Model, Writer, assign_shards
from ._loading.load import OpenLoad
from ._loading.open_arguments import check_path
from ._saving.save_options import (
    WITH_WHOLE_BLOCKS,
    fixed_manifest,
    manifest_options,
    promise_word,
    refuse_address,
)
from ._torch.tensor_memory import address_of
from ._torch.torch_state import dtype_name, torch_dtype_of
from ._torch.torch_tensors import wrap

__all__ = ["FastSafetensorsReader", "FastSafetensorsWriter", "consolidate"]

# Maximum bytes that are read and not yet copied.
_BUDGET_BYTES = 256 << 20


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def _elements(dtype: str, numbers: Sequence[int]) -> torch.Size:
    """Convert a shape or offsets to torch's units: pairs of 4-bit floats."""
    if dtype == "F4" and numbers:
        return torch.Size([*numbers[:-1], numbers[-1] // 2])
    return torch.Size(numbers)


def _part_of(stored: dict[str, list[StoredPart]], item: Any) -> StoredPart:
    """Return the part of a tensor that an item of a plan reads from."""
    name, offset = item.storage_index.fqn, item.storage_index.offset
    parts = stored.get(name, [])
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if offset is not None and _elements(part.dtype, part.offsets) == torch.Size(offset):
            return part
    raise ValueError(f"{printable(name)}: the files do not have the part at {list(offset or ())}")


def _add_stats(sums: dict[str, Any], stats: dict[str, Any]) -> None:
    """Add the statistics of a load to earlier ones."""
    for key, value in stats.items():
        sums[key] = sums[key] + value if isinstance(value, int) and key in sums else value


class FastSafetensorsReader(StorageReader):  # type: ignore[misc,unused-ignore]
    """Reads a folder, an index or a file. Each rank reads only the parts in its plan.

    Also reads folders of torch's HuggingFaceStorageWriter(save_distributed=True).
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 0) -> None:
        """Store the path; a relative one is resolved now.

        threads: of a load; 0: one per CPU that the process may use.
        """
        check_path(path, "path")
        if not isinstance(path, (list, tuple)):
            check_no_empty_path("path", path)
        self._path: Any = path
        self._source: Any = fixed_location(path)
        self._threads = check_count("threads", threads)
        self._load_id: str | None = None
        self.stats: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return the path, without opening files."""
        return f"<{type(self).__name__} {format_paths(self._path)}>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a load, possibly of another path."""
        if checkpoint_id is not None:
            check_no_empty_path("checkpoint_id", checkpoint_id)
            self._path, self._source = checkpoint_id, fixed_location(checkpoint_id)
        self._load_id = secrets.token_hex(8)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe every tensor of the files: one chunk, or one for each of its parts."""
        described: dict[str, Any] = {}
        with open_parts(self._source) as stored:
            for name, parts in stored.items():
                known = torch_dtype_of(parts[0].dtype, size_of(parts))
                if known is None:
                    raise ValueError(f"{printable(name)}: this torch has no dtype for "
                                     f"{parts[0].dtype} of shape {list(size_of(parts))}")
                chunks = [ChunkStorageMetadata(_elements(part.dtype, part.offsets),
                                               _elements(part.dtype, part.shape)) for part in parts]
                size = _elements(parts[0].dtype, size_of(parts))
                described[name] = TensorStorageMetadata(TensorProperties(known), size, chunks)
        meta = StorageMeta(checkpoint_id=self._path, load_id=self._load_id)
        return Metadata(described, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Do nothing, because the files have all information."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's parts, in file order, to their destinations."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise ValueError(f"{printable(item.storage_index.fqn)} is not a tensor, and the "
                                 "files only contain tensors")
        self.stats = {}
        with open_parts(self._source) as stored:
            wanted = [(_part_of(stored, item), item) for item in plan.items]
            models = dict.fromkeys(part.model for part, _ in wanted)
            for model in models:
                own = [(part, item) for part, item in wanted if part.model is model]
                own.sort(key=lambda pair: (pair[0].number, pair[1].storage_offsets))
                self._read(model, [item for _, item in own], planner)
        return _done(None)

    def _read(self, model: Model, items: list[Any], planner: LoadPlanner) -> None:
        if not items:
            return
        request: list[Any] = []
        largest = 0
        for item in items:
            begin, lengths = list(item.storage_offsets), list(item.lengths)
            index = model.find(item.storage_index.fqn)
            dtype, shape, size, *_ = model.info(index)
            if dtype == "F4" and shape:  # torch counts pairs
                begin[-1] *= 2
                lengths[-1] *= 2
            end = [b + n for b, n in zip(begin, lengths, strict=True)]
            request.append((item.storage_index.fqn, begin, end))
            largest = max(largest, size * math.prod(lengths) // max(math.prod(shape), 1))
        budget = max(_BUDGET_BYTES, 2 * largest)
        with OpenLoad(model, request, mode="load", order="request", threads=self._threads,
                      budget=budget) as loader:
            for item, tensor in zip(items, loader, strict=True):
                target = planner.resolve_tensor(item).detach()
                source = wrap(tensor)
                if target.shape != source.shape:
                    raise ValueError(f"{printable(item.storage_index.fqn)}: {list(source.shape)} "
                                     f"elements of the file for a place of {list(target.shape)}")
                target.copy_(source)
                planner.commit_tensor(item, target)
            _add_stats(self.stats, loader.stats())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a path can be read by this class."""
        path = pathlib.Path(checkpoint_id)
        return path.suffix in (".safetensors", ".json") or any(path.glob("*.safetensors"))


class _Part:
    """This rank's part of a file that the coordinator has created."""

    def __init__(self, path: str, promise: str) -> None:
        """Open the file, which already has its header."""
        self._model = Model(path)
        self._writer = Writer(path, [], promise=promise, joins=True)

    def write(self, name: str, chunk: ChunkStorageMetadata, tensor: Any) -> None:
        """Write a chunk of a tensor (packed on the CPU) to its pieces of the file."""
        index = self._model.find(name)
        sizes, shape = list(chunk.sizes), list(self._model.info(index)[1])
        if tensor.numel() == 0:
            return
        cut = [d for d in range(len(shape)) if sizes[d] != shape[d]]
        if not cut or cut[-1] == 0:  # one piece
            begin = chunk.offsets[0] * math.prod(shape[1:]) * tensor.element_size() if shape else 0
            self._writer.write(index, begin, address_of(name, tensor), tensor.nbytes)
            return
        memory = (ctypes.c_char * self._model.nbytes(index)).from_address(self._writer.map(index))
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(shape)
        key = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, sizes, strict=True))
        whole[key].copy_(tensor)

    def finish(self) -> None:
        """Sync the file, if durable."""
        self._writer.finish()

    def close(self) -> None:
        """Close the file without publishing it."""
        self._writer.close()
        self._model.close()


class _Save(threading.local):
    """The save that a thread does: each asynchronous one has a thread."""

    path: pathlib.Path | None = None  # None: the writer's own
    writer: Writer | None = None  # on the coordinator, until finish

    def drop(self) -> None:
        """Delete files that were created and not published."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()


class FastSafetensorsWriter(StorageWriter):  # type: ignore[misc,unused-ignore]
    """Writes a Hugging Face folder: model.safetensors, or numbered files and their index.

    The coordinator creates the files under temporary names, every rank writes its parts, and when
    all are finished, the coordinator publishes them with an index, atomically like every sharded
    save: at every instant the folder has the old or the new model, even if a rank is killed.

    Saves of one writer may run at the same time, in different threads. Those to the same folder are
    published in the order in which they end: wait for the first if the order matters.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        metadata: dict[str, str] | None = None,
        *,
        durable: bool = False,
        manifest: bool | str | os.PathLike[str] = False,
    ) -> None:
        """Store the settings.

        Args:
            path: the folder; a relative path is resolved now. A relative checkpoint_id of
                dcp.async_save() is resolved by its thread: pass an absolute one if the program
                changes its current folder.
            max_shard_size: maximum size of a file in bytes, or "5GB", "5GiB".
            metadata: of every file; {"format": "pt"} by default.
            durable: wait until files and folder are on the device.
            manifest: as in fastsafetensors.torch.save_file; the coordinator reads the files for it.
        """
        super().__init__()
        check_no_empty_path("path", path)
        refuse_address(path)
        check_names((), metadata)
        self._path = absolute_path(path)
        self._limit = parse_size("max_shard_size", max_shard_size)
        self._metadata = {"format": "pt"} if metadata is None else dict(metadata)
        self._promise = promise_word(durable)
        self._manifest = fixed_manifest(manifest_options(manifest))
        self._save = _Save()
        self._copies = CopyStore()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a save, possibly to another path."""
        if checkpoint_id is not None:
            check_no_empty_path("checkpoint_id", checkpoint_id)
            refuse_address(checkpoint_id)
            self._path = self._save.path = absolute_path(checkpoint_id)
        self._save.drop()

    # What follows makes the writer the stager of dcp.async_save() where none is given.

    _synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """stage() has copied everything when it returns."""
        return True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict to CPU memory that is kept, if the writer is, for its next save.

        Copies that an earlier save is still written from are left to it.
        """
        return self._copies.copy(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: stage() has copied everything when it returns."""

    def close(self) -> None:
        """Give the copies' memory back, when they are written, and delete temporary files.

        Those of a save in this thread that another rank's failure has ended: until then, or until
        the next save, the coordinator keeps them.
        """
        self._save.drop()
        self._copies.close()

    def __getstate__(self) -> dict[str, Any]:
        """For the process of AsyncCheckpointerType.PROCESS: the settings."""
        return {name: value for name, value in self.__dict__.items()
                if name not in ("_save", "_copies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings, without a save or copies."""
        for name, value in state.items():
            setattr(self, name, value)
        self._save, self._copies = _Save(), CopyStore()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because files are created when their contents are planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse state other than tensors."""
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise ValueError(f"{printable(item.index.fqn)} is not a tensor, and the files only "
                                 "contain tensors. Take numbers out of the state before, and "
                                 "save them with json or torch.save")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: lay out the files, and send every rank its offsets."""
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for plan in plans:
            for item in plan.items:
                data: Any = item.tensor_data
                dtype, shape = data.properties.dtype, tuple(data.size)
                size = math.prod(shape) * dtype.itemsize
                name = dtype_name(dtype)
                if name is None:
                    raise ValueError(f"{printable(item.index.fqn)}: the format has no dtype for "
                                     f"{dtype}")
                if name == "F4":
                    raise ValueError(f"{printable(item.index.fqn)}: 4-bit floats can't be saved in "
                                     "parts")
                tensors[item.index.fqn] = (name, shape, size)
        places = self._make_files(tensors)
        return [
            replace(plan, storage_data={i.index.fqn: places[i.index.fqn] for i in plan.items})
            for plan in plans
        ]

    def _make_files(self, tensors: dict[str, Any]) -> dict[str, str]:
        """Create the files; return the temporary path for each tensor."""
        self._save.drop()
        sizes = [size for _, _, size in tensors.values()]
        file_of, count = assign_shards(sizes, None, self._limit)
        rows: list[Any] = [(name, dtype, shape, None, size)
                           for name, (dtype, shape, size) in tensors.items()]
        writer = Writer(self._save.path or self._path, rows, self._metadata, promise=self._promise,
                        file_of=file_of, file_count=max(count, 1), others_write=True,
                        **WITH_WHOLE_BLOCKS, **self._manifest)
        self._save.writer = writer
        hidden = writer.hand_over()
        return {name: hidden[file] for name, file in zip(tensors, file_of, strict=True)}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts."""
        try:
            return _done(self._write(plan, planner))
        except BaseException:
            self._save.drop()  # of the coordinator
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results = []
        parts: dict[str, _Part] = {}
        with contextlib.ExitStack() as stack:
            for item in plan.items:
                data: Any = item.tensor_data
                name = item.index.fqn
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                path = plan.storage_data[name]
                if path not in parts:
                    parts[path] = stack.enter_context(contextlib.closing(
                        _Part(path, self._promise)))
                parts[path].write(name, data.chunk, tensor)
                results.append(WriteResult(item.index, tensor.nbytes, None))
            for part in parts.values():
                part.finish()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: publish the files."""
        if self._save.writer is None:
            raise RuntimeError("finish() was called in a thread without a plan")
        try:
            self._save.writer.commit()
        finally:
            self._save.drop()

    def storage_meta(self) -> StorageMeta | None:
        """Return the checkpoint's identifier."""
        return StorageMeta(checkpoint_id=str(self._save.path or self._path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this class can write to a path: any local path."""
        return "://" not in str(checkpoint_id)

