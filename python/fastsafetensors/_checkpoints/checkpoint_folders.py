# SPDX-License-Identifier: Apache-2.0
"""The folders of checkpoints that training.CheckpointManager saves: reading and cleaning them."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.errors import printable
from .._base.options import check_switch
from .._base.regular_files import read_regular
from .._base.representation import shown_as
from .._core import Model, error_class
from ..torch import load_file
from .state_codec import decode_state

_log = logging.getLogger("fastsafetensors")
STEM = "checkpoint"
MANIFEST = "model.manifest"
ALIGNMENT = 64  # of memory that torch allocates
# The exact names that CheckpointManager gives: a copy called "step-005" is not its checkpoint.
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_HIDDEN = re.compile(r"\.step-(0|[1-9][0-9]*)(\.[0-9a-f]{16})?\.deleted")
# Names that the library gives to files until they are in place.
_TEMPORARY = re.compile(r"\.(checkpoint|model\.manifest).*\.[0-9a-f]{16}\.tmp")
LISTINGS = 10  # at most, of a folder from which another process deletes
# Errors that say that a file is not there, or that something else is in its place.
_INCOMPLETE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP,
               errno.ENAMETOOLONG)


@shown_as("Checkpoint", "fastsafetensors.training")
@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    metric: float | None
    ranks: int = 1  # that have saved a state each

    def load(
        self, device: Any = "cpu", *, rank: int | None = None, verify: bool = False
    ) -> dict[str, Any]:
        """Return the state that was saved: {name: what its state_dict() gave}.

        Names that were one tensor in the state are one tensor in the result: clone those that are
        to be changed apart. Some types come back as a plain one with the same values:

        - torch.nn.Parameter and other subclasses of torch.Tensor as torch.Tensor;
        - NumPy arrays in the machine's byte order, and NumPy scalars as Python numbers and strings;
        - enumerations and other subclasses of int, float and str as these;
        - OrderedDict and every other mapping as dict, except for state_dict() of modules;
        - named tuples and torch.Size as tuple, subclasses of list as list;
        - bytearray as bytes.

        Args:
            device: where the tensors go.
            rank: whose state, if several ranks have saved one each; nothing else is read.
            verify: compare every byte that is read with the manifest that was saved with it.

        Raises:
            SafetensorError: damaged files, or those of another program; with verify, bytes that
                differ.
            ValueError: a rank that has saved nothing, or none given where several have.
        """
        check_switch("verify", verify)
        how: dict[str, Any] = {"mode": "load", "verify": verify or None}
        if self.ranks == 1 and rank in (None, 0):
            return _decode(self.path, self._read(device, how))
        if rank is None or not 0 <= rank < self.ranks:
            raise ValueError(f"{printable(self.path)} has the states of {self.ranks} ranks: rank "
                             f"must be 0 to {self.ranks - 1}, not {rank}")
        prefix = rank_prefix(rank)
        found = self._read(device, {**how, "filter": lambda name: name.startswith(prefix)})
        return _decode(self.path, {name[len(prefix):]: found[name] for name in found})

    def _read(self, device: Any, how: dict[str, Any]) -> dict[str, Any]:
        """Load tensors, in memory that is aligned as torch aligns its own.

        Some kernels, such as dot products, round differently elsewhere, and a run that goes on
        would then have other bits than the one that was interrupted.
        """
        try:
            found = load_file(self.path, device, **how)
        except FileNotFoundError:
            if not how["verify"] or not self.path.is_dir() or (self.path / MANIFEST).exists():
                raise
            words = ("the checkpoint has no checksums: its save was killed before it wrote them, "
                     "or had manifest=False. Load it with verify=False, delete its folder, or make "
                     "checksums with 'fastsafetensors hash --manifest FOLDER'")
            raise FileNotFoundError(errno.ENOENT, words, str(self.path)) from None
        return {name: tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
                for name, tensor in found.items()}


def _decode(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the state that is in the tensors of a checkpoint."""
    with _as_damage(path):
        return decode_state(tensors)


def rank_prefix(rank: int) -> str:
    """What the names of a rank's tensors begin with."""
    return f"rank-{rank}."


def read_checkpoint(path: Path, step: int) -> Checkpoint:
    """Return what a folder holds, from the headers of its files.

    Raises SafetensorError if it is incomplete, and OSError if it can't be read.
    """
    with _as_damage(path), contextlib.closing(Model(os.fspath(path))) as model:
        metadata = model.metadata(0) or {}
        metric, ranks = metadata.get("metric"), int(metadata.get("ranks", "1"))
        if metadata.get("step") != str(step):
            raise ValueError(f"the files are not a checkpoint of step {step}")
        if not 1 <= ranks <= len(model.names()):
            raise ValueError(f"the files can't hold the states of {ranks} ranks")
        return Checkpoint(path, step, None if metric is None else float(metric), ranks)


class Meaning(enum.IntEnum):
    """What an error says about the checkpoint that was being read, the most important last."""

    NOTHING_WRONG = 0  # there was no error
    DAMAGED = 1
    UNREADABLE = 2  # it may be whole
    GONE = 3  # some rank of a group has no such checkpoint any more
    UNRELATED = 4  # such as an exception that a signal handler raised


