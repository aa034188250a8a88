#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_symbols.py SHARED STATIC ROOT: exported symbols equal the functions of the headers.

Every global symbol of the archive must begin with fst_ or fsti_, so that it can't collide with a
program's symbols.
"""

import pathlib
import re
import subprocess
import sys


def globals_of(library: str, *options: str) -> set[str]:
    """Defined global symbols, without versions."""
    output = subprocess.run(
        ["nm", "--defined-only", "--extern-only", *options, library],
        check=True, capture_output=True, text=True,
    ).stdout
    rows = [line.split() for line in output.splitlines()]
    return {row[2].split("@")[0] for row in rows if len(row) == 3 and row[1] in "TtWDBRV"}


shared, static, root = sys.argv[1:]
declared: set[str] = set()
for header in pathlib.Path(root, "include").rglob("*.h"):
    declared |= set(re.findall(r"FST_API[^;(]*?\b(fst_\w+)\(", header.read_text()))
exported = {name for name in globals_of(shared, "-D") if not name.startswith("FST_")}
faults = [f"declared, not exported: {name}" for name in sorted(declared - exported)]
faults += [f"exported, not declared: {name}" for name in sorted(exported - declared)]
faults += [
    f"global without our prefix: {name}"
    for name in sorted(globals_of(static))
    if not re.match(r"fsti?_", name) and not name.startswith(("__asan", "__odr_asan", "__ubsan"))
]
print("\n".join(faults) or f"{len(exported)} symbols")
sys.exit(bool(faults or not declared))
