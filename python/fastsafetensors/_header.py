# SPDX-License-Identifier: Apache-2.0
"""What a model's headers say, and editing it: without its tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ._core import Model
from ._core import edit_header as _edit_header
from ._errors import serialization_error, unknown_tensor
from ._saving import manifest_options
from ._types import Path, Paths
from ._verify import open_files


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
    """Read headers; no tensor is touched.

    Args:
        filename: a file, an index, a folder or a list of files.

    Returns:
        Its tensors and metadata.

    Raises:
        SafetensorError: a bad header.
        OSError: of its kind, for what the system refuses.
    """
    with contextlib.closing(open_files(filename)) as model:
        files = [model.file(number)[0] for number in range(model.file_count)]
        tensors = {}
        for index, name in enumerate(model.names()):
            dtype, shape, size, number, begin = model.info(index)
            tensors[name] = TensorInfo(dtype, shape, size, files[number], begin)
        return Header(tensors, {path: model.metadata(at) for at, path in enumerate(files)})


def edit_header(
    filename: Path,
    metadata: Mapping[str, str | None] | None = None,
    renames: Mapping[str, str] | None = None,
    *,
    clear: bool = False,
    target: Path | None = None,
    durable: bool = False,
    manifest: bool | Path = False,
) -> None:
    """Change a file's metadata and names of tensors; no tensor is loaded.

    The edited file takes the old one's place in one step, as every save does: at every instant the
    old file is there or the new one. Where the file system shares blocks between files only the
    header is written, elsewhere the kernel copies the rest.

    Args:
        filename: one file.
        metadata: entries of __metadata__ to set; None as a value removes an entry.
        renames: {old name: new name}, taken at once: two tensors may exchange their names.
        clear: entries that are not set here go.
        target: where the edited file comes to; without it, the place of the old one.
        durable: wait until the bytes are on the device.
        manifest: True, "blake3" or "sha256" make the edited file's manifest beside it, a path makes
            it there. Else that of the old file goes: it says what the file was.

    Raises:
        TypeError: a key, value or name that is no text.
        SafetensorError: a bad file, an unknown tensor or metadata entry, or a name that is there
            already.
        ValueError: nothing to change.
        OSError: of its kind, for what the system refuses.
    """
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, (str, type(None))):
            raise TypeError(f"metadata: {key!r}: {value!r} is no text for a text, nor None")
    for old, new in (renames or {}).items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"renames: {old!r}: {new!r} is no name for a name")
    if not (metadata or renames or clear or target):
        raise ValueError("nothing to change: no metadata, no renames, no clear, no target")
    dropped = [key for key, value in (metadata or {}).items() if value is None]
    if dropped and not clear:
        with contextlib.closing(Model(filename)) as model:
            there = model.metadata(0) or {}
        for key in dropped:
            if key not in there:
                said = f"{os.fspath(filename)!r} has no metadata {key!r}"
                raise unknown_tensor(key, said, list(there))
    place = manifest_options(manifest)
    made = place.get("manifest"), place.get("digest", "xxh3-128")
    changes = dict(metadata or {}), dict(renames or {})
    try:
        _edit_header(filename, target, *changes, clear, durable, *made)
    except OSError as error:
        raise serialization_error(error) from error
