# SPDX-License-Identifier: Apache-2.0
"""Compares processes of one machine that load the same model at the same time.

    python benchmarks/node_loads.py [--mib 512] [--runs 3] [--processes 1,2,4,8]
                                    [--only disk,files-5ms,files-50ms,http,slow]
                                    [--contenders mapped,sharded] [--folder DIR]

The model has eight files of F32. Sources: the disk, with an empty page cache; a file system that
answers each read after 5 or 50 ms (slow_files.c; needs root and /dev/fuse), likewise; nginx; and
nginx behind a relay with 60 MB/s per connection after a delay of 30 ms ("slow"). Each contender is
one function of FUNCTIONS, which every process calls after a common start; it touches every page
that it got. "sharded": every process loads its part of each tensor, in turns of the rows and of the
columns, as tensor-parallel ranks do. Contenders are interleaved, and every run is a group of new
processes.

time     seconds until the last process has its weights
read     bytes that came from the disk (/proc/PID/io), from the slow file system by its own count,
         or over the loopback interface, times those of the model
memory   by how much the sum of the processes' proportional set sizes (PSS) has grown, times the
         bytes of the tensors
cpu      processor seconds of all processes together
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python" / "tests"), str(ROOT / "benchmarks")]
FILES = 8

# Runs in each process: argv is the function's name, the number of this process, and the paths.
CHILD = """
import json, os, sys, time
import torch
from fastsafetensors.torch import load_file

name, number, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def mapped():
    return load_file(paths)

def converted(**more):
    return load_file(paths, dtype="bfloat16", **more)

def converted_shared():
    return converted(share="node")

def owned(**more):
    return load_file(paths, mode="load", **more)

def owned_shared():
    return owned(share="node")

def safetensors_mapped():
    from safetensors.torch import load_file as load_one
    return {key: value for path in paths for key, value in load_one(path).items()}

def safetensors_converted():
    return {key: value.to(torch.bfloat16) for key, value in safetensors_mapped().items()}

def prefetched():
    # vLLM's way: threads read a share of the files into the page cache, then every file is mapped.
    from concurrent.futures import ThreadPoolExecutor
    def read(path):
        with open(path, "rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, paths[number % len(paths)::max(1, COUNT)]))
    return safetensors_mapped()

def cuts():
    # Of each tensor: the dimension to divide.
    return {f"t{file}.{i}": i % 2 for file in range(len(paths)) for i in range(8)}

def sharded():
    from fastsafetensors.distributed import load_sharded
    return load_sharded(paths, cuts(), torch.distributed.group.WORLD)

def slices(safe_open):
    found = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for key in file.keys():
                part = file.get_slice(key)
                dim = cuts()[key]
                size = part.get_shape()[dim] // COUNT
                own = slice(number * size, (number + 1) * size)
                found[key] = part[own] if dim == 0 else part[:, own].contiguous()
    return found

def safetensors_sharded():
    from safetensors import safe_open
    return slices(safe_open)

def sliced():
    from fastsafetensors import safe_open
    return slices(safe_open)

def prefetched_sharded():
    prefetched()
    return safetensors_sharded()

def number_in(path, key):
    return next(int(row.split()[1]) for row in open(path) if row.startswith(key))

def memory():
    return number_in("/proc/self/smaps_rollup", "Pss:") * 1024

COUNT = int(os.environ["NODE_PROCESSES"])
torch.ones(1)
if name == "sharded":
    torch.distributed.init_process_group("gloo", init_method=os.environ["NODE_STORE"],
                                         rank=number, world_size=COUNT)
    torch.distributed.barrier()  # the ranks' connections, which their program needs anyway
before = memory()
print("ready", flush=True)
sys.stdin.readline()
begin = time.clock_gettime(time.CLOCK_MONOTONIC)
used = time.process_time()
tensors = globals()[name]()
total = sum(int(value.view(torch.uint8).flatten()[::4096].sum()) for value in tensors.values())
end = time.clock_gettime(time.CLOCK_MONOTONIC)
used = time.process_time() - used
print("loaded", flush=True)
sys.stdin.readline()
print(json.dumps({"begin": begin, "end": end, "cpu": used, "sum": total,
                  "pss": memory() - before,
                  "read": number_in("/proc/self/io", "read_bytes:")}), flush=True)
sys.stdin.readline()
"""

# Of each source: the contenders, ours first.
PARTS = ["sharded", "sliced", "safetensors_sharded", "prefetched_sharded"]
ON_FILES = ["mapped", "safetensors_mapped", "prefetched", "converted_shared", "converted",
             "safetensors_converted", *PARTS]
FUNCTIONS = {
    "disk": ON_FILES,
    "files": ON_FILES,
    "http": ["owned_shared", "owned"],
    "slow": ["owned_shared", "owned"],
}


def forget_shared() -> None:
    """Remove shared memory of earlier groups."""
    from fastsafetensors._base.command import find_command

    subprocess.run([str(find_command()), "cache", "drop", "all"], check=True,
                   stdout=subprocess.DEVNULL)


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried."""
    rows = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(row.split(":")[1].split()[0]) for row in rows if row.strip().startswith("lo:"))


def build(name: str, folder: pathlib.Path) -> str:
    """Compile a program of this folder; its path."""
    subprocess.run([shutil.which("cc") or "gcc", "-O2", "-D_GNU_SOURCE", f"benchmarks/{name}.c",
                    "-o", str(folder / name), "-pthread"], cwd=ROOT, check=True)
    return str(folder / name)


