# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model are others than an older manifest says: two manifests are compared."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field

from ._core import Model, error_class
from ._types import Path

_FIRST = "fastsafetensors-manifest"


@dataclass
class _Listed:
    """What a manifest says of a file."""

    header: str = ""
    chunks: list[str] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)


def _read(path: Path) -> tuple[list[str], dict[str, _Listed]]:
    """(algorithm and chunk size, files by name). SafetensorError for what is no manifest."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    words = lines[0].split() if lines else []
    is_whole = len(lines) > 1 and lines[-1].startswith("seal ")
    if words[:1] != [_FIRST] or len(words) != 4 or not is_whole:
        raise error_class()(f"{os.fsdecode(path)}: no manifest, or one that is cut off")
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
        raise error_class()(f"{os.fsdecode(path)}: a damaged manifest: {text!r}") from None


def _beside(filename: Path) -> str:
    """Where verify=True looks for a model's manifest."""
    name = os.fsdecode(filename)
    if os.path.isdir(name):
        return os.path.join(name, "model.manifest")
    return f"{name}.manifest"


def _check_seal(filename: Path, manifest: Path) -> None:
    """Refuse a manifest that was changed; that the file is another one is what is asked."""
    try:
        Model(filename, False, manifest).close()
    except error_class() as error:
        if error.tag == "InvalidManifest":
            raise


def changed_tensors(filename: Path, old: Path, manifest: Path | None = None) -> list[str]:
    """Return names of the tensors whose bytes are not those of an older manifest.

    Nothing but headers and manifests is read. Where both manifests have digests of tensors
    (``write_manifest(tensors=True)``) these are compared. Else, of a file whose header is the
    same, tensors that touch a chunk whose digest differs have changed; of any other file, all. Of
    compressed files manifests have stored bytes: without digests of tensors all of a file's have
    changed where any byte of it has, and of a set in which one is compressed so of every file.

    Args:
        filename: a file or a folder, as it is now.
        old: the manifest of what it was.
        manifest: the manifest of what it is; None for the one beside it.

    Returns:
        The names, in the order of the files; for ``load_model(.., changed=..)``.

    Raises:
        SafetensorError: what is no manifest, or a bad file.
        OSError: of its kind, for what the system refuses.
    """
    manifest = _beside(filename) if manifest is None else manifest
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
            # Where a compressed tensor lies the offset does not tell: all of the file counts.
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
