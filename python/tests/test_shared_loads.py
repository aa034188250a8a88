# SPDX-License-Identifier: Apache-2.0
"""share="node": processes of one node read every byte once and hold it once."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy
import pytest
from conftest import zstd_or_skip
from web_server import skip_without_libcurl, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

COUNT, BYTES = 12, 1 << 20
TOTAL = COUNT * BYTES

PROGRAM = """
import json, sys
from fastsafetensors import numpy
from fastsafetensors._core import Model
import fastsafetensors._loading.load as load
stats = {}
close = load.close_load
def keep(loader):
    stats.update(loader.stats())
    close(loader)
load.close_load = keep
sys.stdin.readline()
tensors = numpy.load_file(sys.argv[1], share="node", **json.loads(sys.argv[2]))
sums = {name: int(value.view("uint8").astype("uint64").sum()) for name, value in tensors.items()}
print(json.dumps({"sums": sums, **stats}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of segments of a test."""
    path = tmp_path / "segments"
    monkeypatch.setenv("FASTSAFETENSORS_SHARE_DIR", str(path))
    return path


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 12 MiB of float32."""
    random = numpy.random.default_rng(3)
    tensors = {f"t{i}": random.standard_normal(BYTES // 4).astype("float32") for i in range(COUNT)}
    fst_numpy.save_file(tensors, tmp_path / "model.safetensors", manifest=True)
    return tmp_path / "model.safetensors"


def segments(folder: pathlib.Path) -> list[str]:
    """Names of the segments in a folder."""
    return [p.name for p in folder.iterdir() if len(p.name) == 32] if folder.exists() else []


def load_in_processes(path: Any, count: int, **options: Any) -> list[dict[str, Any]]:
    """Load in several processes at the same time, which hold their tensors until all have them."""
    command = [sys.executable, "-c", PROGRAM, str(path), json.dumps(options)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(count)]
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    results = [json.loads(child.stdout.readline()) for child in children]
    for child in children:
        child.communicate("\n", timeout=60)
        assert child.returncode == 0
    return results


@pytest.mark.parametrize("options", [{"mode": "load"}, {"dtype": "F16"}, {"verify": True}],
                         ids=["owned", "converted", "verified"])
def test_processes_read_every_byte_once(
    path: pathlib.Path, folder: pathlib.Path, options: dict[str, Any]
) -> None:
    """Reads of all processes add up to the model, and each has the right bytes."""
    right = fst_numpy.load_file(path, **options)
    sums = {name: int(value.view("uint8").astype("uint64").sum())
            for name, value in right.items()}
    results = load_in_processes(path, 4, **options)
    for result in results:
        assert result["sums"] == sums
        assert "in memory that the node's processes share" in result["reason"]
        assert result["bytes_read"] + result["shared_bytes"] >= TOTAL
    assert TOTAL <= sum(result["bytes_read"] for result in results) <= TOTAL * 1.05
    assert not segments(folder)


def test_compressed_files_are_decompressed_once(
    tmp_path: pathlib.Path, folder: pathlib.Path
) -> None:
    """Processes that load a compressed file share the result."""
    zstd_or_skip()
    tensors = {f"t{i}": numpy.arange(BYTES // 4, dtype="float32") + i for i in range(COUNT)}
    fst_numpy.save_file(tensors, tmp_path / "packed.safetensors", compress=True)
    results = load_in_processes(tmp_path / "packed.safetensors", 3, mode="load")
    assert sum(result["decoded_bytes"] for result in results) <= TOTAL * 1.05
    sums = {name: int(value.view("uint8").astype("uint64").sum())
            for name, value in tensors.items()}
    assert all(result["sums"] == sums for result in results)


def test_urls_are_requested_once(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Processes that load a URL without a disk cache share the bytes; a new version is its own."""
    skip_without_libcurl()
    with web_server(path.parent) as server:
        url = f"{server.url}{path.name}"
        results = load_in_processes(url, 3, mode="load")
        assert sum(result["bytes_read"] for result in results) <= TOTAL * 1.05
        assert all(result["sums"] == results[0]["sums"] for result in results)
        kept = fst_numpy.load_file(url, mode="load", share="node")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with contextlib.closing(Model(url)) as model:
            loader = model.load(None, mode="load", share="node")
            loader.wait()
            assert loader.stats()["shared_bytes"] == 0
            loader.close()
        assert len(kept) == COUNT


def test_a_restart_maps_what_is_there(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Within the grace period a new process reads nothing."""
    first = load_in_processes(path, 1, mode="load", share_grace=100)[0]
    assert first["bytes_read"] == TOTAL
    second = load_in_processes(path, 1, mode="load", share_grace=100)[0]
    assert second["bytes_read"] == 0 and second["shared_bytes"] == TOTAL
    assert second["sums"] == first["sums"]
    assert len(segments(folder)) == 1


def test_stores_stay_in_the_process(path: pathlib.Path, folder: pathlib.Path) -> None:
    """An array that is written differs from the same array of another load."""
    first = fst_numpy.load_file(path, mode="load", share="node")
    second = fst_numpy.load_file(path, mode="load", share="node")
    right = second["t3"].copy()
    first["t3"][:] = 7
    assert (second["t3"] == right).all()
    with fst_numpy.open_stream(path, dtype="float16", share="node") as stream:
        assert all((value == second[name].astype("float16")).all() for name, value in stream)
    del first, second
    assert not segments(folder)


KEPT = """
import ctypes, os, sys
from fastsafetensors import numpy
for array in numpy.load_file(sys.argv[1], mode="load", share="node").values():
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
assert len(os.listdir(os.environ["FASTSAFETENSORS_SHARE_DIR"])) == 2
"""


def test_a_process_that_frees_nothing_leaves_nothing(
    path: pathlib.Path, folder: pathlib.Path
) -> None:
    """The segment is removed when the process ends, although its arrays are never freed."""
    subprocess.run([sys.executable, "-c", KEPT, str(path)], check=True, timeout=60)
    assert not segments(folder)


def test_torch_loads_share(path: pathlib.Path, folder: pathlib.Path, torch: Any) -> None:
    """load_file, open_stream and load_model(assign=True) take share."""
    from fastsafetensors import torch as fst_torch

    half = fst_torch.load_file(path, dtype=torch.bfloat16, share="node", share_grace=0)
    assert len(segments(folder)) == 1
    whole = fst_torch.load_file(path)
    for name, value in fst_torch.open_stream(path, dtype=torch.bfloat16, share="node"):
        assert torch.equal(value, half[name]) and torch.equal(value, whole[name].bfloat16())
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty(0)) for name in whole})
    for name in whole:
        module[name] = torch.nn.Parameter(torch.empty(BYTES // 4, device="meta"))
    fst_torch.load_model(module, path, assign=True, mode="load", share="node")
    assert len(segments(folder)) == 2
    assert all(torch.equal(module[name], whole[name]) for name in whole)
    del half, value, module
    assert not segments(folder)


def test_arguments_without_effect_are_refused(path: pathlib.Path, torch: Any) -> None:
    """Each error has the parameter's name and what to do."""
    from fastsafetensors import torch as fst_torch

    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            fst_torch.load_file(path, **options)

    refused("unknown share 'all'; expected one of: off, node", share="all")
    refused("share_grace has no effect without share", share_grace=5)
    refused("share_grace must be 0 to", share="node", share_grace=-1)
    refused("tensors on the CPU that are not pinned", share="node", pin_memory=True, mode="load")
    refused("share has no effect with device", share="node", device="meta")
    with pytest.raises(ValueError, match="share has no effect without assign"):
        fst_torch.load_model(torch.nn.Linear(2, 2), path, share="node")
    with pytest.raises(ValueError, match="a budget has no effect on shared memory"):
        fst_torch.open_stream(path, share="node", memory="64MiB")


def test_command_says_nothing_of_bytes_that_were_converted_before(
    path: pathlib.Path, folder: pathlib.Path, command: str
) -> None:
    words = [command, "load", "--share", "node", "--share-grace", "60", "--dtype", "BF16"]
    for _ in range(2):
        done = subprocess.run([*words, str(path)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
    assert len(segments(folder)) == 1


def test_command_lists_pins_and_drops(
    path: pathlib.Path, folder: pathlib.Path, command: str
) -> None:
    """`load --share node`, then `cache list`, `pin`, `unpin` and `drop`."""

    def run(*words: str, code: int = 0) -> Any:
        done = subprocess.run([command, *words, "--json"], capture_output=True, text=True)
        assert done.returncode == code, done
        return json.loads(done.stdout)

    load = ("load", "--mode", "load", "--share", "node", "--share-grace", "60", str(path))
    assert run(*load)["bytes_read"] == TOTAL
    assert run(*load)["shared_bytes"] == TOTAL
    listed = run("cache", "list")
    (segment,) = listed["segments"]
    assert segment["label"] == str(path) and segment["grace_s"] == 60
    assert segment["complete"] and not segment["pinned"] and not segment["in_use"]
    assert listed["memory_bytes"] >= TOTAL
    assert run("cache", "pin", segment["name"][:8]) == {"pinned": True}
    assert run("cache")["segments"][0]["pinned"]
    assert run("cache", "unpin", segment["name"]) == {"pinned": False}
    run("cache", "drop", "zz", code=2)
    run("cache", "drop", code=3)
    assert run("cache", "drop", "all", "--share-dir", str(folder))["dropped"] == 1
    assert not segments(folder) and not run("cache")["segments"]
