# SPDX-License-Identifier: Apache-2.0
"""Weight deltas: what changed between two versions of a checkpoint, as a small folder of files.

Reads and writes the format of SGLang, slime, miles and ModelExpress (zstd frames of XOR or of
overwrite lists in safetensors shards), applies it to files or to the tensors of a running model,
and returns changed elements as vLLM's checkpoint patches want them.

    deltas.make("step6", "step7", "out/weight_v000007", version="000007", base_version="000006")
    deltas.apply("local/checkpoint", "out/weight_v000007")

The Python code moves no bytes: the C library does, without the GIL. Ctrl-C takes effect when a call
returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

from . import _core
from ._base.argument_types import Path
from ._base.errors import printable, refuse, shown
from ._base.options import (
    check_count,
    check_no_empty_path,
    check_switch,
    check_switches,
    check_timeout,
    check_word,
)
from ._base.paths import fixed_location
from ._base.representation import with_plain_hints
from ._deltas.delta_change import Change
from ._deltas.delta_manifest import (
    apply_and_compare,
    finish_pulled,
    finish_update,
    finish_waiting,
    remembered_manifest,
    remove_old_files,
    remove_unused,
    split_at_manifest,
)
from ._deltas.delta_memory import check_kinds, memory_rows, state_like
from ._deltas.delta_patches import Patch, PatchMaker, make_ahead
from ._deltas.delta_source import find_chain, open_lock, plain_version

__all__ = [
    "Change", "Delta", "Patch", "VersionNote", "apply", "convert", "make", "pending", "pull",
    "reading", "recover", "verify", "version_of",
]

_DURABLE, _CHECK_FIRST, _CHECK_ONLY, _ROLL_BACK, _NEW_FILES = 1, 2, 4, 8, 16
# How long pull() waits for another process of the host that updates the same checkpoint.
_PULL_SECONDS, _PULL_STEP_SECONDS = 600.0, 0.1
_PULL_VERSIONS = 16


@with_plain_hints
class VersionNote(NamedTuple):
    """Which version a checkpoint folder has."""

    version: str | None
    """The version, or None where the folder has no note of it, or is interrupted."""
    interrupted: bool
    """An update was killed: the files are of two versions until recover() or apply()."""


def _encode(parameter: str, path: Path) -> bytes:
    check_no_empty_path(parameter, path)
    return os.fsencode(path)


def _check_versions(is_needed: bool = False, **versions: Any) -> None:
    """TypeError for a version that is not text, ValueError for an empty one.

    None is allowed unless the version is needed.
    """
    for name, version in versions.items():
        if version is None and not is_needed:
            continue
        if not isinstance(version, str):
            raise TypeError(f"{name} must be a str such as '000007', not {shown(version)}")
        if not version:
            raise ValueError(f"{name} is empty; it must be a version such as '000007'")


def _check_format(encoding: Any, checksum: Any, dialect: Any) -> None:
    """TypeError or ValueError for a value that make() does not know."""
    check_word("encoding", encoding, ("xor", "overwrite"))
    check_word("checksum", checksum, ("adler32", "xxh3-128", "blake3"))
    check_word("dialect", dialect, ("sglang", "modelexpress"))


class Delta:
    """One delta version, or several that follow each other, oldest first.

    Opening checks indexes and shard headers; compressed data is read by the other methods. An
    opened delta is immutable and may be used by several threads.

    Raises:
        SafetensorError: a file is not what it should be; `tag` "VersionMismatch" where versions do
            not follow each other.
        RuntimeError: a format, an encoding or a checksum that this version does not know.
        OSError: a file can't be read.
        TypeError: an argument of another type.
    """

    def __init__(self, *folders: Path) -> None:
        """Open the version folders, oldest first. URLs are accepted as everywhere."""
        if not folders:
            raise ValueError("no delta folder is given")
        self._delta = _core.delta_open(tuple(_encode("folder", folder) for folder in folders))
        self.info: dict[str, Any] = _core.delta_info(self._delta)

    @property
    def version(self) -> str:
        """The last version."""
        return str(self.info["version"])

    @property
    def base_version(self) -> str:
        """The version that the first one is based on."""
        return str(self.info["base_version"])

    def tensors(self) -> list[tuple[str, int, int]]:
        """Return (name, number of versions that change it, compressed bytes), by name."""
        return _core.delta_tensors(self._delta)

    def apply(
        self, checkpoint: Path, *, check_first: bool = False, new_files: bool = False,
        version: str | None = None, threads: int = 0, durable: bool = True,
    ) -> dict[str, Any]:
        """Apply the chain to the files of a checkpoint folder, in place; see apply()."""
        check_switches(durable=durable, check_first=check_first, new_files=new_files)
        _check_versions(version=version)
        flags = _DURABLE * durable | _CHECK_FIRST * check_first | _NEW_FILES * new_files
        call = (self._delta, _encode("checkpoint", checkpoint), flags,
                check_count("threads", threads), version)
        return apply_and_compare(call, self.base_version, self.version)

    def verify(
        self, checkpoint: Path, *, version: str | None = None, threads: int = 0
    ) -> dict[str, Any]:
        """Check lineage, frames and checksums against a checkpoint folder; change no file of it.

        The folder is locked meanwhile, so .weight_sync/lock is made where it is missing.
        """
        _check_versions(version=version)
        return _core.delta_apply(
            self._delta, _encode("checkpoint", checkpoint), _CHECK_ONLY,
            check_count("threads", threads), version)

    def prepare(
        self, tensors: Any, *, version: str | None = None, threads: int = 0
    ) -> Change:
        """Make and verify the new bytes of a running model's tensors.

        The model may be used meanwhile, but not changed until commit(), which writes only the bytes
        that differ. These are kept in memory: about 5 % of the tensors' size if 1 % of the elements
        change, at most 1.13 times their size. Tensors on a device or without contiguous memory
        also need a copy, and so do conjugate and negated views.

        tensors: a mapping of checkpoint names to torch tensors or numpy arrays in the checkpoint's
            layout, or a torch module whose state has those names.
        version: the version that the tensors have; SafetensorError if the delta is based on
            another one. None: not checked, except by the checksums.

        Raises:
            KeyError: a tensor that the delta changes is missing.
            ValueError: an array that is not contiguous, writable and in the machine's byte order,
                a tensor of which several elements have the same memory (an expanded one), or
                tensors that share memory and get different values there.
            TypeError: a sparse or nested tensor, or another argument of the wrong type.
            RuntimeError: a DTensor, or a tensor without memory.
        """
        _check_versions(version=version)
        wanted = [name for name, _, _ in self.tensors()]
        return Change(self._delta, tensors, wanted, check_count("threads", threads), version)

    def patches(
        self, checkpoint: Path, *, framework: str = "torch", indices: str = "int32",
        dense: bool = False, nan_is_dense: bool = True,
    ) -> Iterator[Patch]:
        """Iterate over the changed elements of each changed tensor.

        Each new tensor is made and verified in memory; the checkpoint, which must have the delta's
        base version, is only read. Up to two tensors are made ahead.

        framework: "torch" or "numpy" (which has no BF16 and FP8: bytes or uint16 stand for them).
        indices: "int32" or "int64"; a tensor with 2^31 elements or more has int64.
        dense: whole tensors instead of changed elements, such as SGLang's loader takes.
        nan_is_dense: a tensor with a NaN among the new values, or without a floating dtype of 16
            bits or more, becomes dense: vLLM marks unchanged elements by NaN, and refuses sparse
            FP8 values on the CPU.
        """
        check_no_empty_path("checkpoint", checkpoint)
        check_switches(dense=dense, nan_is_dense=nan_is_dense)
        check_word("framework", framework, ("torch", "numpy"))
        check_word("indices", indices, ("int32", "int64"))
        _expect(checkpoint, self.base_version)
        make = PatchMaker(self._delta, checkpoint, framework, indices, dense, nan_is_dense)
        names = [name for name, _, _ in self.tensors()]
        return make_ahead(make, names)

    def weights(self, checkpoint: Path) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, new torch tensor) of the changed tensors, for `load_weights()`."""
        return map(_whole_tensor, self.patches(checkpoint, dense=True))


