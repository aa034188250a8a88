# SPDX-License-Identifier: Apache-2.0
"""Sets that ranks have written become ordinary folders, with little memory."""

import collections
import enum
import json
import math
import os
import subprocess
import sys
import textwrap
import tracemalloc

import pytest
from conftest import zstd_or_skip
from test_rank_faults import COMMON, run_ranks
from test_terminal_text import write_model

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from fastsafetensors import safe_open  # noqa: E402
from fastsafetensors._checkpoints.consolidate import copy_range  # noqa: E402
from fastsafetensors._checkpoints.state_codec import encode_state  # noqa: E402
from fastsafetensors.checkpoint import FastSafetensorsWriter, consolidate  # noqa: E402
from fastsafetensors.distributed import save_on_ranks, save_on_ranks_async  # noqa: E402
from fastsafetensors.torch import load_file, save_file  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402

WRITE = COMMON + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
full = torch.arange(6000.0).reshape(60, 100)
dcp.save({"rows": distribute_tensor(full, mesh, [Shard(0)]),
          "columns": distribute_tensor(full.clone(), mesh, [Shard(1)]),
          "whole": torch.arange(7)}, storage_writer=HuggingFaceStorageWriter(
              f"{folder}/parts", save_distributed=True))
finish()
"""

READ = COMMON + """
import torch.distributed.checkpoint as dcp
from fastsafetensors.checkpoint import FastSafetensorsReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
full = torch.arange(6000.0).reshape(60, 100)
found = {"rows": distribute_tensor(torch.zeros(60, 100), mesh, [Shard(1)])}
dcp.load(found, storage_reader=FastSafetensorsReader(f"{folder}/one"))
assert torch.equal(found["rows"].full_tensor(), full)
finish()
"""


def test_parts_of_three_ranks(tmp_path):
    """Rows, columns and copies of three ranks; two read them back."""
    run_ranks(WRITE, tmp_path, 3)
    index = consolidate(tmp_path / "parts", tmp_path / "one", 20000, memory=1000, manifest=True)
    full = torch.arange(6000.0).reshape(60, 100)
    found = load_file(index, verify=True)
    assert torch.equal(found["rows"], full) and torch.equal(found["columns"], full)
    assert torch.equal(found["whole"], torch.arange(7)) and len(found) == 3
    assert not [path for path in (tmp_path / "one").iterdir() if path.name.startswith(".")]
    (tmp_path / "store").unlink(missing_ok=True)
    run_ranks(READ, tmp_path, 2)


def test_a_checkpoint_becomes_a_model(tmp_path):
    """The model of a checkpoint, without optimizer and random numbers; compressed files as well."""
    model = torch.nn.Linear(300, 50)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": model, "more": {"x": torch.ones(3)}})
    path = consolidate(tmp_path / "run" / "step-1", tmp_path / "hf", prefix="model.", durable=True)
    assert path.endswith("model.safetensors")
    found = load_file(path)
    assert found.keys() == {"weight", "bias"} and torch.equal(found["weight"], model.weight)
    if subprocess.run([sys.executable, "-c", "import fastsafetensors.torch as t, torch; "
                       f"t.save_file({{'w': torch.ones(9000, 30)}}, {str(tmp_path / 'c')!r}, "
                       "compress=True)"]).returncode == 0:
        assert torch.equal(load_file(consolidate(tmp_path / "c", tmp_path / "plain", memory=1000))[
            "w"], torch.ones(9000, 30))


def test_a_folder_with_a_checkpoint(tmp_path):
    """A folder with a checkpoint is refused as the target, and is not changed."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"model": {"x": torch.full((4,), float(step))}})
        manager.wait()
        for step in (1, 2):
            with pytest.raises(ValueError, match="has a checkpoint of CheckpointManager in it"):
                consolidate(tmp_path / "run/step-1", tmp_path / f"run/step-{step}",
                            prefix="model.")
            assert manager._checkpoint_of(step, verify=True).step == step


