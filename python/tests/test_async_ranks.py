# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves of several ranks, and by torch.distributed.checkpoint."""

import ctypes
import contextlib
import gc
import os
import shutil
import time

import pytest
from test_rank_faults import COMMON, run_ranks

torch = pytest.importorskip("torch")

RANKS = COMMON + """
from fastsafetensors import SafetensorError
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.torch import load_file
target = f"{folder}/saved"
side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
mine = {f"r{rank}.{c}": torch.full((300000 + rank,), float(rank)) for c in "ab"}
for step in range(3):
    handle = save_on_ranks_async(mine, target, side)
    for tensor in mine.values():
        tensor.add_(10)
    # The training's own group is free meanwhile.
    dist.all_reduce(torch.ones(1))
    handle.wait()
    assert handle.done() and handle.exception() is None and handle.result.endswith("index.json")
    dist.barrier()
    found = load_file(target, mode="load")
    assert len(found) == 2 * size
    for name, tensor in found.items():
        assert tensor.eq(int(name[1]) + 10 * step).all(), (name, step)
    dist.barrier()
assert not handle.cancel()  # its files are in place
# Cancelled on one rank, a save is cancelled on all; if it is too late, on none.
for number in range(12):
    before = load_file(target, mode="load")
    handle = save_on_ranks_async(mine, target, side, memory="32MiB" if number % 2 else None,
                                 stage="lazy" if number % 3 == 2 else "copy")
    try:
        handle.wait_staged()
    except SafetensorError as error:  # a faster rank has cancelled it
        assert "cancelled by rank" in str(error), error
    cancelled = rank == number % size and handle.cancel()
    error = handle.exception()
    assert handle.cancel() == (error is not None), error
    words = torch.tensor([error is not None, "cancelled" in str(error)], dtype=torch.int)
    every = [torch.zeros_like(words) for _ in range(size)]
    dist.all_gather(every, words)
    assert all(torch.equal(one, words) for one in every), (number, every)
    assert bool(words[0]) == bool(words[1]), error
    if words[0]:
        assert str(error) == ("cancelled" if rank == number % size
                              else f"cancelled by rank {number % size}"), error
        after = load_file(target, mode="load")
        assert all(torch.equal(after[name], before[name]) for name in before)
    dist.barrier()
    for tensor in mine.values():
        tensor.add_(10)
handle = save_on_ranks_async(mine, target, side)
handle.wait()
dist.barrier()
assert len([name for name in os.listdir(target) if name.startswith(".")]) == 0
dist.barrier()
# Several in flight, each with its memory, take their turns with the group.
from fastsafetensors.async_save import StagingPool
many = [save_on_ranks_async(mine, f"{folder}/many{i}", side, pool=StagingPool(),
                            durable=i % 2 == 0) for i in range(6)]
for i, handle in enumerate(many):
    if i % 3 == 2 and rank == 0:
        handle.cancel()
    error = handle.exception()
    assert error is None or (i % 3 == 2 and "cancelled" in str(error)), (i, error)
dist.barrier()
for i in range(6):
    assert len(load_file(f"{folder}/many{i}")) == 2 * size if i % 3 != 2 else True
# Ranks with other options would get paths that do not exist, or files that are not on the disk.
from fastsafetensors.distributed import save_on_ranks
for number, other in enumerate([{"filename_pattern": "other{suffix}.safetensors"},
                                {"durable": True}]):
    options = other if rank == 1 else {}
    for save in (save_on_ranks, lambda *a, **k: save_on_ranks_async(*a, **k).wait()):
        try:
            save(mine, f"{folder}/differ", side, **options)
        except RuntimeError as error:
            assert "ranks differ in a sharded save" in str(error), error
        else:
            raise AssertionError(other)
    dist.barrier()
    assert not os.path.exists(f"{folder}/differ")
# A failed save does not remove the folder that the next one, which is queued, has begun to fill.
import random
for number in range(60):
    place = f"{folder}/next{number}/new"
    try:
        first = save_on_ranks_async({"a": object()} if rank == 1 else mine, place, side)
    except TypeError:
        first = None
    time.sleep(random.random() * 0.004)
    second = save_on_ranks_async({f"t{rank}": torch.full((1000,), 2.0)}, place, side)
    assert first is None or first.exception() is not None
    second.wait()
    dist.barrier()
    assert len(load_file(place)) == size
    dist.barrier()
bad = {**mine, **({"x": 3} if rank == 1 else {})}
handle = save_on_ranks_async(bad, target, side)
error = handle.exception()
assert isinstance(error, ValueError if rank == 1 else RankError), error
dist.barrier()
assert len(load_file(target)) == 2 * size
save_on_ranks_async(mine, target, side).wait()
finish()
"""

