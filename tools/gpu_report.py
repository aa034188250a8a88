# SPDX-License-Identifier: Apache-2.0
"""The report of gpu_check.py: steps, verdict, a description of the machine, and the pages."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from gpu_clock import NoTimeError, run, words_of
from gpu_sharing import missing_gpu
from gpu_verdicts import judge

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Environment variables that change what is measured.
SETTINGS = re.compile("(CUDA|HIP|ROCR|FASTSAFETENSORS|PYTORCH)_")
# Statistics that docs/gpu.md explains.
STATISTICS = ("gds_bytes", "device_copies", "device_launches", "device_wait_ns", "read_ns",
              "copy_ns")


class Report:
    """The results so far, written to a file after every step."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Begin in a folder."""
        self.folder = folder
        self.document: dict = {"what": "loading to a GPU", "runs": 3, "steps": [], "limits": {},
                               "suite": {}, "missing": {}, "scenarios": [], "setup": [],
                               "verdicts": [], "sharing": missing_gpu(),
                               "notes": "Hot: the loads of a process after its first."}
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "report.md", "report.html"):  # of an earlier check
            (folder / name).unlink(missing_ok=True)

    def step(self, title: str, work: Callable[[], object]) -> bool:
        """Run one step, and record a failure as a row. Returns whether it succeeded."""
        print(title, flush=True)
        start, why = time.monotonic(), ""
        try:
            work()
        except NoTimeError as error:
            self.leave_out(title, str(error))
        except (Exception, SystemExit) as error:
            words = words_of(error).strip()
            why = f"{type(error).__name__}: {words[-400:]}"
            print(f"  failed: {why}")
        self.document["steps"].append(
            {"title": title, "seconds": round(time.monotonic() - start, 2), "failed": why})
        with contextlib.suppress(Exception):
            self.document["verdicts"] = judge(self.document)
        self.write()
        return not why

    def leave_out(self, what: str, why: str) -> None:
        """Record something that is not measured, with the reason."""
        print(f"  not at hand: {what}: {why}")
        self.document["missing"][what] = why

    def conclude(self, verdict: str) -> None:
        """Print the verdict and write it to the report."""
        print(f"verdict: {verdict}")
        self.document["verdict"] = verdict
        self.write()

    def write(self) -> None:
        """Write the data before the pages, because the pages can be made again from it."""
        text = json.dumps(self.document, indent=1) + "\n"
        (self.folder / "report.json").write_text(text)
        with contextlib.suppress(Exception):
            write_pages(self.document, self.folder)


def _ask(*words: str) -> str:
    """What a command prints, in one line."""
    try:
        lines = run(list(words), 20).splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"? ({type(error).__name__})"
    return "; ".join(" ".join(line.split()) for line in lines if line.strip(" =-"))


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"


def _value(path: str, name: str) -> str:
    """The value behind the first "name: value" of a file."""
    return next((line.split(":", 1)[1].strip() for line in read_lines(path)
                 if line.startswith(name)), "?")


