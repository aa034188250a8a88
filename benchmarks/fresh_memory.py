# SPDX-License-Identifier: Apache-2.0
"""Compares loads into new memory, in states of memory that are made on purpose.

    python benchmarks/fresh_memory.py [--mib 512] [--runs 5] [--processes 1,4] [--folder DIR]

A virtual machine's host may take freed memory back, and allocate it again page by page when it is
used. Huge pages are then up to ten times as slow as before, small pages are not. The states:

reused      a program has just freed the memory that the load uses, in small pages
taken back  a program has freed much memory, and the host has had the time to take it back
full        the page cache has filled the memory, so that pages of files must go first
scattered   the free memory is in pieces of 1 MiB, between pages of files

The files of the model stay in the page cache. Each run is a new process, or several at once; its
time includes touching every page of the tensors. The contenders alternate, and the state is made
before each run.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
STATES = ("reused", "taken back", "full", "scattered")
REPORT_SECONDS = 6.0  # Linux reports free memory to the host after two seconds

CHILD = """
import sys, time
import torch
from fastsafetensors.torch import load_file
from safetensors.torch import load_file as load_with_safetensors

def ours(path):
    return load_file(path, mode="load")

def ours_converted(path):
    return load_file(path, dtype="bfloat16")

def safetensors(path):
    return {name: tensor.clone() for name, tensor in load_with_safetensors(path).items()}

def safetensors_converted(path):
    return {name: tensor.to(torch.bfloat16) for name, tensor in load_with_safetensors(path).items()}

torch.ones(1).to(torch.bfloat16)
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
tensors = globals()[sys.argv[1]](sys.argv[2])
for tensor in tensors.values():
    tensor.view(torch.uint8).flatten()[::4096].sum()
print(begin, time.monotonic(), flush=True)
sys.stdin.readline()
"""
NAMES = ("ours", "safetensors", "ours_converted", "safetensors_converted")


def available_bytes() -> int:
    """Memory that programs can get."""
    rows = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable"))


def use_memory(size: int, pages: str) -> None:
    """Let another process allocate memory, write to it and end; pages: "HUGE" or "NOHUGE"."""
    code = (f"import mmap; m = mmap.mmap(-1, {size}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
            f"m.madvise(mmap.MADV_{pages}PAGE); block = bytes(1 << 21)\n"
            f"for _ in range({size >> 21}): m.write(block)")
    subprocess.run([sys.executable, "-c", code], check=True)


def read_sparse(folder: pathlib.Path, size: int) -> pathlib.Path:
    """Fill the page cache with a file that has no blocks on the disk."""
    path = folder / "sparse"
    with path.open("wb") as file:
        file.truncate(size)
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 << 20)
        while file.readinto(buffer):
            pass
    return path


def punch(path: pathlib.Path) -> None:
    """Free every second MiB of the page cache's part of a file."""
    with path.open("rb") as file:
        for at in range(0, path.stat().st_size, 2 << 20):
            os.posix_fadvise(file.fileno(), at, 1 << 20, os.POSIX_FADV_DONTNEED)


def make_state(state: str, folder: pathlib.Path, model: pathlib.Path, size: int) -> None:
    """Make a state of memory; the model is in the page cache afterwards."""
    left = available_bytes()
    if state == "reused":
        use_memory(min(2 * size, left // 2), "NOHUGE")
    elif state == "taken back":
        use_memory(left * 3 // 4, "HUGE")
        time.sleep(REPORT_SECONDS)
    else:
        path = read_sparse(folder, left)
        if state == "scattered":
            punch(path)
            time.sleep(REPORT_SECONDS)
    with model.open("rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=1) as view:
        sum(view[at] for at in range(0, len(view), 4096))


def run_group(name: str, path: pathlib.Path, count: int, prepare: Callable[[], None]) -> float:
    """Seconds until the last of some processes has its tensors.

    prepare: makes the state of memory, after the processes have imported their modules.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    group = [subprocess.Popen([sys.executable, "-c", CHILD, name, str(path)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
             for _ in range(count)]
    rows = []
    for process in group:
        assert process.stdout is not None
        process.stdout.readline()
    prepare()
    for process in group:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in group:
        assert process.stdout is not None
        rows.append([float(word) for word in process.stdout.readline().split()])
    for process in group:
        process.communicate("\n")
    return max(end for _, end in rows) - min(begin for begin, _ in rows)


def main() -> None:
    """Run all states, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processes", default="1,4")
    parser.add_argument("--only", default=",".join(STATES))
    parser.add_argument("--folder", default=str(ROOT / "build"))
    options = parser.parse_args()
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = pathlib.Path(work)
        model = folder / "model.safetensors"
        rows = options.mib << 20 >> 17
        save_file({f"t{i}": torch.randn(rows, 1024) for i in range(32)}, model)
        print(f"{options.mib} MiB of F32, {os.cpu_count()} CPUs, {options.runs} runs, "
              f"{available_bytes() >> 30} GiB available")
        print("| state | processes | contender | seconds | ratio |\n|---|---|---|---|---|")
        for state in options.only.split(","):
            for count in map(int, options.processes.split(",")):
                times: dict[str, list[float]] = {name: [] for name in NAMES}
                for run in range(options.runs):
                    for at in range(len(NAMES)):
                        name = NAMES[(run + at) % len(NAMES)]
                        times[name].append(run_group(name, model, count, lambda s=state: make_state(
                            s, folder, model, options.mib << 20)))
                for ours, other in (NAMES[:2], NAMES[2:]):
                    for name in (ours, other):
                        middle, spread = statistics.median(times[name]), sorted(times[name])
                        ratio = statistics.median(times[other]) / middle
                        print(f"| {state} | {count} | {name} | {middle:.3f} [{spread[0]:.3f}-"
                              f"{spread[-1]:.3f}] | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
