#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_check.py [--out DIR] [--device cuda:0] [--build DIR] [--small] [--minutes 8]

Runs the GPU tests and benchmarks and prints a verdict. It needs a compiler, meson, ninja and
python, but no network, pip or virtual environment. Without meson it uses an existing build. If
there is an interpreter with torch for this GPU (GPU_CHECK_PYTHON, .venv, or this one), the Python
extension is built and measured as well, and other loaders that are installed there.
GPU_CHECK_PEER05 names an interpreter that has fastsafetensors 0.5.

Every step has a time limit. A failed step is a row of the report, which is written after each step.
Every measurement is a separate process, methods are interleaved, and the report has medians of
single loads with minimum and maximum. The limit of a load from the page cache is the bus speed,
measured with the driver's copies from pinned memory. The limit of a cold load is also the disk,
measured with direct reads. DIR gets report.json, report.html and report.md.

The exit status is 0 if every step and test passed. Without a GPU only the tests with fake drivers
count. Missed targets never count.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap

from gpu_clock import Clock, NoTimeError, run, run_tests, words_of
from gpu_files import MIB, files_of, measure_disk, prepare, write_model, write_shards
from gpu_report import Report, describe_machine
from gpu_sharing import Sharing, measure_sharing, missing_gpu
from gpu_verdicts import setups
from gpu_ways import OF_FOLDERS, TORCH_ALONE, Ways, interpreters

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD_S, SUITE_S, PYTHON_SUITE_S, LIMITS_S, SLOW_S = 150, 90, 150, 60, 5


# What `fastsafetensors engines` says of a driver that is not installed, or has no device.
NO_GPU = re.compile(r"no driver: \S+ was not found$|the driver sees no device \(")


class NoGpuError(RuntimeError):
    """The machine has no GPU that can be used."""


def find_meson() -> pathlib.Path | None:
    """Return the path of meson, or None. GPU_CHECK_NO_MESON hides it, for rehearsals."""
    if "GPU_CHECK_NO_MESON" in os.environ:
        return None
    places = [ROOT / ".venv/bin", *map(pathlib.Path, os.environ.get("PATH", "").split(":"))]
    return next((place / "meson" for place in places if (place / "meson").exists()), None)


def build(folder: pathlib.Path, options: list[str], clock: Clock) -> None:
    """Build with meson. Without meson, an existing build is used."""
    meson, limit = find_meson(), min(BUILD_S, clock.left())
    if meson is None:
        if (folder / "cli/fastsafetensors").exists():
            return
        raise RuntimeError("there is no build, and meson was not found")
    if not (folder / "build.ninja").exists():
        run([meson, "setup", *options, folder, ROOT], limit)
    run([meson, "compile", "-C", folder], limit)


def make_package(build_folder: pathlib.Path, package: pathlib.Path, options: list[str],
                 clock: Clock) -> None:
    """Create the Python package in a folder: its modules, and the extension built for them."""
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise RuntimeError("no Python.h: the extension can't be built here")
    build(build_folder, ["-Dwheel=true", *options], clock)
    built = next(build_folder.glob("python/_core*.so"))
    target = package / "fastsafetensors"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "python/fastsafetensors", target)
    shutil.copy(built, target / built.name)


