# SPDX-License-Identifier: Apache-2.0
"""Code shared by the programs of one rank, for every engine.

    PROGRAM RANK WORLD URL SCENARIOS.json

A scenario is loaded by the engine's loader and by ours; a JSON line says what differs, and the
bytes of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastsafetensors import SafetensorError, lazy

# The engines' compiled kernels are not built here. On a CPU with AMX they would be called.
torch.cpu._is_amx_tile_supported = lambda: False

STATS: list[dict[str, int]] = []
# The value of parameters before a load: what remains was not loaded.
UNTOUCHED = -77


def watch_stats() -> None:
    """Record the statistics of every lazy model."""
    close = lazy.LazyModel.close

    def closing(self: Any) -> None:
        close(self)
        STATS.append(self.stats())

    lazy.LazyModel.close = closing  # type: ignore[method-assign]


def refused(scenario: dict[str, Any], reload: Callable[[str], Any]) -> str | None:
    """Reload from a copy whose last file is cut off: what the engine says to that.

    breaks: how many tensors are handed out before that; none: it is so before the reload.
    damage: the last byte of the file differs instead.
    """
    if "breaks" not in scenario:
        return None
    folder = tempfile.mkdtemp(dir=str(Path(scenario["reload"]).parent))
    shutil.copytree(scenario["reload"], folder, dirs_exist_ok=True)
    last = max(Path(folder).glob("*.safetensors"))
    if scenario.get("damage"):
        content = last.read_bytes()
        last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif not scenario["breaks"]:
        os.truncate(last, last.stat().st_size - 4096)
    iterate = lazy.LazyModel.__iter__

    def breaking(self: Any) -> Any:
        for number, (name, tensor) in enumerate(iterate(self)):
            if number == scenario["breaks"]:
                lazy.LazyModel.__iter__ = iterate  # type: ignore[method-assign]
                os.truncate(last, last.stat().st_size - 4096)
            yield name, tensor

    if scenario["breaks"]:
        lazy.LazyModel.__iter__ = breaking  # type: ignore[method-assign]
    try:
        answer = reload(folder)
    except SafetensorError as error:
        return str(error)
    assert answer is not None and not answer[0], "what was cut off is loaded"
    return str(answer[1])


def disk_bytes() -> int:
    """Return what this process has read from disks, as the kernel counts it."""
    rows = Path("/proc/self/io").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("read_bytes:"))


@contextlib.contextmanager
def disk_reads(scenario: dict[str, Any], folder: str) -> Iterator[None]:
    """Remove a folder's files from the page cache, and count what is read from the disk."""
    if not scenario.get("cold"):
        yield
        return
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    torch.distributed.barrier()
    before = disk_bytes()
    yield
    scenario["disk bytes"] = disk_bytes() - before


def arguments() -> tuple[int, int, str, list[dict[str, Any]]]:
    """Return the rank, the number of ranks, the URL of the process group, and the scenarios."""
    rank, world, url, path = sys.argv[1:5]
    return int(rank), int(world), url, json.loads(Path(path).read_text())


def compare(scenario: dict[str, Any], theirs: Any, ours: Any, **more: Any) -> dict[str, Any]:
    """Return the differences between two models. Ours was loaded last."""
    if scenario.get("cold"):
        more["disk_bytes"] = scenario["disk bytes"]
    expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    different = [name for name in expected
                 if name not in found or not torch.equal(expected[name], found[name])]
    return {"name": scenario["name"], "parameters": len(expected), "different": different[:5],
            "untouched": [n for n, p in found.items() if bool((p == UNTOUCHED).all())][:5],
            "bytes": sum(p.nbytes for p in found.values()), "stats": STATS[-1], **more}


def run_all(run: Callable[[dict[str, Any]], dict[str, Any]],
            scenarios: list[dict[str, Any]]) -> None:
    """Run all scenarios, and print the result of each."""
    for scenario in scenarios:
        STATS.clear()
        print(json.dumps(run(scenario)), flush=True)


def addresses(model: Any) -> dict[str, int]:
    """Return the addresses of the parameters."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
