#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_clang.py BUILD_FOLDER: checks that clang has no warnings for the C sources compiled there.

Only clang's front end runs, because warnings need no generated code and another full build would
take minutes.
Exit status 77: no clang.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

SKIP = 77

def options_of(command: str) -> list[str]:
    """Return the options of another compiler's call that clang needs: include paths, macros,
    dialect, warnings."""
    words = shlex.split(command)[1:]
    kept = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "-isystem":
            kept += [word, following]
        elif word.startswith(("-I", "-isystem", "-D", "-U", "-W", "-std=", "-m", "-O", "-w")):
            kept.append(word)
    return kept


def check(entry: dict[str, str]) -> str:
    """Return clang's output for one source file."""
    done = subprocess.run(["clang", "-fsyntax-only", *options_of(entry["command"]),
                           "-Werror", "-Wno-unknown-warning-option", entry["file"]],
                          cwd=entry["directory"], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    """Check all sources in parallel, once for each different set of options."""
    if not shutil.which("clang"):
        print("a second compiler's warnings (clang is not installed)")
        return SKIP
    database = pathlib.Path(sys.argv[1]) / "compile_commands.json"
    entries = {(entry["file"], *options_of(entry["command"])): entry
               for entry in json.loads(database.read_text()) if entry["file"].endswith(".c")}
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for key, entry in entries.items():
        # Programs only differ in the folder of an object's generated headers.
        seen.setdefault(tuple(word for word in key if not word.endswith(".p")), entry)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [text for text in pool.map(check, seen.values()) if text]
    print("\n".join(faults))
    print(f"{len(seen)} sources, {len(faults)} with warnings")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
