#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts phrases that are hard to read, in everything that a reader of the project meets.

    tools/check_words.py [--show AREA] [--update]

tools/words.txt lists the phrases with replacements, tools/words_left.txt how many each area may
have. More is an error. --update writes the counts that have fallen; it never raises one.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools/words.txt"
LEFT = ROOT / "tools/words_left.txt"
Lines = Iterator[tuple[int, str]]


def prose(text: str) -> Lines:
    """Lines of a page without its code."""
    text = re.sub(r"```.*?```", lambda match: "\n" * match.group().count("\n"), text, flags=re.S)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "`code`", line)


def c_comments(text: str) -> Lines:
    """Comments of a C file."""
    for number, line in enumerate(text.split("\n"), 1):
        if match := re.search(r"//[/!]?(.*)", line):
            yield number, match.group(1)


def c_strings(text: str) -> Lines:
    """Texts of a C file that have more than one word."""
    for number, line in enumerate(text.split("\n"), 1):
        for string in re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r"//.*", "", line)):
            if " " in string.strip():
                yield number, string


def docstrings(text: str) -> Lines:
    """Docstrings of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node, clean=False)
            for offset, line in enumerate((found or "").split("\n")):
                yield node.body[0].lineno + offset, line


def raised(text: str) -> Lines:
    """Texts of raise statements in a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


# (area, patterns of files, how they are read)
AREAS: list[tuple[str, tuple[str, ...], Callable[[str], Lines]]] = [
    ("readme", ("README.md", "docs/index.md", "docs/tutorial.md", "docs/howto/*.md"), prose),
    ("docs", ("*.md", "docs/*.md", "docs/benchmarks/*.md", "examples/**/*.md", "testing/*.md",
              "benchmarks/*.md"), prose),
    ("help", ("cli/*.c", "cli/*.h"), c_strings),
    ("messages", ("src/**/*.c", "python/src/*.c"), c_strings),
    ("messages", ("python/fastsafetensors/**/*.py",), raised),
    ("headers", ("include/**/*.h",), c_comments),
    ("docstrings", ("python/fastsafetensors/**/*.py",), docstrings),
    ("comments", ("src/**/*.[ch]", "cli/*.[ch]", "python/src/*.[ch]"), c_comments),
]


def read_words() -> list[tuple[re.Pattern[str], str]]:
    """The phrases and their replacements."""
    found = []
    for line in WORDS.read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, _, replacement = line.partition("\t")
            found.append((re.compile(pattern), replacement))
    return found


def count(show: str | None) -> dict[str, int]:
    """How many phrases each area has; those of `show` are printed."""
    words, counts = read_words(), {area: 0 for area, _, _ in AREAS}
    first = {path for pattern in AREAS[0][1] for path in ROOT.glob(pattern)}
    for area, patterns, read in AREAS:
        paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
        for path in sorted(paths - first if area == "docs" else paths):
            for number, text in read(path.read_text()):
                for pattern, replacement in words:
                    hits = len(pattern.findall(text))
                    counts[area] += hits
                    if hits and area == show:
                        print(f"{path.relative_to(ROOT)}:{number}: {text.strip()[:90]}\n"
                              f"    write: {replacement}")
    return counts


def main() -> int:
    """Count and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", metavar="AREA")
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    counts = count(arguments.show)
    left = {name: int(number) for name, number in
            (line.split() for line in LEFT.read_text().splitlines())} if LEFT.exists() else counts
    if arguments.update:
        left = {area: min(number, left.get(area, number)) for area, number in counts.items()}
        LEFT.write_text("".join(f"{area} {number}\n" for area, number in left.items()))
    worse = [area for area, number in counts.items() if number > left.get(area, 0)]
    for area in worse:
        print(f"{area}: {counts[area]} phrases of tools/words.txt, at most {left.get(area, 0)} "
              f"are allowed: see tools/check_words.py --show {area}")
    if not worse:
        print("words: " + ", ".join(f"{area} {number}" for area, number in counts.items()))
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
