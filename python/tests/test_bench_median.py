# SPDX-License-Identifier: Apache-2.0
"""The median of `fastsafetensors bench`, and that the comparison with other packages runs."""

import json
import pathlib
import subprocess
import sys

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_median_of_two_runs_lies_between_them(command, tmp_path):
    from fastsafetensors.numpy import save_file

    save_file({"a": numpy.zeros(1 << 20)}, tmp_path / "m.safetensors")
    done = subprocess.run([command, "bench", "--json", "--repeat", "2", tmp_path / "m.safetensors"],
                          capture_output=True, text=True, check=True)
    for row in json.loads(done.stdout)["methods"]:
        # Times are rounded to microseconds.
        if row["possible"] and row["highest"] - row["lowest"] > 2e-6:
            assert row["lowest"] < row["seconds"] < row["highest"], row


def test_loads_are_compared_with_safetensors(torch, tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "compare_loads.py", "--runs", "1",
               "--only", "open + names of 10,000", "--ballast", "1", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [scenario] = json.loads((tmp_path / "report.json").read_text())["scenarios"]
    assert {row["name"] for row in scenario["rows"]} == {"ours names", "safetensors names"}
