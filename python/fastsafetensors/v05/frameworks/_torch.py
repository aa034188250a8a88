# SPDX-License-Identifier: Apache-2.0
"""The torch adapter of the 0.5 loaders."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from ..._base.dtypes import WORDS, bits_of
from ..._base.errors import printable
from ..._base.regular_files import open_regular
from ..._core import live_buffers
from ..._ranks.process_group import ProcessGroupBase
from ..._ranks.torch_group import TorchProcessGroup as TorchProcessGroup
from ..._ranks.torch_group import bytes_of, open_group
from ..._torch.gpu import load_options
from ..._torch.torch_installed import torch
from ..._torch.torch_state import torch_dtype_of, torch_shape
from ..._torch.torch_tensors import make_item, shape_bytes
from ..._torch.torch_tensors import wrap as wrap_core
from ..st_types import Device, DType
from . import FrameworkOpBase, TensorBase

# torch's dtype for each DType that this torch has.
dtype_convert: dict[DType, torch.dtype] = {
    DType(name): getattr(torch, torch_name)
    for name, torch_name in WORDS.items()
    if hasattr(torch, torch_name)
}
_CPU = Device.from_str("cpu")
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
        try:
            return open_group(pg, timeout)
        except TypeError as error:
            if not str(error).startswith("group "):
                raise
            # The text of 0.5, to the letter.
            raise TypeError("pg must be an instance of torch.disributed.ProcessGroup") from None

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> TorchTensor:
        """Return an uninitialised tensor."""
        if torch_dtype_of(dtype.value, shape) is None and 0 not in shape:
            size = math.prod(shape) * bits_of(dtype.value) // 8
            flat = torch.empty(size, dtype=torch.uint8, device=device.as_str())
            return TorchTensor(device, dtype, shape_bytes(flat, dtype.value, shape))
        real = torch.empty(torch_shape(dtype.value, shape), device=device.as_str(),
                           dtype=dtype_convert.get(dtype, torch.uint8))
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
        with open(open_regular(filename), "rb", buffering=0) as file:
            file.seek(offset)
            bytes_of: Any = real.numpy()
            view, done = memoryview(bytes_of), 0
            while done < length:
                count = file.readinto(view[done:])
                if not count:
                    raise OSError(f"{printable(filename)}: the file lacks {length} bytes at "
                                  f"offset {offset}")
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
                buffer[begin : begin + tensor.get_nbytes()] = bytes_of(tensor.contiguous())
        where = Device.of(buffer.device)
        wait = pg.begin_broadcast(TorchTensor(where, DType.U8, buffer), src) if total else None

        def finish() -> list[TensorBase]:
            if wait is not None:
                wait()
            result: list[TensorBase] = []
            for begin, size, frame in zip(begins, sizes, frames, strict=True):
                if size == 0:
                    result.append(self.get_empty_tensor(frame.shape, frame.dtype, where))
                    continue
                real = shape_bytes(buffer[begin : begin + size], frame.dtype.value, frame.shape)
                result.append(TorchTensor(where, frame.dtype, real))
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
