# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check.py with a fake driver and tiny files."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from fake_gpu import ROOT, fakes_folder

import fastsafetensors


def bare_machine(tmp_path, *tools):
    """An environment that has only a PATH, with a compiler's tools and without pip."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pip", "pip3", "curl", "wget", "git"):
        (folder / name).write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    for name in tools:
        found = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
        if found is None:
            pytest.skip(f"there is no {name}")
        (folder / name).symlink_to(found)
    # A compiler behind ccache would create HOME.
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nonexistent", "CCACHE_DISABLE": "1",
            "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
            "PIP_INDEX_URL": "http://127.0.0.1:9/", "GPU_CHECK_PYTHON": "/nonexistent"}


def check(out, environment, *suite, package=None):
    """Run the check on the built tree; return its process and report.

    Of the suite with stand-ins one program: each is among the C tests as well.
    """
    more = [] if package is None else ["--package", package]
    suite = ",".join(["device_test_gpu_isolation", *suite])
    done = subprocess.run(
        [sys.executable, ROOT / "tools/gpu_check.py", "--small", "--no-build", "--out", out,
         "--build", os.path.dirname(os.path.dirname(fakes_folder())),
         "--suite", suite, *more], env=environment, capture_output=True, text=True,
        timeout=600, check=False)
    return done, json.loads((out / "report.json").read_text())


def test_reports_on_a_machine_without_gpu(tmp_path):
    """The report is complete without pip, network and virtual environment."""
    environment = {**bare_machine(tmp_path, "meson", "ninja"), "LD_LIBRARY_PATH": fakes_folder()}
    out = tmp_path / "out"
    shutil.copytree(os.path.dirname(fastsafetensors.__file__), tmp_path / "own/fastsafetensors")
    done, report = check(out, environment, "device_test_real_gpu", package=tmp_path / "own")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "verdict: cuda:0: suite 0 failed" in done.stdout
    assert [row for row in report["steps"] if row["failed"]] == []
    assert len(report["scenarios"]) == 6 and report["verdicts"]
    assert report["suite"]["device_test_real_gpu"]["passed"] == 9
    limits = report["limits"]
    assert limits["bus_gbps"] > 0 and limits["copy_beside_bus_gbps"] > 0
    for scenario in report["scenarios"]:
        rows = {row["name"]: row for row in scenario["rows"]}
        # What users call is there as well: the extension was built for this.
        assert {"ours", "ours, the extension"} <= set(rows), scenario
        for row in rows.values():
            assert 0 < row["low"] <= row["median"] <= row["high"]
        assert rows["ours"]["stats"]["device_bytes"] > 0
    assert [row["name"] for row in report["setup"]] == ["ours, the extension"]
    assert any("set-up" in what for what, _, _ in report["verdicts"])
    assert {"date", "commit", "gpu", "nvidia-smi", "system", "file system", "huge pages", "torch",
            "memory", "limit of locked memory", "nvidia-fs"} <= set(report["machine"])
    assert "--small" in report["machine"]["arguments"]
    page = (out / "report.md").read_text()
    assert "| target | holds | measured |" in page
    assert re.search(r"^- limit, bus_gbps: [\d.]+$", page, re.MULTILINE)
    assert re.search(r"^ours, the last load: .*copied to the device.*; gds_bytes \d+, "
                     r"device_copies \d+, device_launches \d+, device_wait_ns \d+, "
                     r"read_ns \d+, copy_ns \d+$", page, re.MULTILINE)
    sharing = {row["name"]: row["result"] for row in report["sharing"]}
    assert sharing["tensors sent by IPC"].startswith("not here: no interpreter has a torch")
    assert sharing["MIG instance"].startswith("not here: nvidia-smi")
    assert sharing["MPS, two processes"].startswith("not here: no MPS daemon")
    assert re.fullmatch(r"cuda:0 \S+ GB/s, cuda:1 \S+ GB/s; at once at least \S+ GB/s each",
                        sharing["each GPU, all at once"])
    assert "<svg" in (out / "report.html").read_text()


def test_failed_step_is_a_row(tmp_path):
    """Without meson (so without the extension), or with a failing driver, the report has all other
    steps."""
    environment = {**bare_machine(tmp_path), "LD_LIBRARY_PATH": fakes_folder(),
                   "FAKE_GPU_NO_LOCK": "1", "GPU_CHECK_NO_MESON": "1"}
    done, report = check(tmp_path / "out", environment)
    failed = {row["title"]: row["failed"] for row in report["steps"] if row["failed"]}
    assert "build of the Python extension" in failed, done.stdout
    assert "pinning memory" in failed["limits"]
    assert [s["title"] for s in report["scenarios"]][0] == "8 MiB, page cache"
    assert report["scenarios"][0]["rows"][0]["name"] == "ours"
    assert (tmp_path / "out/report.md").exists()


@pytest.mark.parametrize("device", ["hip:1", "cuda:1"])
def test_torch_memory_options_are_named(device, monkeypatch):
    """torch calls GPUs of both vendors cuda; the extension distinguishes them."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_ways

    asked = []
    torch = types.SimpleNamespace(zeros=lambda *size, device: asked.append(device),
                                  cuda=types.SimpleNamespace(synchronize=lambda: None,
                                                             empty_cache=lambda: None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    names = {"device": device}
    exec(gpu_ways.TORCH, names)
    assert asked == ["cuda:1"] and names["device"] == "cuda:1"
    assert "replace" not in gpu_ways.CORE


def test_missing_gpu_is_reported(tmp_path):
    """Without a GPU, the report only has the suite with fake drivers."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done, report = check(tmp_path / "out",
                         {**environment, "GPU_CHECK_NO_MESON": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU here; the suite with stand-ins: 0 failed" in done.stdout
    assert report["suite"]["device_test_gpu_isolation"]["failed"] == 0
    assert report["machine"]["engines"] and "steps 1 failed" in report["verdict"]
    assert "driver" in next(row for row in report["steps"] if row["title"] == "device")["failed"]
    assert "engines" in (tmp_path / "out/report.html").read_text()
    page = (tmp_path / "out/report.md").read_text()
    assert "- version: fastsafetensors" in page and "| speed, real_gpu tests | no GPU |" in page
    for name in ("GPU chosen by its UUID", "eight processes, one GPU", "tensors sent by IPC",
                 "MIG instance", "MPS, two processes", "each GPU, all at once",
                 "one read for all GPUs"):
        assert f"| {name} | not here: no GPU |" in page


def test_limits_are_measured_alone_and_together():
    """The bus is measured at several sizes, with one thread and with several, each with its own
    staging buffers."""
    folder = pathlib.Path(os.path.dirname(os.path.dirname(fakes_folder())))
    done = subprocess.run([folder / "bench/gpu_peak", "cuda", "0", "64"], text=True,
                          env={**os.environ, "LD_LIBRARY_PATH": fakes_folder()},
                          capture_output=True, timeout=600, check=True)
    limits = json.loads(done.stdout)
    assert {"bus_1MiB_gbps", "bus_8MiB_gbps", "bus_gbps", "copy_gbps", "copy_1_gbps",
            "bus_beside_copy_gbps", "context_s", "lock_64MiB_s"} <= set(limits)


LIBRARY = "cuda: cuda can't be used: no driver: libcuda.so.1 was not found"
BROKEN = "cuda: cuda can't be used: no driver: /it was not found/libcuda.so.1: file too short"
HANGING = "cuda: the driver could not be started: cuInit has not returned in time"
NOT_USABLE = "cuda: cuInit failed: the device is not usable by this process (error 999)"
HIP = "hip: hip can't be used: the driver sees no device (/dev/kfd does not exist)"


@pytest.mark.parametrize(("rows", "error"), [
    ((LIBRARY, HIP), "NoGpuError: no GPU here"),
    ((HANGING, HIP), "RuntimeError: the driver could not be started"),
    ((BROKEN, HIP), "RuntimeError: cuda can't be used: no driver: /it was"),
    ((NOT_USABLE, HIP), "RuntimeError: cuInit failed"),
    (("cuda: libcuda.so.1 lacks cuInit: the driver is too old", HIP), "RuntimeError"),
    ((HANGING, "hip: 1 device(s), 0: AMD"), "found hip:0")])
def test_drivers_that_fail_are_no_missing_gpu(monkeypatch, rows, error):
    """Only a driver that is not installed, or sees no device, means that there is no GPU."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    engines = [{"name": name, "usable": "device(s)" in reason, "reason": reason}
               for name, _, reason in (row.partition(": ") for row in ("mmap: works", *rows))]
    monkeypatch.setattr(gpu_check, "run", lambda *_: json.dumps({"engines": engines}))
    checked = types.SimpleNamespace(device="", command="fastsafetensors")
    try:
        gpu_check.Check.find_device(checked)
        said = f"found {checked.device}"
    except Exception as caught:
        said = f"{type(caught).__name__}: {caught}"
    assert said.startswith(error)


def test_a_method_of_ours_that_fails_is_a_failed_step(monkeypatch, tmp_path):
    """The row names the method and what the command said on its standard output."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    def lose(*_):
        raise subprocess.CalledProcessError(2, "load", '{"error": "the device is lost"}', "")

    bench = gpu_check.Bench(tmp_path, "cuda:0", gpu_check.Clock(10))
    bench._ours = lose
    report = gpu_report.Report(tmp_path / "out")
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"x")
    gpu_check.Check.scenario(types.SimpleNamespace(report=report, bench=bench), "t", path, "hot", 1)
    (step,) = report.document["steps"]
    assert step["failed"].startswith("RuntimeError: ours: ") and "lost" in step["failed"]
    assert report.document["scenarios"][0]["rows"] == []


@pytest.mark.parametrize(("why", "code", "verdict"), [
    ("NoGpuError: no GPU here", 0, "no GPU here; the suite with stand-ins: 0 failed"),
    ("TimeoutExpired: 150 seconds", 1, "the search for a GPU failed: TimeoutExpired: 150 seconds")])
def test_failed_search_is_no_missing_gpu(monkeypatch, capsys, tmp_path, why, code, verdict):
    """A driver that hangs is not called a machine without a GPU."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    document = {"suite": {}, "steps": [{"title": "device", "failed": why, "seconds": 1}]}
    report = gpu_report.Report(tmp_path)
    report.document.update(document)
    assert gpu_check.Check.tell(types.SimpleNamespace(report=report), False) == code
    assert f"verdict: {verdict}" in capsys.readouterr().out
    assert f"**Verdict: {verdict}**" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("why", "code"), [("", 0), ("RuntimeError: pinning memory", 1)])
