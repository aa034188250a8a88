# SPDX-License-Identifier: Apache-2.0
"""Compares loads by several packages on your machine: ``python benchmarks/compare_loads.py``.

Every timed run is a separate process. Runs are interleaved at random, the loaded bytes are
checked, and medians are shown with their spread, CPU seconds and peak memory. Before the clock
starts, each process allocates and frees a large block of huge pages, so that the memory of the load
is already backed by the host. (On virtual machines the first touch of other memory can cost more
than the load.) Then the file is put into the page cache, or removed from it, as the scenario
requires.

Contestants in another environment (``--peer-venv``) run this file by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
POPULATE_WRITE = 23

# ---- files ----


def write_model(path: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a BF16 model of pseudo-random bytes; blocks differ from one another."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset,
                                                                                 offset + size]}
        offset += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    block = random.Random(7).randbytes(MIB)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for start in range(0, offset, MIB):
            part = struct.pack("<Q", start) + block[8:]
            file.write(part[: min(MIB, offset - start)])
        file.flush()
        os.fsync(file.fileno())


def even(count: int, mib_each: float) -> dict[str, tuple[int, ...]]:
    """Shapes of `count` matrices of about `mib_each` MiB."""
    rows = max(1, int(mib_each * MIB / 2 / 1024))
    return {f"model.layers.{i}.mlp.weight": (rows, 1024) for i in range(count)}


FILES: dict[str, Callable[[], dict[str, dict[str, tuple[int, ...]]]]] = {
    "1g": lambda: {"1g.safetensors": even(64, 16)},
    "400m": lambda: {"400m.safetensors": even(50, 8)},
    "25m": lambda: {"25m.safetensors": even(50, 0.5)},
    "small": lambda: {"small.safetensors": {f"t.{i}.lora_A.weight": (512,) for i in range(20000)}},
    "shards": lambda: {f"shard-{s}.safetensors": {f"s{s}.{n}": shape
                                                  for n, shape in even(32, 16).items()}
                       for s in range(4)},
    "big": lambda: {"big.safetensors": {"w": (16384, 16384)}},
    "names10k": lambda: {"names10k.safetensors": {f"model.layers.{i}.x.weight": (1,)
                                                  for i in range(10000)}},
    "names100k": lambda: {"names100k.safetensors": {f"model.layers.{i}.x.weight": (1,)
                                                    for i in range(100000)}},
}


def make_files(kind: str, folder: pathlib.Path) -> list[str]:
    """Return the paths of a kind of file, written if need be."""
    paths = []
    for name, shapes in FILES[kind]().items():
        path = folder / name
        if not path.exists():
            write_model(path, shapes)
        paths.append(str(path))
    return paths


def make_pickle(paths: list[str], folder: pathlib.Path) -> str:
    """Return the path of the same tensors as torch.save writes them."""
    import torch
    from safetensors.torch import load_file

    path = folder / (pathlib.Path(paths[0]).stem + ".pt")
    if not path.exists():
        torch.save(load_file(paths[0]), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return str(path)


# ---- cache states ----


def drop_caches() -> bool:
    """Drop all clean pages. False without the permission."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    except OSError:
        return False
    return True


def evict(path: str) -> None:
    """Ask the kernel to drop one file's pages."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm(path: str, part: float = 1.0) -> None:
    """Read the first part of a file into the page cache."""
    left = int(os.path.getsize(path) * part)
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(8 * MIB)
        while left > 0:
            got = file.readinto(buffer)
            if not got:
                break
            left -= got


def set_state(paths: list[str], state: str) -> None:
    """Put the files in a cache state: cold, half or hot."""
    if state != "hot" and not drop_caches():
        for path in paths:
            evict(path)
    for path in paths:
        if state == "half":
            warm(path, 0.5)
        elif state == "hot":
            warm(path)


# ---- contestants: each returns what it loaded; a dict of tensors is checked ----


def ours(mode: str) -> Callable[[list[str]], Any]:
    """Our load_file in a mode."""

    def load(paths: list[str]) -> Any:
        from fastsafetensors.torch import load_file

        return load_file(paths if len(paths) > 1 else paths[0], mode=mode)

    return load


def ours_reused(paths: list[str]) -> Any:
    """Our load into memory kept from an earlier load."""
    from fastsafetensors.torch import load_file

    return load_file(paths[0], mode="load")


def reference(paths: list[str]) -> Any:
    """The safetensors package: views of a mapping."""
    from safetensors.torch import load_file

    result: dict[str, Any] = {}
    for path in paths:
        result.update(load_file(path))
    return result


def reference_clone(paths: list[str]) -> Any:
    """The safetensors package, cloned: tensors that own their memory."""
    return {name: tensor.clone() for name, tensor in reference(paths).items()}


def pickled(paths: list[str]) -> Any:
    """Load by torch.load of the same tensors."""
    import torch

    return torch.load(paths[0], weights_only=True)


def streamer(paths: list[str]) -> Any:
    """Run:ai model streamer, cloned as its documentation asks for."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as stream:
        stream.stream_files(paths)
        return {name: tensor.clone() for name, tensor in stream.get_tensors()}


