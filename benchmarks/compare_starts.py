#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the first, second and third start of programs that load a model, for several packages
and storage places.

    make bench GRID=1 [BENCH_ARGS="--rounds 5 --places disk,tmpfs --peer NAME=FOLDER"]

Each cell drops the files from the page cache and then starts three times, and once more with half
of each file cached. A start is a separate process, timed from the call to the last byte read. For
long loads the process is forked after the imports. Single tensors and headers are read by new
processes, because a forked process has a copy-on-write fault for every page that it writes to.
Contenders are interleaved in every round, and medians are reported. A peer is a folder made by `pip
install --target FOLDER --no-deps PACKAGE`, named safetensors-rc, runai or fastsafetensors-0.5.
Memory is only warmed in the place "warm memory", because users also wait for the fresh pages of a
virtual machine. The place "fuse" needs bindfs, "512 MiB" needs permission to create a memory
cgroup, and the limit "fio" needs fio. With --forced the contenders are this package's engines and
policies, each forced, and its automatic choice.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

STRANGER = 65534
MODELS = ("25 MB", "100 MB", "1 GiB", "20,000 tensors", "4 shards")
WAYS = ("views", "owned", "three tensors", "header only")
STARTS = ("first", "second", "third", "half")
PLACES = ("disk", "warm memory", "readahead 128K", "tmpfs", "fuse", "stranger", "512 MiB")
START_SECONDS_MAX = 30
GROUP_ROOTS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")


# ---- contenders: each function loads tensors and reads every byte of them ----


kept: list[Any] = []  # freeing the tensors is not part of a start


def touch(tensors: Any) -> int:
    """Read a byte of every page."""
    import torch

    kept[:] = tensors
    return sum(int(x.reshape(-1).view(torch.uint8)[::4096].sum()) for x in kept if x.numel())


def names_of_three(path: str) -> list[str]:
    """Return the names of three tensors at distant offsets."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = sorted(name for name in header if name != "__metadata__")
    return [names[0], names[len(names) // 2], names[-1]]


def through_safe_open(module: Any, way: str, paths: list[str], names: list[str]) -> int:
    """Header and single tensors, by the interface that both packages have."""
    total = 0
    for path in paths if way == "header only" else paths[:1]:
        with module.safe_open(path, framework="pt") as file:
            keys = file.keys()
            total += len(list(keys)) if way == "header only" else touch(
                [file.get_tensor(name) for name in names])
    return total


def run_safetensors(way: str, paths: list[str], names: list[str]) -> int:
    """The reference, 0.8 or newer."""
    import safetensors
    from safetensors.torch import load_file

    if way in ("three tensors", "header only"):
        return through_safe_open(safetensors, way, paths, names)
    tensors = [x for path in paths for x in load_file(path).values()]
    return touch([x.clone() for x in tensors] if way == "owned" else tensors)


def run_ours(way: str, paths: list[str], names: list[str], **forced: str) -> int:
    """This package; owned is mode="load"."""
    import fastsafetensors
    from fastsafetensors.torch import load_file

    if way in ("three tensors", "header only"):
        return through_safe_open(fastsafetensors, way, paths, names)
    options = {"mode": "load" if way == "owned" else "auto"} | forced
    return touch(load_file(paths if len(paths) > 1 else paths[0], **options).values())


def run_runai(way: str, paths: list[str], names: list[str]) -> int:
    """Run:ai's streamer. Its tensors are views of a temporary buffer, so they are cloned."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return touch([tensor.clone() for _, tensor in streamer.get_tensors()])


