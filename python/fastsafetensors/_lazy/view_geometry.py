# SPDX-License-Identifier: Apache-2.0
"""Views of a stored tensor as numbers: their elements, and the range that covers them. Pure.

A view is described like torch's: sizes, strides and an offset, in elements of the stored tensor,
which is packed in row-major order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

Sizes = tuple[int, ...]
_ZEROS = (0,) * 64  # torch's maximum number of dimensions


class View(NamedTuple):
    """A view of a stored tensor."""

    sizes: Sizes
    strides: Sizes
    offset: int


class Box(NamedTuple):
    """A part of a stored tensor: begin and end of each dimension, and a view within the part.

    The view's strides count the elements of the part, packed.
    """

    begin: Sizes
    end: Sizes
    view: View | None  # None: the whole part


def packed_strides(sizes: Sequence[int]) -> Sizes:
    """Strides of a packed tensor; empty dimensions count as one, as in torch."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def narrow(view: View, dim: int, start: int, length: int) -> View | None:
    """Elements start to start + length of a dimension; None: leave it to torch."""
    rank = len(view.sizes)
    if not -rank <= dim < rank:
        return None
    dim %= rank
    size = view.sizes[dim]
    if start < 0:
        start += size
    if not 0 <= start <= size or not 0 <= length <= size - start:
        return None
    sizes = (*view.sizes[:dim], length, *view.sizes[dim + 1 :])
    return View(sizes, view.strides, view.offset + start * view.strides[dim])


def select(view: View, dim: int, index: int) -> View | None:
    """One index of a dimension, which is removed; None: leave it to torch."""
    rank = len(view.sizes)
    if not -rank <= dim < rank:
        return None
    dim %= rank
    size = view.sizes[dim]
    if not -size <= index < size:
        return None
    return View(view.sizes[:dim] + view.sizes[dim + 1 :],
                view.strides[:dim] + view.strides[dim + 1 :],
                view.offset + index % size * view.strides[dim])


def index(view: View, key: Any) -> View | None:
    """Apply integers, slices, None and Ellipsis; None for anything else."""
    parts = list(key) if type(key) is tuple else [key]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or named > len(view.sizes):
        return None
    if dots:
        parts[dots[0] : dots[0] + 1] = [slice(None)] * (len(view.sizes) - named)
    dim, result = 0, view
    for part in parts:
        found: View | None
        if part is None:
            found = unsqueeze(result, dim)
            dim += 1
        elif (number := _number(part)) is not None:
            found = select(result, dim, number)
        elif type(part) is slice:
            found = _cut(result, dim, part)
            dim += 1
        else:
            return None
        if found is None:
            return None
        result = found
    return result


def _number(thing: Any) -> int | None:
    """Convert an index like torch: int or numpy integers, but no tensors or bools."""
    if type(thing) is int:
        return thing
    # numpy scalars do not support item assignment, arrays do.
    if type(thing) is bool or hasattr(thing, "__setitem__"):
        return None
    try:
        return operator.index(thing)
    except TypeError:
        return None


