# SPDX-License-Identifier: Apache-2.0
"""The interface of custom readers.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..frameworks import TensorBase
from ..st_types import DType


class DummyDeviceBuffer:
    """A device buffer without memory, for readers whose tensors own theirs."""

    def __init__(self) -> None:
        """Create an empty one."""

    def get_base_address(self) -> int:
        """Return 0."""
        return 0

    def get_length(self) -> int:
        """Return 0."""
        return 0

    def cufile_register(self, *args: Any) -> int:
        """Do nothing, because there is no memory. Returns 0."""
        return 0

    def cufile_deregister(self, *args: Any) -> int:
        """Do nothing. Returns 0."""
        return 0

    def memmove(self, *args: Any) -> int:
        """Do nothing. Returns 0."""
        return 0


def validated_byte_ranges(
    metadata: Any, byte_ranges: Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]] | None:
    """Return sorted ranges of a file; ValueError if they overlap or exceed the file."""
    if byte_ranges is None:
        return None
    ranges = sorted((int(begin), int(end)) for begin, end in byte_ranges)
    reached = 0
    for begin, end in ranges:
        if begin < reached or end < begin or end > metadata.size_bytes:
            raise ValueError(f"bytes {begin} to {end} overlap others, or lie outside of the file")
        reached = end
    return ranges


def validated_chunk_allocation_size(
    byte_ranges: Sequence[tuple[int, int]], allocation_size: int | None
) -> int:
    """Return how many bytes to allocate for a chunk; ValueError if it would not fit."""
    needed = max((end for _, end in byte_ranges), default=0) - min(
        (begin for begin, _ in byte_ranges), default=0
    )
    if allocation_size is not None and allocation_size < needed:
        raise ValueError(f"a chunk of {needed} bytes does not fit an allocation of "
                         f"{allocation_size}")
    return needed if allocation_size is None else allocation_size


class CopierInterface(ABC):
    """Reads one file. The loader calls submit_io(), then wait_io()."""

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Start reading; return the device buffer."""

    @abstractmethod
    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        """Wait for all bytes; return the tensors by name."""

    def set_byte_ranges(  # noqa: B027 - may be left out
        self, byte_ranges: Sequence[tuple[int, int]] | None
    ) -> None:
        """Receive the needed ranges of the file; reading everything is allowed."""

    def set_chunk(
        self,
        byte_ranges: Sequence[tuple[int, int]],
        names: Sequence[str],
        allocation_size: int | None = None,
    ) -> None:
        """Receive the names to read. Optional for readers."""
        raise NotImplementedError(f"{type(self).__name__} only reads whole files")

    def finish_io(self) -> None:  # noqa: B027 - may be left out
        """Clean up. Called after all tensors were returned."""

    def enable_tensor_readiness(self) -> bool:
        """Tell whether wait_tensor() can give tensors one by one."""
        return False

    def prepare_tensors(self, gbuf: Any, owner: Any = None) -> dict[str, TensorBase]:
        """Return tensors whose bytes may still be read."""
        raise NotImplementedError

    def wait_tensor(self, name: str) -> None:
        """Wait for one tensor's bytes."""
        raise NotImplementedError

    @classmethod
    def chunk_transient_multiplier(cls, paths: Sequence[str]) -> float:
        """Return how many times a chunk's bytes are needed while it is read."""
        return 1.0

    @classmethod
    def chunk_device_overhead(cls, paths: Sequence[str]) -> int:
        """Return the memory that a chunk needs in addition to its tensors."""
        return 0

    @classmethod
    def fixed_device_overhead(cls, paths: Sequence[str]) -> int:
        """Return the memory that the reader uses all the time."""
        return 0
