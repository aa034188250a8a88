# SPDX-License-Identifier: Apache-2.0
"""A short run of the Python fuzzer: slices compared with torch, DLPack."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize("what", ["slices", "dlpack"])
def test_random_cases(torch, what):
    """Cases are the same in every run; the fuzzer itself runs longer."""
    done = subprocess.run([sys.executable, ROOT / "fuzz/fuzz_python.py", what, "--seconds", "4"],
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 1000
