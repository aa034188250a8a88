# SPDX-License-Identifier: Apache-2.0
"""Run Python code beside stand-ins for the GPU drivers, and let torch take what lies on them.

The stand-ins' device memory is ordinary memory: a capsule that says "CUDA" is made to say "CPU"
before torch (a build without CUDA) takes it, and what it said is noted.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PRELUDE = """
import ctypes, gc, os, sys
sys.path.insert(0, {tests!r})
import fake_gpu
path, folder = {path!r}, {folder!r}
"""


def fakes_folder():
    """Return the folder of the stand-ins; skip without them."""
    for build in ("test", "release"):
        folder = ROOT / "build" / build / "tests/fakes"
        if (folder / "libcuda.so.1").exists():
            return os.fspath(folder)
    pytest.skip("the stand-ins for GPU drivers are not built")


def run(code, path="", folder="", **environment):
    """Run code in a process that finds the stand-ins; returns what it printed."""
    head = PRELUDE.format(
        tests=os.fspath(pathlib.Path(__file__).parent), path=os.fspath(path),
        folder=os.fspath(folder),
    )
    result = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        env={**os.environ, "LD_LIBRARY_PATH": fakes_folder(), **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return result.stdout


def library(name="libcuda.so.1"):
    """Return a stand-in, for its counters and settings (in the process that run() starts)."""
    found = ctypes.CDLL(name)
    found.fake_gpu_get.restype = ctypes.c_long
    return found


def count(what, name="libcuda.so.1"):
    """Return a counter of a stand-in."""
    return library(name).fake_gpu_get(what.encode())


class _Managed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


taken = []  # (kind, number) of the capsules that torch took


def give_torch_a_gpu(hip=False):
    """Let torch believe in a GPU, and take capsules of it."""
    import torch

    import fastsafetensors._torch_tensors as front

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    real = front._import_capsule

    def take(capsule):
        managed = _Managed.from_address(pointer(capsule, b"dltensor"))
        taken.append((managed.kind, managed.number))
        managed.kind, managed.number = 1, 0
        return real(capsule)

    class Stream:
        cuda_stream = 0

    import fastsafetensors._gpu as gpu
    import fastsafetensors.torch as public

    gpu.check_present = public.check_present = lambda device: None
    front.capsule_mask()
    front._import_capsule = take
    front._device_of = lambda tensor: "cpu"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 1
    torch.cuda.current_stream = lambda device=None: Stream()
    torch.cuda.empty_cache = lambda: taken.append("emptied")
    if hip:
        torch.version.hip = "6.0"
    return torch
