#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the published files: the sdist, and wheels for both CPU architectures and old systems.

    tools/make_dist.py [--out DIR] [--arch x86_64] [--arch aarch64]

The wheels are compiled with zig's clang, whose targets include a glibc version, so any machine can
build for manylinux_2_28 and for aarch64. auditwheel checks every wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLIBC = "2.28"
# Whose source distribution has zstd's sources as one file.
ZSTD_PACKAGE = "zstandard"
ZSTD_VERSION = "0.23.0"
ZSTD_SHA256 = "b2d8c62d08e7255f68f7a740bae85b3c9b8e5466baa9cbf7f57f1cde0ac6bc09"
ARCHITECTURES = ("x86_64", "aarch64")


def run(*command: object, **variables: str) -> None:
    """Run a command with the tools of this environment first on the path; its output goes to a
    log."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([str(word) for word in command], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "PATH": path, **variables})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def write_tool(folder: pathlib.Path, name: str, words: str) -> pathlib.Path:
    """Write a script that calls a zig tool, because build systems expect a single program."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {words} "$@"\n')
    path.chmod(0o755)
    return path


def write_cross_file(folder: pathlib.Path, arch: str) -> pathlib.Path:
    """Write the meson file that names the compiler for a processor."""
    # zig adds run-time checks by default; the release build disables them.
    compiler = write_tool(folder, f"cc-{arch}",
                          f"cc -target {arch}-linux-gnu.{GLIBC} -fno-sanitize=undefined")
    archiver = write_tool(folder, f"ar-{arch}", "ar")
    path = folder / f"{arch}.ini"
    path.write_text(
        f"[binaries]\nc = '{compiler}'\nar = '{archiver}'\n\n[host_machine]\nsystem = 'linux'\n"
        f"cpu_family = '{arch}'\ncpu = '{arch}'\nendian = 'little'\n")
    return path


def check_glibc(wheel: pathlib.Path) -> None:
    """Fail if a binary in the wheel needs a newer glibc, or any other library."""
    allowed = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
    newest = tuple(map(int, GLIBC.split(".")))
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        for path in pathlib.Path(folder).rglob("*"):
            if not path.is_file() or path.read_bytes()[:4] != b"\x7fELF":
                continue
            text = subprocess.run(["readelf", "-dV", str(path)], check=True, capture_output=True,
                                  text=True).stdout
            needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
            needed = {name for name in needed if not name.startswith("ld-linux")}
            versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text)}
            if needed - allowed or max(versions, default=newest) > newest:
                sys.exit(f"{path.name} wants {sorted(needed - allowed)}, glibc {max(versions)}")


def fetch_zstd(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder of zstd's single-file source, which the wheels include (BSD licence)."""
    made = folder / f"{ZSTD_PACKAGE}-{ZSTD_VERSION}"
    if (made / "zstd/zstd.c").exists():
        return made / "zstd"
    run(sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps",
        "--no-build-isolation", "--dest", folder, f"{ZSTD_PACKAGE}=={ZSTD_VERSION}")
    packed = folder / f"{made.name}.tar.gz"
    if hashlib.sha256(packed.read_bytes()).hexdigest() != ZSTD_SHA256:
        sys.exit(f"{packed.name} is not the file that was looked at")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return made / "zstd"


def build_wheel(arch: str, out: pathlib.Path) -> None:
    """Build, tag and check one wheel."""
    folder = ROOT / "build/dist-tools"
    folder.mkdir(parents=True, exist_ok=True)
    cross = write_cross_file(folder, arch)
    raw = folder / f"wheel-{arch}"
    for old in raw.glob("*.whl"):
        old.unlink()
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check",
        f"-Csetup-args=--cross-file={cross}", "-Csetup-args=-Dc_link_args=-s",
        f"-Csetup-args=-Dzstd_source={fetch_zstd(folder)}", "--outdir", raw,
        ROOT, _PYTHON_HOST_PLATFORM=f"linux-{arch}")
    built = next(raw.glob("*.whl"))
    # The extension keeps to the limited interface of 3.10.
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag", "cp310", built)
    built = next(raw.glob("*.whl"))
    check_glibc(built)
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    if arch == os.uname().machine:
        run(sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat",
            "--wheel-dir", out, built)
        return
    # auditwheel only supports this machine's CPU architecture; the check above covers the other
    # one.
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, built)
    built = next(raw.glob("*.whl"))
    (out / built.name).write_bytes(built.read_bytes())


def main() -> int:
    """Build what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("sdist", flush=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check",
        "--outdir", arguments.out, ROOT)
    for arch in arguments.arch or ARCHITECTURES:
        print(f"wheel for {arch}, glibc {GLIBC}", flush=True)
        build_wheel(arch, arguments.out)
    for path in sorted(arguments.out.iterdir()):
        print(f"{path.stat().st_size:>10} {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