def _whole_tensor(patch: Patch) -> tuple[str, Any]:
    """Return the name and the tensor of a dense patch."""
    whole = patch.values
    if len(whole) == math.prod(patch.shape):  # not of dtypes that torch lacks
        whole = whole.reshape(patch.shape)
    return patch.name, whole


def _expect(checkpoint: Path, version: str) -> None:
    """Refuse a checkpoint whose note names another version, or that is of two versions."""
    if "://" in os.fsdecode(checkpoint) or not os.path.isdir(checkpoint):
        return
    note = version_of(checkpoint)
    what = ""
    if note.interrupted:
        what = ("an update by a delta was interrupted, so the files are of two versions; "
                "run 'fastsafetensors delta recover' first")
    elif note.version is not None and plain_version(note.version) != plain_version(version):
        what = (f"the checkpoint has version {note.version} according to its version note, "
                f"not {version}")
    if what:
        refuse(f"{os.fsdecode(checkpoint)}: {what}", "VersionMismatch")


def make(
    old: Path, new: Any, folder: Path, *, version: str, base_version: str,
    encoding: str = "xor", checksum: str = "adler32", dialect: str = "sglang", level: int = 1,
    threads: int = 0, durable: bool = True,
) -> dict[str, Any]:
    """Write the difference between the checkpoint `old` and the state `new` to a folder.

    Both must have the same tensors with the same sizes; unchanged tensors are left out. Tensors are
    compared block by block, and each thread writes one shard, so that memory stays below 64 MiB at
    level 1 (higher levels need more). The index is written last: readers see a complete version or
    none.

    Args:
        old: the path of the checkpoint that the delta will be applied to.
        new: the path of the changed checkpoint, or a mapping of names to torch tensors or numpy
            arrays, or a torch module whose state has those names. Tied tensors of a module that
            the checkpoint lacks are left out, as save_model() leaves them out. Tensors on a device,
            or not contiguous or of another byte order, are copied first.
        folder: where the delta is written. Created if missing; files of another model in it are an
            error.
        version: the name of the new state.
        base_version: the name of the state of `old`.
        encoding: "xor", or "overwrite" (positions and new bytes; not for tensors of 4 GiB or more).
        checksum: "adler32", "xxh3-128" or "blake3".
        dialect: "sglang", also for slime and miles: versions are decimal numbers, and `version` is
            `base_version` + 1. "modelexpress": only with xor and adler32.
        level: of the zstd compression, 1 to 19.
        threads: that compare and compress; 0: one per CPU that the process may use.
        durable: files are on the device when this returns.

    Returns:
        A dict of statistics.

    Raises:
        SafetensorError: an invalid file, or a tensor whose size or dtype changed.
        TypeError: an argument of another type.
        ValueError: an invalid argument, or a folder that already holds a version.
    """
    check_count("level", level, 1, 19)
    check_switch("durable", durable)
    _check_versions(True, version=version, base_version=base_version)
    _check_format(encoding, checksum, dialect)
    kept: list[Any] = []
    source: Any
    if isinstance(new, (str, bytes, PathLike)):
        source = _encode("new", new)
    else:
        check_no_empty_path("old", old)
        tensors = state_like(old, new)
        check_kinds(old, tensors)
        source, kept = memory_rows(tensors)
    try:
        return _core.delta_make(_encode("old", old), _encode("folder", folder), source, version,
                                base_version, encoding, checksum, dialect, level,
                                check_count("threads", threads), durable)
    finally:
        del kept


