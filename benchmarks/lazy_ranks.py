# SPDX-License-Identifier: Apache-2.0
"""Measures ranks of a tensor-parallel Llama of 1 GiB: seconds until the parameters are filled, and
MiB read.

    python benchmarks/lazy_ranks.py FOLDER [--runs 3] [--ranks 1 2 4 8] [--together]
        [--peer safetensors-rc=PLACE] [--peer runai=PLACE] [--peer fastsafetensors-0.5=PLACE]

Each run is a new process, and contestants are interleaved. PLACE: where a peer was installed (pip
install
--no-deps --target PLACE ..). Rows of attention inputs, of gate and up and of the embeddings are
cut, columns of attention outputs and of down. One rank is measured, or all of them at once
(--together: the slowest one's time, and what all had the device read). "need" is the size of a
rank's parameters. Parameters have been written to before, as an engine's have.
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
# Contestants: their imports, and how they fill parameters.
WAYS = {
    "safetensors, whole": (None, "whole"),
    "safetensors, get_slice": (None, "get_slice"),
    "ours": (None, "lazy"),
    "ours, mode load": (None, "lazy load"),
    "safetensors-rc, whole": ("safetensors-rc", "whole"),
    "safetensors-rc, get_slice": ("safetensors-rc", "get_slice"),
    "runai": ("runai", "runai"),
    "fastsafetensors-0.5": ("fastsafetensors-0.5", "0.5"),
}


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


def cut(name, tensor, rank, ranks):
    """A rank's part."""
    for dim, keys in enumerate((ROWS, COLUMNS)):
        if any(key in name for key in keys):
            size = tensor.shape[dim] // ranks
            return tensor.narrow(dim, rank * size, size)
    return tensor


def device_bytes():
    """Return the bytes that the device read for this process."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def shapes_of(path):
    """Shapes by name, of the header."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def whole_tensors(way, path):
    """Return (name, tensor) of all tensors, for contestants that cannot read parts."""
    if way == "runai":
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path)])
            yield from streamer.get_tensors()
    else:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        for name in loader.get_keys():
            yield name, buffer.get_tensor(name)


def fill(way, path, rank, ranks, parameters):
    """Fill the parameters."""
    if way.startswith("lazy"):
        from fastsafetensors.lazy import LazyModel

        with LazyModel(path, mode="load" if way == "lazy load" else "auto") as model:
            for name, tensor in model:
                parameters[name].copy_(cut(name, tensor, rank, ranks))
        return
    if way in ("runai", "0.5"):
        for name, tensor in whole_tensors(way, path):
            parameters[name].copy_(cut(name, tensor, rank, ranks))
        return
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name, parameter in parameters.items():
            if way == "whole":
                parameter.copy_(cut(name, file.get_tensor(name), rank, ranks))
            else:
                part = file.get_slice(name)
                box = [slice(0, size) for size in part.get_shape()]
                for dim, size in enumerate(parameter.shape):
                    if size != part.get_shape()[dim]:
                        box[dim] = slice(rank * size, rank * size + size)
                parameter.copy_(part[tuple(box)])


def run(way, path, rank, ranks):
    """One rank, in this process, when stdin says so: prints seconds, MiB read, MiB needed."""
    import torch

    if way.startswith("lazy"):
        import fastsafetensors.lazy  # noqa: F401
    elif way == "runai":
        import runai_model_streamer  # noqa: F401
    elif way == "0.5":
        import fastsafetensors  # noqa: F401
    else:
        import safetensors.torch  # noqa: F401
    parameters = {}
    for name, shape in shapes_of(path).items():
        whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        parameters[name] = torch.ones(cut(name, whole, rank, ranks).shape, dtype=torch.bfloat16)
    print("ready", flush=True)
    sys.stdin.readline()
    before, start = device_bytes(), time.perf_counter()
    fill(way, path, rank, ranks, parameters)
    seconds = time.perf_counter() - start
    need = sum(parameter.nbytes for parameter in parameters.values())
    check = sum(float(p.view(-1)[::997].float().sum()) for p in parameters.values())
    print(json.dumps([seconds, (device_bytes() - before) / 2**20, need / 2**20, check]))


def set_cache(path, cold):
    """Drop the file from the page cache, or read it."""
    with open(path, "rb", buffering=0) as file:
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while not cold and file.read(1 << 24):
            pass


def measure(options, contestant, ranks, cold):
    """[seconds of the slowest rank, MiB read by all, MiB needed by one, what was loaded]."""
    package, way = WAYS[contestant]
    environment = dict(os.environ)
    if package is not None:
        environment["PYTHONPATH"] = options.peer[package]
    path = options.folder / "lazy-ranks.safetensors"
    programs = [subprocess.Popen(
        [sys.executable, __file__, options.folder, "--one", way, str(rank), str(ranks)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(ranks if options.together else 1)]
    for program in programs:
        assert program.stdout.readline() == "ready\n", contestant
    set_cache(path, cold)
    for program in programs:
        program.stdin.write("go\n")
        program.stdin.flush()
    rows = [json.loads(program.communicate()[0]) for program in programs]
    return [max(row[0] for row in rows), sum(row[1] for row in rows), rows[0][2],
            [row[3] for row in rows]]


def main():
    """Run all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.folder / "lazy-ranks.safetensors"
    if options.one:
        way, rank, ranks = options.one
        return run(way, path, int(rank), int(ranks))
    if not path.exists():
        make_file(path)
    options.peer = dict(peer.split("=", 1) for peer in options.peer)
    contestants = [c for c, (package, _) in WAYS.items() if package in (None, *options.peer)]
    found, loaded = {}, {}
    for _ in range(options.runs):
        for cold in (True, False):
            for ranks in options.ranks:
                for contestant in contestants:
                    row = measure(options, contestant, ranks, cold)
                    found.setdefault((cold, ranks, contestant), []).append(row)
                    assert loaded.setdefault(ranks, row[3]) == row[3], "values differ"
    print("| | ranks | | s | MiB read of needed |\n|---|---|---|---|---|")
    for (cold, ranks, contestant), rows in sorted(found.items(), key=lambda f: not f[0][0]):
        seconds = [row[0] for row in rows]
        print(f"| {'cold' if cold else 'hot'} | {ranks} | {contestant} | "
              f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) | "
              f"{statistics.median(row[1] for row in rows):.0f} of {rows[0][2]:.0f} |")
    return None


if __name__ == "__main__":
    main()
