# SPDX-License-Identifier: Apache-2.0
"""Slices of tensors: the same results as the frameworks for every index."""

import json
import os
import resource
import shutil
import subprocess

import numpy as np
import pytest

from fastsafetensors import SafetensorError, safe_open
from fastsafetensors.numpy import save_file

INDICES = [
    [], [[]], [0, 2], np.array([1, 0]), (slice(None), [0, 1]), None, (None, 1),
    (slice(None, None, -1),), (..., 0), (slice(1, 3), slice(None), 0), 2, -1, np.int64(1),
    slice(0, 0), slice(5, 2), (0, 0, 0), slice(0, 4, 2), (slice(None), slice(1, 3)), np.bool_(True),
    np.array([True, False, True, False]), (..., None), (), ...,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a file with a small and a large tensor."""
    folder = tmp_path_factory.mktemp("slices")
    rng = np.random.default_rng(1)
    save_file({"small": rng.random((4, 3, 5), np.float32), "none": np.zeros((0, 3), np.int16),
               "large": rng.random((4, 600, 300), np.float32)}, folder / "m")
    return folder / "m"


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("name", ["small", "large"])
def test_numpy_indexes_as_numpy_does(path, name, backend):
    with safe_open(path, "np", backend=backend) as f:
        whole, part = f.get_tensor(name), f.get_slice(name)
        for index in INDICES:
            wanted, got = whole[index], part[index]
            assert got.shape == wanted.shape and np.array_equal(got, wanted), index


def test_small_parts_are_copies(path, torch):
    """Writing to one changes neither another one nor the file. It stays valid after the file is
    closed."""
    for framework in ("np", "pt"):
        with safe_open(path, framework) as f:
            part = f.get_slice("small")
            first, second = part[1:3], part[1:3]
            first[:] = -1
            assert (second >= 0).all() and (part[1:3] >= 0).all()
            assert (f.get_slice("small")[:, 1:2] >= 0).all()
            assert f.get_slice("none")[0:0].shape == (0, 3)
        assert (first == -1).all()
        with pytest.raises(SafetensorError, match="closed"):
            part[0]


def cached_bytes(path):
    """The cached bytes of a file; skips if the kernel does not report them."""
    program = shutil.which("fincore")
    if program is None:
        pytest.skip("fincore is not installed")
    done = subprocess.run([program, "-b", "-n", "-o", "RES", path], capture_output=True, text=True)
    return int(done.stdout)


def test_small_cached_parts_need_no_load(path, monkeypatch, torch):
    import fastsafetensors._loading.open as opening

    opened = []
    real = opening.OpenLoad
    monkeypatch.setattr(opening, "OpenLoad", lambda *a, **k: (opened.append(a), real(*a, **k))[1])
    with open(path, "rb") as file:
        file.read()
    for framework in ("np", "pt"):
        with safe_open(path, framework) as f:
            for row in range(4):
                assert f.get_slice("large")[row, 3:5].shape == (2, 300)
            assert len(opened) in (0, 4)  # 4: the kernel does not report what is cached
        opened.clear()


SIMPLE = [2, -1, slice(1, 3), (0, slice(2)), (..., 0), (slice(None), 1, ...), (0, 0, 0),
          (1, ..., slice(-2, None)), (..., slice(1, 9)), (3, ..., 0, 0), slice(-9, 2)]


def test_simple_parts_are_planned_in_c(path, monkeypatch, torch):
    """Numbers, slices and an Ellipsis are planned in C, other expressions in Python."""
    import fastsafetensors._loading.open as opening

    planned = []
    for name in ("plan_numpy", "plan_torch"):
        real = getattr(opening, name)
        monkeypatch.setattr(opening, name, lambda *a, r=real: (planned.append(a), r(*a))[1])
    with open(path, "rb") as file:
        file.read()
    for framework in ("np", "pt"):
        with safe_open(path, framework) as f:
            whole, part = f.get_tensor("small"), f.get_slice("small")
            if part._model.copy_slice(f._find("small"), 0) is None:
                pytest.skip("the kernel does not tell what is cached")
            for index in SIMPLE:
                got = part[index]
                assert got.shape == whole[index].shape and (got == whole[index]).all(), index
            assert planned == []
            for index, error in ((4, (IndexError, SafetensorError)), ((0, 0, 0, 0), Exception),
                                 (slice("a"), TypeError), (10**30, Exception)):
                with pytest.raises(error):
                    part[index]
            assert len(planned) == 4
        planned.clear()


def test_index_object_closing_the_file(path):
    class Closing:
        def __index__(self):
            f.close()
            return 1

    f = safe_open(path, "np")
    with open(path, "rb") as file:
        file.read()
    wanted = f.get_tensor("small")[1:]
    try:
        assert (f.get_slice("small")[Closing():] == wanted).all()
    except SafetensorError as error:
        assert "closed" in str(error)


def test_row_reads_only_its_bytes(tmp_path, torch):
    """Neither cache nor time are spent on the rest of the tensor."""
    path = str(tmp_path / "rows.safetensors")
    save_file({"rows": np.zeros((16384, 1024), np.float32)}, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    for framework in ("np", "pt"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(path) > 0:
            pytest.skip("this file system does not evict on request")
        with safe_open(path, framework) as f:
            for row in (5000, 5001, 12000):
                assert f.get_slice("rows")[row : row + 1].shape == (1, 1024)
        # The header's readahead, and a row or two with what the kernel reads around them.
        assert cached_bytes(path) < 48 << 20
    os.close(descriptor)


def test_small_parts_under_fake_tensors(path, torch):
    """Slices of whole tensors give the stored bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with open(path, "rb") as file:
        file.read()
    with FakeTensorMode(), safe_open(path, "pt") as f:
        assert f.get_slice("small")[1:3].shape == (2, 3, 5)


def test_slices_of_one_tensor_share_its_mapped_pages(tmp_path):
    save_file({"x": np.ones((2048, 1024), np.float32)}, tmp_path / "saved")
    with open(tmp_path / "saved", "rb") as saved, open(tmp_path / "m", "wb", 4096) as file:
        while block := saved.read(4096):  # as small pages of the page cache
            file.write(block)
    faults = []
    with safe_open(tmp_path / "m", "np") as f:
        part = f.get_slice("x")
        for rank in range(8):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            columns = part[:, rank * 128:(rank + 1) * 128]
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            assert columns.all()
    # The first slice maps 2048 pages, 16 at a time. Later ones use the memory of earlier results.
    assert min(faults) < 64 < faults[0]


def test_columns_of_a_large_model_are_read_once(tmp_path):
    """The other columns are needed too, by this rank or by another one."""
    rows = np.random.default_rng(2).integers(0, 255, (4096, 8192), np.uint8)
    save_file({"x": rows}, tmp_path / "small")
    data = (tmp_path / "small").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    rest = 160 << 20
    header["rest"] = {"dtype": "U8", "shape": [rest],
                      "data_offsets": [rows.nbytes, rows.nbytes + rest]}
    text = json.dumps(header).encode()
    path = tmp_path / "m"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[8 + length:])
        file.flush()
        os.ftruncate(file.fileno(), 8 + len(text) + rows.nbytes + rest)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = read_bytes()
    with safe_open(path, "np") as f:
        for rank in range(8):
            columns = slice(rank * 1024, (rank + 1) * 1024)
            assert np.array_equal(f.get_slice("x")[:, columns], rows[:, columns])
    if not read_bytes() - before:
        pytest.skip("this file system does not count reads")
    assert rows.nbytes <= read_bytes() - before <= 1.05 * rows.nbytes


def read_bytes():
    """Return the bytes that this process has caused to be read from storage."""
    with open("/proc/self/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("read_bytes"))
