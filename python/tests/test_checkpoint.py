# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint on Hugging Face folders, saved and loaded by different ranks."""

import json

import pytest
from test_rank_faults import COMMON, run_ranks

SETUP = COMMON + """
import torch.distributed.checkpoint as dcp
from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
full = torch.load(f"{folder}/full.pt")
cuts = {"rows": [Shard(0)], "columns": [Shard(1)], "odd": [Shard(0)], "deep": [Shard(1)],
        "same": [Replicate()], "half": [Shard(0)], "bytes": [Shard(0)]}

def sharded(values):
    return {name: distribute_tensor(tensor, mesh, cuts[name]) if name in cuts else tensor
            for name, tensor in values.items()}
"""

SAVE = SETUP + """
dcp.save(sharded(full), storage_writer=FastSafetensorsWriter(f"{folder}/one"))
dcp.save(sharded(full), storage_writer=FastSafetensorsWriter(
    f"{folder}/many", max_shard_size=10000, metadata={"a": "b"}, durable=True,
    manifest="blake3"))
try:
    dcp.save({**sharded(full), "step": 3}, storage_writer=FastSafetensorsWriter(f"{folder}/bad"))
except BaseException as error:
    assert "step is not a tensor" in str(error), error
else:
    raise AssertionError("no error")
finish()
"""

LOAD = SETUP + """
for place in ("one", "many", "one/model.safetensors"):
    state = sharded({name: torch.zeros_like(tensor) for name, tensor in full.items()})
    reader = FastSafetensorsReader(f"{folder}/{place}")
    dcp.load(state, storage_reader=reader)
    for name, tensor in state.items():
        got = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(got, full[name]), (place, name)
some = {"rows": state["rows"]}
dcp.load(some, storage_reader=reader)
assert reader.stats["bytes_requested"] <= -(-100 // size) * 33 * 4, reader.stats
try:
    dcp.load({"absent": torch.zeros(3)}, storage_reader=FastSafetensorsReader(f"{folder}/one"))
except BaseException as error:
    assert "absent" in str(error)
else:
    raise AssertionError("no error")
finish()
"""

DIES = SETUP + """
import fastsafetensors.checkpoint as checkpoint
real = checkpoint._Part.write
def write(*arguments):
    if rank == 1:
        os._exit(0)
    real(*arguments)
checkpoint._Part.write = write
changed = {name: tensor + 1 if tensor.is_floating_point() else tensor
           for name, tensor in full.items()}
try:
    dcp.save(sharded(changed), storage_writer=FastSafetensorsWriter(f"{folder}/many"))
except BaseException:
    os._exit(0)
os._exit(1)
"""


@pytest.fixture
def folder(tmp_path, torch):
    """Return a folder with the state that is saved."""
    torch.manual_seed(0)
    full = {"rows": torch.randn(100, 33), "columns": torch.randn(40, 50), "odd": torch.randn(5, 3),
            "deep": torch.randn(4, 6, 5, 2), "same": torch.randn(7), "plain": torch.randn(8, 8),
            "half": torch.randn(9, 4).bfloat16(), "bytes": torch.arange(50, dtype=torch.uint8),
            "number": torch.tensor(5)}
    torch.save(full, tmp_path / "full.pt")
    return tmp_path


def ranks(code, folder, size):
    """Run a program on the ranks of a new process group."""
    (folder / "store").unlink(missing_ok=True)
    run_ranks(code, folder, size)


