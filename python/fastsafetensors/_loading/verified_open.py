# SPDX-License-Identifier: Apache-2.0
"""Opening a model for a load: verified or not, by argument or by context manager."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._base.argument_types import Path, Paths
from .._base.errors import shown
from .._base.log import follow_logging
from .._base.options import check_no_empty_path, check_optional_paths, is_bool
from .._core import Model


class SignedBy(NamedTuple):
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
        check_no_empty_path("public_key", self.public_key)
        check_optional_paths(signature=self.signature, manifest=self.manifest)
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
        raise kind(f"verify must be True, False, a path or SignedBy(), not {shown(verify)}")
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


def open_files(paths: Paths, verify: Verify | None = None, *, lenient: bool = False,
               parts: bool = False) -> Model:
    """Open a model; verify None means the current verifying() context.

    parts: small reads bring only their own pages from the disk.
    """
    follow_logging()
    held = chosen(verify)
    return Model(paths, lenient, held._held(paths) if isinstance(held, SignedBy) else held, parts)