def run_fastsafetensors(way: str, paths: list[str], names: list[str]) -> int:
    """fastsafetensors 0.5 without GPUDirect; the loader stays open."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: paths})
    buffer = loader.copy_files_to_device()
    return touch([buffer.get_tensor(name) for name in loader.get_keys()])


def run_plain(way: str, paths: list[str], names: list[str]) -> int:
    """read(2) of everything, one thread, no tensors."""
    total = 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            memory = bytearray(os.path.getsize(path))
            kept.append(memory)
            view, at = memoryview(memory), 0
            while at < len(memory):
                at += file.readinto(view[at : at + (8 << 20)])
            total += at
    return total


def run_fio(way: str, paths: list[str], names: list[str]) -> float:
    """The disk's limit: large direct reads, many in flight. Returns fio's own seconds."""
    command = ["fio", "--output-format=json", "--rw=read", "--bs=1M", "--iodepth=16", "--direct=1",
               "--ioengine=io_uring", "--readonly"]
    for path in paths:
        command += [f"--name={os.path.basename(path)}", "--stonewall", f"--filename={path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = json.loads(done.stdout)["jobs"]
    return sum(job["read"]["runtime"] for job in jobs) / 1000


CONTENDERS = {
    "ours": (run_ours, WAYS),
    "safetensors": (run_safetensors, WAYS),
    "safetensors-rc": (run_safetensors, WAYS),
    "runai": (run_runai, ("owned",)),
    "fastsafetensors-0.5": (run_fastsafetensors, ("owned",)),
    "plain read": (run_plain, ("owned",)),
    "fio": (run_fio, ("owned",)),
}
# The package's automatic choices, each forced. Memory-mapped tensors use no engine; the second row
# has the engines that could replace them.
FORCED = {
    "ours map": ({"mode": "map"}, ("views",)),
    "ours keep": ({"mode": "load", "cache": "keep"}, ("views", "owned")),
    "ours bypass": ({"mode": "load", "cache": "bypass"}, ("views", "owned")),
    **{f"ours {engine}": ({"mode": "load", "engine": engine}, ("views", "owned"))
       for engine in ("pread", "direct", "uring", "mmap")},
}
CONTENDERS |= {name: (functools.partial(run_ours, **forced), ways)
               for name, (forced, ways) in FORCED.items()}
SMALL_WAYS = ("three tensors", "header only")


def run_start(name: str, order: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a start in this process, or the error."""
    try:
        if order["group"]:
            pathlib.Path(order["group"], "cgroup.procs").write_text(str(os.getpid()))
        if order["stranger"]:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
        begin = time.perf_counter()
        told = CONTENDERS[name][0](order["way"], order["paths"], order["names"])
        return {"seconds": told if isinstance(told, float) else time.perf_counter() - begin}
    except BaseException as error:  # noqa: BLE001 - whatever it is, the report says it
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def start_fresh(name: str, order: dict[str, Any]) -> dict[str, Any]:
    """One start by a new interpreter."""
    command = [sys.executable, os.path.abspath(__file__), "--start", name]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True)
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr[-200:]}


