# SPDX-License-Identifier: Apache-2.0
"""Rank 0 of a tensor-parallel Llama of 1 GiB: seconds until its parameters are filled, MiB read.

    python benchmarks/lazy_ranks.py FOLDER [--runs 3] [--ranks 2 8]

Each run is a new process; contestants take turns. Rows of attention inputs, of gate and up and of
the embeddings are cut, columns of attention outputs and of down. MiB are what the process had the
device read; "need" is the size of the rank's parameters.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 2048, 8192, 512, 32000, 7
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head")
COLUMNS = ("o_proj", "down_proj")
WAYS = ("whole", "get_slice", "lazy", "lazy load")


def make_file(path):
    """Write the model."""
    import torch

    from fastsafetensors.torch import save_file

    shapes = {"embed.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in {
            "q_proj": (HIDDEN, HIDDEN), "k_proj": (KV, HIDDEN), "v_proj": (KV, HIDDEN),
            "o_proj": (HIDDEN, HIDDEN), "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN),
            "down_proj": (HIDDEN, INNER), "norm": (HIDDEN,)}.items()})
    save_file({name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}, path)


def cut(name, tensor, ranks):
    """Rank 0's part."""
    for dim, keys in enumerate((ROWS, COLUMNS)):
        if any(key in name for key in keys):
            return tensor.narrow(dim, 0, tensor.shape[dim] // ranks)
    return tensor


def device_bytes():
    """What this process had the device read."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def fill(way, path, ranks, parameters):
    """Fill the parameters."""
    from safetensors import safe_open

    from fastsafetensors.lazy import LazyModel

    if way.startswith("lazy"):
        with LazyModel(path, mode="load" if way == "lazy load" else "auto") as model:
            for name, tensor in model:
                parameters[name].copy_(cut(name, tensor, ranks))
        return
    with safe_open(path, "pt") as file:
        for name, parameter in parameters.items():
            if way == "whole":
                parameter.copy_(cut(name, file.get_tensor(name), ranks))
            else:
                parameter.copy_(file.get_slice(name)[tuple(map(slice, parameter.shape))])


def run(way, path, ranks, cold):
    """One run, in this process: prints seconds, MiB read, MiB needed."""
    import torch

    from fastsafetensors.lazy import LazyModel

    parameters = {name: torch.zeros(tuple(cut(name, tensor, ranks).shape), dtype=tensor.dtype)
                  for name, tensor in LazyModel(path)}
    with open(path, "rb", buffering=0) as file:
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while not cold and file.read(1 << 24):
            pass
    before, start = device_bytes(), time.perf_counter()
    fill(way, path, ranks, parameters)
    seconds = time.perf_counter() - start
    need = sum(parameter.nbytes for parameter in parameters.values())
    print(json.dumps([seconds, (device_bytes() - before) / 2**20, need / 2**20]))


def main():
    """Run all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.folder / "lazy-ranks.safetensors"
    if options.one:
        way, ranks, temperature = options.one
        return run(way, path, int(ranks), temperature == "cold")
    if not path.exists():
        make_file(path)
    found = {}
    cases = [(t, r, w) for t in ("cold", "hot") for r in options.ranks for w in WAYS]
    for _ in range(options.runs):
        for temperature, ranks, way in cases:
            done = subprocess.run(
                [sys.executable, __file__, options.folder, "--one", way, str(ranks), temperature],
                capture_output=True, text=True, check=True)
            found.setdefault((temperature, ranks, way), []).append(json.loads(done.stdout))
    print("| | ranks | way | s | MiB read of needed |\n|---|---|---|---|---|")
    for (temperature, ranks, way), rows in found.items():
        seconds = [row[0] for row in rows]
        print(f"| {temperature} | {ranks} | {way} | {statistics.median(seconds):.3f} "
              f"({min(seconds):.3f}-{max(seconds):.3f}) | "
              f"{statistics.median(row[1] for row in rows):.0f} of {rows[0][2]:.0f} |")
    return None


if __name__ == "__main__":
    main()
