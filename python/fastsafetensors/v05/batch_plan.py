# SPDX-License-Identifier: Apache-2.0
"""Batches of a parallel load: whole files, or runs of tensors within a memory limit.

For programs written for fastsafetensors 0.5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._base.errors import printable

_logger = logging.getLogger(__name__)

# A larger gap between two tensors starts a new batch.
MERGE_GAP = 4096


class BudgetInfeasibleError(ValueError):
    """The model does not fit in the memory budget.

    For programs written for fastsafetensors 0.5.
    """


@dataclass
class Batch:
    """A batch: {rank: (path, names)}."""

    parts: dict[int, tuple[Any, list[str]]] = field(default_factory=dict)


@dataclass
class PlanRules:
    """Limits of a plan.

    queue_size: as in ParallelLoader. budget: bytes on the device; None: unlimited. resident: which
    tensors stay in memory after they were returned. multiplier, chunk_overhead, fixed_overhead:
    memory of the reader in addition to the tensors.
    """

    ranks: int = 1
    queue_size: int = 0
    max_batch_bytes: int | None = None
    budget: int | None = None
    resident: Callable[[str], bool] = lambda name: True
    multiplier: float = 1.0
    chunk_overhead: int = 0
    fixed_overhead: int = 0


def depth_of(queue_size: int, ranks: int) -> int:
    """Number of batches in memory at once."""
    return (1 if queue_size < 0 else queue_size + 2) + (1 if ranks > 1 else 0)


def cut_runs(metadata: Any, names: list[str], limit: int | None) -> list[list[str]]:
    """Runs of consecutive tensors that cover at most `limit` bytes of the file."""
    if limit is None:
        return [names] if names else []
    runs: list[list[str]] = []
    begin = end = 0
    for name in names:
        first, last = metadata.tensors[name].data_offsets
        if last - first > limit:
            raise ValueError(
                f"max_batch_bytes={limit} is smaller than tensor '{printable(name)}' "
                f"({last - first} bytes); a tensor is never split"
            )
        if runs and first - end <= MERGE_GAP and last - begin <= limit:
            runs[-1].append(name)
        else:
            runs.append([name])
            begin = first
        end = last
    return runs


class Planner:
    """Divides files into batches within the rules."""

    def __init__(self, rules: PlanRules) -> None:
        """Store the rules. queue_size may be reduced while planning."""
        self.rules = rules
        self.queue_size = rules.queue_size

    def plan(self, groups: Sequence[dict[int, tuple[Any, Any, list[str]]]]) -> list[Batch]:
        """Plan groups of files {rank: (path, metadata, names)} that are read together."""
        if self.rules.budget is None:
            return self._cut(groups, [self.rules.max_batch_bytes] * len(groups))
        wished = self.rules.queue_size
        for queue_size in range(wished, -2, -1):
            limits = self._limits(groups, queue_size)
            if limits is not None:
                if queue_size != wished:
                    _logger.info(
                        "queue_size %d does not fit device_memory_budget: %d is used",
                        wished,
                        queue_size,
                    )
                self.queue_size = queue_size
                return self._cut(groups, limits)
        raise self._infeasible(groups)

    def _resident_after(self, groups: Sequence[Any]) -> list[int]:
        """Bytes that stay on one rank after a group was returned, including the group."""
        total, result = 0, []
        for group in groups:
            for _, metadata, names in group.values():
                total += sum(
                    metadata.tensor_bytes(name) for name in names if self.rules.resident(name)
                )
            result.append(total)
        return result

    def _largest(self, group: dict[int, tuple[Any, Any, list[str]]]) -> int:
        return max(
            (m.tensor_bytes(name) for _, m, names in group.values() for name in names), default=0
        )

    def _limits(self, groups: Sequence[Any], queue_size: int) -> list[int | None] | None:
        """The chunk size of each group, or None if one does not fit."""
        rules = self.rules
        depth = depth_of(queue_size, rules.ranks)
        limits: list[int | None] = []
        for group, resident in zip(groups, self._resident_after(groups), strict=True):
            free = (rules.budget or 0) - rules.fixed_overhead - resident
            free -= depth * rules.chunk_overhead
            chunk = int(free / (depth * rules.multiplier))
            if rules.max_batch_bytes is not None:
                chunk = min(chunk, rules.max_batch_bytes)
            if chunk < max(self._largest(group), 1):
                return None
            limits.append(chunk)
        return limits

    def _infeasible(self, groups: Sequence[Any]) -> BudgetInfeasibleError:
        """The error for the first group that does not fit even with one batch at a time."""
        rules = self.rules
        depth = depth_of(-1, rules.ranks)
        worst: tuple[int, str, int, int] = (0, "", 0, 0)
        for group, resident in zip(groups, self._resident_after(groups), strict=True):
            largest = self._largest(group)
            needed = resident + int(depth * rules.multiplier * largest)
            needed += depth * rules.chunk_overhead + rules.fixed_overhead
            if needed > worst[0]:
                path = str(next(iter(group.values()))[0])
                worst = (needed, path, resident, largest)
        needed, path, resident, largest = worst
        return BudgetInfeasibleError(
            f"Model does not fit device_memory_budget: loading '{printable(path)}' needs >= "
            f"{needed} bytes ({resident} resident + {depth} x {int(rules.multiplier * largest)} "
            f"transient + {depth * rules.chunk_overhead + rules.fixed_overhead} chunk overhead), "
            f"budget is {rules.budget}. Raise the budget, or copy the tensors out as they come "
            "and set accumulate_resident=False."
        )

    def _cut(self, groups: Sequence[Any], limits: Sequence[int | None]) -> list[Batch]:
        batches: list[Batch] = []
        for group, limit in zip(groups, limits, strict=True):
            runs = {
                rank: (path, cut_runs(metadata, names, limit))
                for rank, (path, metadata, names) in group.items()
            }
            for number in range(max((len(parts) for _, parts in runs.values()), default=0)):
                batch = Batch()
                for rank, (path, parts) in runs.items():
                    if number < len(parts):
                        batch.parts[rank] = (path, parts[number])
                batches.append(batch)
        return batches
