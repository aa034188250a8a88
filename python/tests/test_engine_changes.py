# SPDX-License-Identifier: Apache-2.0
"""Files that change while an engine loads weights: the errors on its ranks."""

import logging
import os
import threading

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError, _engine_weights, write_manifest  # noqa: E402
from fastsafetensors._engine_weights import EngineOptions, begun, iterate  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

LOGGER = logging.getLogger("test")
COUNT, AT = 12, 4
MODES = ["auto", "load", "map"]


def write(path, value):
    save_file({f"layers.{i}.w": torch.full((64, 512), value + i) for i in range(COUNT)}, path)


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "m.safetensors", 0.0)
    write(tmp_path / "new.safetensors", 1000.0)
    return tmp_path / "m.safetensors"


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is rank 1 of 2."""
    import torch.distributed as distributed

    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)


def take(path, mode, change):
    """Read the lower halves of all tensors. Call `change` before one of them is used."""
    found = {}
    options = EngineOptions(mode=mode, progress=False)
    for number, (name, tensor) in enumerate(iterate([str(path)], options, LOGGER, device="cpu")):
        if number == AT:
            change()
        found[name] = torch.empty(32, 512).copy_(tensor.narrow(0, 32, 32))
    return found


def replace(path):
    os.replace(path.with_name("new.safetensors"), path)


def remove(path):
    path.unlink()


def rewrite(path):
    os.utime(path, (1, 1))  # the clock of a file system may not advance
    with open(path, "r+b") as file:
        file.write(path.with_name("new.safetensors").read_bytes())


def truncate(path):
    os.truncate(path, path.stat().st_size // 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [replace, remove])
def test_replaced_file_is_read_as_opened(path, mode, change):
    found = take(path, mode, lambda: change(path))
    assert [float(found[f"layers.{i}.w"].unique()) for i in range(COUNT)] == list(range(COUNT))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [rewrite, truncate])
def test_overwritten_file_is_an_error_of_this_rank(path, mode, change, second_of_two):
    with pytest.raises(SafetensorError, match=r"m\.safetensors.*rank 1 of 2$"):
        take(path, mode, lambda: change(path))


@pytest.mark.parametrize("mode", MODES)
def test_unreadable_file_is_named(path, mode, second_of_two):
    options = EngineOptions(mode=mode, progress=False, plan="off")
    weights = iterate([str(path)], options, LOGGER, device="cpu")
    _, _, (name, tensor) = (next(weights) for _ in range(3))
    truncate(path)
    for _ in range(2):  # each access raises, not only the first
        with pytest.raises(SafetensorError, match=rf"`{name}`.*rank 1 of 2$") as caught:
            tensor.sum()
        assert str(caught.value).count("rank 1") == str(caught.value).count(f"`{name}`") == 1
        assert caught.value.tensor == name


def test_invalid_files_are_reported_with_the_rank(path, second_of_two):
    options = EngineOptions(progress=False)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SafetensorError, match=r"m\.safetensors.*rank 1 of 2$"):
        next(iterate([str(path)], options, LOGGER, device="cpu"))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"rank 1 of 2.*m\.safetensors"):
        next(iterate([str(path)], options, LOGGER, device="cpu"))


@pytest.fixture
def verified(path, monkeypatch):
    """Options of verified loads, in a process that has loaded a model before."""
    write_manifest(path)
    monkeypatch.setattr(_engine_weights, "_has_loaded", threading.Event())
    options = EngineOptions(verify=True, progress=False)
    list(iterate([str(path)], options, LOGGER, device="cpu"))
    return options


@pytest.mark.parametrize("at", [-5, -3 * 64 * 512 * 4])
def test_a_verified_reload_fails_before_the_first_weight(path, verified, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.with_name("changed").write_bytes(content)
    os.replace(path.with_name("changed"), path)
    with pytest.raises(SafetensorError, match=r"m\.safetensors"):
        next(iterate([str(path)], verified, LOGGER, device="cpu"))


def test_a_verified_reload_loads_the_files_that_were_verified(path, verified):
    weights = iterate([str(path)], verified, LOGGER, device="cpu")
    first = [next(weights)]
    replace(path)  # the new file has no manifest
    found = {name: tensor.clone() for name, tensor in [*first, *weights]}
    assert [float(found[f"layers.{i}.w"].unique()) for i in range(COUNT)] == list(range(COUNT))


def test_the_first_load_reads_every_byte_once(path, monkeypatch):
    monkeypatch.setattr(_engine_weights, "_has_loaded", threading.Event())
    monkeypatch.setattr(_engine_weights, "_verify_all", lambda *_: pytest.fail("read twice"))
    write_manifest(path)
    options = EngineOptions(verify=True, progress=False)
    assert len(list(iterate([str(path)], options, LOGGER, device="cpu"))) == COUNT


def descriptors_of(path):
    """Open descriptors of this process that name the file."""
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for name in names if os.path.exists(name) and os.path.samefile(name, path)]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_iteration_that_is_left_early_can_be_closed(path, taken):
    weights = begun(iterate([str(path)], EngineOptions(progress=False), LOGGER, device="cpu"))
    for _ in range(taken):
        next(weights)
    assert descriptors_of(path)
    weights.close()
    assert not descriptors_of(path)
    assert list(weights) == []
