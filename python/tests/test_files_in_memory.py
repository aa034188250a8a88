# SPDX-License-Identifier: Apache-2.0
"""Files on tmpfs: opened on the calling thread, unless something else must be read."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from fastsafetensors.numpy import save_file

OPEN = """
import os, sys
from fastsafetensors.numpy import load_file
before = len(os.listdir("/proc/self/task"))
tensors = load_file(sys.argv[1], verify=eval(sys.argv[2]))
assert tensors["x"].nbytes == 4 << 20 and tensors["x"][-1] == 7
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.fixture
def memory():
    """Return a folder on tmpfs with a model of 4 MiB."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 64 << 20:
        pytest.skip("/dev/shm is not a writable tmpfs of 64 MiB")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    save_file({"x": np.full(4 << 20, 7, np.uint8)}, os.path.join(folder, "m.safetensors"))
    yield folder
    shutil.rmtree(folder)


def threads_started(path, verify=None):
    """Load a file in a new process; return how many threads it started and kept."""
    done = subprocess.run([sys.executable, "-c", OPEN, path, repr(verify)], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_views_need_no_thread(memory):
    assert threads_started(os.path.join(memory, "m.safetensors")) == 0


def test_cached_views_of_a_disk_need_no_helper(tmp_path):
    """A helper would wait 100 ms for more work; the thread that maps the pages ends at once."""
    path = tmp_path / "m.safetensors"
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the temporary folder does not lie on a local disk")
    save_file({"x": np.full(4 << 20, 7, np.uint8), "y": np.zeros(32 << 20, np.uint8)}, path)
    path.read_bytes()
    later = OPEN.replace("print(", "import time; time.sleep(0.03); print(")
    done = subprocess.run([sys.executable, "-c", later, path, "None"], text=True,
                          capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_files_elsewhere_are_read_by_another_thread(memory, tmp_path):
    """Ctrl-C must work while their storage does not answer."""
    model = os.path.join(memory, "m.safetensors")
    index = os.path.join(memory, "m.safetensors.index.json")
    with open(index, "w") as file:
        json.dump({"weight_map": {"x": "m.safetensors"}}, file)
    assert threads_started(index) > 0
    manifest = tmp_path / "m.manifest"
    command = [sys.executable, "-m", "fastsafetensors", "hash", "--manifest", model]
    subprocess.run(command, check=True, capture_output=True)
    shutil.move(model + ".manifest", manifest)
    assert threads_started(model, str(manifest)) > 0
