# SPDX-License-Identifier: Apache-2.0
"""Shared by the plug-ins for inference engines: options, and iterating over weights."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import deltas
from ._base.errors import add_location, printable
from ._base.options import parse_limit
from ._base.progress import enable_tqdm
from ._core import error_class
from ._deltas.delta_ranks import VersionAgreement
from ._lazy.lazy_reads import MEMORY_LIMIT_BYTES, Habits
from ._loading.load import OpenLoad
from ._loading.verified_open import SignedBy, Verify
from ._torch.torch_installed import torch
from .lazy import LazyModel

_CHOICES = {"mode": ("auto", "load", "map"), "plan": ("auto", "off"),
            "gds": ("auto", "off", "strict")}


@dataclass(frozen=True)
class EngineOptions:
    """Options in ``--model-loader-extra-config``, in addition to the engine's own keys.

    threads: of a load; 0: one per CPU that the process may use. memory: bytes of host memory
    for readahead, a number or "2GiB". mode: auto, load or map, as in load_file. plan: "off"
    disables readahead. gds: as in load_file. verify: true, or a manifest's path; public_key:
    requires a manifest signed with it. progress: a bar on rank 0. deltas: a folder of weight
    deltas; each load first applies the versions that follow the checkpoint's.
    """

    threads: int = 0
    memory: int = MEMORY_LIMIT_BYTES
    mode: str = "auto"
    plan: str = "auto"
    gds: str = "auto"
    verify: bool | str | None = None
    public_key: str | None = None
    progress: bool = True
    deltas: str | None = None

    @property
    def digest_source(self) -> Verify | None:
        """The value for load_file()'s verify argument."""
        if self.public_key is None:
            return self.verify
        manifest = self.verify if isinstance(self.verify, str) else None
        return SignedBy(self.public_key, manifest=manifest)


_NAMES = {field.name for field in fields(EngineOptions)}


def _check(name: str, value: Any) -> Any:
    if name == "memory":
        try:
            return parse_limit("memory", value)
        except TypeError as error:
            raise ValueError(str(error)) from None
    if name in _CHOICES:
        good = value in _CHOICES[name]
        expected = "one of " + ", ".join(_CHOICES[name])
    elif name == "threads":
        good, expected = type(value) is int and 0 <= value < 1 << 31, "a number of threads"
    elif name == "progress":
        good, expected = type(value) is bool, "true or false"
    elif name == "verify":
        good, expected = value is None or type(value) in (bool, str), "true, false or a path"
        good = good and value != ""
    else:
        good, expected = value is None or (type(value) is str and value != ""), "a path"
    if not good:
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return value


def split_options(
    given: Mapping[str, Any], engine_keys: Sequence[str]
) -> tuple[EngineOptions, dict[str, Any]]:
    """Split a configuration into this package's options and the engine's.

    Raises:
        ValueError: an unknown key or a bad value, with its name.
    """
    unknown = sorted(given.keys() - _NAMES - set(engine_keys))
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r} of model_loader_extra_config: fastsafetensors knows "
            f"{', '.join(sorted(_NAMES))}; the engine {', '.join(engine_keys)}"
        )
    ours = {name: _check(name, value) for name, value in given.items() if name in _NAMES}
    rest = {name: value for name, value in given.items() if name not in _NAMES}
    if ours.get("deltas") is not None:
        if "://" in ours["deltas"]:
            raise ValueError(f"deltas must be a local folder, not {ours['deltas']!r}")
        if ours.get("verify") or ours.get("public_key") is not None:
            raise ValueError("deltas cannot be used with verify or public_key: an update "
                             "changes the files, and their manifest would not match any more")
    return EngineOptions(**ours), rest


