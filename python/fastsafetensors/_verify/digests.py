# SPDX-License-Identifier: Apache-2.0
"""Digests of models, and checks of files on disk, by running the command."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .._base.argument_types import Path
from .._base.command import ask_command, raise_error
from .._base.errors import printable
from .._base.options import check_no_empty_path, check_switch, check_word

_ALGORITHMS = ("xxh3", "xxh3-128", "blake3", "sha256")
_DIFFERENCES = {"changed": "has other bytes than those whose digest was kept",
                "missing": "is missing, but its digest was kept",
                "unlisted": "is new: its digest was not kept"}


@dataclass(frozen=True)
class Digests:
    """Hexadecimal digests of tensors and of files, each by name.

    algorithm: the requested one.
    """

    algorithm: str
    tensors: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True)
class Problem:
    """An error: its name, the message, and the file."""

    kind: str
    message: str
    file: str


def _plain_path(filename: Path) -> bytes:
    """Return a path in the form of the command, where "-" would be standard input."""
    path = os.fsencode(filename)
    return b"./-" if path == b"-" else path


def hash_file(filename: Path, algorithm: str = "xxh3", *, write: bool = False) -> Digests:
    """Compute digests of every tensor and every file of a model.

    Args:
        filename: a file, an index or a folder.
        algorithm: "xxh3" (64 bits), "xxh3-128", "blake3" or "sha256"; sha256 of a file equals
            sha256sum's output, and needs libcrypto.
        write: store them next to the model, for verify_file(digests=True).

    Returns:
        The digests.

    Raises:
        ValueError: an unknown algorithm; for write=True: a file of another program has the
            digests' name, or the name of a model file is not UTF-8.
        SafetensorError: an invalid file, or the algorithm's library is missing.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_switch("write", write)
    check_word("algorithm", algorithm, _ALGORITHMS)
    ask = ("hash", "--json", "--no-progress", "--algorithm", algorithm)
    answer = ask_command(*ask, *(["--write"] if write else []), "--", _plain_path(filename))
    tensors, files = ({row["name"]: row["digest"] for row in answer["digests"]
                       if row["kind"] == wanted} for wanted in ("tensor", "file"))
    return Digests(answer["algorithm"], tensors, files)


def verify_file(filename: Path, *, digests: bool = False) -> list[Problem]:
    """Check a model on disk: headers, index, and that all files exist.

    Args:
        filename: a file, an index or a folder.
        digests: compare every byte with the digests that hash_file(write=True) stored. Missing
            digests are a problem too.

    Returns:
        The problems of every damaged file; an empty list if the model is intact.

    Raises:
        OSError: an empty path, bytes that cannot be read, or the command is not installed.
        ValueError: a folder with several indexes.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_switch("digests", digests)
    compared = ("--hash",) if digests else ()
    answer = ask_command("verify", "--json", "--no-progress", *compared, "--",
                         _plain_path(filename), good=(0, 1, 2))
    wrong = answer.get("error")
    if wrong is not None and wrong["kind"] not in ("NoDigests", "InvalidManifest"):
        raise_error(wrong)
    found = [Problem(row["kind"], row["message"], row.get("file", ""))
             for row in answer.get("errors", ())]
    if digests and not found:
        place = os.fsdecode(filename)
        if wrong is not None:  # nothing was compared
            found.append(Problem(wrong["kind"], wrong["message"], wrong.get("file") or place))
        for row in answer.get("different", ()):
            text = f'{row["kind"]} "{printable(row["name"])}" {_DIFFERENCES[row["problem"]]}'
            found.append(Problem("DigestMismatch", text, place))
    return found
