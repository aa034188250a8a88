#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_style.py [ROOT]: checks size limits and banned calls; the list of exceptions may only
shrink.

Exceptions are listed by name in tools/style_exceptions.txt ("path[:function] limit") and may only
shrink: one that is no longer needed, or allows more than is used, is a fault as well.
"""

import pathlib
import re
import shutil
import statistics
import subprocess
import sys

FUNCTION_LINES, FUNCTION_LINES_95, FUNCTION_MEDIAN = 70, 50, 12
TRACKED_BYTES = 512 << 10
PARAMETERS, FILE_LINES, COLUMNS = 5, 600, 100
FOLDERS = ("src", "include", "cli", "python", "tests", "fuzz", "bench", "examples", "tools")
BAD_NAMES = {"util", "utils", "common", "misc", "helper", "helpers"}
# Calls that only some files of src/ may use: (pattern, these files, the replacement).
BANNED = [
    (r"\b(malloc|calloc|realloc|free)\(", {"alloc.c", "arena.c"}, "fsti_alloc and its like"),
    (r"\b(printf|fprintf|puts|abort|exit)\(", set(), "an fst_error"),
    (r"\b(getenv|secure_getenv)\(",
     {"http_settings.c", "kernel_cache.c", "share_settings.c"},
     "an option, or fsti_http_environment()"),
    (r"\b(strcpy|strcat|sprintf|gets|atoi|strtok)\(", set(), "a bounded call"),
]


class Exceptions:
    """The list of allowed exceptions, and which of them were used."""

    def __init__(self, path: pathlib.Path) -> None:
        """Read the list."""
        rows = path.read_text().split("\n") if path.exists() else []
        pairs = [row.split() for row in rows if row.strip() and not row.startswith("#")]
        self.limits = {name: int(limit) for name, limit in pairs}
        self.used: dict[str, int] = {}

    def allows(self, name: str, value: int) -> bool:
        """Whether `name` may have `value`."""
        self.used[name] = value
        return value <= self.limits.get(name, -1)

    def stale(self) -> list[str]:
        """Return the exceptions that could be reduced or deleted."""
        return [
            f"style_exceptions.txt: {name} {limit} could be {self.used.get(name, 'gone')}"
            for name, limit in self.limits.items()
            if self.used.get(name) != limit
        ]


def functions(lines: list[str]) -> list[tuple[str, int, int]]:
    """Name, length in lines and number of parameters of the functions of a formatted C file."""
    found, start = [], 0
    for number, line in enumerate(lines):
        if line and line[0] not in " \t}#/{" and not line.startswith("    "):
            start = number
        if re.match(r"^(?!typedef|struct|enum|union|static const|extern).*\)\s*\{.*\}$", line):
            found.append((number, number))
        if line == "}" and start < number:
            found.append((start, number))
            start = number
    result = []
    for first, last in found:
        head = " ".join(lines[first : min(last + 1, first + 8)]).split("{")[0]
        match = re.search(r"(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*$", head)
        if not match or re.match(r"\s*(typedef|struct|enum|union)\b", head):
            continue
        parameters = re.sub(r"\([^()]*\)", "", match.group(2))
        parameters = re.sub(r",?\s*fst_error \*error\s*$", "", parameters)  # the last one, always
        count = 0 if parameters.strip() in ("", "void") else parameters.count(",") + 1
        result.append((match.group(1), last - first + 1, count))
    return result


def check_file(path: pathlib.Path, name: str, allowed: Exceptions) -> list[str]:
    """Faults of one file, whatever its language."""
    lines = path.read_text().splitlines()
    faults = []
    if len(lines) > FILE_LINES and not allowed.allows(name, len(lines)):
        faults.append(f"{name}: {len(lines)} lines, {FILE_LINES} allowed")
    # Programs import fastsafetensors.common by that name.
    if path.stem in BAD_NAMES and path.name != "common.py":
        faults.append(f"{name}: names nothing")
    head = "\n".join(lines[:2])
    if lines and "SPDX-License-Identifier: Apache-2.0" not in head and path.suffix != ".pyi":
        faults.append(f"{name}: no SPDX line at the top")
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS and not allowed.allows(f"{name}:{number}", len(line)):
            faults.append(f"{name}:{number}: {len(line)} columns")
        if line != line.rstrip() or "\t" in line:
            faults.append(f"{name}:{number}: trailing space or tab")
    return faults


def check_bans(path: pathlib.Path, name: str) -> list[str]:
    """Banned calls in src/."""
    text = re.sub(r"//.*", "", path.read_text())
    return [
        f"{name}: {match.group(1)}(): use {instead}"
        for pattern, files, instead in BANNED
        if path.name not in files
        for match in re.finditer(pattern, text)
    ]


def find_large(root: pathlib.Path) -> list[str]:
    """Files that should not be tracked."""
    if shutil.which("git") is None:
        return []
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    tracked = (root / name for name in done.stdout.split("\0") if name)
    return [f"{path.relative_to(root)}: larger than {TRACKED_BYTES >> 10} KiB" for path in tracked
            if path.is_file() and path.stat().st_size > TRACKED_BYTES]


def main() -> int:
    """Check the tree; print the faults."""
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    allowed = Exceptions(root / "tools/style_exceptions.txt")
    faults: list[str] = []
    sizes: list[int] = []
    seen: dict[str, str] = {}
    paths = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*"))]
    for path in paths:
        if path.suffix not in (".c", ".h", ".py") or "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(root))
        faults += check_file(path, name, allowed)
        if path.suffix == ".py":
            continue
        if seen.setdefault(path.name, name) != name:
            faults.append(f"{name}: the same file name as {seen[path.name]}")
        if name.startswith(("include/", "python/src/module.h")):
            continue
        if name.startswith("src/"):
            faults += check_bans(path, name)
        for function, length, parameters in functions(path.read_text().splitlines()):
            place = f"{name}:{function}"
            if name.startswith("src/"):
                sizes.append(length)
            if length > FUNCTION_LINES and not allowed.allows(place, length):
                faults.append(f"{place}: {length} lines, {FUNCTION_LINES} allowed")
            if parameters > PARAMETERS and not allowed.allows(place + "()", parameters):
                faults.append(f"{place}: {parameters} parameters, {PARAMETERS} allowed")
    faults += find_large(root)
    faults += allowed.stale()
    sizes.sort()
    median, p95 = statistics.median(sizes), sizes[int(len(sizes) * 0.95)]
    if median > FUNCTION_MEDIAN or p95 > FUNCTION_LINES_95:
        faults.append(f"functions of src/: median {median}, 95 % {p95}")
    print("\n".join(faults) or f"style: {len(sizes)} functions, median {median}, 95 % <= {p95}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
