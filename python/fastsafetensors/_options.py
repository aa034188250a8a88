# SPDX-License-Identifier: Apache-2.0
"""Checks options before a call begins; errors have the parameter's name and its values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

_COUNT_MAX = 2**31 - 1
_ALIGNMENT_MAX = 1 << 20

_LOAD_WORDS = {
    "mode": ("auto", "load", "map"),
    "cache": ("auto", "keep", "bypass"),
    "engine": ("auto", "pread", "direct", "uring", "mmap"),
    "order": ("file", "request"),
    "gds": ("auto", "off", "strict"),
}
_SAVE_WORDS = {"engine": ("auto", "buffered", "direct", "uring")}
_COUNTS = ("threads", "copy_threads")


def check_count(name: str, value: Any, low: int = 0, high: int = _COUNT_MAX) -> int:
    """Return a whole number from `low` to `high`. TypeError or ValueError for another value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be {low} to {high}, not {number}")
    return number


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise TypeError for a value that is not a string, ValueError for an unknown word."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(words)}, not {value!r}")
    if value not in words:
        raise ValueError(f"unknown {name} {value!r}; expected one of: {', '.join(words)}")


def _check(options: Mapping[str, Any], words: Mapping[str, tuple[str, ...]]) -> None:
    for name, value in options.items():
        if name in words:
            check_word(name, value, words[name])
        elif name in _COUNTS:
            check_count(name, value)


def check_load_options(options: Mapping[str, Any]) -> None:
    """TypeError or ValueError for an option of a load that is wrong or would have no effect."""
    _check(options, _LOAD_WORDS)
    if options.get("mode") == "map" and options.get("engine", "auto") != "auto":
        raise ValueError('engine has no effect with mode="map": use mode="load"')


def check_save_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a save. TypeError or ValueError for a wrong one."""
    _check(options, _SAVE_WORDS)
    alignment = check_count("alignment", options.get("alignment", 0), high=_ALIGNMENT_MAX)
    if alignment & (alignment - 1):
        raise ValueError(f"alignment must be 0 or a power of two up to {_ALIGNMENT_MAX}, not "
                         f"{alignment}")
    return {**options, "alignment": alignment} if "alignment" in options else dict(options)
