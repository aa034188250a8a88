# SPDX-License-Identifier: Apache-2.0
"""What a model's headers say, without its tensors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ._core import Model
from ._types import Paths


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry: dtype (the format's name), shape in elements, size, and where it lies.

    begin: its first byte, from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    begin: int


@dataclass(frozen=True)
class Header:
    """tensors: {name: TensorInfo} in file order; metadata: {path: what the file says, or None}."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, dict[str, str] | None]


def read_header(filename: Paths) -> Header:
    """Read the headers of a file, an index, a folder or a list of files; no tensor is touched.

    SafetensorError for a bad header, OSErrors of their kind for what the system refuses.
    """
    with contextlib.closing(Model(filename)) as model:
        files = [model.file(number)[0] for number in range(model.file_count)]
        tensors = {}
        for index, name in enumerate(model.names()):
            dtype, shape, size, number, begin = model.info(index)
            tensors[name] = TensorInfo(dtype, shape, size, files[number], begin)
        return Header(tensors, {path: model.metadata(at) for at, path in enumerate(files)})