def test_a_tensor_of_several_names(tmp_path):
    """It is written under each name, also where the first name lacks the prefix."""
    tied, own = torch.ones(4, 3), torch.zeros(2)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"ema": {"x": own}, "model": {
            "embed.weight": tied, "head.weight": tied, "x": own}})
    found = load_file(consolidate(tmp_path / "run" / "step-1", tmp_path / "hf", prefix="model."))
    assert found.keys() == {"embed.weight", "head.weight", "x"}
    assert torch.equal(found["head.weight"], tied) and torch.equal(found["x"], own)


@pytest.mark.parametrize(("offsets", "sizes", "good"), [
    ([0, 1, 5], [3, 2, 1], False), ([0, 3, 5], [3, 2, 1], True), ([3, 0, 5], [2, 3, 1], True)])
def test_parts_with_gaps(tmp_path, offsets, sizes, good):
    """The sum of the sizes is right, and yet elements are missing: they are not made up."""
    (tmp_path / "in").mkdir()
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        info = json.dumps({"x": {"saved_offsets": [offset]}})
        save_file({"x": torch.arange(offset, offset + size)}, tmp_path / f"in/{number}.safetensors",
                  {"DCP_SHARDING_INFO": info})
    if good:
        found = load_file(consolidate(tmp_path / "in", tmp_path / "out"))
        assert torch.equal(found["x"], torch.arange(6))
        return
    with pytest.raises(ValueError, match="do not make up a tensor"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "shapes"), [
    ("F4", [[2], [2]]), ("F4", [[2, 1], [2, 1]]), ("F4", [[4, 1], [4, 1]]), ("F4", [[2, 3]] * 2),
    ("F6_E2M3", [[2, 2], [2, 2]]), ("F6_E3M2", [[4], [4]]), ("F6_E3M2", [[4, 1], [8, 1]])])
