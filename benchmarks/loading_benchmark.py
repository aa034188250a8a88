# SPDX-License-Identifier: Apache-2.0
"""Compares loads of small (25 MB) and large (400 MB) transformers with safetensors: time and peak
memory.

    python benchmarks/loading_benchmark.py [--runs 5] [--folder build/bench]

Each run is a separate process, interleaved at random, cold (pages dropped before) and hot. All
tensors own their memory, as training programs need them (safetensors' load_file gives views, which
are cloned here). Peak memory is the largest resident set above what
it was before the load.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

from transformer_files import SIZES, make_file, set_cache

LOADERS = ("fastsafetensors", "safetensors")


def status(name):
    """A number of /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def child(order):
    """One load; prints its figures."""
    import torch

    torch.zeros(1).sum()
    from compare_loads import hold_ballast
    from safetensors.torch import load_file

    from fastsafetensors.fast_loading import load_safetensors

    path = pathlib.Path(order["path"])
    hold_ballast(2 << 30)  # excludes the time that the host needs to provide memory
    set_cache(path, order["cold"])
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    start = time.perf_counter()
    if order["loader"] == "safetensors":
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    else:
        tensors = load_safetensors(path)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": status("VmHWM") - before,
                      "count": len(tensors)}))


def measure(path, cold, runs):
    """{loader: [figures of each run]}."""
    results = {loader: [] for loader in LOADERS}
    order = list(LOADERS) * runs
    random.shuffle(order)
    for loader in order:
        job = {"path": str(path), "cold": cold, "loader": loader}
        done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)],
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        results[loader].append(json.loads(done.stdout.splitlines()[-1]))
    return results


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/bench"))
    parser.add_argument("--only", choices=SIZES, help="one size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    try:
        import fastsafetensors  # noqa: F401
    except ImportError:
        print("FastSafeTensors available: False\nInstall with: pip install fastsafetensors")
        return 1
    print("FastSafeTensors available: True")
    for kind in [arguments.only] if arguments.only else SIZES:
        path = make_file(kind, arguments.folder)
        size = path.stat().st_size / 1e6
        for cold in (True, False):
            print(f"\n{kind}, {'cold' if cold else 'hot'}\nFile size: {size:.2f} MB")
            medians, peaks = [], []
            for loader, runs in measure(path, cold, arguments.runs).items():
                seconds = [run["seconds"] for run in runs]
                mean = statistics.mean(seconds)
                medians.append(statistics.median(seconds))
                peaks.append(statistics.median(run["peak"] for run in runs) / 1e6)
                print(f"{loader}\n  Average loading time: {mean:.4f} seconds "
                      f"({min(seconds):.4f} to {max(seconds):.4f})\n"
                      f"  Throughput: {size / mean:.2f} MB/s\n  Peak memory: {peaks[-1]:.1f} MB")
            print(f"Speedup: {medians[1] / medians[0]:.2f}x, "
                  f"peak memory {100 * (1 - peaks[0] / peaks[1]):.0f} % lower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
