# SPDX-License-Identifier: Apache-2.0
"""The median of `fastsafetensors bench`."""

import json
import subprocess

import numpy


def test_the_median_of_two_runs_lies_between_them(command, tmp_path):
    from fastsafetensors.numpy import save_file

    save_file({"a": numpy.zeros(1 << 20)}, tmp_path / "m.safetensors")
    done = subprocess.run([command, "bench", "--json", "--repeat", "2", tmp_path / "m.safetensors"],
                          capture_output=True, text=True, check=True)
    for row in json.loads(done.stdout)["methods"]:
        # Times are rounded to microseconds.
        if row["possible"] and row["highest"] - row["lowest"] > 2e-6:
            assert row["lowest"] < row["seconds"] < row["highest"], row
