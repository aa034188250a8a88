# SPDX-License-Identifier: Apache-2.0
"""Measures the mean time of five loads of one file with fastsafetensors and safetensors.

    python benchmarks/fastsafetensors_benchmark.py [FILE] [--runs 5] [--cold]

Without FILE a transformer of 24 layers, hidden size 4096 (400 MB) is made. Both give tensors that
own their memory (views of safetensors' load_file are cloned), and both reuse the memory of the
load before: by the system's allocator, and by fastsafetensors.keep_memory(). --cold drops the
file's pages before each load; else they are in the page cache.
"""

import argparse
import pathlib
import statistics
import sys
import time

from transformer_files import make_file, set_cache


def measure(load, path, runs, cold):
    """Seconds of each run."""
    times = []
    for _ in range(runs):
        set_cache(path, cold)
        start = time.perf_counter()
        load(path)
        times.append(time.perf_counter() - start)
    return times


def report(times, path):
    """The two lines of a loader."""
    mean = statistics.mean(times)
    print(f"Average loading time: {mean:.4f} seconds")
    print(f"Throughput: {path.stat().st_size / 1e6 / mean:.2f} MB/s")
    print(f"Spread: {min(times):.4f} to {max(times):.4f} seconds")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/bench"))
    arguments = parser.parse_args()
    try:
        from fastsafetensors.fast_loading import is_fastsafetensors_available, load_safetensors
        available = is_fastsafetensors_available()
    except ImportError:
        available = False
    print(f"FastSafeTensors available: {available}")
    if not available and arguments.file is None:
        print("Install with: pip install fastsafetensors")
        return 1
    path = arguments.file or make_file("large", arguments.folder)
    if not path.is_file():
        print(f"no such file: {path}", file=sys.stderr)
        return 2
    print(f"File size: {path.stat().st_size / 1e6:.2f} MB")
    from safetensors.torch import load_file

    means = []
    if available:
        from fastsafetensors import keep_memory

        keep_memory(2 * path.stat().st_size)
        print("\nfastsafetensors")
        measure(load_safetensors, path, 1, arguments.cold)  # the first touch of memory
        times = measure(load_safetensors, path, arguments.runs, arguments.cold)
        report(times, path)
        means.append(statistics.mean(times))
    print("\nsafetensors")

    def load(path):
        return {name: tensor.clone() for name, tensor in load_file(path).items()}

    measure(load, path, 1, arguments.cold)
    times = measure(load, path, arguments.runs, arguments.cold)
    report(times, path)
    means.append(statistics.mean(times))
    if available:
        print(f"\nSpeedup: {means[1] / means[0]:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
