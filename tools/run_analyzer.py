#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs gcc's static analyser over the library and the command. Exit status 77: no gcc.

False positives are listed with their reasons. An entry that gcc no longer reports is an error, too.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIP = 77
# (file, warning): the reason why it is false. Reports differ between versions of gcc; these are
# from gcc 12.
ALLOWED = {
    ("cli/hash_store.c", "malloc-leak"):
        "entries own their texts: hash_metadata_free() frees as many as were begun",
    ("src/codec/layout_loops.h", "shift-count-overflow"):
        "takes the four bytes of a vector's element for its bits",
}
OPTIONS = ["-isystem", "third_party/xxhash", "-isystem", "third_party/blake3",
           "-std=gnu11", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-Iinclude", "-Isrc", "-Icli",
           "-O1", "-fanalyzer", "-Wno-all", "-c", "-o", os.devnull]


def analyse(path: pathlib.Path, generated: str) -> list[tuple[str, str, str]]:
    """(file, warning, line) of each report."""
    done = subprocess.run(["gcc", *OPTIONS, f"-I{generated}", str(path)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    if done.returncode:
        return [(str(path), "error", done.stderr[:500])]
    rows = re.findall(r"^(\S+?):\d+:\d+: warning: .*\[-Wanalyzer-([a-z-]+)\]$", done.stderr, re.M)
    return [(name, kind, "") for name, kind in rows]


def main() -> int:
    """Analyses every file."""
    if not shutil.which("gcc"):
        print("no gcc")
        return SKIP
    version = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True,
                             check=True).stdout.split(".")[0]
    folders = [ROOT / "build" / name / "src" for name in ("test", "release")]
    generated = next((str(f) for f in folders if (f / "kernel_texts.h").exists()), "")
    files = [p.relative_to(ROOT) for folder in ("src", "cli") for p in (ROOT / folder).rglob("*.c")
             if not p.name.startswith("convert_")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = {row for rows in pool.map(lambda p: analyse(p, generated), files) for row in rows}
    faults = [row for row in sorted(found) if row[:2] not in ALLOWED]
    for name, kind, text in faults:
        print(f"{name}: {kind} {text}")
    if version == "12":
        faults += [key for key in ALLOWED if key not in {row[:2] for row in found}]
    print(f"{len(files)} files, {len(faults)} faults")
    return len(faults) > 0


if __name__ == "__main__":
    sys.exit(main())