class Bench:
    """The methods of loading a file, and their timing."""

    def __init__(self, command: pathlib.Path, device: str, clock: Clock) -> None:
        """Begin with the command alone."""
        self.command, self.device, self.clock = command, device, clock
        self.ways: Ways | None = None
        self._rates: dict[str, float] = {}  # bytes in a second, of each method so far

    def _ours(self, path: pathlib.Path, count: int) -> dict:
        """The command: its first load opens the device, too."""
        rows = [json.loads(line) for line in run(
            [self.command, "load", "--device", self.device, "--json", "--repeat", str(count), path],
            min(self.clock.left(), 60)).splitlines()]
        return {"times": [row["seconds"] for row in rows], "stats": rows[-1]}

    def names(self, path: pathlib.Path, state: str) -> list[str]:
        """The methods of a scenario."""
        names = list(self.ways.workers) if self.ways else []
        if state == "saved":
            return [name for name in names if name.startswith("save")]
        loads = [name for name in names if name != TORCH_ALONE and not name.startswith("save")]
        return ["ours", *(name for name in loads if not path.is_dir() or name in OF_FOLDERS)]

    def scenario(self, title: str, path: pathlib.Path, state: str, runs: int,
                 fresh: bool = False) -> dict:
        """Time all methods, interleaved. A method that fails is omitted, with its reason.

        fresh: new processes in each run, whose first load is reported on its own.
        """
        samples: dict[str, list[dict]] = {}
        result: dict = {"title": title, "bytes": sum(p.stat().st_size for p in files_of(path)),
                        "state": state, "fresh": fresh, "rows": [], "failed": {}}
        count = 1 if state == "cold" else 4
        names = self.names(path, state)
        for number in range(runs):
            if fresh and number > 0 and self.ways:
                self.ways.restart()
            for name in names:
                if name in result["failed"]:
                    continue
                if self.clock.left() < 45:
                    if name not in samples:
                        result["failed"][name] = "left out: no time left"
                    continue
                if name != "ours" and name not in self.ways.workers:
                    result["failed"][name] = self.ways.missing.get(name, "it did not start again")
                    continue
                seconds = result["bytes"] / self._rates.get(name, float("inf"))
                if seconds > SLOW_S:
                    result["failed"][name] = f"left out: it would take {seconds:.0f} s"
                    continue
                times = 1 if seconds > 1 else count
                prepare(path, state)
                try:
                    got = self._ours(path, times) if name == "ours" else self.ways.workers[
                        name].run(path, times, self.clock.left())
                    samples.setdefault(name, []).append(got)
                    self._rates[name] = result["bytes"] / max(got["times"])
                except (subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
                    result["failed"][name] = words_of(error)[-300:]
        for name, found in samples.items():
            self._add_row(result, name, found)
        return result

    def _add_row(self, result: dict, name: str, found: list[dict]) -> None:
        # A cold file is only cold for the first load, so later loads are only timed from the page
        # cache.
        times = sorted(t for sample in found for t in (sample["times"][1:] or sample["times"]))
        firsts = [sample["times"][0] for sample in found]
        extra = sorted(sample["times"][0] - statistics.median(sample["times"][1:])
                       for sample in found if len(sample["times"]) > 1)
        row = {"name": name, "median": statistics.median(times), "low": times[0],
               "high": times[-1], "runs": len(times), "first": statistics.median(firsts),
               "cpu": statistics.median(s.get("cpu", 0) for s in found),
               "peak": max(s.get("peak", 0) for s in found), "extra": extra,
               "stats": found[-1].get("stats")}
        result["rows"].append(row)
        print(f"  {name:32} {row['median'] * 1e3:9.2f} ms [{row['low'] * 1e3:.2f}-"
              f"{row['high'] * 1e3:.2f}]  {result['bytes'] / row['median'] / 1e9:6.2f} GB/s",
              flush=True)


def run_suite(results: dict, folder: pathlib.Path, name: str, fakes: bool, clock: Clock) -> None:
    """Run a GPU test program, with fake drivers or on the real device."""
    environment = {**os.environ, "FASTSAFETENSORS_KERNEL_CACHE_DIR": "off"}
    if fakes:
        environment["LD_LIBRARY_PATH"] = os.fspath(folder / "tests/fakes")
    process = run_tests([folder / "tests" / name], environment, SUITE_S, clock)
    lines = [line for line in process.stdout.splitlines() if line.startswith(("ok", "not ok"))]
    skipped = sum("# SKIP" in line for line in lines)
    bad = [line for line in lines if line.startswith("not ok")]
    passed = len(lines) - len(bad) - skipped
    planned = [line[3:] for line in process.stdout.splitlines() if line[:3] == "1.."]
    if process.returncode != bool(bad) or planned != [str(len(lines))] or not lines:
        bad.append(f"{name} ended with {process.returncode} after {len(lines)} tests, the last: "
                   f"{lines[-1] if lines else 'none'}. {process.stderr[-500:]}")
    notes = [line for line in process.stdout.splitlines() if line[:1] == "#"]
    results[name] = {"passed": passed, "failed": len(bad), "skipped": skipped,
                     "faults": [*bad, *(note for note in notes if re.match(r"# \S+:\d+: ", note))]}
    for line in [*bad, *notes]:
        print(f"  {line}")
    print(f"  {name}: {passed} passed, {len(bad)} failed, {skipped} skipped")


def last_test(output: str | bytes | None) -> str:
    """The name of the last test in pytest's output."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return (re.findall(r"::(test_\S+)", text) or ["no test"])[-1]


def run_python_suite(results: dict, package: pathlib.Path, clock: Clock) -> None:
    """Run the tests of the Python package on the GPU, with the first interpreter that can."""
    why = "no interpreter"
    for python in interpreters():
        environment = {**os.environ, "PYTHONPATH": os.fspath(package), "COLUMNS": "240"}
        try:
            done = run_tests(
                [python, "-m", "pytest", "-v", "-rfEs", "-p", "no:cacheprovider", "--tb=short",
                 ROOT / "python/tests" / PYTHON_SUITE], environment, PYTHON_SUITE_S, clock)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"it did not end within {error.timeout:.0f} s, in "
                               f"{last_test(error.stdout)}") from error
        counts = {what: int(number) for number, what in re.findall(
            r"(\d+) (passed|failed|skipped|error)", (done.stdout.splitlines() or [""])[-1])}
        why = (done.stdout + done.stderr)[-2000:]
        if done.returncode < 0 and "::test_" in done.stdout:
            ended = done.stdout.partition("short test summary")[0]
            failed = re.findall(r"::(test_\S+) (?:FAILED|ERROR)", ended)
            results[PYTHON_SUITE] = {
                "passed": ended.count(" PASSED"), "skipped": ended.count(" SKIPPED"),
                "failed": 1 + len(failed),
                "faults": [f"it ended with {done.returncode}, the last test: {last_test(ended)}",
                           *(f"FAILED {name}" for name in failed),
                           *re.findall("^Fatal Python error.*", done.stderr, re.MULTILINE)]}
            return
        if not counts.keys() & {"passed", "failed", "error"}:
            continue  # without torch, its GPU, or pytest
        print(textwrap.indent(done.stdout[-8000:], "  "))
        failed = counts.get("failed", 0) + counts.get("error", 0)
        results[PYTHON_SUITE] = {
            "passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0),
            "failed": failed or int(done.returncode != 0),
            "faults": re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*$", done.stdout, re.MULTILINE)}
        return
    raise RuntimeError(f"the tests of the Python package could not be run: {why}")


SUITE = (("device_test_real_gpu", False), ("device_test_gpu", True),
         ("device_test_gpu_isolation", True), ("device_test_gpu_faults", True),
         ("device_test_gpu_retries", True), ("device_test_gpu_answers", True),
         ("device_test_gpu_async", True), ("device_test_gpu_costs", True),
         ("device_test_gpu_drivers", True), ("device_test_gds", True))
PYTHON_SUITE = "test_real_gpu.py"
SUITE_NAMES = (*(name for name, _ in SUITE), PYTHON_SUITE)


class Check:
    """The steps, most important first: the machine may be available for minutes only."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Begin."""
        self.arguments, self.clock = arguments, Clock(arguments.minutes)
        self.folder = arguments.build
        self.command = self.folder / "cli/fastsafetensors"
        self.report = Report(arguments.out)
        self.device, self.bench = arguments.device, None
        self.package: pathlib.Path | None = None

    def build(self) -> bool:
        """The library, the command, the tests; then the extension."""
        if not self.arguments.no_build and not self.report.step(
                "build", lambda: build(self.folder, [], self.clock)):
            return False
        if self.arguments.package:
            self.package = self.arguments.package.resolve()
            return True
        package = self.arguments.out / "package"
        options = ["-Doptimization=1"] if self.arguments.small else []  # a third of the time
        if self.report.step("build of the Python extension", lambda: make_package(
                self.arguments.out / "python-build", package, options, self.clock)):
            self.package = package.resolve()
        return True

    def find_device(self) -> None:
        """Find the first GPU."""
        if self.device:
            return
        # The library waits 60 s for each of two drivers.
        rows = [row for row in json.loads(run([self.command, "engines", "--json"], 150))["engines"]
                if row["name"] in ("cuda", "hip")]
        self.device = next((f"{row['name']}:0" for row in rows if row["usable"]), "")
        if self.device:
            return
        faults = [row["reason"] for row in rows if not NO_GPU.search(row["reason"])]
        if faults:
            raise RuntimeError("; ".join(faults))
        raise NoGpuError("; ".join(["no GPU here", *(row["reason"] for row in rows)]))

    def measure_limits(self, path: pathlib.Path) -> None:
        """Measure the bus, the CPU and the disk."""
        kind, _, number = self.device.partition(":")
        size = path.stat().st_size // MIB // 2 * 2 - 2
        limits = self.report.document["limits"]
        limits.update(json.loads(run([self.folder / "bench/gpu_peak", kind, number or "0",
                                      str(max(size, 2)), path], min(LIMITS_S, self.clock.left()))))
        limits["disk_gbps"] = measure_disk(path)
        print(f"  {limits}")

    def find_ways(self) -> None:
        """Find our Python package and the other loaders."""
        self.bench.ways = Ways(interpreters(), self.package, self.device,
                                       lambda: self.clock.left() / 3)
        for name, why in self.bench.ways.missing.items():
            self.report.leave_out(name, why)
        broken = self.bench.ways.broken()
        if broken:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in broken.items()))

    def share(self, path: pathlib.Path) -> None:
        """Measure what several processes share."""
        sharing = Sharing(self.command, self.device, path, interpreters(), self.package)
        cells = measure_sharing(sharing, lambda: self.clock.left() > 60)
        self.report.document["sharing"] = cells
        failed = [f"{cell['name']} {cell['result']}" for cell in cells
                  if cell["result"].startswith("failed: ")]
        if failed:
            raise RuntimeError("; ".join(failed))

    def scenario(self, title: str, path: pathlib.Path, state: str, runs: int,
                 fresh: bool = False) -> None:
        """A step of the benchmark. It has failed if one of our own methods has."""
        def measure() -> None:
            result = self.bench.scenario(title, path, state, runs, fresh)
            self.report.document["scenarios"].append(result)
            if fresh and state == "hot":
                self.report.document["setup"] = setups(result)
            ours = [f"{name}: {why}" for name, why in result["failed"].items()
                    if "ours" in name and not why.startswith("left out")]
            if ours:
                raise RuntimeError("; ".join(ours))
            if not result["rows"] and result["failed"].get("ours", "").startswith("left out"):
                raise NoTimeError("no time left")

        self.report.step(title, measure)

    def measure(self, here: pathlib.Path) -> None:
        """Measure the limits, and loads of files of all kinds."""
        small = self.arguments.small
        big, huge, count = (8, 16, 2000) if small else (1024, 8192, 20000)
        one, many = here / "one.safetensors", here / "many.safetensors"
        self.report.step("limits", lambda: (write_model(one, [big * MIB // 32] * 32),
                                            self.measure_limits(one)))
        self.report.step("ways", self.find_ways)
        self.scenario(f"{big} MiB, page cache", one, "hot", 3, fresh=True)
        self.scenario(f"{big} MiB, cold disk", one, "cold", 3)
        if self.clock.left() < 150:
            self.report.leave_out("several processes", "no time left")
            self.report.document["sharing"] = missing_gpu("no time left")
        else:
            self.report.step("several processes", lambda: self.share(one))
        self.report.step("small files", lambda: write_model(many, [20_000] * count))
        self.scenario(f"{count:,} tensors of 20 kB, page cache", many, "hot", 3)
        shards = here / "shards"
        self.report.step("shards", lambda: write_shards(shards, 4, [big * MIB // 32] * 8))
        self.scenario(f"{big} MiB in 4 files, page cache", shards, "hot", 3)
        memory = pathlib.Path("/dev/shm")
        for title, place, size in ((f"{big} MiB, tmpfs", memory, big),
                                   (f"{huge} MiB, page cache", here, huge)):
            if self.clock.left() < 100:
                self.report.leave_out(title, "no time left")
                continue
            if not os.access(place, os.W_OK):
                self.report.leave_out(title, f"{place} cannot be written")
                continue
            with tempfile.TemporaryDirectory(dir=place) as folder:
                path = pathlib.Path(folder) / "gpu-check.safetensors"
                self.report.step(f"{title}: file", lambda path=path, size=size: write_model(
                    path, [size * MIB // 64] * 64))
                self.scenario(title, path, "hot", 2)
                if place == memory and self.bench.names(path, "saved"):
                    self.scenario(f"{title}: saved there", path, "saved", 2)

    def measure_in_a_folder(self) -> None:
        """Measure with files in a folder of the build, which is removed afterwards."""
        (ROOT / "build").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            self.measure(pathlib.Path(folder))

    def run(self) -> int:
        """Run all steps."""
        if not self.build():
            return 1
        suite = self.report.document["suite"]
        has_gpu = self.report.step("device", self.find_device)
        self.report.step("machine", lambda: describe_machine(
            self.report.document, self.command, self.device or "none that can be used",
            interpreters()))
        if not has_gpu:
            self.report.leave_out("speed, real_gpu tests", "no GPU")
        if has_gpu:
            self.bench = Bench(self.command, self.device, self.clock)
            self.report.step("files", self.measure_in_a_folder)
            if self.bench.ways and TORCH_ALONE not in self.bench.ways.workers:
                self.report.leave_out(PYTHON_SUITE, self.bench.ways.missing.get(TORCH_ALONE, ""))
            if self.bench.ways:
                self.bench.ways.close()
        for name, fakes in SUITE:
            if (has_gpu or fakes) and name in self.arguments.suite.split(","):
                self.report.step(f"suite: {name}", lambda name=name, fakes=fakes: run_suite(
                    suite, self.folder, name, fakes, self.clock))
        wants_python = PYTHON_SUITE in self.arguments.suite.split(",")
        left_out = PYTHON_SUITE in self.report.document["missing"]
        if has_gpu and self.package and wants_python and not left_out:
            self.report.step(f"suite: {PYTHON_SUITE}", lambda: run_python_suite(
                suite, self.package, self.clock))
        return self.tell(has_gpu)

    def tell(self, has_gpu: bool) -> int:
        """Print the verdict."""
        document = self.report.document
        failed = sum(result["failed"] for result in document["suite"].values())
        failed += sum(row["failed"] != "" and row["title"].startswith("suite")
                      for row in document["steps"])
        search = next(row["failed"] for row in document["steps"] if row["title"] == "device")
        if not has_gpu and not search.startswith(NoGpuError.__name__):
            self.report.conclude(f"the search for a GPU failed: {search}")
            return 1
        if not has_gpu:
            others = sum(row["failed"] != "" and row["title"] != "device"
                         for row in document["steps"])
            self.report.conclude(f"no GPU here; the suite with stand-ins: {failed} failed"
                                 + f", other steps {others} failed" * (others > 0))
            return 1 if failed else 0
        for what, holds, figure in document["verdicts"]:
            print(f"  {'holds ' if holds else 'MISSED'}  {what}: {figure}")
        missed = sum(not holds for _, holds, _ in document["verdicts"])
        steps = sum(row["failed"] != "" for row in document["steps"])
        targets = (f"targets {missed} missed of {len(document['verdicts'])}"
                   if document["verdicts"] else "no target was measured")
        self.report.conclude(f"{self.device}: suite {failed} failed, {targets}, steps {steps} "
                             f"failed of {len(document['steps'])}")
        print(f"reports in {self.arguments.out}")
        return 1 if failed or steps else 0


def main() -> int:
    """Build, measure, test, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=ROOT / "build/gpu-check", type=pathlib.Path)
    parser.add_argument("--device", default="")
    parser.add_argument("--build", default=ROOT / "build/release", type=pathlib.Path)
    parser.add_argument("--no-build", action="store_true", help="take what is built")
    parser.add_argument("--package", type=pathlib.Path,
                        help="a folder with the Python package, which is not built then")
    parser.add_argument("--small", action="store_true", help="a rehearsal: tiny files")
    parser.add_argument("--suite", default=",".join(SUITE_NAMES),
                        help="programs of the suite, by comma (all)")
    parser.add_argument("--minutes", default=7.5, type=float)
    arguments = parser.parse_args()
    if set(arguments.suite.split(",")) - set(SUITE_NAMES):
        parser.error(f"--suite takes of {', '.join(SUITE_NAMES)}")
    named = os.environ.get("GPU_CHECK_PYTHON", "")
    if named and not shutil.which(named):
        print(f"GPU_CHECK_PYTHON: {named} is not a program; other interpreters are tried")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out}: {error.strerror}")
    return Check(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
