# SPDX-License-Identifier: Apache-2.0
"""Manifests of the versions that weight deltas lead to: they also cover the unchanged tensors.

The manifest waits in .weight_sync from before the update until all files were compared with it, so
that a failed comparison, or a kill before it, is not forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence

from .._base.argument_types import Path
from .._base.errors import refuse
from .._verify.manifests import check_manifest

_NAME = "model.manifest"


def published_manifest(folders: Sequence[Path]) -> Path | None:
    """Return the manifest that the last version's folder has, if any."""
    path = os.path.join(os.fsdecode(folders[-1]), _NAME)
    return path if os.path.isfile(path) else None


def _waiting_path(checkpoint: Path, version: str) -> str:
    """The path of a version's manifest that files were not compared with yet."""
    name = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(os.fsdecode(checkpoint), ".weight_sync", f"manifest-{name}")


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remember_manifest(checkpoint: Path, manifest: Path, version: str, durable: bool) -> None:
    """Keep the manifest of the version that an update will lead to."""
    target = _waiting_path(checkpoint, version)
    folder = os.path.dirname(target)
    if os.path.islink(folder):
        return  # the update refuses it
    with open(manifest, "rb") as file:
        content = file.read()
    if not content.startswith(b"fastsafetensors-manifest "):
        refuse(f"{os.fsdecode(manifest)}: not a manifest", "InvalidManifest")
    os.makedirs(folder, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=folder, prefix="manifest-", suffix=".tmp")
    try:
        with open(number, "wb") as new:
            new.write(content)
            os.fchmod(new.fileno(), 0o644)
        if durable:
            _sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        _sync(folder)


def forget_manifest(checkpoint: Path, version: str) -> None:
    """Delete the manifest of an update that was not made."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_waiting_path(checkpoint, version))


def waits_for_manifest(checkpoint: Path, version: str | None) -> bool:
    """Whether files of this version were not compared with its manifest yet."""
    try:
        return version is not None and stat.S_ISREG(
            os.lstat(_waiting_path(checkpoint, version)).st_mode)
    except OSError:
        return False


def finish_manifest(checkpoint: Path, version: str, durable: bool) -> None:
    """Compare all files with the version's waiting manifest, and make it the checkpoint's own.

    Raises:
        SafetensorError: `tag` "DigestMismatch" for files with other bytes. It is raised again by
            the next call.
    """
    folder, waiting = os.fsdecode(checkpoint), _waiting_path(checkpoint, version)
    problems = check_manifest(checkpoint, waiting)
    if problems:
        refuse(f"{folder}: the updated checkpoint differs from the manifest of its version: "
               f"{problems[0]}. Tensors that no delta changed differ: copy the checkpoint again",
               "DigestMismatch")
    try:
        os.replace(waiting, os.path.join(folder, _NAME))  # on the link itself, if it is one
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return  # the files are right, and another process may install it
        raise
    if durable:
        _sync(folder)
