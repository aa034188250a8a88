# SPDX-License-Identifier: Apache-2.0
"""Programs written for the safetensors package: the same results and errors."""

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import same_bits, sample_tensors

import fastsafetensors
import fastsafetensors.numpy
import fastsafetensors.torch
from fastsafetensors import SafetensorError, compat, safe_open
from fastsafetensors._saving import serialize

KEYS = [
    5, -5, -1, 0, (0, 0, 0, 0), slice(3, 1), slice(0, 4, 2), slice(1, None, 3), slice(None),
    (1, slice(0, 2)), (slice(None), 1), ..., (..., 0), (0, ..., slice(1, 2)), (slice(9, 20),),
    (slice(-3, -1), slice(None, None, 2), -1), (0, 1, 1), slice(0, 4, 0), slice(None, None, -1),
]
TORCH_KEYS = [[0, 2], True, None, (slice(None), [0, 1]), (None, 1, ...)]


def result(call):
    """Return the result of a call in a form that can be compared."""
    try:
        value = call()
    except Exception as error:
        return type(error).__name__
    return (list(value.shape), np.asarray(value).tolist())


@pytest.fixture
def cube(tmp_path, torch):
    """Path of a file with a cube and a scalar."""
    path = tmp_path / "cube.safetensors"
    fastsafetensors.torch.save_file({"a": torch.arange(24.0).reshape(4, 3, 2),
                                     "s": torch.tensor(3.0)}, path, {"k": "v"})
    return path


@pytest.mark.parametrize("key", KEYS + TORCH_KEYS, ids=str)
def test_slices_of_torch(cube, key):
    import safetensors

    ours = result(lambda: safe_open(cube, "pt").get_slice("a")[key])
    assert ours == result(lambda: safetensors.safe_open(cube, "pt").get_slice("a")[key])


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices_of_numpy(cube, key):
    import safetensors

    ours = result(lambda: safe_open(cube, "np").get_slice("a")[key])
    theirs = result(lambda: safetensors.safe_open(cube, "np").get_slice("a")[key])
    if ours != theirs:  # slices that end before they begin, or outside: the reference fails
        array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
        assert theirs in ("SystemError", "OverflowError", "SafetensorError")
        assert ours == result(lambda: array[key])


def test_slices_of_a_scalar_and_words(cube, torch):
    piece = safe_open(cube, "pt").get_slice("s")
    assert piece.get_shape() == [] and piece.get_dtype() == "F32"
    assert piece[...] == 3 and piece[()] == 3
    for call, kind, words in [
        (lambda: piece[:], IndexError, r"slice\(\) cannot be applied to a 0-dim tensor."),
        (lambda: piece[0], IndexError, "0-dim tensor"),
        (lambda: safe_open(cube, "pt").get_slice("a")[5], IndexError,
         "index 5 is out of bounds for dimension 0 with size 4"),
        (lambda: safe_open(cube, "pt").get_slice("a")[0, 0, 0, 0], IndexError,
         "too many indices for tensor of dimension 3"),
        (lambda: safe_open(cube, "pt").get_slice("a")[::-1], ValueError,
         "step must be greater than zero"),
        (lambda: safe_open(cube, "np").get_slice("s")[:], SafetensorError, "more slicing indexes"),
    ]:
        with pytest.raises(kind, match=words):
            call()


