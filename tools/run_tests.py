#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the suites (C, Python, lint) and prints one line with the totals at the end.

Results go to build/test-counts.json, so that several runs can be summed (--sum).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent
TEST_LIMIT_S = 1200  # of one Python test
RUN_LIMIT_S = 4200  # of all Python tests
SKIPPED = 77  # exit status of a test that lacks a tool
COUNTS = ROOT / "build/test-counts.json"
FAILURES: list[str] = []  # by name, printed again before the last line


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in the root, with the tools of this environment first on the path."""
    environment = dict(os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)  # type: ignore


def tap_skip_reasons(folder: pathlib.Path) -> dict[str, str]:
    """Return the reasons of skipped C tests by test name, which the JUnit file omits."""
    log = folder / "testlog.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    return dict(re.findall(r"^ok \d+ - (\S+) # SKIP (.*)$", text, re.M))


def tap_failures(folder: pathlib.Path) -> dict[str, str]:
    """Return the output of failed C checks by test name, which the JUnit file omits."""
    log = folder / "testlog.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    found = re.findall(r"((?:^# .*\n)+)not ok \d+ - (\S+)", text, re.M)
    return {name: lines.replace("\n# ", "; ")[2:] for lines, name in found}


def reason_of(case: ElementTree.Element) -> str:
    """Why a case failed: its message, or what it printed."""
    fault = next((f for f in (case.find("failure"), case.find("error")) if f is not None), None)
    if fault is None:
        return ""
    said = (fault.get("message") or fault.text or "").strip() or case.findtext("system-out") or ""
    return said


def programs_that_failed(folder: pathlib.Path) -> list[str]:
    """C test programs that meson counts as failed, each with the line that says why.

    A sanitizer's report at the end of a program fails it while each of its cases has passed.
    """
    log = folder / "meson-logs/testlog.json"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    failed = []
    for entry in map(json.loads, lines):
        if entry["result"] in ("OK", "SKIP", "EXPECTEDFAIL"):
            continue
        output = f"{entry.get('stdout', '')}\n{entry.get('stderr', '')}".splitlines()
        why = [line.strip() for line in output
               if re.search(r"^not ok|SUMMARY: |ERROR: |WARNING: ThreadSan|assert", line)]
        if not why:  # a signal: the last words, and the status (negative: the signal's number)
            why = [line for line in output if line][-2:] + [f"status {entry['returncode']}"]
        failed.append(f"{entry['name']} ({entry['result']}): {'; '.join(why[:4])[:600]}")
    return failed


def count_junit(path: pathlib.Path) -> Counter[str]:
    """Passed, failed and skipped tests of a JUnit file; prints why tests were skipped."""
    counts: Counter[str] = Counter()
    reasons, failures = tap_skip_reasons(path.parent), tap_failures(path.parent)
    cases = [(suite, case) for suite in ElementTree.parse(path).iter("testsuite")
             for case in suite.iter("testcase")]
    for suite, case in cases:
        skipped = case.find("skipped")
        name = (case.get("name") or "").split(" - ")[-1]
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            reason = " ".join(failures.get(name, reason_of(case)).split())[:300]
            FAILURES.append(f"{case.get('classname')} {case.get('name')}: {reason}")
            print(f"  FAILED {FAILURES[-1]}")
        elif skipped is not None:
            counts["skipped"] += 1
            said = case.findtext("system-out") or suite.findtext("system-out") or ""
            reason = skipped.get("message") or reasons.get(name) or (skipped.text or "").strip()
            reason = reason or said.strip().partition("\n")[0]
            print(f"  skipped {case.get('classname')} {case.get('name')}: {reason}")
        else:
            counts["passed"] += 1
    return counts


def build_folder(name: str, options: list[str], compiler: str | None = None) -> pathlib.Path | None:
    """Configure and build a folder; None when that failed."""
    folder = ROOT / "build" / name
    folder.parent.mkdir(exist_ok=True)
    if not (folder / "build.ninja").exists():
        environment = dict(os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
        if compiler:
            environment["CC"] = compiler
        done = subprocess.run(["meson", "setup", str(folder), *options], cwd=ROOT, env=environment,
                              text=True, capture_output=True)
        if done.returncode:
            print(done.stdout, done.stderr)
            return None
    done = run(["ninja", "-C", str(folder)], capture_output=True)
    if done.returncode:
        print(done.stdout[-8000:])
        return None
    return folder


# Other builds of the C tests: the name of each, and its options.
SANITIZERS = {
    "sanitize": ("under address and undefined-behaviour sanitizers", "address,undefined"),
    "tsan": ("under the thread sanitizer", "thread"),
}
# valgrind is ten times slower, so it runs only the suites that test memory most.
VALGRIND = ["--wrapper", "valgrind -q --error-exitcode=9 --leak-check=full "
            "--show-leak-kinds=definite,indirect --errors-for-leak-kinds=definite,indirect "
            "--trace-children=no", "--timeout-multiplier", "20", "--no-suite", "host"]
VALGRIND_TESTS = ["base/test_base", "format/test_header", "format/test_index", "plan/test_plan",
                  "dtype/test_convert", "api/test_model", "api/test_writer",
                  "fuzz/replay_header", "fuzz/replay_index", "fuzz/replay_plan",
                  "fuzz/replay_slice", "fuzz/replay_writer"]


def c_suite(kind: str) -> Counter[str]:
    """Build the C tests without warnings and run them: as they are, or one of SANITIZERS.

    Some try a share of their cases (calls that fail, moments of a kill) unless all are asked for.
    """
    options, what = ["-Dwerror=true"], ""
    if kind in SANITIZERS:
        what, sanitizers = SANITIZERS[kind]
        # Little optimization and only line tables, because compiling takes half of the time.
        options += [f"-Db_sanitize={sanitizers}", "-Db_lundef=false", "-Dbuildtype=debug",
                    "-Doptimization=1", "-Dc_args=-g1"]
    if kind == "valgrind":
        what = "under valgrind"
    print(f"C {what}".strip(), flush=True)
    folder = build_folder(kind if kind in SANITIZERS else "test", options)
    if folder is None:
        FAILURES.append(f"the build of the C tests {what}".strip())
        return Counter(failed=1)
    # Checks of headers and symbols give the same results under a sanitizer, so they are skipped.
    more = [*VALGRIND, *VALGRIND_TESTS] if kind == "valgrind" else \
        ["--no-suite", "host"] if kind in SANITIZERS else []
    if kind == "tsan":
        more += ["--no-suite", "serial"]
    more += ["--num-processes", str(len(os.sched_getaffinity(0)) + 1)]  # some tests wait
    done = run(["meson", "test", "-C", str(folder), "--print-errorlogs", "--no-rebuild", *more],
               capture_output=True)
    if done.returncode:
        print(done.stdout[-12000:])
    log = "testlog-valgrind.junit.xml" if kind == "valgrind" else "testlog.junit.xml"
    counts = count_junit(folder / "meson-logs" / log)
    if done.returncode and not counts["failed"]:
        failed = programs_that_failed(folder) or ["the run as a whole"]
        counts["failed"] = len(failed)
        FAILURES.extend(f"C {what} {one}" for one in failed)
    return counts


def processes_of(session: int) -> list[str]:
    """Describe the processes of a session: number, state, where the kernel waits, command."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                waits = (folder / "wchan").read_text()
                found.append(f"{folder.name:>8} {fields[0]} {waits:24} "
                             f"{command[:200].decode(errors='replace')}")
    return found


