# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: which experts a rank owns, and a filter for them.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

DEFAULT_EXPERT_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Return (first, end) of a rank's experts: consecutive, with the remainder on the lowest ranks.

    For programs written for fastsafetensors 0.5.

    10 experts over 4 ranks: 3, 3, 2, 2.
    """
    if num_experts <= 0 or ep_size <= 0 or not 0 <= ep_rank < ep_size:
        raise ValueError(
            f"no experts for rank {ep_rank} of {ep_size} ranks and {num_experts} experts"
        )
    share, rest = divmod(num_experts, ep_size)
    first = ep_rank * share + min(ep_rank, rest)
    return first, first + share + (ep_rank < rest)


def expert_parallel_filter(
    num_experts: int,
    ep_size: int,
    ep_rank: int,
    pattern: re.Pattern[str] = DEFAULT_EXPERT_PATTERN,
) -> Callable[[str], bool]:
    """Return a filter that keeps a rank's experts, and all names that are not experts.

    For programs written for fastsafetensors 0.5.

    pattern: its first group is the expert's number.
    """
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or first <= int(found.group(1)) < end

    return keep


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None


def _world() -> tuple[int, int]:
    """(size, rank) of the job."""
    try:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
    except ImportError:
        pass
    return _number("WORLD_SIZE") or 1, _number("RANK") or 0


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """Create the filter configured by the environment; None if it is not enabled.

    For programs written for fastsafetensors 0.5.

    FASTSAFETENSORS_EP_SLICE=1 enables it. FASTSAFETENSORS_EP_NUM_EXPERTS is the number of experts.
    FASTSAFETENSORS_EP_SIZE and _EP_RANK default to torch.distributed's world, else to WORLD_SIZE
    and RANK.
    """
    if os.environ.get("FASTSAFETENSORS_EP_SLICE") != "1":
        return None
    experts = _number("FASTSAFETENSORS_EP_NUM_EXPERTS") or 0
    size, rank = _number("FASTSAFETENSORS_EP_SIZE"), _number("FASTSAFETENSORS_EP_RANK")
    if size is None or rank is None:
        world_size, world_rank = _world()
        size = world_size if size is None else size
        rank = world_rank if rank is None else rank
    if experts <= 0 or size <= 1:
        return None
    return expert_parallel_filter(experts, size, rank)