@contextlib.contextmanager
def slow_files(program: str, folder: pathlib.Path, delay_ms: int) -> Iterator[pathlib.Path]:
    """Mount a folder as a distant file system."""
    mount = folder.parent / f"{folder.name}-mounted"
    mount.mkdir(exist_ok=True)
    with subprocess.Popen([program, str(folder), str(mount), str(delay_ms)],
                          stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield mount
        finally:
            subprocess.run(["umount", str(mount)], check=False)
            process.kill()
            mount.rmdir()


def write_files(folder: pathlib.Path, mib: int) -> list[pathlib.Path]:
    """Write the model."""
    import torch
    from safetensors.torch import save_file

    paths = []
    for number in range(FILES):
        path = folder / f"node-{number}.safetensors"
        rows = mib * (1 << 20) // FILES // 4 // 1024 // 8
        save_file({f"t{number}.{i}": torch.randn(rows, 1024) for i in range(8)}, path)
        path.chmod(0o644)
        paths.append(path)
    os.sync()
    return paths


def bytes_carried(source: str, paths: list[str]) -> int:
    """What a source has delivered until now."""
    if source.startswith("files"):
        found = os.statvfs(os.path.dirname(paths[0]))
        return found.f_blocks * 4096
    return loopback_bytes() // (2 if source == "slow" else 1)  # to the relay, and on


def run_group(source: str, name: str, count: int, paths: list[str],
              folder: str) -> dict[str, float]:
    """Load in some processes at once; return what was measured. `folder` is empty."""
    environment = {**os.environ, "NODE_PROCESSES": str(count), "OMP_NUM_THREADS": "1",
                   "NODE_STORE": f"file://{folder}/store"}
    group = [subprocess.Popen([sys.executable, "-c", CHILD, name, str(number), *paths],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env=environment) for number in range(count)]

    def tell_all() -> None:
        for process in group:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def hear_all() -> list[str]:
        return [process.stdout.readline() for process in group if process.stdout is not None]

    with contextlib.ExitStack() as stack:
        for process in group:
            stack.enter_context(process)
            stack.callback(process.kill)
        hear_all()
        carried = bytes_carried(source, paths)
        tell_all()
        hear_all()
        carried = bytes_carried(source, paths) - carried
        tell_all()
        rows = [json.loads(row) for row in hear_all()]
        tell_all()
        for process in group:
            process.wait()
    sums = {row["sum"] for row in rows}
    assert name in PARTS or len(sums) == 1, f"{name}: the processes got different bytes"
    return {"time": max(row["end"] for row in rows) - min(row["begin"] for row in rows),
            "read": sum(row["read"] for row in rows) if source == "disk" else carried,
            "pss": sum(row["pss"] for row in rows), "cpu": sum(row["cpu"] for row in rows)}


def measure(source: str, paths: list[str], counts: list[int], options: Any) -> None:
    """Run all contenders of a source, interleaved; print a table."""
    from compare_loads import evict

    size, found = options.mib << 20, {}
    for _ in range(options.runs):
        for name in FUNCTIONS[source.partition("-")[0]]:
            if options.contenders and name not in options.contenders.split(","):
                continue
            for count in counts:
                if not paths[0].startswith("http"):
                    for path in paths:
                        evict(path)
                forget_shared()
                with tempfile.TemporaryDirectory() as empty:
                    figures = run_group(source, name, count, paths, empty)
                found.setdefault((name, count), []).append(figures)
                time.sleep(0.2)
    print(f"\n| {source} | processes | time | read | memory | cpu |\n|---|---|---|---|---|---|")
    for (name, count), rows in found.items():
        times = sorted(row["time"] for row in rows)
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        held = size / (2 if "converted" in name else 1)
        spread = f"{statistics.median(times):.2f} [{times[0]:.2f}-{times[-1]:.2f}]"
        ratios = (middle["read"] / size, middle["pss"] / held, middle["cpu"])
        print(f"| {name} | {count} | {spread} |", " | ".join(f"{x:.2f}" for x in ratios), "|",
              flush=True)


def main() -> int:
    """Measure all sources."""
    from compare_remote import relay
    from store_servers import find_program, nginx

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--only", default="disk,files-5ms,files-50ms,http,slow")
    parser.add_argument("--contenders", help="only these functions, with commas")
    parser.add_argument("--folder", default=str(ROOT / "build"))
    options = parser.parse_args()
    counts = [int(word) for word in options.processes.split(",")]
    sources = options.only.split(",")
    with tempfile.TemporaryDirectory(dir=options.folder) as work, contextlib.ExitStack() as stack:
        folder = pathlib.Path(work)
        folder.chmod(0o755)
        files = write_files(folder, options.mib)
        print(f"{options.mib} MiB in {FILES} files, {os.cpu_count()} CPUs, {options.runs} runs")
        if "disk" in sources:
            measure("disk", [str(path) for path in files], counts, options)
        for source in sources:
            if not source.startswith("files"):
                continue
            if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
                print(f"{source} needs root and /dev/fuse")
                continue
            delay_ms = int(source.removeprefix("files-").removesuffix("ms"))
            with slow_files(build("slow_files", folder), folder, delay_ms) as mount:
                measure(source, [str(mount / path.name) for path in files], counts, options)
        if "http" not in sources and "slow" not in sources:
            return 0
        if find_program("nginx") is None:
            print("nginx is not installed: no rows for http and slow")
            return 0
        url = stack.enter_context(nginx(folder / "nginx", folder))
        if "http" in sources:
            measure("http", [url + path.name for path in files], counts, options)
        if "slow" in sources:
            url = stack.enter_context(relay(build("slow_relay", folder), url))
            measure("slow", [url + path.name for path in files], counts, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
