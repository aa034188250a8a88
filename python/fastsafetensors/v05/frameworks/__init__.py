# SPDX-License-Identifier: Apache-2.0
"""The framework interface of the 0.5 loaders, and its adapters."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from ..._base.errors import printable
from ..._ranks.process_group import ProcessGroupBase
from ..st_types import DTYPE_SIZES, Device, DType

__all__ = ["FrameworkOpBase", "ProcessGroupBase", "TensorBase", "get_framework_op"]

_MODULES = {"pytorch": "_torch", "pt": "_torch", "torch": "_torch", "paddle": "_paddle"}


class TensorBase(ABC):
    """A framework's tensor behind one interface; get_raw() is the tensor itself."""

    def __init__(self, device: Device, dtype: DType) -> None:
        """Store its device and dtype."""
        self.device = device
        self.dtype = dtype

    @abstractmethod
    def get_raw(self) -> Any:
        """Return the framework's tensor."""

    @abstractmethod
    def get_shape(self) -> list[int]:
        """Return the shape in elements."""

    @abstractmethod
    def get_nbytes(self) -> int:
        """Return the number of bytes."""

    @abstractmethod
    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TensorBase:
        """Return it on another device or with another dtype."""

    @abstractmethod
    def clone(self) -> TensorBase:
        """Return a copy."""

    @abstractmethod
    def detach(self) -> TensorBase:
        """Return it detached from the graph."""

    @abstractmethod
    def contiguous(self) -> TensorBase:
        """Return it in contiguous memory."""

    @abstractmethod
    def reshape(self, shape: list[int]) -> TensorBase:
        """Return it in another shape."""

    @abstractmethod
    def view(self, dtype: DType) -> TensorBase:
        """Return its bits as another dtype."""

    @abstractmethod
    def __getitem__(self, key: Any) -> TensorBase:
        """Return a part."""

    @abstractmethod
    def data_ptr(self) -> int:
        """Return the address of its first byte."""

    @abstractmethod
    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copy its bytes into a buffer of the same size."""


class FrameworkOpBase(ABC):
    """The functions of a framework that the loaders need."""

    @abstractmethod
    def get_name(self) -> str:
        """Return "pytorch" or "paddle"."""

    def make(self, loader: Any, index: int) -> Any:
        """Create a framework tensor from item `index` of a load, waiting for its bytes."""
        return self.wrap(loader.item(index)).get_raw()

    @abstractmethod
    def adopt(self, raw: Any, dtype: DType) -> TensorBase:
        """Wrap a tensor from make(); dtype: the format's."""

    @abstractmethod
    def wrap(self, tensor: Any) -> TensorBase:
        """Create a framework tensor that shares the memory of a Tensor."""

    def load_options(self, device: Device, gds: str) -> dict[str, Any]:
        """Options of Model.load() that bring tensors to a device; {}: to the CPU, from where they
        are moved. gds: "auto", "off" or "strict"."""
        return {}

    @abstractmethod
    def wrap_tensor(self, tensor: Any) -> TensorBase:
        """Wrap a framework tensor."""

    @abstractmethod
    def get_process_group(self, pg: Any, timeout: float | None = None) -> ProcessGroupBase:
        """Return a group for None, a SingleGroup or a framework group.

        timeout: seconds that each wait for other ranks may take; None: the group's own.
        """

    @abstractmethod
    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> TensorBase:
        """Return an uninitialised tensor; the shape counts the format's elements."""

    @abstractmethod
    def concat_tensors(self, tensors: list[TensorBase], dim: int) -> TensorBase:
        """Concatenate along a dimension."""

    @abstractmethod
    def is_equal(self, wrapped: TensorBase, real: Any) -> bool:
        """Tell whether shape and values are equal."""

    @abstractmethod
    def get_mem_used(self) -> int:
        """Return the bytes of the loaders' buffers that are not freed yet."""

    def begin_broadcast_run(
        self, pg: ProcessGroupBase, owned: list[TensorBase] | None, frames: list[Any], src: int
    ) -> Callable[[], list[TensorBase]] | None:
        """Start broadcasting tensors of one rank in one collective; None if the framework cannot.

        owned: src's tensors, None elsewhere; frames have dtype and shape. The returned function
        waits, and returns the tensors, which share memory.
        """
        return None

    def get_dtype_size(self, dtype: DType) -> float:
        """Return the bytes of an element."""
        return DTYPE_SIZES[dtype]

    def get_device_ptr_align(self) -> int:
        """Return the required address alignment of a device."""
        return 16

    # ---- functions for programs written for 0.5 ----

    def get_device(self, device: Any, pg: ProcessGroupBase) -> Device:
        """Convert anything that names a device to a Device."""
        return Device.of(device)

    def set_device(self, device: Device) -> None:  # noqa: B027 - only GPUs have a current one
        """Make a GPU current."""

    def synchronize(self, device: Device) -> None:  # noqa: B027 - nothing is queued
        """Synchronise a GPU."""

    def synchronize_current_stream(self, device: Device) -> None:
        """Synchronise the current stream of a GPU."""
        self.synchronize(device)

    def copy_tensor(self, dst: TensorBase, src: TensorBase) -> None:
        """Copy src's values to dst."""
        raise NotImplementedError(f"{self.get_name()} does not support copying tensors here")

    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> TensorBase:
        """Return normal random values."""
        raise NotImplementedError(f"{self.get_name()} does not support random tensors here")

    def get_cuda_ver(self) -> str:
        """Return the framework's CUDA version: "12.8", "hip-..." or "0.0"."""
        return "0.0"

    def support_fp8(self) -> bool:
        """Tell whether 8-bit floats are supported."""
        return False

    def broadcast_contiguous_run(
        self, pg: ProcessGroupBase, source_tensors: list[TensorBase], frames: list[Any],
        src_rank: int, device: Device,
    ) -> list[TensorBase] | None:
        """Broadcast tensors of one rank in one collective; None if the framework cannot.

        source_tensors: the rank's own, used only there; frames have dtype and shape. The tensors
        are on the group's device.
        """
        owned = list(source_tensors) if pg.rank() == src_rank else None
        wait = self.begin_broadcast_run(pg, owned, frames, src_rank)
        return None if wait is None else wait()

    def get_runtime_lib_dirs(self) -> list[str]:
        """Return the folders of libraries that the framework bundles."""
        return []

    def get_global_rank(self) -> int:
        """Return this process's global rank; 0 for a single process."""
        return 0

    def get_device_name(self, index: int) -> str:
        """Return the name of a GPU, or ""."""
        return ""

    def as_workaround_dtype(self, dtype: DType) -> DType:
        """Return a dtype of the same size that every backend supports: small floats as bytes."""
        if dtype in (DType.F4, DType.F8_E8M0):
            return DType.U8
        return DType.I8 if dtype.value.startswith("F8") else dtype

    def get_storage_shape(
        self, dtype: DType, shape: list[int], strides: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the shape and strides of a tensor's memory: in bytes for packed elements."""
        if dtype is not DType.F4:
            return shape, strides
        return [math.prod(shape) // 2], [1]

    def get_native_slices(
        self, dtype: DType, st_shape: list[int], slices: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Convert slices of the format's shape to the framework's, which counts pairs.

        ValueError for slices that split a pair.
        """
        if dtype is not DType.F4 or len(slices) < len(st_shape) or not slices:
            return slices
        last = slices[-1]
        if not isinstance(last, slice):
            raise ValueError(f"{dtype.value}: {last!r} is one element of a pair")
        begin, end, step = last.indices(st_shape[-1])
        if step != 1 or begin % 2 or end % 2:
            raise ValueError(f"{dtype.value}: {slices!r} splits pairs of elements")
        return (*slices[:-1], slice(begin // 2, end // 2, 1))

    def mmap_file_pinned(self, filename: str, length: int, offset: int) -> TensorBase:
        """Read bytes of a file into pinned memory."""
        raise NotImplementedError(f"{self.get_name()} does not support pinned memory here")

    # ---- for custom readers, which fill a buffer and create tensors over it ----

    def alloc_tensor_memory(self, length: int, dev: Device) -> Any:
        """Return a buffer of device memory, to be freed with free_tensor_memory()."""
        from ..cpp import cpu_malloc, gds_device_buffer, gpu_malloc

        address = cpu_malloc(length) if dev.is_cpu else gpu_malloc(length)
        return gds_device_buffer(address, length, not dev.is_cpu)

    def free_tensor_memory(self, gbuf: Any, dev: Device) -> None:
        """Free a buffer from alloc_tensor_memory(). No tensor may use it any more."""
        from ..cpp import cpu_free, gpu_free

        (cpu_free if dev.is_cpu else gpu_free)(gbuf.get_base_address())

    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> TensorBase:
        """Create a tensor from a DLPack capsule; dtype: its element type."""
        raise NotImplementedError(f"{self.get_name()} does not support DLPack capsules here")

    def get_native_shape(self, dtype: DType, st_shape: list[int]) -> list[int]:
        """Return the framework's shape for a format shape."""
        return list(st_shape)

    def iter_buffer_views(
        self, metadata: Any, gbuf: Any, device: Device, copy_start_offset: int, names: Any,
        owner: Any = None,
    ) -> Iterator[tuple[str, TensorBase]]:
        """Iterate over (name, tensor) of a filled buffer; see SafeTensorsMetadata.get_tensors()."""
        from ..dlpack import from_cuda_buffer

        first = gbuf.get_base_address() + metadata.header_length - copy_start_offset
        for name in names:
            frame = metadata.tensors[name]
            begin, end = frame.data_offsets
            if begin == end:
                yield name, self.get_empty_tensor(list(frame.shape), frame.dtype, device)
                continue
            size = end - begin
            bits = from_cuda_buffer(first + begin, [size], [1], DType.U8, device, owner or gbuf)
            flat = self.from_dlpack(bits, device, DType.U8)
            shape = self.get_native_shape(frame.dtype, list(frame.shape))
            yield name, flat.view(frame.dtype).reshape(shape)


_made: dict[str, FrameworkOpBase] = {}


def get_framework_op(name: str) -> FrameworkOpBase:
    """Return the adapter of "pytorch" (also "pt", "torch") or "paddle"; ImportError without it."""
    module = _MODULES.get(name)
    if module is None:
        raise ValueError(f"Unknown framework name: {printable(name)}")
    if module not in _made:
        _made[module] = importlib.import_module(f"fastsafetensors.frameworks.{module}").make()
    return _made[module]
