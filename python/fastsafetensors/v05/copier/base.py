# SPDX-License-Identifier: Apache-2.0
"""What a reader of one's own implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..frameworks import TensorBase
from ..st_types import DType


class DummyDeviceBuffer:
    """A device buffer that owns nothing: for readers whose tensors hold their own memory."""

    def __init__(self) -> None:
        """Make an empty one."""

    def get_base_address(self) -> int:
        """Return 0."""
        return 0


class CopierInterface(ABC):
    """Reads one file. The loader calls submit_io(), then wait_io()."""

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Begin to read; return the device buffer."""

    @abstractmethod
    def wait_io(
        self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        """Wait for all bytes; return the tensors by name."""

    def set_byte_ranges(  # noqa: B027 - may be left out
        self, ranges: Sequence[tuple[int, int]] | None
    ) -> None:
        """Be told which bytes of the file are wanted; reading all of them is allowed."""

    def set_chunk(
        self,
        ranges: Sequence[tuple[int, int]],
        names: Sequence[str],
        allocation_size: int | None = None,
    ) -> None:
        """Be told to read only these tensors. Readers that can't leave this out."""
        raise NotImplementedError(f"{type(self).__name__} reads whole files only")

    def finish_io(self) -> None:  # noqa: B027 - may be left out
        """Be told that all tensors were taken."""

    def enable_tensor_readiness(self) -> bool:
        """Tell whether wait_tensor() can give tensors one by one."""
        return False

    def prepare_tensors(self, gbuf: Any, owner: Any = None) -> dict[str, TensorBase]:
        """Return tensors whose bytes may still be on their way."""
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
        """Return the bytes that a chunk needs beside its tensors."""
        return 0

    @classmethod
    def fixed_device_overhead(cls, paths: Sequence[str]) -> int:
        """Return the bytes that the reader holds all the time."""
        return 0