def start_child(name: str, order: dict[str, Any]) -> dict[str, Any]:
    """One start by a fork of this process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(START_SECONDS_MAX)  # in a small cgroup some starts take minutes
        os.write(write_end, json.dumps(run_start(name, order)).encode())
        os._exit(0)
    os.close(write_end)
    text = b""
    while part := os.read(read_end, 4096):
        text += part
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"ended by signal {os.WTERMSIG(status)}"}


def import_package(name: str) -> None:
    """What a program imports before it loads."""
    import torch

    torch.set_num_threads(1)
    if name.startswith("safetensors"):
        import safetensors.torch  # noqa: F401
    elif name.split()[0] == "ours":
        import fastsafetensors.torch  # noqa: F401
    elif name == "runai":
        import runai_model_streamer  # noqa: F401
    elif name == "fastsafetensors-0.5":
        import fastsafetensors  # noqa: F401


def serve(name: str) -> None:
    """Import once, then start what stdin asks for."""
    import_package(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start = start_fresh if order["way"] in SMALL_WAYS else start_child
        print(json.dumps(start(name, order)), flush=True)


# ---- the other side: files, places, rounds ----


def make_models(folder: pathlib.Path) -> dict[str, list[str]]:
    """Write the models once, with random bytes."""
    import torch
    from safetensors.torch import save_file

    def tensors(count: int, size: int) -> dict[str, Any]:
        return {f"layers.{i}.weight": torch.randint(0, 255, (size,), dtype=torch.uint8)
                for i in range(count)}

    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"25 MB": [(24, 1 << 20)], "100 MB": [(24, 4 << 20)], "300 MB": [(72, 4 << 20)],
              "1 GiB": [(64, 16 << 20)], "20,000 tensors": [(20000, 1024)],
              "4 shards": [(16, 16 << 20)] * 4}
    models: dict[str, list[str]] = {}
    for model, parts in shapes.items():
        models[model] = []
        for number, (count, size) in enumerate(parts):
            path = folder / f"{model.replace(' ', '-').replace(',', '')}-{number}.safetensors"
            if not path.exists():
                rows = tensors(count, size)
                save_file({f"s{number}.{name}": x for name, x in rows.items()}, str(path))
                path.chmod(0o644)  # readable for the measurements as another user
            models[model].append(str(path))
    os.sync()
    return models


def evict(paths: list[str], half: bool) -> None:
    """Drop the files from the page cache, or all but their first halves."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        if half:
            os.posix_fadvise(descriptor, 0, size // 2, os.POSIX_FADV_WILLNEED)
            os.pread(descriptor, 1, size // 2 - 1)
        os.posix_fadvise(descriptor, size // 2 if half else 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm_memory(size: int) -> None:
    """Touch and free this much memory, so that the kernel can reuse it."""
    block = mmap.mmap(-1, size + (64 << 20))
    block.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(block), 4096):
        block[at] = 1
    block.close()


class Place:
    """The place of a cell's files, and its setup."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        """The place's folder is `folder`, seen through it."""
        self.name, self.folder, self.group = name, folder, ""

    def __enter__(self) -> Place:
        """Set it up; RuntimeError says what stops it."""
        if self.name in ("readahead 128K", "stranger", "512 MiB") and os.geteuid() != 0:
            raise RuntimeError("it needs root")
        if self.name == "tmpfs":
            self.folder = pathlib.Path("/dev/shm/fst-grid")
        self.models = make_models(self.folder)
        if self.name == "fuse":
            if shutil.which("bindfs") is None:
                raise RuntimeError("bindfs is not installed")
            mount = self.folder.parent / "grid-fuse"
            mount.mkdir(exist_ok=True)
            subprocess.run(["bindfs", str(self.folder), str(mount)], check=True)
            self.models = {model: [str(mount / pathlib.Path(path).name) for path in paths]
                           for model, paths in self.models.items()}
        if self.name == "512 MiB":
            self.group = make_group(512 << 20)
        self.readahead = Readahead(self.folder, 128 if self.name == "readahead 128K" else None)
        self.readahead.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Undo the setup."""
        self.readahead.__exit__()
        if self.name == "fuse":
            subprocess.run(["fusermount3", "-u", str(self.folder.parent / "grid-fuse")])
        if self.group:
            os.rmdir(self.group)


def make_group(limit: int) -> str:
    """Make a cgroup with this memory limit for its processes and their page cache."""
    for root, file in zip(GROUP_ROOTS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = pathlib.Path(root, "fst-grid")
        try:
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(limit))
            return str(group)
        except OSError:
            continue
    raise RuntimeError("no group of the memory controller can be made")


class Readahead:
    """Sets the device's readahead for a while, if that is allowed."""

    def __init__(self, folder: pathlib.Path, kib: int | None) -> None:
        """kib: the readahead; None does not change it."""
        number = os.stat(folder).st_dev
        self.file = pathlib.Path(
            f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
        self.kib = kib

    def __enter__(self) -> None:
        """Set it."""
        if self.kib is not None:
            self.before = self.file.read_text()
            self.file.write_text(str(self.kib))

    def __exit__(self, *_: object) -> None:
        """Put it back."""
        if self.kib is not None:
            self.file.write_text(self.before)


def open_servers(names: list[str], peers: dict[str, str]) -> dict[str, subprocess.Popen[str]]:
    """Start those of the contenders that can be had."""
    servers = {}
    for name in names:
        environment = dict(os.environ)
        if name in peers:
            environment["PYTHONPATH"] = peers[name]
        elif name == "fio" and shutil.which("fio") is None:
            print("without fio: it is not installed")
            continue
        elif name.split()[0] not in ("ours", "safetensors", "plain", "fio"):
            print(f"without {name}: no --peer {name}=FOLDER")
            continue
        server = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--serve", name],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                  env=environment)
        assert server.stdout is not None
        if not server.stdout.readline():
            print(f"without {name}: it does not start")
            continue
        servers[name] = server
    return servers


def ask(server: subprocess.Popen[str], order: dict[str, Any]) -> dict[str, Any]:
    """One start by a server."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def measure_cell(servers: dict[str, Any], order: dict[str, Any], rounds: int,
                 evicts: bool) -> dict[str, Any]:
    """Medians and ranges: {contender: {start: [median, least, most] or text of an error}}."""
    names = [name for name in servers if order["way"] in CONTENDERS[name][1]]
    seconds: dict[str, dict[str, list[Any]]] = {n: {s: [] for s in STARTS} for n in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for start in STARTS if evicts else STARTS[:3]:
                if evicts and start in ("first", "half"):
                    evict(order["paths"], start == "half")
                if order["warm"]:
                    warm_memory(sum(os.path.getsize(path) for path in order["paths"]) * 2)
                result = ask(servers[name], order)
                seconds[name][start].append(result.get("seconds", result.get("error")))
    return {name: {start: summarise(values) for start, values in starts.items() if values}
            for name, starts in seconds.items()}


def summarise(values: list[Any]) -> Any:
    """Median, least and most, or the first error."""
    errors = [value for value in values if isinstance(value, str)]
    return errors[0] if errors else [statistics.median(values), min(values), max(values)]


def write_report(cells: list[dict[str, Any]], notes: list[str], path: pathlib.Path) -> None:
    """Write a table for each kind of memory: seconds of the first, second and third start, and half
    cached."""
    lines = ["# First, second and third starts", "", *notes, ""]
    for way in WAYS:
        rows = [cell for cell in cells if cell["way"] == way]
        if not rows:
            continue
        lines += [f"## {way.capitalize()}", "",
                  "| place | model | who | first | second | third | half cached |",
                  "|---|---|---|---|---|---|---|"]
        for cell in rows:
            for name, starts in cell["seconds"].items():
                texts = [f"{value[0]:.4f} [{value[1]:.4f}-{value[2]:.4f}]"
                         if isinstance(value, list) else str(value)
                         for value in (starts.get(start, "-") for start in STARTS)]
                lines.append(f"| {cell['place']} | {cell['model']} | {name} | "
                             + " | ".join(texts) + " |")
        lines.append("")
    path.write_text("\n".join(lines))


def run_place(place: Place, servers: dict[str, Any], options: argparse.Namespace
              ) -> list[dict[str, Any]]:
    """Measure all cells of a place, and print each result at once."""
    cells = []
    for model in options.models.split(";"):
        paths = place.models[model]
        for way in options.ways.split(","):
            order = {"way": way, "paths": paths, "names": names_of_three(paths[0]),
                     "stranger": place.name == "stranger", "group": place.group,
                     "warm": place.name == "warm memory"}
            seconds = measure_cell(servers, order, options.rounds, place.name != "tmpfs")
            cells.append({"place": place.name, "model": model, "way": way, "seconds": seconds})
            print(json.dumps(cells[-1]), flush=True)
    return cells


def run_grid(options: argparse.Namespace) -> None:
    """Measure all cells that are possible here; record the reasons for the others."""
    names = ["ours", *FORCED] if options.forced else [n for n in CONTENDERS if n not in FORCED]
    servers = open_servers(options.only.split(",") if options.only else names,
                           dict(text.split("=", 1) for text in options.peer))
    notes = ["Seconds from the call to the last byte read, median [least-most] of "
             f"{options.rounds} rounds, contenders in turns, {os.cpu_count()} processors."]
    cells = []
    for name in options.places.split(","):
        try:
            with Place(name, pathlib.Path(options.folder)) as place:
                cells += run_place(place, servers, options)
        except RuntimeError as error:
            notes.append(f"Not had: {name}: {error}.")
    if options.report:
        write_report(cells, notes, pathlib.Path(options.report))
    if options.json:
        text = json.dumps({"notes": notes, "cells": cells}, indent=1)
        pathlib.Path(options.json).write_text(text)
    for server in servers.values():
        server.stdin.close()
        server.wait()


def start_once(name: str) -> None:
    """One start, as stdin asks for it."""
    order = json.load(sys.stdin)
    import_package(name)
    print(json.dumps(run_start(name, order)))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="build/grid", help="where models are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--models", default=";".join(MODELS), help="apart by ;")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--forced", action="store_true", help="every engine and cache policy that "
                        "can be forced, beside what is chosen by default, instead of the peers")
    parser.add_argument("--only", help="these contenders, apart by commas")
    parser.add_argument("--report", help="a Markdown file to write")
    parser.add_argument("--json", help="a JSON file to write")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.start:
        start_once(options.start)
    else:
        # The setup is undone however the program ends.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        run_grid(options)


if __name__ == "__main__":
    main()
