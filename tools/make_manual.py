#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the command's manual page and docs/command.md from what its --help says.

    tools/make_manual.py [--check] [COMMAND]

--check only compares: exit 1 when one of them is not what would be written.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANUAL = ROOT / "man/fastsafetensors.1"
PAGE = ROOT / "docs/command.md"
CODES = [
    (0, "Success; valid; the same."),
    (1, "The answer is no: invalid, different, no tensor's name matches."),
    (2, "Something could not be read or written."),
    (3, "The command line is wrong."),
    (4, "What this needs is not installed: Python with torch, or a library for digests."),
]
PATHS = ("PATH is a .safetensors file, an index of shards (*.safetensors.index.json) or a folder. "
         "Of a folder its only index is used, else all its *.safetensors files, sorted. - is "
         "standard input, where a model is read: what comes through a pipe is kept in a file "
         "without a name meanwhile (in TMPDIR, or /tmp), as far as it is looked at. Of a target - "
         "and /dev/stdout are standard output.")
JSON = ('With --json a failure is an object, {"error": {"kind": .., "message": .., "file": .., '
        '"tensor": .., "byte": ..}}, on standard output; kinds are the names of the statuses in '
        'fastsafetensors/base.h, and "Usage", "NoMatch" and "NotInstalled".')


class Help(NamedTuple):
    """What a subcommand's help says."""

    name: str
    usage: str
    about: list[str]  # paragraphs
    options: list[tuple[str, str]]
    examples: list[str]


def run(command: str, *words: str) -> str:
    """Return what the command prints."""
    return subprocess.run([command, *words], check=True, capture_output=True, text=True).stdout


def read_help(command: str, name: str) -> Help:
    """Take a subcommand's help apart."""
    head, _, examples = run(command, "help", name).partition("\nexamples:\n")
    usage, _, rest = head.partition("\n\n")
    about, _, table = ("\n" + rest).partition("\n  --")
    options: list[tuple[str, str]] = []
    for line in ("  --" + table).splitlines():
        if match := re.match(r"  (--\S+(?: \S+)?)(?:\s{2,}| )(.*)", line):
            words = match.group(1)
            # A name as long as its column leaves one space before the text.
            options.append((words, match.group(2)))
        elif line.strip():
            join = "; " if line.strip().startswith("one of ") else " "
            options[-1] = (options[-1][0], options[-1][1] + join + line.strip())
    paragraphs = [" ".join(p.split()) for p in about.split("\n\n") if p.strip()]
    return Help(name, usage.removeprefix("usage: fastsafetensors "), paragraphs, options,
                [line.strip() for line in examples.splitlines()])


def roff(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in ".'" else line for line in text.split("\n"))


def make_manual(helps: list[Help], version: str) -> str:
    """Return the manual page."""
    out = ['.\\" SPDX-License-Identifier: Apache-2.0', '.\\" Made by tools/make_manual.py.',
           f'.TH FASTSAFETENSORS 1 "" "fastsafetensors {version}" "User Commands"', ".SH NAME",
           r"fastsafetensors \- load, inspect, save and convert safetensors models",
           ".SH SYNOPSIS"]
    for entry in helps:
        out += [".br", f".B fastsafetensors {roff(entry.name)}",
                roff(entry.usage.removeprefix(entry.name).strip())]
    out += [".SH DESCRIPTION", roff(PATHS), ".PP", roff(JSON), ".SH COMMANDS"]
    for entry in helps:
        out += [f".SS {roff(entry.name)}"]
        for number, paragraph in enumerate(entry.about):
            out += ([".PP"] if number else []) + [roff(paragraph)]
        for words, text in entry.options:
            name, _, value = words.partition(" ")
            out += [".TP", f'.BI "{roff(name)}" " {roff(value)}"' if value else f".B {roff(name)}",
                    roff(text)]
    out += [".SH EXIT STATUS"]
    for code, text in CODES:
        out += [f".IP {code}", roff(text)]
    out += [".SH FILES", ".TP", ".I PATH.digest",
            roff("What 'hash --write' keeps and 'verify --hash' compares."), ".SH ENVIRONMENT",
            ".TP", ".B NO_COLOR", "When set and not empty, no colours.", ".TP", ".B TMPDIR",
            "Where a model that comes through a pipe is kept meanwhile (/tmp).", ".TP", ".B TERM",
            "When it is dumb, no progress bar.", ".SH EXAMPLES", ".nf"]
    for entry in helps:
        out += [roff(line) for line in entry.examples]
    out += [".fi", ".SH SEE ALSO", ".BR libfastsafetensors (3)"]
    return "\n".join(out) + "\n"


def make_page(helps: list[Help]) -> str:
    """Return docs/command.md."""
    out = ["# The command", "", "<!-- Made by tools/make_manual.py. -->", "", PATHS, "",
           "`fastsafetensors PATH` is `fastsafetensors inspect PATH`; `fastsafetensors help "
           "COMMAND` tells what stands here. Completion for bash, zsh and fish is installed with "
           "it.", "", "| exit code | |", "|---|---|"]
    out += [f"| {code} | {text} |" for code, text in CODES] + ["", JSON.replace("{", "`{", 1)
                                                               .replace("}}", "}}`"), ""]
    for entry in helps:
        out += [f"## {entry.name}", "", f"`fastsafetensors {entry.usage}`", ""]
        for paragraph in entry.about:
            out += [paragraph, ""]
        out += ["| option | |", "|---|---|"]
        out += [f"| `{words}` | {text.replace('|', chr(92) + '|')} |"
                for words, text in entry.options]
        if entry.examples:
            out += ["", "```", *entry.examples, "```"]
        out += [""]
    return "\n".join(out).rstrip() + "\n"


def main() -> int:
    """Write both, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("command", nargs="?",
                        default=str(ROOT / "build/release/cli/fastsafetensors"))
    arguments = parser.parse_args()
    names = [word for word in run(arguments.command, "__complete", "").split()
             if word not in ("help", "--help", "--version", ":files")]
    helps = [read_help(arguments.command, name) for name in names]
    version = run(arguments.command, "--version").split()[1]
    stale = []
    for path, text in ((MANUAL, make_manual(helps, version)), (PAGE, make_page(helps))):
        if arguments.check and (not path.exists() or path.read_text() != text):
            stale.append(path)
        elif not arguments.check:
            path.write_text(text)
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what --help says: run tools/make_manual.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
