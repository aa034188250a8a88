# SPDX-License-Identifier: Apache-2.0
"""Manifests of the versions that weight deltas lead to: they also cover the unchanged tensors.

A manifest waits in .weight_sync from before the update until all files were compared with it, so
that a failed comparison, or a kill before it, is not forgotten. As long as one waits for the
folder's version, the library applies no other version. If several wait for one version, the one
that was given last decides, and all of them are removed when the files match it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _core
from .._base.argument_types import Path
from .._base.command import ask_command, raise_error
from .._base.errors import printable, refuse
from .._base.regular_files import read_regular
from .._verify.manifests import check_manifest
from .delta_source import find_version, plain_version

_logger = logging.getLogger("fastsafetensors")
_NAME = "model.manifest"
_DURABLE = 1  # the library's flag
_MANIFEST_BYTES_MAX = 100_000_000  # the library's limit
# How the names of waiting manifests begin, and those of files that become one.
_WAITING, _NEW = "manifest-", "new-manifest-"


def _published(folder: Path) -> str | None:
    """Return the manifest that a version's folder has, if any: also a link that leads nowhere."""
    path = os.path.join(os.fsdecode(folder), _NAME)
    return path if os.path.lexists(path) else None


def split_at_manifest(folders: Sequence[str]) -> tuple[Sequence[str], str | None]:
    """Return the versions up to the first one that has a manifest, and this manifest."""
    for count, folder in enumerate(folders, 1):
        if (manifest := _published(folder)) is not None:
            return folders[:count], manifest
    return folders, None


def _name_start(version: str) -> str:
    """How the names of a version's waiting manifests begin; sync_folder.c computes it, too."""
    value = 0xCBF29CE484222325  # FNV-1a
    for byte in plain_version(version).encode("utf-8", "surrogateescape"):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{_WAITING}{value:016x}-"


def _waiting(checkpoint: Path, start: str) -> dict[str, int]:
    """Return the waiting manifests whose names begin with `start`, the one given last first.

    The values are modification times in nanoseconds.
    """
    folder = os.path.join(os.fsdecode(checkpoint), ".weight_sync")
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in (os.path.join(folder, name) for name in os.listdir(folder)
                     if name.startswith(start)):
            with contextlib.suppress(FileNotFoundError):  # another process has finished it
                state = os.lstat(path)
                if stat.S_ISREG(state.st_mode):
                    found.append((state.st_mtime_ns, path))
    return {path: modified for modified, path in sorted(found, reverse=True)}


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

    Each update has its own file, and deletes it after an error if the update is known not to have
    been made. The file is locked meanwhile, so that others do not take it for that of a process
    that was killed. It takes the place of unlocked manifests of the same version.

    Raises before anything changes:
        SafetensorError: `tag` "InvalidManifest".
        OSError: the manifest, or the one that it will replace, is not a regular file.
    """
    folder = os.path.join(os.fsdecode(checkpoint), ".weight_sync")
    if os.path.islink(folder):
        yield  # the update refuses it
        return
    content = read_regular(os.fsdecode(manifest), _MANIFEST_BYTES_MAX)
    own = os.path.join(os.fsdecode(checkpoint), _NAME)
    if os.path.isdir(own) and not os.path.islink(own):
        refuse(f"{own}: this is a folder, and would be replaced by the version's manifest; remove "
               "it", "NotRegularFile")
    before, _ = _core.delta_version(os.fsencode(checkpoint))
    os.makedirs(folder, exist_ok=True)
    number, temporary = _new_file(folder)
    try:
        target = _place((number, temporary), (manifest, content), version, durable)
        others = [path for path in _waiting(checkpoint, _name_start(version)) if path != target]
        is_replaced = any([_remove_unlocked(path) for path in others])
        is_needed = is_replaced and plain_version(before) == plain_version(version)
        try:
            yield
        except Exception:
            if not is_needed and not _may_be_made(checkpoint, version, before):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
            raise
    finally:
        _unlock(number)


def _new_file(folder: str) -> tuple[int, str]:
    """Make and lock a file that will be a waiting manifest. Returns its descriptor and path."""
    while True:
        number, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)
        fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink > 0:
            return number, temporary
        os.close(number)  # another process took it for one that a killed process left


def _unlock(number: int) -> None:
    # A forked child has the descriptor, too: closing alone would leave the lock to it.
    fcntl.flock(number, fcntl.LOCK_UN)
    os.close(number)


def _remove_unlocked(path: str, may_remove: Callable[[], bool] = lambda: True) -> bool:
    """Delete a file that no process has locked, if `may_remove` still says so then."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        try:
            number = os.open(path, flags | os.O_RDWR)  # NFS locks no others
        except PermissionError:
            number = os.open(path, flags | os.O_RDONLY)  # of another user
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if may_remove():
                os.unlink(path)
                return True
        finally:
            _unlock(number)
    return False