def test_a_failed_step_counts(monkeypatch, capsys, tmp_path, why, code):
    """The check fails with any of its steps, although its tests pass and no target is missed."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    steps = [{"title": title, "failed": words, "seconds": 1}
             for title, words in (("device", ""), ("limits", why))]
    document = {"suite": {}, "steps": steps, "verdicts": []}
    report = gpu_report.Report(tmp_path)
    report.document.update(document)
    checked = types.SimpleNamespace(report=report, arguments=types.SimpleNamespace(out="out"),
                                    device="cuda:0")
    assert gpu_check.Check.tell(checked, True) == code
    assert f"steps {code} failed of 2" in capsys.readouterr().out


def test_what_is_ours_and_fails_is_a_failed_step(monkeypatch, tmp_path):
    """A package that cannot be imported, and a row of several processes that failed."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    why = {"ours, the extension": "ImportError: broken"}
    monkeypatch.setattr(gpu_check, "Ways", lambda *_: types.SimpleNamespace(
        missing={**why, "safetensors": "no interpreter"}, broken=lambda: why))
    checked = types.SimpleNamespace(
        package=tmp_path, device="cuda:0", command="fastsafetensors", bench=types.SimpleNamespace(),
        report=gpu_report.Report(tmp_path / "out"))
    with pytest.raises(RuntimeError, match="^ours, the extension: ImportError: broken$"):
        gpu_check.Check.find_ways(checked)
    checked.report.leave_out("InstantTensor", "no interpreter")
    assert "| safetensors; InstantTensor | no interpreter |" in (
        gpu_report.write_markdown(checked.report.document, tmp_path)
        or (tmp_path / "report.md").read_text())
    why.clear()  # it was not built, which is a failed step by itself
    gpu_check.Check.find_ways(checked)

    cells = [{"name": "tensors sent by IPC", "result": "not here: no torch"},
             {"name": "MPS, two processes", "result": "failed: RuntimeError: error 999"}]
    monkeypatch.setattr(gpu_check, "measure_sharing", lambda *_: cells)
    with pytest.raises(RuntimeError, match="^MPS, two processes failed: RuntimeError: error 999$"):
        gpu_check.Check.share(checked, tmp_path)
    assert checked.report.document["sharing"] == cells


