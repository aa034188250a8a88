# SPDX-License-Identifier: Apache-2.0
"""Opening models, held against manifests where that is asked for: by argument or by context."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._core import Model
from ._types import Path, Paths

if TYPE_CHECKING:
    from ._digests import Problem



@dataclass(frozen=True)
class SignedBy:
    """For ``verify=``: the model's manifest has to be signed, with this key.

        load_file("folder/model.safetensors", verify=SignedBy("pub.pem"))

    The OpenSSF bundle's signature is verified with the key, then the manifest's digest in it, and
    then each chunk while it loads. What does not hold is a SafetensorError whose tag is
    InvalidSignature or DigestMismatch.

    Attributes:
        public_key: path of a PEM file, of the curve P-256, P-384 or P-521.
        signature: path of the bundle; None for model.sig in the model's folder.
        manifest: path of the manifest; None for the one beside the model.
    """

    public_key: Path
    signature: Path | None = None
    manifest: Path | None = None

    def _held(self, paths: Paths) -> tuple[Path | None, Path, Path]:
        """What the extension takes for a model at these paths."""
        if self.signature is not None:
            return self.manifest, self.signature, self.public_key
        if not isinstance(paths, (str, bytes, os.PathLike)):
            return self._held(paths[0] if paths else "")
        first = os.fsdecode(paths)
        if "://" in first:
            address, mark, query = first.partition("?")
            end = mark + query if first[:4].lower() == "http" else ""  # a version is one object's
            return self.manifest, f"{address.rpartition('/')[0]}/model.sig{end}", self.public_key
        folder = first if os.path.isdir(first) else os.path.dirname(first)
        return self.manifest, os.path.join(folder, "model.sig"), self.public_key


# What verify= of the fronts takes: False, True for the manifest beside the model, its path, or
# whose signature it has to have.
Verify = bool | Path | SignedBy

# What the contexts that are open say and in which thread, the latest last. Of the process: helper
# threads of whoever loads verify as well.
_contexts: list[tuple[object, int, Verify]] = []

_ALGORITHMS = ("xxh3-128", "blake3", "sha256")


@contextlib.contextmanager
def verifying(verify: Verify = True) -> Iterator[None]:
    """Hold every model that is opened within against a manifest, by whatever front.

        with fastsafetensors.verifying():
            model = AutoModel.from_pretrained(folder)  # through this package's hooks

    It counts for all threads of the process: loads that run beside it are verified, too, unless
    their own thread is within another verifying() that says otherwise. What has no manifest is
    refused, bytes in memory among it. Rewriting files (edit_header(), the command) is no load.

    Args:
        verify: True for the manifest beside each model, or what else there is (nothing is an
            error), the path of a manifest or list, or SignedBy() for a signed one; False for no
            check. An argument verify= of a front counts more.

    Returns:
        A context manager.

    Raises:
        SafetensorError: from what is opened or loaded within: bytes that differ (its tag is
            DigestMismatch), or a damaged manifest.
        FileNotFoundError: from what is opened within: no manifest.
    """
    if verify is None:
        raise TypeError("verifying() takes True, False, a path or SignedBy(), not None")
    context = (object(), threading.get_ident(), verify)
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.remove(context)


def chosen(verify: Verify | None) -> Verify:
    """Return what a front's argument means: None is what verifying() says now."""
    if verify is not None:
        return verify
    if not _contexts:
        return False
    own = [said for _, thread, said in _contexts if thread == threading.get_ident()]
    if own:
        return own[-1]
    # Another thread's False is for that thread's loads: it takes nobody else's check away.
    return next((said for *_, said in reversed(_contexts) if said is not False), False)


def open_files(paths: Paths, verify: Verify | None = None, *, lenient: bool = False) -> Model:
    """Open a model as every front does; verify: None for what verifying() says."""
    held = chosen(verify)
    return Model(paths, lenient, held._held(paths) if isinstance(held, SignedBy) else held)


@dataclass(frozen=True)
class ManifestMade:
    """What making a manifest took: files listed, those that were not read again, bytes."""

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
    """Make the manifest of a model: digests of every chunk of its files, for verify=.

    Args:
        filename: a file, an index or a folder (then of every file in it).
        target: where to; None for where verify=True looks: FILE.manifest, or model.manifest in the
            folder.
        algorithm: "xxh3-128" against accidents; "blake3" or "sha256" against forgery as well.
        keep: an older manifest, whose word stands for files that have the same size and were not
            changed since it was begun.
        tensors: digests of tensors as well, for comparing files.

    Returns:
        What it took.

    Raises:
        ValueError: an algorithm of another name.
        SafetensorError: a bad file, or a library that is not there.
        OSError: of its kind, for what the system refuses.
    """
    from ._command import ask_command
    from ._digests import _plain_path

    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: there are {', '.join(_ALGORITHMS)}")
    more: list[Any] = ["--tensors"] if tensors else []
    for option, value in (("--output", target), ("--keep", keep)):
        if value is not None:
            more += [option, _plain_path(value)]
    row = ask_command("hash", "--json", "--no-progress", "--manifest", "--algorithm", algorithm,
                      *more, "--", _plain_path(filename))
    row.pop("seconds")
    return ManifestMade(**row)


def write_sums(filename: Path, target: Path | None = None) -> ManifestMade:
    """Make a list of the SHA-256 of whole files that ``sha256sum -c`` checks, and verify= takes.

    Args:
        filename: a file, an index or a folder (then of every file in it).
        target: where to; None for FILE.sha256, or SHA256SUMS in the folder.

    Returns:
        What it took.

    Raises:
        SafetensorError: a library that is not there.
        OSError: of its kind, for what the system refuses.
    """
    from ._command import ask_command
    from ._digests import _plain_path

    more: list[Any] = [] if target is None else ["--output", _plain_path(target)]
    row = ask_command("hash", "--json", "--no-progress", "--sums", *more, "--",
                      _plain_path(filename))
    row.pop("seconds")
    return ManifestMade(**row)


def sign_folder(
    folder: Path, key: Path, bundle: Path | None = None, *, keep: Path | None = None
) -> tuple[int, int]:
    """Sign all files of a folder: an OpenSSF model-signing bundle, as SignedBy() looks for it.

    Args:
        folder: of the model; make its manifest first, which is signed with the rest.
        key: path of a private key, PEM without a password, of the curve P-256, P-384 or P-521.
        bundle: where to; None for model.sig in the folder.
        keep: an older bundle of the same key, whose word stands for files that were not changed.

    Returns:
        The files that were signed, and the bytes that were read of them.

    Raises:
        SafetensorError: a bad key or bundle, or a library that is not there.
        OSError: of its kind, for what the system refuses.
    """
    from ._command import ask_command
    from ._digests import _plain_path

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
        manifest: None for the one beside it.

    Returns:
        What differs: files that are missing, sizes, each chunk; an empty list where nothing does.

    Raises:
        SafetensorError: a manifest that is damaged.
        OSError: no manifest, or what the system refuses.
    """
    from ._command import ask_command
    from ._digests import Problem, _plain_path

    chosen: list[Any] = [] if manifest is None else ["--from", _plain_path(manifest)]
    answer = ask_command("verify", "--json", "--no-progress", "--manifest", *chosen, "--",
                         _plain_path(filename), good=(0, 1, 2))
    if "error" in answer:
        Model(filename, True, True if manifest is None else manifest).close()  # raises it
        raise OSError(json.dumps(answer["error"]))
    return [Problem(row["kind"], row["message"], row.get("file", ""))
            for row in answer["differences"]]
