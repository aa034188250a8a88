# SPDX-License-Identifier: Apache-2.0
"""load_model reads directly into the parameters' memory."""

import pytest

from fastsafetensors import _core, keep_memory, trim
from fastsafetensors.torch import load_file, load_model


@pytest.fixture
def net(torch):
    """A small network, and another one of the same shape."""

    def make():
        return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32),
                                   torch.nn.Linear(32, 8, bias=False))

    return make


@pytest.fixture
def saved(net, tmp_path):
    """(path, state) of a saved network."""
    from safetensors.torch import save_file

    state = net().state_dict()
    save_file(state, tmp_path / "m")
    return tmp_path / "m", state


def test_same_memory_no_buffers(net, saved, torch):
    path, state = saved
    model = net()
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    allocated = []
    original = _core.Model.load

    assert load_model(model, path) == (set(), [])
    after = model.state_dict()
    assert {name: t.data_ptr() for name, t in after.items()} == before
    assert all(torch.equal(after[n], state[n]) for n in state)
    items = [(n, t.data_ptr(), t.nbytes) for n, t in after.items() if t.numel()]
    loader = original(_core.Model(path), items, mode="load")
    loader.wait()
    allocated.append(loader.stats()["buffer_bytes"])
    assert allocated == [0]  # no second copy of the model


def test_model_dtype_takes_precedence(net, saved, torch):
    path, state = saved
    model = net().bfloat16()
    load_model(model, path)
    for name, tensor in model.state_dict().items():
        expected = state[name].bfloat16() if state[name].is_floating_point() else state[name]
        assert torch.equal(tensor, expected), name


def test_assign_from_meta(net, saved, torch):
    path, state = saved
    with torch.device("meta"):
        model = net()
    load_model(model, path, assign=True)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_strict_errors(net, saved, torch):
    path, _ = saved
    wider = torch.nn.Sequential(*net(), torch.nn.Linear(8, 8))
    words = 'Missing key\\(s\\) in state_dict: "3.bias", "3.weight"'
    with pytest.raises(RuntimeError, match=words):
        load_model(wider, path)
    assert load_model(wider, path, strict=False) == ({"3.bias", "3.weight"}, [])
    shorter = torch.nn.Sequential(*list(net())[:1])
    with pytest.raises(RuntimeError, match='Unexpected key\\(s\\) in state_dict: "1.bias"'):
        load_model(shorter, path)
    assert "2.weight" in load_model(shorter, path, strict=False)[1]
    other = torch.nn.Sequential(torch.nn.Linear(64, 33), *list(net())[1:])
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        load_model(other, path, strict=False)


def test_tied_and_awkward_parameters(tmp_path, torch):
    from safetensors.torch import save_model

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8, bias=False)
            self.b = torch.nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.turned = torch.nn.Parameter(torch.randn(6, 4).t())
            self.register_buffer("none", torch.empty(0))

    source, target = Tied(), Tied()
    save_model(source, tmp_path / "m")
    assert load_model(target, tmp_path / "m") == (set(), [])
    assert torch.equal(target.a.weight, source.a.weight) and target.b.weight is target.a.weight
    assert torch.equal(target.turned, source.turned) and not target.turned.is_contiguous()


def test_hooks_are_respected(net, saved, torch):
    path, state = saved
    model = net()
    seen = []
    model.register_load_state_dict_pre_hook(lambda module, state_dict, *rest: seen.append(1))
    load_model(model, path)
    assert seen and torch.equal(model[0].weight, state["0.weight"])


def test_destinations_are_checked(saved, torch):
    model = _core.Model(saved[0])
    target = torch.empty(32, 64)
    for wrong in (("0.weight", target.data_ptr(), 5), ("0.weight", 0, target.nbytes),
                  ("nope", target.data_ptr(), 4)):
        with pytest.raises((ValueError, _core.SafetensorError)):
            model.load([wrong])


def test_cached_memory_is_reused(tmp_path, torch):
    from safetensors.torch import save_file

    save_file({"a": torch.randn(1 << 20)}, tmp_path / "m")
    trim()
    keep_memory(64 << 20)
    try:
        first = load_file(tmp_path / "m", mode="load")["a"]
        address = first.data_ptr()
        del first
        second = load_file(tmp_path / "m", mode="load")["a"]
        assert second.data_ptr() == address
        del second
        assert trim() >= 4 << 20
        assert trim() == 0
    finally:
        keep_memory(0)


@pytest.mark.parametrize("assign", [False, True])
def test_rules_of_torch_and_of_the_reference(tmp_path, torch, assign):
    """A number may be saved with one dimension; a tied weight that is missing has one name."""
    from safetensors.torch import load_model as load_reference
    from safetensors.torch import save_file

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(4, 2)
            self.head = torch.nn.Linear(2, 4, bias=False)
            self.head.weight = self.emb.weight
            self.turned = torch.nn.Parameter(self.emb.weight.data.view(2, 4))
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

    save_file({"scale": torch.tensor([5.0])}, tmp_path / "m")
    ours, other = Model(), Model()
    missing, unexpected = load_model(ours, tmp_path / "m", strict=False, assign=assign)
    assert missing == load_reference(other, tmp_path / "m", strict=False)[0] == {"emb.weight"}
    assert unexpected == [] and ours.scale.shape == () and ours.scale == other.scale == 5
