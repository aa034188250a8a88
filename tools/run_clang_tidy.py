#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run_clang_tidy.py BUILD_FOLDER [--shallow]: clang-tidy over library and command.

With --shallow the analyzer follows fewer paths, which takes a tenth of the time.
"""

import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHALLOW = ["--extra-arg=-Xclang", "--extra-arg=-analyzer-config", "--extra-arg=-Xclang",
           "--extra-arg=mode=shallow",
           # It does not follow calls, so it does not see results of failed allocations.
           "--checks=-clang-analyzer-core.NullDereference"]


def check(path: pathlib.Path) -> set[str]:
    """Faults of one file."""
    done = subprocess.run(["clang-tidy", "-p", sys.argv[1], "--quiet",
                           *(SHALLOW if "--shallow" in sys.argv else []), str(path)], cwd=ROOT,
                          capture_output=True, text=True)
    return set(re.findall(r"^.*: (?:error|warning): .*$", done.stdout, re.M))


def main() -> int:
    """Check all files in parallel."""
    paths = sorted((ROOT / "src").rglob("*.c")) + sorted((ROOT / "cli").glob("*.c"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = set().union(*pool.map(check, paths))
    print("\n".join(sorted(faults)))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
