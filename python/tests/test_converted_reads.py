# SPDX-License-Identifier: Apache-2.0
"""Loads by transformers with another dtype: the load converts the tensors."""

import threading

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from fastsafetensors._loading import readahead  # noqa: E402
from fastsafetensors._lazy.lazy_tensor import LazyTensor  # noqa: E402
from fastsafetensors.integrations import accelerate_from_pretrained  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

CODE = """
def materialize(tensor, device=None, dtype=None):
    tensor = tensor[...]
    seen.append(type(tensor))
    if dtype is not None or device is not None:
        tensor = tensor.to(device=device, dtype=dtype)
    return tensor
"""


@pytest.fixture
def library():
    """What transformers does to a slice, in a module of its name, and in another's."""
    def make(name):
        scope = {"__name__": name, "seen": []}
        exec(CODE, scope)  # noqa: S102
        return scope

    return make


@pytest.fixture
def path(tmp_path):
    tensors = {f"w{i:02}": torch.randn(300, 40).bfloat16() for i in range(40)}
    tensors.update(ids=torch.arange(7), scale=torch.tensor(2.5).bfloat16())
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    return tmp_path / "m.safetensors", tensors


@pytest.fixture
def loads(monkeypatch):
    """Options of the windows that are opened."""
    seen = []
    real = readahead.open_load

    def counted(model, items, **options):
        seen.append((len(items), options.get("dtype")))
        return real(model, items, **options)

    monkeypatch.setattr(readahead, "open_load", counted)
    return seen


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_converted_values_equal_torch(path, library, loads, wanted):
    file, tensors = path
    scope = library("transformers.core_model_loading")
    with accelerate_from_pretrained(converts=True), safetensors.safe_open(file, "pt") as f:
        for name, own in tensors.items():
            is_float = own.is_floating_point()
            found = scope["materialize"](f.get_slice(name), "cpu", wanted if is_float else None)
            assert type(found) is torch.Tensor
            assert found.dtype == (wanted if is_float else torch.int64)
            assert torch.equal(found, own.to(found.dtype))
    converted = [count for count, dtype in loads if dtype is not None]
    if wanted is torch.bfloat16:
        assert converted == []
    else:
        assert sum(converted) >= 40 and len(converted) <= 2  # a load has all of a run
        assert LazyTensor in scope["seen"]


def test_unconverted_reads_are_plain(path, library):
    """They cost time: behind some that became what is stored, tensors are read at once."""
    file, tensors = path
    scope = library("transformers.core_model_loading")
    with accelerate_from_pretrained(), safetensors.safe_open(file, "pt") as f:
        for name in list(tensors)[:40]:
            scope["materialize"](f.get_slice(name), "cpu", torch.bfloat16)
        assert scope["seen"].count(LazyTensor) == 8
        # Another dtype is torch's work then, and right all the same.
        found = scope["materialize"](f.get_slice("w03"), "cpu", torch.float32)
        assert torch.equal(found, tensors["w03"].float())
    with accelerate_from_pretrained(), safetensors.safe_open(file, "pt") as f:
        scope["seen"].clear()
        for at, name in enumerate(list(tensors)[:40]):
            scope["materialize"](f.get_slice(name), "cpu",
                                 torch.float32 if at == 3 else torch.bfloat16)
        assert scope["seen"].count(LazyTensor) == 40  # conversions are requested


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_read_of_another_dtype_is_dropped(path, library, loads, wanted):
    """Reading begins when slices were collected; the first tensor determines the dtype of all."""
    file, tensors = path
    scope = library("transformers.core_model_loading")
    with accelerate_from_pretrained(), safetensors.safe_open(file, "pt") as f:
        slices = {name: f.get_slice(name) for name in tensors}
        assert loads == [(42, None)]
        for name, part in slices.items():
            dtype = wanted if tensors[name].is_floating_point() else None
            found = scope["materialize"](part, "cpu", dtype)
            assert type(found) is torch.Tensor
            assert torch.equal(found, tensors[name].to(dtype))
            if wanted is torch.float32:
                assert not f._replacement._ahead._windows
    assert loads[1:] == ([(40, "F32"), (1, "F32")] if wanted is torch.float32 else [])


def test_several_dtypes_and_other_uses(path, library):
    file, tensors = path
    scope = library("transformers.core_model_loading")
    with accelerate_from_pretrained(converts=True), safetensors.safe_open(file, "pt") as f:
        both = [scope["materialize"](f.get_slice("w03"), "cpu", dtype)
                for dtype in (torch.float32, torch.float16, torch.int32)]
        assert [one.dtype for one in both] == [torch.float32, torch.float16, torch.int32]
        assert all(torch.equal(one, tensors["w03"].to(one.dtype)) for one in both)
        promise = scope["materialize"](f.get_slice("w04"))
        assert torch.equal(promise[3:5].float(), tensors["w04"][3:5].float())
        assert scope["materialize"](f.get_slice("w04"), "meta").is_meta


@pytest.mark.parametrize("converts, module", [(False, "transformers.x"), (True, "diffusers.x"),
                                              (True, "transformers.modeling_utils")])
def test_other_callers_get_tensors(path, library, converts, module):
    file, tensors = path
    scope = library(module)
    with accelerate_from_pretrained(converts=converts), safetensors.safe_open(file, "pt") as f:
        found = scope["materialize"](f.get_slice("w03"), "cpu", torch.float32)
    assert torch.equal(found, tensors["w03"].float()) and LazyTensor not in scope["seen"]


def test_threads(path, library):
    file, tensors = path
    scope = library("transformers.core_model_loading")
    found = {}
    with accelerate_from_pretrained(converts=True), safetensors.safe_open(file, "pt") as f:
        def act(names):
            for name in names:
                found[name] = scope["materialize"](f.get_slice(name), "cpu", torch.float32)

        names = [name for name in tensors if name.startswith("w")]
        threads = [threading.Thread(target=act, args=(names[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 40
    assert all(torch.equal(found[name], tensors[name].float()) for name in found)


def test_failed_read_falls_back_to_safetensors(path, library, monkeypatch):
    from fastsafetensors._lazy import converted_reads

    file, tensors = path
    scope = library("transformers.core_model_loading")

    def fail(*arguments, **options):
        raise OSError("no")

    with accelerate_from_pretrained(converts=True), safetensors.safe_open(file, "pt") as f:
        monkeypatch.setattr(converted_reads.ReadAhead, "take", fail)
        found = scope["materialize"](f.get_slice("w03"), "cpu", torch.float32)
    assert torch.equal(found, tensors["w03"].float())