def convert(
    checkpoint: Path, delta: Delta | Path, folder: Path, *, version: str | None = None,
    base_version: str | None = None, encoding: str = "xor", checksum: str = "adler32",
    dialect: str = "sglang", level: int = 1, threads: int = 0, durable: bool = True,
) -> dict[str, Any]:
    """Write a delta, or a chain folded into one version, in another dialect or encoding.

    checkpoint: the base of the delta; it is only read, and needed because an XOR does not say what
        the new bytes are. delta: the folder of one version, or a Delta, for a chain. version,
        base_version: the delta's own by default. `version` must be newer than `base_version`, and
        for SGLang be the next number unless several versions are folded. The other arguments are
        those of make(), and so are the errors.
    """
    if not isinstance(delta, Delta):
        check_no_empty_path("delta", delta)
    check_count("level", level, 1, 19)
    check_switch("durable", durable)
    _check_versions(version=version, base_version=base_version)
    _check_format(encoding, checksum, dialect)
    opened = delta if isinstance(delta, Delta) else Delta(delta)
    return _core.delta_make(
        _encode("checkpoint", checkpoint), _encode("folder", folder), opened._delta,
        opened.version if version is None else version,
        opened.base_version if base_version is None else base_version,
        encoding, checksum, dialect, level, check_count("threads", threads), durable)


