# SPDX-License-Identifier: Apache-2.0
"""Methods of loading and saving with a GPU, each in a separate process. Used by gpu_check.py."""

from __future__ import annotations

import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The program of a method's process. It opens the device, and then executes one request per line of
# its input: load (or save) `path` `count` times.
PROGRAM = """
import gc, json, os, resource, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries may print
device = sys.argv[1]
give_back = between = lambda: None
{imports}
def prepare():
{prepare}
def work():
{body}
def cpu_time():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def peak_memory():
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) << 10 for row in file if row.startswith("VmHWM"))
def measure():
    times = []
    prepare()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins again
    used = cpu_time()
    for _ in range(count):
        start = time.perf_counter()
        keep = work()
        finish()
        times.append(time.perf_counter() - start)
        between()
        del keep
    return {{"times": times, "cpu": cpu_time() - used, "peak": peak_memory()}}
print("ready", file=answers, flush=True)
for request in sys.stdin:
    path, count = json.loads(request)
    try:
        answer = measure()
    except Exception as error:
        answer = {{"error": f"{{type(error).__name__}}: {{error}}"}}
    gc.collect()
    give_back()
    print(json.dumps(answer), file=answers, flush=True)
"""
TORCH = """
import torch
device = device.replace("hip", "cuda")  # torch's name for a GPU of either kind
torch.zeros(1, device=device); torch.cuda.synchronize()
finish = torch.cuda.synchronize
give_back = torch.cuda.empty_cache
"""
CORE = """
import fastsafetensors._core as core
core.device_info(device)
finish = lambda: None
"""
MODEL = """
from fastsafetensors.torch import load_file, load_model
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.names = []
        for name, tensor in load_file(path, "meta").items():
            self.names.append(name)
            self.register_buffer(name.replace(".", "_"), torch.empty_like(tensor, device=device))
    def state_dict(self, *a, **k):
        return {n: getattr(self, n.replace(".", "_")) for n in self.names}
    def named_buffers(self, *a, **k):
        return self.state_dict().items()
"""
_PINNED = """    import safetensors
    with safetensors.safe_open(path, "pt") as f:
        return {n: f.get_tensor(n).pin_memory().to(device, non_blocking=True) for n in f.keys()}"""
_LOADER = """    l = SafeTensorsFileLoader(SingleGroup(), device)
    l.add_filenames({0: [path]})
    b = l.copy_files_to_device()
    return {n: b.get_tensor(n) for n in l.get_keys()}, b, l"""
_LOADERS = "from fastsafetensors import SafeTensorsFileLoader, SingleGroup"
_LOAD_FILE = "from fastsafetensors.torch import load_file"
_SAVE_FILE = "from fastsafetensors.torch import load_file, save_file, save_file_async"
_ASYNC = "\nfinish = lambda: None\nbetween = lambda: last.wait()"
_SAVED = "from safetensors.torch import load_file, save_file"
_TENSORS = """    global tensors
    tensors = load_file(path, device=device)
    torch.cuda.synchronize()"""

# Not measured: it shows whether an interpreter has a torch that can use the GPU.
TORCH_ALONE = "torch alone"
# {name: (imports, body, whether the package is ours)}
WAYS = {
    "ours, the extension": (CORE, "    l = core.Model(path).load(device=device)\n    l.wait()\n"
                                  "    return list(l)", True),
    "ours, load_file": (TORCH + _LOAD_FILE, "    return load_file(path, device=device)", True),
    "ours, load_file, gds off": (
        TORCH + _LOAD_FILE, '    return load_file(path, device=device, gds="off")', True),
    "ours, load_file, own memory": (
        TORCH + _LOAD_FILE, '    return load_file(path, device=device, allocator="own")', True),
    "ours, load_file, dtype": (
        TORCH + _LOAD_FILE, "    return load_file(path, device=device, dtype=torch.float16)", True),
    "ours, safe_open": (
        TORCH + "from fastsafetensors import safe_open",
        '    with safe_open(path, "pt", device=device) as f:\n'
        "        return {n: f.get_tensor(n) for n in f.keys()}", True),
    "ours, loader of 0.5": (TORCH + _LOADERS, _LOADER, True),
    "ours, load_model": (
        TORCH + MODEL, "    return load_model(net, path, strict=False, device=device)", True),
    "safetensors": (TORCH + "from safetensors.torch import load_file",
                    "    return load_file(path, device=device)", False),
    "torch, pinned copy of a mapping": (TORCH, _PINNED, False),
    "Run:ai streamer": (TORCH + "from runai_model_streamer import SafetensorsStreamer",
                        "    with SafetensorsStreamer() as s:\n        s.stream_file(path)\n"
                        "        return {n: t.to(device) for n, t in s.get_tensors()}", False),
    "InstantTensor": (TORCH + "import instanttensor",
                      "    s = instanttensor.safe_open\n"
                      "    with s(path, framework='pt', device=device) as f:\n"
                      "        return {n: t.clone() for n, t in f.tensors()}", False),
    "fastsafetensors 0.5": (TORCH + _LOADERS, _LOADER, False),
    TORCH_ALONE: (TORCH, "    pass", False),
    "save: ours": (TORCH + _SAVE_FILE, '    save_file(tensors, path + ".saved")', True),
    "save: ours, pause of save_file_async": (
        TORCH + _SAVE_FILE + _ASYNC, '    global last\n'
        '    last = save_file_async(tensors, path + ".saved")', True),
    "save: safetensors": (TORCH + _SAVED, '    save_file(tensors, path + ".saved")', False),
    "save: torch.save": (TORCH + _SAVED, '    torch.save(tensors, path + ".saved")', False),
}
PREPARED = {"ours, load_model": "    global net\n    net = Net()",
            **{name: _TENSORS for name in WAYS if name.startswith("save")}}
