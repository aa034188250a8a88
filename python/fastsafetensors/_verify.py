# SPDX-License-Identifier: Apache-2.0
"""Opening and verifying models: by argument or by context manager."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._core import Model
from ._log import follow_logging
from ._options import check_location, check_switch, is_bool
from ._types import Path, Paths

if TYPE_CHECKING:
    from ._digests import Problem


@dataclass(frozen=True)
class SignedBy:
    """A value for ``verify=``: the model's manifest must be signed with this key.

        load_file("folder/model.safetensors", verify=SignedBy("pub.pem"))

    Verifies the OpenSSF bundle's signature with the key, then the manifest's digest in it, and then
    each chunk while it is loaded. A failure is a SafetensorError with the tag InvalidSignature or
    DigestMismatch.

    Attributes:
        public_key: path of a PEM file, on the curve P-256, P-384 or P-521.
        signature: path of the bundle; None for model.sig in the model's folder.
        manifest: path of the manifest; None for the one next to the model.
    """

    public_key: Path
    signature: Path | None = None
    manifest: Path | None = None

    def _held(self, paths: Paths) -> tuple[Path | None, Path, Path]:
        """The extension's arguments for a model at these paths."""
        if self.signature is not None:
            return self.manifest, self.signature, self.public_key
        if not isinstance(paths, (str, bytes, os.PathLike)):
            return self._held(paths[0] if paths else "")
        first = os.fsdecode(paths)
        if "://" in first:
            address, mark, query = first.partition("?")
            end = mark + query if first[:4].lower() == "http" else ""  # the version of one object
            return self.manifest, f"{address.rpartition('/')[0]}/model.sig{end}", self.public_key
        folder = first if os.path.isdir(first) else os.path.dirname(first)
        return self.manifest, os.path.join(folder, "model.sig"), self.public_key


# Values of verify=: False, True for a manifest next to the model, its path, or SignedBy.
Verify = bool | Path | SignedBy

# Open verifying() contexts with their threads, the latest last. Process-wide, so that loads on
# helper threads are verified as well.
_contexts: list[tuple[object, int, Verify]] = []

_ALGORITHMS = ("xxh3-128", "blake3", "sha256")


@contextlib.contextmanager
def verifying(verify: Verify = True) -> Iterator[None]:
    """Verify every model that is opened within this context, by any function.

        with fastsafetensors.verifying():
            model = AutoModel.from_pretrained(folder)  # through this package's hooks

    It applies to all threads of the process, unless a thread is within another verifying() with
    another setting. Models without a manifest are refused, including bytes in memory. Editing files
    (edit_header(), the command) is not affected.

    Args:
        verify: True for the manifest next to each model, or another digest source (an error if
            there is none); the path of a manifest or list; SignedBy() for a signed one; False for
            no verification. A function's verify= argument takes precedence.

    Returns:
        A context manager.

    Raises:
        SafetensorError: from functions in the context: bytes that differ (the tag is
            DigestMismatch), or a damaged manifest.
        FileNotFoundError: from opening in the context: no manifest.
        TypeError: an argument of another type.
    """
    if verify is None:
        raise TypeError("verifying() needs True, False, a path or SignedBy(), not None")
    context = (object(), threading.get_ident(), _check_verify(verify))
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.remove(context)


def _check_verify(verify: Any) -> Verify:
    """Return a verify= argument. TypeError or ValueError for a value that it can't have."""
    if isinstance(verify, SignedBy):
        return verify
    if is_bool(verify):
        return bool(verify)
    if not isinstance(verify, (str, bytes, os.PathLike)) or verify in ("", b""):
        kind = ValueError if verify in ("", b"") else TypeError
        raise kind(f"verify must be True, False, a path or SignedBy(), not {verify!r}")
    return verify


def chosen(verify: Verify | None) -> Verify:
    """Resolve a verify= argument; None means the current verifying() context."""
    if verify is not None:
        return _check_verify(verify)
    if not _contexts:
        return False
    own = [said for _, thread, said in _contexts if thread == threading.get_ident()]
    if own:
        return own[-1]
    # A False in another thread applies to that thread only.
    return next((said for *_, said in reversed(_contexts) if said is not False), False)


