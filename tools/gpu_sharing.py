# SPDX-License-Identifier: Apache-2.0
"""Measurements of several processes: IPC, MIG, MPS, several GPUs, one GPU of several processes.

Used by gpu_check.py.

Each cell is measured where the machine has what it needs. Elsewhere its row says "not here" with
the reason, so that a report shows what was looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO

OUTPUT_BYTES_MAX = 1 << 20
CELL_S = 40  # of a cell, with all its processes
# Loads a file, sends copies of the tensors to another process by torch's IPC, and compares the sums
# of bytes.
IPC_PROGRAM = """
import sys, time
import torch
from fastsafetensors.torch import load_file
def receive(tensors, sums):
    try:
        for tensor in iter(tensors.get, None):
            sums.put(int(tensor.view(torch.uint8).sum(dtype=torch.int64)))
            del tensor
    except Exception as error:
        sums.put(f"the other process: {type(error).__name__}: {error}")
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
        found = sums.get(timeout=20)
        assert found == expected, f"{name}: {found} in the other process, {expected} here"
        times.append(time.perf_counter() - start)
    tensors.put(None)
    process.join(30)
    later = sorted(times[1:] or times)
    print(f"{len(times)} tensors are equal; the first took {times[0] * 1e3:.1f} ms, the median "
          f"{later[len(later) // 2] * 1e3:.2f} ms")
"""

# Each rank has a GPU. Rank 0 reads a file and broadcasts its tensors; then every rank reads the
# file. Prints the seconds of both. On the CPU it works as well, for the test of this program.
ONE_READ_PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
def load(group, path, device):
    loader = SafeTensorsFileLoader(group, device)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    loaded = [buffer.get_tensor(name) for name in loader.get_keys()]
    total = sum(int(tensor.view(torch.uint8).sum(dtype=torch.int64)) for tensor in loaded)
    buffer.close()
    loader.close()
    return total
def work(rank, path, kind, count, store):
    device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
    if kind != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", init_method="file://" + store,
                            rank=rank, world_size=count)
    seconds, totals = [[], []], set()
    for _ in range(3):
        for group, times in zip((dist.group.WORLD, SingleGroup()), seconds):
            dist.barrier()
            start = time.perf_counter()
            totals.add(load(group, path, device))
            dist.barrier()
            times.append(time.perf_counter() - start)
    assert len(totals) == 1, f"sums of bytes differ: {totals}"
    if rank == 0:
        print(f"{count} GPUs after {min(seconds[0]):.3f} s by one read, "
              f"after {min(seconds[1]):.3f} s by {count}")
    dist.destroy_process_group()
if __name__ == "__main__":
    path, kind, count, store = sys.argv[1:]
    torch.multiprocessing.spawn(work, (path, kind, int(count), store), nprocs=int(count))
"""


class NotHere(Exception):
    """The machine lacks what a cell needs."""


