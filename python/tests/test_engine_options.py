# SPDX-License-Identifier: Apache-2.0
"""Shared by the plug-ins for engines: options, errors, entry points, returned tensors."""

import importlib.metadata
import logging
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError  # noqa: E402
from fastsafetensors._engine_weights import (  # noqa: E402
    EngineOptions,
    expectation,
    iterate,
    split_options,
)
from fastsafetensors.lazy import LazyModel  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

LOGGER = logging.getLogger("engines")


def test_options_are_distinguished():
    ours, rest = split_options({"threads": 2, "memory": "2GiB", "num_threads": 3},
                               ("num_threads",))
    assert (ours.threads, ours.memory, rest) == (2, 2 << 30, {"num_threads": 3})
    assert split_options({}, ()) == (EngineOptions(), {})


@pytest.mark.parametrize("given", [
    {"treads": 1}, {"threads": -1}, {"threads": True}, {"threads": "2"}, {"memory": "much"},
    {"memory": -1}, {"memory": 1.5}, {"memory": "9" * 400 + "GiB"},
    {"mode": "fast"}, {"plan": True}, {"gds": "on"}, {"verify": 3}, {"public_key": 3},
    {"progress": "no"}, {"mode": []}, {"threads": 1 << 31}, {"verify": ""}, {"public_key": ""},
], ids=str)
def test_bad_options_are_named(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        split_options(given, ("num_threads",))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_engine(engine):
    code = (f"import sys; sys.modules[{engine!r}] = None; import fastsafetensors.{engine} as p\n"
            "try: p.register()\nexcept ImportError as e: print(e)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"needs {engine}" in done.stdout, done.stderr


def test_nothing_is_imported_without_need():
    code = ("import sys, fastsafetensors, fastsafetensors.vllm, fastsafetensors.sglang\n"
            "print([m for m in ('torch', 'vllm', 'sglang') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_entry_points():
    found = {(e.group, e.value) for e in importlib.metadata.distribution(
        "fastsafetensors").entry_points}
    assert ("vllm.general_plugins", "fastsafetensors.vllm:register") in found
    assert ("sglang.srt.plugins", "fastsafetensors.sglang:register") in found


def test_layers_of_other_stages_are_not_expected():
    class PPMissingLayer(torch.nn.Module):
        pass

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1), PPMissingLayer()])

    expects = expectation(torch.nn.ModuleDict({"model": Model()}))
    assert expects("model.layers.0.q") and not expects("language_model.layers.1.q")
    assert expects("model.layers.11.q") and expects("layers.0.mlp.1.q")
    assert expectation(None) is None and expectation(torch.nn.Linear(1, 1)) is None