def test_parts_whose_rows_are_no_whole_bytes(tmp_path, dtype, shapes):
    (tmp_path / "in").mkdir()
    expected, offset = b"", 0
    for number, shape in enumerate(shapes):
        data = os.urandom(math.prod(shape) * int(dtype[1]) // 8)
        info = json.dumps({"x": {"saved_offsets": [offset] + [0] * (len(shape) - 1)}})
        write_model(tmp_path / f"in/{number}.safetensors", {"x": (dtype, shape, data)},
                    {"DCP_SHARDING_INFO": info})
        expected, offset = expected + data, offset + shape[0]
    path = consolidate(tmp_path / "in", tmp_path / "out")
    with safe_open(path, "np") as found:
        assert found.get_slice("x").get_shape() == [offset, *shapes[0][1:]]
    with open(path, "rb") as file:
        assert file.read()[-len(expected):] == expected


def test_empty_parts_at_one_place(tmp_path):
    """Ranks that have nothing of a tensor write empty parts, maybe several at one offset."""
    (tmp_path / "in").mkdir()
    for number, (offset, size) in enumerate([(0, 0), (0, 3), (3, 0), (3, 0)]):
        info = json.dumps({"x": {"saved_offsets": [offset]}})
        save_file({"x": torch.arange(offset, offset + size)}, tmp_path / f"in/{number}.safetensors",
                  {"DCP_SHARDING_INFO": info})
    found = load_file(consolidate(tmp_path / "in", tmp_path / "out"))
    assert torch.equal(found["x"], torch.arange(3))


@pytest.mark.parametrize("width", [3, 4])
def test_columns_of_4_bit_floats_are_refused(tmp_path, width):
    (tmp_path / "in").mkdir()
    for number in (0, 1):
        info = json.dumps({"x": {"saved_offsets": [0, width * number]}})
        write_model(tmp_path / f"in/{number}.safetensors",
                    {"x": ("F4", [4, width], bytes(2 * width))}, {"DCP_SHARDING_INFO": info})
    with pytest.raises(ValueError, match="4-bit floats that are cut along another dimension"):
        consolidate(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(("dtype", "shape"), [
    ("F4", [400, 300]), ("F4", [400, 301]), ("F4", [100000]), ("F6_E2M3", [400, 301]),
    ("F6_E3M2", [80000]), ("BF16", [400, 301])])
@pytest.mark.parametrize("memory", [1000, 64000, 1 << 20])
def test_compressed_tensors_in_little_memory(tmp_path, dtype, shape, memory):
    """They are read row by row, 4- and 6-bit floats in numbers of rows that are whole bytes."""
    zstd_or_skip()
    size = math.prod(shape) * {"F4": 4, "BF16": 16}.get(dtype, 6) // 8
    data = (os.urandom(50) * size)[:size]
    write_model(tmp_path / "plain", {"x": (dtype, shape, data)})
    command = ["fastsafetensors", "convert", "--compress", tmp_path / "plain",
               tmp_path / "in.safetensors"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert os.path.getsize(tmp_path / "in.safetensors") < size
    path = consolidate(tmp_path / "in.safetensors", tmp_path / "out", memory=memory)
    with open(path, "rb") as file:
        assert file.read()[-len(data):] == data


def test_the_folder_of_the_ranks_is_refused(tmp_path):
    """The save would leave their files there, and a folder of two models can't be opened."""
    for count in (1, 2):
        parts = tmp_path / str(count)
        parts.mkdir()
        for number in range(count):
            info = json.dumps({"x": {"saved_offsets": [3 * number]}})
            save_file({"x": torch.ones(3)}, parts / f"{number}.safetensors",
                      {"DCP_SHARDING_INFO": info})
        with pytest.raises(ValueError, match="has files of torch's writer"):
            consolidate(parts, parts)
        assert len(os.listdir(parts)) == count
    (tmp_path / "set").mkdir()
    save_file({"x": torch.ones(3)}, tmp_path / "set/model.safetensors")
    assert load_file(consolidate(tmp_path / "set", tmp_path / "set"))["x"].sum() == 3


@pytest.mark.parametrize("description", [
    b"[]", b"{", b'{"m":{}}', b'{"m":{"dict":5}}', b'{"m":{"dict":[["t",{"tensor":"none"}]]}}',
    b'{"m":{"dict":[["t",{"tensor":5}]]}}', b'{"m":{"dict":[["t",{"tensor":[]}]]}}',
    b'{"m":{"list":' + b"[" * 3000 + b"]" * 3000 + b"}}",
    b'{"m":{"dict":[["' + b"a" * 999999 + b'",{"list":[' + b'{"tensor":"t"},' * 999
    + b'{"tensor":"t"}]}]]}}'])
def test_damaged_descriptions(tmp_path, description):
    """They are a ValueError, and names do not fill the memory."""
    state = torch.frombuffer(bytearray(description), dtype=torch.uint8)
    save_file({"fastsafetensors.state": state, "t": torch.ones(1), "m.x": torch.ones(1)},
              tmp_path / "in")
    tracemalloc.start()
    with pytest.raises(ValueError):
        consolidate(tmp_path / "in", tmp_path / "out", prefix="m.")
    assert tracemalloc.get_traced_memory()[1] < 150 << 20
    tracemalloc.stop()


def test_one_share_of_the_memory_at_a_time(tmp_path):
    """Rows of columns are freed before the next ones are read. (RLIMIT_DATA counts them.)"""
    (tmp_path / "in").mkdir()
    for number in (0, 1):
        info = json.dumps({"x": {"saved_offsets": [0, 1000 * number]}})
        save_file({"x": torch.full((32_000, 1000), float(number))},
                  tmp_path / f"in/{number}.safetensors", {"DCP_SHARDING_INFO": info})
    found = consolidate_within(100, tmp_path / "in", tmp_path / "out", memory="64MiB")
    assert found["x"].sum() == 32_000_000


def test_bad_sources(tmp_path):
    """No temporary file remains, and the folder is unchanged."""
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="begins with 'model.'"):
        consolidate(tmp_path / "a.safetensors", tmp_path / "out", prefix="model.")
    with pytest.raises(ValueError, match="positive"):
        consolidate(tmp_path / "a.safetensors", tmp_path / "out", memory=0)
    with pytest.raises(NotImplementedError):
        consolidate(tmp_path / "a.safetensors", "s3://bucket/x")
    with pytest.raises(FileNotFoundError):
        consolidate(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def consolidate_within(mib, source, folder, **options):
    """Put a set together in a process with so much anonymous memory more; return the tensors."""
    program = textwrap.dedent("""
        import json, resource, sys
        from fastsafetensors.checkpoint import consolidate
        source, folder, mib, options = json.loads(sys.argv[1])
        limit = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (limit + (mib << 20), resource.RLIM_INFINITY))
        print(json.dumps(consolidate(source, folder, **options)))
        """)
    arguments = json.dumps([str(source), str(folder), mib, options])
    done = subprocess.run([sys.executable, "-c", program, arguments], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return load_file(json.loads(done.stdout))


def test_the_model_is_never_in_memory(tmp_path):
    """256 MiB are put together with less than 64 MiB of anonymous memory more."""
    save_file({f"w{i}": torch.full((1 << 24,), float(i)) for i in range(4)}, tmp_path / "a")
    found = consolidate_within(64, tmp_path / "a", tmp_path / "out", max_shard_size="100MB")
    assert all(bool(found[f"w{i}"].eq(i).all()) for i in range(4))


@pytest.mark.parametrize("writer", ["ranks", "ranks, asynchronously", "dcp", "manager"])
def test_whole_blocks_are_copied_to_whole_blocks(tmp_path, monkeypatch, writer):
    """A file system shares blocks only if both places are multiples of a block."""
    tensors = {f"w{i}": torch.full((64, 1024), float(i)) for i in range(4)} | {"n": torch.ones(3)}
    prefix = ""
    if writer == "ranks":
        save_on_ranks(tensors, tmp_path / "a")
    elif writer == "ranks, asynchronously":
        save_on_ranks_async(tensors, tmp_path / "a").wait()
    elif writer == "dcp":
        dcp.save(tensors, storage_writer=FastSafetensorsWriter(tmp_path / "a"), no_dist=True)
    else:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"model": tensors, "more": {"x": torch.ones(3)}})
        (tmp_path / "step-1").rename(tmp_path / "a")
        prefix = "model."
    calls, copy = [], os.copy_file_range

    def record(source, target, size, begin, place):
        calls.append((size, begin % 4096, place % 4096))
        return copy(source, target, size, begin, place)

    monkeypatch.setattr(os, "copy_file_range", record)
    found = load_file(consolidate(tmp_path / "a", tmp_path / "b", prefix=prefix))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert sorted(call for call in calls if call[0] > 12) == [(1 << 18, 0, 0)] * 4, calls


@pytest.mark.parametrize("shift", [(8, 8), (8, 16), (0, 8), (4088, 4088)])
def test_copies_of_other_places(tmp_path, shift):
    """Copies of ranges that begin within a block."""
    data = os.urandom(20000)
    (tmp_path / "a").write_bytes(data)
    begin, place = shift
    with open(tmp_path / "a", "rb") as source, open(tmp_path / "b", "w+b") as target:
        copy_range(source.fileno(), target.fileno(), 15000, begin, place)
        target.seek(place)
        assert target.read() == data[begin : begin + 15000]


@pytest.mark.parametrize("call", ["open", "stat"])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_source_that_a_save_replaces_is_an_error(tmp_path, monkeypatch, call, is_deleted):
    """The model is of one save, or the old one stays."""
    if call == "stat" and not is_deleted:
        pytest.skip("the file is the new one, which is compared later")
    from fastsafetensors import SafetensorError
    from fastsafetensors._checkpoints import consolidate as module

    source, real = tmp_path / "parts/model.safetensors", getattr(module.os, call)
    source.parent.mkdir()
    save_file({"a": torch.ones(9000), "b": torch.ones(9)}, source)

    def replaced_before(path, *arguments, **options):
        if path == str(source) and is_deleted:
            source.unlink(missing_ok=True)
        elif path == str(source):
            save_file({"a": torch.zeros(9000), "b": torch.zeros(9)}, source)
        return real(path, *arguments, **options)

    monkeypatch.setattr(module.os, call, replaced_before)
    with pytest.raises(SafetensorError, match="replaced|changed") as caught:
        consolidate(source.parent, tmp_path / "one")
    assert caught.value.tag == "FileChanged"
    monkeypatch.undo()
    assert not list((tmp_path / "one").glob("*.safetensors"))


def test_a_save_while_the_source_is_opened_is_an_error(tmp_path, monkeypatch):
    """The headers that were read must be those of the files that are copied."""
    from fastsafetensors import SafetensorError
    from fastsafetensors._checkpoints import consolidate as module

    source, real, calls = tmp_path / "parts/model.safetensors", module._identities, []
    source.parent.mkdir()
    save_file({"a": torch.ones(3000), "b": torch.ones(1000)}, source)

    def identities(stored):
        calls.append(1)
        if len(calls) == 2:  # the second models are open
            save_file({"a": torch.zeros(1000), "b": torch.zeros(3000)}, source)
        return real(stored)

    monkeypatch.setattr(module, "_identities", identities)
    with pytest.raises(SafetensorError, match="replaced the file while it was opened") as caught:
        consolidate(source.parent, tmp_path / "one")
    assert caught.value.tag == "FileChanged"
    consolidate(source.parent, tmp_path / "one")
    assert load_file(tmp_path / "one/model.safetensors")["a"].shape == (1000,)


def test_tied_names_that_look_numbered(tmp_path):
    """A tensor of several names is written under each, also where one is another with "#1"."""
    tied = torch.ones(3)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {"a#1": tied, "a": tied, "b": torch.zeros(2)}})
    consolidate(tmp_path / "run/step-1", tmp_path / "out", prefix="model.")
    assert sorted(load_file(tmp_path / "out")) == ["a", "a#1", "b"]


