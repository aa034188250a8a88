# SPDX-License-Identifier: Apache-2.0
"""FilesBufferOnDevice: the tensors of a loader by name, on all ranks.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._base.closing import Closing
from .._base.dtypes import bits_of
from .._base.errors import printable, unknown_tensor
from .._core import error_class
from .._loading.load import OpenLoad, close_load
from .._ranks.agreement import Agreement, named
from .._ranks.rank_parts import block_of
from .frameworks import FrameworkOpBase, ProcessGroupBase, TensorBase
from .st_types import Device, DType, converted

# Tensors up to this size are sent whole to all ranks, which keep their part.
_SMALL_BYTES = 1 << 20


_logger = logging.getLogger(__name__)


def _summary(stats: dict[str, Any]) -> str:
    """A summary of a load in one line."""
    seconds = stats["total_ns"] / 1e9
    return (
        f"{stats['tensor_count']} tensors, {stats['bytes_requested']} bytes in {seconds:.3f} s by "
        f"{stats['engine']} ({stats['reason']}), {stats['thread_count']} threads"
    )


def _unit(name: str, frame: Any, dim: int) -> int:
    """Elements of a dimension that are not separated: pairs of 4-bit floats.

    ValueError for a tensor of which only all bytes are known.
    """
    is_last, is_odd = dim == len(frame.shape) - 1, frame.shape[-1] % 2 == 1
    if bits_of(frame.dtype.value) == 6 or (frame.dtype is DType.F4 and is_odd):
        raise ValueError(f"get_sharded: {printable(name)} is {frame.dtype.value} of shape "
                         f"{frame.shape}, whose elements share bytes: it can't be divided")
    return 2 if frame.dtype is DType.F4 and is_last else 1


class LoadedFile:
    """One rank's file: its header and, on the rank that reads it, its tensors."""

    def __init__(self, metadata: Any, rank: int, names: list[str]) -> None:
        """Describe a file from which `names` were requested."""
        self.metadata = metadata
        self.rank = rank
        self.names = names
        self.loader: Any = None  # a load in progress or finished, of the library's pipeline
        self._indices = dict(zip(names, range(len(names)), strict=True))
        self.raws: dict[str, Any] = {}
        self.tensors: dict[str, TensorBase] = {}
        self.dtype = DType.AUTO
        self.closed = False
        self.log_level = logging.DEBUG
        self.is_on_gpu = False  # on a device, loaded by the library's pipeline

    def raw(self, name: str, framework: FrameworkOpBase) -> Any:
        """Return a framework tensor, created on first access and the same afterwards.

        With concurrent access one thread creates the tensor for all.
        """
        found = self.raws.get(name)
        if found is not None:
            return found
        if name in self.tensors:  # from a custom reader
            return self.tensors[name].get_raw()
        loader = self.loader
        if loader is None:
            return self.read(name, None, framework)
        return self.raws.setdefault(name, framework.make(loader, self._indices[name]))

    def read(
        self, name: str, box: tuple[list[int], list[int]] | None, framework: FrameworkOpBase
    ) -> Any:
        """Read a tensor, or the part [begin, end) of it, separately.

        For files that are not read beforehand.
        """
        if self.closed:
            raise error_class()("the buffer is closed")
        item = name if box is None else (name, *box)
        requested = None if self.dtype is DType.AUTO else self.dtype.value
        with OpenLoad(self.metadata.model, [item], mode="load", dtype=requested) as loader:
            return framework.make(loader, 0)

    def get(self, name: str, framework: FrameworkOpBase) -> TensorBase:
        """Return the same tensor as a TensorBase."""
        found = self.tensors.get(name)
        if found is None:
            raw = self.raw(name, framework)
            if self.loader is None:
                return framework.wrap_tensor(raw)
            dtype = DType(self.loader.item(self._indices[name]).dtype)
            found = self.tensors.setdefault(name, framework.adopt(raw, dtype))
        return found

    def _report_gds(self) -> None:
        """Log once why files are not read by GPUDirect Storage, if that was requested."""
        if self.is_on_gpu and self.loader is not None:
            from .._torch.gpu import report_gds

            report_gds(self.loader.stats()["reason"])

    def close(self) -> None:
        """Free the load and its tensors. Returned tensors stay valid."""
        self.closed = True
        # abandoned, or of the parent process
        with contextlib.suppress(error_class(), RuntimeError):
            if self.loader is not None and _logger.isEnabledFor(self.log_level):
                stats = _summary(self.loader.stats())
                _logger.log(self.log_level, "%s: %s", printable(self.metadata.src), stats)
            self._report_gds()
        if self.loader is not None:
            close_load(self.loader)
        self.loader = None
        self.tensors = {}
        self.raws = {}


