# SPDX-License-Identifier: Apache-2.0
"""Splits public headers into comments and the declarations that they describe, for the site and the
man pages."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ("base", "dtype", "model", "remote", "loader", "tensor", "writer", "verify", "device",
           "experimental", "version")


class Block(NamedTuple):
    """A comment, or code without a comment in between; the other is empty."""

    comment: list[str]
    code: str


def is_frame(line: str, in_code: bool) -> bool:
    """Whether a line is not part of the interface: includes, guards, extern "C"."""
    if line.startswith("#define FST_") and not line.endswith("_H"):
        return False
    return line.startswith(("#", "// SPDX", 'extern "C"')) or (line == "}" and not in_code)


def lines_of(name: str) -> list[str]:
    """Return the lines of include/fastsafetensors/NAME.h without what only C++ sees."""
    text = (ROOT / f"include/fastsafetensors/{name}.h").read_text()
    text = re.sub(r"#ifdef __cplusplus\n.*?#(?:else|endif)\n", "", text, flags=re.S)
    return text.splitlines()


def read_header(name: str) -> list[Block]:
    """Return the blocks of a header in order; experimental.h with those that it includes."""
    blocks = read_lines(lines_of(name))
    if name == "experimental":
        folder = ROOT / "include/fastsafetensors/experimental"
        for path in sorted(folder.glob("*.h")):
            blocks += read_lines(lines_of(f"experimental/{path.stem}"))
    return blocks


def read_lines(lines: list[str]) -> list[Block]:
    """Return the blocks of lines in order."""
    blocks: list[Block] = []
    comment: list[str] = []
    code: list[str] = []

    def end_code() -> None:
        text = "\n".join(code).strip()
        if text:
            blocks.append(Block([], text))
        code.clear()

    for line in lines:
        if line.startswith("///"):
            end_code()
            comment.append(line[3:].removeprefix(" "))
            continue
        if comment:
            blocks.append(Block(comment, ""))
            comment = []
        if is_frame(line, bool(code)):
            continue
        if line or code:
            code.append(line)
        text = "".join(code)
        if not line and code and text.count("{") == text.count("}"):
            end_code()
    end_code()
    return blocks


def functions_of(blocks: list[Block]) -> list[str]:
    """Return the names of the functions that blocks declare."""
    text = "\n".join(block.code for block in blocks)
    return re.findall(r"FST_API[^;(]*?\b(fst_\w+)\(", text)
