# SPDX-License-Identifier: Apache-2.0
"""Errors that belong to several classes: this package's, and those that programs already catch."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from .._core import error_class, printable_text

# With more names than this, only names with the same ending are searched for close matches.
_MANY_NAMES = 500
# The most characters of a wrong argument in a message.
_SHOWN_MAX = 200
# The most of a message.
_MESSAGE_MAX = 4000


# Python classes of kinds of errors (docs/errors.md); the others are SafetensorError.
_CLASSES: dict[str, type[Exception]] = {
    "BudgetExceeded": ValueError, "InvalidArgument": ValueError, "InvalidTensorView": ValueError,
    "Usage": ValueError, "OutOfMemory": MemoryError, "Timeout": TimeoutError,
    "Cancelled": RuntimeError, "DeviceError": RuntimeError, "Unsupported": RuntimeError,
    "FileNotFound": FileNotFoundError, "NoModelFiles": FileNotFoundError, "NoSpace": OSError,
    "NotRegularFile": OSError, "IoError": OSError, "PermissionDenied": PermissionError,
}


def printable(shown: object) -> str:
    """Return a text for a message. Characters that are unsafe on a terminal become "?"."""
    text = str(shown)
    return text if text.isascii() and text.isprintable() else printable_text(text)


def shown(value: object) -> str:
    """Return a wrong argument for a message: short values themselves, of other objects the type.

    The text of a state dict has a page for each tensor.
    """
    if not isinstance(value, (str, bytes, int, float, type(None))):
        return f"an object of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN_MAX:
        return "a number of hundreds of digits"  # of which Python may refuse to make a text
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def printable_lines(shown: object) -> str:
    """Return a text of several lines for a message, each as by printable()."""
    return "\n".join(map(printable, str(shown).splitlines()))


def refuse(message: str, kind: str = "", file: str = "") -> NoReturn:
    """Raise the error class of a kind, by default SafetensorError, which gets the kind as its tag.
    """
    message = printable(message)
    if len(message) > _MESSAGE_MAX:
        message = f"{message[:_MESSAGE_MAX]}..."
    if kind in _CLASSES:
        raise _CLASSES[kind](message)
    error = error_class()(message)
    if kind:
        error.tag, error.file = kind, file
    raise error


def add_location(error: Any, tensor: str | None = None) -> None:
    """Add the requested tensor and this process's rank, if it has one, to an error, once.

    Engines print an error of a rank without its number.
    """
    if getattr(error, "_has_location", False):
        return
    words = []
    if tensor is not None and not getattr(error, "tensor", None):
        error.tensor = tensor
        words.append(f"tensor `{printable(tensor)}`")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            words.append(f"rank {distributed.get_rank()} of {ranks}")
    error._has_location = True
    append_text(error, *words)


def append_text(error: Any, *words: str) -> None:
    """Add words to an error's message."""
    if words and isinstance(error, OSError):
        error.strerror = ", ".join([str(error.strerror), *words])
    elif words and error.args:
        error.args = (", ".join([str(error.args[0]), *words]), *error.args[1:])


# ---- unknown names ----


def _close_matches(name: str, names: list[str]) -> list[str]:
    import difflib

    if len(names) > _MANY_NAMES:
        ending = "." + name.rpartition(".")[2]
        names = [other for other in names if other.endswith(ending)][:_MANY_NAMES]
    return difflib.get_close_matches(name, names, n=3)


def _describe_unknown(error: Any) -> str:
    """Return the message with close matches.

    Computed only when it is shown, because programs that probe for names never need it.
    """
    close = _close_matches(str(error.tensor), list(error._names))
    hint = f" (close matches: {', '.join(close)})" if close else ""
    return printable(f"{error.args[0]}{hint}")


@functools.cache
def _unknown_class(base: Any) -> Any:
    body = {
        "__str__": _describe_unknown,
        "__module__": "fastsafetensors",
        "__doc__": "There is no tensor of that name.",
        "__reduce__": lambda self: (_rebuild_unknown, (str(self), self.tensor)),
    }
    return type("SafetensorError", (base, KeyError, ValueError), body)


def unknown_tensor(name: Any, message: str, names: Iterable[str]) -> Exception:
    """Return the error for an unknown name, given the existing `names`.

    It is a SafetensorError, a KeyError and a ValueError. The hint is computed when it is shown.
    """
    base: Any = error_class()
    error = _unknown_class(base)(message)
    error.tensor, error._names = name, names
    result: Exception = error
    return result


def _rebuild_unknown(message: str, name: str) -> Exception:
    return unknown_tensor(name, message, ())


# ---- failed system calls when writing a file ----


def _describe_refusal(error: OSError) -> str:
    place = f' at path "{error.filename}"' if error.filename else ""
    return f"Error while serializing: I/O error: {error.strerror}{place}"


@functools.cache
def _serialization_class(base: Any, kind: Any) -> Any:
    body = {
        "__str__": _describe_refusal,
        "__module__": "fastsafetensors",
        "__doc__": "The system refused a save.",
        "__reduce__": lambda self: (_rebuild_refusal, (self.errno, self.strerror, self.filename)),
    }
    return type("SafetensorError", (base, kind), body)


def serialization_error(error: OSError) -> Exception:
    """Return an error that is a SafetensorError and also of `error`'s class (FileNotFoundError,
    ...).
    """
    base: Any = error_class()
    kind: Any = type(error)
    made = _serialization_class(base, kind)(error.errno, error.strerror or str(error),
                                            error.filename)
    made.tag = "NoSpace" if error.errno in (errno.ENOSPC, errno.EDQUOT) else \
        "FileNotFound" if isinstance(error, FileNotFoundError) else \
        "PermissionDenied" if isinstance(error, PermissionError) else "IoError"
    result: Exception = made
    return result


def _rebuild_refusal(number: int, text: str, filename: Any) -> Exception:
    return serialization_error(OSError(number, text, filename))
