# SPDX-License-Identifier: Apache-2.0
"""Deltas are made, verified and applied in 64 MiB, whatever the tensors' size."""

import subprocess
import sys

import numpy
import pytest
from delta_folders import read_checkpoint, same, write_checkpoint

from fastsafetensors import deltas

MIB = 1 << 20
# The limit is one of the kernel, on memory that is private and writable: mapped files do not count.
PROGRAM = """
import resource, sys
from fastsafetensors import deltas

encoding, old, new, local, folder, limit = sys.argv[1:]
deltas.make(old, old, folder + "-none", version="1", base_version="0")  # loads the libraries
for line in open("/proc/self/status"):
    if line.startswith("VmData"):
        limit = int(limit) + 1024 * int(line.split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
deltas.make(old, new, folder, version="1", base_version="0", encoding=encoding, threads=2)
deltas.verify(local, folder, threads=2)
deltas.apply(local, folder, threads=2, new_files=encoding == "xor")
"""


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_limit_is_kept(tmp_path, encoding):
    generator = numpy.random.default_rng(1)
    old = {name: generator.integers(0, 256, size * MIB, numpy.uint8)
           for name, size in (("a", 96), ("b", 70), ("c", 8))}
    new = {name: value.copy() for name, value in old.items()}
    for value in new.values():
        value[generator.integers(0, value.size, value.size // 5)] ^= 5
    for name, state in (("old", old), ("local", old), ("new", new)):
        write_checkpoint(tmp_path / name, state)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, encoding, *map(str, (
            tmp_path / "old", tmp_path / "new", tmp_path / "local", tmp_path / "v", 64 * MIB))],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(tmp_path / "local"), new)
    assert deltas.version_of(tmp_path / "local").version == "1"
