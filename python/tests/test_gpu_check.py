# SPDX-License-Identifier: Apache-2.0
"""The GPU's check itself, rehearsed with stand-ins for the driver and tiny files."""

import json
import os
import subprocess
import sys

from fake_gpu import ROOT, fakes_folder


def test_gpu_check_gives_a_verdict_and_reports(tmp_path):
    """Suite, limits, benchmark, verdicts, reports: all of it runs."""
    fakes = fakes_folder()
    result = subprocess.run(
        [sys.executable, ROOT / "tools/gpu_check.py", "--small", "--no-build", "--out", tmp_path,
         "--build", os.path.dirname(os.path.dirname(fakes))],
        env={**os.environ, "LD_LIBRARY_PATH": fakes,
             "GPU_CHECK_PYTHON": "/nonexistent"},
        capture_output=True, text=True, timeout=400, check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "verdict: suite 0 failed" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["scenarios"]) == 5 and report["verdicts"]
    assert report["suite"]["device_test_real_gpu"]["passed"] == 9
    assert report["limits"]["bus_gbps"] > 0 and report["limits"]["copy_gbps"] > 0
    for scenario in report["scenarios"]:
        (ours,) = [row for row in scenario["rows"] if row["name"] == "ours"]
        assert 0 < ours["low"] <= ours["median"] <= ours["high"]
        assert ours["stats"]["device_bytes"] > 0
    assert "| target | holds | measured |" in (tmp_path / "report.md").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_without_a_gpu_it_says_so():
    """No GPU: the stand-ins' suite alone counts."""
    folder = os.path.dirname(os.path.dirname(fakes_folder()))
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    result = subprocess.run(
        [sys.executable, ROOT / "tools/gpu_check.py", "--small", "--no-build", "--build", folder],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=400, check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no GPU here; the suite with stand-ins: 0 failed" in result.stdout
