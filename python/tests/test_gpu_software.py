# SPDX-License-Identifier: Apache-2.0
"""The vendors' GPU software that needs no GPU: compilers, headers, HIP's runtime, cuFile.

tools/get_gpu_software.py downloads it, `make test ALL=1` calls that. Each test is skipped if its
package is not there. Registers, spills and times go to build/gpu-software/report.txt.
"""

import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import time

import gpu_declarations
import pytest
from conftest import ROOT
from fake_gpu import fakes_folder

SOFTWARE = ROOT / "build/gpu-software"
KERNELS = ROOT / "src/gpu/kernels"
KERNEL = "fst_scatter_pieces"
HIP_LIBRARIES = SOFTWARE / "hip/usr/lib/x86_64-linux-gnu"
CUDA = ("cuda11", "cuda12", "cuda13")


@pytest.fixture(scope="module")
def report():
    """A file for figures that are recorded and not checked."""
    if not SOFTWARE.exists():
        pytest.skip("no GPU software here: tools/get_gpu_software.py downloads it")
    with open(SOFTWARE / "report.txt", "w", encoding="utf-8") as file:
        yield lambda *words: print(*words, file=file, flush=True)


def find(folder, pattern):
    """Return a file of a package, or skip the test."""
    found = sorted((SOFTWARE / folder).rglob(pattern)) if SOFTWARE.exists() else []
    if not found:
        pytest.skip(f"no {pattern} of {folder}: tools/get_gpu_software.py downloads it")
    return found[0]


# ---- NVIDIA's compilers ----


@pytest.mark.parametrize("version", CUDA)
def test_ptxas_takes_the_ptx_for_every_target(version, report, tmp_path):
    """Every target from sm_52 on, without spilled registers."""
    ptxas = find(version, "ptxas")
    ptxas.chmod(0o755)
    text = subprocess.run([ptxas, "--help"], capture_output=True, text=True, timeout=60).stdout
    targets = sorted({int(number) for number in re.findall(r"sm_(\d+)\b", text)})
    targets = [number for number in targets if number >= 52]
    assert len(targets) > 8
    tried = []
    for number in targets:
        done = subprocess.run(
            [ptxas, f"-arch=sm_{number}", "-v", KERNELS / "scatter.ptx", "-o", tmp_path / "out"],
            capture_output=True, text=True, timeout=120)
        said = done.stdout + done.stderr
        if "is not defined for option 'gpu-name'" in said:
            continue  # the help of this version names a target that it has dropped
        assert done.returncode == 0, (number, said)
        registers = re.search(r"Used (\d+) registers", said)
        spills = re.findall(r"(\d+) bytes spill", said)
        assert registers and set(spills) == {"0"}, (number, said)
        assert (tmp_path / "out").read_bytes()[:4] == b"\x7fELF"
        report("ptxas", version, f"sm_{number}", registers[1], "registers, 0 bytes spilled")
        tried.append(number)
    assert {75, 80, 90} <= set(tried)


