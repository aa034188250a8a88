# SPDX-License-Identifier: Apache-2.0
"""Files of a model folder, which anybody may have written: opening one never waits."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from .errors import printable


def only_regular(file: int, path: str) -> int:
    """Return a descriptor of a regular file; close others, and raise OSError."""
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a regular file", path)


def open_regular(path: Any) -> int:
    """Open a regular file for reading; return its descriptor.

    Raises:
        OSError: it can't be opened, or is not regular: opening a FIFO would wait, and a device
            may have no end.
    """
    return only_regular(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK),
                        os.fsdecode(path))


def read_regular(path: Any, bytes_max: int = -1) -> bytes:
    """Return the bytes of a regular file. OSError as of open_regular(), and if it is larger."""
    with open(open_regular(path), "rb") as file:
        if -1 < bytes_max < os.fstat(file.fileno()).st_size:
            raise OSError(f"{printable(os.fsdecode(path))}: larger than {bytes_max} bytes")
        return file.read(bytes_max)