class Kind(enum.IntEnum):
    """Keys of a dict."""

    BIG = 8


Pair = collections.namedtuple("Pair", "low high")


def test_keys_that_are_no_text(tmp_path):
    """A tensor below such a key is written once, under its own name."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {("layer", 0): torch.ones(2), b"k": torch.zeros(2),
                                   3: {True: torch.ones(1)}, Kind.BIG: torch.ones(3),
                                   Pair(1, 2): torch.ones(4), torch.Size([5]): torch.ones(5),
                                   torch.zeros(7): torch.ones(6)}})
    consolidate(tmp_path / "run/step-1", tmp_path / "out", prefix="model.")
    sizes = {name: len(tensor) for name, tensor in load_file(tmp_path / "out").items()}
    assert sizes == {"('layer', 0)": 2, "b'k'": 2, "3.True": 1, "8": 3, "(1, 2)": 4, "(5,)": 5,
                     "model": 6}


def test_the_state_of_one_rank_is_exported_without_its_description(tmp_path):
    tensors = {f"rank-{rank}.{name}": value for rank in range(2)
               for name, value in encode_state({"r": torch.ones(3) * rank}).items()}
    save_file(tensors, tmp_path / "checkpoint.safetensors")
    found = load_file(consolidate(tmp_path / "checkpoint.safetensors", tmp_path / "hf",
                                  prefix="rank-1."))
    assert list(found) == ["r"]