def describe_machine(document: dict, command: pathlib.Path, device: str,
                     pythons: list[str]) -> None:
    """Record what a reader needs to interpret the figures.

    pythons: the interpreters whose torch is named.
    """
    document["version"] = _ask(os.fspath(command), "--version")
    folder = ROOT / "build"  # of the files
    document["machine"] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _ask("git", "-C", os.fspath(ROOT), "describe", "--always", "--dirty"),
        "arguments": " ".join(sys.argv[1:]) or "none",
        "gpu": device, "engines": _ask(os.fspath(command), "engines"),
        "nvidia-smi": _ask("nvidia-smi", "--format=csv,noheader", "--query-gpu=name,driver_version,"
                           "pcie.link.gen.current,pcie.link.width.current,memory.total,pstate"),
        "rocm-smi": _ask("rocm-smi", "--showproductname", "--showdriverversion", "--showmeminfo",
                         "vram"),
        "environment": ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items())
                                 if SETTINGS.match(name)) or "no settings",
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, "
                      + _value("/proc/cpuinfo", "model name"),
        "memory": _value("/proc/meminfo", "MemTotal"), "limit of locked memory": _locked_limit(),
        "system": platform.platform(),
        "NUMA nodes": len(list(pathlib.Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "huge pages": " ".join(read_lines("/sys/kernel/mm/transparent_hugepage/enabled")) or "?",
        "file system": _ask("findmnt", "-no", "FSTYPE,OPTIONS", "-T",
                            os.fspath(folder.resolve() if folder.exists() else ROOT)),
        "nvidia-fs": os.path.exists("/proc/driver/nvidia-fs"),
        "python": sys.version.split()[0],
        "torch": ", ".join(f"{_ask(name, '-c', 'import torch; print(torch.__version__)')} ({name})"
                           for name in pythons),
    }


def read_lines(path: str) -> list[str]:
    """The lines of a file; empty if it does not exist."""
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def as_cell(text: object) -> str:
    """Text for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "/")


def _missing_rows(missing: dict[str, str]) -> list[str]:
    """What was not measured, in one row per reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in missing.items():
        reasons.setdefault(why, []).append(name)
    return [f"| {as_cell('; '.join(names))} | {as_cell(why)} |" for why, names in reasons.items()]


def _test_rows(suite: dict[str, dict]) -> list[str]:
    lines = ["", "| tests | passed | failed | skipped |", "|---|---|---|---|",
             *(f"| {name} | {row['passed']} | {row['failed']} | {row['skipped']} |"
               for name, row in suite.items())]
    return lines + [f"\n{name}: {as_cell(fault)}" for name, row in suite.items()
                    for fault in row.get("faults", [])]


def _scenario_rows(result: dict) -> list[str]:
    """A table of methods, and what the library says of its own loads."""
    lines = ["", f"## {result['title']}", "", "| way | median ms | lowest | highest | GB/s |",
             "|---|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['median'] * 1e3:.2f} | {r['low'] * 1e3:.2f} | "
              f"{r['high'] * 1e3:.2f} | {result['bytes'] / r['median'] / 1e9:.2f} |"
              for r in result["rows"]]
    lines += [f"\n{name} failed: {as_cell(why)}" for name, why in result["failed"].items()]
    for row in result["rows"]:
        stats = row.get("stats") or {}
        figures = [f"{name} {stats[name]}" for name in STATISTICS if name in stats]
        if figures:
            lines.append(f"\n{row['name']}, the last load: {stats.get('reason', '')}; "
                         + ", ".join(figures))
    return lines


def write_markdown(document: dict, folder: pathlib.Path) -> None:
    """report.md."""
    lines = ["# Loading to a GPU", "",
             f"**Verdict: {document.get('verdict', 'the check has not ended')}**", "",
             f"- version: {document.get('version', '?')}",
             *(f"- {name}: {value}" for name, value in document.get("machine", {}).items()),
             *(f"- limit, {name}: {value}" for name, value in document["limits"].items()), "",
             "| step | seconds | failed |", "|---|---|---|",
             *(f"| {row['title']} | {row['seconds']} | {as_cell(row['failed'])} |"
               for row in document["steps"]), "", "| target | holds | measured |", "|---|---|---|"]
    lines += [f"| {what} | {'yes' if holds else '**no**'} | {figure} |"
              for what, holds, figure in document["verdicts"]]
    lines += _test_rows(document["suite"])
    lines += ["", "| not measured | reason |", "|---|---|", *_missing_rows(document["missing"])]
    lines += ["", "| several processes | result |", "|---|---|",
              *(f"| {row['name']} | {row['result']} |" for row in document["sharing"])]
    for result in document["scenarios"]:
        lines += _scenario_rows(result)
    (folder / "report.md").write_text("\n".join(lines) + "\n", errors="backslashreplace")


def write_pages(document: dict, folder: pathlib.Path) -> None:
    """report.md, then report.html."""
    write_markdown(document, folder)
    spec = importlib.util.spec_from_file_location(
        "bench_report", ROOT / "benchmarks/bench_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (folder / "report.html").write_text(module.html_report(document), errors="backslashreplace")
