# SPDX-License-Identifier: Apache-2.0
"""Find tensors that changed since an older manifest, by comparing two manifests."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field

from .._base.argument_types import Path
from .._base.errors import refuse
from .._base.options import check_no_empty_path, check_optional_paths
from .._base.regular_files import read_regular
from .._core import Model, error_class

_FIRST = "fastsafetensors-manifest"


@dataclass
class _Listed:
    """A file in a manifest."""

    header: str = ""
    chunks: list[str] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)


def _read(path: Path) -> tuple[list[str], dict[str, _Listed]]:
    """(algorithm and chunk size, files by name). SafetensorError for an invalid manifest."""
    lines = read_regular(path).decode(errors="replace").splitlines()
    words = lines[0].split() if lines else []
    is_whole = len(lines) > 1 and lines[-1].startswith("seal ")
    if words[:1] != [_FIRST] or len(words) != 4 or not is_whole:
        refuse(f"{os.fsdecode(path)}: no manifest, or one that is cut off")
    files: dict[str, _Listed] = {}
    current = _Listed()
    for line in lines[1:-1]:
        kind, _, rest = line.partition(" ")
        value, _, name = rest.partition(" ")
        if kind == "file":
            current = files[_name(path, name)] = _Listed()
        elif kind == "header":
            current.header = rest
        elif kind == "chunk":
            current.chunks.append(value)
        elif kind == "tensor":
            current.tensors[_name(path, name)] = value
    return words[2:], files


def _name(path: Path, text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        refuse(f"{os.fsdecode(path)}: a damaged manifest: {text!r}")


def _manifest_path(filename: Path) -> str:
    """The path where verify=True looks for a model's manifest."""
    name = os.fsdecode(filename)
    if os.path.isdir(name):
        return os.path.join(name, "model.manifest")
    return f"{name}.manifest"


def _check_seal(filename: Path, manifest: Path) -> None:
    """Refuse a damaged manifest. That the model has changed since is expected."""
    try:
        Model(filename, False, manifest).close()
    except error_class() as error:
        if error.tag == "InvalidManifest":
            raise


def changed_tensors(filename: Path, old: Path, manifest: Path | None = None) -> list[str]:
    """Return names of the tensors whose bytes are not those of an older manifest.

    Only headers and manifests are read. If both manifests have digests of tensors
    (``write_manifest(tensors=True)``), these are compared. Otherwise, in a file with an unchanged
    header, tensors with a byte in a changed chunk count as changed; in any other file, all tensors.
    Manifests of compressed files have digests of stored bytes: without digests of tensors, any
    change of a compressed file changes all of its tensors, and in a model with a compressed file
    this applies to every file.

    Args:
        filename: the current file or folder.
        old: the older manifest.
        manifest: the current manifest; None for the one next to the model.

    Returns:
        The names, in file order, for ``load_model(..., changed=...)``.

    Raises:
        SafetensorError: an invalid manifest or file.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_no_empty_path("old", old)
    check_optional_paths(manifest=manifest)
    manifest = _manifest_path(filename) if manifest is None else manifest
    kind, now = _read(manifest)
    old_kind, before = _read(old)
    for path in (manifest, old):
        _check_seal(filename, path)
    unit = int(kind[1]) if kind == old_kind and kind[1].isdigit() else 0
    with contextlib.closing(Model(filename)) as model:
        files = [os.path.basename(model.file(at)[0]) for at in range(model.file_count)]
        result = []
        for index, name in enumerate(model.names()):
            _, _, size, file, offset = model.info(index)
            new, was = now.get(files[file]), before.get(files[file])
            # The offset of a compressed tensor does not show where it is stored, so the whole file
            # counts.
            place = None if model.is_compressed else (offset, size, unit)
            if not unit or new is None or was is None or not _is_same(new, was, name, place):
                result.append(name)
        return result


def _is_same(
    new: _Listed, was: _Listed, name: str, place: tuple[int, int, int] | None
) -> bool:
    for entry in (name, f"__packed__.{name}"):
        if entry in new.tensors and entry in was.tensors:
            return new.tensors[entry] == was.tensors[entry]
    if new.header != was.header:
        return False
    if place is None:
        return new.chunks == was.chunks
    offset, size, unit = place
    first, end = offset // unit, -(-(offset + size) // unit)
    return new.chunks[first:end] == was.chunks[first:end] and end <= len(new.chunks)