PUBLISHES = COMMON + """
import errno
from fastsafetensors._ranks import publish
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.torch import load_file
side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
mine = {f"r{rank}": torch.full((300000,), 1.0)}
save_on_ranks_async(mine, f"{folder}/saved", side).wait()
real = publish.publish_set
def refuse(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/saved")
publish.publish_set = refuse
for target in ("saved", "new"):
    mine[f"r{rank}"].add_(1)
    handle = save_on_ranks_async(mine, f"{folder}/{target}", side)
    error = handle.exception()
    assert isinstance(error, OSError if rank == 0 else RankError), error
    assert "No space left" in str(error) and not handle.cancel(), error
dist.barrier()
found = load_file(f"{folder}/saved", mode="load")
assert len(found) == size and all(tensor.eq(1).all() for tensor in found.values())
for target in ("saved", "new"):
    assert not [name for name in os.listdir(f"{folder}/{target}") if name.startswith(".")]
dist.barrier()
publish.publish_set = real
# The older ones of several saves are superseded on all ranks, or on none.
handles = []
for step in range(6):
    mine[f"r{rank}"].fill_(step)
    handles.append(save_on_ranks_async(mine, f"{folder}/saved", side, overlap="supersede"))
errors = [handle.exception() for handle in handles]
assert errors[-1] is None, errors
assert all(error is None or str(error).startswith("cancelled") for error in errors), errors
every = [None] * size
dist.all_gather_object(every, [error is None for error in errors])
assert all(one == every[0] for one in every), every
found = load_file(f"{folder}/saved", mode="load")
assert len(found) == size and all(tensor.eq(5).all() for tensor in found.values())
dist.barrier()
finish()
"""

DIES = COMMON + """
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.torch import load_file
target = f"{folder}/saved"
side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=5))
mine = {f"r{rank}": torch.full((1000,), 1.0)}
save_on_ranks_async(mine, target, side).wait()
dist.barrier()
if rank == 1:
    os._exit(0)
handle = save_on_ranks_async({"r0": torch.full((1000,), 2.0)}, target, side, timeout=5)
error = handle.exception(120)
assert isinstance(error, RankError) and "rank 1 has ended" in str(error), error
found = load_file(target, mode="load")
assert len(found) == size and all(tensor.eq(1).all() for tensor in found.values())
os._exit(0)
"""

DCP = COMMON + """
import torch.distributed.checkpoint as dcp
from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.checkpoint.staging import DefaultStager
mesh = init_device_mesh("cpu", (size,))
full = torch.arange(3000.0).reshape(60, 50)
state = {"model": {"cut": distribute_tensor(full, mesh, [Shard(0)]), "whole": full.clone()}}
writer = FastSafetensorsWriter(f"{folder}/dcp")
for step in range(4):
    saved = dcp.async_save(state, storage_writer=writer)
    for tensor in state["model"].values():
        tensor.add_(1)
    saved.result()
    found = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    dcp.load(found, storage_reader=FastSafetensorsReader(f"{folder}/dcp"))
    assert torch.equal(found["model"]["cut"].full_tensor(), full + step), step
    assert torch.equal(found["model"]["whole"], full + step), step
    end = time.monotonic() + 60  # the thread drops the copies after the result is there
    while not writer._copies._free and time.monotonic() < end:
        time.sleep(0.01)
    addresses = {name: t.data_ptr() for name, t in writer._copies._free[0]._buffers.items()}
    assert step == 0 or addresses == before, "the buffers are kept"
    before = addresses
# Two at once: the second has copies of its own.
first = writer.stage(state)
second = writer.stage(state)
assert first["model"]["whole"].data_ptr() != second["model"]["whole"].data_ptr()
writer.close()
both = writer.stage({"a": {"b": torch.zeros(3)}, "a.b": torch.ones(3)})
assert both["a"]["b"].sum() == 0 and both["a.b"].sum() == 3
if size == 1:  # Several in flight, each to its folder; of ranks they would need a group each.
    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            time.sleep(0.2)
            return super().resolve_data(item)
    many = [dcp.async_save({"x": torch.full((1000,), float(i))}, storage_writer=writer,
                           checkpoint_id=f"{folder}/many{i}", planner=Planner()) for i in range(4)]
    for i, saved in enumerate(many):
        saved.result()
        found = {"x": torch.zeros(1000)}
        dcp.load(found, storage_reader=FastSafetensorsReader(f"{folder}/many{i}"))
        assert found["x"].eq(i).all(), i
import pickle
again = pickle.loads(pickle.dumps(writer))
dcp.save(state, storage_writer=again, checkpoint_id=f"{folder}/again")
# Another stager may be given.
saved = dcp.async_save(state, storage_writer=FastSafetensorsWriter(f"{folder}/other"))
saved.result()
finish()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_save_without_stopping(tmp_path, size):
    """The saved state is that of the call, on every rank. An error on one rank is raised on all."""
    run_ranks(RANKS, tmp_path, size)


def test_failed_publications_and_superseded_saves(tmp_path):
    """If rank 0 can't publish, the old model stays on all ranks. A superseded save is on all."""
    run_ranks(PUBLISHES, tmp_path, 2)


