# SPDX-License-Identifier: Apache-2.0
"""Index expressions as the range of a tensor to read, and an index for the result."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from .._core import error_class


class SlicePlan(NamedTuple):
    """Begin and end of each dimension, and the index to apply to the result; or None."""

    begin: list[int]
    end: list[int]
    rest: tuple[Any, ...] | None


def _as_int(part: Any) -> Any:
    """Convert numbers of numpy and other libraries to int; others are unchanged (bools, arrays,
    ...).
    """
    if type(part) in (int, bool, slice) or part is Ellipsis or part is None:
        return part
    if hasattr(part, "__index__") and getattr(part, "ndim", 0) == 0 and "bool" not in str(
        getattr(part, "dtype", "")
    ):
        try:
            return operator.index(part)
        except TypeError:
            return part
    return part


def _is_int(part: Any) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _expand(parts: tuple[Any, ...], rank: int) -> tuple[Any, ...] | None:
    """Replace an Ellipsis, and missing dimensions at the end, by whole dimensions."""
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        return None
    if len(parts) - len(dots) > rank:
        return None
    if dots:
        fill = (slice(None),) * (rank - len(parts) + 1)
        parts = parts[: dots[0]] + fill + parts[dots[0] + 1 :]
    return parts + (slice(None),) * (rank - len(parts))


def keeps_rows(parts: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether an index takes whole rows: nothing of it selects in the last dimension."""
    parts = tuple(part for part in map(_as_int, parts) if part is not None)
    if not all(_is_int(part) or isinstance(part, slice) or part is Ellipsis for part in parts):
        return False  # torch cannot index pairs by lists
    expanded = _expand(parts, len(shape))
    if not expanded or not isinstance(expanded[-1], slice):
        return False
    return expanded[-1].indices(shape[-1]) == (0, shape[-1], 1)


def _make_plan(parts: tuple[Any, ...], shape: tuple[int, ...]) -> SlicePlan:
    begin: list[int] = []
    end: list[int] = []
    rest: list[Any] = []
    for part, size in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            first, last, step = part.indices(size)
            begin.append(min(first, last) if last < first else first)
            end.append(max(begin[-1], last))
            rest.append(slice(None) if step == 1 else slice(None, None, step))
        else:
            begin.append(part % size)
            end.append(part % size + 1)
            rest.append(0)
    needed = any(part == 0 or part != slice(None) for part in rest)
    return SlicePlan(begin, end, tuple(rest) if needed else None)


def plan_torch(parts: tuple[Any, ...], shape: tuple[int, ...]) -> SlicePlan | None:
    """Plan a torch index; None: read the whole tensor and let torch index it.

    IndexError for more than one Ellipsis: torch accepts them, but then reads foreign memory.
    """
    parts = tuple(map(_as_int, parts))
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not all(_is_int(p) or isinstance(p, slice) or p is Ellipsis for p in parts):
        return None
    if not shape:
        if any(isinstance(part, slice) for part in parts):
            raise IndexError("slice() cannot be applied to a 0-dim tensor.")
        return None
    indices = sum(part is not Ellipsis for part in parts)
    if indices > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    expanded = _expand(parts, len(shape))
    if expanded is None:
        return None
    for dimension, (part, size) in enumerate(zip(expanded, shape, strict=True)):
        if isinstance(part, slice):
            if part.step is not None and part.step <= 0:
                raise ValueError("step must be greater than zero")
        elif not -size <= part < size:
            raise IndexError(
                f"index {part} is out of bounds for dimension {dimension} with size {size}"
            )
    return _make_plan(expanded, shape)


def plan_numpy(parts: tuple[Any, ...], shape: tuple[int, ...]) -> SlicePlan | None:
    """Plan integers, slices with positive steps and Ellipsis; None: read all, numpy indexes it.

    SafetensorError for an integer out of range, as in the reference.
    """
    error = error_class()
    parts = tuple(map(_as_int, parts))
    # The reference treats bools as numbers; numpy would add a dimension.
    parts = tuple(int(part) if isinstance(part, bool) else part for part in parts)
    for part in parts:
        if not (_is_int(part) or isinstance(part, slice) or part is Ellipsis):
            return None
        if isinstance(part, slice) and part.step is not None and part.step <= 0:
            return None
    if sum(part is Ellipsis for part in parts) > 1:
        return None
    expanded = _expand(parts, len(shape))
    if expanded is None:
        raise error(
            f"Error during slicing with shape {list(shape)}: more slicing indexes than dimensions "
            "in tensor"
        )
    for dimension, (part, size) in enumerate(zip(expanded, shape, strict=True)):
        if not isinstance(part, slice) and not -size <= part < size:
            raise error(f"Invalid index {part} for dimension {dimension} of size {size}")
    plan = _make_plan(expanded, shape)
    if plan.rest is None:
        return plan
    # numpy then returns an array even for one element.
    return plan._replace(rest=(*plan.rest, Ellipsis))
