# SPDX-License-Identifier: Apache-2.0
"""Views from arguments of torch's functions; None if arithmetic is not enough."""

from __future__ import annotations

from typing import Any

from . import view_geometry as geometry
from .lazy_reads import Stored
from .view_geometry import View


def check_inside(stored: Stored, view: View) -> None:
    """Refuse indices out of range, as torch does for tensors with memory (not on meta)."""
    count = 1
    for size in stored.shape:
        count *= size
    end = 1 + view.offset + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True))
    if 0 not in view.sizes and end > count:
        raise RuntimeError(
            f"setStorage: sizes {list(view.sizes)}, strides {list(view.strides)}, storage offset "
            f"{view.offset}, and itemsize {stored.element_bytes} requiring a storage size of "
            f"{end * stored.element_bytes} are out of bounds for storage of size "
            f"{count * stored.element_bytes}")


def put_into(target: Any, data: Any, view: View, offset: int) -> Any:
    """Copy a view's elements to their offsets in a flat tensor; return the view of it."""
    # Expanded dimensions have their elements once.
    once = [1 if stride == 0 else size for size, stride in zip(view.sizes, view.strides,
                                                               strict=True)]
    for dim, size in enumerate(once):
        data = data.narrow(dim, 0, size)
    target.as_strided(once, view.strides, offset).copy_(data)
    return target.as_strided(view.sizes, view.strides, offset)


def narrow(view: View, *args: Any) -> View | None:
    """The view of narrow()."""
    if len(args) != 3:
        return None
    dim, start, length = args
    if type(dim) is int and type(start) is int and type(length) is int:
        return geometry.narrow(view, dim, start, length)
    return None


def select(view: View, *args: Any) -> View | None:
    """The view of select()."""
    if len(args) != 2 or any(type(number) is not int for number in args):
        return None
    return geometry.select(view, *args)


def transpose(view: View, *args: Any) -> View | None:
    """The view of transpose()."""
    if len(args) != 2 or any(type(number) is not int for number in args):
        return None
    return geometry.transpose(view, *args)


def swap_last(view: View) -> View | None:
    """The view of t(), of a matrix."""
    return geometry.transpose(view, -1, -2) if len(view.sizes) == 2 else None


def unsqueeze(view: View, *args: Any) -> View | None:
    """The view of unsqueeze()."""
    return geometry.unsqueeze(view, args[0]) if len(args) == 1 and type(args[0]) is int else None


def _sizes_of(args: Any) -> Any:
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def reshape(view: View, *args: Any) -> View | None:
    """The view of view() and reshape()."""
    sizes = _sizes_of(args)
    return geometry.reshape(view, sizes) if len(sizes) else None


def permute(view: View, *args: Any) -> View | None:
    """The view of permute()."""
    return geometry.permute(view, _sizes_of(args))
