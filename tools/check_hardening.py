#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_hardening.py FILE...: what the build asks of compiler and linker is in the built files.

Full RELRO and binding at start, no executable stack, position independence, stack protector,
fortified calls, and on x86-64 the marks of control-flow enforcement (where the compiler makes
them). Exit status 77: no readelf, or not a release build (told by --release no).
"""

import pathlib
import re
import shutil
import subprocess
import sys

SKIP = 77
# The instruction that indirect jumps must land on.
ENDBR64 = bytes.fromhex("f30f1efa")


def readelf(path: str, *options: str) -> str:
    """What readelf prints."""
    return subprocess.run(["readelf", *options, path], check=True, capture_output=True,
                          text=True).stdout


def faults_of(path: str, release: bool) -> list[str]:
    """What a file lacks."""
    headers, dynamic = readelf(path, "-lW"), readelf(path, "-dW")
    symbols = readelf(path, "-sW", "--dyn-syms")
    faults = []
    if "GNU_RELRO" not in headers or not re.search(r"BIND_NOW|\bNOW\b", dynamic):
        faults.append("no full RELRO")
    stack = next((line for line in headers.splitlines() if "GNU_STACK" in line), "RWE")
    if "RWE" in stack:
        faults.append("executable stack")
    if not re.search(r"Type:\s+DYN", readelf(path, "-hW")):
        faults.append("not position-independent")
    if "__stack_chk_fail" not in symbols:
        faults.append("no stack protector")
    if release and "_chk@" not in symbols:
        faults.append("no fortified calls")
    # A signal handler stays installed, so its code must not go with dlclose().
    if ".so" in pathlib.Path(path).name and "NODELETE" not in dynamic:
        faults.append("can be unloaded")
    # The note of the whole file is there only where the system's own start files have it.
    if "x86-64" in readelf(path, "-hW").lower() and ENDBR64 not in pathlib.Path(path).read_bytes():
        faults.append("no control-flow marks")
    return faults


def main(arguments: list[str]) -> int:
    """Checks all files."""
    release = "--release=yes" in arguments
    files = [argument for argument in arguments if not argument.startswith("--")]
    if not shutil.which("readelf"):
        print("no readelf")
        return SKIP
    if not release:
        print("hardened are release builds, and those without sanitizers")
        return SKIP
    bad = 0
    for path in files:
        faults = faults_of(path, release)
        bad += bool(faults)
        print(f"{path}: {', '.join(faults) or 'hardened'}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
