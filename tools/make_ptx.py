#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_ptx.py [--check]: makes src/gpu/kernels/scatter.ptx and scatter_sm*.cubin from scatter.cu
with NVRTC, which needs no GPU. The library is found as the package nvidia-cuda-nvrtc-cu12 installs
it, or by the system's linker. --check compares instead; exit status 77 when there is no NVRTC, or
another one than the PTX says it was made with (other versions write other instructions for the same
source).

The binaries start at once, while the driver has to compile PTX first (about 0.1 s in every process
that can't write to its home). There is one binary per generation, which all devices of that
generation run; tuning for single devices would not help, because the kernel is bound by memory.
Older and newer devices and drivers use the PTX.
"""

import ctypes
import glob
import pathlib
import re
import sys

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "src/gpu/kernels"
# The oldest that every instruction of the kernel is in: drivers since CUDA 10 (2018) take it.
ISA, TARGET = "6.4", "compute_52"
# Turing, Ampere and Ada, Hopper, Blackwell for servers, Blackwell for workstations.
GENERATIONS = (75, 80, 90, 100, 120)
SKIP = 77


def find_library() -> ctypes.CDLL | None:
    """NVRTC, or None."""
    places = [
        path
        for folder in sys.path
        for path in glob.glob(f"{folder}/nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
    ]
    for place in [*places, "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def compile_for(library: ctypes.CDLL, target: str, kind: str) -> bytes:
    """Return the kernel's PTX or CUBIN for a target. Raises RuntimeError with the compiler's
    message."""
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    source = (KERNELS / "scatter.cu").read_bytes()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"scatter.cu", 0, None, None)
    options = [b"--gpu-architecture=" + target.encode(), b"--fmad=false", b"--std=c++11"]
    array = (ctypes.c_char_p * len(options))(*options)
    failed = library.nvrtcCompileProgram(program, len(options), array)
    wanted = "ProgramLog" if failed else kind
    getattr(library, f"nvrtcGet{wanted}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{wanted}")(program, data)
    if failed:
        raise RuntimeError(data.value.decode())
    return data.raw


def make(library: ctypes.CDLL) -> str:
    """Return the file's text: PTX without comments that change daily, for the oldest drivers that
    can run it."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    ptx = compile_for(library, TARGET, "PTX").rstrip(b"\0").decode()
    ptx = re.sub(r"^//.*\n", "", ptx, flags=re.M)
    ptx = re.sub(r"^\.version .*$", f".version {ISA}", ptx, flags=re.M)
    # A hint to newer assemblers, which older ones do not know.
    ptx = re.sub(r"^.*\.pragma \"used_bytes_mask.*\n", "", ptx, flags=re.M)
    maker = f"NVRTC {major.value}.{minor.value}"
    made = f"// Made from scatter.cu by {maker} (tools/make_ptx.py)."
    return f"// SPDX-License-Identifier: Apache-2.0\n{made}\n" + ptx.strip("\0\n") + "\n"


def make_all(library: ctypes.CDLL) -> dict[pathlib.Path, bytes]:
    """Return all files with their contents."""
    files = {KERNELS / "scatter.ptx": make(library).encode()}
    for number in GENERATIONS:
        path = KERNELS / f"scatter_sm{number}.cubin"
        files[path] = compile_for(library, f"sm_{number}", "CUBIN")
    return files


def main(arguments: list[str]) -> int:
    """Make or check the files."""
    library = find_library()
    if library is None:
        print("no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
        return SKIP
    files = make_all(library)
    if "--check" not in arguments:
        for path, data in files.items():
            path.write_bytes(data)
            print(f"wrote {path}: {len(data)} bytes")
        return 0
    maker = files[KERNELS / "scatter.ptx"].splitlines()[1]
    if (KERNELS / "scatter.ptx").read_bytes().splitlines()[1] != maker:
        print(f"another compiler: {maker.decode()}")
        return SKIP
    stale = [path.name for path, data in files.items()
             if not path.exists() or path.read_bytes() != data]
    print(f"not what scatter.cu gives: {', '.join(stale)}" if stale else "the same")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