def _check_text(path: str, given: Path) -> None:
    """Refuse a file that is no complete manifest. No file of the checkpoint is read."""
    answer = ask_command("verify", "--json", "--no-progress", b"--manifest=" + os.fsencode(path),
                         "--", os.fsencode(os.path.dirname(path)), good=(0, 1, 2))
    if "error" in answer:
        error = answer["error"]
        text = error.get("message", "").replace(path, os.fsdecode(given))
        raise_error({**error, "message": text, "file": os.fsdecode(given)})


def _place(
    new: tuple[int, str], manifest: tuple[Path, bytes], version: str, durable: bool
) -> str:
    """Write and check a new file, and give it the name of a waiting manifest. Returns its path."""
    number, temporary = new
    folder, name = os.path.split(temporary)
    start = _name_start(version)
    target = os.path.join(folder, start + name[len(_NEW):])
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(manifest[1])
        _check_text(temporary, manifest[0])
        os.fchmod(number, 0o644)
        # Later than all others of its version, even if the clock was set back.
        last = max(_waiting(os.path.dirname(folder), start).values(), default=0)
        now = max(time.time_ns(), last + 1)
        os.utime(number, ns=(now, now))
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
    plain = plain_version(version)
    return interrupted or (plain_version(now) == plain and plain_version(before) != plain)


def finish_waiting(checkpoint: Path, durable: bool, assumed: str = "") -> bool:
    """Compare the files with their version's manifest, if an update has left that to be done.

    assumed: the version of a folder without a note.

    Returns whether there was such a manifest.
    """
    note = _core.delta_version(os.fsencode(checkpoint))
    version, interrupted = note[0] or assumed, note[1]
    if interrupted or not version or not _waiting(checkpoint, _name_start(version)):
        return False
    try:
        finish_manifest(checkpoint, version, durable)
    except _core.error_class():
        if _core.delta_version(os.fsencode(checkpoint)) == note:
            raise
    return True


def finish_pulled(checkpoint: Path, source: Path, durable: bool) -> None:
    """Compare the files with a waiting manifest, or with another one of its version in source."""
    version, interrupted = _core.delta_version(os.fsencode(checkpoint))
    with contextlib.ExitStack() as stack:
        if not interrupted and (manifest := _repaired(checkpoint, source, version)) is not None:
            stack.enter_context(remembered_manifest(checkpoint, manifest, version, durable))
        finish_waiting(checkpoint, durable)


def _repaired(checkpoint: Path, source: Path, version: str) -> str | None:
    """Return the manifest of a version in `source`, if another one waits and would decide."""
    waiting = _waiting(checkpoint, _name_start(version)) if version else {}
    found = map(_published, find_version(source, version)) if waiting else ()
    manifest = next((path for path in found if path is not None), None)
    if manifest is None:
        return None
    try:
        content = read_regular(manifest, _MANIFEST_BYTES_MAX)
        return None if read_regular(next(iter(waiting))) == content else manifest
    except FileNotFoundError:
        if os.path.exists(manifest):
            return None  # another process has finished the one that was waiting
        raise


def finish_manifest(checkpoint: Path, version: str, durable: bool) -> None:
    """Compare all files with the manifest that was given last, and make it the checkpoint's own.

    Raises:
        SafetensorError: `tag` "DigestMismatch" for files with other bytes. It is raised again by
            the next call.
        OSError: a file cannot be read.
    """
    waiting = list(_waiting(checkpoint, _name_start(version)))
    if not waiting:
        return  # another process was faster
    last, *others = waiting
    try:
        _compare(checkpoint, last)
        for path in others:  # first: alone, one of them would decide
            _remove(path)
        _install(last, os.path.join(os.fsdecode(checkpoint), _NAME))
    except FileNotFoundError:
        if os.path.lexists(last):
            raise
        return  # another process was faster
    if durable:
        _sync(os.fsdecode(checkpoint))


