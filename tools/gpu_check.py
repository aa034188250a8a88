#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_check.py [--out DIR] [--device cuda:0] [--build DIR] [--small] [--minutes 8]

The GPU's suite and benchmark, and a verdict: the one command for a machine that has a GPU. It needs
no network: what is built is used, or built with the meson that is there. Peers are measured where
an interpreter with torch for this GPU and their packages is at hand (GPU_CHECK_PYTHON, else .venv,
else this one); fastsafetensors 0.5 where GPU_CHECK_PEER05 names an interpreter that has it.

Every measurement is a process of its own; ways take turns; the median counts, with lowest and
highest. The limit of a load from the page cache is the slower of the bus (copies from locked memory
by the driver alone) and of what the processors can copy; of a cold one also the disk (plain reads
past the page cache). DIR gets report.json, report.html and report.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20
# Targets, as ratios: of the limit, of the peers, of memory.
OF_LIMIT, TO_SAFETENSORS, PER_TENSOR_US, SETUP_S, SLACK = 0.9, 4.8, 2.0, 0.05, 1.02


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        """Start."""
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


def build(folder: pathlib.Path) -> None:
    """Build with the meson at hand; what is built already is enough where there is none."""
    places = [ROOT / ".venv/bin", *map(pathlib.Path, os.environ.get("PATH", "").split(":"))]
    meson = next((place / "meson" for place in places if (place / "meson").exists()), None)
    if meson is None:
        if (folder / "cli/fastsafetensors").exists():
            return
        raise SystemExit("gpu-check: nothing is built, and there is no meson to build with")
    if not (folder / "build.ninja").exists():
        subprocess.run([meson, "setup", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([meson, "compile", "-C", folder], check=True, stdout=subprocess.DEVNULL)


def write_model(path: pathlib.Path, sizes: list[int]) -> None:
    """A file of U8 tensors of these sizes; random, so that nothing can be compressed away."""
    begin, rows = 0, {}
    for number, size in enumerate(sizes):
        rows[f"layers.{number}.weight"] = {
            "dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(rows).encode()
    header += b" " * (-len(header) % 8)
    block = os.urandom(8 * MIB)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = begin
        while left > 0:
            left -= file.write(block[:left])
        file.flush()
        if "/dev/shm" not in os.fspath(path):
            os.fsync(file.fileno())


def prepare(path: pathlib.Path, state: str) -> None:
    """Bring the file into the page cache, or out of it."""
    with open(path, "rb") as file:
        if state == "cold":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        while file.read(16 * MIB):
            pass


class Bench:
    """The ways to load a file, and how they are timed."""

    def __init__(self, arguments: argparse.Namespace, clock: Clock) -> None:
        """Find the peers."""
        self.device, self.clock = arguments.device, clock
        self.folder = pathlib.Path(arguments.build)
        self.command = self.folder / "cli/fastsafetensors"
        self.peers = find_peers()
        self.ours = ["--gds", "off"]

    def _ours(self, path: pathlib.Path) -> dict:
        """The second load of a process, as a server's or trainer's is; and the first."""
        result = subprocess.run(
            [self.command, "load", "--device", self.device, "--json", "--repeat", "3", *self.ours,
             path], check=True, capture_output=True, text=True, timeout=max(self.clock.left(), 5))
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        return {"seconds": rows[0]["seconds"], "again": min(r["seconds"] for r in rows[1:]),
                "stats": rows[-1]}

    def _peer(self, name: str, path: pathlib.Path) -> dict:
        python, code = self.peers[name]
        result = subprocess.run(
            [python, "-c", code, os.fspath(path), self.device], check=True, capture_output=True,
            text=True, timeout=max(self.clock.left(), 5))
        return json.loads(result.stdout.splitlines()[-1])

    def scenario(self, title: str, path: pathlib.Path, state: str, runs: int) -> dict:
        """Time all ways in turns; a way that fails is left out with its reason."""
        rows: dict[str, list[dict]] = {}
        failed: dict[str, str] = {}
        for _ in range(runs):
            for name in ["ours", *self.peers]:
                if name in failed or self.clock.left() < 20:
                    continue
                prepare(path, state)
                try:
                    rows.setdefault(name, []).append(
                        self._ours(path) if name == "ours" else self._peer(name, path))
                except (subprocess.SubprocessError, ValueError, IndexError) as error:
                    failed[name] = str(getattr(error, "stderr", "") or error)[-300:]
        result = {"title": title, "bytes": path.stat().st_size, "state": state, "rows": [],
                  "failed": failed}
        for name, samples in rows.items():
            # What is in the page cache still is for the second load; a cold one is cold once.
            key = "again" if state == "hot" and all("again" in s for s in samples) else "seconds"
            times = sorted(sample[key] for sample in samples)
            result["rows"].append({
                "name": name, "median": statistics.median(times), "low": times[0],
                "high": times[-1], "cpu": statistics.median(s.get("cpu", 0) for s in samples),
                "peak": max(s.get("peak", 0) for s in samples), "runs": len(times),
                "first": statistics.median(s["seconds"] for s in samples),
                "stats": samples[-1].get("stats")})
            row = result["rows"][-1]
            print(f"  {name:28} {row['median'] * 1e3:9.2f} ms [{row['low'] * 1e3:.2f}-"
                  f"{row['high'] * 1e3:.2f}]  {result['bytes'] / row['median'] / 1e9:6.2f} GB/s")
        return result


# What a peer's process runs: the second load counts where the file is in the page cache.
PEER = """
import json, resource, sys, time
path, device = sys.argv[1:3]
import torch
torch.zeros(1, device=device); torch.cuda.synchronize()
{imports}
def load():
{body}
times = []
for _ in range(3):
    start = time.perf_counter()
    keep = load()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    del keep
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"seconds": times[0], "again": min(times[1:]),
                  "cpu": (usage.ru_utime + usage.ru_stime), "peak": usage.ru_maxrss * 1024}}))
"""
PEERS = {
    "safetensors": ("from safetensors.torch import load_file",
                    "    return load_file(path, device=device)"),
    "Run:ai streamer": ("from runai_model_streamer import SafetensorsStreamer",
                        "    with SafetensorsStreamer() as s:\n        s.stream_file(path)\n"
                        "        return {n: t.to(device) for n, t in s.get_tensors()}"),
    "InstantTensor": ("import instanttensor",
                      "    s = instanttensor.safe_open\n"
                      "    with s(path, framework='pt', device=device) as f:\n"
                      "        return {n: t.clone() for n, t in f.tensors()}"),
    "ours, from Python": ("from fastsafetensors.torch import load_file",
                          "    return load_file(path, device=device)"),
    "fastsafetensors 0.5": ("from fastsafetensors import SafeTensorsFileLoader, SingleGroup",
                            "    l = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)\n"
                            "    l.add_filenames({0: [path]})\n    b = l.copy_files_to_device()\n"
                            "    return {n: b.get_tensor(n) for n in l.get_keys()}, b, l"),
}


def find_peers() -> dict[str, tuple[str, str]]:
    """{name: (interpreter, code)} of what can be run here."""
    found = {}
    usual = [os.environ.get("GPU_CHECK_PYTHON"), os.fspath(ROOT / ".venv/bin/python"),
             sys.executable]
    for name, (imports, body) in PEERS.items():
        places = [os.environ.get("GPU_CHECK_PEER05")] if name.endswith("0.5") else usual
        code = PEER.format(imports=imports, body=body)
        test = f"import torch\n{imports}\nassert torch.cuda.is_available()"
        for python in places:
            if python is None or not shutil.which(python):
                continue
            tried = subprocess.run([python, "-c", test], capture_output=True, check=False)
            if tried.returncode == 0:
                found[name] = (python, code)
                break
        else:
            print(f"  not at hand: {name}")
    return found


def run_suite(folder: pathlib.Path, clock: Clock) -> dict:
    """The GPU's tests: with stand-ins, and on the real device."""
    results = {}
    for name, fakes in (("device_test_gpu", True), ("device_test_gpu_faults", True),
                        ("device_test_gds", True), ("device_test_real_gpu", False)):
        environment = dict(os.environ)
        if fakes:
            environment["LD_LIBRARY_PATH"] = os.fspath(folder / "tests/fakes")
        process = subprocess.run([folder / "tests" / name], env=environment, capture_output=True,
                                 text=True, timeout=max(clock.left(), 10), check=False)
        lines = [line for line in process.stdout.splitlines() if line.startswith(("ok", "not ok"))]
        skipped = sum("# SKIP" in line for line in lines)
        bad = [line for line in lines if line.startswith("not ok")]
        if process.returncode not in (0, 1):
            bad.append(f"{name} ended with {process.returncode}: {process.stderr[-500:]}")
        results[name] = {"passed": len(lines) - len(bad) - skipped, "failed": len(bad),
                         "skipped": skipped}
        for line in [*bad, *(line for line in process.stdout.splitlines() if line[:1] == "#")]:
            print(f"  {line}")
        print(f"  {name}: {results[name]}")
    return results


def measure_disk(path: pathlib.Path) -> float:
    """GB/s of plain reads past the page cache, 8 at a time."""
    from concurrent.futures import ThreadPoolExecutor

    size = path.stat().st_size
    prepare(path, "cold")

    def read(part: int) -> None:
        import mmap

        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, 8 * MIB)
        for at in range(part * 8 * MIB, size - 8 * MIB, 64 * MIB):
            os.preadv(fd, [buffer], at)
        os.close(fd)

    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
    except OSError:
        return 0.0
    return size / (time.perf_counter() - start) / 1e9


def judge(document: dict) -> list[tuple[str, bool, str]]:
    """(what, whether it holds, the figures) for every target that could be measured."""
    limits, verdicts = document["limits"], []
    near = min(limits["bus_gbps"], limits["copy_gbps"])
    for result in document["scenarios"]:
        rows = {row["name"]: row for row in result["rows"]}
        ours = rows.get("ours")
        if ours is None:
            continue
        speed = result["bytes"] / ours["median"] / 1e9
        limit = near if result["state"] == "hot" else min(near, limits.get("disk_gbps") or near)
        tensors = ours["stats"]["tensors"]
        if tensors > 1000:
            extra = ours["median"] - result["bytes"] / near / 1e9
            verdicts.append((f"{result['title']}: at most {PER_TENSOR_US} us a tensor",
                             extra / tensors * 1e6 <= PER_TENSOR_US,
                             f"{extra / tensors * 1e6:.2f} us"))
        elif result["bytes"] > 100 * MIB:
            verdicts.append((f"{result['title']}: {OF_LIMIT} of the limit",
                             speed >= OF_LIMIT * limit, f"{speed:.2f} of {limit:.2f} GB/s"))
        slack = ours["stats"]["buffer_bytes"] / max(ours["stats"]["bytes_requested"], 1)
        verdicts.append((f"{result['title']}: device memory", slack <= SLACK, f"{slack:.4f} x"))
        for name, factor in (("safetensors", TO_SAFETENSORS), ("InstantTensor", 1.0),
                             ("Run:ai streamer", 1.0), ("fastsafetensors 0.5", 1.0)):
            if name in rows:
                ratio = rows[name]["median"] / ours["median"]
                verdicts.append((f"{result['title']}: {factor} x {name}", ratio >= factor,
                                 f"{ratio:.2f} x"))
    return verdicts


def write_reports(document: dict, folder: pathlib.Path) -> None:
    """report.json, report.html and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    spec = importlib.util.spec_from_file_location(
        "bench_report", ROOT / "benchmarks/bench_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (folder / "report.html").write_text(module.html_report(document))
    lines = ["# Loading to a GPU", "", f"{document['machine']}", "",
             f"Limits: {document['limits']}",
             "", "| target | holds | measured |", "|---|---|---|"]
    lines += [f"| {what} | {'yes' if holds else '**no**'} | {figure} |"
              for what, holds, figure in document["verdicts"]]
    for result in document["scenarios"]:
        lines += ["", f"## {result['title']}", "", "| way | median ms | lowest | highest | GB/s |",
                  "|---|---|---|---|---|"]
        lines += [f"| {r['name']} | {r['median'] * 1e3:.2f} | {r['low'] * 1e3:.2f} | "
                  f"{r['high'] * 1e3:.2f} | {result['bytes'] / r['median'] / 1e9:.2f} |"
                  for r in result["rows"]]
        lines += [f"\n{name} failed: {why}" for name, why in result["failed"].items()]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def scenarios(bench: Bench, small: bool, memory: pathlib.Path) -> tuple[list[dict], float]:
    """Make the files, time, and remove them."""
    big, huge, count = (8, 16, 2000) if small else (1024, 8192, 20000)
    results, disk = [], 0.0
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        here = pathlib.Path(folder)
        one, small_file = here / "one.safetensors", here / "small.safetensors"
        write_model(one, [big * MIB // 32] * 32)
        write_model(small_file, [20_000] * count)
        disk = measure_disk(one)
        results.append(bench.scenario(f"{big} MiB, page cache", one, "hot", 5))
        title = f"{count:,} tensors of 20 kB, page cache"
        results.append(bench.scenario(title, small_file, "hot", 5))
        results.append(bench.scenario(f"{big} MiB, cold disk", one, "cold", 3))
        for title, place in ((f"{big} MiB, tmpfs", memory), (f"{huge} MiB, page cache", here)):
            if bench.clock.left() < 90:
                print(f"  no time left for: {title}")
                continue
            path = place / "gpu-check.safetensors"
            size = big if place is memory else huge
            try:
                write_model(path, [size * MIB // 64] * 64)
                results.append(bench.scenario(title, path, "hot", 3))
            except OSError as error:
                print(f"  left out: {title}: {error}")
            finally:
                path.unlink(missing_ok=True)
    return results, disk


def main() -> int:
    """Build, test, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=ROOT / "build/gpu-check", type=pathlib.Path)
    parser.add_argument("--device", default="")
    parser.add_argument("--build", default=ROOT / "build/release", type=pathlib.Path)
    parser.add_argument("--no-build", action="store_true", help="take what is built")
    parser.add_argument("--small", action="store_true", help="a rehearsal: tiny files")
    parser.add_argument("--minutes", default=8.0, type=float)
    arguments = parser.parse_args()
    clock = Clock(arguments.minutes)
    if not arguments.no_build:
        build(arguments.build)
    print("suite")
    suite = run_suite(arguments.build, clock)
    failed = sum(result["failed"] for result in suite.values())
    if not arguments.device:
        rows = subprocess.run([arguments.build / "cli/fastsafetensors", "engines"], text=True,
                              capture_output=True, check=True).stdout
        usable = [line.split()[0] for line in rows.splitlines() if " usable " in line]
        arguments.device = next((f"{k}:0" for k in ("cuda", "hip") if k in usable), "")
    if not arguments.device:
        print(f"verdict: no GPU here; the suite with stand-ins: {failed} failed")
        return 1 if failed else 0
    kind, _, number = arguments.device.partition(":")
    print("limits")
    size = "64" if arguments.small else "2048"
    peak = subprocess.run(
        [arguments.build / "bench/gpu_peak", kind, number or "0", size], check=True,
        capture_output=True, text=True, timeout=max(clock.left(), 10)).stdout
    limits = json.loads(peak)
    print(f"  {limits}")
    print("benchmark")
    bench = Bench(arguments, clock)
    results, disk = scenarios(bench, arguments.small, pathlib.Path("/dev/shm"))
    limits["disk_gbps"] = disk
    info = subprocess.run([arguments.build / "cli/fastsafetensors", "engines"], text=True,
                          capture_output=True, check=True).stdout
    gpu = next((line.split(None, 2)[2] for line in info.splitlines() if line.startswith(kind)), "")
    document = {
        "version": (ROOT / "include/fastsafetensors/version.h").read_text().count("#") and
        subprocess.run([arguments.build / "cli/fastsafetensors", "--version"], text=True,
                       capture_output=True, check=False).stdout.strip(),
        "what": "loading to a GPU", "runs": 3, "notes": "Hot: the second load of a process.",
        "machine": {"gpu": gpu, "processors": os.cpu_count(), "system": platform.platform()},
        "limits": limits, "suite": suite, "scenarios": results}
    document["verdicts"] = judge(document)
    write_reports(document, arguments.out)
    for what, holds, figure in document["verdicts"]:
        print(f"  {'holds ' if holds else 'MISSED'}  {what}: {figure}")
    missed = sum(not holds for _, holds, _ in document["verdicts"])
    print(f"verdict: suite {failed} failed, targets {missed} missed of "
          f"{len(document['verdicts'])}; reports in {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
