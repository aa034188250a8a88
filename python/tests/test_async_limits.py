# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves of sets to a store, by another process, and within a budget of memory."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import threading

import pytest
from object_store import KEY, SECRET, failure, object_store
from web_server import Answer, Request

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError, remote  # noqa: E402
from fastsafetensors.async_save import SaveHandle  # noqa: E402
from fastsafetensors.fast_loading import (  # noqa: E402
    load_safetensors_sharded,
    save_safetensors_sharded_async,
)
from fastsafetensors.torch import load_file, save_file_async  # noqa: E402

MIB = 1 << 20


def make(value: float) -> dict[str, torch.Tensor]:
    """Make tensors of 12 MB, for files of at most 5 MB."""
    return {f"w{i}": torch.full((1_000_000,), value + i) for i in range(3)}


def is_state(found: dict[str, torch.Tensor], value: float) -> bool:
    """Whether all tensors are those of make()."""
    return found.keys() == make(value).keys() and all(
        bool(tensor.eq(value + i).all()) for i, tensor in enumerate(found.values()))


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_a_set_at_a_store(stage: str) -> None:
    """It has the state at the call. A save that fails or is cancelled leaves the old set, and no
    unfinished upload."""
    folder = "s3://bucket/set/"
    with object_store(keys={KEY: SECRET}) as server:
        remote.configure(endpoint=server.url, access_key=KEY, secret_key=SECRET, retry_base_ms=2)
        tensors = make(1.0)
        handle = save_safetensors_sharded_async(tensors, folder, "5MB", stage=stage)
        handle.before_step()
        for tensor in tensors.values():
            tensor.zero_()
        handle.wait()
        assert is_state(load_safetensors_sharded(folder), 1.0)

        def refuse(request: Request) -> Answer | None:
            is_second = "00002-of" in request.path and request.method in ("PUT", "POST")
            return failure("403 Forbidden", "No") if is_second else None

        server.refuse = refuse
        handle = save_safetensors_sharded_async(make(2.0), folder, "5MB", stage=stage)
        assert isinstance(handle.exception(), PermissionError)
        server.refuse = lambda request: None
        assert is_state(load_safetensors_sharded(folder), 1.0)
        for _ in range(10):
            handle = save_safetensors_sharded_async(make(3.0), folder, "5MB", stage=stage)
            was_cancelled = handle.cancel()
            assert was_cancelled or handle.exception() is None
            value = 1.0 if was_cancelled else 3.0
            assert is_state(load_safetensors_sharded(folder), value)
            if not was_cancelled:
                break
        assert not server.uploads


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("is_set", [True, False])
def test_a_cancellation_while_the_store_answers(is_set: bool) -> None:
    """The files of a set have names of their own, so the old set stays. A single object may have
    been replaced, and the error says so."""
    is_held, begun, ended = [False], threading.Event(), threading.Event()

    def hold(request: Request, answer: Answer) -> Answer:
        if is_held[0] and request.method == "PUT":
            begun.set()
            ended.wait(60)
        return answer

    def save(value: float) -> SaveHandle:
        return (save_safetensors_sharded_async(make(value), "s3://bucket/set/", "5MB") if is_set
                else save_file_async({"w0": torch.tensor([value])}, "s3://bucket/one"))

    with object_store(hold, keys={KEY: SECRET}) as server:
        remote.configure(endpoint=server.url, access_key=KEY, secret_key=SECRET, retry_base_ms=2)
        save(1.0).wait()
        is_held[0] = True
        handle = save(2.0)
        assert begun.wait(60)
        assert handle.cancel() == is_set
        ended.set()
        if is_set:
            assert is_state(load_safetensors_sharded("s3://bucket/set/"), 1.0)
        else:
            assert "it is unknown whether the object was stored" in str(handle.exception())
            assert load_file("s3://bucket/one")["w0"] == 2.0


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_memory_stays_in_the_budget(tmp_path: pathlib.Path, stage: str) -> None:
    """Of a state of 400 MiB with memory="64MiB"; torch's first step in the loop is made before."""
    program = """
import json, resource, sys, torch
from fastsafetensors.torch import save_file_async
state = {f"w{i}": torch.ones(10 << 20) for i in range(10)}
def save(tensors):
    handle = save_file_async(tensors, sys.argv[1], stage=sys.argv[2], memory="64MiB")
    handle.before_step()
    handle.wait()

save({"w": torch.ones(1 << 10)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(state)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"grown": grown << 10}))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "m", stage], check=True,
                          capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["grown"] <= (64 + 32) * MIB, said
    assert (tmp_path / "m").stat().st_size > 400 * MIB


PROCESS = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter

if __name__ == "__main__":
    folder = sys.argv[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    state = {"w": torch.arange(100000.0)}
    for step in range(2):
        saved = dcp.async_save(state, storage_writer=FastSafetensorsWriter(f"{folder}/{step}"),
                               async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        saved.result()
        state["w"].add_(1)
        found = {"w": torch.zeros(100000)}
        dcp.load(found, storage_reader=FastSafetensorsReader(f"{folder}/{step}"))
        assert torch.equal(found["w"], torch.arange(100000.0) + step), step
    print("saved", flush=True)
    os._exit(0)
"""


def test_dcp_saves_in_another_process(tmp_path: pathlib.Path) -> None:
    """Torch pickles the writer for its process."""
    (tmp_path / "program.py").write_text(PROCESS)
    done = subprocess.run([sys.executable, tmp_path / "program.py", tmp_path], capture_output=True,
                          text=True, timeout=300)
    assert done.stdout == "saved\n", done.stderr[-3000:]


@pytest.mark.parametrize("change", [lambda tensor: tensor.resize_(5),  # keeps the bytes
                                    lambda tensor: tensor[:1].zero_()], ids=["size", "bytes"])
@pytest.mark.parametrize("stage", ["lazy", "none"])
def test_a_changed_tensor_is_named(stage, change, tmp_path):
    """The old file stays."""
    tensors = {name: torch.full((3_000_000,), 1.0) for name in "abc"}
    save_file_async(tensors, tmp_path / "x").wait()
    handle = save_file_async(tensors, tmp_path / "x", stage=stage)
    change(tensors["b"])
    if handle.exception() is None:
        pytest.skip("it was staged before")
    for _ in range(2):
        with pytest.raises(SafetensorError, match="changed while .*tensor `b`") as caught:
            handle.wait()
        assert caught.value.tensor == "b" and str(caught.value).count("`b`") == 1
    assert len(load_file(tmp_path / "x")["b"]) == 3_000_000


def test_views_of_one_storage_are_not_mistaken_for_each_other(tmp_path):
    """They share torch's counter: the name of another tensor would mislead."""
    buffer = torch.zeros(6_000_000)
    tensors = {"a": buffer[:3_000_000], "b": buffer[3_000_000:]}
    handle = save_file_async(tensors, tmp_path / "x", stage="lazy")
    tensors["b"][:1] = 1
    error = handle.exception()
    if error is None:
        pytest.skip("it was staged before")
    assert error.tag == "FileChanged" and not error.tensor and "tensor `" not in str(error)
    assert str(tmp_path / "x") in str(error)
