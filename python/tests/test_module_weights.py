# SPDX-License-Identifier: Apache-2.0
"""load_model and load_model_sharded: ties, views, buffers, meta devices, DTensors, hooks."""

import contextlib

import pytest

from fastsafetensors._ranks.rank_files import DescribedModel
from fastsafetensors.sharded import load_model_sharded, load_sharded
from fastsafetensors.torch import load_model, save_file, save_model


@pytest.fixture
def tied(torch):
    """A class of modules with tied weights, as language models have them."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Embedding(6, 4)
            self.b = torch.nn.Linear(4, 6, bias=False)
            self.b.weight = self.a.weight

    return Tied


def on_meta(torch, make):
    """Make a module on the meta device, with the same ties as on other devices."""
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_assign_keeps_ties(name, place, tied, torch, tmp_path):
    values = torch.randn(6, 4)
    save_file({name: values}, tmp_path / "m")
    model = tied() if place == "cpu" else on_meta(torch, tied)
    assert load_model(model, tmp_path / "m", assign=True) == (set(), [])
    assert model.a.weight is model.b.weight and torch.equal(model.b.weight, values)
    assert isinstance(model.a.weight, torch.nn.Parameter)


def test_tied_through_a_shared_module(torch, tmp_path):
    def make():
        part = torch.nn.Linear(3, 3)
        return torch.nn.ModuleDict({"x": part, "y": torch.nn.Sequential(part)})

    source, target = make(), on_meta(torch, make)
    save_model(source, tmp_path / "m")
    assert load_model(target, tmp_path / "m", assign=True) == (set(), [])
    assert target["x"] is target["y"][0]
    assert torch.equal(target["y"][0].weight, source["x"].weight)


def test_meta_tensors_of_one_shape_are_not_tied(torch, tmp_path):
    def make():
        return torch.nn.ModuleDict({n: torch.nn.Linear(4, 4, bias=False) for n in "ab"})

    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "m")
    with pytest.raises(RuntimeError, match='Missing key\\(s\\) in state_dict: "b.weight"'):
        load_model(on_meta(torch, make), tmp_path / "m", assign=True)
    missing, _ = load_model(on_meta(torch, make), tmp_path / "m", strict=False, assign=True)
    assert missing == {"b.weight"}


def test_meta_without_assign_is_an_error(torch, tmp_path):
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "m")
    model = on_meta(torch, lambda: torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="assign=True"):
        load_model(model, tmp_path / "m")


def _with_view(torch, make_view):
    class Viewed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            full = torch.randn(6, 4)
            self.register_buffer("full", full)
            self.register_buffer("view", make_view(full))

    return Viewed


VIEWS = {"rows": lambda f: f[:4], "transposed": lambda f: f.t(), "columns": lambda f: f[:, 1:3],
         "row": lambda f: f[2], "all": lambda f: f.view(-1), "reversed names": lambda f: f[3:]}


@pytest.mark.parametrize("cut", VIEWS)
@pytest.mark.parametrize("assign", [False, True])
def test_views_of_a_buffer(cut, assign, torch, tmp_path):
    make = _with_view(torch, VIEWS[cut])
    source, target = make(), on_meta(torch, make) if assign else make()
    save_model(source, tmp_path / "m")
    assert load_model(target, tmp_path / "m", assign=assign) == (set(), [])
    for name in ("full", "view"):
        assert torch.equal(getattr(target, name), getattr(source, name)), name
    target.full.zero_()
    assert not target.view.any()  # it still is a view


@pytest.mark.parametrize("theirs", ["save", "load"])
def test_views_with_the_reference(theirs, torch, tmp_path):
    import safetensors.torch as reference

    make = _with_view(torch, VIEWS["rows"])
    source, target = make(), make()
    (reference.save_model if theirs == "save" else save_model)(source, tmp_path / "m")
    load = reference.load_model if theirs == "load" else load_model
    assert load(target, tmp_path / "m") == (set(), [])
    assert torch.equal(target.view, source.view) and torch.equal(target.full, source.full)


def test_a_parameter_that_is_another_one_transposed(torch, tmp_path):
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = torch.nn.Parameter(torch.randn(3, 4))
            self.dec = torch.nn.Parameter(self.enc.data.t())

    source, target = Turned(), Turned()
    save_model(source, tmp_path / "m")
    assert load_model(target, tmp_path / "m") == (set(), [])
    assert torch.equal(target.enc, source.enc) and torch.equal(target.dec, source.enc.t())
    blank = on_meta(torch, Turned)
    assert load_model(blank, tmp_path / "m", assign=True) == (set(), [])
    assert torch.equal(blank.enc, source.enc) and torch.equal(blank.dec, source.enc.t())


def test_view_does_not_replace_its_base(torch, tmp_path):
    make = _with_view(torch, VIEWS["rows"])
    save_file({"view": torch.ones(4, 4)}, tmp_path / "m")
    for assign in (False, True):
        with pytest.raises(RuntimeError, match='Missing key.*"full"'):
            load_model(make(), tmp_path / "m", assign=assign)


def test_tied_names_with_different_values_stay_apart(tied, torch, tmp_path):
    size = 1 << 20  # large enough for several threads

    def make():
        model = tied()
        model.a.weight = model.b.weight = torch.nn.Parameter(torch.zeros(size))
        return model

    values = {"a.weight": torch.full((size,), 1.0), "b.weight": torch.full((size,), 2.0)}
    save_file(values, tmp_path / "m")
    for assign in (False, True):
        model = make()
        load_model(model, tmp_path / "m", assign=assign)
        assert model.b.weight is model.a.weight
        # the value of the last name, as in torch's loop
        assert model.a.weight.unique().tolist() == [2.0]


def test_hook_state_is_not_a_destination(torch, tmp_path):
    model = torch.nn.Linear(3, 3)
    copies = lambda module, state, *rest: {n: t.clone() for n, t in state.items()}  # noqa: E731
    model._register_state_dict_hook(copies)
    values = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    save_file(values, tmp_path / "m")
    assert load_model(model, tmp_path / "m") == (set(), [])
    assert all(torch.equal(getattr(model, n), t) for n, t in values.items())


def test_names_added_by_hooks_are_not_missing(torch, tmp_path):
    model = torch.nn.Linear(3, 3)

    def rename(module, state, prefix, *rest):
        state["weight"] = state.pop("old")

    model.register_load_state_dict_pre_hook(rename)
    save_file({"old": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "m")
    for assign in (False, True):
        assert load_model(model, tmp_path / "m", assign=assign) == (set(), [])
        assert torch.equal(model.weight, torch.ones(3, 3))


def test_extra_state_is_missing_as_torch_says(torch, tmp_path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"step": 1}

        def set_extra_state(self, state):
            raise AssertionError

    model = Extra(2, 2)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "m")
    assert load_model(model, tmp_path / "m", strict=False) == ({"_extra_state"}, [])
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_parameter_without_storage_is_copied_to(torch, tmp_path):
    """Parameters of a custom class are filled by torch."""

    class Own(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Own(model.weight.data)
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    save_file(values, tmp_path / "m")
    load_model(model, tmp_path / "m")
    assert torch.equal(model.weight.data, values["weight"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_dtensor_parameters_take_their_part(assign, place, mesh, torch, tmp_path):
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

    def shard(name, module, mesh):
        for key, value in list(module.named_parameters(recurse=False)):
            spread = torch.nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)]))
            module.register_parameter(key, spread)

    with torch.device(place):
        model = distribute_module(torch.nn.Sequential(torch.nn.Linear(4, 6),
                                                      torch.nn.BatchNorm1d(6)), mesh, shard)
    values = {n: torch.randn(t.shape) if t.is_floating_point() else torch.tensor(3)
              for n, t in model.state_dict().items()}
    save_file(values, tmp_path / "m")
    if place == "meta" and not assign:
        with pytest.raises(RuntimeError, match="assign=True"):
            load_model(model, tmp_path / "m")
        return
    assert load_model(model, tmp_path / "m", assign=assign) == (set(), [])
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), values[name]), name
    assert model[0].weight.placements == (Shard(0),)


def test_sharded_load_of_ties_and_buffers(mesh, tied, torch, tmp_path):
    from torch.distributed.tensor import DTensor, Shard

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = tied()
            self.norm = torch.nn.BatchNorm1d(3)
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    source = Model()
    torch.nn.init.normal_(source.norm.running_mean)
    source.norm.num_batches_tracked += 5
    save_model(source, tmp_path / "m")
    for make in (Model, lambda: on_meta(torch, Model)):
        target = make()
        result = load_model_sharded(target, mesh, [Shard(0)], filename=tmp_path / "m")
        assert target.body.b.weight is target.body.a.weight
        assert "norm.running_mean" in result and "scratch" not in result
        for name, tensor in source.state_dict().items():
            found = target.state_dict()[name]
            assert isinstance(found, DTensor) and torch.equal(found.full_tensor(), tensor), name


@pytest.mark.parametrize("lacking", ["norm.running_mean", "norm.num_batches_tracked", "w.weight"])
def test_sharded_load_names_missing_tensors(lacking, mesh, torch, tmp_path):
    model = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(3), "w": torch.nn.Linear(3, 3)})
    state = {n: t for n, t in model.state_dict().items() if n != lacking}
    save_file(state, tmp_path / "m")
    with pytest.raises(KeyError, match=lacking):
        load_model_sharded(model, mesh, filename=tmp_path / "m")


def test_sharded_load_of_another_shape_reads_nothing(mesh, torch, tmp_path):
    save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "m")
    before = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load_model_sharded(before, mesh, filename=tmp_path / "m")
    assert type(before.weight) is torch.nn.Parameter


def test_packed_floats_in_parts(mesh, torch, tmp_path):
    """Sizes of 4-bit floats are right, although torch counts pairs and the format single
    elements."""
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no 4-bit floats")
    from torch.distributed.tensor import Shard

    values = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    save_file({"w": values.view(torch.float4_e2m1fn_x2)}, tmp_path / "m")
    for dim in (0, 1, None):
        part = load_sharded(tmp_path / "m", {"w": dim})["w"]
        assert part.shape == (4, 8) and torch.equal(part.view(torch.uint8), values)
    whole = load_model_sharded(tmp_path / "m", mesh, {"w": [Shard(1)]})["w"]
    assert whole.shape == (4, 8)


def test_measured_speeds_are_agreed_on(monkeypatch, torch):
    """A rank with speeds from an earlier group measures again together with new ranks."""
    import fastsafetensors.sharded as sharded

    class Group:
        rounds = []

        def exchange(self, message, what):
            self.rounds.append(what)
            return [message, bytes([0])]  # the other rank has not measured

        def exchange_texts(self, text, what):
            self.rounds.append(what)
            return [text, text]

        def size(self):
            return 2

        def rank(self):
            return 0

    group = Group()
    monkeypatch.setattr(sharded._Load, "_measure_storage", lambda self: 2.0)
    monkeypatch.setattr(sharded._Load, "_measure_link", lambda self: 3.0)
    monkeypatch.setitem(sharded._measured, id(group), sharded.Speeds(1.0, 1.0))
    with contextlib.closing(DescribedModel([])) as model:
        load = sharded._Load(model, {}, group, "auto", [0, 1])
        assert load.speeds() == sharded.Speeds(2.0, 3.0)
    assert group.rounds == ["who has measured the speeds", "the speeds measured"]


def test_graphs_notice_new_weights(tmp_path, torch):
    """Loading weights between forward and backward is an error of autograd, like any change in
    place."""
    from fastsafetensors.torch import load_model, save_model

    path = tmp_path / "m.safetensors"
    module = torch.nn.Linear(3, 3)
    save_model(module, path)
    result = module(torch.ones(1, 3, requires_grad=True)).sum()
    load_model(module, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