class Sharing:
    """The cells, for one device and one file."""

    def __init__(self, command: pathlib.Path, device: str, path: pathlib.Path,
                 pythons: list[str], package: pathlib.Path | None) -> None:
        """command: the program fastsafetensors. package: the folder of the Python package."""
        self.command, self.device, self.path = command, device, path
        self.pythons, self.package = pythons, package
        self.started: list[subprocess.Popen[bytes]] = []
        self.outputs: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        self.end = float("inf")

    def begin(self) -> None:
        """Begin a cell."""
        self.end = time.monotonic() + CELL_S

    def _left(self) -> float:
        """The seconds that the cell may still take."""
        return max(self.end - time.monotonic(), 0.1)

    def _run(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own. Its outputs go to files, however long they are."""
        # As long as the process.
        files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=files[0],
                                   stderr=files[1], start_new_session=True)
        self.started.append(process)
        self.outputs[process.pid] = files
        return process

    def _start(self, environment: dict[str, str], device: str) -> subprocess.Popen[bytes]:
        return self._run([os.fspath(self.command), "load", "--device", device, "--json",
                          "--repeat", "3", os.fspath(self.path)], environment)

    def stop(self) -> None:
        """Kill the processes that a failed cell has left, and those that they have started."""
        while self.started:
            process = self.started.pop()
            os.killpg(process.pid, signal.SIGKILL)  # not waited for, so the number is still its own
            process.poll()
            for file in self.outputs.pop(process.pid):
                file.close()

    def _seconds(self, process: subprocess.Popen[bytes]) -> float:
        """Of the last load of a process."""
        return self._finish(process)[0]

    def _finish(self, process: subprocess.Popen[bytes]) -> tuple[float, int]:
        """The seconds of the last load of a process, and its most resident memory in MiB."""
        output, resident_bytes = self._wait(process)
        rows = [line for line in output.splitlines() if line.startswith("{")]
        return float(json.loads(rows[-1])["seconds"]), resident_bytes >> 20

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[str, int]:
        """What a process has written, and its most resident memory in bytes."""
        # waitid() keeps the process's number until its group is killed; wait4() reports the memory.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > self.end:
                raise subprocess.TimeoutExpired(process.args, CELL_S)
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.started.remove(process)
        texts = []
        for file in self.outputs.pop(process.pid):
            with file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - OUTPUT_BYTES_MAX, 0))
                texts.append(file.read().decode(errors="replace"))
        output, errors = texts
        words = f"{errors.strip()[-300:]} {output.strip()[-300:]}".strip()
        if process.returncode < 0:
            raise RuntimeError(f"signal {-process.returncode} ended it: {words}")
        if process.returncode != 0:
            raise RuntimeError(words)
        return output, usage.ru_maxrss << 10

    def _run_program(self, name: str, program: str, words: list[str]) -> str:
        """The output of a program with torch, in the first interpreter that has it for GPUs."""
        if self.package is None:
            raise NotHere("the extension was not built")
        environment = {**os.environ, "PYTHONPATH": os.fspath(self.package)}
        for python in self.pythons:
            probe = subprocess.run(
                [python, "-c", "import torch; assert torch.cuda.is_available()"],
                capture_output=True, timeout=self._left(), check=False, env=environment)
            if probe.returncode == 0:
                break
        else:
            raise NotHere("no interpreter has a torch that can use this GPU")
        path = self.path.parent / name  # spawn imports it by its path
        path.write_text(program)
        output = self._wait(self._run([python, os.fspath(path), os.fspath(self.path), *words],
                                      environment))[0]
        return output.strip().splitlines()[-1]

    def ipc(self) -> str:
        """Send loaded tensors to another process through torch."""
        return self._run_program("share_by_ipc.py", IPC_PROGRAM, [self.device])

    def one_read(self) -> str:
        """Read the file once for all GPUs, and once for each."""
        count = len(self._devices())
        if count < 2:
            raise NotHere("there is one GPU")
        store = self.path.parent / "one_read.store"
        store.unlink(missing_ok=True)
        return self._run_program("one_read.py", ONE_READ_PROGRAM,
                                 ["cuda", str(count), os.fspath(store)])

    def by_uuid(self) -> str:
        """Load to the last GPU as the only visible one, and to none."""
        found = re.findall(r"UUID: (GPU-[^)\s]+)", self._nvidia_smi())
        if not found:
            raise NotHere("nvidia-smi -L lists no GPU")
        seconds = self._seconds(self._start({"CUDA_VISIBLE_DEVICES": found[-1]}, "cuda:0"))
        try:
            self._seconds(self._start({"CUDA_VISIBLE_DEVICES": ""}, "cuda:0"))
        except RuntimeError as error:
            if "device" in str(error):
                return f"{self._speed(seconds)} to number {len(found) - 1}; none visible: {error}"
            raise
        raise RuntimeError("a load succeeded with CUDA_VISIBLE_DEVICES=''")

    def _nvidia_smi(self) -> str:
        """What nvidia-smi -L prints."""
        if not shutil.which("nvidia-smi"):
            raise NotHere("nvidia-smi is missing, which lists the names")
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                              timeout=self._left(), check=False).stdout

    def mig(self) -> str:
        """Load to the first MIG instance, by its name."""
        found = re.search(r"UUID: (MIG-[^)\s]+)", self._nvidia_smi())
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

    def _devices(self) -> list[str]:
        """The names of all devices of this kind."""
        listed = subprocess.run([os.fspath(self.command), "engines", "--json"],
                                capture_output=True, text=True, timeout=self._left(),
                                check=True).stdout
        rows = {row["name"]: row for row in json.loads(listed)["engines"]}
        kind = self.device.partition(":")[0]
        if kind == "gpu":
            kind = "cuda" if rows["cuda"]["usable"] else "hip"
        reason = rows[kind]["reason"]
        found = re.match(r"(\d+) device", reason)
        return [f"{kind}:{i}" for i in range(int(found[1]) if found else 1)]

    def each_device(self) -> str:
        """Loads to each device alone, and to all at once, by a process each."""
        devices = self._devices()
        if len(devices) < 2:
            raise NotHere("there is one GPU")
        alone = [self._speed(self._seconds(self._start({}, device))) for device in devices]
        together = [self._start({}, device) for device in devices]
        slowest = max([self._seconds(process) for process in together])
        return (", ".join(f"{device} {speed}" for device, speed in zip(devices, alone, strict=True))
                + f"; at once at least {self._speed(slowest)} each")

    def eight_processes(self) -> str:
        """Loads of eight processes to one device at once: speed, and their memory on the host."""
        together = [self._finish(process)
                    for process in [self._start({}, self.device) for _ in range(8)]]
        return (f"at least {self._speed(max(seconds for seconds, _ in together))} each, at most "
                f"{max(memory for _, memory in together)} MiB of host memory each")

    def _speed(self, seconds: float) -> str:
        return f"{self.path.stat().st_size / seconds / 1e9:.2f} GB/s"


def measure_cell(name: str, cell: Callable[[], str]) -> dict[str, str]:
    """A row of the report. Errors are part of it, so that the other cells are measured."""
    try:
        result = cell()
    except NotHere as reason:
        result = f"not here: {reason}"
    except Exception as error:
        result = f"failed: {type(error).__name__}: {error}"
    result = " ".join(result.split()).replace("|", "/")  # a row of a table
    print(f"  {name}: {result}", flush=True)
    return {"name": name, "result": result}


CELLS = {"GPU chosen by its UUID": Sharing.by_uuid,
         "eight processes, one GPU": Sharing.eight_processes,
         "tensors sent by IPC": Sharing.ipc,
         "MIG instance": Sharing.mig,
         "MPS, two processes": Sharing.mps,
         "each GPU, all at once": Sharing.each_device,
         "one read for all GPUs": Sharing.one_read}


def measure_sharing(sharing: Sharing, has_time: Callable[[], bool]) -> list[dict[str, str]]:
    """All cells for which there is time."""
    rows = []
    for name, cell in CELLS.items():
        def work(cell: Callable[[Sharing], str] = cell) -> str:
            if not has_time():
                raise NotHere("no time left")
            sharing.begin()
            try:
                return cell(sharing)
            finally:
                sharing.stop()
        rows.append(measure_cell(name, work))
    return rows


def missing_gpu(why: str = "no GPU") -> list[dict[str, str]]:
    """The rows of a machine without a GPU, or without time for them."""
    return [{"name": name, "result": f"not here: {why}"} for name in CELLS]
