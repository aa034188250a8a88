# SPDX-License-Identifier: Apache-2.0
"""Memory that is still allocated, and reference-counted device buffers.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import threading
from typing import Any

from .._core import live_buffers


def live_allocation_count() -> int:
    """Number of tensor buffers of this process that are not freed yet.

    For programs written for fastsafetensors 0.5.
    """
    return live_buffers()[0]


def live_allocation_bytes() -> int:
    """Bytes of tensor buffers that are not freed yet.

    For programs written for fastsafetensors 0.5.
    """
    return live_buffers()[1]


class SharedDeviceAllocation:
    """A reference-counted device buffer: the last release frees it, if it is owned."""

    def __init__(self, gbuf: Any, framework: Any, device: Any, owns_memory: bool = True) -> None:
        """Start with one holder."""
        self.gbuf = gbuf
        self._framework = framework
        self._device = device
        self._owns = owns_memory
        self._count = 1
        self._lock = threading.Lock()

    def acquire(self) -> SharedDeviceAllocation:
        """Add a holder. RuntimeError once the buffer is freed."""
        with self._lock:
            if self._count <= 0:
                raise RuntimeError("the allocation was released")
            self._count += 1
        return self

    def release(self) -> None:
        """Remove a holder. Has no effect without holders."""
        with self._lock:
            if self._count <= 0:
                return
            self._count -= 1
            last = self._count == 0
        if last and self._owns and self._framework is not None:
            self._framework.free_tensor_memory(self.gbuf, self._device)

    @property
    def live(self) -> bool:
        """Whether the buffer is not freed yet."""
        return self._count > 0

    def refcount(self) -> int:
        """Return the number of holders."""
        return self._count

    def get_base_address(self) -> int:
        """Return the address of the buffer's first byte."""
        return int(self.gbuf.get_base_address())
