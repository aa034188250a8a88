# SPDX-License-Identifier: Apache-2.0
"""Compares saves by several packages: ``python benchmarks/compare_saves.py``.

As in compare_loads.py, every timed run is a separate process, and runs are interleaved at random.
The written files are read back and compared. Quick saves (the kernel has the bytes) and durable
saves (the device has them) are not compared with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from compare_loads import MIB, hold_ballast, machine, peak_memory, summary

Save = Callable[[dict[str, Any], str], None]


def make_tensors(kind: str) -> dict[str, Any]:
    """Return the tensors of a scenario, in ordinary torch memory or, "aligned", at whole pages."""
    import torch

    torch.manual_seed(0)
    if kind == "small":
        return {f"model.layers.{i}.lora_A.weight": torch.full((256,), float(i))
                for i in range(20000)}
    count, size = {"1g": (64, 16), "400m": (50, 8), "25m": (50, 0.5), "aligned": (64, 16)}[kind]
    block = torch.randint(0, 1 << 30, (int(size * MIB / 8),))
    tensors = {}
    for index in range(count):
        if kind == "aligned":
            import numpy as np

            raw: Any = np.empty(int(size * MIB) + 4096, dtype=np.uint8)
            skip = -raw.ctypes.data % 4096
            tensor = torch.from_numpy(raw[skip : skip + int(size * MIB)]).view(torch.int64)
        else:
            tensor = torch.empty_like(block)
        tensors[f"model.layers.{index}.mlp.weight"] = tensor.copy_(block).add_(index)
    return tensors


def ours(**options: Any) -> Save:
    """Our save_file with options."""

    def save(tensors: dict[str, Any], path: str) -> None:
        from fastsafetensors.torch import save_file

        save_file(tensors, path, **options)

    return save


def reference(tensors: dict[str, Any], path: str) -> None:
    """The safetensors package."""
    from safetensors.torch import save_file

    save_file(tensors, path)


def pickled(tensors: dict[str, Any], path: str) -> None:
    """torch.save."""
    import torch

    torch.save(tensors, path)


def plain_write(tensors: dict[str, Any], path: str) -> None:
    """Buffered writes of each tensor's bytes, one after the other: no header."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors.values():
            view = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(view), 8 * MIB):
                file.write(view[start : start + 8 * MIB])


def synced(save: Save) -> Save:
    """Save, then fsync: what a careful program does with the others."""

    def work(tensors: dict[str, Any], path: str) -> None:
        save(tensors, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    return work


CONTESTANTS: dict[str, Save] = {
    "ours quick": ours(),
    "ours durable": ours(durable=True),
    "ours durable, aligned": ours(durable=True, alignment=4096),
    "safetensors": reference,
    "safetensors + fsync": synced(reference),
    "torch.save": pickled,
    "torch.save + fsync": synced(pickled),
    "plain write": plain_write,
    "plain write + fsync": synced(plain_write),
}
YARDSTICKS = {"plain write", "plain write + fsync"}
QUICK = ["ours quick", "safetensors", "torch.save", "plain write"]
DURABLE = ["ours durable", "safetensors + fsync", "torch.save + fsync", "plain write + fsync"]
# (title, kind of tensors, contestants); the first one is ours.
SCENARIOS: list[tuple[str, str, list[str]]] = [
    ("save 1 GiB, quick", "1g", QUICK),
    ("save 1 GiB, durable", "1g", DURABLE),
    ("save 1 GiB of page-aligned memory, durable", "aligned",
     ["ours durable, aligned", "safetensors + fsync", "plain write + fsync"]),
    ("save 400 MB, quick", "400m", QUICK),
    ("save 400 MB, durable", "400m", DURABLE),
    ("save 25 MB, quick", "25m", QUICK),
    ("save 25 MB, durable", "25m", DURABLE),
    ("save 20,000 x 1 KB, quick", "small", QUICK),
    ("save 20,000 x 1 KB, durable", "small", DURABLE),
]


def check_file(tensors: dict[str, Any], path: str, name: str) -> bool:
    """Read back what was written."""
    import torch

    if name in YARDSTICKS:
        return os.path.getsize(path) == int(sum(t.nbytes for t in tensors.values()))
    if name.startswith("torch"):
        loaded = torch.load(path, weights_only=True)
    else:
        from safetensors.torch import load_file

        loaded = load_file(path)
    equal = [bool(torch.equal(loaded[key], value)) for key, value in tensors.items()]
    return all(equal)


def child(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one run and measure it."""
    save, path = CONTESTANTS[order["contestant"]], order["path"]
    tensors = make_tensors(order["kind"])
    import safetensors.torch  # noqa: F401

    import fastsafetensors.torch  # noqa: F401

    if os.path.exists(path):
        os.unlink(path)
    os.sync()
    # last, because a VM may return memory that is idle for seconds to its host
    hold_ballast(order["ballast"])
    # once untimed, so that the page cache gets memory that is already backed by the host
    save(tensors, path)
    os.unlink(path)
    resident = peak_memory()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from here
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    save(tensors, path)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    result = {"seconds": seconds, "peak": min(peak_memory(), resident) or resident,
              "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}
    if not check_file(tensors, path, order["contestant"]):
        raise SystemExit(f"{order['contestant']}: what was written is not what was saved")
    os.unlink(path)
    return result


def run_scenario(scenario: tuple[str, str, list[str]], arguments: argparse.Namespace,
                 skipped: dict[str, str]) -> dict[str, Any]:
    """All runs of a scenario, interleaved at random."""
    title, kind, names = scenario
    runs: dict[str, list[Any]] = {name: [] for name in names}
    order = [name for name in names for _ in range(arguments.runs)]
    random.shuffle(order)
    for number, name in enumerate(order, 1):
        if sys.stderr.isatty():
            print(f"\r{title}: {number} of {len(order)} ", end="", file=sys.stderr)
        job = {"contestant": name, "kind": kind, "ballast": arguments.ballast * MIB,
               "path": str(pathlib.Path(arguments.folder) / "saved.tmp")}
        done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)],
                              capture_output=True, text=True)
        if done.returncode:
            skipped[name] = done.stderr.strip().splitlines()[-1][:160]
            continue
        runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {"title": title, "rows": [summary(n, rs) for n, rs in runs.items() if rs]}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/compare_saves.py",
                                     description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", default="build/bench", help="where files and results go")
    parser.add_argument("--only", help="scenarios whose titles contain this")
    parser.add_argument("--ballast", type=int, default=3072, help="MiB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child))))
        return 0
    from bench_report import html_report, print_scenario

    from fastsafetensors import __version__

    folder = pathlib.Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    skipped: dict[str, str] = {}
    results = []
    for scenario in SCENARIOS:
        if arguments.only and arguments.only not in scenario[0]:
            continue
        results.append(run_scenario(scenario, arguments, skipped))
        print_scenario(results[-1])
    notes = [f"Left out: {name} ({reason})." for name, reason in skipped.items()]
    print("\n".join(notes))
    document = {"version": __version__, "runs": arguments.runs, "machine": machine(),
                "what": "saving", "notes": " ".join(notes), "scenarios": results}
    (folder / "save.json").write_text(json.dumps(document, indent=1))
    (folder / "save.html").write_text(html_report(document))
    print(f"report: {folder / 'save.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