def test_refusals_of_open(cube, tmp_path):
    cases = [
        (lambda: safe_open(cube, "xx"), SafetensorError, "framework xx is invalid"),
        (lambda: safe_open(cube, "pt", device="xx"), SafetensorError, "device xx is invalid"),
        (lambda: safe_open(cube, "np", device="cuda:0"), SafetensorError,
         "Device cuda:0 is not supported for framework numpy"),
        (lambda: safe_open(cube, "pt", backend="zz"), SafetensorError,
         r'backend "zz" is invalid \(expected one of: "mmap", "pread"\)'),
        (lambda: safe_open(cube, "pt").get_tensor("zz"), SafetensorError,
         "File does not contain tensor zz"),
        (lambda: safe_open(cube, "pt").get_slice("zz"), SafetensorError,
         "File does not contain tensor zz"),
        (lambda: safe_open(tmp_path / "none", "pt"), FileNotFoundError, "none"),
        (lambda: safe_open(3, "pt"), TypeError, "expected str, bytes or os.PathLike object"),
        (lambda: safe_open(None, "pt"), TypeError, "not NoneType"),
        (lambda: safe_open(cube, "paddle"), ModuleNotFoundError, "pip install paddlepaddle"),
        (lambda: safe_open(cube, "pt").get_tensor(3), TypeError, "must be a str"),
        (lambda: fastsafetensors.torch.load(3), TypeError, "bytes-like"),
        (lambda: fastsafetensors.torch.load(b"abc"), SafetensorError,
         "Error while deserializing: header too small"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    with safe_open(cube, "pt") as f:
        kept = f.get_tensor("a")
    for call in (lambda: f.get_tensor("a"), f.keys, f.metadata, lambda: f.get_slice("a"),
                 f.get_tensors, f.offset_keys):
        with pytest.raises(SafetensorError, match="File is closed"):
            call()
    assert kept.sum() == 276
    safe_open(cube, "pt", device="cuda")  # only the form is checked


def test_open_has_every_member(model, torch):
    import safetensors

    path, tensors = model
    theirs = safetensors.safe_open(path, "pt")
    for backend in ("mmap", "pread"):
        with safe_open(path, framework="pt", device="cpu", backend=backend) as f:
            assert f.keys() == list(theirs.keys())
            assert f.offset_keys() == list(theirs.offset_keys())
            assert f.metadata() == theirs.metadata()
            loaded = f.get_tensors()
            assert list(loaded) == f.offset_keys()
            for name, tensor in tensors.items():
                assert same_bits(torch, f.get_tensor(name), tensor)
                assert same_bits(torch, loaded[name], tensor)
                assert f.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            assert len(f) == len(tensors) and "large" in f and f["scalar"] == 3.5
    f = safe_open(path, "pt", device=torch.device("cpu"))
    f.get_tensor("large")[0, 0] = 7  # writable
    arrays = safe_open(path, "np").get_tensors()
    assert arrays["large"].flags.writeable


def test_meta_prefetch_and_handles(model, torch):
    import io

    from fastsafetensors._loading.open import PrefetchLoader, _safe_open_handle

    path, tensors = model
    with safe_open(path, "pt") as f:
        meta = f.get_tensor_meta("large")
        assert (meta.dtype, meta.shape) == ("F32", [700, 1000])
        assert meta.data_offsets[1] - meta.data_offsets[0] == 2800000
        with pytest.raises(SafetensorError, match="prefetch loads to cuda devices, not cpu"):
            f.prefetch()
        with pytest.raises(SafetensorError, match="slices of step 1"):
            f.prefetch({"large": slice(0, 4, 2)}, device="cuda")
        with PrefetchLoader(f, {"large": slice(3, 5), "scalar": None}, "cpu", 2) as ahead:
            assert ahead.names() == ["large", "scalar"] and len(ahead) == 2
            assert torch.equal(ahead.take("large"), tensors["large"][3:5])
            with pytest.raises(SafetensorError, match="was taken"):
                ahead.take("large")
            assert dict(ahead) == {"scalar": tensors["scalar"]}
        with pytest.raises(SafetensorError, match="is closed"):
            ahead.take("scalar")
    for handle in (open(path, "rb"), io.BytesIO(path.read_bytes())):  # noqa: SIM115
        opened = _safe_open_handle(handle, "pt")
        handle.close()
        assert torch.equal(opened.get_tensor("large"), tensors["large"])


def test_bytes(model, torch):
    import mmap

    import safetensors.torch

    path, tensors = model
    raw = path.read_bytes()
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for data in (raw, bytearray(raw), memoryview(raw), mapped):
        loaded = fastsafetensors.torch.load(data)
        assert all(same_bits(torch, loaded[name], tensors[name]) for name in tensors)
    loaded["large"][0, 0] = 5
    arrays = fastsafetensors.numpy.load(raw)
    assert np.array_equal(arrays["large"], tensors["large"].numpy())
    ours = dict(serialize.deserialize(raw))
    theirs = dict(safetensors.deserialize(raw))
    assert ours == theirs
    for size in range(0, 60, 7):
        with pytest.raises(SafetensorError):
            fastsafetensors.torch.load(raw[:size])


def test_specs(tmp_path, torch):
    import safetensors

    tensor = torch.arange(6.0).reshape(2, 3)
    fields = {"dtype": "float32", "shape": [2, 3], "data_ptr": tensor.data_ptr(), "data_len": 24}
    expected = safetensors.serialize({"a": safetensors.TensorSpec(**fields)}, {"k": "v"})
    spec = serialize.TensorSpec(**fields)
    assert serialize.serialize({"a": spec}, {"k": "v"}) == expected
    serialize.serialize_file({"a": spec}, tmp_path / "m", {"k": "v"})
    assert (tmp_path / "m").read_bytes() == expected
    with pytest.raises(TypeError, match="not an instance of 'TensorSpec'"):
        serialize.serialize({"a": {"dtype": "float32"}})


def test_errors_are_caught_by_their_name(raw):
    import safetensors

    path = raw("{", b"")
    for call in (lambda: safe_open(path, "pt"), lambda: fastsafetensors.torch.load_file(path),
                 lambda: fastsafetensors.numpy.save_file({"a": np.array(["x"])}, path),
                 lambda: fastsafetensors.numpy.save_file({"a": np.zeros(1)}, "/no/such/folder/x")):
        with pytest.raises(safetensors.SafetensorError) as caught:
            call()
        assert isinstance(caught.value, SafetensorError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, SafetensorError)
        assert str(again) == str(caught.value)


def test_compat(model, torch):
    code = """
import sys
import fastsafetensors.compat as compat
import safetensors, safetensors.torch
theirs = safetensors.torch.load_file
compat.install(); compat.install()
import safetensors.torch, safetensors.numpy
from safetensors import safe_open, SafetensorError, serialize, deserialize, TensorSpec
from safetensors.torch import load_file, save_file, save_model, load_model, save, load
import fastsafetensors
assert safe_open is fastsafetensors.safe_open
assert load_file is not theirs
path = sys.argv[1]
with safe_open(path, framework="pt") as f:
    assert len(f.keys()) == len(load_file(path)) == len(safetensors.numpy.load_file(path))
try:
    load_file(path + ".none")
except FileNotFoundError:
    pass
compat.uninstall(); compat.uninstall()
import safetensors.torch
assert safetensors.torch.load_file is theirs
"""
    done = subprocess.run([sys.executable, "-c", code, str(model[0])], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_reference_package(model):
    code = ("import sys; sys.modules['safetensors'] = None; import fastsafetensors.torch as t; "
            "assert t.load_file(sys.argv[1]); t.save_file(t.load_file(sys.argv[1]), sys.argv[2])")
    out = model[0].parent / "out"
    subprocess.run([sys.executable, "-c", code, str(model[0]), str(out)], check=True)


def test_jax(tmp_path):
    pytest.importorskip("jax")
    import jax.numpy as jnp
    import safetensors.flax as theirs

    import fastsafetensors.flax as ours

    arrays = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
              "b": jnp.arange(4, dtype=jnp.bfloat16), "c": jnp.array(True)}
    path = tmp_path / "m"
    ours.save_file(arrays, path, {"k": "v"})
    theirs.save_file(arrays, tmp_path / "theirs", {"k": "v"})
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes() == ours.save(arrays, {"k": "v"})
    for loaded in (ours.load_file(path), ours.load(path.read_bytes()),
                   safe_open(path, "flax").get_tensors()):
        assert all(jnp.array_equal(loaded[name], arrays[name]) for name in arrays)
        assert loaded["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("name", "package"), [("tensorflow", "tensorflow"), ("mlx", "mlx"),
                                               ("paddle", "paddlepaddle"), ("flax", "jax")])
def test_missing_package_errors_say_what_to_install(name, package):
    import importlib.util

    if importlib.util.find_spec({"paddle": "paddle", "flax": "jax"}.get(name, name)):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        __import__(f"fastsafetensors.{name}")


def test_from_many_threads_and_after_fork(model, torch):
    import os

    path, tensors = model
    f = safe_open(path, "pt")
    faults = []

    def work():
        for name in tensors:
            if not same_bits(torch, f.get_tensor(name), tensors[name]):
                faults.append(name)

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    child = os.fork()
    if child == 0:
        good = fastsafetensors.torch.load_file(path, mode="load")["scalar"] == 3.5
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def load_in_a_worker(path):
    """Sum of a tensor's elements: run in another process."""
    return float(fastsafetensors.torch.load_file(path)["large"].double().sum())


def test_spawn(model, torch):
    import multiprocessing

    path, tensors = model
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sums = pool.map(load_in_a_worker, [path] * 4)
    assert sums == [float(tensors["large"].double().sum())] * 4


def test_modules_offer_the_same_names():
    import safetensors.numpy
    import safetensors.torch

    for theirs, ours in ((safetensors.torch, fastsafetensors.torch),
                         (safetensors.numpy, fastsafetensors.numpy)):
        public = {"load", "load_file", "save", "save_file", "load_model", "save_model",
                  "storage_ptr", "storage_size"}
        for name in public & set(dir(theirs)):
            assert callable(getattr(ours, name)), name
    assert compat.install and sample_tensors


def test_safe_open_is_also_in_the_framework_modules(torch, monkeypatch):
    import fastsafetensors
    from fastsafetensors import numpy as our_numpy
    from fastsafetensors import torch as our_torch

    assert "safe_open" in dir(our_torch)
    assert our_torch.safe_open is our_numpy.safe_open is fastsafetensors.safe_open
    with pytest.raises(AttributeError, match="'fastsafetensors.torch' has no attribute 'x'"):
        our_torch.x
    monkeypatch.delitem(sys.modules, "fastsafetensors.torch")
    assert not hasattr(our_torch, "x") and "safe_open" in dir(our_torch)
