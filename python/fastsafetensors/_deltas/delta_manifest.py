# SPDX-License-Identifier: Apache-2.0
"""Manifests of the versions that weight deltas lead to: they also cover the unchanged tensors.

A manifest waits in .weight_sync from before the update until all files were compared with it, so
that a failed comparison, or a kill before it, is not forgotten. As long as one waits for the
folder's version, the library applies no other version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence

from .. import _core
from .._base.argument_types import Path
from .._base.errors import refuse
from .._verify.manifests import check_manifest

_NAME = "model.manifest"
# How the names of waiting manifests begin, and those of files that become one.
_WAITING, _NEW = "manifest-", "new-manifest-"


def published_manifest(folders: Sequence[Path]) -> Path | None:
    """Return the manifest that the last version's folder has, if any."""
    path = os.path.join(os.fsdecode(folders[-1]), _NAME)
    return path if os.path.isfile(path) else None


def _name_start(version: str) -> str:
    """How the names of a version's waiting manifests begin; sync_folder.c computes it, too."""
    value = 0xCBF29CE484222325  # FNV-1a
    for byte in version.encode("utf-8", "surrogateescape"):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{_WAITING}{value:016x}-"


def _waiting(checkpoint: Path, start: str) -> list[str]:
    """Return the paths of waiting manifests whose names begin with `start`."""
    folder = os.path.join(os.fsdecode(checkpoint), ".weight_sync")
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(folder))
        for path in (os.path.join(folder, name) for name in names if name.startswith(start)):
            with contextlib.suppress(FileNotFoundError):  # another process has finished it
                if stat.S_ISREG(os.lstat(path).st_mode):
                    found.append(path)
    return found


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def remembered_manifest(
    checkpoint: Path, manifest: Path, version: str, durable: bool
) -> Iterator[None]:
    """Keep the manifest of the version that an update will lead to.

    Each update has its own file, and deletes only that one: after an error, if the update is known
    not to have been made. The file is locked meanwhile, so that others do not take it for that of
    a process that was killed.
    """
    folder = os.path.join(os.fsdecode(checkpoint), ".weight_sync")
    if os.path.islink(folder):
        yield  # the update refuses it
        return
    with open(manifest, "rb") as file:
        content = file.read()
    if not content.startswith(b"fastsafetensors-manifest "):
        refuse(f"{os.fsdecode(manifest)}: not a manifest", "InvalidManifest")
    before, _ = _core.delta_version(os.fsencode(checkpoint))
    os.makedirs(folder, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        target = _place(number, temporary, content, version, durable)
        try:
            yield
        except Exception:
            if not _may_be_made(checkpoint, version, before):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
            raise
    finally:
        # A forked child has the descriptor, too: closing alone would leave the lock to it.
        fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)


def _place(number: int, temporary: str, content: bytes, version: str, durable: bool) -> str:
    """Write a new file and give it the name of a waiting manifest. Returns its path."""
    folder, name = os.path.split(temporary)
    target = os.path.join(folder, _name_start(version) + name[len(_NEW):])
    try:
        with open(number, "wb", closefd=False) as new:
            new.write(content)
        os.fchmod(number, 0o644)
        if durable:
            os.fsync(number)
        os.rename(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        _sync(folder)
    return target


def _may_be_made(checkpoint: Path, version: str, before: str) -> bool:
    """Whether an update to `version` may have been made or begun since the folder had `before`."""
    try:
        now, interrupted = _core.delta_version(os.fsencode(checkpoint))
    except Exception:
        return True
    return interrupted or (now == version and before != version)


def finish_waiting(checkpoint: Path, durable: bool) -> bool:
    """Compare the files with their version's manifest, if an update has left that to be done.

    Returns whether there was such a manifest.
    """
    note = _core.delta_version(os.fsencode(checkpoint))
    version, interrupted = note
    if interrupted or not version or not _waiting(checkpoint, _name_start(version)):
        return False
    try:
        finish_manifest(checkpoint, version, durable)
    except _core.error_class():
        if _core.delta_version(os.fsencode(checkpoint)) == note:
            raise
    return True


def finish_manifest(checkpoint: Path, version: str, durable: bool) -> None:
    """Compare all files with the version's waiting manifests, and make them the checkpoint's own.

    Raises:
        SafetensorError: `tag` "DigestMismatch" for files with other bytes. It is raised again by
            the next call.
    """
    compared: set[bytes] = set()
    for waiting in _waiting(checkpoint, _name_start(version)):
        try:
            with open(waiting, "rb") as file:
                content = file.read()
            if content in compared:  # several processes had the same update to do
                os.unlink(waiting)
                continue
            _compare(checkpoint, waiting)
            os.replace(waiting, os.path.join(os.fsdecode(checkpoint), _NAME))  # on a link itself
            compared.add(content)
        except FileNotFoundError:
            if os.path.lexists(waiting):
                raise
            # Another process was faster.
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return  # the files are right, and another process may install it
            raise
    if durable and compared:
        _sync(os.fsdecode(checkpoint))


def _compare(checkpoint: Path, manifest: str) -> None:
    problems = check_manifest(checkpoint, manifest)
    if problems:
        refuse(f"{os.fsdecode(checkpoint)}: the updated checkpoint differs from the manifest of "
               f"its version: {problems[0]}. Tensors that no delta changed differ: copy the "
               "checkpoint again", "DigestMismatch")


def remove_unused(checkpoint: Path) -> None:
    """Delete manifests of other versions whose processes were killed before the update began."""
    note = _core.delta_version(os.fsencode(checkpoint))
    own = _name_start(note[0])
    for path in _waiting(checkpoint, _WAITING):
        if os.path.basename(path).startswith(own):
            continue
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only now: its process may just have been killed while it changed files.
                if not note[1] and _core.delta_version(os.fsencode(checkpoint)) == note:
                    os.unlink(path)
            finally:
                os.close(number)