def apply(
    checkpoint: Path, *folders: Path, check_first: bool = False, new_files: bool = False,
    version: str | None = None, threads: int = 0, durable: bool = True,
    manifest: Path | None = None,
) -> dict[str, Any]:
    """Apply one delta version, or a chain in order, to the files of a checkpoint folder, in place.

    Up to 16 versions of one encoding are folded into one pass. After a kill the same call finishes
    the work; an error rolls back, and the folder has the version before the pass. Engines must not
    load the folder meanwhile.

    version: of a folder that has no note of it; None: it is taken to be the delta's base. A folder
        with a note must have it, or a later version of the chain, as after a kill.
    durable: the files are on the device when this returns; with False it returns sooner, but after
    a power cut the files may have other bytes than their version note says.
    check_first: everything is decoded and verified in a first pass.
    new_files: write new files and rename them over the old ones, for readers that have these open
    or mapped. They share unchanged blocks where the file system can; elsewhere whole files are
    copied. Links are replaced.
    manifest: of the new version, as write_manifest() makes it. After the update all files are
    compared with it, also the tensors that no delta changed, and it becomes the folder's manifest.
    Until then no other version is applied. An invalid one is refused before anything changes. One
    that is given again for the version that the folder has is compared instead of the earlier one.
    In a folder that cannot be written it does not become the folder's; the log has a warning.

    Returns a dict of statistics; "recovered" is 1 where an interrupted update was finished
    first, or only files compared with the manifest of the version, 2 where it was rolled back.

    Raises:
        SafetensorError: `tag` "VersionMismatch" for a wrong base, a gap or an older version,
            "DigestMismatch", "CorruptData" and others.
        OSError: a file can't be read or written.
        TypeError: an argument of another type.
    """
    check_no_empty_path("checkpoint", checkpoint)
    check_switches(durable=durable, check_first=check_first, new_files=new_files)
    if manifest is not None:
        check_no_empty_path("manifest", manifest)
    delta = Delta(*folders)
    with contextlib.ExitStack() as stack:
        if manifest is not None:
            stack.enter_context(
                remembered_manifest(checkpoint, manifest, delta.version, durable))
        return delta.apply(
            checkpoint, version=version, durable=durable, check_first=check_first,
            new_files=new_files, threads=threads)


def verify(
    checkpoint: Path, *folders: Path, version: str | None = None, threads: int = 0
) -> dict[str, Any]:
    """Check a chain against a checkpoint folder and change nothing. Arguments are those of apply().

    The errors are those of apply(), too.
    """
    return Delta(*folders).verify(checkpoint, version=version, threads=threads)


def recover(
    checkpoint: Path, *, roll_back: bool = False, threads: int = 0, durable: bool = True
) -> dict[str, Any]:
    """Finish an update that was killed, or undo it; no effect otherwise.

    roll_back: go back to the old version. Of apply(new_files=True) there is nothing to undo: either
    no file was replaced yet, or the renames are finished. durable: as of apply().

    Raises:
        SafetensorError: `tag` "FileChanged" if files were saved again or changed after the kill. No
            file is changed then. Delete .weight_sync if the checkpoint is complete.
        The errors of apply().
    """
    check_switches(roll_back=roll_back, durable=durable)
    flags = _ROLL_BACK * roll_back | _DURABLE * durable
    stats = finish_update(_encode("checkpoint", checkpoint), flags,
                          check_count("threads", threads))
    finish_waiting(checkpoint, durable)
    remove_unused(checkpoint)
    return stats


def version_of(checkpoint: Path) -> VersionNote:
    """Read which version a checkpoint folder has.

    Raises:
        SafetensorError: `tag` "FileChanged" if a file has another size or time than the update
            of that version gave it: the checkpoint was saved again, or copied without its times.
    """
    version, interrupted = _core.delta_version(_encode("checkpoint", checkpoint))
    return VersionNote(version or None, interrupted)


def _check_source(source: Path) -> None:
    """Check a folder of version folders. A URL has no list of them."""
    check_no_empty_path("source", source)
    if "://" in os.fsdecode(source):
        raise ValueError(f"{printable(os.fsdecode(source))}: versions are found in a local folder. "
                         "To apply one that is at a URL, call apply() with it")


def pending(checkpoint: Path, source: Path) -> list[str]:
    """Return the folders in `source` that follow the checkpoint's version, oldest first.

    source: a folder of version folders, such as weight_v000001. Full versions in it are ignored.
    A checkpoint without a note is the first version's base.

    Raises:
        SafetensorError: `tag` "VersionMismatch" where nothing follows although `source` has a
            later decimal version, so one in between is missing; where the versions form a cycle;
            and while an update is running or interrupted, because the files are then of two
            versions.
        ValueError: `source` is a URL.
        TypeError: an argument of another type.
    """
    _check_source(source)
    chain = _following(checkpoint, source, None)
    if chain is None:
        refuse(f"{os.fsdecode(checkpoint)}: an update by a delta is running, or was interrupted, "
               "so the files are of two versions; wait for it, or run 'fastsafetensors delta "
               "recover' first", "VersionMismatch")
    return chain


