# SPDX-License-Identifier: Apache-2.0
"""Loading torch tensors to a GPU: torch's devices in terms of the C library."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from .._base.errors import printable
from .._base.options import check_word
from .torch_installed import torch

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_reported: set[str] = set()
# torch's "cuda" means ROCm in ROCm builds; paddle says "gpu".
_NAMES = ("cuda", "gpu")
_UNIFIED = {"1": "on", "0": "off"}


def gpu_kind() -> str:
    """Return "cuda" or "hip", whichever torch's "cuda" means; "" if torch has no GPU support."""
    if not torch.cuda.is_available():
        return ""
    return "hip" if getattr(torch.version, "hip", None) else "cuda"


def gpu_index(device: Any) -> int:
    """Return the index of a GPU; the current one if the name has no index."""
    if isinstance(device, int):
        return device
    number = str(device).partition(":")[2]
    return int(number) if number else int(torch.cuda.current_device())


def is_gpu(device: Any) -> bool:
    """Tell whether a device (a str, int or torch.device) is a GPU that loads support."""
    return isinstance(device, int) or str(device).partition(":")[0] in _NAMES


def check_present(device: Any) -> None:
    """Raise torch's error for a missing device, before anything is read."""
    if device != "cpu":
        torch.empty(0, device=device)


def load_options(device: Any, gds: str = "auto", memory: str = "torch") -> dict[str, Any]:
    """Options of open_load() for a device; {} for the CPU and for devices that only torch
    supports.
    """
    check_word("gds", gds, ("auto", "off", "strict"))
    if gds == "strict" and not is_gpu(device):
        raise ValueError(f'gds="strict" needs a GPU, and device is {str(device)!r}')
    if not is_gpu(device) or not gpu_kind():
        return {}
    unified = _UNIFIED.get(os.environ.get("FASTSAFETENSORS_UNIFIED_MEM", ""), "auto")
    return {
        "device": f"{gpu_kind()}:{gpu_index(device)}", "gds": gds, "unified": unified,
        "mode": "load", "memory": memory,
    }


def stream_of(device: Any) -> int:
    """Return the handle of torch's current stream, for loads into memory that it may still use."""
    stream = int(torch.cuda.current_stream(device).cuda_stream)
    return stream or 1  # the default stream, which is 1 in CUDA


def wait_for_stream(device: Any) -> None:
    """Wait for queued work on torch's current stream before others read the memory."""
    torch.cuda.current_stream(device).synchronize()


def shares_memory(device: int, unified: str) -> bool:
    """Tell whether the GPU shares its memory with the CPU."""
    if unified != "auto":
        return unified == "on"
    found = torch.cuda.get_device_properties(device)
    return bool(getattr(found, "is_integrated", False)) or "GB10" in found.name


def _allocate(size_bytes: int, device: int, stream: Any) -> Any:
    """Memory allocated by torch. Its last use may still be queued on the stream."""
    with torch.cuda.stream(stream):  # also on a thread of the load
        return torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")


def torch_memory(device: int) -> dict[str, Any]:
    """Options for allocating from torch's caching allocator, which frees with the last tensor.

    The load reuses torch's cached memory, appears in torch's memory statistics and pools, and a
    second load needs no driver calls. Memory is ordered with the stream that is current now.
    """
    stream = torch.cuda.current_stream(device)

    def allocate(size_bytes: int) -> Any:
        try:
            return retrying(lambda: _allocate(size_bytes, device, stream))
        except (MemoryError, torch.cuda.OutOfMemoryError) as error:
            _logger.info("%s", printable(error))
            return None  # the load reports how much it needed

    return {"allocator": allocate, "stream": stream_of(device)}


def _is_full(error: BaseException) -> bool:
    """Tell whether an error means that a device is out of memory, also for a stream or a kernel.

    False for torch's allocator in a load: it has given back its cache before it failed.
    """
    text = str(error)
    if "from the caller's allocator" in text:
        return False
    return isinstance(error, torch.cuda.OutOfMemoryError) or "device memory" in text or (
        text.endswith(("CUDA error 2)", "HIP error 2)")) and "out of memory" in text)


def retrying(load: Callable[[], _T]) -> _T:
    """Retry after emptying torch's cache if the device is out of memory."""
    try:
        return load()
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        if not _is_full(error):
            raise
        _logger.info("%s: giving back what torch keeps", printable(error))
    gc.collect()
    torch.cuda.empty_cache()
    return load()


def report_gds(reason: str) -> None:
    """Log, once per reason, why files are not read by GPUDirect Storage."""
    _, found, why = reason.partition("gds: ")
    if found and why not in _reported and "switched off" not in why and "straight to" not in why:
        _reported.add(why)
        _logger.info("GPUDirect Storage is not used: %s", printable(why))
