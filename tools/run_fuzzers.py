#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every fuzz target in turn for --seconds each, under the sanitizers. Needs clang.
fuzz/fuzz_python.py fuzzes the Python code.

New inputs go to build/fuzz/corpus-NAME; a crashing input is written to the same folder and fails
the run.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    """Build and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    if not shutil.which("clang"):
        print("fuzzing needs clang, which is not installed")
        return 1
    folder = ROOT / "build/fuzz"
    folder.parent.mkdir(exist_ok=True)
    bin_folder = pathlib.Path(sys.executable).parent
    environment = dict(os.environ, CC="clang", PATH=f"{bin_folder}:{os.environ['PATH']}")
    if not (folder / "build.ninja").exists():
        subprocess.run(
            ["meson", "setup", str(folder), "-Dfuzzing=true", "-Dtests=false",
             "-Db_sanitize=address,undefined", "-Db_lundef=false", "-Dbuildtype=debugoptimized"],
            cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(folder)], env=environment, check=True,
                   stdout=subprocess.DEVNULL)
    for corpus in sorted((ROOT / "fuzz/corpus").iterdir()):
        if arguments.only not in (None, corpus.name):
            continue
        grown = folder / f"corpus-{corpus.name}"
        grown.mkdir(exist_ok=True)
        command = [str(folder / f"fuzz/fuzz_{corpus.name}"), str(grown), str(corpus),
                   f"-max_total_time={arguments.seconds}", "-print_final_stats=1",
                   "-timeout=10", f"-artifact_prefix={grown}/"]
        dictionary = ROOT / f"fuzz/{corpus.name}.dict"
        if dictionary.exists():
            command.append(f"-dict={dictionary}")
        print(f"{corpus.name}: {arguments.seconds} s", flush=True)
        # By default, undefined behaviour is reported and the run goes on.
        done = subprocess.run(command, capture_output=True, text=True,
                              env=dict(os.environ, UBSAN_OPTIONS="halt_on_error=1"))
        print("\n".join(row for row in done.stderr.splitlines()
                        if row.startswith("stat::") or " DONE " in row or "ERROR" in row))
        if done.returncode:
            print(done.stderr[-4000:])
            return 1
    return fuzz_python(arguments)


def fuzz_python(arguments: argparse.Namespace) -> int:
    """Fuzz the Python code, if the package and torch are installed."""
    for what in ("slices", "dlpack"):
        if arguments.only not in (None, what):
            continue
        found = subprocess.run([sys.executable, "-c", "import torch, fastsafetensors"],
                               capture_output=True, check=False)
        if found.returncode:
            print(f"skipped {what}: the package or torch is not installed here")
            continue
        print(f"{what}: {arguments.seconds} s", flush=True)
        done = subprocess.run([sys.executable, str(ROOT / "fuzz/fuzz_python.py"), what,
                               "--seconds", str(arguments.seconds)], check=False)
        if done.returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
