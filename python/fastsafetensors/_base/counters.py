# SPDX-License-Identifier: Apache-2.0
"""Sums over the loads and saves of this process, for fastsafetensors.metrics."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

is_on = False

_LOAD = {
    "load_tensors": ("tensor_count", 1), "load_bytes": ("bytes_requested", 1),
    "read_bytes_storage": ("bytes_read", 1), "read_bytes_network": ("network_bytes", 1),
    "read_bytes_disk_cache": ("disk_cache_bytes", 1),
    "read_bytes_shared": ("shared_bytes", 1),
    "disk_cache_bytes_written": ("disk_cache_written", 1),
    "verified_bytes": ("verified_bytes", 1), "network_requests": ("network_requests", 1),
    "network_retries": ("network_retries", 1), "chunks": ("chunk_count", 1),
    "chunks_page_cache": ("chunks_resident", 1), "load_seconds": ("total_ns", 1e-9),
}
_SAVE = {
    "save_tensors": ("tensor_count", 1), "save_files": ("file_count", 1),
    "save_bytes": ("bytes_written", 1), "save_seconds": ("total_ns", 1e-9),
}

_lock = threading.RLock()  # a signal handler may load or save while it is held
_sums: dict[str, float] = dict.fromkeys(("loads", *_LOAD, "saves", *_SAVE), 0)


def _forget() -> None:
    """Reset in a forked child, because another thread may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _sums.update(dict.fromkeys(_sums, 0))


os.register_at_fork(after_in_child=_forget)


def _add(count: str, table: Mapping[str, tuple[str, float]], stats: Mapping[str, Any]) -> None:
    with _lock:
        _sums[count] += 1
        for name, (key, unit) in table.items():
            _sums[name] += stats[key] * unit


def add_load(stats: Mapping[str, Any]) -> None:
    """Add the statistics of a load that has ended."""
    _add("loads", _LOAD, stats)


def add_save(stats: Mapping[str, Any]) -> None:
    """Add the statistics of a save."""
    _add("saves", _SAVE, stats)


def sums() -> dict[str, float]:
    """Return all sums."""
    with _lock:
        return dict(_sums)