def test_a_rank_that_dies(tmp_path):
    """The handle raises an error within the time limit, and the old model stays."""
    run_ranks(DIES, tmp_path, 2)


def test_a_core_writer_is_finished_by_one_call_at_a_time(tmp_path):
    """A second call during the first one is an error."""
    from fastsafetensors._core import Writer

    refused = []

    def progress(*_numbers):
        for call in (writer.commit, writer.hand_over, writer.paths):
            with pytest.raises(RuntimeError, match="another thread is finishing this Writer"):
                call()
            refused.append(call)

    data = bytearray(1000)
    memory = (ctypes.c_char * 1000).from_buffer(data)
    writer = Writer(tmp_path / "a", [("a", "U8", (1000,), ctypes.addressof(memory), 1000)],
                    progress=progress)
    writer.commit()
    assert len(refused) >= 3 and writer.paths() == [str(tmp_path / "a")]
    writer.close()


def test_an_interrupted_call_leaves_the_group_to_the_next(tmp_path, monkeypatch):
    """Ctrl-C while the tensors are checked: the next call does not wait for it."""
    torch = pytest.importorskip("torch")
    from fastsafetensors._ranks import ranks_async
    from fastsafetensors.distributed import save_on_ranks_async

    def interrupt(tensors, metadata):
        raise KeyboardInterrupt

    made = []

    class Kept(ranks_async.JointSave):
        def __post_init__(self):
            super().__post_init__()
            made.append(self)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ranks_async, "JointSave", Kept)
        patched.setattr(ranks_async, "check_tensors", interrupt)
        save_on_ranks_async({"a": torch.ones(3)}, tmp_path)
    assert made[0].end.is_set()
    save_on_ranks_async({"a": torch.ones(3)}, tmp_path).wait()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]


def test_one_rule_for_names(tmp_path):
    """filename_pattern= names the files of every function that saves a set, as in
    save_safetensors_sharded()."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.distributed import save_on_ranks, save_on_ranks_async

    tensors = {"a": torch.ones(3)}
    pattern = "checkpoint{suffix}.safetensors"
    path = save_on_ranks(tensors, tmp_path / "a", filename_pattern=pattern)
    handle = save_on_ranks_async(tensors, tmp_path / "b", filename_pattern=pattern)
    handle.wait()
    assert path == str(tmp_path / "a/checkpoint.safetensors")
    assert handle.result == str(tmp_path / "b/checkpoint.safetensors")
    for save in (save_on_ranks, save_on_ranks_async):
        with pytest.raises(ValueError, match="filename_pattern must be"):
            save(tensors, tmp_path / "c", filename_pattern="checkpoint")
    assert not (tmp_path / "c").exists()


def test_a_failed_save_leaves_no_folder(tmp_path):
    """The folders that a failed save has made are removed, also those of a bad tensor."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.distributed import save_on_ranks_async

    tensors = {f"w{i}": torch.ones(1 << 20) for i in range(10)}
    for bad in ({"x": 3}, {}):
        handle = save_on_ranks_async({**tensors, **bad}, tmp_path / "new/deep")
        handle.cancel()
        assert handle.exception() is not None
        end = time.monotonic() + 60
        while (tmp_path / "new").exists() and time.monotonic() < end:
            time.sleep(0.005)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("size", [1, 2])
