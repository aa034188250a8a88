# SPDX-License-Identifier: Apache-2.0
"""The test runner: each failure is listed near the end, and the exit code is right."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import pathlib, sys
sys.path.insert(0, {tools!r})
import run_tests
from collections import Counter
run_tests.COUNTS = pathlib.Path({counts!r})
xml = pathlib.Path({counts!r}).with_suffix(".xml")
xml.write_text({report!r})
run_tests.c_suite = lambda kind: run_tests.count_junit(xml)
run_tests.python_suite = run_tests.lint_suite = lambda *_, **__: Counter(passed=1)
sys.argv[1:] = {arguments!r}
sys.exit(run_tests.main())
"""
CASE = ('<testsuites><testsuite><testcase classname="c" name="n">{}</testcase></testsuite>'
        "</testsuites>")


def run(tmp_path, outcome, *arguments):
    code = PROGRAM.format(tools=str(ROOT / "tools"), counts=str(tmp_path / "counts.json"),
                          report=CASE.format(outcome), arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_failures_are_named_before_the_last_line(tmp_path):
    code, lines, err = run(tmp_path, '<failure message="x"/>')
    assert code == 1, err
    assert lines[-2:] == ["FAILED c n: x", "2 passed, 1 failed, 0 skipped"]
    # The sum with a later run has the failures of both.
    code, lines, _ = run(tmp_path, '<failure message="x"/>', "--sum", "--only", "c")
    assert code == 1
    assert lines[-3:] == ["FAILED c n: x", "FAILED c n: x", "2 passed, 2 failed, 0 skipped"]
    code, lines, _ = run(tmp_path, "")
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 0 skipped"
    assert "FAILED" not in "".join(lines)


def test_unfinished_test_is_a_failure(tmp_path):
    (tmp_path / "counts.json").write_text(json.dumps({"failed": 1, "failures": ["the first"]}))
    code, lines, _ = run(tmp_path, "", "--sum")
    assert code == 1 and lines[-2:] == ["FAILED the first", "3 passed, 1 failed, 0 skipped"]


def test_warnings_of_clang_are_found(tmp_path):
    if not shutil.which("clang"):
        pytest.skip("no clang")
    source = tmp_path / "a.c"
    command = f"cc -Wall -Wextra -Wconversion -o a.o -c {source}"
    (tmp_path / "compile_commands.json").write_text(json.dumps(
        [{"directory": str(tmp_path), "command": command, "file": str(source)}]))
    # clang treats the enumeration as unsigned and warns; gcc does not.
    for cast, code in (("", 1), ("(int)", 0)):
        source.write_text("enum e { A, B };\nenum e get(void);\nint put(int x);\n"
                          f"int main(void) {{ return put({cast}get()); }}\n")
        done = subprocess.run([sys.executable, ROOT / "tools/check_clang.py", tmp_path],
                              capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr


HANGS = """
import sys
sys.path.insert(0, {tools!r})
import run_tests
print(run_tests.run_within(1, ["sh", "-c", "sleep 1000 & sleep 1001"]))
"""


def test_a_run_that_hangs_is_ended_and_shown():
    """Also where there is no ps."""
    done = subprocess.run([sys.executable, "-c", HANGS.format(tools=str(ROOT / "tools"))],
                          capture_output=True, text=True, timeout=60, env={"PATH": "/nothing:/bin"})
    lines = done.stdout.splitlines()
    assert lines[0].startswith("not at its end after 1 s") and lines[-1] == "124", done
    assert [line.split(maxsplit=3)[3].strip() for line in lines[1:-1] if "sh -c" not in line] == [
        "sleep 1000", "sleep 1001"]


def test_the_minimal_system_has_what_the_readme_names():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from test_minimal_system import PACKAGES
    finally:
        sys.path.pop(0)
    line, = (line for line in (ROOT / "README.md").read_text().splitlines()
             if "apt-get install" in line)
    assert set(line.partition("#")[0].split()[3:]) == set(PACKAGES)
