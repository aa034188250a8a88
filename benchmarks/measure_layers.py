# SPDX-License-Identifier: Apache-2.0
"""Measures the time that the Python code adds to a load: ``python benchmarks/measure_layers.py``.

One file in the page cache is loaded by each API and by the extension alone, interleaved, in one
process that keeps its memory between loads. The table has medians with their spread, the difference
between each API's median and the extension's, and the same difference of the calling thread's CPU
time (which excludes the noise of reads), in total and per tensor. The budget: 2 % of 1 GiB, 1 ms of
a small
load, 1 us per tensor of the loads that make all tensors at once.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from compare_loads import make_files, warm

from fastsafetensors import (
    ParallelLoader,
    SafeTensorsFileLoader,
    SingleGroup,
    _core,
    fastsafe_open,
    safe_open,
)
from fastsafetensors.torch import load_file

FILES = {"1 GiB": "1g", "25 MB": "25m", "20,000 tensors": "small"}


def extension(path: str) -> None:
    """Load with the extension alone; no tensor objects."""
    model = _core.Model(path)
    loader = model.load(mode="load")
    loader.wait()
    loader.close()
    model.close()


def with_file_loader(path: str) -> Any:
    """SafeTensorsFileLoader as programs for 0.5 use it."""
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu")
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}
    buffer.close()
    loader.close()
    return tensors


def with_safe_open(path: str) -> Any:
    """safe_open, every tensor by name."""
    with safe_open(path, "pt", backend="pread") as file:
        return file.get_tensors()


def with_safe_open_by_name(path: str) -> Any:
    """safe_open in its default mode, tensor by tensor."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def with_fastsafe_open(path: str) -> Any:
    """fastsafe_open, every tensor by name."""
    with fastsafe_open(path, device="cpu", nogds=True) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def with_parallel_loader(path: str) -> Any:
    """ParallelLoader, as servers use it."""
    loader = ParallelLoader(SingleGroup(), [path], use_tqdm_on_load=False)
    tensors = dict(loader.iterate_weights())
    loader.close()
    return tensors


FRONTS: dict[str, Callable[[str], Any]] = {
    "extension alone": extension,
    "load_file": lambda path: load_file(path, mode="load"),
    "safe_open": with_safe_open,
    "safe_open, by name": with_safe_open_by_name,
    "SafeTensorsFileLoader": with_file_loader,
    "fastsafe_open": with_fastsafe_open,
    "ParallelLoader": with_parallel_loader,
}


def measure(path: str, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, CPU seconds of the calling thread) of each run of each API."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in FRONTS}
    for name in FRONTS:
        FRONTS[name](path)
    order = [name for name in FRONTS for _ in range(runs)]
    random.shuffle(order)
    for name in order:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = FRONTS[name](path)
        times[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
        del result
    return times


def print_file(title: str, times: dict[str, list[tuple[float, float]]], count: int) -> None:
    """One table."""
    base = statistics.median(cpu for _, cpu in times["extension alone"])
    whole = statistics.median(wall for wall, _ in times["extension alone"])
    print(f"\n{title}: {count} tensors")
    print(f"{'':24}{'ms':>9}{'spread':>19}{'added':>9}{'cpu, ms':>10}{'us/tensor':>11}")
    for name, rows in times.items():
        walls = [1e3 * wall for wall, _ in rows]
        added = statistics.median(cpu for _, cpu in rows) - base
        middle = statistics.median(walls)
        print(f"{name:24}{middle:9.2f}{min(walls):10.2f}-{max(walls):<8.2f}"
              f"{(middle / 1e3 / whole - 1):+9.1%}{1e3 * added:10.3f}{1e6 * added / count:11.3f}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/measure_layers.py",
                                     description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--folder", default="build/bench", help="where files go")
    arguments = parser.parse_args()
    _core.keep_memory(3 << 30)
    folder = pathlib.Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for title, kind in FILES.items():
        path = make_files(kind, folder)[0]
        warm(path)
        count = len(_core.Model(path).names())
        print_file(title, measure(path, arguments.runs), count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