@pytest.mark.parametrize(("output", "code", "failed"), [
    ("ok 1 - a\nok 2 - b # SKIP no GPU\n1..2", 0, 0), ("ok 1 - a\n1..9", 0, 1),
    ("ok 1 - a", 0, 1), ("", 0, 1), ("1..0", 0, 1), ("ok 1 - a\n1..1", 1, 1),
    ("ok 1 - a\nnot ok 2 - b\n1..2", 1, 1), ("ok 1 - a\n1..1", -6, 1)])
def test_a_test_program_that_ends_early_has_failed(monkeypatch, tmp_path, output, code, failed):
    """It ran as many tests as it says, and its status agrees. It leaves no kernels in a cache."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    def run(words, env, **_):
        assert env["FASTSAFETENSORS_KERNEL_CACHE_DIR"] == "off"
        return types.SimpleNamespace(stdout=output, stderr="", returncode=code)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    results = {}
    gpu_check.run_suite(results, tmp_path, "t", False, gpu_check.Clock(1))
    assert (results["t"]["failed"] > 0) == failed


@pytest.mark.parametrize(("minutes", "is_failed"), [(0, False), (9, True)])
def test_tests_that_the_time_ends(monkeypatch, tmp_path, minutes, is_failed):
    """Tests that the end of the whole check cut off are left out; their own limit is a failure."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    def run(words, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    report = gpu_report.Report(tmp_path)
    for suite in (lambda: gpu_check.run_suite({}, tmp_path, "t", False, gpu_check.Clock(minutes)),
                  lambda: gpu_check.run_python_suite({}, tmp_path, gpu_check.Clock(minutes))):
        report.document["missing"].clear()
        assert report.step("t", suite) != is_failed
        assert report.document["missing"] == ({} if is_failed else {"t": "no time left"})


