#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes section 3 of the manual from the public headers, with a page per header and a name per
function.

    tools/make_library_manual.py [--check]

--check only compares, and exits with 1 if a page is outdated.
"""

from __future__ import annotations

import argparse
import re
import sys

from make_manual import roff
from read_headers import HEADERS, ROOT, Block, functions_of, read_header
from read_version import VERSION

MAN = ROOT / "man"
# Headers that fastsafetensors.h leaves out.
UNSTABLE = ("async_save", "experimental")


def page_name(header: str) -> str:
    """Return the page's name without the ending .3."""
    return f"fastsafetensors_{header}"


def format_comment(lines: list[str]) -> list[str]:
    """Return the paragraphs of a comment with its bold words. Lists keep their lines."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        text = roff(paragraph)
        text = re.sub(r"\*\*(.+?)\*\*", r"\\fB\1\\fR", text, flags=re.S)
        text = re.sub(r"`([^`\n]+)`", r"\\fI\1\\fR", text)
        is_list = re.search(r"^( {2,}|\\- )", text, re.M)
        out += [".PP", *([".nf", text, ".fi"] if is_list else [text])]
    return out


def make_page(header: str, blocks: list[Block]) -> str:
    """Return the manual page of a header."""
    about = " ".join(blocks[0].comment).partition(". ")[0].rstrip(".")
    about = about[:1].lower() + about[1:]
    names = functions_of(blocks) or [page_name(header)]
    out = ['.\\" SPDX-License-Identifier: Apache-2.0',
           '.\\" Made by tools/make_library_manual.py from the header.',
           f'.TH {page_name(header).upper()} 3 "" "fastsafetensors {VERSION}" "Library Functions"',
           ".SH NAME", f"{roff(', '.join(names))} \\- {roff(about)}", ".SH SYNOPSIS", ".nf",
           f"#include <fastsafetensors{'/' + header if header in UNSTABLE else ''}.h>",
           ".sp", "cc program.c $(pkg\\-config \\-\\-cflags \\-\\-libs fastsafetensors)", ".fi",
           ".SH DESCRIPTION"]
    for block in blocks:
        if block.comment:
            out += format_comment(block.comment)
        else:
            code = re.sub(r"\bFST_(API|NODISCARD)\s+", "", block.code)
            out += [".sp", ".in +4n", ".EX", roff(code), ".EE", ".in"]
    out += [".SH SEE ALSO", ",\n".join(
        [".BR libfastsafetensors (3)"] + [f".BR {page_name(other)} (3)" for other in HEADERS
                                          if other != header]).replace(",\n", " ,\n")]
    return "\n".join(out) + "\n"


def main() -> int:
    """Write the pages, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    texts, names = {}, []
    for header in HEADERS:
        blocks = read_header(header)
        texts[MAN / f"{page_name(header)}.3"] = make_page(header, blocks)
        names += [f"{name} {page_name(header)}" for name in functions_of(blocks)]
    texts[MAN / "functions.txt"] = "\n".join(names) + "\n"
    stale = [path for path, text in texts.items()
             if not path.exists() or path.read_text() != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is not what the header says: run "
                  "tools/make_library_manual.py")
        else:
            path.write_text(texts[path])
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
