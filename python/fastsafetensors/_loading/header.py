# SPDX-License-Identifier: Apache-2.0
"""Read and edit a model's headers, without loading tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .._base.argument_types import Path, Paths
from .._base.errors import serialization_error, shown, unknown_tensor
from .._base.options import check_no_empty_path, check_optional_paths, check_switches
from .._core import Model
from .._core import edit_header as _edit_header
from .._saving.save_options import manifest_options
from .open_arguments import check_path
from .verified_open import open_files


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry: dtype (the format's name), shape in elements, size in bytes, and offset.

    begin: offset of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    begin: int


@dataclass(frozen=True)
class Header:
    """tensors: {name: TensorInfo} in file order; metadata: {path: the file's metadata, or None}."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, dict[str, str] | None]


def read_header(filename: Paths) -> Header:
    """Read headers, without reading tensors.

    Args:
        filename: a file, an index, a folder or a list of files.

    Returns:
        The tensors and metadata.

    Raises:
        SafetensorError: an invalid header.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_path(filename)
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
    """Change a file's metadata and tensor names, without loading tensors.

    The edit is atomic, like every save: at every instant the old or the new file is there. If the
    file system can share blocks between files, only the header is written; otherwise the kernel
    copies the rest.

    Args:
        filename: one file.
        metadata: entries of __metadata__ to set; None as a value removes an entry.
        renames: {old name: new name}, applied together, so two tensors can swap names.
        clear: delete entries that are not set here.
        target: where to write the edited file; by default the file is replaced.
        durable: wait until the bytes are on the device.
        manifest: True, "blake3" or "sha256": write the edited file's manifest next to it; a path:
            write it there. Otherwise the old file's manifest is deleted, because it no longer
            matches.

    Raises:
        TypeError: a key, value or name that is not text.
        SafetensorError: an invalid file, or an unknown tensor or metadata entry.
        ValueError: nothing to change, or two tensors of one name.
        OSError: the matching subclass, if a system call fails.
    """
    check_no_empty_path("filename", filename)
    check_optional_paths(target=target)
    check_switches(clear=clear, durable=durable)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must map str to str or None, not {shown(metadata)}")
    if renames is not None and not isinstance(renames, Mapping):
        raise TypeError(f"renames must map str to str, not {shown(renames)}")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, (str, type(None))):
            raise TypeError(f"metadata must map str to str or None, not {shown(key)} to "
                            f"{shown(value)}")
    for old, new in (renames or {}).items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"renames must map str to str, not {shown(old)} to {shown(new)}")
    if not (metadata or renames or clear or target):
        raise ValueError("nothing to change: give metadata, renames, clear or a target")
    dropped = [key for key, value in (metadata or {}).items() if value is None]
    if dropped and not clear:
        with contextlib.closing(Model(filename)) as model:
            there = model.metadata(0) or {}
        for key in dropped:
            if key not in there:
                said = f"{os.fspath(filename)!r} has no metadata {shown(key)}"
                raise unknown_tensor(key, said, list(there))
    place = manifest_options(manifest)
    made = place.get("manifest"), place.get("digest", "xxh3-128")
    changes = dict(metadata or {}), dict(renames or {})
    try:
        _edit_header(filename, target, *changes, clear, durable, *made)
    except OSError as error:
        raise serialization_error(error) from error
