# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors first used under torch's modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

ROWS, COLUMNS, LAYERS = 12, 8, 6
W = "layers.3.w"


def tensor(number: int) -> Any:
    return torch.arange(number, number + ROWS * COLUMNS * 1.0).reshape(ROWS, COLUMNS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({f"layers.{i}.w": tensor(i) for i in range(LAYERS)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def use_inference(t: Any) -> None:
    with torch.inference_mode():
        t.sum()


def use_fake(t: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        t + torch.ones(COLUMNS)


def use_trace(t: Any) -> None:
    torch.jit.trace(lambda x: x @ t, (torch.ones(ROWS),))


MODES: dict[str, Callable[[Any], Any]] = {
    "inference": use_inference,
    "fake": use_fake,
    "gradient": lambda t: torch.func.grad(lambda x: (x * t).sum())(torch.ones(COLUMNS)),
    "mapped": lambda t: torch.func.vmap(lambda x: x @ t)(torch.ones(2, ROWS)),
    "traced": use_trace,
}


@pytest.mark.parametrize("mode", ["auto", "load"])
@pytest.mark.parametrize("use", MODES, ids=str)
def test_tensors_read_under_modes_are_plain(path: Path, use: str, mode: str) -> None:
    """All threads share the tensor that was read, so it must also be usable outside of the mode."""
    model = LazyModel(path, mode=mode)
    first = model[W]
    MODES[use](first)
    for promise in (first, model[W], model["layers.4.w"]):
        weight = torch.ones(ROWS, requires_grad=True)
        (weight @ promise).sum().backward()
        expected = tensor(4 if promise is not first and promise._lazy.stored.name != W else 3)
        assert torch.equal(promise + 0, expected) and torch.equal(weight.grad, expected.sum(1))


@pytest.mark.parametrize("mode", ["auto", "load", "map"])
def test_arguments_that_are_lazy_tensors(tmp_path: Path, mode: str) -> None:
    """Functions that make views use the values of other arguments."""
    plain = {"a": torch.arange(24.0).view(6, 4), "start": torch.tensor(2),
             "cuts": torch.tensor([1, 4]), "like": torch.zeros(4, 6)}
    save_file(plain, tmp_path / "m.safetensors")
    for call in (lambda t: torch.narrow(t["a"], 0, t["start"], 3),
                 lambda t: torch.narrow(t["a"], 0, start=t["start"], length=3),
                 lambda t: t["a"].narrow(0, t["start"], 3),
                 lambda t: t["a"].view_as(t["like"]), lambda t: t["a"].reshape_as(t["like"])):
        lazy = LazyModel(tmp_path / "m.safetensors", mode=mode)
        assert torch.equal(call(lazy), call(plain))
    lazy = LazyModel(tmp_path / "m.safetensors", mode=mode)
    parts = torch.tensor_split(lazy["a"], lazy["cuts"])
    assert [*map(torch.Tensor.tolist, parts)] == [
        part.tolist() for part in torch.tensor_split(plain["a"], plain["cuts"])]