def _following(checkpoint: Path, source: Path, until: str | None) -> list[str] | None:
    """Return the folders of the versions to apply; None during an update."""
    note = version_of(checkpoint)
    if note.interrupted:
        return None
    return [folder for _, folder in find_chain(source, note.version, until).versions]


def pull(
    checkpoint: Path, source: Path, *, until: str | None = None, threads: int = 0,
    durable: bool = True, timeout: float = _PULL_SECONDS,
) -> dict[str, Any] | None:
    """Apply all versions in `source` that follow the checkpoint's own; see pending() and apply().

    A version's folder may hold a model.manifest, which is used like apply()'s: the versions up to
    it are applied, the files compared, and then the later versions are applied. A manifest that is
    replaced in `source` after it was found to be wrong is compared instead of the old one. Of
    several folders that are based on the same version, the last one by name is used.

    until: the last version to apply, by which engines that must have the same one agree;
    SafetensorError where it does not follow.

    Several processes of a host may call this for the same folder: one applies, the others wait, up
    to `timeout` seconds. An update that was killed is finished first. Returns apply()'s
    statistics (of the last call that did something), or None where nothing was to be done.

    Raises:
        TimeoutError: another process still holds the lock.
        The errors of apply().
        ValueError: `source` is a URL.
        TypeError: an argument of another type.
    """
    check_no_empty_path("checkpoint", checkpoint)
    _check_source(source)
    check_switch("durable", durable)
    count = check_count("threads", threads)
    # Another thread may change the current folder while this one waits.
    checkpoint, source = fixed_location(checkpoint), fixed_location(source)
    _check_versions(until=until)
    last = None if until is None else plain_version(until)
    limit = check_timeout(timeout)
    end = math.inf if limit is None else time.monotonic() + limit
    finished: dict[str, Any] | None = None
    while True:
        chain: list[str] | None = None
        try:
            if version_of(checkpoint).interrupted:
                stats = finish_update(os.fsencode(checkpoint), _DURABLE * durable, count)
                finished = stats if stats["recovered"] else finished
                continue
            finish_pulled(checkpoint, source, durable)
            if (chain := _following(checkpoint, source, last)) is None:
                continue
            if not chain:
                remove_old_files(checkpoint)
                return finished
            # In parts, because an opened delta holds a descriptor for each shard.
            part, manifest = split_at_manifest(chain[:_PULL_VERSIONS])
            finished = apply(checkpoint, *part, durable=durable, threads=threads,
                             manifest=manifest)
            if len(part) == len(chain):
                return finished
        except TimeoutError:
            if time.monotonic() >= end:
                raise
            time.sleep(_PULL_STEP_SECONDS)
        except _core.error_class() as error:
            # Another process was faster: look again.
            if (error.tag != "VersionMismatch" or not chain
                    or _following(checkpoint, source, last) == chain):
                raise


# Descriptors of the locks of reading().
_held: set[int] = set()


def _close_in_child() -> None:
    """Close the locks that a forked child has inherited: it would hold them after its parent."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[VersionNote]:
    """Keep a checkpoint folder from being updated while its files are read.

    Deltas are not applied meanwhile: apply() raises TimeoutError, pull() waits. Makes the folder
    .weight_sync and its lock; a checkpoint on a medium that cannot be written is not locked,
    because nothing can be applied to it.

    Raises:
        OSError: the folder does not exist, or the lock can't be opened.
        RuntimeError: an update was interrupted, so the files are of two versions, or .weight_sync
            is a symbolic link.
        TypeError: an argument of another type.
    """
    import fcntl

    check_no_empty_path("checkpoint", checkpoint)
    if os.path.islink(os.path.join(os.fsdecode(checkpoint), ".weight_sync")):
        version_of(checkpoint)  # raises the error of apply()
    held = open_lock(os.fsdecode(checkpoint))
    if held is None:
        yield version_of(checkpoint)
        return
    _held.add(held)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        note = version_of(checkpoint)
        if note.interrupted:
            raise RuntimeError(
                f"{printable(os.fsdecode(checkpoint))}: a weight delta was applied in part, so "
                "the files are of two versions; run 'fastsafetensors delta recover'")
        finish_waiting(checkpoint, False)
        yield note
    finally:
        if held in _held:  # not in a forked child, where it is closed
            _held.remove(held)
            fcntl.flock(held, fcntl.LOCK_UN)
            os.close(held)