def compile_all(kind, library):
    """Run gpu_compilers.py in another process, because the libraries change the locale."""
    script = pathlib.Path(__file__).with_name("gpu_compilers.py")
    done = subprocess.run([sys.executable, script, kind, library], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", CUDA)
def test_nvrtc_compiles_the_kernel(version, report):
    """With the options of tools/make_ptx.py, for each generation that this version knows."""
    lines = compile_all("nvrtc", find(version, "libnvrtc.so.*"))
    assert len(lines) >= 4
    for line in lines:
        report("nvrtc", version, line)


def test_the_repository_has_what_nvrtc_makes():
    """The PTX and the binaries are those of the source, by the version that the PTX names."""
    lines = compile_all("files", find("cuda12", "libnvrtc.so.*"))
    if lines[0].startswith("another compiler"):
        pytest.skip(lines[0])
    assert len(lines) == 6


@pytest.mark.parametrize("version", CUDA[1:])
def test_nvjitlink_links_the_ptx(version, report):
    """The linker that newer toolkits compile PTX with; CUDA 11 has no nvJitLink."""
    lines = compile_all("nvjitlink", find(version, "libnvJitLink.so.*"))
    assert len(lines) == 5
    for line in lines:
        report("nvjitlink", version, line)


# ---- declarations ----


def has_compiler():
    """Skip the test without a C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")


@pytest.mark.parametrize("version", CUDA)
def test_declarations_equal_cuda_h(version, report, tmp_path):
    """Every function of the CUDA driver that the library calls, and every number it uses."""
    has_compiler()
    header = find(version, "cuda.h")
    said, missing = gpu_declarations.compare("cuda", [header.parent], tmp_path)
    # cuCtxGetId came with CUDA 12.
    assert said.endswith(", 0 differences\n") and set(missing) <= (
        {"cuCtxGetId"} if version == "cuda11" else set()), (said, missing)
    report("declarations", version, said.strip())


@pytest.mark.parametrize("version", ["hip", "hip6", "hip7"])
def test_declarations_equal_the_headers_of_hip(version, report, tmp_path):
    """Every function of HIP and of its compiler; hipDrvGetErrorString came with HIP 6.

    The package with HIP 7 has no hiprtc.h.
    """
    has_compiler()
    header = find(version, "hip_runtime_api.h")
    said, missing = gpu_declarations.compare("hip", [header.parent.parent], tmp_path)
    assert said.endswith(", 0 differences\n"), said
    assert set(missing) <= {"hipDrvGetErrorString"} if version == "hip" else \
        set(missing) <= set(gpu_declarations.COMPILER)
    report("declarations", version, said.strip())


CUFILE_CHECK = """\
#include <cufile.h>
#include "io/gds_library.h"
#define SAME(ours, theirs) _Static_assert(ours == theirs, #ours)
SAME(sizeof(fsti_gds_error), sizeof(CUfileError_t));
SAME(offsetof(fsti_gds_error, error), offsetof(CUfileError_t, err));
SAME(offsetof(fsti_gds_error, driver_error), offsetof(CUfileError_t, cu_err));
SAME(sizeof(fsti_gds_descriptor), sizeof(CUfileDescr_t));
SAME(offsetof(fsti_gds_descriptor, type), offsetof(CUfileDescr_t, type));
SAME(offsetof(fsti_gds_descriptor, handle), offsetof(CUfileDescr_t, handle));
SAME(offsetof(fsti_gds_descriptor, operations), offsetof(CUfileDescr_t, fs_ops));
SAME(FSTI_GDS_HANDLE_FD, CU_FILE_HANDLE_TYPE_OPAQUE_FD);
SAME(CU_FILE_SUCCESS, 0);
SAME(sizeof(CUfileHandle_t), sizeof(void *));
#define TYPE(function, ...) \\
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), __VA_ARGS__), #function)
TYPE(cuFileRead, ssize_t (*)(CUfileHandle_t, void *, size_t, off_t, off_t));
TYPE(cuFileHandleRegister, CUfileError_t (*)(CUfileHandle_t *, CUfileDescr_t *));
TYPE(cuFileHandleDeregister, void (*)(CUfileHandle_t));
TYPE(cuFileDriverOpen, CUfileError_t (*)(void));
"""


def test_declarations_equal_cufile_h(tmp_path):
    """The structs and prototypes of cuFile, checked by the compiler."""
    has_compiler()
    header, cuda = find("cufile", "cufile.h"), find("cuda13", "cuda.h")
    source = tmp_path / "cufile.c"
    source.write_text(CUFILE_CHECK)
    done = subprocess.run(
        ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-fsyntax-only",
         f"-I{header.parent}", f"-I{cuda.parent}", f"-I{ROOT}/src", f"-I{ROOT}/include", source],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- AMD's runtime and compiler ----


def hip(*arguments):
    """Run the program of the C tests with Debian's HIP runtime."""
    find("hip", "libamdhip64.so.*")
    program = pathlib.Path(fakes_folder()).parent / "hip_software"
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": os.fspath(HIP_LIBRARIES)})


