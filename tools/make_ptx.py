#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_ptx.py [--check]: makes src/gpu/kernels/scatter.ptx from scatter.cu with NVRTC, which
needs no GPU. The library is found as the package nvidia-cuda-nvrtc-cu12 installs it, or by the
system's linker. --check compares instead; exit status 77 when there is no NVRTC, or another one
than the file says it was made with (other versions write other instructions for the same source).
"""

import ctypes
import glob
import pathlib
import re
import sys

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "src/gpu/kernels"
# The oldest that every instruction of the kernel is in: drivers since CUDA 10 (2018) take it.
ISA, TARGET = "6.4", "compute_52"
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


def compile_ptx(library: ctypes.CDLL, source: bytes) -> str:
    """The PTX of the source; RuntimeError with the compiler's words."""
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"scatter.cu", 0, None, None)
    options = [b"--gpu-architecture=" + TARGET.encode(), b"--fmad=false", b"--std=c++11"]
    array = (ctypes.c_char_p * len(options))(*options)
    failed = library.nvrtcCompileProgram(program, len(options), array)
    kind = "ProgramLog" if failed else "PTX"
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, text)
    if failed:
        raise RuntimeError(text.value.decode())
    return text.value.decode()


def make(library: ctypes.CDLL) -> str:
    """The file's text: PTX without comments of the day, for the oldest drivers that can run it."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    ptx = compile_ptx(library, (KERNELS / "scatter.cu").read_bytes())
    ptx = re.sub(r"^//.*\n", "", ptx, flags=re.M)
    ptx = re.sub(r"^\.version .*$", f".version {ISA}", ptx, flags=re.M)
    # A hint to newer assemblers, which older ones do not know.
    ptx = re.sub(r"^.*\.pragma \"used_bytes_mask.*\n", "", ptx, flags=re.M)
    maker = f"NVRTC {major.value}.{minor.value}"
    made = f"// Made from scatter.cu by {maker} (tools/make_ptx.py)."
    return f"// SPDX-License-Identifier: Apache-2.0\n{made}\n" + ptx.strip("\0\n") + "\n"


def main(arguments: list[str]) -> int:
    """Makes or checks the file."""
    library = find_library()
    if library is None:
        print("no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
        return SKIP
    path, text = KERNELS / "scatter.ptx", make(library)
    if "--check" not in arguments:
        path.write_text(text)
        print(f"wrote {path}")
        return 0
    old = path.read_text()
    if old.splitlines()[1] != text.splitlines()[1]:
        print(f"another compiler: {text.splitlines()[1]}")
        return SKIP
    print("the same" if old == text else "scatter.ptx is not what scatter.cu gives")
    return 0 if old == text else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
