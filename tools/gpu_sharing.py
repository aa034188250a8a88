# SPDX-License-Identifier: Apache-2.0
"""Measurements of several processes: IPC, MIG, MPS, several GPUs. Used by gpu_check.py.

Each cell is measured where the machine has what it needs. Elsewhere its row says "not here" with
the reason, so that a report shows what was looked for.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

CELL_S = 40
# Loads a file, sends copies of the tensors to another process by torch's IPC, and compares the sums
# of bytes.
IPC_PROGRAM = """
import sys, time
import torch
from fastsafetensors.torch import load_file
def receive(tensors, sums):
    for tensor in iter(tensors.get, None):
        sums.put(int(tensor.view(torch.uint8).sum(dtype=torch.int64)))
        del tensor
if __name__ == "__main__":
    path, device = sys.argv[1], sys.argv[2].replace("hip", "cuda")
    context = torch.multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    process = context.Process(target=receive, args=(tensors, sums), daemon=True)
    process.start()
    loaded = load_file(path, device=device)
    times = []
    for name, tensor in loaded.items():
        expected = int(tensor.view(torch.uint8).sum(dtype=torch.int64))
        tensor = tensor.clone()  # torch sends whole allocations only
        start = time.perf_counter()
        tensors.put(tensor)
        assert sums.get(timeout=120) == expected, f"{name} differs in the other process"
        times.append(time.perf_counter() - start)
    tensors.put(None)
    process.join(30)
    later = sorted(times[1:] or times)
    print(f"{len(times)} tensors are equal; the first took {times[0] * 1e3:.1f} ms, the median "
          f"{later[len(later) // 2] * 1e3:.2f} ms")
"""


class NotHere(Exception):
    """The machine lacks what a cell needs."""


class Sharing:
    """The cells, for one device and one file."""

    def __init__(self, command: pathlib.Path, device: str, path: pathlib.Path) -> None:
        """command: the program fastsafetensors."""
        self.command, self.device, self.path = command, device, path

    def _start(self, environment: dict[str, str], device: str) -> subprocess.Popen[str]:
        words = [os.fspath(self.command), "load", "--device", device, "--json", "--repeat", "3",
                 os.fspath(self.path)]
        return subprocess.Popen(words, text=True, env={**os.environ, **environment},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _seconds(self, process: subprocess.Popen[str]) -> float:
        """Of the last load of a process."""
        try:
            output, errors = process.communicate(timeout=CELL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode != 0:
            raise RuntimeError((errors.strip() or output.strip())[-300:])
        return float(json.loads(output.splitlines()[-1])["seconds"])

    def ipc(self, pythons: list[str], package: pathlib.Path | None) -> str:
        """Send loaded tensors to another process through torch."""
        if package is None:
            raise NotHere("the extension was not built")
        environment = {**os.environ, "PYTHONPATH": os.fspath(package)}
        for python in pythons:
            probe = subprocess.run(
                [python, "-c", "import torch; assert torch.cuda.is_available()"],
                capture_output=True, timeout=CELL_S, check=False, env=environment)
            if probe.returncode == 0:
                break
        else:
            raise NotHere("no interpreter has a torch that can use this GPU")
        program = self.path.parent / "share_by_ipc.py"  # spawn imports it by its path
        program.write_text(IPC_PROGRAM)
        done = subprocess.run([python, os.fspath(program), os.fspath(self.path), self.device],
                              capture_output=True, text=True, timeout=CELL_S, check=False,
                              env=environment)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip()[-300:])
        return done.stdout.strip()

    def mig(self) -> str:
        """Load to the first MIG instance, by its name."""
        if not shutil.which("nvidia-smi"):
            raise NotHere("nvidia-smi is missing, which lists MIG instances")
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                                timeout=CELL_S, check=False).stdout
        found = re.search(r"UUID: (MIG-[^)\s]+)", listed)
        if found is None:
            raise NotHere("nvidia-smi -L lists no MIG instance")
        seconds = self._seconds(self._start({"CUDA_VISIBLE_DEVICES": found[1]}, "cuda:0"))
        return f"{self._speed(seconds)} to one instance"

    def mps(self) -> str:
        """Two processes that load at the same time through the MPS daemon."""
        folder = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        if not (folder / "control").exists():
            raise NotHere(f"no MPS daemon: {folder}/control does not exist")
        alone = self._seconds(self._start({}, self.device))
        both = [self._start({}, self.device) for _ in range(2)]
        slowest = max(self._seconds(process) for process in both)
        return f"{self._speed(alone)} alone, {self._speed(slowest)} each of two"

    def each_device(self) -> str:
        """Loads to each device alone, and to all at once, by a process each."""
        listed = subprocess.run([os.fspath(self.command), "engines", "--json"],
                                capture_output=True, text=True, timeout=150, check=True).stdout
        kind = self.device.partition(":")[0]
        reason = next(row["reason"] for row in json.loads(listed)["engines"]
                      if row["name"] == kind)
        found = re.match(r"(\d+) device", reason)
        devices = [f"{kind}:{i}" for i in range(int(found[1]) if found else 1)]
        if len(devices) < 2:
            raise NotHere("there is one GPU")
        alone = [self._speed(self._seconds(self._start({}, device))) for device in devices]
        together = [self._start({}, device) for device in devices]
        slowest = max([self._seconds(process) for process in together])
        return (", ".join(f"{device} {speed}" for device, speed in zip(devices, alone, strict=True))
                + f"; at once at least {self._speed(slowest)} each")

    def _speed(self, seconds: float) -> str:
        return f"{self.path.stat().st_size / seconds / 1e9:.2f} GB/s"


def measure_cell(name: str, cell: Callable[[], str]) -> dict[str, str]:
    """A row of the report. Errors are part of it, so that the other cells are measured."""
    try:
        result = cell()
    except NotHere as reason:
        result = f"not here: {reason}"
    except (OSError, ValueError, KeyError, IndexError, RuntimeError,
            subprocess.SubprocessError) as error:
        result = f"failed: {type(error).__name__}: {error}"
    result = " ".join(result.split()).replace("|", "/")  # a row of a table
    print(f"  {name}: {result}", flush=True)
    return {"name": name, "result": result}


CELLS = ("tensors sent by IPC", "MIG instance", "MPS, two processes", "each GPU, all at once")


def measure_sharing(sharing: Sharing, pythons: list[str], package: pathlib.Path | None,
                    ) -> list[dict[str, str]]:
    """All cells."""
    work = (lambda: sharing.ipc(pythons, package), sharing.mig, sharing.mps, sharing.each_device)
    return [measure_cell(name, cell) for name, cell in zip(CELLS, work, strict=True)]


def missing_gpu(why: str = "no GPU") -> list[dict[str, str]]:
    """The rows of a machine without a GPU, or without time for them."""
    return [{"name": name, "result": f"not here: {why}"} for name in CELLS]
