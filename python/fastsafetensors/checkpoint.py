# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint on Hugging Face folders: read them, write them, on any ranks.

    import torch.distributed.checkpoint as dcp
    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter

    dcp.save(state_dict, storage_writer=FastSafetensorsWriter(folder))
    dcp.load(state_dict, storage_reader=FastSafetensorsReader(folder))

The folder holds whole tensors, whatever the sharding: what four ranks have saved, three can load,
and so can anything else that reads safetensors. Each rank writes its own parts of the files, all at
once, and reads only the parts that it has a place for. Only tensors are kept: state that is
something else is an error (put it into a file of your own).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
import secrets
from dataclasses import replace
from typing import Any

from ._torch_installed import torch  # isort: skip  # first: it says what is missing
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

from ._core import Model, Writer, assign_shards
from ._load import OpenLoad
from ._saving import manifest_options, parse_size, refuse_address
from ._tensor_memory import address_of
from ._torch_state import dtype_name, torch_dtype
from ._torch_tensors import wrap
from ._verify import open_files

__all__ = ["FastSafetensorsReader", "FastSafetensorsWriter"]

# Most bytes that were read and not yet copied to their place.
_BUDGET_BYTES = 256 << 20


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class FastSafetensorsReader(StorageReader):  # type: ignore[misc,unused-ignore]
    """Reads a folder, an index or a file; on every rank only what the plan asks for."""

    def __init__(self, path: str | os.PathLike[str], threads: int = 0) -> None:
        """Keep the path; threads: of a load, 0: as many as the process may use."""
        self._path: Any = path
        self._threads = threads
        self._load_id: str | None = None
        self.stats: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, perhaps of another path."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._load_id = secrets.token_hex(8)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe every tensor of the files as one chunk."""
        model = open_files(self._path)
        try:
            described: dict[str, Any] = {}
            for index, name in enumerate(model.names()):
                dtype, shape, *_ = model.info(index)
                known = torch_dtype(dtype)
                if known is None:
                    raise ValueError(f"{name}: this torch has no dtype for {dtype}")
                size = torch.Size(shape)
                if dtype == "F4":
                    size = torch.Size([*shape[:-1], shape[-1] // 2])
                chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                described[name] = TensorStorageMetadata(TensorProperties(known), size, [chunk])
        finally:
            model.close()
        meta = StorageMeta(checkpoint_id=self._path, load_id=self._load_id)
        return Metadata(described, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Do nothing: the files say everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts that this rank asked for, in the order of the files, to their places."""
        model = open_files(self._path)
        try:
            wanted = []
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    raise ValueError(f"{item.storage_index.fqn} is no tensor: not in these files")
                wanted.append((model.find(item.storage_index.fqn), item))
            wanted.sort(key=lambda pair: (pair[0], pair[1].storage_offsets))
            self._read(model, [item for _, item in wanted], planner)
        finally:
            model.close()
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
                    raise ValueError(f"{item.storage_index.fqn}: {list(source.shape)} elements of "
                                     f"the file for a place of {list(target.shape)}")
                target.copy_(source)
                planner.commit_tensor(item, target)
            self.stats = loader.stats()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a path can be read by this class."""
        path = pathlib.Path(checkpoint_id)
        return path.suffix in (".safetensors", ".json") or any(path.glob("*.safetensors"))


class _Part:
    """What this rank writes of a file that the coordinator has made."""

    def __init__(self, path: str, promise: str) -> None:
        """Open the file, which has its header by now."""
        self._model = Model(path)
        self._writer = Writer(path, [], promise=promise, joins=True)

    def write(self, name: str, chunk: ChunkStorageMetadata, tensor: Any) -> None:
        """Write a chunk of a tensor, which is packed on the CPU, to its pieces of the file."""
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
        """Make what was written last, if so promised."""
        self._writer.finish()

    def close(self) -> None:
        """Leave the file to its maker."""
        self._writer.close()
        self._model.close()


class FastSafetensorsWriter(StorageWriter):  # type: ignore[misc,unused-ignore]
    """Writes a Hugging Face folder: model.safetensors, or numbered files and their index.

    The coordinator makes the files under hidden names, every rank writes its parts, and when all
    have, the coordinator publishes them with their index, as every save of a set does: at every
    instant the folder has the old model or the new one, whoever dies.
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
        """Keep the settings.

        Args:
            path: the folder.
            max_shard_size: bytes of a file, or "5GB", "5GiB".
            metadata: of every file; without it, {"format": "pt"}.
            durable: wait until files and folder are on the device.
            manifest: as in fastsafetensors.torch.save_file; the coordinator reads the files for it.
        """
        super().__init__()
        refuse_address(path)
        self._path = pathlib.Path(path)
        self._limit = parse_size(max_shard_size)
        self._metadata = {"format": "pt"} if metadata is None else dict(metadata)
        self._promise = "durable" if durable else "quick"
        self._manifest = manifest_options(manifest)
        self._writer: Writer | None = None  # on the coordinator, between plan and end

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, perhaps to another path."""
        if checkpoint_id is not None:
            refuse_address(checkpoint_id)
            self._path = pathlib.Path(checkpoint_id)
        self._drop()

    def _drop(self) -> None:
        """What was begun and not published goes."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: files are made when it is known what they hold."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no tensor."""
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise ValueError(f"{item.index.fqn} is no tensor: these files keep tensors only")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the files out, and tell every rank where its parts go. On the coordinator."""
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for plan in plans:
            for item in plan.items:
                data: Any = item.tensor_data
                dtype, shape = data.properties.dtype, tuple(data.size)
                size = math.prod(shape) * dtype.itemsize
                name = dtype_name(dtype)
                if name is None:
                    raise ValueError(f"{item.index.fqn}: the format has no dtype for {dtype}")
                if name == "F4":
                    raise ValueError(f"{item.index.fqn}: 4-bit floats can't be saved in parts")
                tensors[item.index.fqn] = (name, shape, size)
        places = self._make_files(tensors)
        return [
            replace(plan, storage_data={i.index.fqn: places[i.index.fqn] for i in plan.items})
            for plan in plans
        ]

    def _make_files(self, tensors: dict[str, Any]) -> dict[str, str]:
        """Make the files; return the hidden path of each tensor's."""
        self._drop()
        sizes = [size for _, _, size in tensors.values()]
        file_of, count = assign_shards(sizes, None, self._limit)
        rows: list[Any] = [(name, dtype, shape, None, size)
                           for name, (dtype, shape, size) in tensors.items()]
        self._writer = Writer(self._path, rows, self._metadata, promise=self._promise,
                              file_of=file_of, file_count=max(count, 1), others_write=True,
                              **self._manifest)
        hidden = self._writer.hand_over()
        return {name: hidden[file] for name, file in zip(tensors, file_of, strict=True)}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts."""
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
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the files. On the coordinator, when all have written."""
        if self._writer is None:
            raise RuntimeError("finish() without a plan: nothing was begun")
        self._writer.commit()
        self._drop()

    def storage_meta(self) -> StorageMeta | None:
        """Return what identifies the checkpoint."""
        return StorageMeta(checkpoint_id=str(self._path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a path can be written to by this class: any local one can."""
        return "://" not in str(checkpoint_id)

