#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_header.py CC ROOT HEADER: compiles one public header alone, as C11 and as C++17."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

compiler, root, header = sys.argv[1:]
runs = [([compiler, "-std=c11", "-x", "c"], ".c")]
cxx = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
if cxx:
    runs.append(([cxx, "-std=c++17", "-x", "c++"], ".cc"))
else:
    print(f"{header}: no C++ compiler, C++17 not checked")
with tempfile.TemporaryDirectory() as folder:
    for command, ending in runs:
        source = pathlib.Path(folder, "alone" + ending)
        source.write_text(f"#include <{header}>\nint main(void) {{ return 0; }}\n")
        subprocess.run(
            [*command, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            + [f"-I{root}/include", str(source)],
            check=True,
        )
