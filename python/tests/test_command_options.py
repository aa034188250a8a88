# SPDX-License-Identifier: Apache-2.0
"""One vocabulary of options: a name means one thing in all subcommands, a thing has one name."""

import re
import subprocess

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs/command.md").read_text()
# Options that mean something else in another subcommand, and why.
TWO_MEANINGS = {
    "dry-run": "clean deletes, hash writes only with --write or --embed",
    "engine": "load reads, the others write",
    "keep": "of a bundle or of a manifest, each with old digests",
    "manifest": "hash and the commands that write make one; verify compares with one",
    "output": "what hash and sign write",
    "quiet": "diff has one answer, verify one for each path",
    "repeat": "load runs once by default, bench seven times",
    "threads": "load chooses by the machine",
    "cache-dir": "cache works on that folder, the others read through it",
}
# Other words for what has a name here. An option may not begin with one of these.
OTHER_WORDS = {"runs": "repeat", "times": "repeat", "durable": "quick", "sync": "quick",
               "fsync": "quick", "from": "manifest", "out": "output", "target": "output",
               "jobs": "threads", "num-threads": "threads", "filter": "select", "names": "select",
               "include": "select", "silent": "quiet", "device-memory": "budget",
               "force": "nothing: targets are replaced", "type": "dtype", "verbose": "wide"}


@pytest.fixture(scope="module")
def table(command):
    """{option: {subcommand: (placeholder of its value, help)}} of what help prints."""
    def run_command(*words):
        return subprocess.run([command, *words], capture_output=True, text=True,
                              check=True).stdout

    found = {}
    for name in (word for word in run_command("__complete", "").split() if word[0] not in "-:"):
        text = run_command("help", name).partition("\nexamples:")[0]
        rows = re.split(r"^  --", text, flags=re.M)[1:] if name != "help" else []
        for row in rows:
            row = row.partition("\ncommon options")[0]
            option, value, words = re.match(r"([\w-]+)(\[=\w+\]| [A-Z=]+)?\s+(.*)", row,
                                            re.S).groups()
            found.setdefault(option, {})[name] = (value or "", " ".join(words.split()))
    return found


def test_an_option_has_one_meaning(table):
    assert len(table) > 50 and len(table["select"]) > 5
    differing = {option for option, uses in table.items() if len(set(uses.values())) > 1}
    assert differing == {option for option in TWO_MEANINGS if option in table
                         and len(set(table[option].values())) > 1}
    assert differing | {"cache-dir"} == set(TWO_MEANINGS)


def test_a_value_has_one_placeholder(table):
    """Except --manifest: a digest's name where it is written, a file where it is read."""
    differing = {option for option, uses in table.items()
                 if len({value for value, _ in uses.values()}) > 1}
    assert differing == {"manifest"}


def test_a_thing_has_one_name(table):
    assert {option for option in table if option in OTHER_WORDS} == set()
    assert {word for word in OTHER_WORDS.values() if ":" not in word} <= set(table)
    for option, uses in table.items():  # two names with one explanation
        for other, others in table.items():
            same = set(uses.values()) & set(others.values())
            assert option == other or not same, (option, other, same)


def test_exit_codes_are_documented_once(command):
    rows = re.findall(r"^\| (\d) \| (.+) \|$", PAGE, re.M)
    assert [int(code) for code, _ in rows] == [0, 1, 2, 3, 4]
    header = (ROOT / "cli/cli.h").read_text()
    codes = re.search(r"/// Exit codes of all subcommands\.\n.*?\{(.*?)\}", header, re.S)[1]
    assert codes.count("EXIT_") == 5
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found = re.findall(r"^(?:\| |- )\d(?: \||:) .*(?:could not be|not installed|is wrong)",
                           page.read_text(), re.M)
        assert bool(found) == (page.name == "command.md"), page
    text = subprocess.run([command, "help"], capture_output=True, text=True).stdout
    assert re.findall(r"\b(\d) (?:success|invalid|a file|wrong|something)",
                      text[text.index("Exit codes"):]) == list("01234")
    for name in re.findall(r"^  (\w+) {2,}\w", text.partition("common options")[0], re.M):
        about = subprocess.run([command, "help", name], capture_output=True, text=True).stdout
        assert not re.search(r"[Ee]xit codes?: \d", about), name