def test_hip_without_a_device(command, sample_file):
    """The runtime starts, and the error says that there is no device, in C and in the command."""
    if os.path.exists("/dev/kfd"):
        pytest.skip("this machine has an AMD GPU")
    said = hip("start").stdout
    assert "the driver sees no device (/dev/kfd does not exist here)" in said
    environment = {**os.environ, "LD_LIBRARY_PATH": os.fspath(HIP_LIBRARIES)}
    done = subprocess.run([command, "load", "--device", "hip:0", sample_file], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "the driver sees no device" in done.stderr
    done = subprocess.run([command, "engines"], env=environment, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and "the driver sees no device" in done.stdout


@pytest.fixture
def sample_file(tmp_path):
    """A small model."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [65536], "data_offsets": [0, 262144]}})
    text = header.encode() + b" " * (-(len(header) + 8) % 16)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(262144))
    return os.fspath(path)


def test_hip_errors_have_texts():
    """HIP 5 has no hipDrvGetErrorString. Unknown codes have its text for them and their number."""
    lines = hip("texts", "2", "100", "700", "12345").stdout.splitlines()
    pattern = re.compile(r": (\w+) \(hipModuleLaunchKernel: HIP error (\d+)\)")
    assert [pattern.search(line).groups() for line in lines] == [
        ("hipErrorOutOfMemory", "2"), ("hipErrorNoDevice", "100"),
        ("hipErrorIllegalAddress", "700"), ("hipErrorUnknown", "12345")]


def read_modes(code):
    """Return the denormal modes (FP32, FP16 and FP64) and the scratch bytes of the kernel."""
    elf = code[code.rindex(b"\x7fELF"):]
    sections_at, = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + i * size)
                for i in range(count)]
    for section in (one for one in sections if one[1] == 11):  # SHT_DYNSYM
        names = sections[section[6]][4]
        for i in range(section[5] // 24):
            name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", elf, section[4] + i * 24)
            text = elf[names + name:].split(b"\0", 1)[0]
            if text != f"{KERNEL}.kd".encode():
                continue
            at = sections[index][4] + value - sections[index][3]
            _, scratch = struct.unpack_from("<II", elf, at)
            register, = struct.unpack_from("<I", elf, at + 48)  # COMPUTE_PGM_RSRC1
            return register >> 16 & 3, register >> 18 & 3, scratch
    raise AssertionError("no kernel descriptor")


@pytest.mark.parametrize("target", [
    "gfx803", "gfx900", "gfx906", "gfx908", "gfx90a", "gfx1010", "gfx1030", "gfx1031"])
def test_hip_compiles_the_kernel(target, report, tmp_path):
    """By the compiler inside the driver's library, with denormals and without scratch memory."""
    done = hip("compile", os.fspath(KERNELS / "scatter.cu"), os.fspath(tmp_path), target)
    assert "(part of the driver)" in done.stdout, done.stdout + done.stderr
    assert f"{target}: compiled" in done.stdout, done.stdout
    assert read_modes((tmp_path / f"{target}.hsaco").read_bytes()) == (3, 3, 0)
    report("hiprtc", done.stdout.splitlines()[-1])


# ---- cuFile without its kernel module ----

# Stands for parts of the host that this container may lack. FAKE_MODULES: the file that is
# /proc/modules; if it is "none", the file is seen and cannot be opened.
PRELOAD = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static const char *place(const char *path) {
    if (path != NULL && strncmp(path, "/run/udev", 9) == 0) return "/nonexistent";
    return path != NULL && strcmp(path, "/proc/modules") == 0 ? getenv("FAKE_MODULES") : path;
}
#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))
static int flags_mode(int flags, va_list list) { return flags & O_CREAT ? va_arg(list, int) : 0; }
#define OPEN(name)                                                                     \\
    int name(const char *path, int flags, ...) {                                       \\
        va_list list;                                                                  \\
        va_start(list, flags);                                                         \\
        int mode = flags_mode(flags, list);                                            \\
        va_end(list);                                                                  \\
        return NEXT(int (*)(const char *, int, ...), #name)(place(path), flags, mode); \\
    }
OPEN(open)
OPEN(open64)
FILE *fopen(const char *path, const char *mode) {
    return NEXT(FILE *(*)(const char *, const char *), "fopen")(place(path), mode);
}
FILE *fopen64(const char *path, const char *mode) {
    return NEXT(FILE *(*)(const char *, const char *), "fopen64")(place(path), mode);
}
int access(const char *path, int mode) {
    if (path != NULL && strcmp(path, "/proc/modules") == 0) {
        errno = ENOENT;
        return getenv("FAKE_MODULES") == NULL ? -1 : 0;
    }
    return NEXT(int (*)(const char *, int), "access")(place(path), mode);
}
"""


@pytest.fixture
def load_strictly(command, sample_file, tmp_path):
    """A load with GPUDirect Storage by the real cuFile and the fake CUDA driver."""
    has_compiler()
    (tmp_path / "preload.c").write_text(PRELOAD)
    done = subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", tmp_path / "preload.so",
                           tmp_path / "preload.c", "-ldl"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    shutil.copy(find("cufile", "libcufile.so.0"), libraries)
    shutil.copy(os.path.join(fakes_folder(), "libcuda.so.1"), libraries)

    def load(**environment):
        return subprocess.run(
            [command, "load", "--device", "cuda:0", "--gds", "strict", sample_file], cwd=tmp_path,
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "LD_LIBRARY_PATH": os.fspath(libraries),
                 "LD_PRELOAD": os.fspath(tmp_path / "preload.so"), **environment})

    return load


def test_cufile_without_the_list_of_modules(load_strictly):
    """It would never return: it is not started, and the reason names the missing file."""
    done = load_strictly()
    assert done.returncode != 0
    assert "libcufile.so.0 was not started: it needs /proc/modules, which does not" in done.stderr


def test_cufile_that_does_not_return(load_strictly, tmp_path):
    """A list of modules that cannot be opened: cuFile waits for ever, the load does not."""
    begin = time.monotonic()
    done = load_strictly(FAKE_MODULES=os.fspath(tmp_path / "nothing"))
    assert done.returncode != 0 and "[Unsupported]" in done.stderr
    if "has not started within" not in done.stderr:
        pytest.skip(f"this version returns: {done.stderr}")
    assert time.monotonic() - begin > 9  # the time limit, and not an earlier error


def test_cufile_without_its_module(load_strictly, tmp_path, report):
    """With the list of modules cuFile starts, or says why not. The load ends with that reason."""
    (tmp_path / "modules").write_text("")
    done = load_strictly(FAKE_MODULES=os.fspath(tmp_path / "modules"))
    report("cufile without nvidia-fs:", done.stderr.strip())
    assert done.returncode != 0 and "gds (GPUDirect Storage) can't be used: " in done.stderr
    assert "has not started" not in done.stderr and "was not started" not in done.stderr
    if "rejects the file" in done.stderr:
        assert "/run/udev is missing here" in done.stderr


# ---- whole loads through a CUDA that computes on the CPU ----


@pytest.fixture(scope="module")
def cpu_gpu(report, command, tmp_path_factory):
    """compare_loads(model, dtype, budget, **environment) with a CUDA driver of other authors."""
    has_compiler()
    library = find("vgre", "libvgre_cudart.so")
    folder, source = tmp_path_factory.mktemp("vgre"), ROOT / "tests/gpu_software"
    build = pathlib.Path(command).parents[1] / "src"
    if not (build / "libfastsafetensors.so").exists():
        pytest.skip("libfastsafetensors is not built")
    for words in (["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1",
                   source / "cpu_driver.cpp", "-o", folder / "libcuda.so.1", "-ldl"],
                  ["gcc", "-std=c11", f"-I{ROOT / 'include'}", source / "compare_loads.c", "-o",
                   folder / "compare_loads", f"-L{build}", "-lfastsafetensors"]):
        subprocess.run(words, check=True, timeout=300)

    def start(model, dtype="-", budget=0, **environment):
        paths = os.pathsep.join(map(os.fspath, (folder, build)))
        environment = {**os.environ, "VGRE_LIBRARY": os.fspath(library), "LD_LIBRARY_PATH": paths,
                       "FASTSAFETENSORS_SHARE_DIR": os.fspath(folder), **environment}
        return subprocess.Popen([folder / "compare_loads", model, dtype, str(budget)],
                                env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    return start


def counts_of(process):
    """(tensors, bytes, wrong, sent, launches) that compare_loads printed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "misaligned" not in out
    return [int(number) for number in re.findall(r"\d+", out)]


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """A file whose tensors of 12 types begin at odd offsets, with all special values of floats."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    tensors = {f"bytes.{i:02}": every_byte[i: 97 + 2 * i].clone() for i in range(60)}
    tensors |= {
        "rows": torch.randn(31, 17, generator=generator), "F64": torch.randn(99).double(),
        "F16": words[::97].clone().view(torch.float16), "I16": words[::201].clone(),
        "BF16": words[::89].clone().view(torch.bfloat16), "I8": every_byte.view(torch.int8).clone(),
        "F32": torch.randint(-2**31, 2**31 - 1, (500,), dtype=torch.int32).view(torch.float32),
        "I32": torch.randint(-2**31, 2**31 - 1, (77,), dtype=torch.int32),
        "E4M3": every_byte.clone().view(torch.float8_e4m3fn),
        "E5M2": every_byte.clone().view(torch.float8_e5m2)}
    path = tmp_path_factory.mktemp("odd") / "m.safetensors"
    save_file(tensors, path)
    return path, len(tensors) + 1, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", ["-", "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2",
                                   "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I64", "U32"])
def test_loads_through_another_cuda_equal_the_cpu(dtype, cpu_gpu, odd_model, report):
    path, count, size = odd_model
    tensors, _, wrong, sent, launches = counts_of(cpu_gpu(path, dtype))
    assert (tensors, wrong) == (count, 0)
    assert sent >= size and launches > 0
    report("loads through vgre", dtype, tensors, "tensors,", sent, "bytes sent,", launches,
           "launches, 0 wrong")


@pytest.fixture(scope="module")
def all_words(tmp_path_factory):
    """A misaligned file of all 65,536 values of F16 and BF16, and all of the FP8 types."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.torch import save_file

    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    types = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    path = tmp_path_factory.mktemp("words") / "m.safetensors"
    save_file({"a": torch.ones(1, dtype=torch.bool), "f16": words.clone().view(torch.float16),
               "bf16": words.view(torch.bfloat16),
               **{name: every_byte.clone().view(getattr(torch, name)) for name in types}}, path)
    return path


@pytest.mark.parametrize("dtype", ["F32", "F16", "F64", "BF16", "F8_E4M3", "F8_E5M2"])
def test_ptx_converts_every_value_of_two_bytes(dtype, cpu_gpu, all_words, report, thorough):
    """The interpreter of the PTX against the library's conversions on the CPU."""
    if dtype not in ("F32", "F16") and not thorough:
        pytest.skip("only with make test ALL=1 LONG=1: 15 s of the CPU")
    tensors, size, wrong, _, launches = counts_of(cpu_gpu(all_words, dtype))
    assert (tensors, wrong) == (7, 0) and launches > 0
    report("values of two bytes through vgre", dtype, size, "bytes,", launches, "launches, 0 wrong")


@pytest.mark.parametrize("environment", [
    {"CPU_DRIVER_INTEGRATED": "1"}, {"CPU_DRIVER_LATE": "1"}, {"budget": 1 << 16}], ids=str)
def test_loads_through_another_cuda_in_other_states(environment, cpu_gpu, odd_model):
    """Memory shared with the processor; binaries that are refused late; streaming in a budget."""
    path, count, _ = odd_model
    tensors, _, wrong, sent, launches = counts_of(cpu_gpu(path, "BF16", **environment))
    assert (tensors, wrong) == (count, 0)
    assert (sent > 0 and launches > 0) or "CPU_DRIVER_INTEGRATED" in environment


def test_four_processes_load_through_another_cuda(cpu_gpu, odd_model):
    path, count, _ = odd_model
    for process in [cpu_gpu(path, dtype) for dtype in ("-", "F16", "BF16", "F32")]:
        assert counts_of(process)[::2][:2] == [count, 0]
