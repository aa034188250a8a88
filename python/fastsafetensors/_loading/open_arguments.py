# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the functions which open models share: paths, devices, backends."""

from __future__ import annotations

import operator
import os
import re
from typing import Any, NoReturn

from .._base.errors import refuse

# Compiled when a device is given: that takes as long as two imports.
_DEVICE = r"(cpu|cuda|gpu|mps|npu|xpu|hpu|mlu|musa|xla|sdaa|neuron)(:\d+)?"
_BACKENDS = {"mmap": "auto", "pread": "load"}


def _refuse_device(device: Any) -> NoReturn:
    amd = ', which is an AMD GPU in torch for ROCm' if str(device).startswith("hip") else ""
    refuse(f'device {device} is invalid (expected "cpu", "cuda", "cuda:1"{amd}, a torch.device or '
           "the number of a GPU)")


def _device_text(device: Any) -> str | int:
    """Return a device as a number or plain text, in any form. None is the CPU."""
    if device is None:
        return "cpu"
    if isinstance(device, str):
        return str.__str__(device)  # of an enumeration: its value
    if type(device).__module__.partition(".")[0] == "torch":
        return str(device)
    try:
        if isinstance(device, bool):
            raise TypeError
        return operator.index(device)
    except TypeError:
        _refuse_device(repr(device))


def is_meta(device: Any) -> bool:
    """Tell whether a device is torch's meta device, whose tensors have a shape and no bytes."""
    return _device_text(device) == "meta"


def check_device(device: Any) -> Any:
    """Return a device in torch's form. Raises the reference's error for an invalid one.

    None is the CPU. Only the form is checked; a missing device is reported when it is used.
    """
    text = _device_text(device)
    if isinstance(text, int):
        return text if text >= 0 else _refuse_device(text)
    if text == "meta":
        refuse("device meta is invalid here, because nothing would be read. load_file() returns "
               "tensors on it")
    if not re.fullmatch(_DEVICE, text):
        _refuse_device(text)
    return "cpu" if text.partition(":")[0] == "cpu" else text  # torch ignores the number


def check_backend(backend: str) -> str:
    """Return the load mode for a backend's name."""
    if backend not in _BACKENDS:
        refuse(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
    return _BACKENDS[backend]


def check_path(filename: Any, parameter: str = "filename") -> None:
    """TypeError for anything except a path or a list of paths."""
    for part in filename if isinstance(filename, (list, tuple)) else [filename]:
        if not isinstance(part, (str, bytes, os.PathLike)):
            raise TypeError(
                f"argument '{parameter}': expected str, bytes or os.PathLike object, not "
                f"{type(part).__name__}"
            )


def absolute_path(filename: Any) -> Any:
    """Return a path, or a list of them, independent of the working folder."""
    if isinstance(filename, (list, tuple)):
        return [absolute_path(part) for part in filename]
    path = os.fspath(filename)
    # Only joined: after a link to a folder, the parent folder cannot be derived from the text.
    if isinstance(path, bytes):
        return path if b"://" in path else os.path.join(os.getcwdb(), path)
    return path if "://" in path else os.path.join(os.getcwd(), path)