def local_device() -> str:
    """The GPU of this process, whatever its rank in the job; the CPU without GPUs."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


_MISSING = "PPMissingLayer"


def expectation(model: Any) -> Callable[[str], bool] | None:
    """Return a function that says whether a name will be used, which excludes layers of other
    stages.
    """
    if model is None:
        return None
    missing = [path for path, module in model.named_modules() if type(module).__name__ == _MISSING]
    # Checkpoints may use other prefixes than modules; "layers.17." is common to both.
    ends = {".".join(path.split(".")[-2:]) + "." for path in missing if path}
    if not ends:
        return None
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(end)}" for end in sorted(ends)))
    return lambda name: pattern.search(name) is None


# The access order that loads of this process have recorded by file, for later loads.
_habits: dict[tuple[str, ...], Habits] = {}
_ORDERS_KEPT = 8


def _order_of(files: Sequence[str]) -> Habits:
    key = tuple(files)
    # Each step is atomic among threads. A lock could be held when the process forks.
    habits = _habits.setdefault(key, {})
    for other in list(_habits)[:-_ORDERS_KEPT]:
        if other != key:
            _habits.pop(other, None)
    return habits


# Whether a model was loaded in this process. Later loads replace weights in use.
_has_loaded = threading.Event()
_VERIFY_BYTES = 256 << 20


def _verify_all(model: LazyModel, threads: int) -> None:
    """Compare every byte with the manifest before the first weight is returned.

    The files stay open, so that later reads use the compared files. They are verified again then,
    from the page cache.
    """
    budget = max(_VERIFY_BYTES, 2 * model.largest_bytes)
    with OpenLoad(model._model, None, mode="load", threads=threads, budget=budget) as loader:
        for tensor in loader:
            del tensor


def iterate(
    files: Sequence[str], options: EngineOptions, logger: logging.Logger, *,
    device: str | None = None, filter: Callable[[str], bool] | None = None,
    expects: Callable[[str], bool] | None = None, progress: bool = True, cache: str = "auto",
) -> Iterator[tuple[str, Any]]:
    """Iterate over (name, lazy tensor), layer by layer.

    Logs one line at the end with the bytes read. Needs no other rank. With verification, every load
    except the process's first verifies all bytes before it returns the first tensor, because the
    engine then releases its weights.
    """
    begin = time.monotonic()
    device = local_device() if device is None else device
    # Files that deltas change in place are locked until the last tensor was read.
    with contextlib.ExitStack() as locks:
        _hold_version(files, options, locks, logger)
        yield from _read(files, options, logger, begin, device, filter, expects, progress, cache)


def _hold_version(
    files: Sequence[str], options: EngineOptions, locks: contextlib.ExitStack,
    logger: logging.Logger,
) -> None:
    """Apply pending deltas to each folder of the files, and keep others from doing it.

    With deltas, all ranks of the default group come here, and have the same version afterwards.
    """
    for folder in sorted({os.path.dirname(os.path.abspath(file)) for file in files}):
        if options.deltas is not None:
            locks.enter_context(_pull_together(folder, options, logger))
            continue
        # A folder that no delta was applied to gets no lock from engines that read no deltas.
        if os.path.isdir(os.path.join(folder, ".weight_sync")):
            locks.enter_context(deltas.reading(folder))


@contextlib.contextmanager
def _pull_together(
    folder: str, options: EngineOptions, logger: logging.Logger
) -> Iterator[None]:
    """Apply the versions that all ranks have, and hold the result. A source that does not exist
    yet has no versions.
    """
    source = str(options.deltas)
    if not os.path.isdir(source):
        logger.warning("fastsafetensors: the folder of deltas %s does not exist yet",
                       printable(source))
    ranks = VersionAgreement(folder, source)
    with contextlib.ExitStack() as lock:
        with ranks.step("applying deltas"):
            stats = ranks.pull(options.threads)
            if stats is not None:
                logger.info("fastsafetensors: applied deltas to %s in %.2f s: now version %s",
                            printable(folder), stats["seconds"],
                            printable(str(deltas.version_of(folder).version)))
            ranks.check(lock.enter_context(deltas.reading(folder)))
        yield


def _read(
    files: Sequence[str], options: EngineOptions, logger: logging.Logger, begin: float,
    device: str, filter: Callable[[str], bool] | None, expects: Callable[[str], bool] | None,
    progress: bool, cache: str,
) -> Iterator[tuple[str, Any]]:
    """Open the files and return their tensors."""
    try:
        model = LazyModel(
            sorted(files), device, mode=options.mode, threads=options.threads, gds=options.gds,
            memory=options.memory, ahead=options.plan != "off", filter=filter,
            habits=_order_of(files), expects=expects, verify=options.digest_source, cache=cache,
        )
        if options.digest_source and _has_loaded.is_set():
            _verify_all(model, options.threads)
    except (error_class(), OSError) as error:
        add_location(error)
        raise
    bar = _Bar(len(files), options.progress and progress)
    try:
        with model:
            for name, tensor in model:
                yield name, tensor
                bar.show(model)
        _has_loaded.set()
    finally:
        bar.close()
        stats = model.stats()
        logger.info(
            "fastsafetensors: needed %.1f MiB, read %.1f MiB in %.2f s: %d loads to %s, mode %s, "
            "%d boxes ahead", stats["bytes_needed"] / (1 << 20), stats["bytes_read"] / (1 << 20),
            time.monotonic() - begin, stats["loads"], device, options.mode, stats["boxes_ahead"],
        )


def begun(weights: Iterator[tuple[str, Any]]) -> Generator[tuple[str, Any], None, None]:
    """Open the files now and verify them, so that errors occur before a reload changes the
    model. close() of the result ends the reads and closes the files.
    """
    result = _continued(weights)
    next(result)  # a generator that has not started does not close what it holds
    return result


def _continued(weights: Iterator[tuple[str, Any]]) -> Generator[Any, None, None]:
    try:
        first = list(itertools.islice(weights, 1))
        yield None
        yield from first
        yield from weights
    finally:
        close: Any = getattr(weights, "close", None)  # of generators
        if close is not None:
            close()


class _Bar:
    """Bytes read by this rank, shown on rank 0."""

    def __init__(self, file_count: int, wanted: bool) -> None:
        self._bar: Any = None
        if enable_tqdm(wanted):
            from tqdm.auto import tqdm

            plural = "s" if file_count != 1 else ""
            self._bar = tqdm(desc=f"Loading {file_count} safetensors file{plural}", unit="B",
                             unit_scale=True)

    def show(self, model: LazyModel) -> None:
        if self._bar is not None:
            self._bar.update(model.bytes_needed - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
