# SPDX-License-Identifier: Apache-2.0
"""Options of loads: names, filters, dtypes, the meta device, headers."""

import pytest

from fastsafetensors import Header, SafetensorError, TensorInfo, read_header, safe_open
from fastsafetensors.fast_loading import load_safetensors_sharded, save_safetensors_sharded
from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def path(tmp_path, torch):
    """A file of three tensors."""
    save_file({"a": torch.ones(4, 2), "b": torch.arange(3), "c": torch.zeros(5, dtype=torch.half)},
              tmp_path / "m.st", metadata={"k": "v"})
    return tmp_path / "m.st"


def _fronts():
    import importlib

    loaders = {name: importlib.import_module(f"fastsafetensors.{name}").load_file
              for name in ("torch", "numpy")}
    try:
        loaders["flax"] = importlib.import_module("fastsafetensors.flax").load_file
    except ModuleNotFoundError:
        pass
    return loaders


@pytest.mark.parametrize("mode", ["load", "map"])
def test_names_and_filters_of_every_api(mode, path):
    for load in _fronts().values():
        assert set(load(path, names=["c", "a", "c"], mode=mode)) == {"a", "c"}
        assert set(load(path, filter=lambda name: name != "a", mode=mode)) == {"b", "c"}
        assert set(load(path, names=["a", "b"], filter="b".__eq__, mode=mode)) == {"b"}
        assert load(path, names=[], mode=mode) == {}
        with pytest.raises(TypeError, match="a list of names"):
            load(path, names="ac", mode=mode)
        assert load(path, filter=lambda name: False, mode=mode) == {}
        with pytest.raises(KeyError, match="does not contain tensor zz"):
            load(path, names=["a", "zz"], mode=mode)
        with pytest.raises(SafetensorError):
            load(path, names=["zz"], mode=mode)


def test_only_selected_tensors_are_read(path, monkeypatch):
    from fastsafetensors._loading import load

    read = []
    original = load.wait
    monkeypatch.setattr(load, "wait", lambda loader, *rest: (original(loader, *rest), read.append(
        loader.stats()["bytes_requested"])))
    load_file(path, names=["c"], mode="load")
    load_file(path, filter=lambda name: name in "ab", mode="load")
    assert read == [10, 32 + 24]


@pytest.mark.parametrize("word", ["bfloat16", "BF16", "torch.bfloat16"])
def test_words_for_dtypes(word, path, torch):
    loaded = load_file(path, dtype=word)
    assert loaded["a"].dtype is torch.bfloat16 and loaded["b"].dtype is torch.int64
    assert load_file(path, dtype=torch.bfloat16)["c"].dtype is torch.bfloat16
    assert load_file(path, dtype="auto")["a"].dtype is torch.float32


def test_dtypes_of_numpy(path):
    import numpy as np

    from fastsafetensors.numpy import load_file as load

    for wish in (np.float64, np.dtype("float64"), "float64", "F64"):
        assert load(path, dtype=wish)["a"].dtype == np.float64
    with pytest.raises(ValueError, match="unknown dtype 'float13'.*BF16.*bfloat16.*auto"):
        load(path, dtype="float13")
    with pytest.raises(ValueError, match="unknown dtype 'float13'"):
        load_file(path, dtype="float13")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "F64", "F8_E4M3"])
def test_the_meta_device(dtype, path, model, torch):
    for source in (path, model[0]):
        loaded, real = load_file(source, device="meta", dtype=dtype), load_file(source, dtype=dtype)
        assert list(loaded) == list(real)
        for name, tensor in real.items():
            described = loaded[name]
            assert described.is_meta and described.shape == tensor.shape, name
            assert described.dtype is tensor.dtype, name
    assert set(load_file(path, device="meta", names=["a"])) == {"a"}


def test_default_device_is_the_cpu(path, model, torch):
    """As the reference takes it."""
    with safe_open(path, "pt", device=None) as f:
        assert f.get_tensor("a").device.type == "cpu"
    loaded = load_file(path, device=None)
    assert torch.equal(loaded["a"], load_file(path)["a"]) and loaded["a"].device.type == "cpu"


