#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""get_gpu_software.py [FOLDER]: downloads the vendors' software for the GPU tests that need no GPU.

From PyPI, for CUDA 11, 12 and 13: NVRTC, ptxas, nvJitLink (12 and 13), cuda.h, and cuFile; HIP's
headers; a CUDA driver that computes on the CPU. From Debian: AMD's HIP runtime with its compiler.
Nothing is installed: the files are unpacked into
FOLDER (default: build/gpu-software), about 790 MB are downloaded and 930 MB kept. A package that
cannot be had is named, and its tests are skipped. Downloads end after LIMIT_S seconds.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 150
# Folder, and the packages that are unpacked into it.
PYTHON_PACKAGES = {
    "cuda11": ["nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cuda-nvcc-cu11==11.8.89",
               "nvidia-cuda-nvrtc-cu11==11.8.89"],
    "cuda12": ["nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86",
               "nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-nvjitlink-cu12==12.9.86"],
    "cuda13": ["nvidia-cuda-runtime==13.*", "nvidia-cuda-crt==13.*", "nvidia-cuda-nvcc==13.*",
               "nvidia-cuda-nvrtc==13.*", "nvidia-nvjitlink==13.*"],
    "cufile": ["nvidia-cufile==1.*"],
    # Triton brings HIP's headers: of HIP 6.2 and of 7.1.
    "hip6": ["triton==3.3.1"],
    "hip7": ["triton==3.6.0"],
    # A CUDA driver that computes on the CPU.
    "vgre": ["vgre==0.1.4"],
}
# Only these files of the packages are kept.
KEPT = re.compile(r"/include/|/bin/ptxas$|/lib/lib(nvrtc|nvJitLink|cufile)[^/]*\.so[^/]*$"
                  r"|/vgre/lib/libvgre_cudart\.so$|/vgre\.libs/")
NOT_KEPT = re.compile(r"\.alt\.so|/include/(cccl|cub|thrust|cuda/std)/|/backends/nvidia/")
DEBIAN_PACKAGES = ["libamdhip64-5", "libamdhip64-dev", "libamd-comgr2", "libhsa-runtime64-1",
                   "libhsakmt1", "rocm-device-libs", "libhiprtc-builtins5", "libllvm15",
                   "libdrm-amdgpu1", "libdrm2", "libelf1", "libnuma1"]


def run(command: list[str], folder: pathlib.Path, end: float) -> str:
    """Run a command in a folder; return why it failed, or an empty text."""
    try:
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True,
                              timeout=max(1.0, end - time.monotonic()), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
    return "" if done.returncode == 0 else lines[-1]


def unpack_wheels(source: pathlib.Path, target: pathlib.Path) -> None:
    """Unpack the files that are kept, and delete the packages."""
    for wheel in source.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if KEPT.search(f"/{name}") and not NOT_KEPT.search(f"/{name}"):
                    archive.extract(name, target)
        wheel.unlink()


def get_python_packages(folder: pathlib.Path, end: float) -> None:
    """Download and unpack the packages of PyPI."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q",
           "--retries", "1", "--timeout", "20", "--no-deps", "--only-binary=:all:", "-d"]
    for name, packages in PYTHON_PACKAGES.items():
        for package in packages:
            downloads = folder / "downloads"
            downloads.mkdir(parents=True, exist_ok=True)
            failure = run([*pip, str(downloads), package], folder, end)
            if failure:
                print(f"{package} cannot be had: {failure}")
            unpack_wheels(downloads, folder / name)
            shutil.rmtree(downloads)


def get_debian_packages(folder: pathlib.Path, end: float) -> None:
    """Download and unpack the packages of Debian 12; others have other names."""
    downloads = folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    failure = run(["apt-get", "download", *DEBIAN_PACKAGES], downloads, end)
    if failure:
        print(f"Debian's HIP runtime cannot be had: {failure}")
    else:
        for package in sorted(downloads.glob("*.deb")):
            run(["dpkg-deb", "-x", package.name, str(folder / "hip")], downloads, end)
    shutil.rmtree(downloads)


def main() -> int:
    """Download everything once."""
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/gpu-software")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + LIMIT_S
    get_debian_packages(folder, end)
    get_python_packages(folder, end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
