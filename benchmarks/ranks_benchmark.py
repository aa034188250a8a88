# SPDX-License-Identifier: Apache-2.0
"""Compares ranks of a gloo group that load a model of 1 GiB in parts with fastsafetensors 0.5.

    python benchmarks/ranks_benchmark.py [--ranks 4] [--runs 5] [--peer-venv DIR] [--cold]

Every matrix is cut along its rows. Each run is a new group of processes, and contestants are
interleaved.
The time is that of the slowest rank, from a barrier on; bytes are those read by all ranks together;
peak is the largest of the resident sets of the ranks above what they were before.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

CONTESTANTS = {
    "load_sharded, slice": False, "load_sharded, scatter": False, "load_sharded, auto": False,
    "get_sharded": False, "ParallelLoader": False, "0.5 get_sharded": True,
    "0.5 ParallelLoader": True,
}
LAYERS, ROWS, COLUMNS = 64, 4096, 2048


def make_files(folder, count=4):
    """Return the paths of a model of 1 GiB in some files."""
    from compare_loads import write_model

    paths = []
    for number in range(count):
        path = folder / f"ranks-{number}.safetensors"
        if not path.exists():
            share = LAYERS // count
            write_model(path, {f"layer.{number * share + i}.weight": (ROWS, COLUMNS)
                               for i in range(share)})
        paths.append(str(path))
    return paths


def status(name):
    """A number of /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def with_loader(group, paths, sharded):
    """Load with the API of 0.5, which both packages have."""
    from fastsafetensors import ParallelLoader, SafeTensorsFileLoader

    result = {}
    if not sharded:
        loader = ParallelLoader(group, paths, use_tqdm_on_load=False, device="cpu", nogds=True)
        for name, tensor in loader.iterate_weights():
            block = tensor.shape[0] // group.size()
            result[name] = tensor[group.rank() * block :][:block].clone()
        loader.close()
        return result, 0
    loader = SafeTensorsFileLoader(group, "cpu", nogds=True)
    loader.add_filenames({rank: paths[rank :: group.size()] for rank in range(group.size())})
    buffer = loader.copy_files_to_device()
    result = {name: buffer.get_sharded(name, 0) for name in list(buffer.key_to_rank_lidx)}
    buffer.close()
    loader.close()
    return result, 0


def load(contestant, group, paths):
    """({name: part}, bytes read)."""
    if not contestant.startswith("load_sharded"):
        return with_loader(group, paths, "sharded" in contestant)
    from fastsafetensors.distributed import load_sharded

    dims = {f"layer.{i}.weight": 0 for i in range(LAYERS)}
    got = load_sharded(paths, dims, group, strategy=contestant.rpartition(" ")[2])
    return got, got.stats["bytes_read"]


def child(order):
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = order["rank"], order["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank,
                            world_size=size)
    dist.all_reduce(torch.zeros(1))
    __import__("fastsafetensors")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    result, read = load(order["contestant"], dist.group.WORLD, order["paths"])
    dist.barrier()
    seconds = time.perf_counter() - start
    check = sum(int(t.view(torch.int16).view(-1)[:: 1 << 16].long().sum()) for t in result.values())
    numbers = torch.tensor([read, check], dtype=torch.long)
    dist.all_reduce(numbers)
    peak = torch.tensor([status("VmHWM") - before])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "read": numbers[0].item(),
                          "check": numbers[1].item(), "peak": peak.item()}), flush=True)
    dist.barrier()
    os._exit(0)


def run(contestant, paths, ranks, python):
    """One run of a group of processes."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [json.dumps({"contestant": contestant, "paths": paths, "rank": rank, "ranks": ranks,
                            "store": f"{folder}/store"}) for rank in range(ranks)]
        started = [subprocess.Popen([python, __file__, "--child", job], stdout=subprocess.PIPE,
                                    text=True) for job in jobs]
        said = [process.communicate(timeout=300)[0] for process in started]
    return json.loads(said[0].splitlines()[-1])


def set_cache(paths, cold):
    """Drop the files' pages, or read them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        while not cold and os.read(fd, 1 << 24):
            pass
        os.close(fd)


def agreement(ranks, folder):
    """Return the milliseconds of the ranks' agreement on a file of 20,000 tensors. Each rank is a
    separate program."""
    from compare_loads import make_files as bench_files

    code = """
import sys, time, torch.distributed as dist
from fastsafetensors import SafeTensorsFileLoader
path, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
times = []
for _ in range(9):
    loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu")
    loader.add_filenames({0: [path]})
    dist.barrier()
    start = time.perf_counter()
    from fastsafetensors.st_types import DType
    loader.agreement.agree("the load", loader._describe(DType.AUTO))
    times.append(1e3 * (time.perf_counter() - start))
if rank == 0:
    print(sorted(times)[len(times) // 2], min(times), max(times))
dist.barrier()
"""
    path = bench_files("small", folder)[0]
    with tempfile.TemporaryDirectory() as store:
        started = [subprocess.Popen([sys.executable, "-c", code, path, f"{store}/s", str(rank),
                                     str(ranks)], stdout=subprocess.PIPE, text=True)
                   for rank in range(ranks)]
        return [float(x) for x in started[0].communicate()[0].split()]


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--peer-venv", help="environment with the PyPI package of our name")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/bench"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    paths = make_files(arguments.folder)
    names = [name for name, peer in CONTESTANTS.items() if arguments.peer_venv or not peer]
    results = {name: [] for name in names}
    order = names * arguments.runs
    random.shuffle(order)
    for name in order:
        python = f"{arguments.peer_venv}/bin/python" if CONTESTANTS[name] else sys.executable
        set_cache(paths, arguments.cold)
        results[name].append(run(name, paths, arguments.ranks, python))
    assert len({r["check"] for rs in results.values() for r in rs}) == 1, "the bytes differ"
    print(f"{arguments.ranks} ranks, {'cold' if arguments.cold else 'hot'}, {arguments.runs} runs")
    print(f"{'':24}{'ms':>8}{'spread':>16}{'read, MiB':>12}{'peak, MiB':>12}")
    for name, runs in results.items():
        times = [1e3 * r["seconds"] for r in runs]
        read = statistics.median(r["read"] for r in runs) / (1 << 20)
        peak = statistics.median(r["peak"] for r in runs) / (1 << 20)
        print(f"{name:24}{statistics.median(times):8.0f}{min(times):9.0f}-{max(times):<6.0f}"
              f"{read or float('nan'):12.0f}{peak:12.0f}")
    print("agreement on 20,000 tensors, ms: {:.2f} [{:.2f}-{:.2f}]".format(
        *agreement(arguments.ranks, arguments.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
