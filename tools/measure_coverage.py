#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the C tests in a build that counts lines and branches of src/, and prints what they reach.
With --corpora only the fuzz targets run, over their seed corpora.

Needs gcc's gcov and the gcovr package. Writes a report with the lines that were not reached to
build/coverage/report.txt.
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/coverage"


def main() -> int:
    """Build, run, print."""
    if not shutil.which("gcov"):
        print("coverage needs gcov, which is not installed")
        return 1
    bin_folder = pathlib.Path(sys.executable).parent
    environment = dict(os.environ, PATH=f"{bin_folder}:{os.environ['PATH']}")
    if not (FOLDER / "build.ninja").exists():
        subprocess.run(["meson", "setup", str(FOLDER), "-Db_coverage=true", "-Dbuildtype=debug",
                        "-Dc_args=-fprofile-update=atomic"],
                       cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(FOLDER)], env=environment, check=True,
                   stdout=subprocess.DEVNULL)
    for counts in FOLDER.rglob("*.gcda"):
        counts.unlink()
    chosen = ["fuzz/replay_*"] if "--corpora" in sys.argv[1:] else []
    tests = subprocess.run(["meson", "test", "-C", str(FOLDER), "--no-rebuild", *chosen], cwd=ROOT,
                           env=environment, stdout=subprocess.DEVNULL)
    report = ["gcovr", "--root", str(ROOT), "--filter", "src/", "--object-directory", str(FOLDER),
              "--exclude-throw-branches", "--exclude-unreachable-branches",
              # Loops are compiled once for each instruction set, by macros.
              "--merge-mode-functions", "separate"]
    for options in (["--txt", str(FOLDER / "report.txt"), "--print-summary"],
                    ["--txt", "-", "--txt-metric", "branch"]):
        subprocess.run([*report, *options, str(FOLDER)], cwd=ROOT, env=environment, check=True)
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
