# SPDX-License-Identifier: Apache-2.0
"""safe_open: names, tensors, slices."""

import mmap
import threading

import pytest
from conftest import same_bits

from fastsafetensors import SafetensorError, safe_open


@pytest.mark.parametrize("mode", ["auto", "load", "map"])
def test_tensors(model, torch, mode):
    path, tensors = model
    with safe_open(path, framework="pt", device="cpu", mode=mode) as f:
        assert f.keys() == sorted(tensors)
        assert set(f.offset_keys()) == set(tensors) and len(f) == len(tensors)
        assert f.metadata() == {"format": "pt", "note": 'a"b\\c'}
        assert "large" in f and "none" not in f and 3 not in f
        held = {name: f.get_tensor(name) for name in f}
        assert same_bits(torch, f["large"], tensors["large"])
    assert all(same_bits(torch, held[name], tensors[name]) for name in tensors)
    with pytest.raises(SafetensorError, match="closed"):
        f.get_tensor("large")
    f.close()


KEYS = [
    0, -1, 699, slice(3, 9), slice(None), slice(-5, None), slice(9, 3), slice(0, 0), ...,
    (slice(2, 5), slice(10, 20)), (3, slice(1, 4)), (slice(None), 7), (1, 2), (..., 5),
    (slice(4, 6), ...), (slice(None, None, 3), slice(0, 4)), slice(0, 10000), (0, ..., 1),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices_like_the_framework(model, torch, key):
    path, tensors = model
    whole = tensors["large"]
    with safe_open(path, framework="pt") as f:
        part = f.get_slice("large")
        assert part.get_shape() == [700, 1000] and part.get_dtype() == "F32"
        assert torch.equal(part[key], whole[key])
    with safe_open(path, framework="np") as f:
        assert (f.get_slice("large")[key] == whole.numpy()[key]).all()


def test_rows_of_a_cached_file_are_views(model):
    from fastsafetensors import _core

    core = _core.Model(model[0])
    model[0].read_bytes()
    loader = core.load([("large", (3, 0), (9, 1000))], mode="map")
    rows = loader.item(0)
    assert loader.stats()["bytes_copied"] == 0
    whole = core.load(["large"], mode="map").item(0)
    # Each load has a separate mapping, which begins at a page.
    assert (rows.data_ptr - whole.data_ptr - 3 * 1000 * 4) % mmap.PAGESIZE == 0
    loader = core.load([("large", (0, 0), (9, 10))], mode="map")
    assert loader.item(0).nbytes == 360 and loader.stats()["bytes_copied"] == 360


def test_wrong_slices(model):
    path, _ = model
    with safe_open(path, framework="pt") as f:
        part = f.get_slice("large")
        for key in (700, -701, (0, 0, 0)):
            with pytest.raises(IndexError):
                part[key]
        with pytest.raises(IndexError):
            f.get_slice("scalar")[0]
        assert f.get_slice("scalar")[...].item() == 3.5


def test_slices_read_only_the_requested_bytes(tmp_path, torch):
    from safetensors.torch import save_file

    from fastsafetensors import _core

    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4096, 4096), "b": torch.zeros(1 << 20)}, path)
    loader = _core.Model(path).load([("a", (0, 0), (2048, 4096))], mode="load")
    loader.wait()
    assert loader.stats()["bytes_read"] <= 1.1 * 2048 * 4096 * 4
    loader = _core.Model(path).load([("a", (0, 0), (4096, 2048))], mode="load")
    loader.wait()
    assert loader.stats()["bytes_requested"] == 4096 * 2048 * 4
    with pytest.raises(ValueError, match="range"):
        _core.Model(path).load([("a", (0, 0), (4097, 1))])
    with pytest.raises(ValueError):
        _core.Model(path).load([("a", (0,), (1,))])
    with pytest.raises(OverflowError):
        _core.Model(path).load([("a", (-1, 0), (1, 1))])


def test_errors(model, tmp_path):
    path, _ = model
    with pytest.raises(SafetensorError, match="framework xx is invalid"):
        safe_open(path, framework="xx")
    with pytest.raises(SafetensorError, match="not supported for framework numpy"):
        safe_open(path, framework="np", device="cuda:0")
    with safe_open(path, framework="pt") as f, pytest.raises(SafetensorError, match="larger"):
        f.get_tensor("larger")
    with safe_open(path, framework="pt") as f, pytest.raises(SafetensorError, match=": large\\)"):
        f.get_slice("largo")
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "none", framework="pt")


def test_sharded(sharded, torch):
    folder, tensors = sharded
    with safe_open(folder, framework="pt") as f:
        assert f.keys() == sorted(tensors)
        assert all(torch.equal(f.get_tensor(n), tensors[n]) for n in tensors)


def test_close_while_others_read(model):
    path, tensors = model
    for _ in range(20):
        f = safe_open(path, framework="np")
        started = threading.Event()

        def read(f=f, started=started):
            started.set()
            try:
                for _ in range(50):
                    f.get_tensor("large")
            except SafetensorError as error:
                assert "closed" in str(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        f.close()
        for thread in threads:
            thread.join()
