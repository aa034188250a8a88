# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager: which arguments, states and names of folders it takes."""

from __future__ import annotations

import os
import pathlib
import shutil
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors.training import RNG, CheckpointManager  # noqa: E402


def test_only_exact_names_are_checkpoints(tmp_path: pathlib.Path) -> None:
    """Copies with other spellings of a step are neither counted nor deleted."""
    state = {"model": torch.nn.Linear(2, 2)}
    others = ["step-005", "step-\uff15", "step-5 "]
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(5, state)
        manager.wait()
        for name in others:
            shutil.copytree(tmp_path / "step-5", tmp_path / name)
        assert [one.path.name for one in manager.checkpoints()] == ["step-5"]
        manager.save(6, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "step-6"])


@pytest.mark.parametrize("state", [None, [("model", 1)], 3])
def test_a_state_is_a_mapping(tmp_path: pathlib.Path, state: Any) -> None:
    """save() and resume() name the argument, also where there is nothing to do."""
    with CheckpointManager(tmp_path, every=2) as manager:
        for call in (manager.save, lambda _, given: manager.resume(given)):
            with pytest.raises(TypeError, match="state must be a dict .*, not a"):
                call(1, state)


def test_resume_checks_everything_before_it_changes_anything(tmp_path: pathlib.Path) -> None:
    """A state that can't be loaded is an error with its name, and the others are unchanged."""
    saved, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved, "extra": {"epoch": 3}, "number": 7})
        manager.wait()
        for name, other, words in (
            ("number", torch.nn.Linear(1, 1), "'number' is a int, and a Linear loads a dict"),
            ("number", RNG, "'number' is a int"),
        ):
            with pytest.raises(TypeError, match=words):
                manager.resume({"model": model, name: other})
            assert torch.equal(model.weight, before)
        assert manager.resume({"model": model}) == 1
        assert torch.equal(model.weight, saved.weight)


def test_plain_values_are_resumed(tmp_path: pathlib.Path) -> None:
    """Dicts, lists and tensors are changed in place, other values in the dict that was given."""
    counters, losses, ema = {"tokens": 5}, [1.0, 2.0], torch.ones(3)
    state = {"counters": counters, "losses": losses, "ema": ema, "epoch": 3, "name": "run",
             "scale": None, "shape": torch.zeros(2), "kind": 1}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.wait()
        counters["tokens"], counters["new"] = 9, 1
        losses.append(3.0)
        ema.zero_()
        state.update(epoch=4, name="other", scale=2.0, shape=None, kind={})
        assert manager.resume(state) == 1
        with pytest.raises(TypeError, match=r"state\['epoch'\] is a int, and a mappingproxy can't"):
            manager.resume(types.MappingProxyType({"losses": losses, "epoch": 4}))
        assert manager.resume(types.MappingProxyType({"losses": losses})) == 1
    assert state["counters"] is counters and counters == {"tokens": 5}
    assert state["losses"] is losses and losses == [1.0, 2.0]
    assert state["ema"] is ema and ema.eq(1).all()
    assert (state["epoch"], state["name"], state["scale"], state["kind"]) == (3, "run", None, 1)
    assert torch.equal(state["shape"], torch.zeros(2))


def test_a_folder_of_bytes_and_large_steps(tmp_path: pathlib.Path) -> None:
    """Paths may be bytes, and numbers may be NumPy's."""
    numpy = pytest.importorskip("numpy")
    with CheckpointManager(os.fsencode(tmp_path), every=numpy.int64(2)) as manager:
        assert manager.folder == tmp_path
        for step in (numpy.int64(4), 10**30):
            assert manager.save(step, {"number": 1}) is not None
        manager.wait()
        assert [one.step for one in manager.checkpoints()] == [4, 10**30]
