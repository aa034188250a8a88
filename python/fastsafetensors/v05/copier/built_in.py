# SPDX-License-Identifier: Apache-2.0
"""0.5's names of its own readers. All of them are the library's pipeline, which picks the way."""

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
    """Reads one file; the reader that 0.5 wants is not needed."""

    def __init__(self, metadata: Any, device: Device, reader: Any, framework: Any) -> None:
        """Keep what is to be read."""
        super().__init__(metadata, device, framework)


class GdsFileCopier(NoGdsFileCopier):
    """The same, with 0.5's further argument."""

    def __init__(
        self, metadata: Any, device: Device, reader: Any, framework: Any,
        fallback_cache: Any = None,
    ) -> None:
        """Keep what is to be read."""
        super().__init__(metadata, device, reader, framework)

    def set_o_direct(self, enable: bool) -> None:
        """Do nothing: each load finds out what is faster."""


class FgdsFileCopier(NoGdsFileCopier):
    """The same, with 0.5's further argument."""

    def __init__(
        self, metadata: Any, device: Device, reader: Any, framework: Any, max_threads: int = 16
    ) -> None:
        """Keep what is to be read."""
        super().__init__(metadata, device, reader, framework)


class ThreeFSFileCopier(NoGdsFileCopier):
    """The same: files on 3FS without its reader package."""


class UnifiedMemCopier(CoreCopier):
    """The same, where processors and GPU share memory."""

    def __init__(
        self, metadata: Any, device: Device, framework: Any, dma_gate: Any = None
    ) -> None:
        """Keep what is to be read."""
        super().__init__(metadata, device, framework)


def init_gds(framework: Any = None) -> None:
    """Do nothing: the library finds GPUDirect Storage by itself."""


def init_fgds(framework: Any = None) -> None:
    """Do nothing."""


def load_library_func(framework: Any = None) -> None:
    """Do nothing: drivers are opened when a load needs them."""


def is_unified_memory_system(framework: Any = None) -> bool:
    """Tell whether processors and the first GPU share memory."""
    from ..._core import device_count, device_info

    for kind in ("cuda", "hip"):
        if device_count(kind):
            return bool(device_info(f"{kind}:0").get("unified", False))
    return False


def new_nogds_file_copier(
    device: Device, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16, **kwargs: Any
) -> Construct:
    """Return what makes readers: (metadata, device, framework) -> reader."""
    return CoreCopier


def new_gds_file_copier(
    device: Device, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16,
    device_memory_budget: int | None = None, **kwargs: Any,
) -> Construct:
    """Return what makes readers."""
    return CoreCopier


def new_unified_copier(device: Device, **kwargs: Any) -> Construct:
    """Return what makes readers."""
    return CoreCopier


def new_fgds_file_copier(
    device: Device, framework: Any, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16,
    **kwargs: Any,
) -> Construct:
    """Return what makes readers."""
    return CoreCopier


def new_threefs_file_copier(
    device: Device, mount_point: str, entries: int = 64, io_depth: int = 0,
    buffer_size: int = 64 << 20, **kwargs: Any,
) -> Construct:
    """Return what makes readers."""
    return CoreCopier
