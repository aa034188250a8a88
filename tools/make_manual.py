#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the command's manual page and docs/command.md from its --help output.

    tools/make_manual.py [--check] [COMMAND]

--check only compares, and exits with 1 if one of them is outdated.
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
    (1, "Invalid, such as a folder without a model; different; or no tensor name matches."),
    (2, "A file could not be read or written, or it does not support the operation. For diff, also "
        "an invalid file."),
    (3, "The command line is wrong."),
    (4, "Something that is needed is not installed: Python with torch, a library, or a GPU's "
        "driver."),
]
PATHS = ("PATH is a .safetensors file, an index of shards (*.safetensors.index.json), a folder, a "
         "URL, or - for standard input. For a folder, its only index is used, otherwise all its "
         "*.safetensors files in sorted order. A model from a pipe is kept in an unnamed temporary "
         "file in TMPDIR or /tmp. As a target, - and /dev/stdout are standard output. SIZE is a "
         "number of bytes with an optional unit: K, M, G and T (or KiB, ...) are powers of 1024, "
         "KB, MB, GB and TB powers of 1000.")
JSON = ('With --json, a failure prints an object to standard output, {"error": {"kind": ..., '
        '"message": ..., "file": ..., "tensor": ..., "byte": ...}}. Kinds are the names of the '
        'statuses in fastsafetensors/base.h, and "Usage", "NoMatch", "NoDigests", "NoTensors", '
        '"NotTensors", "TorchFile" and "Missing".')
SHARED = "Options that several commands share"


class Help(NamedTuple):
    """The parsed help of a subcommand."""

    name: str
    usage: str
    about: list[str]  # paragraphs
    options: list[tuple[str, str]]
    common: list[str]  # names of common options
    examples: list[str]


def run(command: str, *words: str) -> str:
    """Return the command's output."""
    return subprocess.run([command, *words], check=True, capture_output=True, text=True).stdout


def read_options(table: str) -> list[tuple[str, str]]:
    """Take a table of options apart: (option with its value, text)."""
    options: list[tuple[str, str]] = []
    for line in table.splitlines():
        if match := re.match(r"  (--\S+(?: \S+)?)(?:\s{2,}| )(.*)", line):
            # A name that fills its column is followed by only one space.
            options.append((match.group(1), match.group(2)))
        elif line.strip():
            join = "; " if line.strip().startswith("one of ") else " "
            options[-1] = (options[-1][0], options[-1][1] + join + line.strip())
    return options


def split_list(paragraph: str) -> list[str]:
    """Return a paragraph's text as one line, or an indented list with one item per line."""
    lines = paragraph.strip("\n").splitlines()
    if not all(line.startswith("  ") for line in lines):
        return [" ".join(paragraph.split())]
    return ["- " + ": ".join(re.split(r"\s{2,}", line.strip())) for line in lines]


def read_help(command: str, name: str) -> Help:
    """Parse a subcommand's help."""
    head, _, examples = run(command, "help", name).partition("\nexamples:\n")
    head, _, common = head.partition("common options (see 'fastsafetensors help'):")
    usage, _, rest = head.partition("\n\n")
    about, _, table = ("\n" + rest).partition("\n  --")
    paragraphs = [one for p in about.split("\n\n") if p.strip() for one in split_list(p)]
    return Help(name, usage.removeprefix("usage: fastsafetensors "), paragraphs,
                read_options("  --" + table) if table else [], common.split(),
                [line.strip() for line in examples.splitlines()])


def read_shared(command: str, helps: list[Help]) -> list[tuple[str, str]]:
    """Return the options that are described once: the common ones, and those that three commands
    share."""
    _, _, table = run(command, "help").partition("common options, of the commands whose help lists "
                                                 "them:\n")
    every = [option for entry in helps for option in entry.options]
    several = [option for option in dict.fromkeys(every) if every.count(option) > 2]
    return several + read_options(table.partition("\n\n")[0])


def own_options(entry: Help, shared: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the options that are described with a command."""
    return [option for option in entry.options if option not in shared]


def shared_names(entry: Help, shared: list[tuple[str, str]]) -> list[str]:
    """The names of a command's other options."""
    names = [re.split(r"[ \[]", words)[0] for words, text in entry.options
             if (words, text) in shared]
    return names + entry.common


def roff(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in ".'" else line for line in text.split("\n"))


def roff_option(words: str, text: str) -> list[str]:
    """Lines of the manual page for an option."""
    name, _, value = words.partition(" ")
    return [".TP", f'.BI "{roff(name)}" " {roff(value)}"' if value else f".B {roff(name)}",
            roff(text)]


def make_manual(helps: list[Help], shared: list[tuple[str, str]], version: str) -> str:
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
        for words, text in own_options(entry, shared):
            out += roff_option(words, text)
        out += [".PP", roff(f"Shared options: {', '.join(shared_names(entry, shared))}")]
    out += [f".SH {SHARED.upper()}"]
    for words, text in shared:
        out += roff_option(words, text)
    out += [".SH EXIT STATUS"]
    for code, text in CODES:
        out += [f".IP {code}", roff(text)]
    out += [".SH FILES", ".TP", ".I PATH.digest",
            roff("Digests that 'hash --write' stores and 'verify --hash' compares."),
            ".SH ENVIRONMENT", ".TP", ".B NO_COLOR", "Set and not empty: no colours.", ".TP",
            ".B TMPDIR", "Folder for a model that comes through a pipe. Default: /tmp.", ".TP",
            ".B TERM", "dumb: no colours and no progress bar.", ".SH EXAMPLES", ".nf"]
    for entry in helps:
        out += [roff(line) for line in entry.examples]
    out += [".fi", ".SH SEE ALSO", ".BR libfastsafetensors (3)"]
    return "\n".join(out) + "\n"


def option_table(options: list[tuple[str, str]]) -> list[str]:
    """A table of options for docs/command.md."""
    if not options:
        return []
    return ["| option | |", "|---|---|",
            *(f"| `{words}` | {text.replace('|', chr(92) + '|')} |" for words, text in options), ""]


def make_page(helps: list[Help], shared: list[tuple[str, str]]) -> str:
    """Return docs/command.md."""
    out = ["# The command", "", "<!-- Made by tools/make_manual.py. -->", "", PATHS, "",
           "`fastsafetensors PATH` is `fastsafetensors inspect PATH`. `fastsafetensors help "
           "COMMAND` prints the text of a section. Completion for bash, zsh and fish is installed "
           "with the command.", "", "| exit code | meaning |", "|---|---|"]
    out += [f"| {code} | {text} |" for code, text in CODES] + ["", JSON.replace("{", "`{", 1)
                                                               .replace("}}", "}}`"), ""]
    for entry in helps:
        out += [f"## {entry.name}", "", f"`fastsafetensors {entry.usage}`", ""]
        for paragraph in entry.about:
            out += [paragraph, ""]
        out += option_table(own_options(entry, shared))
        names = [f"`{name}`" for name in shared_names(entry, shared)]
        out += [f"[Shared options](#{SHARED.lower().replace(' ', '-')}): {', '.join(names)}", ""]
        if entry.examples:
            out += ["```", *entry.examples, "```", ""]
    out += [f"## {SHARED}", "", *option_table(shared)]
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
    shared = read_shared(arguments.command, helps)
    for path, text in ((MANUAL, make_manual(helps, shared, version)),
                       (PAGE, make_page(helps, shared))):
        if arguments.check and (not path.exists() or path.read_text() != text):
            stale.append(path)
        elif not arguments.check:
            path.write_text(text)
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what --help says: run tools/make_manual.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
