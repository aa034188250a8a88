# SPDX-License-Identifier: Apache-2.0
"""Digests of models, and checks of what lies on the disk: the command's answers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ._command import ask_command
from ._types import Path

_ALGORITHMS = ("xxh3", "xxh3-128", "blake3", "sha256")


@dataclass(frozen=True)
class Digests:
    """Hexadecimal digests: tensors by name, files by name; algorithm: as asked for."""

    algorithm: str
    tensors: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True)
class Problem:
    """What is wrong: the error's name, what it says, and the file."""

    kind: str
    message: str
    file: str


def _plain_path(filename: Path) -> bytes:
    """Return a path as the command takes it: "-" is a file here, and standard input there."""
    path = os.fsencode(filename)
    return b"./-" if path == b"-" else path


def hash_file(filename: Path, algorithm: str = "xxh3", *, write: bool = False) -> Digests:
    """Compute digests of every tensor and every file of a model.

    Args:
        filename: a file, an index or a folder.
        algorithm: "xxh3" (of 64 bits), "xxh3-128", "blake3", or "sha256", of which a file's is what
            sha256sum prints and which needs libcrypto on the machine.
        write: keep them beside the model, for verify_file(digests=True).

    Returns:
        The digests.

    Raises:
        ValueError: an algorithm of another name.
        SafetensorError: a bad file, or an algorithm whose library is not there.
        OSError: of its kind, for what the system refuses.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: there are {', '.join(_ALGORITHMS)}")
    ask = ("hash", "--json", "--no-progress", "--algorithm", algorithm)
    if not write:
        answer = ask_command(*ask, "--", _plain_path(filename))
        rows = [(row["kind"], row["digest"], row["name"]) for row in answer["digests"]]
        return _digests(answer["algorithm"], rows)
    ask_command(*ask, "--write", "--", _plain_path(filename))
    with open(os.fsencode(filename).rstrip(b"/") + b".digest", encoding="utf-8") as kept:
        used = next(kept).split()[2]
        parts = [line.split(" ", 2) for line in kept]
    return _digests(used, [(kind, digest, json.loads(name)) for kind, digest, name in parts])


def _digests(algorithm: str, rows: list[tuple[str, str, str]]) -> Digests:
    """Return digests of rows of (kind, digest, name)."""
    tensors, files = ({name: digest for kind, digest, name in rows if kind == wanted}
                      for wanted in ("tensor", "file"))
    return Digests(algorithm, tensors, files)


def verify_file(filename: Path, *, digests: bool = False) -> list[Problem]:
    """Check a model on the disk: headers, the index, that all files are there.

    Args:
        filename: a file, an index or a folder.
        digests: compare every byte with the digests that hash_file(write=True) has kept; that
            there are none is a problem, too.

    Returns:
        What is wrong, of every damaged file; an empty list of a model that is whole.

    Raises:
        OSError: where the command is not installed.
    """
    compared = ("--hash",) if digests else ()
    answer = ask_command("verify", "--json", "--no-progress", *compared, "--",
                         _plain_path(filename), good=(0, 1, 2))
    found = [Problem(row["kind"], row["message"], row.get("file", ""))
             for row in answer.get("errors", ())]
    if digests and not found:
        place = os.fsdecode(filename)
        if answer["digests"] is None:
            found.append(Problem("NoDigests", "no digests were kept for this model", place))
        for row in answer.get("different", ()):
            kind, kept, name = row.split(" ", 2)
            text = f"{kind} {name} has other bytes than those whose digest {kept} was kept"
            found.append(Problem("DigestMismatch", text, place))
    return found