def test_what_was_left_out_misses_no_target(monkeypatch):
    """A file for which no time was left has no verdict; one that failed has."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_verdicts

    result = {"title": "t", "state": "hot", "rows": [], "failed": {"ours": "left out: no time"}}
    assert gpu_verdicts.judge_scenario(result, 10.0, 1.0) == []
    result["failed"] = {"ours": "it crashed"}
    assert len(gpu_verdicts.judge_scenario(result, 10.0, 1.0)) == 1


WORKS = """
finish = lambda: None
def slow(seconds): time.sleep(seconds)
"""


def test_processes_of_methods(monkeypatch, tmp_path):
    """A method's process works several times; its errors, its end and its silence are reported."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_ways

    monkeypatch.setattr(gpu_ways, "RUN_S", 3)
    monkeypatch.setattr(gpu_ways, "PREPARED", {"prepared": "    global seen\n    seen = path"})
    monkeypatch.setattr(gpu_ways, "WAYS", {
        "good": (WORKS, "    print('a library prints')\n    return path", False),
        "prepared": (WORKS, "    assert seen == path", False),
        "raises": (WORKS, "    raise KeyError(path)", False),
        "ends": (WORKS, "    os._exit(3)", False),
        "hangs": (WORKS, "    slow(60)", False),
        "cannot start": ("import no_such_module", "    pass", False),
        "ours": (WORKS, "    pass", True),
        "fastsafetensors 0.5": (WORKS, "    pass", False)})
    monkeypatch.delenv("GPU_CHECK_PEER05", raising=False)
    ways = gpu_ways.Ways(["/nonexistent", sys.executable], None, "cuda:0")
    assert ways.missing == {"cannot start": "ModuleNotFoundError: No module named 'no_such_module'",
                            "ours": "the extension was not built",
                            "fastsafetensors 0.5": "no interpreter"}
    for name in ("good", "prepared", "good"):
        found = ways.workers[name].run(tmp_path, 3, 10)
        assert len(found["times"]) == 3 and found["peak"] > 0 and found["cpu"] >= 0
    for name, words in (("raises", "KeyError"), ("raises", "KeyError"), ("hangs", "no answer"),
                        ("hangs", "no answer"), ("ends", "without a word"),
                        ("ends", "without a word")):
        with pytest.raises(ValueError, match=words):
            ways.workers[name].run(tmp_path, 1, 10)
    assert ways.broken() == {}  # nothing of ours was built
    ways.restart()
    assert len(ways.workers["raises"].last_words()) > 0
    assert ways.workers["good"].run(tmp_path, 1, 10)["times"][0] >= 0
    ways.close()
    assert not ways.workers