def run_within(limit_s: int, command: list[str]) -> int:
    """Run a command; after `limit_s` seconds print which of its processes are alive and end them.

    Return its exit status, 124 if the time was up.
    """
    environment = dict(os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    # The tests use every processor. More threads in each of their processes would slow them down.
    environment.setdefault("OMP_NUM_THREADS", "1")
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            try:
                print(f"not at its end after {limit_s} s: {' '.join(command)}", flush=True)
                print(*processes_of(process.pid), sep="\n", flush=True)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
            return 124
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            raise


def python_suite(everything: bool) -> Counter[str]:
    """Run pytest: the package, the command, the installed library, the tools themselves.

    Its dots are the progress that is seen.
    """
    print("Python" + (" with every integration" if everything else ""), flush=True)
    report = ROOT / "build/pytest.xml"
    report.unlink(missing_ok=True)
    # Two processes more than CPUs, because many tests wait. conftest.py decides which may run in
    # parallel.
    workers = min(len(os.sched_getaffinity(0)) + 2, 6)
    parallel = importlib.util.find_spec("xdist") is not None
    # A test that hangs prints the stack of each thread and fails; so does the run as a whole.
    limits = [f"--timeout={TEST_LIMIT_S}", "--timeout-method=thread"] \
        if importlib.util.find_spec("pytest_timeout") is not None else []
    code = run_within(RUN_LIMIT_S, [
        sys.executable, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider",
        "--tb=short", "--durations=20",
        *(["-n", str(workers), "--no-loadscope-reorder"] if parallel else []),
        *limits, *(["--all"] if everything else [])])
    counts = count_junit(report) if report.exists() else Counter()
    if code and not counts["failed"]:
        counts["failed"] = 1
        FAILURES.append("the Python tests as a whole")
    return counts


def tracked(*patterns: str) -> list[str]:
    """Files of the tree by pattern, built and hidden ones left out."""
    found = [p for pattern in patterns for p in ROOT.rglob(pattern)]
    hidden = (".venv", "build", "dist", ".git", "third_party")
    return sorted(str(p.relative_to(ROOT)) for p in found
                  if p.relative_to(ROOT).parts[0] not in hidden)


def run_checks(checks: list[tuple[str, list[str]]], at_a_time: int) -> Counter[str]:
    """Run programs that pass or fail as a whole; one that lacks a tool is skipped by name."""
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        results = list(pool.map(lambda check: run(check[1], capture_output=True), checks))
    for (name, _), done in zip(checks, results, strict=True):
        if done.returncode == SKIPPED:
            counts["skipped"] += 1
            print(f"  skipped {name}: {done.stdout.strip()}")
            continue
        counts["failed" if done.returncode else "passed"] += 1
        if done.returncode:
            FAILURES.append(name)
            print(f"  FAILED {name}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return counts


# The tests that depend most on the system, in one that has only the prerequisites.
MINIMAL_SYSTEM = ("a minimal Debian", [sys.executable, "tools/test_minimal_system.py", "--quick"])


def lint_suite(everything: bool, with_system: bool = False) -> Counter[str]:
    """Run each check of style and structure; a tool that is missing is a skip with its name.

    Those that compile or check everything once more are left to `make test ALL=1`. The test in a
    minimal system runs at the same time, because it mostly waits for the disk and the network.
    """
    print("lint, and a minimal system" if with_system else "lint", flush=True)
    if build_folder("test", ["-Dwerror=true"]) is None:  # some checks read its commands
        FAILURES.append("the build of the C tests")
        return Counter(failed=1)
    checks: list[tuple[str, list[str]]] = [
        *([MINIMAL_SYSTEM] if with_system else []),
        ("layers", [sys.executable, "tools/check_layers.py"]),
        ("style", [sys.executable, "tools/check_style.py"]),
        ("words", [sys.executable, "tools/check_words.py"]),
        ("compatibility", [sys.executable, "tools/make_compatibility.py", "--check"]),
        ("clang-format", ["clang-format", "--dry-run", "-Werror", *tracked("*.c", "*.h")]),
        ("ruff", ["ruff", "check", "--no-cache", "python/fastsafetensors", "tools", "examples",
                  "benchmarks", "testing"]),
        # clang as a second compiler, which is cc on some machines.
        ("clang", [sys.executable, "tools/check_clang.py", "build/test"]),
    ]
    thorough: list[tuple[str, list[str]]] = [
        # The first two use one processor each, so they run side by side.
        ("mypy", ["mypy", "--cache-dir", "build/mypy", "-p", "fastsafetensors"]),
        ("pyright", ["basedpyright", "--level", "error", "--pythonpath", sys.executable]),
        ("clang-tidy", [sys.executable, "tools/run_clang_tidy.py", "build/test",
                        *([] if os.environ.get("FASTSAFETENSORS_TESTS") == "all"
                          else ["--shallow"])]),
        ("analyzer", [sys.executable, "tools/run_analyzer.py"]),
    ]
    return run_checks(checks + (thorough if everything else []), 3 if with_system else 2)


def closing_line(counts: Counter[str]) -> str:
    """Return the last line of a run, with the totals."""
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true",
                        help="C tests under the address and undefined-behaviour sanitizers")
    parser.add_argument("--tsan", action="store_true", help="C tests under the thread sanitizer")
    parser.add_argument("--valgrind", action="store_true", help="some C tests under valgrind")
    parser.add_argument("--all", action="store_true",
                        help="slow tests, heavy integrations and thorough checks as well")
    parser.add_argument("--long", action="store_true",
                        help="every case of the sweeps, of which a share is tried elsewhere")
    parser.add_argument("--only", choices=["c", "python", "lint"])
    parser.add_argument("--sum", action="store_true", help="add the counts of the last run")
    arguments = parser.parse_args()
    if arguments.long:
        os.environ["FASTSAFETENSORS_TESTS"] = "all"
    suites: list[Callable[[], Counter[str]]] = []
    counts: Counter[str] = Counter()
    if arguments.sum and COUNTS.exists():
        earlier = json.loads(COUNTS.read_text())
        FAILURES.extend(earlier.pop("failures", []))
        counts.update(earlier)
    kinds = [k for k in ("sanitize", "tsan", "valgrind") if getattr(arguments, k)]
    if arguments.only in (None, "c"):
        suites += [partial(c_suite, kind) for kind in kinds or [""]]
    if arguments.only in (None, "python") and not kinds:
        suites.append(partial(python_suite, arguments.all))
    if arguments.only in (None, "lint") and not kinds:
        suites.append(partial(lint_suite, arguments.all,
                              with_system=arguments.all and arguments.only is None))
    for suite in suites:
        start = time.monotonic()
        counts += suite()
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    COUNTS.parent.mkdir(exist_ok=True)
    COUNTS.write_text(json.dumps({**counts, "failures": FAILURES}))
    for name in FAILURES:
        print(f"FAILED {name}")
    print(closing_line(counts))
    return bool(counts["failed"]) or not counts["passed"]


if __name__ == "__main__":
    sys.exit(main())