# Methods that accept a folder of shards.
OF_FOLDERS = ("ours, the extension", "ours, load_file", "ours, load_file, own memory",
              "ours, safe_open")
START_S, RUN_S = 60, 60


def interpreters() -> list[str]:
    """Python interpreters that may have torch and other loaders. The first that has is used."""
    named = [os.environ.get("GPU_CHECK_PYTHON", ""), os.fspath(ROOT / ".venv/bin/python"),
             sys.executable]
    return [name for name in dict.fromkeys(named) if name and shutil.which(name)]


class Worker:
    """A process that has imported what a method needs, and executes requests."""

    def __init__(self, name: str, python: str, package: pathlib.Path | None, device: str) -> None:
        """Start it. package: the folder of our package; None: what the interpreter has."""
        imports, body, _ = WAYS[name]
        environment = dict(os.environ)
        if package is not None:
            environment["PYTHONPATH"] = os.fspath(package)
        program = PROGRAM.format(imports=imports, body=body, prepare=PREPARED.get(name, "    pass"))
        self._said, self._reason = b"", ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [python, "-c", program, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env=environment)

    def _line(self, seconds: float, limit: float) -> bytes:
        """The next line of the process's output. limit: the seconds that it had in all."""
        end = time.monotonic() + seconds
        output = self._process.stdout
        while b"\n" not in self._said:
            if not select.select([output], [], [], max(0, end - time.monotonic()))[0]:
                raise ValueError(f"no answer within {limit:.0f} s")
            more = os.read(output.fileno(), 65536)
            if not more:
                raise ValueError(self.last_words())
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line

    def last_words(self) -> str:
        """The last line that the process has written to its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it ended without a word")

    def failure(self, seconds: float, limit: float) -> str:
        """Wait until it has started: "", or the reason why it could not within the limit."""
        try:
            self._line(max(0, seconds), limit)
        except ValueError as error:
            return str(error)
        return ""

    def run(self, path: pathlib.Path, count: int, seconds: float) -> dict:
        """Work `count` times: {"times": [s], "cpu": s, "peak": bytes}. ValueError if it fails."""
        request = json.dumps([os.fspath(path), count]) + "\n"
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError:
            raise ValueError(self._reason or self.last_words()) from None
        try:
            limit = min(seconds, RUN_S)
            answer = json.loads(self._line(limit, limit))
        except ValueError as error:
            # A late answer would be taken for that of the next request.
            self._process.kill()
            self._reason = self._reason or str(error)
            raise ValueError(self._reason) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Ways:
    """The methods that work on this machine, and their processes."""

    def __init__(self, pythons: list[str], package: pathlib.Path | None, device: str,
                 left: Callable[[], float] = lambda: START_S) -> None:
        """pythons: interpreters that may have torch and other loaders. package: the folder of our
        package, or None if it was not built. left: the seconds that starting may take. Methods of
        the 0.5 package need their own interpreter."""
        self._package, self._device, self._left = package, device, left
        self.missing: dict[str, str] = {}
        self._pythons: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}
        for number in range(len(pythons)):
            left = {name: self._place(name, pythons, number) for name in WAYS
                    if name not in self._pythons}
            self._start({name: python for name, python in left.items() if python})

    def _place(self, name: str, pythons: list[str], number: int) -> str:
        """Return the interpreter to try next for a method, or "" without one."""
        is_ours = WAYS[name][2]
        if is_ours and self._package is None:
            self.missing[name] = "the extension was not built"
            return ""
        python = pythons[number]
        if name == "fastsafetensors 0.5":
            python = os.environ.get("GPU_CHECK_PEER05", "")
        if not python or not shutil.which(python):
            self.missing.setdefault(name, "no interpreter")
            return ""
        return python

    def _start(self, pythons: dict[str, str]) -> None:
        """Start processes, all at the same time."""
        started = {name: Worker(name, python, self._package if WAYS[name][2] else None,
                                self._device) for name, python in pythons.items()}
        limit = max(1.0, min(START_S, self._left()))
        end = time.monotonic() + limit
        for name, worker in started.items():
            failure = worker.failure(end - time.monotonic(), limit)
            if failure:
                self.missing[name] = failure
                worker.close()
                continue
            self.missing.pop(name, None)
            self._pythons[name] = pythons[name]
            self.workers[name] = worker

    def broken(self) -> dict[str, str]:
        """Our own methods that do not start although what they need is there, with the reasons."""
        has_torch = TORCH_ALONE in self.workers
        return {name: why for name, why in self.missing.items() if self._package and WAYS[name][2]
                and (has_torch or WAYS[name][0] == CORE)}

    def restart(self) -> None:
        """Start new processes, which have not worked yet."""
        self.close()
        self._start(self._pythons)

    def close(self) -> None:
        """End all processes."""
        while self.workers:
            self.workers.popitem()[1].close()
