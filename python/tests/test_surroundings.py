# SPDX-License-Identifier: Apache-2.0
"""What surrounds a program can't steer the library: environment, libraries that lie about."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT
from fake_gpu import fakes_folder


def test_libraries_of_the_working_folder_are_not_taken(command, tmp_path):
    """A planted libcuda.so.1 is not loaded from where the program is started."""
    for name in ("libcuda.so.1", "libamdhip64.so", "libcufile.so.0"):
        shutil.copy(os.path.join(fakes_folder(), name), tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run([command, "engines"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=60, check=True)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "Fake GPU" not in done.stdout and "cuda" in rows and "hip" in rows
    planted = {**environment, "LD_LIBRARY_PATH": os.fspath(tmp_path)}
    done = subprocess.run([command, "engines"], cwd=tmp_path, env=planted, text=True,
                          capture_output=True, timeout=60, check=True)
    assert "Fake GPU" in done.stdout  # the loader's own search path decides, and nothing else


def test_the_c_library_reads_no_environment():
    """No call of getenv, in any form."""
    if not shutil.which("nm"):
        pytest.skip("no nm")
    path = ROOT / "build/test/src/libfastsafetensors.so"
    path = path if path.exists() else ROOT / "build/release/src/libfastsafetensors.so"
    if not path.exists():
        pytest.skip("the C library is not built")
    symbols = subprocess.run(["nm", "-D", "--undefined-only", path], text=True,
                             capture_output=True, check=True).stdout
    assert "dlopen" in symbols and "getenv" not in symbols and "environ" not in symbols