def plain_read(paths: list[str]) -> Any:
    """One thread of 8 MiB reads into huge pages: no tensors are made."""
    held = []
    for path in paths:
        size = os.path.getsize(path)
        memory = mmap.mmap(-1, size + 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        view, done = memoryview(memory), 0
        with open(path, "rb", buffering=0) as file:
            while done < size:
                done += file.readinto(view[done : min(done + 8 * MIB, size)]) or size
        held.append(view)
    return held


def upstream(paths: list[str]) -> Any:
    """Load with the PyPI package fastsafetensors, in a separate environment."""
    import importlib

    package: Any = importlib.import_module("fastsafetensors")
    loader = package.SafeTensorsFileLoader(package.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: paths})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}


def sum_of(tensors: dict[str, Any]) -> int:
    """Read every byte of all tensors, with one thread per CPU."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    def add(tensor: Any) -> int:
        return int(tensor.view(-1).view(torch.int64).sum())

    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(add, tensors.values())) & (1 << 64) - 1


def and_read(load: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Load, then read every byte inside of the timed part."""

    def work(paths: list[str]) -> Any:
        tensors = load(paths)
        sum_of(tensors)
        return tensors

    return work


def names_ours(paths: list[str]) -> Any:
    """Open and list the names."""
    from fastsafetensors import safe_open

    with safe_open(paths[0], framework="pt") as file:
        return file.keys()


def names_reference(paths: list[str]) -> Any:
    """Open and list the names with the safetensors package."""
    from safetensors import safe_open

    with safe_open(paths[0], framework="pt") as file:
        return file.keys()


def part(package: str, key: Any, names: list[str]) -> Callable[[list[str]], Any]:
    """Read tensors, or a slice of them, through safe_open and copy what is a view."""

    def work(paths: list[str]) -> Any:
        import importlib

        safe_open = importlib.import_module(package).safe_open
        with safe_open(paths[0], framework="pt") as file:
            if key is None:
                return [file.get_tensor(name).sum() for name in names]
            return [file.get_slice(name)[key].sum() for name in names]

    return work


THREE = [f"model.layers.{i}.mlp.weight" for i in (3, 30, 60)]
ROWS, COLUMNS = slice(0, 8192), (slice(None), slice(0, 8192))

CONTESTANTS: dict[str, Callable[[list[str]], Any]] = {
    "ours load": ours("load"),
    "ours map": ours("map"),
    "ours auto": ours("auto"),
    "ours reused": ours_reused,
    "safetensors": reference,
    "safetensors + clone": reference_clone,
    "torch.load": pickled,
    "Run:ai + clone": streamer,
    "plain read": plain_read,
    "fastsafetensors 0.5": upstream,
    "ours auto, all bytes": and_read(ours("auto")),
    "ours map, all bytes": and_read(ours("map")),
    "safetensors, all bytes": and_read(reference),
    "ours names": names_ours,
    "safetensors names": names_reference,
    "ours 3 tensors": part("fastsafetensors", None, THREE),
    "safetensors 3 tensors": part("safetensors", None, THREE),
    "ours rows": part("fastsafetensors", ROWS, ["w"]),
    "safetensors rows": part("safetensors", ROWS, ["w"]),
    "ours columns": part("fastsafetensors", COLUMNS, ["w"]),
    "safetensors columns": part("safetensors", COLUMNS, ["w"]),
}

OWNING = ["ours load", "safetensors + clone", "torch.load", "Run:ai + clone", "plain read",
          "fastsafetensors 0.5"]