_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def _install(waiting: str, target: str) -> None:
    """Make a manifest the checkpoint's own. Where that is not allowed, it only waits no longer."""
    try:
        os.replace(waiting, target)  # a link itself
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        _logger.warning("%s: the files match the manifest of their version, but it cannot be put "
                        "here: %s. Verified loads will compare them with the old manifest, if "
                        "there is one", printable(target), error.strerror)
        _remove(waiting)


def _remove(waiting: str) -> None:
    """Delete a waiting manifest. Where that is not allowed, the files are compared again."""
    try:
        os.unlink(waiting)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def _compare(checkpoint: Path, manifest: str) -> None:
    advice = ("if the manifest is wrong, give the right one to apply() or pull(), or delete "
              f"{manifest}")
    try:
        problems = check_manifest(checkpoint, manifest)
    except _core.error_class() as error:
        if error.tag != "InvalidManifest":
            raise
        refuse(f"{error}; {advice}", "InvalidManifest", manifest)
    for problem in problems:
        if problem.kind in ("PermissionDenied", "IoError"):  # the file may be right
            refuse(problem.message, problem.kind)
    if problems:
        refuse(f"{os.fsdecode(checkpoint)}: the updated checkpoint differs from the manifest of "
               f"its version: {problems[0].message}. Tensors that no delta changed differ: copy "
               f"the checkpoint again; or {advice}", "DigestMismatch")


def remove_unused(checkpoint: Path) -> None:
    """Delete manifests of other versions whose processes were killed before the update began.

    Without a note each of them may be that of the folder's version.
    """
    for path in _waiting(checkpoint, _NEW):
        _remove_unlocked(path)
    note = _core.delta_version(os.fsencode(checkpoint))

    def is_unchanged() -> bool:
        # Only with the lock: its process may just have been killed while it changed files.
        return not note[1] and _core.delta_version(os.fsencode(checkpoint)) == note

    for path in _waiting(checkpoint, _WAITING) if note[0] else []:
        if not os.path.basename(path).startswith(_name_start(note[0])):
            _remove_unlocked(path, is_unchanged)


def remove_old_files(checkpoint: Path) -> None:
    """Delete files that processes have left that were killed before or after their update."""
    remove_unused(checkpoint)
    folder = os.path.join(os.fsdecode(checkpoint), ".weight_sync")
    if any(os.path.exists(os.path.join(folder, name)) for name in ("copies", "undo")):
        with contextlib.suppress(OSError):  # such as TimeoutError: another process is using them
            finish_update(os.fsencode(checkpoint))


# ---- updates ----

def finish_update(checkpoint: bytes, flags: int = _DURABLE, threads: int = 0) -> dict[str, Any]:
    """Finish an update that was killed, or undo it, and compare no files."""
    stats: dict[str, Any] = _core.delta_apply(None, checkpoint, flags, threads, None)
    return stats


def apply_and_compare(
    call: tuple[Any, bytes, int, int, str | None], base: str, last: str
) -> dict[str, Any]:
    """Apply a chain of deltas, and compare the files with manifests that wait.

    call: the arguments of the library's function. base, last: the chain's versions.
    """
    _, checkpoint, flags, _, version = call
    durable = bool(flags & _DURABLE)
    is_finished = finish_waiting(checkpoint, durable, base if version is None else version)
    try:
        stats: dict[str, Any] = _core.delta_apply(*call)
    except _core.error_class() as error:
        if error.tag != "VersionMismatch":
            raise
        # The call may have finished an update that has a manifest, and refused to go on.
        if not finish_waiting(checkpoint, durable) and not is_finished:
            raise
        now, _ = _core.delta_version(checkpoint)
        is_last = plain_version(now) == plain_version(last) and (
            version is None or plain_version(version) in map(plain_version, (base, last)))
        stats = finish_update(checkpoint, flags & _DURABLE) if is_last else _core.delta_apply(*call)
        stats = {**stats, "recovered": 1}
    finish_waiting(checkpoint, durable)
    remove_unused(checkpoint)
    return stats