def open_files(paths: Paths, verify: Verify | None = None, *, lenient: bool = False) -> Model:
    """Open a model; verify None means the current verifying() context."""
    follow_logging()
    held = chosen(verify)
    return Model(paths, lenient, held._held(paths) if isinstance(held, SignedBy) else held)


@dataclass(frozen=True)
class ManifestMade:
    """Result of writing a manifest: files listed, files not read again, bytes."""

    algorithm: str
    files: int
    files_kept: int
    bytes_read: int
    bytes_hashed: int


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
        algorithm: "xxh3-128" against accidents; "blake3" or "sha256" against forgery as well.
        keep: an older manifest, whose digests are reused for files with the same size that have not
            changed since.
        tensors: also store digests of tensors, for comparing files.

    Returns:
        Counts and sizes.

    Raises:
        ValueError: an unknown algorithm, or the name of one as `target`.
        SafetensorError: an invalid file, or a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    from ._command import ask_command
    from ._digests import _plain_path

    check_location("filename", filename)
    check_switch("tensors", tensors)
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; expected one of: "
                         f"{', '.join(_ALGORITHMS)}")
    if target in _ALGORITHMS:
        raise ValueError(f"target is a path, and {target!r} is an algorithm: write "
                         f"algorithm={target!r}, or the path as './{target}'")
    more: list[Any] = ["--tensors"] if tensors else []
    for option, value in (("--output", target), ("--keep", keep)):
        if value is not None:
            more += [option, _plain_path(value)]
    row = ask_command("hash", "--json", "--no-progress", "--manifest", "--algorithm", algorithm,
                      *more, "--", _plain_path(filename))
    row.pop("seconds")
    return ManifestMade(**row)


def write_sums(filename: Path, target: Path | None = None) -> ManifestMade:
    """Write a list of SHA-256 checksums for ``sha256sum -c`` and verify=.

    Args:
        filename: a file, an index or a folder (then of every file in it).
        target: where to write it; None for FILE.sha256, or SHA256SUMS in the folder.

    Returns:
        Counts and sizes.

    Raises:
        SafetensorError: a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    from ._command import ask_command
    from ._digests import _plain_path

    check_location("filename", filename)
    more: list[Any] = [] if target is None else ["--output", _plain_path(target)]
    row = ask_command("hash", "--json", "--no-progress", "--sums", *more, "--",
                      _plain_path(filename))
    row.pop("seconds")
    return ManifestMade(**row)


def sign_folder(
    folder: Path, key: Path, bundle: Path | None = None, *, keep: Path | None = None
) -> tuple[int, int]:
    """Sign all files of a folder: writes an OpenSSF model-signing bundle, as SignedBy() expects.

    Args:
        folder: of the model. Write its manifest first, which is signed with the rest.
        key: path of a private key, PEM without a password, on the curve P-256, P-384 or P-521.
        bundle: where to write it; None for model.sig in the folder.
        keep: an older bundle of the same key, whose digests are reused for unchanged files.

    Returns:
        The number of signed files, and of bytes read.

    Raises:
        SafetensorError: an invalid key or bundle, or a missing library.
        OSError: the matching subclass, if a system call fails.
        TypeError: an argument of another type.
    """
    from ._command import ask_command
    from ._digests import _plain_path

    check_location("folder", folder)
    check_location("key", key)
    more: list[Any] = []
    for option, value in (("--output", bundle), ("--keep", keep)):
        if value is not None:
            more += [option, _plain_path(value)]
    row = ask_command("sign", "--json", "--key", _plain_path(key), *more, "--",
                      _plain_path(folder))
    return row["files"], row["bytes"]


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
    from ._command import ask_command
    from ._digests import Problem, _plain_path

    check_location("filename", filename)
    chosen = b"--manifest" if manifest is None else b"--manifest=" + _plain_path(manifest)
    answer = ask_command("verify", "--json", "--no-progress", chosen, "--",
                         _plain_path(filename), good=(0, 1, 2))
    if "error" in answer:
        Model(filename, True, True if manifest is None else manifest).close()  # raises the error
        raise OSError(json.dumps(answer["error"]))
    return [Problem(row["kind"], row["message"], row.get("file", ""))
            for row in answer["differences"]]