def test_save_on_four_load_on_three(folder, torch):
    from safetensors import safe_open
    from safetensors.torch import load_file

    from fastsafetensors import check_manifest

    ranks(SAVE, folder, 4)
    full = torch.load(folder / "full.pt")
    assert sorted(p.name for p in (folder / "one").iterdir()) == ["model.safetensors"]
    one = load_file(folder / "one/model.safetensors")
    assert one.keys() == full.keys()
    assert all(torch.equal(one[name], full[name]) for name in full)
    index = json.loads((folder / "many/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == full.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in full.values())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    names = {p.name for p in (folder / "many").iterdir()}
    assert names == {*shards, "model.safetensors.index.json", "model.manifest"}
    assert not check_manifest(folder / "many")
    with safe_open(folder / "many" / sorted(shards)[0], "pt") as f:
        assert f.metadata() == {"a": "b"}
    ranks(LOAD, folder, 3)

    before = {p.name: p.read_bytes() for p in (folder / "many").iterdir()}
    ranks(DIES, folder, 2)
    now = {p.name: p.read_bytes() for p in (folder / "many").iterdir()}
    assert {name: now[name] for name in before} == before  # the old model is whole
    begun = now.keys() - before.keys()
    assert begun and all(name.startswith(".model") and name.endswith(".tmp") for name in begun)
    ranks(SAVE, folder, 2)  # removes what was begun
    assert {p.name for p in (folder / "many").iterdir()} == before.keys()


def test_single_process(tmp_path, torch):
    import torch.distributed.checkpoint as dcp

    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save(model.state_dict(), storage_writer=FastSafetensorsWriter(tmp_path), no_dist=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, storage_reader=FastSafetensorsReader(tmp_path), no_dist=True)
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert FastSafetensorsReader.validate_checkpoint_id(tmp_path)
    assert not FastSafetensorsReader.validate_checkpoint_id(tmp_path / "none")
    assert not FastSafetensorsWriter.validate_checkpoint_id("s3://bucket/x")
    wrong = {"0.weight": torch.zeros(2, 4)}
    with pytest.raises(BaseException, match=r"0\.weight"):
        dcp.load(wrong, storage_reader=FastSafetensorsReader(tmp_path), no_dist=True)


SAVE_PARTS = SETUP + """
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
values = full
target = f"{folder}/parts"
dcp.save(sharded(values), storage_writer=HuggingFaceStorageWriter(target, save_distributed=True))
for kind in (HuggingFaceStorageReader, FastSafetensorsReader):
    for other in (False, True):  # the ranks' own parts, and other cuts than those that were saved
        state = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        if other:
            state = {name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)])
                     if name in ("rows", "columns") else tensor for name, tensor in state.items()}
        else:
            state = sharded(state)
        dcp.load(state, storage_reader=kind(target))
        for name, tensor in state.items():
            got = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(got, values[name]), (kind, name)
finish()
"""


def test_parts_written_by_torch_are_read(tmp_path, torch):
    torch.save({"rows": torch.arange(330.0).reshape(10, 33), "columns": torch.randn(7, 12),
                "same": torch.arange(5.0), "plain": torch.ones(3)}, tmp_path / "full.pt")
    run_ranks(SAVE_PARTS, tmp_path, 2)


def write_parts(folder, torch, parts):
    """Write files with parts of the tensor "w". A part is (name, offsets or None, shape)."""
    from fastsafetensors.torch import save_file

    folder.mkdir()
    for name, offsets, shape in parts:
        info = json.dumps({"w": {"saved_offsets": offsets}})
        save_file({"w": torch.ones(shape)}, folder / f"{name}.safetensors",
                  None if offsets is None else {"DCP_SHARDING_INFO": info})


@pytest.mark.parametrize("parts, words", [
    ([("a", None, [2, 2]), ("b", None, [2, 2])], "duplicate tensor name in two files"),
    ([("a", [0, 0], [2, 2]), ("b", [3, 0], [2, 2])], "is a file missing"),
    ([("a", [0, 0], [2, 2]), ("b", [1, 0], [2, 2])], "is a file missing"),
    ([("a", [0, 0], [2, 2]), ("b", [0, 0], [2, 2])], "is a file missing"),
    ([("a", [0, 0], [2, 2]), ("b", [2], [2, 2])], "no offsets for w"),
    ([("a", [0, 0], [2, 2]), ("b", [-2, 0], [2, 2])], "no offsets for w"),
    ([("a", [0, 0], [2, 2]), ("b", "x", [2, 2])], "no offsets for w"),
    ([("a", [0, 0], [2, 2]), ("b", [2], [2])], "different dtypes or ranks"),
    ([("a", [2, 0], [2, 2])], "is a file missing"),
])
def test_incomplete_parts_are_an_error(tmp_path, torch, parts, words):
    from fastsafetensors import SafetensorError
    from fastsafetensors.checkpoint import FastSafetensorsReader

    write_parts(tmp_path / "c", torch, parts)
    with pytest.raises((ValueError, SafetensorError), match=words):
        FastSafetensorsReader(tmp_path / "c").read_metadata()


@pytest.mark.parametrize("moment", ["the data", "the index"])
def test_a_failed_save_leaves_nothing(tmp_path, torch, moment, monkeypatch):
    """While the writer lives, which is kept for its next save."""
    import torch.distributed.checkpoint as dcp
    from fastsafetensors.checkpoint import FastSafetensorsWriter

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            if moment == "the data" and item.index.fqn == "t3":
                raise OSError(5, "broken")
            return super().resolve_data(item)

    writer = FastSafetensorsWriter(tmp_path / "a", max_shard_size=3000)
    if moment == "the index":
        (tmp_path / "a" / "model.safetensors.index.json").mkdir(parents=True)
    tensors = {f"t{i}": torch.ones(600) for i in range(4)}
    with pytest.raises(BaseException):
        dcp.save(tensors, storage_writer=writer, no_dist=True, planner=Planner())
    assert not [*tmp_path.glob("a/.*")]
    writer.reset()