@pytest.fixture
def path(tmp_path):
    save_file({f"layers.{i}.w": torch.full((8, 64), float(i)) for i in range(6)},
              tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def test_closing_line_reports_weights(path, caplog):
    with caplog.at_level(logging.INFO):
        for number, (name, tensor) in enumerate(iterate(
                [path], EngineOptions(mode="load", progress=False), LOGGER, device="cpu")):
            assert name == f"layers.{number}.w"
            assert torch.equal(torch.empty(4, 64).copy_(tensor[4:]), torch.full((4, 64), number))
    (line,) = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
    assert line.startswith("fastsafetensors: needed 0.0 MiB, read 0.0 MiB in")


def test_reload_reads_current_bytes(path):
    options = EngineOptions(mode="load", progress=False)
    for value in (1.0, 2.0):
        save_file({f"layers.{i}.w": torch.full((8, 64), value + i) for i in range(6)}, path)
        for number, (_, tensor) in enumerate(iterate([path], options, LOGGER, device="cpu")):
            assert torch.equal(tensor[2:].clone(), torch.full((6, 64), value + number))


def test_errors_name_the_file_before_a_tensor_is_used(path, tmp_path):
    options = EngineOptions(progress=False)
    with pytest.raises(FileNotFoundError, match="absent"):
        next(iterate([str(tmp_path / "absent")], options, LOGGER, device="cpu"))
    with open(path, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(SafetensorError, match="m.safetensors"):
        next(iterate([path], options, LOGGER, device="cpu"))
    with pytest.raises(FileNotFoundError, match="no.manifest"):
        listed = EngineOptions(verify=str(tmp_path / "no.manifest"))
        next(iterate([path], listed, LOGGER, device="cpu"))


@pytest.fixture
def read(monkeypatch):
    """Return (bytes needed, bytes read) of the loads that have ended."""
    seen = []
    close = LazyModel.close

    def closed(model):
        close(model)
        seen.append((model.bytes_needed, model.stats()["bytes_read"]))

    monkeypatch.setattr(LazyModel, "close", closed)
    return seen


SIZE = 64 << 10


@pytest.fixture
def mixture(tmp_path):
    """Six layers with eight experts each, and one layer of a draft model. Each tensor has 64
    KiB."""
    names = [f"model.layers.{i}.experts.{e}.w" for i in range(7) for e in range(8)]
    names += [f"model.layers.{i}.q" for i in range(7)]
    save_file({name: torch.full((128, 128), float(n)) for n, name in enumerate(names)},
              tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors"), {name: float(n) for n, name in enumerate(names)}


def numbers(name):
    """Return the layer and the expert of a name, or None for a name without a layer."""
    words = name.split(".")
    return int(words[2]), int(words[4]) if "experts" in words else None


@pytest.mark.parametrize("mode", ["load", "auto"])
def test_an_expert_may_have_several_slots(mixture, read, mode):
    """EPLB places expert 1 in two slots. Experts without a slot on this rank are not read."""
    path, values = mixture
    slots = {0: [0], 1: [1, 2], 5: [3]}
    for _ in range(2):
        held = torch.full((7, 4, 128, 128), -1.0)
        for name, tensor in iterate([path], EngineOptions(mode=mode, progress=False), LOGGER,
                                    device="cpu"):
            layer, expert = numbers(name)
            for slot in slots.get(expert, ()):
                held[layer, slot].copy_(tensor.narrow(0, 0, 128))
        for name, value in values.items():
            layer, expert = numbers(name)
            assert all(held[layer, slot].eq(value).all() for slot in slots.get(expert, ()))
        needed, came = read[-1]
        assert needed == 7 * 4 * SIZE and came <= 1.1 * needed


@pytest.mark.parametrize("first", [0, 4])
def test_weight_used_twice_is_read_once(mixture, read, first):
    """Expert 1 is copied to two parameters, and a part of it again after the complete tensor, with
    one read."""
    path, values = mixture
    for name, tensor in iterate([path], EngineOptions(mode="load", progress=False), LOGGER,
                                device="cpu"):
        if numbers(name)[1] != 1:
            continue
        held = torch.zeros(3, 128 - first, 128)
        for place in held[:2]:
            place.copy_(tensor.narrow(0, first, 128 - first))
        held[2, :8].copy_(tensor.narrow(0, 8, 8)) if first == 0 else None
        assert held[:2].eq(values[name]).all() and held[2, :8].eq(values[name] * (not first)).all()
        part = tensor.narrow(0, first, 128 - first)
        part.add_(1)  # the caller's copy; other callers get the file's values
        assert part.eq(values[name] + 1).all()
        assert tensor.narrow(0, first, 128 - first).clone().eq(values[name]).all()
    assert read[-1][1] == 7 * (SIZE - first * 512)


def test_drafter_and_model_read_their_own_weights(mixture, read):
    """Model and draft model share a file. Each skips the other's layers without an error."""
    path, values = mixture
    for is_drafter in (False, True, False):
        count = 0
        for name, tensor in iterate([path], EngineOptions(mode="load", progress=False), LOGGER,
                                    device="cpu",
                                    expects=lambda n: (numbers(n)[0] == 6) == is_drafter):
            if (numbers(name)[0] == 6) == is_drafter:
                assert tensor.clone().eq(values[name]).all()
                count += 1
        assert read[-1] == (count * SIZE, count * SIZE) and count == (9 if is_drafter else 54)


def test_dropped_weights_are_reloaded(path):
    """Weights dropped by vLLM's sleep level 2 are reloaded from changed files into the same
    parameters."""
    model = torch.nn.ParameterDict({f"layers_{i}_w": torch.zeros(8, 64) for i in range(6)})
    places = {name: parameter.data_ptr() for name, parameter in model.items()}
    for value in (0.0, 7.0):
        save_file({f"layers.{i}.w": torch.full((8, 64), value + i) for i in range(6)}, path)
        with torch.no_grad():
            for parameter in model.values():
                parameter.fill_(float("nan"))  # dropped
            kept = list(iterate([path], EngineOptions(mode="load", progress=False), LOGGER,
                                device="cpu"))
            for name, tensor in kept:  # vLLM copies them when a layer is complete
                torch.empty(8, 64, device="meta").copy_(tensor)
                model[name.replace(".", "_")].copy_(tensor)
        assert places == {name: parameter.data_ptr() for name, parameter in model.items()}
        assert all(model[f"layers_{i}_w"].eq(value + i).all() for i in range(6))
