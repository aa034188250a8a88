# SPDX-License-Identifier: Apache-2.0
"""Methods of loading a file to a GPU, each timed in a separate process. Used by gpu_check.py."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

# The program that a method's process runs. Every method opens the device before the clock starts,
# and the first load is reported separately from the following ones.
PROGRAM = """
import json, resource, sys, time
path, device, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
{imports}
def load():
{body}
times = []
for _ in range(count):
    start = time.perf_counter()
    keep = load()
    finish()
    times.append(time.perf_counter() - start)
    del keep
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"times": times, "cpu": usage.ru_utime + usage.ru_stime,
                  "peak": usage.ru_maxrss * 1024}}))
"""
TORCH = """
import torch
device = device.replace("hip", "cuda")  # torch's name for a GPU of either kind
torch.zeros(1, device=device); torch.cuda.synchronize()
finish = torch.cuda.synchronize
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
net = Net()
"""
_PINNED = """    import safetensors
    with safetensors.safe_open(path, "pt") as f:
        return {n: f.get_tensor(n).pin_memory().to(device, non_blocking=True) for n in f.keys()}"""
_LOADER = """    l = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), device)
    l.add_filenames({0: [path]})
    b = l.copy_files_to_device()
    return {n: b.get_tensor(n) for n in l.get_keys()}, b, l"""
_LOAD_FILE = "from fastsafetensors.torch import load_file"

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
        TORCH + "import fastsafetensors",
        '    with fastsafetensors.safe_open(path, "pt", device=device) as f:\n'
        "        return {n: f.get_tensor(n) for n in f.keys()}", True),
    "ours, loader of 0.5": (TORCH + "import fastsafetensors", _LOADER, True),
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
    "fastsafetensors 0.5": (TORCH + "import fastsafetensors", _LOADER, False),
}
# Methods that accept a folder of shards.
OF_FOLDERS = ("ours, the extension", "ours, load_file", "ours, load_file, own memory",
              "ours, safe_open")
PROBE_S, RUN_S = 60, 60


class Way:
    """A method that may work on this machine."""

    def __init__(self, name: str, python: str, package: pathlib.Path | None) -> None:
        """package: the folder of our package; None: use the packages that the interpreter has
        installed."""
        self.name, self._python = name, python
        self.environment = dict(os.environ)
        if package is not None:
            self.environment["PYTHONPATH"] = os.fspath(package)

    def run(self, path: pathlib.Path, device: str, count: int, seconds: float) -> dict:
        """Load `count` times in one process: {"times": [s], "cpu": s, "peak": bytes}."""
        imports, body, _ = WAYS[self.name]
        done = subprocess.run(
            [self._python, "-c", PROGRAM.format(imports=imports, body=body), os.fspath(path),
             device, str(count)], check=True, capture_output=True, text=True, env=self.environment,
            timeout=min(seconds, RUN_S))
        return json.loads(done.stdout.splitlines()[-1])

    def check(self, device: str) -> str:
        """Return "" if its imports work, otherwise the reason."""
        imports = WAYS[self.name][0].replace(MODEL, "")
        code = f"import sys\ndevice = sys.argv[1]\n{imports}"
        try:
            done = subprocess.run([self._python, "-c", code, device], capture_output=True,
                                  text=True, timeout=PROBE_S, check=False, env=self.environment)
        except subprocess.TimeoutExpired:
            return f"its imports took more than {PROBE_S} s"
        return "" if done.returncode == 0 else (done.stderr.splitlines() or ["?"])[-1]


def find_ways(pythons: list[str], package: pathlib.Path | None, device: str, seconds: float,
              ) -> tuple[dict[str, Way], dict[str, str]]:
    """Return (methods that work, reasons of the others). Methods of the 0.5 package need their own
    interpreter."""
    import time

    found: dict[str, Way] = {}
    missing: dict[str, str] = {}
    end = time.monotonic() + seconds
    for name, (_, _, is_ours) in WAYS.items():
        missing[name] = "no time left to look for it"
        places = [os.environ.get("GPU_CHECK_PEER05", "")] if name.endswith("0.5") and (
            not is_ours) else pythons
        for python in places:
            if time.monotonic() > end:
                break
            missing[name] = "the extension was not built" if is_ours and package is None else (
                "no interpreter")
            if not shutil.which(python) or (is_ours and package is None):
                continue
            way = Way(name, python, package if is_ours else None)
            missing[name] = way.check(device)
            if not missing[name]:
                found[name] = way
                break
    return found, {name: why for name, why in missing.items() if why}