def meaning_of(error: Exception | None) -> Meaning:
    """Return what an error of reading a checkpoint says about it."""
    if error is None:
        return Meaning.NOTHING_WRONG
    if isinstance(error, (error_class(), BufferError, OverflowError)):
        return Meaning.DAMAGED
    # A TimeoutError that a handler raises has no number.
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        return Meaning.UNREADABLE
    return Meaning.UNRELATED


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Turn errors that say that files are damaged, or are not there, into SafetensorError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _INCOMPLETE:
            raise
        raise error_class()(f"{printable(error.filename or path)}: {printable(error.strerror)}"
                            ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise error_class()(f"{printable(path)}: {printable(error)}") from error


def by_metric(found: list[Checkpoint], best: str) -> list[Checkpoint]:
    """Return those that have a metric, the best first. best: "min" or "max"."""
    sign = 1 if best == "min" else -1
    rated = [(sign * one.metric, -one.step, one) for one in found
             if one.metric is not None and not math.isnan(one.metric)]
    return [one for *_, one in sorted(rated, key=lambda row: row[:2])]


def verify_checkpoint(checkpoint: Checkpoint) -> None:
    """Read all states, one at a time; raise if bytes differ from the manifest.

    SafetensorError if they do, and FileNotFoundError without a manifest.
    """
    for rank in range(checkpoint.ranks):
        try:
            checkpoint.load(rank=rank, verify=True)
        except FileNotFoundError:
            raise
        except OSError:
            with _as_damage(checkpoint.path):
                raise


_UNREADABLE_INDEX = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def _indexed_files(folder: Path) -> set[str]:
    """Return the names of files that the indexes of a folder list. Raises if one can't be read."""
    found: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        if not index.name.startswith("."):
            found.update(json.loads(read_regular(index))["weight_map"].values())
    return found


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[None]:
    """Hold the lock of a file or folder. OSError if a running save holds it."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks, a save publishes without one.
            if isinstance(error, BlockingIOError) or not flags & os.O_DIRECTORY:
                raise
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have a copy of the descriptor
        os.close(file)


def _clean_folder(path: Path) -> None:
    """Delete temporary files of killed saves, and the folder if it is then empty.

    Other files stay, also those of other programs: a set without its index can be rescued. So do
    temporary files that an index lists, because a save was killed while it published them.
    """
    with _locked(path, os.O_DIRECTORY):  # no save publishes meanwhile
        in_use = _indexed_files(path)
        for entry in list(path.iterdir()):
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and entry.name not in in_use:
                with contextlib.suppress(OSError), _locked(entry, os.O_NONBLOCK):
                    entry.unlink()
        path.rmdir()  # an error where anything is in it


def make_folder(folder: Path, durable: bool) -> None:
    """Make a folder and its parents; durable: their entries are on the device afterwards."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    for path in made if durable else ():
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints in a folder, complete or not, by step.

    Also those that have gone meanwhile. The system lists a large folder in several parts, so one
    that changes meanwhile is listed again: it may show neither a new step nor the one before.
    """
    found: list[tuple[int, Path]] = []
    for _ in range(LISTINGS):
        changed, found = folder.stat().st_mtime_ns, []
        for path in folder.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and (path.is_dir() or not os.path.lexists(path)):
                found.append((int(match[1]), path))
        if folder.stat().st_mtime_ns == changed:
            break
    return sorted(found)


def read_all(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints, by step.

    Another process may delete old ones after a new one is in place: listed again if one is gone.
    """
    found: list[Checkpoint] = []
    for _ in range(LISTINGS):
        found, is_gone = [], False
        for step, path in find_steps(folder):
            try:
                found.append(read_checkpoint(path, step))
            except Exception as error:
                if meaning_of(error) is Meaning.UNRELATED:
                    raise
                if meaning_of(error) is Meaning.UNREADABLE and path.is_dir():
                    _log.warning("%s is left out: %s", printable(path), printable(error))
                is_gone |= not path.is_dir()
        if not is_gone:
            break
    return found


def find_newest(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints that may be complete, the highest step first.

    Not those whose folder has no files yet. All are listed again if the newest was deleted
    meanwhile, as in read_all(): then there is a newer one.
    """
    for _ in range(LISTINGS):
        found: list[tuple[int, Path]] = []
        for step, path in reversed(find_steps(folder)):
            if _has_files(path):
                found.append((step, path))
            elif not found and not path.is_dir():
                break
        else:
            return found
    raise deleted_too_fast(folder)


def deleted_too_fast(folder: Path, more: str = "") -> Exception:
    """Return the error of a folder from which no checkpoint could be read for that reason."""
    return error_class()(f"{printable(folder)}: other processes delete checkpoints faster than "
                         f"they can be read{more}")


def _has_files(path: Path) -> bool:
    try:
        return any(not entry.name.startswith(".") for entry in path.iterdir())
    except OSError as error:
        if meaning_of(error) is Meaning.UNRELATED:
            raise
        # Reading the checkpoint says what else is wrong.
        return not isinstance(error, FileNotFoundError)


def hide(old: Checkpoint) -> Path:
    """Give a checkpoint a name under which delete_hidden() or clean_up() deletes it."""
    return old.path.rename(
        old.path.with_name(f".{old.path.name}.{secrets.token_hex(8)}.deleted"))


def delete_hidden(path: Path) -> None:
    """Delete a hidden checkpoint, or a link to one. Files that can't be deleted are logged."""
    with contextlib.suppress(OSError):
        path.unlink()  # not a folder
    shutil.rmtree(path, ignore_errors=True)
    try:
        if os.path.lexists(path):
            shutil.rmtree(path)  # for the reason
    except OSError as refused:
        _log.warning("%s can't be deleted: %s", printable(path), printable(refused))


def clean_up(folder: Path) -> None:
    """Delete what killed runs have left: temporary files, and folders of nothing else."""
    for path in folder.iterdir():
        if _HIDDEN.fullmatch(path.name):
            delete_hidden(path)
    for _, path in find_steps(folder):
        try:
            _clean_folder(path)
        except _UNREADABLE_INDEX as error:  # nothing is deleted
            if isinstance(error, OSError) and meaning_of(error) is Meaning.UNRELATED:
                raise
