# SPDX-License-Identifier: Apache-2.0
"""The names of 0.5's readers. All use the library's pipeline, which chooses the engine."""

from __future__ import annotations

from typing import Any

from ..st_types import Device
from .registry import Construct, CoreCopier

__all__ = [
    "FgdsFileCopier",
    "GdsFileCopier",
    "NoGdsFileCopier",
    "ThreeFSFileCopier",
    "UnifiedMemCopier",
    "init_fgds",
    "init_gds",
    "is_unified_memory_system",
    "load_library_func",
    "new_fgds_file_copier",
    "new_gds_file_copier",
    "new_nogds_file_copier",
    "new_threefs_file_copier",
    "new_unified_copier",
]


class NoGdsFileCopier(CoreCopier):
    """Reads one file; the reader object that 0.5 requires is not needed."""

    def __init__(self, metadata: Any, device: Device, reader: Any, framework: Any) -> None:
        """Store the file to read."""
        super().__init__(metadata, device, framework)


class GdsFileCopier(NoGdsFileCopier):
    """The same, with 0.5's additional argument."""

    def __init__(
        self, metadata: Any, device: Device, reader: Any, framework: Any,
        fallback_cache: Any = None,
    ) -> None:
        """Store the file to read."""
        super().__init__(metadata, device, reader, framework)

    def set_o_direct(self, enable: bool) -> None:
        """Do nothing, because each load chooses the fastest engine."""


class FgdsFileCopier(NoGdsFileCopier):
    """The same, with 0.5's additional argument."""

    def __init__(
        self, metadata: Any, device: Device, reader: Any, framework: Any, max_threads: int = 16
    ) -> None:
        """Store the file to read."""
        super().__init__(metadata, device, reader, framework)


class ThreeFSFileCopier(NoGdsFileCopier):
    """The same: files on 3FS without its reader package."""


class UnifiedMemCopier(CoreCopier):
    """The same for CPU and GPU with shared memory."""

    def __init__(
        self, metadata: Any, device: Device, framework: Any, dma_gate: Any = None
    ) -> None:
        """Store the file to read."""
        super().__init__(metadata, device, framework)


def init_gds(framework: Any = None) -> None:
    """Do nothing, because the library detects GPUDirect Storage."""


def init_fgds(framework: Any = None) -> None:
    """Do nothing."""


def load_library_func(framework: Any = None) -> None:
    """Do nothing, because drivers are loaded on demand."""


def is_unified_memory_system(framework: Any = None) -> bool:
    """Tell whether the CPU and the first GPU share memory."""
    from ..._core import device_count, device_info

    for kind in ("cuda", "hip"):
        if device_count(kind):
            return bool(device_info(f"{kind}:0").get("unified", False))
    return False


def new_nogds_file_copier(
    device: Device, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16, **kwargs: Any
) -> Construct:
    """Return a constructor of readers: (metadata, device, framework) -> reader."""
    return CoreCopier


def new_gds_file_copier(
    device: Device, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16,
    device_memory_budget: int | None = None, **kwargs: Any,
) -> Construct:
    """Return a constructor of readers."""
    return CoreCopier


def new_unified_copier(device: Device, **kwargs: Any) -> Construct:
    """Return a constructor of readers."""
    return CoreCopier


def new_fgds_file_copier(
    device: Device, framework: Any, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16,
    **kwargs: Any,
) -> Construct:
    """Return a constructor of readers."""
    return CoreCopier


def new_threefs_file_copier(
    device: Device, mount_point: str, entries: int = 64, io_depth: int = 0,
    buffer_size: int = 64 << 20, **kwargs: Any,
) -> Construct:
    """Return a constructor of readers."""
    return CoreCopier
