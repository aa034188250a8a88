# SPDX-License-Identifier: Apache-2.0
"""Loads of torch tensors to a GPU: what a device of torch's is to the C library."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ._torch_installed import torch

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_told: set[str] = set()
# torch's "cuda" is ROCm's GPU where torch was built for that; paddle says "gpu".
_NAMES = ("cuda", "gpu")
_UNIFIED = {"1": "on", "0": "off"}


def gpu_kind() -> str:
    """Return "cuda" or "hip": what torch's "cuda" means; "" where torch can't use any."""
    if not torch.cuda.is_available():
        return ""
    return "hip" if getattr(torch.version, "hip", None) else "cuda"


def gpu_index(device: Any) -> int:
    """Return the number of a GPU; the current one where the name gives none."""
    if isinstance(device, int):
        return device
    number = str(device).partition(":")[2]
    return int(number) if number else int(torch.cuda.current_device())


def is_gpu(device: Any) -> bool:
    """Tell whether a device (a str, int or torch.device) is a GPU that loads can go to."""
    return isinstance(device, int) or str(device).partition(":")[0] in _NAMES


def check_present(device: Any) -> None:
    """Raise what torch raises for a device that is not there, before anything is read for it."""
    if device != "cpu":
        torch.empty(0, device=device)


def load_options(device: Any, gds: str = "auto", memory: str = "torch") -> dict[str, Any]:
    """Options of open_load() for a device; {} for the CPU and for what only torch can reach."""
    if not is_gpu(device) or not gpu_kind():
        return {}
    unified = _UNIFIED.get(os.environ.get("FASTSAFETENSORS_UNIFIED_MEM", ""), "auto")
    return {
        "device": f"{gpu_kind()}:{gpu_index(device)}", "gds": gds, "unified": unified,
        "mode": "load", "memory": memory,
    }


def stream_of(device: Any) -> int:
    """Return the handle of torch's current stream: for loads into memory that it may still use."""
    stream = int(torch.cuda.current_stream(device).cuda_stream)
    return stream or 1  # the default stream, which CUDA calls 1 as well


def wait_for_stream(device: Any) -> None:
    """Wait for what torch has queued on its current stream: others are about to read the memory."""
    torch.cuda.current_stream(device).synchronize()


def shares_memory(device: int, unified: str) -> bool:
    """Tell whether tensors for a GPU lie in memory that it shares with the processors."""
    if unified != "auto":
        return unified == "on"
    found = torch.cuda.get_device_properties(device)
    return bool(getattr(found, "is_integrated", False)) or "GB10" in found.name


def _take_bytes(size_bytes: int, device: int, stream: Any) -> Any:
    """Memory of torch's, whose last use may still be queued on the stream."""
    with torch.cuda.stream(stream):  # also in a thread of the load
        return torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")


def torch_memory(device: int) -> dict[str, Any]:
    """Options for memory from torch's caching allocator; freed there with the last tensor.

    What torch keeps unused is there for it, its counters and pools know of it, and a second load
    asks the driver for nothing. It is ordered with the stream that is current now.
    """
    stream = torch.cuda.current_stream(device)

    def allocate(size_bytes: int) -> Any:
        try:
            return retrying(lambda: _take_bytes(size_bytes, device, stream))
        except (MemoryError, torch.cuda.OutOfMemoryError) as error:
            _logger.info("%s", error)
            return None  # the load says what it needed

    return {"allocator": allocate, "stream": stream_of(device)}


def _is_full(error: BaseException) -> bool:
    """Tell whether an error says that a device's memory is full."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "device memory" in str(error)


def retrying(load: Callable[[], _T]) -> _T:
    """Do it once more without what torch keeps unused, when the device's memory is full."""
    try:
        return load()
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        if not _is_full(error):
            raise
        _logger.info("%s: giving back what torch keeps", error)
    gc.collect()
    torch.cuda.empty_cache()
    return load()


def tell_gds(reason: str) -> None:
    """Say once for each reason that files are not read straight to the GPU, and why."""
    _, found, why = reason.partition("gds: ")
    if found and why not in _told and "switched off" not in why and "straight to" not in why:
        _told.add(why)
        _logger.info("GPUDirect Storage is not used: %s", why)
