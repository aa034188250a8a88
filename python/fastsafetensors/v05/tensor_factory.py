# SPDX-License-Identifier: Apache-2.0
"""LazyTensorFactory: one file with one reader, as programs for fastsafetensors 0.5 use it."""

from __future__ import annotations

from typing import Any

from .._ranks.rank_parts import block_of
from .frameworks import FrameworkOpBase, ProcessGroupBase, TensorBase
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
        """Store the file to read."""
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

    def submit_io(
        self,
        use_buf_register: bool = True,
        max_copy_block_size: int = 1 << 34,
        allow_inflight: bool = False,
    ) -> None:
        """Start reading."""
        self.gbuf = self.copier.submit_io(use_buf_register, max_copy_block_size)

    def wait_io(
        self, dtype: DType = DType.AUTO, noalign: bool = False, borrowed_tensors: bool = False
    ) -> None:
        """Wait for all bytes."""
        self.tensors = self.copier.wait_io(self.gbuf, dtype, noalign)
        self.copier.finish_io()

    # In a group, all ranks must call these in the same order; `rank` is the one with the tensors.

    def _side(self, pg: ProcessGroupBase, tensor_name: str) -> TensorBase:
        """This rank's tensor, or memory for it."""
        if pg.rank() == self.rank:
            return self.tensors[tensor_name].contiguous()
        frame = self.metadata.tensors[tensor_name]
        return self.framework.get_empty_tensor(list(frame.shape), frame.dtype, self.device)

    def push(
        self, pg: ProcessGroupBase, tensor_name: str, dst_rank: int, src_rank: int
    ) -> TensorBase | None:
        """Return a tensor of src_rank's on dst_rank, None on all others."""
        if pg.rank() not in (dst_rank, src_rank):
            return None
        tensor = self._side(pg, tensor_name)
        if src_rank != dst_rank and tensor.get_nbytes():
            if pg.rank() == src_rank:
                pg.send(tensor, dst_rank, 0)
            else:
                pg.recv(tensor, src_rank, 0)
        return tensor if pg.rank() == dst_rank else None

    def shuffle(self, pg: ProcessGroupBase, tensor_name: str, dim: int) -> TensorBase:
        """Return this rank's block of a tensor along a dimension; -1: the whole tensor."""
        tensor = self._side(pg, tensor_name)
        if pg.size() > 1 and tensor.get_nbytes():
            pg.broadcast(tensor, self.rank)
        if dim == -1 or pg.size() == 1:
            return tensor
        size = self.metadata.tensors[tensor_name].shape[dim]
        cut = (slice(None),) * dim + (slice(*block_of(size, pg.rank(), pg.size())),)
        return tensor[cut].contiguous()

    def shuffle_multi_cols(
        self, pg: ProcessGroupBase, tensor_names: list[str], dim: int
    ) -> TensorBase:
        """Return the concatenation of this rank's blocks of several tensors."""
        parts = [self.shuffle(pg, name, dim) for name in tensor_names]
        return self.framework.concat_tensors(parts, max(dim, 0))

    def free_dev_ptrs(self) -> None:
        """Free the reader's buffer. Tensors own their memory."""
        self.gbuf = None

    def close(self) -> None:
        """Free the tensors. Returned ones stay valid."""
        self.tensors = {}
        self.gbuf = None