READING = ["ours auto, all bytes", "safetensors, all bytes"]
# (title, kind of file, cache state, contestants); the first one is ours.
SCENARIOS: list[tuple[str, str, str, list[str]]] = [
    ("1 GiB cold, owned tensors", "1g", "cold", OWNING),
    ("1 GiB cold, every byte read", "1g", "cold", READING),
    ("1 GiB half cached, owned tensors", "1g", "half", OWNING),
    ("1 GiB hot, owned tensors", "1g", "hot", OWNING),
    ("1 GiB hot, owned tensors, memory reused", "1g", "hot", ["ours reused", "plain read"]),
    ("1 GiB hot, views", "1g", "hot", ["ours map", "safetensors"]),
    ("1 GiB hot, every byte read", "1g", "hot", ["ours map, all bytes", "safetensors, all bytes"]),
    ("4 x 512 MiB cold, owned tensors", "shards", "cold",
     [c for c in OWNING if c != "torch.load"]),
    ("4 x 512 MiB hot, owned tensors", "shards", "hot", [c for c in OWNING if c != "torch.load"]),
    ("400 MB cold, owned tensors", "400m", "cold", OWNING),
    ("400 MB hot, owned tensors", "400m", "hot", OWNING),
    ("25 MB cold, owned tensors", "25m", "cold", OWNING),
    ("25 MB hot, owned tensors", "25m", "hot", OWNING),
    ("25 MB hot, views", "25m", "hot", ["ours map", "safetensors"]),
    ("20,000 x 1 KB hot", "small", "hot", ["ours auto", "safetensors", "safetensors + clone",
                                          "torch.load", "Run:ai + clone", "fastsafetensors 0.5"]),
    ("open + names of 10,000", "names10k", "hot", ["ours names", "safetensors names"]),
    ("open + names of 100,000", "names100k", "hot", ["ours names", "safetensors names"]),
    ("3 tensors of 1 GiB, cold", "1g", "cold", ["ours 3 tensors", "safetensors 3 tensors"]),
    ("half of 512 MiB along dim 0, cold", "big", "cold", ["ours rows", "safetensors rows"]),
    ("half of 512 MiB along dim 0, hot", "big", "hot", ["ours rows", "safetensors rows"]),
    ("half of 512 MiB along dim 1, cold", "big", "cold", ["ours columns", "safetensors columns"]),
    ("half of 512 MiB along dim 1, hot", "big", "hot", ["ours columns", "safetensors columns"]),
]
YARDSTICKS = {"plain read"}  # shown for comparison: makes no tensors, so it is no peer


# ---- one timed run, in its own process ----


def hold_ballast(size: int) -> None:
    """Touch and drop `size` bytes of huge pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), POPULATE_WRITE) != 0:
        ctypes.memset(address, 1, size)


def child(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one run and measure it."""
    contestant, paths = CONTESTANTS[order["contestant"]], order["paths"]
    warm_up(order["contestant"])
    if order["contestant"] == "ours reused":
        from fastsafetensors import keep_memory

        keep_memory(4 << 30)
        contestant(paths)
    hold_ballast(order["ballast"])
    set_state(paths, order["state"])
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from here
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    result = contestant(paths)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu": cpu, "peak": peak_memory(), "check": check_of(result)}


def warm_up(name: str) -> None:
    """Import the contestant's modules before the clock starts."""
    if name == "plain read":
        return
    import torch

    torch.zeros(1).sum()
    if name.startswith("ours"):
        from fastsafetensors import safe_open  # noqa: F401
        from fastsafetensors.torch import load_file  # noqa: F401
    elif name.startswith("safetensors"):
        import safetensors.torch  # noqa: F401
    elif name.startswith("Run:ai"):
        import runai_model_streamer  # noqa: F401
    elif name.startswith("fastsafetensors"):
        import fastsafetensors  # noqa: F401


