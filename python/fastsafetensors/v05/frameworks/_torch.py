# SPDX-License-Identifier: Apache-2.0
"""The torch adapter of the 0.5 loaders."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..._base.dtypes import WORDS
from ..._base.options import check_timeout
from ..._core import live_buffers
from ..._torch.gpu import load_options
from ..._torch.torch_installed import torch
from ..._torch.torch_state import torch_shape
from ..._torch.torch_tensors import make_item
from ..._torch.torch_tensors import wrap as wrap_core
from ..common import SingleGroup
from ..st_types import Device, DType
from . import FrameworkOpBase, ProcessGroupBase, SingleProcessGroup, TensorBase
from ._peers import describe_lost, describe_unheard, own_identity

# torch's dtype for each DType that this torch has.
dtype_convert: dict[DType, torch.dtype] = {
    DType(name): getattr(torch, torch_name)
    for name, torch_name in WORDS.items()
    if hasattr(torch, torch_name)
}
_CPU = Device.from_str("cpu")
# Descriptions of models with a million tensors are far smaller.
_TEXT_BYTES_MAX = 1 << 30
_HOST = torch.device("cpu")
_FST_DTYPES = {dtype: ours for ours, dtype in dtype_convert.items()}


def fst_dtype(dtype: torch.dtype) -> DType:
    """Return our DType of a torch dtype."""
    if dtype not in _FST_DTYPES:
        raise ValueError(f"the format has no dtype {dtype}")
    return _FST_DTYPES[dtype]


def real_dtype(dtype: Any) -> torch.dtype | None:
    """Return torch's dtype of a DType or of torch's own; None for AUTO."""
    if dtype is None or dtype is DType.AUTO:
        return None
    return dtype if isinstance(dtype, torch.dtype) else dtype_convert[dtype]


class TorchTensor(TensorBase):
    """A torch tensor with this API's names of device and dtype."""

    def __init__(self, device: Device, dtype: DType, real_tensor: torch.Tensor) -> None:
        """Wrap a tensor."""
        self.device = device
        self.dtype = dtype
        self.real_tensor = real_tensor

    def _again(self, real: torch.Tensor) -> TorchTensor:
        dtype = self.dtype if real.dtype == self.real_tensor.dtype else fst_dtype(real.dtype)
        return TorchTensor(Device.of(real.device), dtype, real)

    def get_raw(self) -> torch.Tensor:
        """Return the torch tensor."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """Return torch's shape."""
        return list(self.real_tensor.shape)

    def get_nbytes(self) -> int:
        """Return the number of bytes."""
        return int(self.real_tensor.nbytes)

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TorchTensor:
        """Return it on another device or with another dtype."""
        where = None if device is None else Device.of(device).as_str()
        return self._again(self.real_tensor.to(device=where, dtype=real_dtype(dtype)))

    def clone(self) -> TorchTensor:
        """Return a copy."""
        return self._again(self.real_tensor.clone())

    def detach(self) -> TorchTensor:
        """Return it detached from the graph."""
        return self._again(self.real_tensor.detach())

    def contiguous(self) -> TorchTensor:
        """Return it in contiguous memory."""
        return self._again(self.real_tensor.contiguous())

    def reshape(self, shape: list[int]) -> TorchTensor:
        """Return it in another shape."""
        return self._again(self.real_tensor.reshape(shape))

    def view(self, dtype: DType) -> TorchTensor:
        """Return its bits as another dtype."""
        return self._again(self.real_tensor.view(dtype_convert[dtype]))

    def __getitem__(self, key: Any) -> TorchTensor:
        """Return a part."""
        return self._again(self.real_tensor[key])

    def data_ptr(self) -> int:
        """Return the address of its first byte."""
        return int(self.real_tensor.data_ptr())

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copy its bytes into a buffer of the same size."""
        flat = self.real_tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        torch.frombuffer(buf, dtype=torch.uint8).copy_(flat)


# torch takes 0 for the group's own timeout, and has an error for more than a timedelta holds.
_STORE_KEY = "fastsafetensors/process of rank {}"
_WAIT_SECONDS_MIN = 0.001
_WAIT_SECONDS_MAX = 1e8  # three years

# The identities of a group's processes, by group.
_identities: weakref.WeakKeyDictionary[Any, list[bytes]] = weakref.WeakKeyDictionary()

# Groups in which a wait has failed, and which ranks were missing. A late rank's messages are still
# on their way there, and gloo ends the process if the next collective of the group receives them.
_broken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class TorchProcessGroup(ProcessGroupBase):
    """A torch.distributed group; ranks count within the group.

    Waits end with a RankError that says what was awaited, after `timeout` seconds (None: the
    group's own timeout). After a failed wait later ones fail at once, so that the steps that report
    it do not wait again.
    """

    def __init__(self, pg: Any, timeout: float | None = None) -> None:
        """Wrap a group."""
        import torch.distributed as dist

        self.real_pg = pg
        seconds = check_timeout(timeout)
        self._timeout = (None if seconds is None else
                         datetime.timedelta(seconds=min(seconds, _WAIT_SECONDS_MAX)))
        self._seconds_left: float | None = None  # of limit_waits()
        self._is_unlimited = False  # by wait_for_outcome()
        self._count, self._number = int(pg.size()), int(pg.rank())
        nccl = "nccl" in str(dist.get_backend(pg))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else _HOST

    @property
    def bytes_device(self) -> torch.device:
        """The device of the backend's messages: a GPU for NCCL, else the CPU."""
        return self._device

    def size(self) -> int:
        """Return the number of ranks."""
        return self._count

    def rank(self) -> int:
        """Return this process's rank."""
        return self._number

    def limit_waits(self) -> None:
        """From now on the timeout is for all waits together, not for each."""
        self._seconds_left = None if self._timeout is None else self._timeout.total_seconds()
        self._is_unlimited = False

    def wait_for_outcome(self) -> None:
        """Let rank 0 wait for its timeout once more, and the others for the group's own."""
        self.limit_waits()
        self._is_unlimited = self._number != 0

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a wait for other ranks has failed."""
        return self.real_pg in _broken

    def _limit(self) -> datetime.timedelta | None:
        """Return how long the next wait may take."""
        if self._is_unlimited:
            return None
        if self._seconds_left is None:
            return self._timeout
        return datetime.timedelta(seconds=max(self._seconds_left, _WAIT_SECONDS_MIN))

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return int(dist.get_global_rank(self.real_pg, rank))

    def _explain(self, error: Exception, what: str) -> Exception:
        from ..._ranks.agreement import RankError

        known = _identities.get(self.real_pg) or self._published_identities()
        missing = filter(None, (describe_lost(known), describe_unheard(known)))
        lost = _broken.get(self.real_pg) or ", ".join(missing)
        _broken[self.real_pg] = lost
        reason = str(error).splitlines()[0]
        return RankError(
            f"rank {self._number} of {self._count} waited for {what}: "
            f"{lost or 'not all ranks arrived'}: {reason}"
        )

    def _introduce(self) -> None:
        """Exchange the processes' identities once per group, so that errors can name ranks that
        died.
        """
        if self._count == 1 or self.real_pg in _identities:
            return
        _identities[self.real_pg] = []
        with contextlib.suppress(Exception):  # if a rank is lost before all have exchanged them
            self._store().set(_STORE_KEY.format(self._number), own_identity())
        _identities[self.real_pg] = self._gather(own_identity(), "the ranks to begin")

    def _store(self) -> Any:
        """The group's key-value store. torch has no public function for it."""
        import torch.distributed.distributed_c10d as c10d

        return c10d._world.pg_map[self.real_pg][1]

    def _published_identities(self) -> list[bytes]:
        """The identities that ranks have put into the store, b"" of others; [] if it can't be read.
        """
        try:
            store, keys = self._store(), [_STORE_KEY.format(rank) for rank in range(self._count)]
            return [bytes(store.get(key)) if store.check([key]) else b"" for key in keys]
        except Exception:  # of the store, which a lost rank may have held
            return []

    def _begin(self, begin: Callable[[], Any], what: str) -> Callable[[], None]:
        """Start a collective; the returned function waits for it."""
        if self.real_pg in _broken:
            raise self._explain(RuntimeError("an earlier wait has failed: make a new group"), what)
        try:
            work = begin()
        # the group was destroyed, or lost its connections
        except (RuntimeError, ValueError) as error:
            raise self._explain(error, what) from error

        def finish() -> None:
            start = time.monotonic()
            try:
                limit = self._limit()
                if limit is None:
                    work.wait()
                else:
                    work.wait(limit)
            except RuntimeError as error:
                raise self._explain(error, what) from error
            finally:
                if self._seconds_left is not None:
                    self._seconds_left -= time.monotonic() - start

        return finish

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        """Run a collective and wait for it."""
        self._begin(begin, what)()

    def exchange(self, message: bytes, what: str) -> list[bytes]:
        """Return every rank's message."""
        self._introduce()
        return self._gather(message, f"the ranks to agree on {what}")

    def _gather(self, message: bytes, what: str) -> list[bytes]:
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        every = [torch.empty_like(mine) for _ in range(self.size())]
        self._wait(lambda: dist.all_gather(every, mine, group=self.real_pg, async_op=True), what)
        return [bytes(one.cpu().numpy()) for one in every]

    def exchange_texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text: sizes first, then all of the largest size."""
        data = text.encode(errors="surrogatepass")
        sizes = [int.from_bytes(m, "little")
                 for m in self.exchange(len(data).to_bytes(8, "little"), what)]
        if max(sizes) > _TEXT_BYTES_MAX:
            from ..._ranks.agreement import RankError

            raise RankError(f"too much data for {what} on one rank: {max(sizes)} bytes")
        padded = self.exchange(data.ljust(max(sizes), b"\0"), what)
        return [message[:size].decode(errors="surrogatepass")
                for message, size in zip(padded, sizes, strict=True)]

    def broadcast(self, dst: TensorBase, rank: int) -> None:
        """Broadcast rank's dst to all, as bytes, because backends lack some dtypes."""
        self.begin_broadcast(dst, rank)()

    def begin_broadcast(self, dst: TensorBase, rank: int) -> Callable[[], None]:
        """Start broadcasting rank's dst; the returned function waits for it."""
        import torch.distributed as dist

        flat = _bytes(dst)
        carrier = flat.to(self._device)
        wait = self._begin(
            lambda: dist.broadcast(carrier, self._global(rank), group=self.real_pg, async_op=True),
            f"{flat.numel()} bytes from rank {rank}",
        )

        def finish() -> None:
            wait()
            if carrier is not flat and self._number != rank:
                flat.copy_(carrier)

        return finish

    def send(self, t: TensorBase, dst_rank: int, tag: int) -> None:
        """Send a tensor's bytes to a rank."""
        import torch.distributed as dist

        data = _bytes(t).to(self._device)
        self._wait(
            lambda: dist.isend(data, self._global(dst_rank), group=self.real_pg, tag=tag),
            f"rank {dst_rank} to take {data.numel()} bytes",
        )

    def recv(self, t: TensorBase, src_rank: int, tag: int) -> None:
        """Receive a tensor's bytes from a rank."""
        import torch.distributed as dist

        flat = _bytes(t)
        carrier = torch.empty_like(flat, device=self._device) if self._device != _HOST else flat
        self._wait(
            lambda: dist.irecv(carrier, self._global(src_rank), group=self.real_pg, tag=tag),
            f"{flat.numel()} bytes from rank {src_rank}",
        )
        if carrier is not flat:
            flat.copy_(carrier)


def _bytes(tensor: TensorBase) -> torch.Tensor:
    raw = tensor.get_raw()
    flat: torch.Tensor = raw.view(-1) if raw.dim() else raw.reshape(1)
    return flat.view(torch.uint8)


def _frame_bytes(frame: Any) -> int:
    begin, end = frame.data_offsets
    return int(end - begin)


class TorchOp(FrameworkOpBase):
    """The torch adapter."""

    def get_name(self) -> str:
        """Return "pytorch"."""
        return "pytorch"

    def wrap(self, tensor: Any) -> TorchTensor:
        """Create a torch tensor that shares the memory of a Tensor."""
        raw = wrap_core(tensor)
        return TorchTensor(Device.of(raw.device), DType(tensor.dtype), raw)

    def make(self, loader: Any, index: int) -> torch.Tensor:
        """Create a torch tensor from item `index` of a load."""
        return make_item(loader, index)

    def adopt(self, raw: torch.Tensor, dtype: DType) -> TorchTensor:
        """Wrap a tensor from make()."""
        where = _CPU if raw.device == _HOST else Device.of(raw.device)
        return TorchTensor(where, dtype, raw)

    def load_options(self, device: Device, gds: str) -> dict[str, Any]:
        """Options of Model.load() for a device."""
        return load_options(device.as_str(), gds)

    def wrap_tensor(self, tensor: torch.Tensor) -> TorchTensor:
        """Wrap a torch tensor."""
        return TorchTensor(Device.of(tensor.device), fst_dtype(tensor.dtype), tensor)

    def get_process_group(self, pg: Any, timeout: float | None = None) -> ProcessGroupBase:
        """Return a group for None, a SingleGroup or a torch group."""
        check_timeout(timeout)
        if pg is None or isinstance(pg, SingleGroup):
            return SingleProcessGroup()
        import torch.distributed as dist

        if dist.is_available() and isinstance(pg, dist.ProcessGroup):
            return TorchProcessGroup(pg, timeout)
        raise TypeError("pg must be an instance of torch.disributed.ProcessGroup")

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> TorchTensor:
        """Return an uninitialised tensor."""
        native = list(shape)
        if dtype is DType.F4 and native:
            native[-1] //= 2
        real = torch.empty(native, dtype=dtype_convert[dtype], device=device.as_str())
        return TorchTensor(device, dtype, real)

    def concat_tensors(self, tensors: list[TensorBase], dim: int) -> TorchTensor:
        """Concatenate along a dimension."""
        return self.wrap_tensor(torch.cat([tensor.get_raw() for tensor in tensors], dim=dim))

    def is_equal(self, wrapped: TensorBase, real: Any) -> bool:
        """Tell whether shape and values are equal."""
        return bool(torch.all(torch.eq(real, wrapped.get_raw())))

    def get_runtime_lib_dirs(self) -> list[str]:
        """Return the folder of torch's libraries."""
        return [os.path.join(os.path.dirname(torch.__file__), "lib")]

    def get_global_rank(self) -> int:
        """Return this process's rank in torch.distributed; 0 without."""
        import torch.distributed as dist

        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def get_device_name(self, index: int) -> str:
        """Return torch's name of a GPU, or ""."""
        return torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""

    def mmap_file_pinned(self, filename: str, length: int, offset: int) -> TorchTensor:
        """Read bytes of a file into pinned memory; RuntimeError without a GPU."""
        real = torch.empty(length, dtype=torch.uint8, pin_memory=True)
        with open(filename, "rb", buffering=0) as file:
            file.seek(offset)
            bytes_of: Any = real.numpy()
            view, done = memoryview(bytes_of), 0
            while done < length:
                count = file.readinto(view[done:])
                if not count:
                    raise OSError(f"{filename}: the file lacks {length} bytes at offset {offset}")
                done += count
        return self.wrap_tensor(real)

    def begin_broadcast_run(
        self, pg: ProcessGroupBase, owned: list[TensorBase] | None, frames: list[Any], src: int
    ) -> Callable[[], list[TensorBase]] | None:
        """Start broadcasting tensors of one rank as one buffer; all returned tensors are views
        of it.
        """
        sizes = [_frame_bytes(frame) for frame in frames]
        begins, total = [], 0
        for size in sizes:
            begins.append(total)
            total += -(-size // 16) * 16  # align every dtype
        # The device of the backend's messages: the GPU for NCCL.
        device = getattr(pg, "bytes_device", _HOST)
        buffer = torch.empty(total, dtype=torch.uint8, device=device)
        for begin, tensor in zip(begins, owned or [], strict=False):
            if tensor.get_nbytes():
                buffer[begin : begin + tensor.get_nbytes()] = _bytes(tensor.contiguous())
        where = Device.of(buffer.device)
        wait = pg.begin_broadcast(TorchTensor(where, DType.U8, buffer), src) if total else None

        def finish() -> list[TensorBase]:
            if wait is not None:
                wait()
            result: list[TensorBase] = []
            for begin, size, frame in zip(begins, sizes, frames, strict=True):
                shape = list(frame.shape)
                if frame.dtype is DType.F4 and shape:
                    shape[-1] //= 2
                flat = buffer[begin : begin + size].view(dtype_convert[frame.dtype])
                result.append(TorchTensor(where, frame.dtype, flat.reshape(shape)))
            return result

        return finish

    def get_mem_used(self) -> int:
        """Return the bytes of the loaders' buffers that are not freed yet."""
        return live_buffers()[1]

    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> TorchTensor:
        """Create a tensor from a DLPack capsule."""
        return TorchTensor(device, dtype, torch.from_dlpack(dl_tensor))

    def get_native_shape(self, dtype: DType, st_shape: list[int]) -> list[int]:
        """Return torch's shape, which counts pairs of 4-bit floats."""
        return list(torch_shape(dtype.value, st_shape))

    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> TorchTensor:
        """Return normal random values."""
        return self.wrap_tensor(
            torch.randn(s, device=device.as_str(), dtype=dtype_convert[dtype])
        )

    def copy_tensor(self, dst: TensorBase, src: TensorBase) -> None:
        """Copy src's values to dst."""
        dst.get_raw().copy_(src.get_raw())

    def get_cuda_ver(self) -> str:
        """Return torch's CUDA version: "12.8", "hip..." or "0.0"."""
        hip = getattr(torch.version, "hip", None)
        return f"hip-{hip}" if hip else str(torch.version.cuda or "0.0")

    def support_fp8(self) -> bool:
        """Tell whether 8-bit floats are supported."""
        return DType.F8_E5M2 in dtype_convert

    def set_device(self, device: Device) -> None:
        """Make a GPU current."""
        if not device.is_cpu:
            torch.cuda.set_device(device.as_str())

    def synchronize(self, device: Device) -> None:
        """Synchronise a GPU."""
        if not device.is_cpu:
            torch.cuda.synchronize(device.as_str())


def make() -> TorchOp:
    """Return the adapter."""
    return TorchOp()


def get_framework_op() -> FrameworkOpBase:
    """Return the only instance of the adapter."""
    from . import get_framework_op as find

    return find("pytorch")
