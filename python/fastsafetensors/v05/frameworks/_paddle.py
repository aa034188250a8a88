# SPDX-License-Identifier: Apache-2.0
"""The paddle adapter of the 0.5 loaders."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..._base.dtypes import WORDS
from ..._base.errors import printable
from ..._base.options import check_timeout
from ..._core import live_buffers
from ..._ranks.process_group import ProcessGroupBase, SingleGroup, SingleProcessGroup
from ..st_types import Device, DeviceType, DType
from . import FrameworkOpBase, TensorBase

paddle: Any = importlib.import_module("paddle")

# paddle has no unsigned types beyond 8 bits: U16 holds bfloat16 bits, U32 and U64 use the signed
# types of the same width.
dtype_convert: dict[DType, str] = {
    **{DType(name): word for name, word in WORDS.items() if name not in (
        "F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    DType.U16: "bfloat16",
    DType.U32: "int32",
    DType.U64: "int64",
}
_BACK = {word: DType(name) for name, word in WORDS.items() if DType(name) in dtype_convert}


def fst_dtype(dtype: Any) -> DType:
    """Return our DType of a paddle dtype."""
    name = str(dtype).rpartition(".")[2]
    if name not in _BACK:
        raise ValueError(f"the format has no dtype {dtype}")
    return _BACK[name]


def _place(device: Device) -> str:
    """paddle's name of a device: gpu instead of cuda."""
    if device.type is DeviceType.CPU:
        return "cpu"
    return f"gpu:{device.index or 0}"


class PaddleTensor(TensorBase):
    """A paddle tensor with this API's names of device and dtype."""

    def __init__(self, device: Device, dtype: DType, real_tensor: Any) -> None:
        """Wrap a tensor."""
        self.device = device
        self.dtype = dtype
        self.real_tensor = real_tensor

    def _again(self, real: Any) -> PaddleTensor:
        return PaddleTensor(self.device, fst_dtype(real.dtype), real)

    def get_raw(self) -> Any:
        """Return the paddle tensor."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.real_tensor.shape)

    def get_nbytes(self) -> int:
        """Return the number of bytes."""
        return int(self.real_tensor.numel()) * int(self.real_tensor.element_size())

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> PaddleTensor:
        """Return it on another device or with another dtype."""
        real = self.real_tensor
        if dtype is not DType.AUTO:
            real = real.astype(dtype_convert[dtype])
        if device is None:
            return self._again(real)
        where = Device.of(device)
        return PaddleTensor(where, fst_dtype(real.dtype), real.to(_place(where)))

    def clone(self) -> PaddleTensor:
        """Return a copy."""
        return self._again(self.real_tensor.clone())

    def detach(self) -> PaddleTensor:
        """Return it detached from the graph."""
        return self._again(self.real_tensor.detach())

    def contiguous(self) -> PaddleTensor:
        """Return it in contiguous memory."""
        return self._again(self.real_tensor.contiguous())

    def reshape(self, shape: list[int]) -> PaddleTensor:
        """Return it in another shape."""
        return self._again(self.real_tensor.reshape(shape))

    def view(self, dtype: DType) -> PaddleTensor:
        """Return its bits as another dtype."""
        return self._again(self.real_tensor.view(dtype_convert[dtype]))

    def __getitem__(self, key: Any) -> PaddleTensor:
        """Return a part."""
        return self._again(self.real_tensor[key])

    def data_ptr(self) -> int:
        """Return the address of its first byte."""
        return int(self.real_tensor.data_ptr())

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copy its bytes into a buffer of the same size."""
        buf[:] = np.ascontiguousarray(self.real_tensor.numpy()).tobytes()


class PaddleProcessGroup(ProcessGroupBase):
    """A paddle.distributed group."""

    def __init__(self, pg: Any) -> None:
        """Wrap a group."""
        self.real_pg = pg

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self.real_pg.nranks)

    def rank(self) -> int:
        """Return this process's rank."""
        return int(self.real_pg.rank)

    def broadcast(self, dst: TensorBase, rank: int) -> None:
        """Broadcast rank's dst to all."""
        paddle.distributed.broadcast(dst.get_raw(), self.real_pg.ranks[rank], group=self.real_pg)

    def send(self, t: TensorBase, dst_rank: int, tag: int) -> None:
        """Send a tensor to a rank."""
        paddle.distributed.send(t.get_raw(), self.real_pg.ranks[dst_rank], group=self.real_pg)

    def recv(self, t: TensorBase, src_rank: int, tag: int) -> None:
        """Receive a tensor from a rank."""
        paddle.distributed.recv(t.get_raw(), self.real_pg.ranks[src_rank], group=self.real_pg)


class PaddleOp(FrameworkOpBase):
    """The paddle adapter."""

    def get_name(self) -> str:
        """Return "paddle"."""
        return "paddle"

    def wrap(self, tensor: Any) -> PaddleTensor:
        """Create a paddle tensor from a Tensor."""
        from ... import numpy as fst_numpy

        dtype = DType(tensor.dtype)
        if dtype not in dtype_convert:
            raise ValueError(f"{printable(tensor.name)}: paddle has no dtype for {dtype.value}")
        array = fst_numpy.wrap(tensor)
        if dtype in (DType.BF16, DType.U16):
            array = array.view(np.uint16)  # paddle's form of bfloat16
        elif dtype in (DType.U32, DType.U64):
            array = array.view(np.int32 if dtype is DType.U32 else np.int64)
        real = paddle.to_tensor(array, dtype=dtype_convert[dtype], place="cpu")
        return PaddleTensor(Device.from_str("cpu"), dtype, real)

    def adopt(self, raw: Any, dtype: DType) -> PaddleTensor:
        """Wrap a tensor from make()."""
        return PaddleTensor(Device.from_str("cpu"), dtype, raw)

    def wrap_tensor(self, tensor: Any) -> PaddleTensor:
        """Wrap a paddle tensor."""
        place = str(getattr(tensor, "place", "cpu"))
        device = Device.from_str("gpu:0" if "gpu" in place.lower() else "cpu")
        return PaddleTensor(device, fst_dtype(tensor.dtype), tensor)

    def get_process_group(self, pg: Any, timeout: float | None = None) -> ProcessGroupBase:
        """Return a group for None, a SingleGroup or a paddle group."""
        check_timeout(timeout)
        if pg is None or isinstance(pg, SingleGroup):
            return SingleProcessGroup()
        if hasattr(pg, "nranks") and hasattr(pg, "ranks"):
            return PaddleProcessGroup(pg)
        raise TypeError("pg must be an instance of paddle.distributed.collective.Group")

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> PaddleTensor:
        """Return an uninitialised tensor."""
        return PaddleTensor(device, dtype, paddle.empty(shape, dtype=dtype_convert[dtype]))

    def concat_tensors(self, tensors: list[TensorBase], dim: int) -> PaddleTensor:
        """Concatenate along a dimension."""
        return self.wrap_tensor(paddle.concat([t.get_raw() for t in tensors], axis=dim))

    def is_equal(self, wrapped: TensorBase, real: Any) -> bool:
        """Tell whether shape and values are equal."""
        return bool(paddle.equal_all(wrapped.get_raw(), real))

    def get_mem_used(self) -> int:
        """Return the bytes of the loaders' buffers that are not freed yet."""
        return live_buffers()[1]


def make() -> PaddleOp:
    """Return the adapter."""
    return PaddleOp()