def _to_dtype(dtype: Any, framework: FrameworkOpBase) -> DType:
    if dtype is None or isinstance(dtype, DType):
        return dtype or DType.AUTO
    from .frameworks._torch import fst_dtype

    return fst_dtype(dtype)


class FilesBufferOnDevice(Closing):
    """Loaded files. Tensors own their memory, so closing this never invalidates them.

    For programs written for fastsafetensors 0.5.

    key_to_rank_lidx: {name: (rank, index of the rank's file)}. In a group, all ranks must make the
    same calls in the same order.
    """

    def __init__(
        self,
        rank_loaders: dict[int, list[Any]],
        pg: ProcessGroupBase,
        framework: FrameworkOpBase,
        auto_mem_delete: bool = True,
        keep_tensor: Any = None,
        borrowed_tensors: bool = False,
        device: Device | None = None,
        dtype: DType = DType.AUTO,
        agreement: Agreement | None = None,
        strategy: str = "auto",
    ) -> None:
        """Index the files by name; ValueError for a name in two of them."""
        self.rank_loaders = rank_loaders
        self.pg = pg
        self.framework = framework
        self.device = device or Device.from_str("cpu")
        self._dtype = dtype
        self._closed = False
        self._agreement = agreement or Agreement(pg)
        self._settled = False
        self._strategy = strategy
        self.reads_slices = strategy == "slice" and pg.size() > 1
        self.key_to_rank_lidx: dict[str, tuple[int, int]] = {}
        for rank in sorted(rank_loaders):
            for index, file in enumerate(rank_loaders[rank]):
                if self.key_to_rank_lidx:
                    self._check_unique(file.names)
                self.key_to_rank_lidx.update(dict.fromkeys(file.names, (rank, index)))
        goes_there = self.device.is_cpu or bool(framework.load_options(self.device, "off"))
        # The device on which the framework's tensors are created, if loads go there.
        self._home = self.device if goes_there else Device.from_str("cpu")
        # In a group of one, tensors are returned as the loader created them.
        self._plain = pg.size() == 1 and goes_there

    def _check_unique(self, names: list[str]) -> None:
        for name in names:
            if name in self.key_to_rank_lidx:
                raise ValueError(
                    f"FilesBufferOnDevice: key {printable(name)} must be unique among files")

    def _file(self, name: str) -> tuple[int, LoadedFile]:
        if self._closed:
            raise error_class()("FilesBufferOnDevice is closed")
        found = self.key_to_rank_lidx.get(name)
        if found is None:
            message = f"_get_rank: key {printable(name)} was not found in files"
            raise unknown_tensor(name, message, self.key_to_rank_lidx)
        return found[0], self.rank_loaders[found[0]][found[1]]

    def get_filename(self, tensor_name: str) -> str:
        """Return the path of the file that contains a tensor."""
        return str(self._file(tensor_name)[1].metadata.src)

    def get_shape(self, tensor_name: str) -> list[int]:
        """Return a tensor's shape in the file."""
        return list(self._file(tensor_name)[1].metadata.tensors[tensor_name].shape)

    def _place(self, tensor: TensorBase, device: Any, dtype: Any) -> TensorBase:
        wanted = _to_dtype(dtype, self.framework)
        where = self.device if device is None else Device.of(device)
        if where == tensor.device and wanted in (DType.AUTO, tensor.dtype):
            return tensor
        return tensor.to(
            device=None if where == tensor.device else where,
            dtype=DType.AUTO if wanted is tensor.dtype else wanted,
        )

    def settle(self, failure: Exception | None = None) -> None:
        """Wait until the bytes of this rank and of all other ranks have been read.

        failure: this rank's error. An error on any rank is an error on all; the buffer is then
        closed.
        """
        if self._settled:
            return
        self._settled = True
        try:
            try:
                if failure is None:
                    self.wait()
            except Exception as error:
                failure = error
            self._agreement.agree("the end of reading", error=failure)
        except BaseException:
            self.close()
            raise

    def _begin(
        self, what: str, prepare: Callable[[], tuple[int, TensorBase | None]]
    ) -> tuple[int, TensorBase | None]:
        """Prepare this rank's side of a collective, and check that all ranks could."""
        if self._closed:
            raise error_class()("FilesBufferOnDevice is closed")
        self.settle()
        try:
            prepared = prepare()
        except Exception as error:
            self._agreement.agree(what, error=error)
            raise
        self._agreement.agree(what)
        return prepared

    def _side(self, name: str) -> tuple[int, TensorBase]:
        """Return (owner, its tensor, memory for it on other ranks)."""
        owner, file = self._file(name)
        if self.pg.rank() == owner:
            return owner, file.get(name, self.framework).contiguous()
        frame = file.metadata.tensors[name]
        return owner, self.framework.get_empty_tensor(
            list(frame.shape), converted(frame.dtype, self._dtype), self._home
        )

    def _everywhere(self, name: str, what: str) -> TensorBase:
        """Return a tensor on every rank, broadcast by its owner.

        All ranks must pass the same `what`.
        """
        if self.pg.size() == 1:
            return self._file(name)[1].get(name, self.framework)
        owner, tensor = self._begin(what, lambda: self._side(name))
        assert tensor is not None
        if tensor.get_nbytes():
            with named(what):
                self.pg.broadcast(tensor, owner)
        return tensor

    def begin_run(self, names: list[str]) -> Callable[[], Iterable[Any]]:
        """Start sending tensors of one file to all ranks, by one collective if possible.

        The returned function waits and returns them. In a group of one they are created on
        iteration.
        """
        if self.pg.size() == 1:
            return lambda: map(self.get_tensor, names)
        if len(names) == 1:
            return self._begin_one(names[0])
        self._begin(f"tensors {names[0]!r} to {names[-1]!r}", lambda: (0, None))
        owner, file = self._file(names[0])
        mine = self.pg.rank() == owner
        owned = [file.get(name, self.framework) for name in names] if mine else None
        frames = [file.metadata.tensors[name] for name in names]
        finish = self.framework.begin_broadcast_run(self.pg, owned, frames, owner)
        if finish is None:
            return lambda: [self.get_tensor(name) for name in names]

        def wait() -> Iterable[Any]:
            with named(f"tensors {names[0]!r} to {names[-1]!r}"):
                tensors = finish()
            return [self._place(tensor, None, DType.AUTO).get_raw() for tensor in tensors]

        return wait

    def _begin_one(self, name: str) -> Callable[[], Iterable[Any]]:
        owner, tensor = self._begin(f"tensor {name!r}", lambda: self._side(name))
        assert tensor is not None
        wait = self.pg.begin_broadcast(tensor, owner) if tensor.get_nbytes() else None

        def finish() -> Iterable[Any]:
            with named(f"tensor {name!r}"):
                if wait is not None:
                    wait()
            return [self._place(tensor, None, DType.AUTO).get_raw()]

        return finish

    def get_tensor_wrapped(
        self, tensor_name: str, device: Any = None, dtype: Any = DType.AUTO
    ) -> TensorBase:
        """Return a tensor as a TensorBase; in a group all ranks get it from its owner."""
        tensor = self._everywhere(tensor_name, f"get_tensor({tensor_name!r})")
        return self._place(tensor, device, dtype)

    def get_tensor(self, tensor_name: str, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """Return a framework tensor. ValueError for an unknown name."""
        if self._plain and device is None and dtype is DType.AUTO:
            return self._file(tensor_name)[1].raw(tensor_name, self.framework)
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def _part(self, name: str, dim: int) -> TensorBase:
        """Return this rank's block of ceil(size / ranks) along a dimension.

        Dimension -1: return the whole tensor.
        """
        what = f"get_sharded({name!r}, {dim})"
        if dim == -1 or self.pg.size() == 1:
            return self._everywhere(name, what)
        if self.reads_slices:
            tensor = self._begin(what, lambda: (0, self._slice(name, dim)))[1]
            assert tensor is not None
            return tensor
        if self._strategy == "broadcast" or self._is_small(name):
            tensor = self._everywhere(name, what)
            return tensor[self._block(name, dim, self.pg.rank())].contiguous()
        return self._scatter(name, dim, what)

    def _is_small(self, name: str) -> bool:
        """Tell whether "auto" sends a tensor whole to all ranks, as one message."""
        if self._strategy == "scatter":
            return False
        found = self.key_to_rank_lidx.get(name)
        if found is None:
            return True  # the error is raised there
        file = self.rank_loaders[found[0]][found[1]]
        return bool(file.metadata.tensor_bytes(name) <= _SMALL_BYTES)

    def _block(self, name: str, dim: int, rank: int) -> tuple[slice, ...]:
        """Return a rank's block along a dimension as an index of the framework's tensor.

        ValueError for a missing dimension, and for a tensor that cannot be divided.
        """
        frame = self._file(name)[1].metadata.tensors[name]
        if not 0 <= dim < len(frame.shape):
            raise ValueError(f"get_sharded: {printable(name)} has no dimension {dim}")
        size = frame.shape[dim] // _unit(name, frame, dim)
        return (slice(None),) * dim + (slice(*block_of(size, rank, self.pg.size())),)

    def _slice(self, name: str, dim: int) -> TensorBase:
        """Read this rank's own block from the file."""
        file = self._file(name)[1]
        frame, cut = file.metadata.tensors[name], self._block(name, dim, self.pg.rank())[dim]
        begin, end, unit = [0] * len(frame.shape), list(frame.shape), _unit(name, frame, dim)
        begin[dim], end[dim] = cut.start * unit, cut.stop * unit
        return self.framework.wrap_tensor(file.read(name, (begin, end), self.framework))

    def _scatter(self, name: str, dim: int, what: str) -> TensorBase:
        """Return this rank's block, sent by the rank that has the tensor."""
        rank = self.pg.rank()

        def prepare() -> tuple[int, TensorBase | None]:
            owner, file = self._file(name)
            cut = self._block(name, dim, rank)
            if rank == owner:
                return owner, file.get(name, self.framework)
            frame = file.metadata.tensors[name]
            shape, dtype = list(frame.shape), converted(frame.dtype, self._dtype)
            shape[dim] = (cut[dim].stop - cut[dim].start) * _unit(name, frame, dim)
            return owner, self.framework.get_empty_tensor(shape, dtype, self._home)

        owner, tensor = self._begin(what, prepare)
        assert tensor is not None
        with named(what):
            if rank != owner:
                if tensor.get_nbytes():
                    self.pg.recv(tensor, owner, 0)
                return tensor
            for other in range(self.pg.size()):
                part = tensor[self._block(name, dim, other)]
                if other != rank and part.get_nbytes():
                    self.pg.send(part.contiguous(), other, 0)
        return tensor[self._block(name, dim, rank)].contiguous()

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TensorBase:
        """Return this rank's shard as a TensorBase."""
        return self._place(self._part(tensor_name, dim), device, dtype)

    def get_sharded(
        self, tensor_name: str, dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> Any:
        """Return this rank's block along `dim`: ceil(size / ranks), the last short or empty.

        dim -1: the whole tensor, as in a group of one.
        """
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_multi_cols(
        self, tensor_names: list[str], dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TensorBase:
        """Return the concatenation along `dim` of this rank's shards of tensors, in that order."""
        if not tensor_names:
            self._agreement.agree("get_multi_cols", error=ValueError("get_multi_cols: no names"))
        parts = [self._part(name, dim) for name in tensor_names]
        return self._place(self.framework.concat_tensors(parts, max(dim, 0)), device, dtype)

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> Any:
        """Return a tensor on dst_rank, None on all others."""
        if self.pg.size() == 1:
            return self.get_tensor(tensor_name, device, dtype)
        rank = self.pg.rank()

        def prepare() -> tuple[int, TensorBase | None]:
            if not 0 <= dst_rank < self.pg.size():
                raise ValueError(f"push_tensor: rank {dst_rank} is not in the group of "
                                 f"{self.pg.size()}")
            owner, _ = self._file(tensor_name)
            return self._side(tensor_name) if rank in (owner, dst_rank) else (owner, None)

        what = f"push_tensor({tensor_name!r}, {dst_rank})"
        owner, tensor = self._begin(what, prepare)
        if tensor is not None and tensor.get_nbytes() and dst_rank != owner:
            with named(what):
                if rank == owner:
                    self.pg.send(tensor, dst_rank, 0)
                else:
                    self.pg.recv(tensor, owner, 0)
        if rank != dst_rank or tensor is None:
            return None
        return self._place(tensor, device, dtype).get_raw()

    def wait(self) -> None:
        """Wait until all bytes that this rank reads are there."""
        for file in self.rank_loaders.get(self.pg.rank(), []):
            if file.loader is not None:
                file.loader.wait()

    def as_dict(self, tensor_shard_dim: dict[str, int]) -> dict[str, TensorBase]:
        """Return {name: this rank's shard} for {name: dimension}."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Iterable[str]) -> Iterator[tuple[str, TensorBase]]:
        """Iterate over tensors of a group of one; RuntimeError in a larger one."""
        if self.pg.size() > 1:
            raise RuntimeError("iter_local_tensors needs a group of one")
        for name in tensor_names:
            yield name, self.get_tensor_wrapped(name)

    def close(self) -> None:
        """Free everything that is not in use. Repeated calls are harmless."""
        if self._closed:
            return
        self._closed = True
        for files in self.rank_loaders.values():
            for file in files:
                file.close()
