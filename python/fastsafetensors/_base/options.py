# SPDX-License-Identifier: Apache-2.0
"""Checks options before a call begins; errors have the parameter's name and its values."""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .._core import size_of_text
from .errors import shown

_COUNT_MAX = 2**31 - 1
_ALIGNMENT_MAX = 1 << 20

_LOAD_WORDS = {
    "mode": ("auto", "load", "map"),
    "cache": ("auto", "keep", "bypass"),
    "engine": ("auto", "pread", "direct", "uring", "mmap"),
    "order": ("file", "request"),
    "gds": ("auto", "off", "strict"),
    "share": ("off", "node"),
}
_SAVE_WORDS = {"engine": ("auto", "buffered", "direct", "uring")}
_COUNTS = ("threads", "copy_threads", "share_grace")


def check_count(name: str, value: Any, low: int = 0, high: int = _COUNT_MAX) -> int:
    """Return a whole number from `low` to `high`. TypeError or ValueError for another value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {shown(value)}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be {low} to {high}, not {number}")
    return number


def parse_size(name: str, size: int | str, low: int = 1) -> int:
    """Convert the size `size` of parameter `name` to bytes: a number, or text such as "5GiB".

    Units in text are as in GNU's commands: K, M, G, T and KiB, ... are powers of 1024, KB, MB, GB,
    TB powers of 1000. ValueError for other text, and for sizes below `low` or from 2^63 bytes on;
    TypeError for other types.
    """
    given: Any = size
    if hasattr(given, "__index__") and not isinstance(given, bool):
        found: int | None = operator.index(given)
    else:
        found = size_of_text(given)
    if found is None:
        kind = ValueError if isinstance(given, str) else TypeError
        raise kind(f"{name} must be a size such as 5000000000, '5GB' or '5GiB', not {shown(size)}")
    if not low <= found < 2**63:
        least = "positive" if low else "0 or positive"
        raise ValueError(f"{name} must be {least} and below 2^63 bytes, not {shown(size)}")
    return found


def parse_limit(name: str, size: int | str) -> int:
    """Convert a size like parse_size(), where 0 means no limit."""
    return parse_size(name, size, 0)


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise TypeError for a value that is not a string, ValueError for an unknown word."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(words)}, not {shown(value)}")
    if value not in words:
        raise ValueError(f"unknown {name} {shown(value)}; expected one of: {', '.join(words)}")


def is_bool(value: Any) -> bool:
    """Tell whether a value is True or False, Python's or numpy's."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def check_switch(name: str, value: Any) -> None:
    """Raise TypeError for a value other than True and False (or 1 and 0, or numpy's)."""
    if not is_bool(value) and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def check_switches(**switches: Any) -> None:
    """Check several switches."""
    for name, value in switches.items():
        check_switch(name, value)


def check_callable(name: str, value: Any) -> None:
    """Raise TypeError for a value that is neither None nor a callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a callable, not {shown(value)}")


def check_timeout(value: Any, name: str = "timeout") -> float | None:
    """Return a number of seconds; None for no limit. TypeError or ValueError for other values."""
    if value is None:
        return None
    if is_bool(value) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number of seconds or None, not {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:  # of an int
        seconds = math.inf if value > 0 else -math.inf
    if not seconds >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {shown(value)}")
    return None if seconds == math.inf else seconds


def check_location(name: str, value: Any) -> None:
    """Raise TypeError for a value that is not one path or URL."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} must be a path (str, bytes or os.PathLike), not {shown(value)}")


def check_no_empty_path(name: str, value: Any) -> None:
    """Check like check_location(). FileNotFoundError for "", which is not the current folder."""
    check_location(name, value)
    if os.fspath(value) in ("", b""):
        raise FileNotFoundError(errno.ENOENT, f"{name} is an empty path", value)


def check_optional_paths(**paths: Any) -> None:
    """Check several paths like check_no_empty_path(); None is allowed."""
    for name, value in paths.items():
        if value is not None:
            check_no_empty_path(name, value)


def name_list(name: str, value: Iterable[str]) -> list[str]:
    """Return a collection of tensor names as a list, each once. TypeError for something else."""
    given = None
    if not isinstance(value, (str, bytes)):
        try:
            given = list(dict.fromkeys(value))
        except TypeError:  # no collection, or one of lists
            given = None
    if given is None or not all(isinstance(one, str) for one in given):
        raise TypeError(f"{name} must be a list of names, not {shown(value)}")
    return given


def check_load_progress(progress: Any) -> None:
    """Raise TypeError for a progress argument that a load does not take."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be a callable, True or False, not {shown(progress)}")


def _check_save_progress(progress: Any) -> None:
    if progress not in (None, False) and not callable(progress):
        bar = ". A save shows no bar" if progress is True else ""
        raise TypeError(f"progress must be a callable or None, not {shown(progress)}{bar}")


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
    if options.get("share_grace", 0) and options.get("share", "off") != "node":
        raise ValueError('share_grace has no effect without share="node"')


def share_options(
    share: str, share_grace: int, device: Any, pin_memory: bool = False
) -> dict[str, Any]:
    """Return a load's options for shared memory, which is on the CPU. ValueError elsewhere."""
    if share == "off":
        return {}
    if pin_memory or str(device) != "cpu":
        raise ValueError('share="node" is for tensors on the CPU that are not pinned')
    return {"share": share, "share_grace": share_grace}


def check_save_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a save. TypeError or ValueError for a wrong one."""
    _check(options, _SAVE_WORDS)
    _check_save_progress(options.get("progress"))
    alignment = parse_limit("alignment", options.get("alignment", 0))
    if alignment & (alignment - 1) or alignment > _ALIGNMENT_MAX:
        raise ValueError(f"alignment must be 0 or a power of two up to {_ALIGNMENT_MAX}, not "
                         f"{alignment}")
    checked = {**options, "alignment": alignment} if "alignment" in options else dict(options)
    if checked.get("progress") is False:
        del checked["progress"]
    return checked


def check_names(names: Any, metadata: Any) -> None:
    """Raise TypeError for names or metadata that are not text."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tensor names must be str, not {type(name).__name__}: {shown(name)}")
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of str to str, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be a dict of str to str: {shown(key)}: {shown(value)}")
