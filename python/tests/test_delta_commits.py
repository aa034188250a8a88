# SPDX-License-Identifier: Apache-2.0
"""Commits of weight deltas to live tensors: interrupted, failing, to memory that has changed."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import _core, deltas  # noqa: E402
from fastsafetensors._deltas.delta_memory import Place  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402


@pytest.fixture
def striped(tmp_path):
    """(delta, old tensors, new tensors): every second tensor is a view that gets a copy."""
    old = {f"w{i}": torch.arange(12.0).view(3, 4) + i for i in range(6)}
    new = {name: value + 1 for name, value in old.items()}
    for name, state in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    deltas.make(tmp_path / "old", tmp_path / "new", tmp_path / "delta", version="1",
                base_version="0")
    live = {name: value.t().contiguous().t() if i % 2 else value.clone()
            for i, (name, value) in enumerate(old.items())}
    return deltas.Delta(tmp_path / "delta"), live, new


def raise_in(monkeypatch, calls, error):
    """Let calls of Place.finish(), counted from 1, raise an error."""
    finish, count = Place.finish, itertools.count(1)

    def failing(place):
        if next(count) in calls:
            raise error
        finish(place)

    monkeypatch.setattr(Place, "finish", failing)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_commit_completes(striped, monkeypatch, error):
    """The exception of a signal handler comes after all tensors are written."""
    delta, live, new = striped
    raise_in(monkeypatch, (2, 4), error("of the handler"))
    with delta.prepare(live) as change:
        with pytest.raises(error, match="of the handler"):
            change.commit()
        assert all(torch.equal(live[name], new[name]) for name in new)
        with pytest.raises(ValueError, match="already"):
            change.commit()


def test_a_signal_during_the_copy(striped, monkeypatch):
    """It arrives while the C library writes."""
    delta, live, new = striped
    commit = _core.delta_commit

    def signalled(change):
        commit(change)
        raise KeyboardInterrupt

    monkeypatch.setattr(_core, "delta_commit", signalled)
    change = delta.prepare(live)
    with pytest.raises(KeyboardInterrupt):
        change.commit()
    assert all(torch.equal(live[name], new[name]) for name in new if int(name[1]) % 2)
    monkeypatch.undo()


def test_a_tensor_that_cannot_be_written_is_written_by_a_second_call(striped, monkeypatch):
    delta, live, new = striped
    raise_in(monkeypatch, (2, 3), RuntimeError("out of memory"))
    with delta.prepare(live) as change:
        with pytest.raises(RuntimeError, match="out of memory"):
            change.commit()
        assert sum(torch.equal(live[name], new[name]) for name in new) == 5
        change.commit()
    assert all(torch.equal(live[name], new[name]) for name in new)


@pytest.mark.parametrize("how", ["freed", "moved", "grown"])
@pytest.mark.parametrize("name", ["w0", "w1"])
def test_memory_that_is_exchanged_after_prepare(striped, how, name):
    """Offloading and sleeping do that. Nothing is written."""
    delta, live, _ = striped
    old = {other: value.clone() for other, value in live.items()}
    with delta.prepare(live) as change:
        if how == "moved":
            live[name].data = live[name].data.clone()
        else:
            live[name].untyped_storage().resize_(0 if how == "freed" else 1 << 20)
        with pytest.raises(ValueError, match=f"{name}: the tensor or its memory was"):
            change.commit()
    assert all(torch.equal(live[other], old[other]) for other in old if other != name)


@pytest.mark.parametrize("how", ["parameter", "buffer", "assign", "meta", "deleted"])
def test_modules_whose_tensors_are_exchanged(tmp_path, how):
    """As by offloading, `.to()` of buffers, and load_state_dict(assign=True)."""
    def build(value):
        module = torch.nn.Linear(4, 3)
        module.register_buffer("scale", torch.full((3,), value))
        torch.nn.init.constant_(module.weight, value)
        return module

    old, live = build(1.0), build(1.0)
    live.load_state_dict(old.state_dict())
    new = {name: tensor + 1 for name, tensor in old.state_dict().items()}
    (tmp_path / "old").mkdir()
    save_file(old.state_dict(), tmp_path / "old/model.safetensors")
    deltas.make(tmp_path / "old", new, tmp_path / "delta", version="1", base_version="0")
    before = live.state_dict()
    with deltas.Delta(tmp_path / "delta").prepare(live) as change:
        if how == "parameter":
            live.weight = torch.nn.Parameter(live.weight.detach().clone())
        elif how == "buffer":
            live.scale = live.scale.clone()
        elif how == "assign":
            live.load_state_dict({k: v.clone() for k, v in before.items()}, assign=True)
        elif how == "meta":
            live.to("meta")
        else:
            del live.scale
        with pytest.raises(ValueError, match="was exchanged or freed after prepare"):
            change.commit()
    assert all(torch.equal(tensor, old.state_dict()[name]) for name, tensor in before.items())
    live = build(1.0)
    live.load_state_dict(old.state_dict())
    with deltas.Delta(tmp_path / "delta").prepare(live) as change:
        live(torch.ones(2, 4)).sum().backward()
        change.commit()
    assert all(torch.equal(tensor, new[name]) for name, tensor in live.state_dict().items())
