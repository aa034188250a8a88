# SPDX-License-Identifier: Apache-2.0
"""Models in memory instead of files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from .._core import Model, error_class
from .verified_open import chosen


def model_of_bytes(data: Any) -> Model:
    """Open the bytes of a file as a model. The caller closes it.

    The bytes are copied once to an anonymous file in memory, so that tensors can be views of it.
    Accepts any bytes-like object (bytes, bytearray, memoryview, mmap).
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise TypeError(
            f"argument 'data': a bytes-like object is expected, not {type(data).__name__}"
        ) from None
    if chosen(None):
        raise error_class()("bytes in memory have no manifest to be verified by: load the file")
    fd = os.memfd_create("safetensors")
    try:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done : done + (64 << 20)])
        try:
            return Model(f"/proc/self/fd/{fd}")
        except error_class() as error:
            begin = "Error while deserializing"
            text = str(error).replace(f"{begin} header", begin)
            error.args = (text.replace(f"/proc/self/fd/{fd}", "memory"),)
            if error.file:
                error.file = "memory"
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_bytes(data: Any) -> Iterator[Model]:
    """Open the bytes of a file as a model, as a context manager."""
    model = model_of_bytes(data)
    try:
        yield model
    finally:
        model.close()
