# SPDX-License-Identifier: Apache-2.0
"""LazyTensorFactory: one file by one reader, as programs for fastsafetensors 0.5 drive it."""

from __future__ import annotations

from typing import Any

from .frameworks import FrameworkOpBase, TensorBase
from .st_types import Device, DType


class LazyTensorFactory:
    """A file that a reader loads: submit_io(), wait_io(), then tensors by name.

    tensors: {name: TensorBase} once read; gbuf: the reader's buffer; metadata: the header.
    """

    def __init__(
        self,
        metadata: Any,
        device: Device,
        rank: int,
        local_rank: int,
        factory_idx_bits: int,
        lidx: int,
        copier: Any,
        framework: FrameworkOpBase,
        disable_cache: bool = True,
    ) -> None:
        """Keep what is to be read; nothing is read yet."""
        self.metadata = metadata
        self.device = device
        self.rank = rank
        self.local_rank = local_rank
        self.factory_idx_bits = factory_idx_bits
        self.lidx = lidx
        self.copier = copier
        self.framework = framework
        self.disable_cache = disable_cache
        self.gbuf: Any = None
        self.tensors: dict[str, TensorBase] = {}

    def submit_io(self, use_buf_register: bool = True, max_copy_block_size: int = 1 << 34) -> None:
        """Begin to read."""
        self.gbuf = self.copier.submit_io(use_buf_register, max_copy_block_size)

    def wait_io(self, dtype: DType = DType.AUTO, noalign: bool = False) -> None:
        """Wait for all bytes."""
        self.tensors = self.copier.wait_io(self.gbuf, dtype, noalign)
        self.copier.finish_io()

    def close(self) -> None:
        """Let go of the tensors; those handed out stay valid."""
        self.tensors = {}
        self.gbuf = None
