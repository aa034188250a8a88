# SPDX-License-Identifier: Apache-2.0
"""Run Python code with fake GPU drivers, and pass their memory to torch.

The device memory of the fake drivers is ordinary memory. torch is a build without CUDA, so the
device of each DLPack capsule is changed from CUDA to CPU before torch gets it.
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
    """Return the folder of the fake drivers; skip the test if they were not built."""
    for build in ("test", "release"):
        folder = ROOT / "build" / build / "tests/fakes"
        if (folder / "libcuda.so.1").exists():
            return os.fspath(folder)
    pytest.skip("the stand-ins for GPU drivers are not built")


def run(code, path="", folder="", **environment):
    """Run code in a process that loads the fake drivers; return its output."""
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
    """Return a fake driver for access to its counters and settings (in the process that run()
    starts)."""
    found = ctypes.CDLL(name)
    found.fake_gpu_get.restype = ctypes.c_long
    return found


def count(what, name="libcuda.so.1"):
    """Return a counter of a fake driver."""
    return library(name).fake_gpu_get(what.encode())


class Memory:
    """Memory of a fake device, as a framework's allocator returns it."""

    def __init__(self, size, device, name="libcuda.so.1"):
        """Allocate; MemoryError when the device is full."""
        self._driver, self._device = library(name), device
        self._prefix = "hip" if "hip" in name else "cu"
        self.address = ctypes.c_uint64()
        allocate = "hipMalloc" if self._prefix == "hip" else "cuMemAlloc_v2"
        arguments = ctypes.byref(self.address), ctypes.c_size_t(size)
        code = self._call(allocate, *arguments)
        if code == 3:  # the driver has not been started yet
            self._driver.hipInit(0) if self._prefix == "hip" else self._driver.cuInit(0)
            code = self._call(allocate, *arguments)
        if code != 0:
            self.address.value = 0
            raise MemoryError("device memory of the stand-in is full")

    def _call(self, function, *arguments):
        context, before = ctypes.c_void_p(), ctypes.c_int()
        if self._prefix == "hip":
            self._driver.hipGetDevice(ctypes.byref(before))
            self._driver.hipSetDevice(self._device)
            code = getattr(self._driver, function)(*arguments)
            self._driver.hipSetDevice(before)
            return code
        self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device)
        self._driver.cuCtxPushCurrent_v2(context)
        code = getattr(self._driver, function)(*arguments)
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return code

    def data_ptr(self):
        """Return its address."""
        return self.address.value

    def __del__(self):
        """Free it."""
        if self.address.value:
            self._call("hipFree" if self._prefix == "hip" else "cuMemFree_v2", self.address)


class _Managed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


taken = []  # (kind, number) of the capsules that torch took
torch_bytes = []  # (size, number) of memory that torch's allocator gave


def give_torch_a_gpu(hip=False):
    """Make torch report a GPU and accept DLPack capsules of it."""
    import torch

    import fastsafetensors._torch.torch_tensors as front

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

    class Properties:
        name, is_integrated = "Fake GPU", False

    import fastsafetensors._torch.gpu as gpu
    import fastsafetensors.torch as public

    def allocate(size, device, stream):
        memory = Memory(size, device, "libamdhip64.so" if hip else "libcuda.so.1")
        torch_bytes.append((size, device))
        return memory

    gpu._allocate = allocate
    torch.cuda.get_device_properties = lambda device: Properties

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