def _cut(view: View, dim: int, part: slice) -> View | None:
    for number in (part.start, part.stop, part.step):
        if number is not None and _number(number) is None:
            return None
    if part.step is not None and part.step <= 0:
        return None
    first, last, step = part.indices(view.sizes[dim])
    count = max(0, -(-(last - first) // step))
    sizes, strides = list(view.sizes), list(view.strides)
    sizes[dim], strides[dim] = count, strides[dim] * step
    return View(tuple(sizes), tuple(strides), view.offset + first * view.strides[dim])


def unsqueeze(view: View, dim: int) -> View | None:
    """Add a dimension of size 1."""
    rank = len(view.sizes)
    if not -rank - 1 <= dim <= rank:
        return None
    dim %= rank + 1
    stride = view.sizes[dim] * view.strides[dim] if dim < rank else 1
    return View((*view.sizes[:dim], 1, *view.sizes[dim:]),
                (*view.strides[:dim], stride, *view.strides[dim:]), view.offset)


def permute(view: View, dims: Sequence[int]) -> View | None:
    """Reorder dimensions."""
    rank = len(view.sizes)
    if len(dims) != rank or any(type(d) is not int or not -rank <= d < rank for d in dims):
        return None
    order = [d % rank for d in dims]
    if len(set(order)) != rank:
        return None
    return View(tuple(view.sizes[d] for d in order), tuple(view.strides[d] for d in order),
                view.offset)


def transpose(view: View, one: int, other: int) -> View | None:
    """Swap two dimensions."""
    rank = len(view.sizes)
    if not (-rank <= one < rank and -rank <= other < rank):
        return None
    order = list(range(rank))
    order[one], order[other] = order[other], order[one]
    return permute(view, order)


def is_packed(view: View) -> bool:
    """Tell whether the elements are contiguous in row-major order."""
    if not all(view.sizes):
        return True
    step = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def reshape(view: View, sizes: Sequence[int]) -> View | None:
    """Reshape a packed view; None: leave it to torch."""
    if any(type(size) is not int or size < -1 for size in sizes) or not is_packed(view):
        return None
    count, shape = prod(view.sizes), list(sizes)
    if -1 in shape:
        at = shape.index(-1)
        known = prod(shape[:at] + shape[at + 1 :])
        if known < 1 or count % known:  # a second -1 makes it negative
            return None
        shape[at] = count // known
    if prod(shape) != count:
        return None
    return View(tuple(shape), packed_strides(shape), view.offset)


def cover(stored: Sequence[int], pitches: Sizes, view: View) -> Box:
    """Return the smallest part of a stored tensor that contains a non-empty view.

    pitches: its packed_strides().

    Each step along a view's dimension is a number of steps along one stored dimension. If it
    exceeds that dimension, the dimension is taken whole and the rest belongs to the next outer one.
    """
    rank = len(stored)
    if rank and view.strides == pitches and view.sizes[1:] == stored[1:]:
        row, rest = divmod(view.offset, pitches[0])
        if rest == 0 and row + view.sizes[0] <= stored[0]:  # some of the rows
            return Box((row, *_ZEROS[: rank - 1]), (row + view.sizes[0], *stored[1:]), None)
    begin, rest = [0] * rank, view.offset
    for d, pitch in enumerate(pitches):
        begin[d], rest = divmod(rest, pitch)
    if view.strides == pitches:  # only narrowed
        ends = tuple(map(operator.add, begin, view.sizes))
        if all(map(operator.le, ends, stored)):
            return Box(tuple(begin), ends, None)
    reach = list(begin)
    steps: list[tuple[int, int] | None] = []  # by dimension of the view: (stored dimension, steps)
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if size == 1 or stride == 0:
            steps.append(None)
            continue
        d = next(d for d, pitch in enumerate(pitches) if stride % pitch == 0)
        steps.append((d, stride // pitches[d]))
        reach[d] += (size - 1) * (stride // pitches[d])
    for d in range(rank - 1, -1, -1):
        if reach[d] >= stored[d]:
            if d > 0:
                reach[d - 1] += reach[d] // stored[d]
            begin[d], reach[d] = 0, stored[d] - 1
    end = tuple(last + 1 for last in reach)
    return Box(tuple(begin), end, _inside(view, pitches, steps, begin, end))


def _inside(view: View, pitches: Sizes, steps: list[tuple[int, int] | None],
            begin: list[int], end: Sizes) -> View:
    """The same elements within the packed part."""
    packed = packed_strides([last - first for first, last in zip(begin, end, strict=True)])
    offset, rest = 0, view.offset
    for d, pitch in enumerate(pitches):
        at, rest = divmod(rest, pitch)
        offset += (at - begin[d]) * packed[d]
    strides = tuple(0 if stride == 0 else 1 if step is None else step[1] * packed[step[0]]
                    for step, stride in zip(steps, view.strides, strict=True))
    return View(view.sizes, strides, offset)
