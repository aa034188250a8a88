# SPDX-License-Identifier: Apache-2.0
"""Folders of deltas: which versions follow a checkpoint's own, and the lock of a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from typing import Any, NamedTuple, NoReturn

from .._base.argument_types import Path
from .._base.errors import printable, refuse
from .._base.regular_files import only_regular, read_regular

_INDEX_BYTES_MAX = 100_000_000  # as in the library


class Chain(NamedTuple):
    """The versions in a folder that follow a checkpoint's, as plain versions."""

    start: str
    """The checkpoint's version; "" if it has no note and the folder no versions."""
    versions: list[tuple[str, str]]
    """(version, folder), oldest first."""


def plain_version(version: Any) -> str:
    """Return a version in the form that is compared: decimal ones without leading zeros."""
    text = str(version)
    return (text.lstrip("0") or "0") if text.isascii() and text.isdigit() else text


def _read_versions(source: Path) -> dict[str, tuple[str, str]]:
    """Return {base version: (version, folder)} of the delta versions in a folder, as numbers.

    Of several folders with the same base, the last one by name is used.
    """
    found = {}
    for entry in sorted(pathlib.Path(os.fsdecode(source)).iterdir()):
        index = entry / "model.safetensors.index.json"
        try:
            metadata = json.loads(read_regular(str(index), _INDEX_BYTES_MAX)).get("metadata", {})
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # not published yet, or no version
        if isinstance(metadata, dict) and "delta_encoding" in metadata:
            base, version = metadata.get("base_version"), metadata.get("version")
            found[plain_version(base)] = (plain_version(version), str(entry))
    return found


def find_version(source: Path, version: str) -> list[str]:
    """Return the folders of a version: deltas of several bases may lead to it."""
    wanted = plain_version(version)
    return [folder for made, folder in _read_versions(source).values() if made == wanted]


def _follows(current: str, version: str) -> bool:
    """Whether both are decimal and the second one is larger."""
    if not (current.isdigit() and version.isdigit()):
        return False
    return (len(version), version) > (len(current), current)


def _refuse_cycle(source: Path, version: str) -> NoReturn:
    refuse(f"{os.fsdecode(source)}: the versions form a cycle, in which {version} follows itself; "
           "remove one of them", "VersionMismatch")


def find_chain(source: Path, version: str | None, until: str | None = None) -> Chain:
    """Find the versions that follow `version`; None: the base of the first one in the folder.

    until: the last one that is wanted; SafetensorError where it is not among them, and for
        versions that form a cycle.
    """
    versions = _read_versions(source)
    if version is not None:
        current = plain_version(version)
    else:
        made = {version for version, _ in versions.values()}
        roots = [base for base in versions if base not in made]
        if len(roots) > 1:
            raise ValueError(f"{printable(os.fsdecode(source))}: several chains begin here "
                             f"({roots}), and the checkpoint has no note of its version. Apply the "
                             "first delta with apply(..., version=)")
        current = at = roots[0] if roots else ""
        others = dict(versions)  # each follows the root, or is in a cycle, which has none
        while at in others:
            at, _ = others.pop(at)
        if others:
            _refuse_cycle(source, next(iter(others)))
    start = current
    chain: list[tuple[str, str]] = []
    while current in versions and current != until:
        current, folder = versions.pop(current)
        if current in (start, *(made for made, _ in chain)):
            _refuse_cycle(source, current)
        chain.append((current, folder))
    later = [made for made, _ in versions.values() if _follows(current, made)]
    if until is None and later and not chain:
        first = min(later, key=lambda version: (len(version), version))
        refuse(f"{os.fsdecode(source)}: versions between {current} and {first} are missing",
               "VersionMismatch")
    if until not in (None, current):
        refuse(f"{os.fsdecode(source)}: version {until} does not follow the checkpoint's version "
               f"{start}", "VersionMismatch")
    return Chain(start, chain)


def open_lock(checkpoint: str) -> int | None:
    """Open the lock of a checkpoint folder; None where the folder cannot be written at all."""
    folder = os.path.join(checkpoint, ".weight_sync")
    lock = os.path.join(folder, "lock")
    # A FIFO would wait for a writer, and a link could lead elsewhere.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return only_regular(os.open(lock, flags | os.O_RDONLY), lock)
    except FileNotFoundError:
        os.stat(checkpoint)
    try:
        os.makedirs(folder, exist_ok=True)
        return os.open(lock, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return None
        raise
