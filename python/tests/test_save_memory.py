# SPDX-License-Identifier: Apache-2.0
"""Saves only read memory that belongs to the tensor; otherwise an error, in every interface."""

import ctypes

import pytest

import fastsafetensors.fast_loading as fast
import fastsafetensors.torch as fst
from fastsafetensors import _core
from fastsafetensors._saving import serialize
from fastsafetensors.saver import ParallelSaver
from fastsafetensors.sharded_save import save_on_ranks


def _save_model(torch, tensors, folder):
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    fst.save_model(module, folder / "m")


# Every API that gives tensors to a file.
APIS = {
    "save_file": lambda torch, t, d: fst.save_file(t, d / "m"),
    "save": lambda torch, t, d: fst.save(t),
    "save_model": _save_model,
    "sharded": lambda torch, t, d: fast.save_safetensors_sharded(t, d / "s"),
    "fast_loading": lambda torch, t, d: fast.save_safetensors(t, d / "m"),
    "embeddings": lambda torch, t, d: fast.save_embeddings_safetensors(t, d / "m"),
    "parallel": lambda torch, t, d: ParallelSaver(num_shards=1).save(t, d / "m"),
    "on_ranks": lambda torch, t, d: save_on_ranks(t, d / "r"),
}


def _wrapper(torch, claims_address):
    """A tensor without memory, like a quantized one whose bytes are in other tensors."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, (64,), dtype=torch.float32)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if claims_address and func is torch.Tensor.data_ptr:
                return args[0].inner.data_ptr()
            return super().__torch_function__(func, types, args, kwargs or {})

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return cls(args[0].inner)
            raise NotImplementedError(func)

    return Wrapper(torch.arange(4.0))


def _dtensor(torch, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.arange(64.0), mesh, [Shard(0)])


def _fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(64)


def _freed(torch, offset):
    """A parameter whose memory was freed, as FSDP does."""
    tensor = torch.zeros(128)[offset : offset + 64]
    tensor.untyped_storage().resize_(0)
    return tensor


CASES = {
    "DTensor": lambda torch, mesh: _dtensor(torch, mesh),
    "Parameter of a DTensor": lambda torch, mesh: torch.nn.Parameter(_dtensor(torch, mesh)),
    "wrapper": lambda torch, mesh: _wrapper(torch, False),
    "wrapper with another's address": lambda torch, mesh: _wrapper(torch, True),
    "FakeTensor": lambda torch, mesh: _fake(torch),
    "freed": lambda torch, mesh: _freed(torch, 0),
    "freed view": lambda torch, mesh: _freed(torch, 64),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("api", APIS)
def test_no_memory_is_an_error(api, case, torch, mesh, tmp_path):
    tensors = {"good": torch.ones(3), "bad": CASES[case](torch, mesh)}
    with pytest.raises(RuntimeError) as caught:
        APIS[api](torch, tensors, tmp_path)
    text = str(caught.value)
    assert "bad" in text and type(tensors["bad"]).__name__ in text
    if "DTensor" in case:
        assert "full_tensor()" in text and "FastSafetensorsWriter" in text
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("api", APIS)
def test_two_dtensors_do_not_share(api, torch, mesh, tmp_path):
    tensors = {name: _dtensor(torch, mesh) for name in ("first", "second")}
    with pytest.raises(RuntimeError, match="full_tensor"):
        APIS[api](torch, tensors, tmp_path)


@pytest.mark.parametrize("api", APIS)
def test_under_functional_transforms(api, torch, tmp_path):
    def save(x):
        APIS[api](torch, {"bad": x}, tmp_path)
        return x

    with pytest.raises(RuntimeError, match="bad"):
        torch.func.vmap(save)(torch.ones(2, 3))


@pytest.mark.parametrize("api", APIS)
def test_tensors_with_storage_are_saved(api, torch, tmp_path):
    class Plain(torch.Tensor):
        """A subclass with separate memory."""

    base = torch.arange(8.0)
    tensors = {"plain": torch.ones(2, 2).as_subclass(Plain), "view": base[4:],
               "parameter": torch.nn.Parameter(torch.ones(3)), "empty": torch.empty(0, 2),
               "scalar": torch.tensor(1.5)}
    APIS[api](torch, tensors, tmp_path)
    found = [p for p in tmp_path.rglob("*") if p.suffix != ".json" and p.is_file()]
    if found:
        loaded = fst.load_file(found[0])
        assert {n: t.tolist() for n, t in loaded.items()} == {
            n: t.tolist() for n, t in tensors.items()}


@pytest.mark.parametrize("save", [
    lambda rows: _core.serialize(None, rows),
    lambda rows: _core.Writer("never", rows),
])
def test_the_extension_refuses_address_zero(save):
    with pytest.raises(ValueError, match="w: .*address"):
        save([("w", "U8", [4], 0, 4)])


def test_the_extension_refuses_to_write_from_address_zero(tmp_path):
    writer = _core.Writer(tmp_path / "m", [("w", "U8", [4], None, 4)])
    with pytest.raises(ValueError, match="address"):
        writer.write(0, 0, 0, 4)
    writer.close()


def test_writer_in_a_reference_cycle_is_collected(tmp_path):
    """A writer whose progress function refers back to it is collected."""
    import gc
    import weakref

    class Owner:
        """Part of a reference cycle."""

    def make():
        owner = Owner()
        owner.writer = _core.Writer(tmp_path / "m", [("w", "U8", [4], None, 4)], owners=owner,
                                    progress=lambda *args: owner)
        return weakref.ref(owner)

    seen = make()
    gc.collect()
    assert seen() is None and list(tmp_path.iterdir()) == []


def test_empty_bytes_need_no_pointer(tmp_path):
    data = _core.serialize(None, [("w", "U8", [0, 3], 0, 0)])
    assert serialize.deserialize(data)[0][1]["shape"] == [0, 3]


def test_specs_need_a_data_pointer(tmp_path):
    spec = serialize.TensorSpec("uint8", [4], 0, 4)
    with pytest.raises(ValueError, match="address"):
        serialize.serialize({"w": spec})
    with pytest.raises(ValueError, match="address"):
        serialize.serialize_file({"w": spec}, tmp_path / "m")
    held = (ctypes.c_char * 4)(*b"abcd")
    spec = serialize.TensorSpec("uint8", [4], ctypes.addressof(held), 4)
    assert serialize.serialize({"w": spec}).endswith(b"abcd")