def peak_memory() -> int:
    """Bytes of the largest resident set since it was reset."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def check_of(result: Any) -> Any:
    """What must be equal among contestants."""
    if isinstance(result, dict):
        return [len(result), sum_of(result) if next(iter(result.values())).numel() % 4 == 0
                else len(result)]
    if result and isinstance(result[0], str):
        return [len(result), sorted(result)[0], sorted(result)[-1]]
    if result and hasattr(result[0], "item"):
        return [str(t.item()) for t in result]
    return None


# ---- the whole ----


class Bench:
    """Runs scenarios and collects their results."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Prepare the folder of files."""
        self.arguments = arguments
        self.folder = pathlib.Path(arguments.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.skipped: dict[str, str] = {}

    def python_of(self, contestant: str) -> str | None:
        """Return the interpreter that runs a contestant, or None with the reason kept."""
        if contestant == "fastsafetensors 0.5":
            venv = self.arguments.peer_venv
            if not venv:
                self.skipped[contestant] = "no --peer-venv"
                return None
            return str(pathlib.Path(venv) / "bin/python")
        module = {"safetensors": "safetensors", "Run:ai + clone": "runai_model_streamer"}
        needed = module.get(contestant, "safetensors" if "safetensors" in contestant else None)
        if needed:
            import importlib.util

            if importlib.util.find_spec(needed) is None:
                self.skipped[contestant] = f"{needed} is not installed"
                return None
        return sys.executable

    def run_once(self, scenario: tuple[str, str, str, list[str]], contestant: str) -> Any:
        """One run; a dict of measurements, or None where it can't be had."""
        _, kind, state, _ = scenario
        python = self.python_of(contestant)
        if python is None:
            return None
        paths = make_files(kind, self.folder)
        if contestant == "torch.load":
            paths = [make_pickle(paths, self.folder)]
        size = sum(os.path.getsize(p) for p in paths)
        order = {"contestant": contestant, "paths": paths, "state": state,
                 "ballast": max(self.arguments.ballast * MIB, int(2.2 * size))}
        done = subprocess.run([python, __file__, "--child", json.dumps(order)],
                              capture_output=True, text=True)
        if done.returncode:
            self.skipped[contestant] = done.stderr.strip().splitlines()[-1][:160]
            return None
        return json.loads(done.stdout.splitlines()[-1])

    def run_scenario(self, scenario: tuple[str, str, str, list[str]]) -> dict[str, Any]:
        """All runs of a scenario, interleaved at random."""
        title, _, _, names = scenario
        runs: dict[str, list[Any]] = {name: [] for name in names}
        order = [name for name in names for _ in range(self.arguments.runs)]
        random.shuffle(order)
        for number, name in enumerate(order, 1):
            if sys.stderr.isatty():
                print(f"\r{title}: {number} of {len(order)} ", end="", file=sys.stderr)
            measured = self.run_once(scenario, name)
            if measured is not None:
                runs[name].append(measured)
        checks = {json.dumps(r["check"]) for n, rs in runs.items() if n not in YARDSTICKS
                  for r in rs}
        if len(checks) > 1:
            raise SystemExit(f"{title}: contestants do not agree on the bytes: {checks}")
        return {"title": title, "rows": [summary(n, rs) for n, rs in runs.items() if rs]}


def summary(name: str, runs: list[Any]) -> dict[str, Any]:
    """Medians and spread of a contestant's runs."""
    seconds = [r["seconds"] for r in runs]
    return {"name": name, "median": statistics.median(seconds), "low": min(seconds),
            "high": max(seconds), "cpu": statistics.median(r["cpu"] for r in runs),
            "peak": statistics.median(r["peak"] for r in runs), "runs": seconds}


def machine() -> dict[str, str]:
    """Describe the machine without naming it."""
    model = "?"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return {"processor": model, "processors": str(len(os.sched_getaffinity(0))),
            "memory": f"{memory:.1f} GiB", "kernel": os.uname().release.split("-")[0],
            "python": sys.version.split()[0]}


def fio_limit(path: str, runs: int) -> dict[str, Any] | None:
    """Return what fio reads at best from a cold file: 1 MiB direct, depth 8, huge-page buffers."""
    if not shutil.which("fio"):
        return None
    values = []
    for _ in range(runs):
        drop_caches()
        done = subprocess.run(
            ["fio", "--name=limit", f"--filename={path}", "--rw=read", "--bs=1M", "--direct=1",
             "--ioengine=io_uring", "--iodepth=8", "--mem=mmaphuge", "--readonly",
             "--output-format=json"], capture_output=True, text=True)
        if done.returncode:
            return None
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
        values.append(job["read"]["bw_bytes"] / 1e9)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/compare_loads.py",
                                     description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", default="build/bench", help="where files and results go")
    parser.add_argument("--only", help="scenarios whose titles contain this")
    parser.add_argument("--ballast", type=int, default=3072, help="MiB")
    parser.add_argument("--peer-venv", help="environment with the PyPI package of our name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child))))
        return 0
    from bench_report import html_report, print_scenario

    from fastsafetensors import __version__

    bench = Bench(arguments)
    notes = [] if drop_caches() else ["Not root: cold files were evicted one by one, which keeps "
                                      "directory and inode caches warm."]
    results = []
    limit = None
    for scenario in SCENARIOS:
        if arguments.only and arguments.only not in scenario[0]:
            continue
        result = bench.run_scenario(scenario)
        if scenario[0] == SCENARIOS[0][0]:
            limit = fio_limit(make_files("1g", bench.folder)[0], arguments.runs)
        print_scenario(result)
        results.append(result)
    if limit:
        text = (f"fio's limit, cold: {limit['median']:.2f} GB/s "
                f"[{limit['low']:.2f}-{limit['high']:.2f}]")
        print(text)
        notes.append(text + ".")
    for name, reason in bench.skipped.items():
        print(f"left out: {name}: {reason}")
        notes.append(f"Left out: {name} ({reason}).")
    document = {"version": __version__, "runs": arguments.runs, "machine": machine(),
                "notes": " ".join(notes), "scenarios": results}
    (bench.folder / "report.json").write_text(json.dumps(document, indent=1))
    (bench.folder / "report.html").write_text(html_report(document))
    print(f"report: {bench.folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