def test_slow_methods_are_run_less(monkeypatch, tmp_path):
    """A method that took long is run once, and left out where it would take very long."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    asked = []

    def worker(name, seconds):
        return types.SimpleNamespace(run=lambda path, count, _: asked.append((name, count)) or {
            "times": [seconds] * count})

    bench = gpu_check.Bench(tmp_path, "cuda:0", gpu_check.Clock(10))
    bench._ours = lambda path, count: {"times": [0.1] * count, "stats": {}}
    bench.ways = types.SimpleNamespace(workers={
        "quick": worker("quick", 0.1), "slow": worker("slow", 2.0),
        "save: ours": worker("save: ours", 0.1)})
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"x" * 100)
    assert bench.scenario("t", path, "hot", 2)["failed"] == {}
    assert asked == [("quick", 4), ("slow", 4), ("quick", 4), ("slow", 1)]
    path.write_bytes(b"x" * 1000)
    asked.clear()
    assert bench.scenario("t", path, "cold", 1)["failed"] == {
        "slow": "left out: it would take 20 s"}
    assert asked == [("quick", 1)]
    asked.clear()
    assert [row["name"] for row in bench.scenario("t", path, "saved", 1)["rows"]] == ["save: ours"]


@pytest.mark.parametrize(("last", "code", "counts"), [
    ("41 passed in 3 s", 0, (41, 0, 0)), ("1 failed, 3 passed, 2 skipped in 3 s", 1, (3, 1, 2)),
    ("1 error in 3 s", 2, (0, 1, 0)), ("3 passed in 3 s", 3, (3, 1, 0)),
    ("1 skipped in 3 s", 5, None), ("no module named pytest", 1, None)])
def test_results_of_the_python_suite(monkeypatch, tmp_path, last, code, counts):
    """Its counts are those of the last line. An interpreter that cannot run it gives no result."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *_, **__: types.SimpleNamespace(
        stdout=f"...\nFAILED a.py::test_b - assert 1 == 2\nSKIPPED [1] a.py: no torch\n{last}\n",
        stderr="", returncode=code))
    results = {}
    if counts is None:
        with pytest.raises(RuntimeError, match="could not be run"):
            gpu_check.run_python_suite(results, tmp_path, gpu_check.Clock(1))
        return
    gpu_check.run_python_suite(results, tmp_path, gpu_check.Clock(1))
    row = results["test_real_gpu.py"]
    assert (row["passed"], row["failed"], row["skipped"]) == counts
    assert row["faults"] == ["FAILED a.py::test_b - assert 1 == 2", "SKIPPED [1] a.py: no torch"]


