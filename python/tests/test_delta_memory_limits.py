# SPDX-License-Identifier: Apache-2.0
"""Limits of memory and of the size of files while deltas are made, verified and applied."""

import os
import subprocess
import sys

import numpy
import pytest
from delta_folders import read_checkpoint, same, write_chain, write_checkpoint

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
    """They need 64 MiB, whatever the tensors' size."""
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


LIMITED = """
import resource, sys
from fastsafetensors import deltas
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
calls = {"apply": lambda: deltas.apply(*sys.argv[3:5]),
         "new files": lambda: deltas.apply(*sys.argv[3:5], new_files=True),
         "make": lambda: deltas.make(*sys.argv[5:8], version="000001", base_version="000000")}
try:
    calls[sys.argv[2]]()
except OSError as error:
    sys.exit(str(error.errno))
"""


@pytest.mark.parametrize(("what", "limit"), [
    ("apply", 10), ("apply", 100_000), ("apply", 600_000), ("new files", 100_000),
    ("new files", 600_000), ("make", 10), ("make", 3000)])
def test_a_limit_of_the_file_size(tmp_path, states, local, what, limit):
    """`ulimit -f`: an error before anything changes, and the same call works without the limit."""
    chain = write_chain(tmp_path, states, shards=1)
    write_checkpoint(tmp_path / "new", states[1])
    made = tmp_path / "made"
    arguments = [str(limit), what, local, chain[0], local, tmp_path / "new", made]
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", LIMITED, *map(str, arguments)],
                              capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.strip() in ("27", "28"), done.stderr
        assert same(read_checkpoint(local), states[0])
        assert not deltas.version_of(local).interrupted
        assert not made.exists() or os.listdir(made) == []
    if what == "make":
        deltas.make(local, tmp_path / "new", made, version="000001", base_version="000000")
    else:
        deltas.apply(local, chain[0], new_files=what == "new files")
        assert same(read_checkpoint(local), states[1])