def test_dcp(tmp_path, size):
    """dcp.async_save() with our writer reuses its staging buffers."""
    run_ranks(DCP, tmp_path, size)


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    """Return a folder with the folders here, which is the current one, and elsewhere."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_relative_folder_is_that_of_the_call(two_folders, monkeypatch):
    """The thread of a save resolves no path in a folder to which the program has changed."""
    import threading

    from fastsafetensors._ranks import ranks_async
    from fastsafetensors import check_manifest
    from fastsafetensors.distributed import save_on_ranks_async
    from fastsafetensors.torch import load_file

    may_run, real = threading.Event(), ranks_async.Agreement

    def wait_first(pg):
        assert may_run.wait(60)
        return real(pg)

    monkeypatch.setattr(ranks_async, "Agreement", wait_first)
    for folder in ("saved", b"bytes"):
        may_run.clear()
        monkeypatch.chdir(two_folders / "here")
        handle = save_on_ranks_async({"a": torch.ones(3)}, folder, manifest="own.manifest")
        monkeypatch.chdir(two_folders / "elsewhere")
        may_run.set()
        handle.wait()
        name = os.fsdecode(folder)
        assert handle.result == str(two_folders / "here" / name / "model.safetensors")
        assert load_file(handle.result)["a"].eq(1).all()
        assert not check_manifest(handle.result, two_folders / "here/own.manifest")
    assert not os.listdir(two_folders / "elsewhere")


def test_relative_folders_of_dcp(two_folders, monkeypatch):
    """A writer and a reader keep to the folders that they were given."""
    import torch.distributed.checkpoint as dcp

    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter

    writer, reader = FastSafetensorsWriter("saved"), FastSafetensorsReader("saved")
    assert repr(reader) == "<FastSafetensorsReader 'saved'>"
    monkeypatch.chdir(two_folders / "elsewhere")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["a"].eq(1).all()
    assert os.listdir(two_folders / "here/saved") == ["model.safetensors"]
    assert not os.listdir(two_folders / "elsewhere")


EXITS = COMMON + """
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.training import CheckpointManager
side = dist.new_group(backend="gloo")
mine = {f"r{rank}": torch.full((2_000_000,), 7.0)}
if sys.argv[5] == "manager":
    manager = CheckpointManager(f"{folder}/run", group=side, at_exit=sys.argv[6])
    manager.save(1, mine)
else:
    save_on_ranks_async(mine, f"{folder}/saved", side, at_exit=sys.argv[6])
"""


@pytest.mark.parametrize("at_exit", ["wait", "cancel"])
@pytest.mark.parametrize("way", ["function", "manager"])
def test_ranks_that_exit(tmp_path, way, at_exit):
    """Programs that end right after the call complete the save, or cancel it on all ranks."""
    from fastsafetensors.torch import load_file
    from fastsafetensors.training import CheckpointManager

    run_ranks(EXITS, tmp_path, 2, way, at_exit)
    if way == "manager":
        latest = CheckpointManager(tmp_path / "run").latest(verify=True)
        if at_exit == "wait" or latest is not None:
            assert latest.ranks == 2 and latest.load(rank=1)["r1"].eq(7).all()
        return
    if at_exit == "wait" or (tmp_path / "saved").exists():
        found = load_file(tmp_path / "saved")
        assert found.keys() == {"r0", "r1"} and found["r1"].eq(7).all()


def test_a_failed_save_keeps_the_folder_of_the_next(tmp_path, monkeypatch):
    """Its ranks are in different calls, and the next one relies on the folder already."""
    from fastsafetensors._ranks import ranks_async

    class Group:
        """Stands in for a process group and its wrapper."""

        def limit_waits(self):
            """Do nothing."""

        def size(self):
            """Return 2: a group of one rank exchanges no messages."""
            return 2

    def disagree(*arguments):
        raise ranks_async.RankError("ranks differ")

    group = Group()
    monkeypatch.setattr(ranks_async, "open_group", lambda group, timeout: group)
    monkeypatch.setattr(ranks_async.Agreement, "agree", disagree)
    saves = [ranks_async.JointSave(group) for _ in range(2)]
    for save, name in zip(saves, ("run/step-1", "run/step-2"), strict=True):
        save.enter()
        save.set_target(ranks_async.SetTarget(str(tmp_path / name), "model", False), [], None)
        (tmp_path / name).mkdir(parents=True)
    shutil.rmtree(tmp_path / "run/step-2")  # called, and has not made it yet
    assert "ranks differ" in saves[0].publish([], None)
    assert os.listdir(tmp_path / "run") == []


def test_a_writer_keeps_the_copies_of_one_save():
    """Not those of names that only earlier saves had."""
    from fastsafetensors.checkpoint import FastSafetensorsWriter

    with contextlib.closing(FastSafetensorsWriter("none")) as writer:
        for number in range(4):
            writer.stage({f"x{number}": [torch.ones(1000)], "y": torch.ones(1000)})
        assert sum(copies.nbytes for copies in writer._copies._free) == 8000


def test_a_failure_that_nobody_heard_is_logged_by_the_next_save(tmp_path, caplog):
    """Also if Python's collector of cycles does not run."""
    from fastsafetensors.distributed import save_on_ranks_async

    (tmp_path / "a" / "model.safetensors").mkdir(parents=True)
    gc.disable()
    try:
        handle = save_on_ranks_async({"x": torch.zeros(9)}, tmp_path / "a")
        while not handle.done():
            time.sleep(0.01)
        del handle
        save_on_ranks_async({"x": torch.zeros(9)}, tmp_path / "b").wait()
        assert [line for line in caplog.messages if "its result was never requested" in line]
    finally:
        gc.enable()