def test_a_python_suite_that_crashes_or_hangs_names_its_test(monkeypatch, tmp_path):
    """In the report, which is all that a maintainer sees."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    output = "a.py::test_a PASSED\na.py::test_0 FAILED\na.py::test_1 SKIPPED\na.py::test_b "
    monkeypatch.setattr(gpu_check, "run_tests", lambda *_: types.SimpleNamespace(
        stdout=output, stderr="Fatal Python error: Aborted\n", returncode=-6))
    results = {}
    gpu_check.run_python_suite(results, tmp_path, gpu_check.Clock(1))
    row = results["test_real_gpu.py"]
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 1)
    assert row["faults"] == ["it ended with -6, the last test: test_b", "FAILED test_0",
                             "Fatal Python error: Aborted"]

    def hang(*_):
        raise subprocess.TimeoutExpired("pytest", 150, output=output.encode())

    monkeypatch.setattr(gpu_check, "run_tests", hang)
    with pytest.raises(RuntimeError, match="^it did not end within 150 s, in test_b$"):
        gpu_check.run_python_suite(results, tmp_path, gpu_check.Clock(1))


@pytest.mark.parametrize(("has_torch", "broken"), [
    (True, ["ours, of torch", "ours, the extension"]), (False, ["ours, the extension"])])
def test_own_methods_that_do_not_start_are_broken(monkeypatch, tmp_path, has_torch, broken):
    """Unless they lack torch: then they are missing, as those of others are."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_ways

    monkeypatch.setattr(gpu_ways, "CORE", "import no_core")
    monkeypatch.setattr(gpu_ways, "WAYS", {
        "ours, the extension": ("import no_core", "    pass", True),
        "ours, of torch": ("import no_such_module", "    pass", True),
        "safetensors": ("import no_such_module", "    pass", False),
        gpu_ways.TORCH_ALONE: ("" if has_torch else "import no_such_module", "    pass", False)})
    ways = gpu_ways.Ways([sys.executable], tmp_path, "cuda:0")
    assert sorted(ways.broken()) == broken
    ways.close()


def test_a_method_that_does_not_start_again_has_failed(monkeypatch, tmp_path):
    """New processes of a run may not start; then the method's row says why."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check

    bench = gpu_check.Bench(tmp_path, "cuda:0", gpu_check.Clock(10))
    bench._ours = lambda path, count: {"times": [0.1] * count, "stats": {}}
    workers = {"ours, x": types.SimpleNamespace(run=lambda *_: {"times": [0.1, 0.1]})}
    bench.ways = types.SimpleNamespace(workers=workers, missing={"ours, x": "out of memory"},
                                       restart=workers.clear)
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"x" * 100)
    assert bench.scenario("t", path, "hot", 2, True)["failed"] == {"ours, x": "out of memory"}


def test_folders_that_cannot_be_made(tmp_path):
    """A sentence, no traceback."""
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "tools/gpu_check.py", "--out", tmp_path / "file/x"],
        text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and "file/x: Not a directory" in done.stderr


def test_faults_of_tests_are_in_the_report(monkeypatch, tmp_path):
    """By name; a report of an earlier check is removed."""
    import types

    monkeypatch.syspath_prepend(os.fspath(ROOT / "tools"))
    import gpu_check
    import gpu_report

    ended = types.SimpleNamespace(
        stdout="# a.c:3: x is 8, not 2\nnot ok 1 - the_state\n1..1\n", stderr="", returncode=1)
    monkeypatch.setattr(gpu_check, "run_tests", lambda *_: ended)
    (tmp_path / "report.html").write_text("of yesterday")
    report = gpu_report.Report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    gpu_check.run_suite(report.document["suite"], tmp_path, "device_test_gpu", True,
                        gpu_check.Clock(1))
    report.write()
    page = (tmp_path / "report.md").read_text()
    assert "device_test_gpu: not ok 1 - the_state" in page
    assert "device_test_gpu: # a.c:3: x is 8, not 2" in page
    assert report.document["suite"]["device_test_gpu"]["failed"] == 1