def test_headers(path, sharded):
    header = read_header(path)
    assert isinstance(header, Header) and header.metadata == {str(path): {"k": "v"}}
    assert set(header.tensors) == {"a", "b", "c"}
    info = header.tensors["a"]
    assert isinstance(info, TensorInfo)
    assert (info.dtype, info.shape, info.size_bytes, info.file) == ("F32", (4, 2), 32, str(path))
    assert path.read_bytes()[info.begin : info.begin + 32] == b"\x00\x00\x80\x3f" * 8
    whole = read_header(sharded[0])
    assert len(whole.metadata) == 3 and whole.tensors.keys() == sharded[1].keys()
    with pytest.raises(FileNotFoundError):
        read_header(path.with_name("none"))


def test_jax_devices_and_shardings(path):
    jax = pytest.importorskip("jax")
    from fastsafetensors.flax import load_file as load

    device = jax.devices("cpu")[0]
    assert load(path, device=device)["a"].devices() == {device}
    mesh = jax.sharding.Mesh([device], ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert load(path, device=where, names=["a"])["a"].sharding == where


def test_file_names_and_variants(tmp_path, torch):
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(4)}
    half = {name: tensor.half() for name, tensor in tensors.items()}
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    index = save_safetensors_sharded(tensors, tmp_path, max_shard_size=800,
                                     filename_pattern=pattern)
    assert index.endswith("diffusion_pytorch_model.safetensors.index.json")
    pattern = "diffusion_pytorch_model.fp16{suffix}.safetensors"
    save_safetensors_sharded(half, tmp_path, filename_pattern=pattern)
    assert (tmp_path / "diffusion_pytorch_model.fp16.safetensors").exists()
    loaded = load_safetensors_sharded(tmp_path, variant="fp16")
    assert loaded.keys() == half.keys() and loaded["t1"].dtype is torch.float16
    with pytest.raises(FileNotFoundError, match="variant 'fp8'"):
        load_safetensors_sharded(tmp_path, variant="fp8")
    for wrong in ("model.safetensors", "{suffix}.safetensors", "../m{suffix}.safetensors"):
        with pytest.raises(ValueError, match="filename_pattern must be"):
            save_safetensors_sharded(half, tmp_path, filename_pattern=wrong)


def test_accelerated_file_is_a_mapping(path, torch):
    import safetensors

    from fastsafetensors.integrations import accelerate_from_pretrained

    with accelerate_from_pretrained() as acceleration:
        with safetensors.safe_open(path, "pt") as f:
            assert len(f) == 3 and "a" in f and list(f) == ["a", "b", "c"]
            assert torch.equal(f["b"], torch.arange(3))
        assert acceleration.reads >= 1


def test_accelerations_of_threads_end_in_any_order():
    from fastsafetensors.integrations import _state, accelerate_from_pretrained

    first, second = (
        accelerate_from_pretrained(threads=threads, mode=mode)
        for threads, mode in ((2, "load"), (3, "map")))
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert (_state.threads, _state.mode) == (3, "map")
    second.__exit__()
    assert (_state.threads, _state.mode, _state.depth) == (0, None, 0)


def test_metadata_of_an_open_file(path):
    with safe_open(path, "np") as f:
        assert f.metadata() == {"k": "v"}


@pytest.mark.parametrize("cache", ["auto", "keep", "bypass"])
def test_the_page_cache_as_a_choice(cache, path, torch):
    """Each word reaches the load: the values are the same, and an unknown one is an error."""
    for mode in ("auto", "load"):
        loaded = load_file(path, mode=mode, cache=cache)
        assert loaded["b"].tolist() == [0, 1, 2]
        with safe_open(path, "pt", mode=mode, cache=cache) as f:
            assert f.get_tensor("b").tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="unknown cache 'warm'"):
        load_file(path, cache="warm")


def test_bypass_copies_all_tensors(path):
    from fastsafetensors import _core

    path.read_bytes()
    for cache, mode in (("keep", "map"), ("bypass", "load")):
        loader = _core.Model(path).load(cache=cache)
        loader.wait()
        assert loader.stats()["mode"] == mode
