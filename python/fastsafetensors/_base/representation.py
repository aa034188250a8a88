# SPDX-License-Identifier: Apache-2.0
"""Texts for repr(): the file, the number of tensors, and their dtypes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from .._core import Model

_Class = TypeVar("_Class", bound=type)


def format_paths(paths: Any) -> str:
    """Return a path as Python writes it, without a URL's query; of a list the first."""
    if isinstance(paths, (list, tuple)):
        if not paths:
            return "[]"
        rest = f", ... ({len(paths)} files)" if len(paths) > 1 else ""
        return f"[{format_paths(next(iter(paths)))}{rest}]"
    text = os.fsdecode(paths)
    return repr(text.partition("?")[0] if "://" in text else text)


def format_contents(dtypes: Iterable[str]) -> str:
    """Return the number of tensors and their dtypes, the most frequent first."""
    counts = Counter(dtypes)
    total = sum(counts.values())
    kinds = ", ".join(dtype for dtype, _ in counts.most_common())
    noun = "tensor" if total == 1 else "tensors"
    return f"{total} {noun}{f' of {kinds}' if kinds else ''}"


def format_model(kind: str, paths: Any, model: Model | None) -> str:
    """Return the repr() of an object that reads a model, or that it is closed."""
    try:
        if model is not None:
            contents = format_contents(model.info(index)[0] for index in range(len(model)))
            return f"<{kind} {format_paths(paths)}: {contents}>"
    except Exception:  # a repr() must not raise
        pass
    return f"<{kind} {format_paths(paths)}: closed>"


def shown_as(name: str, module: str | None = None) -> Callable[[_Class], _Class]:
    """Return a decorator that gives a class, and its methods, the public name in messages.

    module: where programs import it from; None keeps the class's own.
    """

    def rename(cls: _Class) -> _Class:
        for member in vars(cls).values():
            if isinstance(member, FunctionType):
                member.__qualname__ = f"{name}.{member.__name__}"
        cls.__name__ = cls.__qualname__ = name
        cls.__module__ = cls.__module__ if module is None else module
        return cls

    return rename


def with_plain_hints(cls: _Class) -> _Class:
    """Let help() show a NamedTuple's types without ForwardRef('...')."""
    hints = {name: getattr(hint, "__forward_arg__", hint)
             for name, hint in cls.__annotations__.items()}
    maker: Any = cls.__new__
    cls.__annotations__ = maker.__annotations__ = hints
    return cls
