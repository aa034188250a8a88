#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""embed_text.py OUTPUT NAME=FILE...: a C header that holds the files: text as strings, binaries
(.cubin) as bytes."""

import pathlib
import sys


def c_string(text: str) -> str:
    """A C string literal, a line each."""
    lines = []
    for line in text.splitlines():
        escaped = line.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'    "{escaped}\\n"')
    return "\n".join(lines)


def c_bytes(data: bytes) -> str:
    """An initializer."""
    rows = [data[i:i + 16] for i in range(0, len(data), 16)]
    lines = ["    " + "".join(f"{byte}," for byte in row) for row in rows]
    return "\n".join(["{", *lines, "}"])


def main() -> None:
    """Writes the header."""
    output, *pairs = sys.argv[1:]
    parts = ["// Made by tools/embed_text.py: do not edit."]
    for pair in pairs:
        name, path = pair.split("=", 1)
        if path.endswith(".cubin"):
            data = c_bytes(pathlib.Path(path).read_bytes())
            parts.append(f"static const _Alignas(16) unsigned char {name}[] = {data};")
            continue
        text = pathlib.Path(path).read_text(encoding="utf-8")
        parts.append(f"static const char {name}[] =\n{c_string(text)};")
    pathlib.Path(output).write_text("\n".join(parts) + "\n", encoding="utf-8")


main()
