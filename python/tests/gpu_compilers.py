# SPDX-License-Identifier: Apache-2.0
"""gpu_compilers.py nvrtc|files|nvjitlink LIBRARY: compile the GPU kernel with NVIDIA's library.

Print one line for each architecture. Fail with an exception.
"""

import ctypes
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNEL = b"fst_scatter_pieces"
PTX_INPUT = 2  # NVJITLINK_INPUT_PTX

sys.path.insert(0, str(ROOT / "tools"))
import make_ptx  # noqa: E402


def compile_source(library):
    """Compile the source by NVRTC for one architecture of each generation, the last one."""
    count = ctypes.c_int()
    assert library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    numbers = (ctypes.c_int * count.value)()
    assert library.nvrtcGetSupportedArchs(numbers) == 0
    for number in {number // 10: number for number in numbers}.values():
        begin = time.monotonic()
        code = make_ptx.compile_for(library, f"sm_{number}", "CUBIN")
        assert code[:4] == b"\x7fELF" and KERNEL in code
        print(f"sm_{number} {time.monotonic() - begin:.2f} s")


def link_ptx(library):
    """Link the PTX by nvJitLink for the generations that the library has binaries for."""
    text = (ROOT / "src/gpu/kernels/scatter.ptx").read_bytes() + b"\0"
    size = ctypes.c_size_t(len(text))
    for number in make_ptx.GENERATIONS:
        handle, made = ctypes.c_void_p(), ctypes.c_size_t()
        options = (ctypes.c_char_p * 1)(f"-arch=sm_{number}".encode())
        assert library.nvJitLinkCreate(ctypes.byref(handle), 1, options) == 0
        assert library.nvJitLinkAddData(handle, PTX_INPUT, text, size, b"scatter") == 0
        assert library.nvJitLinkComplete(handle) == 0
        assert library.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(made)) == 0
        assert made.value > 10000
        assert library.nvJitLinkDestroy(ctypes.byref(handle)) == 0
        print(f"sm_{number} {made.value} bytes")


def compare_files(library):
    """Compare the PTX and the binaries in the repository with what NVRTC makes of the source."""
    files = make_ptx.make_all(library)
    maker = files[make_ptx.KERNELS / "scatter.ptx"].splitlines()[1]
    if (make_ptx.KERNELS / "scatter.ptx").read_bytes().splitlines()[1] != maker:
        print("another compiler:", maker.decode())
        return
    for path, data in files.items():
        assert path.read_bytes() == data, path
        print(path.name, "is the same")


if __name__ == "__main__":
    kinds = {"nvrtc": compile_source, "files": compare_files, "nvjitlink": link_ptx}
    kinds[sys.argv[1]](ctypes.CDLL(sys.argv[2]))
