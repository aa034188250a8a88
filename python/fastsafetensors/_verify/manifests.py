# SPDX-License-Identifier: Apache-2.0
"""Writing and checking manifests, lists of checksums and signatures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .._base.argument_types import Path
from .._base.command import ask_command, raise_error
from .._base.errors import printable
from .._base.options import check_no_empty_path, check_optional_paths, check_switch, check_word
from .._core import Model
from .._saving.save_options import MANIFEST_ALGORITHMS
from .digests import Problem, _plain_path


@dataclass(frozen=True)
class ManifestMade:
    """A manifest, list or signature that was written: its path, and counts of files and bytes.

    `files_kept` were not read again, because of `keep`. `path` has U+FFFD for bytes that are not
    UTF-8.
    """

    algorithm: str
    files: int
    files_kept: int
    bytes_read: int
    bytes_hashed: int
    path: str


def _made(row: dict[str, Any]) -> ManifestMade:
    row.pop("seconds", None)
    return ManifestMade(path=row.pop("target"), **row)


def write_manifest(
    filename: Path,
    target: Path | None = None,
    *,
    algorithm: str = "xxh3-128",
    keep: Path | None = None,
    tensors: bool = False,
) -> ManifestMade:
    """Write the manifest of a model: digests of every chunk of its files, for verify=.

    Args:
        filename: a file, an index or a folder (then of every file in it).
        target: where to write it; None for the path where verify=True looks: FILE.manifest, or
            model.manifest in the folder.
        algorithm: "xxh3-128" (or "xxh3") against accidents; "blake3" or "sha256" against forgery
            as well.
        keep: an older manifest, whose digests are reused for files with the same size that have not
            changed since.
        tensors: also store digests of tensors, for comparing files.

    Returns:
        The path, counts and sizes.

    Raises:
        ValueError: an unknown algorithm, the name of one as `target`, a `target` that is a model or
            an index, `keep` of another algorithm, or a URL.
        SafetensorError: an invalid file.
        RuntimeError: a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_switch("tensors", tensors)
    check_word("algorithm", algorithm, tuple(MANIFEST_ALGORITHMS))
    if target in MANIFEST_ALGORITHMS:
        raise ValueError(f"target is a path, and {target!r} is an algorithm: write "
                         f"algorithm={target!r}, or the path as './{printable(target)}'")
    check_optional_paths(target=target, keep=keep)
    more: list[Any] = ["--tensors"] if tensors else []
    for option, value in (("--output", target), ("--keep", keep)):
        if value is not None:
            more += [option, _plain_path(value)]
    row = ask_command("hash", "--json", "--no-progress", "--manifest", "--algorithm",
                      MANIFEST_ALGORITHMS[algorithm], *more, "--", _plain_path(filename))
    return _made(row)


def write_sums(filename: Path, target: Path | None = None) -> ManifestMade:
    """Write a list of SHA-256 checksums for ``sha256sum -c`` and verify=.

    Args:
        filename: a file, an index or a folder (then of every file in it).
        target: where to write it; None for FILE.sha256, or SHA256SUMS in the folder.

    Returns:
        The path, counts and sizes.

    Raises:
        ValueError: a `target` that is a model or an index, or a URL.
        RuntimeError: a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_optional_paths(target=target)
    more: list[Any] = [] if target is None else ["--output", _plain_path(target)]
    row = ask_command("hash", "--json", "--no-progress", "--sums", *more, "--",
                      _plain_path(filename))
    return _made(row)


def sign_folder(
    folder: Path, private_key: Path, signature: Path | None = None, *, keep: Path | None = None
) -> ManifestMade:
    """Sign all files of a folder: writes an OpenSSF model-signing bundle, as SignedBy() expects.

    Args:
        folder: of the model. Write its manifest first, which is signed with the rest.
        private_key: path of a PEM file without a password, on the curve P-256, P-384 or P-521.
        signature: where to write the bundle; None for model.sig in the folder.
        keep: an older bundle of the same key, whose digests are reused for unchanged files.

    Returns:
        The path, counts and sizes.

    Raises:
        ValueError: a folder that is a file or has no file, an invalid key, a bundle that is a
            model or an index, or a URL.
        SafetensorError: an invalid bundle.
        RuntimeError: a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("folder", folder)
    check_no_empty_path("private_key", private_key)
    check_optional_paths(signature=signature, keep=keep)
    more: list[Any] = []
    for option, value in (("--output", signature), ("--keep", keep)):
        if value is not None:
            more += [option, _plain_path(value)]
    row = ask_command("sign", "--json", "--private-key", _plain_path(private_key), *more, "--",
                      _plain_path(folder))
    size = row.pop("bytes")
    return _made({"algorithm": "sha256", "bytes_read": size, "bytes_hashed": size, **row})


def _problems(answer: dict[str, Any]) -> list[Problem]:
    return [Problem(row["kind"], row["message"], row.get("file", "")) for row in answer["errors"]]


def check_signature(
    folder: Path, public_key: Path, signature: Path | None = None
) -> list[Problem]:
    """Check the signature of a folder, then every file that it lists.

    Args:
        folder: as given to sign_folder().
        public_key: path of a PEM file.
        signature: path of the bundle; None for model.sig in the folder.

    Returns:
        The differences: changed, missing and additional files; an empty list if everything matches.

    Raises:
        SafetensorError: an invalid signature, or one by another key; no file was read then.
        ValueError: an invalid key.
        RuntimeError: a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    check_no_empty_path("folder", folder)
    check_no_empty_path("public_key", public_key)
    check_optional_paths(signature=signature)
    if signature is None:
        signature = os.path.join(os.fsencode(folder), b"model.sig")
    answer = ask_command("verify", "--json", "--no-progress",
                         b"--signature=" + _plain_path(signature), "--public-key",
                         _plain_path(public_key), "--", _plain_path(folder), good=(0, 1))
    if "error" in answer:
        raise_error(answer["error"])
    return _problems(answer)


def check_manifest(filename: Path, manifest: Path | None = None) -> list[Problem]:
    """Read all files that a manifest lists and return everything that differs from it.

    Args:
        filename: a file, an index or a folder.
        manifest: None for the one next to it.

    Returns:
        The differences: missing files, sizes, each chunk; an empty list if everything matches.

    Raises:
        SafetensorError: a damaged manifest.
        OSError: no manifest, or a failed system call.
        TypeError: an argument of another type.
    """
    check_no_empty_path("filename", filename)
    check_optional_paths(manifest=manifest)
    chosen = b"--manifest" if manifest is None else b"--manifest=" + _plain_path(manifest)
    answer = ask_command("verify", "--json", "--no-progress", chosen, "--",
                         _plain_path(filename), good=(0, 1, 2))
    if "error" in answer:
        Model(filename, True, True if manifest is None else manifest).close()  # raises the error
        raise_error(answer["error"])
    return _problems(answer)
