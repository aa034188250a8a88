# SPDX-License-Identifier: Apache-2.0
"""Counters of this process's loads and saves, for monitoring.

    from fastsafetensors import metrics

    metrics.enable()
    metrics.snapshot()                    # {"loads": 3, "load_bytes": 15032385536, ...}
    metrics.register_prometheus()         # with the package prometheus_client
    metrics.register_opentelemetry()      # with the package opentelemetry-api

Counting starts with enable(). Counters only increase; a forked process starts at zero. Loads are
counted when they end. Tensors that safe_open copies from the page cache without a load are not
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._base import counters
from ._base.errors import printable_lines

__all__ = ["enable", "register_opentelemetry", "register_prometheus", "snapshot"]

_PREFIX = "fastsafetensors"
# Name: (description, unit).
_DESCRIPTIONS = {
    "loads": ("Loads that have ended", ""),
    "load_tensors": ("Tensors that were loaded", ""),
    "load_bytes": ("Bytes of tensors that were asked for", "bytes"),
    "load_seconds": ("Time from the start of loads to their last tensor", "seconds"),
    "read_bytes_storage": ("Bytes read from files, without memory-mapped ones", "bytes"),
    "read_bytes_network": ("Bytes received from servers", "bytes"),
    "read_bytes_disk_cache": ("Bytes of remote files read from the disk cache (hits)", "bytes"),
    "read_bytes_shared": ("Bytes that other processes read into shared memory", "bytes"),
    "disk_cache_bytes_written": ("Bytes written to the disk cache (misses)", "bytes"),
    "verified_bytes": ("Bytes compared with a manifest", "bytes"),
    "network_requests": ("Requests to servers", ""),
    "network_retries": ("Requests that were sent again", ""),
    "chunks": ("Parts of files that were loaded", ""),
    "chunks_page_cache": ("Parts of files that were in the page cache (hits)", ""),
    "saves": ("Saves that have ended well", ""),
    "save_tensors": ("Tensors that were saved", ""),
    "save_files": ("Files that were saved", ""),
    "save_bytes": ("Bytes written by saves", "bytes"),
    "save_seconds": ("Time from the start of saves to their end", "seconds"),
}


def enable() -> None:
    """Start counting."""
    counters.is_on = True


def snapshot() -> dict[str, float]:
    """Return all counters: {name: sum}."""
    return counters.sums()


class _Collector:
    """Collector that prometheus_client calls at each scrape."""

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, value in snapshot().items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", _DESCRIPTIONS[name][0], value=value)


def register_prometheus(registry: Any = None) -> Any:
    """Enable and export the counters as ``fastsafetensors_NAME_total``; return the collector.

    registry: of prometheus_client; None: the default. ``registry.unregister()`` removes it.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError("register_prometheus() needs prometheus_client: "
                          f"{printable_lines(error)}") from error
    collector = _Collector()
    (prometheus_client.REGISTRY if registry is None else registry).register(collector)
    enable()
    return collector


def register_opentelemetry(meter: Any = None) -> list[Any]:
    """Enable and export the counters as ``fastsafetensors.NAME``; return the instruments.

    meter: of opentelemetry; None: that of the global provider.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise ImportError("register_opentelemetry() needs opentelemetry-api: "
                          f"{printable_lines(error)}") from error

    def observe(name: str) -> Any:
        return lambda options: [metrics.Observation(snapshot()[name])]

    meter = metrics.get_meter(_PREFIX) if meter is None else meter
    units = {"bytes": "By", "seconds": "s", "": "1"}
    made = [
        meter.create_observable_counter(f"{_PREFIX}.{name}", [observe(name)], units[unit], text)
        for name, (text, unit) in _DESCRIPTIONS.items()
    ]
    enable()
    return made
