# SPDX-License-Identifier: Apache-2.0
"""A view of a stored tensor: where its bytes are, and its plain tensor once it is read.

Invariants: shared memory is never written. The lock of the stored tensor protects all changes;
other threads may look at `tensor` without it.
"""

from __future__ import annotations

import math
from typing import Any

from .._torch.torch_installed import torch as _torch
from . import view_arguments
from . import view_geometry as geometry
from .lazy_dtypes import Reads
from .lazy_reads import Stored
from .lazy_writers import ELEMENTS, LAYOUT, STORAGE, STORED
from .torch_modes import outside_modes
from .view_geometry import View


class LazyView:
    """The state of a lazy tensor and its aliases. Thread-safe.

    tensor: the plain tensor, or None. is_shared: its memory is shared. has_stored: its private
    memory holds the whole stored tensor. has_changed: it no longer has the view's geometry or
    dtype, after t_(), or half() of its module.
    """

    # In the class, because there are tens of thousands of views, most with these values.
    tensor: Any = None
    is_shared = False
    has_stored = False
    has_changed = False

    def __init__(self, reads: Reads, stored: Stored, view: View) -> None:
        self.reads = reads
        self.stored = stored
        self.view = view

    def with_tensor(self, tensor: Any) -> LazyView:
        """Return the same view with another plain tensor."""
        made = LazyView(self.reads, self.stored, self.view)
        vars(made).update(vars(self))
        made.tensor = tensor
        return made

    def read(self, to_copy: bool = False) -> Any:
        """Return the plain tensor, reading it on the first call. to_copy: it is only copied."""
        if self.tensor is not None:
            return self.tensor
        with self.stored.lock:
            if self.tensor is None:
                with outside_modes():
                    tensor, self.is_shared = self._read_bytes(to_copy)
                self.tensor = tensor  # last, for threads that look without the lock
            return self.tensor

    def _read_bytes(self, to_copy: bool) -> tuple[Any, bool]:
        """(plain tensor, whether its memory is shared)."""
        stored, view = self.stored, self.view
        if 0 in view.sizes:
            return _torch.empty(view.sizes, dtype=stored.dtype, device=self.reads.device), False
        box = geometry.cover(stored.shape, stored.pitches, view)
        data, begin, is_shared = self.reads.read(stored, (box.begin, box.end), to_copy)
        if begin is not None:
            return data.as_strided(view.sizes, view.strides, begin + view.offset), is_shared
        inside = box.view
        if inside is not None:
            data = data.as_strided(
                inside.sizes, inside.strides, data.storage_offset() + inside.offset)
        return data, is_shared

    def make_private(self) -> Any:
        """Return the plain tensor in private memory."""
        with self.stored.lock:
            tensor = self.read()
            if self.is_shared:
                with outside_modes():
                    self.tensor = tensor.clone()
                self.is_shared = False
            return self.tensor

    def has_layout(self) -> bool:
        """Tell whether the tensor that was read has the view's strides and offset."""
        tensor, view = self.tensor, self.view
        return (self.has_changed or 0 in view.sizes
                or (tensor.stride() == view.strides and tensor.storage_offset() == view.offset))

    def make_private_layout(self) -> Any:
        """Return the plain tensor in private memory, with the view's strides and offset.

        Memory around the view is zero, and only takes address space. On a GPU it would take memory,
        so there the offset differs.
        """
        with self.stored.lock:
            tensor, view, stored = self.read(), self.view, self.stored
            if not self.is_shared and self.has_layout():
                return tensor
            is_cpu = self.reads.device.type == "cpu"
            if not is_cpu and tensor.stride() == view.strides:
                return self.make_private()
            with outside_modes():
                offset = view.offset if is_cpu else 0
                end = 1 + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True))
                count = stored.pitches[0] * stored.shape[0] if stored.shape else 1
                memory = _torch.zeros(
                    count if is_cpu else end, dtype=tensor.dtype, device=tensor.device)
                self._replace(
                    view_arguments.put_into(memory, tensor.detach(), view, offset), False)
            return self.tensor

    def make_private_stored(self) -> Any:
        """Return the plain tensor as a view of private memory with the whole stored tensor."""
        with self.stored.lock:
            stored, view = self.stored, self.view
            if self.has_changed or self.has_stored:
                return self.tensor
            tensor = self.read()
            with outside_modes():
                if self._is_whole():
                    self._replace(tensor.detach().clone(), True)
                    return self.tensor
                whole = whole_view(self.reads, stored).read().reshape(-1).clone()
                if 0 in view.sizes:
                    placed = whole.as_strided(view.sizes, view.strides, view.offset)
                else:
                    placed = view_arguments.put_into(whole, tensor.detach(), view, view.offset)
                self._replace(placed, True)
            return self.tensor

    def make_private_storage(self) -> Any:
        """Do as make_private_stored(), but in storage that may not be resizable."""
        with self.stored.lock:
            tensor = self.read()
            has_all = self._is_whole() and not self.is_shared and self.has_layout()
            return tensor if has_all else self.make_private_stored()

    def _is_whole(self) -> bool:
        return self.view.sizes == self.stored.shape and self.view.strides == self.stored.pitches

    def _replace(self, tensor: Any, has_stored: bool) -> None:
        """Replace the plain tensor by one with the same elements in other, private memory."""
        if self.tensor.is_leaf and (self.tensor.requires_grad or self.tensor.grad is not None):
            self.tensor.data = tensor.detach()  # the same leaf of graphs, with its gradient
        else:
            self.tensor = tensor
        self.is_shared, self.has_stored = False, has_stored

    def make_meta(self) -> Any:
        """Return a tensor on the meta device with the same geometry."""
        if self.has_changed:
            return self.tensor.detach().to("meta")
        base = _torch.empty(math.prod(self.stored.shape), dtype=self.stored.dtype, device="meta")
        return base.as_strided(self.view.sizes, self.view.strides, self.view.offset)


def whole_view(reads: Reads, stored: Stored) -> LazyView:
    """Return the view of a whole stored tensor."""
    return LazyView(reads, stored, View(stored.shape, stored.pitches, 0))


# What makes the memory that a function needs.
MAKE_PRIVATE = {
    ELEMENTS: LazyView.make_private, LAYOUT: LazyView.make_private_layout,
    STORED: LazyView.make_private_stored, STORAGE: LazyView.make_private_storage,
}
