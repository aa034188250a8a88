# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins for inference engines share: their options, and the weights they hand out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from ._core import error_class
from ._errors import add_place
from ._lazy_reads import MEMORY_LIMIT_BYTES, Habits
from ._progress import enable_tqdm
from ._torch_installed import torch
from ._verify import SignedBy, Verify
from .lazy import LazyModel

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_CHOICES = {"mode": ("auto", "load", "map"), "plan": ("auto", "off"),
            "gds": ("auto", "off", "strict")}


@dataclass(frozen=True)
class EngineOptions:
    """What ``--model-loader-extra-config`` may say, beside the engine's own keys.

    threads: of a load; 0: as many as the process may use. memory_limit: bytes of host memory for
    what is read ahead, a number or "2GiB". mode: auto, load or map, as in load_file. plan: "off"
    reads nothing ahead. gds: as in load_file. verify: true, or a manifest's path; public_key: the
    manifest has to be signed with it. progress: a bar on rank 0.
    """

    threads: int = 0
    memory_limit: int = MEMORY_LIMIT_BYTES
    mode: str = "auto"
    plan: str = "auto"
    gds: str = "auto"
    verify: bool | str | None = None
    public_key: str | None = None
    progress: bool = True

    @property
    def held_against(self) -> Verify | None:
        """What load_file() takes as verify."""
        if self.public_key is None:
            return self.verify
        manifest = self.verify if isinstance(self.verify, str) else None
        return SignedBy(self.public_key, manifest=manifest)


_NAMES = {field.name for field in fields(EngineOptions)}


def parse_bytes(text: Any) -> int:
    """Bytes from a number or words like "2GiB"; ValueError for what is neither."""
    if type(text) is int and text >= 0:
        return text
    words = text if type(text) is str else ""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", words)
    if found is None or found.group(2).upper() not in _UNITS:
        raise ValueError(f'memory_limit: bytes or "2GiB" is expected, not {text!r}')
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def _check(name: str, value: Any) -> Any:
    if name == "memory_limit":
        return parse_bytes(value)
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
        raise ValueError(f"{name}: {expected} is expected, not {value!r}")
    return value


def split_options(
    given: Mapping[str, Any], engine_keys: Sequence[str]
) -> tuple[EngineOptions, dict[str, Any]]:
    """Take our options out of a configuration: (ours, what is the engine's).

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
    return EngineOptions(**ours), rest


def local_device() -> str:
    """The GPU that is this process's, whatever its rank in the job; the CPU where there is none."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


_MISSING = "PPMissingLayer"


def expectation(model: Any) -> Callable[[str], bool] | None:
    """Return what tells whether a name will be used: not of layers that other stages have."""
    if model is None:
        return None
    missing = [path for path, module in model.named_modules() if type(module).__name__ == _MISSING]
    # Checkpoints may have other prefixes than modules: "layers.17." is what they have in common.
    ends = {".".join(path.split(".")[-2:]) + "." for path in missing if path}
    if not ends:
        return None
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(end)}" for end in sorted(ends)))
    return lambda name: pattern.search(name) is None


# What loads of this process have taken of which files: loads after the first begin with it.
_habits: dict[tuple[str, ...], Habits] = {}
_HABITS_KEPT = 8


def _habits_of(files: Sequence[str]) -> Habits:
    key = tuple(files)
    # Each step by itself is safe among threads: a lock could be held when the process forks.
    habits = _habits.setdefault(key, {})
    for other in list(_habits)[:-_HABITS_KEPT]:
        if other != key:
            _habits.pop(other, None)
    return habits


def iterate(
    files: Sequence[str], options: EngineOptions, logger: logging.Logger, *,
    device: str | None = None, filter: Callable[[str], bool] | None = None,
    expects: Callable[[str], bool] | None = None, progress: bool = True, cache: str = "auto",
) -> Iterator[tuple[str, Any]]:
    """Iterate over (name, tensor that reads when it is used), layer by layer.

    A closing line says what was read. No other rank is needed.
    """
    begin = time.monotonic()
    device = local_device() if device is None else device
    try:
        model = LazyModel(
            sorted(files), device, mode=options.mode, threads=options.threads, gds=options.gds,
            memory_limit=options.memory_limit, ahead=options.plan != "off", filter=filter,
            habits=_habits_of(files), expects=expects, verify=options.held_against, cache=cache,
        )
    except (error_class(), OSError) as error:
        add_place(error)
        raise
    bar = _Bar(len(files), options.progress and progress)
    try:
        with model:
            for name, tensor in model:
                yield name, tensor
                bar.show(model)
    finally:
        bar.close()
        stats = model.stats()
        logger.info(
            "fastsafetensors: needed %.1f MiB, read %.1f MiB in %.2f s: %d loads to %s, mode %s, "
            "%d boxes ahead", stats["bytes_needed"] / (1 << 20), stats["bytes_read"] / (1 << 20),
            time.monotonic() - begin, stats["loads"], device, options.mode, stats["boxes_ahead"],
        )


def begun(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Open the files now: what is wrong with them is told before a reload touches the model."""
    return itertools.chain(list(itertools.islice(weights, 1)), weights)


def check_begins(weights: Iterator[tuple[str, Any]]) -> None:
    """Open the files and close them: of a source whose weights come later in a reload."""
    with contextlib.closing(cast("Generator[Any]", weights)):
        next(weights, None)


class _Bar:
    """Bytes of this rank, on rank 0."""

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
