# SPDX-License-Identifier: Apache-2.0
"""One wheel for every Python on this host, and the error on unsupported ones."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAM = """
import os, pickle, threading
import numpy as np
import fastsafetensors, fastsafetensors.numpy as front
tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(300000, np.int16)}
front.save_file(tensors, "m.st", {"k": "v"})
for mode in ("load", "map"):
    loaded = front.load_file("m.st", mode=mode)
    assert all((loaded[n] == tensors[n]).all() for n in tensors)
with fastsafetensors.safe_open("m.st", "np") as f:
    assert (f.get_slice("a")[1, :2] == [3, 4]).all() and f.metadata() == {"k": "v"}
    again = pickle.loads(pickle.dumps(f))
assert again.get_tensor("b").sum() == 300000
try:
    front.load(b"nonsense")
except fastsafetensors.SafetensorError as error:
    assert error.tag
fastsafetensors.edit_header("m.st", {"k": None}, clear=True)
assert fastsafetensors.read_header("m.st").metadata["m.st"] in (None, {})
workers = [threading.Thread(target=front.load_file, args=("m.st",)) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
del loaded, again
assert fastsafetensors.live_allocation_count() == 0
if (child := os.fork()) == 0:
    os._exit(0 if front.load_file("m.st")["a"][1, 2] == 5 else 1)
assert os.waitpid(child, 0)[1] == 0
print("good")
"""


def _find_python(version):
    """Return an interpreter of that version from the PATH or from pyenv."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    kept = sorted(root.glob(f"versions/{version}.*/bin/python"))
    for path in [*kept, shutil.which(f"python{version}")]:
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True)
            if done.stdout.startswith(f"Python {version}."):
                return os.fspath(path)
    return pytest.skip(f"no Python {version} on this machine")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel that is installed here, under the name that it has when Python 3.10 builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    found = list((ROOT / "build/wheel").glob("*.whl"))
    if len(found) != 1:
        pytest.skip("make has not built the wheel")
    name = re.sub("-cp3[0-9]+-abi3", "-cp310-abi3", found[0].name)
    return shutil.copy(found[0], folder / name)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_under(version, wheel, tmp_path):
    python = _find_python(version)
    own = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "numpy"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"numpy can't be installed: {done.stderr[-200:]}")
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True)
    done = subprocess.run([own, "-W", "error", "-c", PROGRAM], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.stdout == "good\n", done.stderr
    asked = subprocess.run([own, "-m", "fastsafetensors", "verify", "m.st"], cwd=tmp_path)
    assert asked.returncode == 0


@pytest.mark.parametrize("before,words", [
    ("import sys; sys.abiflags = 't'", "free-threaded"),
    ("import sys; sys.platform = 'darwin'", "Linux"),
])
def test_unsupported_pythons(before, words):
    done = subprocess.run([sys.executable, "-c", f"{before}; import fastsafetensors"],
                          capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError") and words in last
