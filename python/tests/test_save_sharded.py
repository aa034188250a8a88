# SPDX-License-Identifier: Apache-2.0
"""Sharded saves and embedding caches: equal to Hugging Face's, and atomic."""

import json
import os
import subprocess

import pytest
from conftest import sample_tensors

from fastsafetensors import ParallelSaver, SafetensorError, save_file
from fastsafetensors._base.options import parse_size
from fastsafetensors.fast_loading import (
    _STRUCTURE_KEY,
    load_embeddings_safetensors,
    load_safetensors,
    load_safetensors_mmap,
    load_safetensors_sharded,
    save_embeddings_safetensors,
    save_safetensors,
    save_safetensors_sharded,
)
from fastsafetensors.saver import (
    KEY_SHARD_COUNT,
    KEY_SHARD_INDEX,
    KEY_SHARD_SET,
    ShardSetError,
    WriteEntry,
    per_entry_fill,
    plain_entry,
    plan_shards,
    save_sharded,
    shard_paths,
    tensor_fill,
    validate_shard_set,
    write_shards,
)
from fastsafetensors.st_types import DType


def test_files_and_index_equal_hugging_face(tmp_path, torch):
    hub = pytest.importorskip("huggingface_hub")
    import random

    rng = random.Random(3)
    for case in range(30):
        tensors = {f"é{i}": torch.ones(rng.choice([0, 1, 5, 20, 90, 300]), dtype=torch.uint8)
                   for i in range(rng.randrange(1, 15))}
        ours, theirs = tmp_path / f"ours{case}", tmp_path / f"theirs{case}"
        theirs.mkdir()
        hub.save_torch_state_dict(tensors, theirs, max_shard_size=100)
        index = save_safetensors_sharded(tensors, ours, max_shard_size=100)
        assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
        for name in os.listdir(ours):
            if name.endswith(".json"):
                assert json.loads((ours / name).read_text()) == \
                    json.loads((theirs / name).read_text())
                assert os.path.basename(index) == name
                continue  # huggingface_hub omits the last line end
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), (case, name)
        assert set(load_safetensors_sharded(ours)) == set(tensors)


def test_shared_memory_is_saved_to_one_file(tmp_path, torch):
    base = torch.arange(8, dtype=torch.uint8)
    state = {"a": base, "b": torch.ones(8, dtype=torch.uint8), "tied": base, "c": base[:2]}
    save_safetensors_sharded(state, tmp_path, max_shard_size=10)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a", "b", "c"}  # a view of two bytes is its own tensor
    assert index["weight_map"]["a"] == index["weight_map"]["c"]
    loaded = load_safetensors_sharded(tmp_path)
    assert loaded["tied"] is loaded["a"]
    assert torch.equal(loaded["a"], base)
    halves = torch.arange(8, dtype=torch.uint8)
    save_safetensors_sharded({"x": halves[:4], "y": torch.ones(8, dtype=torch.uint8),
                              "z": halves[4:]}, tmp_path, max_shard_size=8)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["x"] == index["weight_map"]["z"] != index["weight_map"]["y"]


def test_old_shards_are_deleted_last(tmp_path, torch):
    (tmp_path / "config.json").write_text("{}")
    for size in (100, 100, 4000, 50, 4000):
        tensors = {f"t{i}": torch.full((40,), float(size)) for i in range(5)}
        returned = save_safetensors_sharded(tensors, tmp_path, max_shard_size=size)
        loaded = load_safetensors_sharded(tmp_path)
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        count = 1 if size == 4000 else 6
        assert len(os.listdir(tmp_path)) == count + 1
        assert os.path.exists(returned)
        assert returned.endswith(".json") == (count > 1)


SIZES = {"5GB": 5 * 10**9, "1.5 MiB": 3 << 19, "10kb": 10_000, 7: 7, "7": 7, "1G": 1 << 30,
         "2m": 2 << 20, "0.5TiB": 1 << 39, "1.1KB": 1100, " 3 B ": 3, "1.99999999999k": 2047}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text):
    assert parse_size("size", text) == SIZES[text]


@pytest.mark.parametrize("bad", ["", "GB", "5XB", "-1", "0", 0, -3, True, "inf", "nan", None, "1e3",
                                 "5 G B", ".5G", "5.G", "1\0GB", 2**63, "8388608T",
                                 "99999999999999T", 1.5, "٣GB", b"5G"])
def test_what_is_not_a_size(bad):
    kind = ValueError if isinstance(bad, str) or type(bad) is int else TypeError
    with pytest.raises(kind, match=r"^size must be"):
        parse_size("size", bad)


def test_the_command_reads_sizes_by_the_same_rule(tmp_path, command, torch):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(1500, dtype=torch.uint8) for name in "ab"}, path)
    for text, files in (("3KB", 1), ("2.9KB", 2), ("2.93k", 1), ("1.5KB", 2)):
        folder = tmp_path / text
        subprocess.run([command, "split", "--size", text, path, folder], check=True)
        assert len(list(folder.glob("*.safetensors"))) == files, text


def test_faults_of_a_sharded_folder(tmp_path, torch):
    tensors = {f"t{i}": torch.ones(10) for i in range(4)}
    save_safetensors_sharded(tensors, tmp_path, max_shard_size=80)
    first = tmp_path / "model-00001-of-00002.safetensors"
    moved = first.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="00001-of-00002"):
        load_safetensors_sharded(tmp_path)
    moved.rename(first)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"t0"', '"t9"'))
    with pytest.raises(SafetensorError, match="t9"):
        load_safetensors_sharded(tmp_path)
    index.write_text(text.replace("model-00001", "../model-00001"))
    with pytest.raises(SafetensorError, match=r"\.\./model-00001"):
        load_safetensors_sharded(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError):
        load_safetensors_sharded(empty)


def test_lora_round_trips(tmp_path, torch):
    """R28: the trainer's own tests."""
    tensor = {"w": torch.randn(10, 10)}
    path = tmp_path / "a.safetensors"
    save_safetensors(tensor, path)
    assert torch.equal(load_safetensors(path, num_threads=4)["w"], tensor["w"])
    lora = {f"layer.{i}.lora_{side}": torch.randn(16, 64) for i in range(2) for side in "AB"}
    save_safetensors(lora, path, {"format": "pt", "lora_rank": "16"})
    from fastsafetensors import safe_open

    with safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt", "lora_rank": "16"}
    with pytest.raises(ValueError, match="num_threads must be 0 to"):
        load_safetensors(path, num_threads=-1)
    with pytest.raises(FileNotFoundError):
        load_safetensors(tmp_path / "none")


def test_mmap(tmp_path, torch):
    tensors = sample_tensors(torch)
    path = tmp_path / "m.safetensors"
    save_safetensors(tensors, path)
    some = load_safetensors_mmap(path, ["scalar", "large"])
    assert list(some) == ["scalar", "large"]
    assert torch.equal(some["large"], tensors["large"])
    assert load_safetensors_mmap(path, []) == {}
    assert set(load_safetensors_mmap(path)) == set(tensors)
    with pytest.raises(KeyError, match="'none'"):
        load_safetensors_mmap(path, ["scalar", "none"])


def equal(torch, a, b):
    """Same structure, types, order and values."""
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(b, dict):
        return list(a) == list(b) and all(equal(torch, a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(lambda pair: equal(torch, *pair), zip(a, b)))
    return a is b is None


def test_embeddings(tmp_path, torch):
    from safetensors.torch import load_file

    x, y = torch.randn(3, 4), torch.randn(2).to(torch.bfloat16)
    path = tmp_path / "cache.safetensors"
    for value in [
        x,
        None,
        [],
        {},
        (),
        [x, None, y],
        {"prompt_embeds": x, "pooled": [y, None], "none": None},
        {"a": {"b": (x, [y])}, "a.b": x, "a.b.0": y, "": x, "__metadata__": y},
        [x, x, x[0], x[:, 1]],
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(2), "deep": [[[[{}]]]]},
        {"parameter": torch.nn.Parameter(x).detach(), "view": x.t()},
    ]:
        save_embeddings_safetensors(value, path)
        loaded = load_embeddings_safetensors(path)
        assert equal(torch, loaded, value), value
        load_file(path)
    save_embeddings_safetensors({"prompt_embeds": x, "pooled": [y]}, path)
    assert set(load_file(path)) == {"prompt_embeds", "pooled.0"}
    same = [x, x]
    save_embeddings_safetensors(same, path)
    loaded = load_embeddings_safetensors(path)
    assert loaded[0] is loaded[1]
    assert len(load_file(path)) == 1
    for value, words in [({"a": [1]}, "int, at a.0"), ("text", "str, at the top"),
                         ({"a": {1: x}}, "a key must be str, not 1, at a"),
                         ([{"b": {2.5}}], "set, at 0.b")]:
        with pytest.raises(TypeError, match=words):
            save_embeddings_safetensors(value, path)


def test_embeddings_of_other_programs(tmp_path, torch):
    path = tmp_path / "cache.safetensors"
    save_safetensors({"a": torch.ones(2)}, path, {"type": "embeddings"})
    assert set(load_embeddings_safetensors(path)) == {"a"}
    torch.save({"b": [torch.ones(2)]}, tmp_path / "old.pt")
    assert torch.equal(load_embeddings_safetensors(tmp_path / "old.safetensors")["b"][0],
                       torch.ones(2))
    with pytest.raises(FileNotFoundError):
        load_embeddings_safetensors(tmp_path / "none.safetensors")
    for broken in ("{", '{"tensor": "x"}', '{"zz": 1}', "[1]", '{"dict": 3}', "7"):
        save_safetensors({"a": torch.ones(2)}, path, {"fastsafetensors.structure": broken})
        with pytest.raises(SafetensorError, match="broken structure of embeddings"):
            load_embeddings_safetensors(path)


# ---- the savers of 0.5 ----


class Meta:
    """The attributes that validate_shard_set reads."""

    def __init__(self, path):
        from fastsafetensors._core import Model

        self.src, self.metadata = os.fspath(path), Model(path).metadata(0)


def test_parallel_saver(tmp_path, torch):
    from safetensors.torch import load_file

    tensors = sample_tensors(torch)
    tensors["turned"] = torch.arange(6).reshape(2, 3).t()
    tensors["shared"] = tensors["large"][:5]
    paths = ParallelSaver(num_shards=3).save(
        tensors, tmp_path / "deep/m", metadata={"k": "v"}, shard0_metadata={"first": "yes"},
        header_align=64)
    assert paths == shard_paths(tmp_path / "deep/m", 3)
    loaded = {}
    for index, path in enumerate(paths):
        raw = open(path, "rb").read()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        assert list(header)[-1] == "__metadata__"
        assert header["__metadata__"][KEY_SHARD_INDEX] == str(index)
        assert header["__metadata__"][KEY_SHARD_COUNT] == "3"
        assert ("first" in header["__metadata__"]) == (index == 0)
        assert (8 + size) % 64 == 0
        loaded |= load_file(path)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[n].contiguous().view(-1).view(torch.uint8),
                           tensors[n].contiguous().view(-1).view(torch.uint8)) for n in tensors)
    validate_shard_set([Meta(path) for path in paths])
    with pytest.raises(ShardSetError, match="shard 1 of 3, expected 0 of 3"):
        validate_shard_set([Meta(path) for path in (paths[1], paths[0], paths[2])])
    with pytest.raises(ShardSetError, match="shard 0 of 3, expected 0 of 2"):
        validate_shard_set([Meta(path) for path in paths[:2]])
    with pytest.raises(ShardSetError, match="no shards"):
        validate_shard_set([])
    others = [Meta(path) for path in paths]
    others[1].metadata[KEY_SHARD_SET] = "another"
    with pytest.raises(ShardSetError, match="shards were written separately"):
        validate_shard_set(others)
    others[1].metadata = None
    with pytest.raises(ShardSetError, match="not a shard of a written set"):
        validate_shard_set(others)


def test_custom_fill(tmp_path, torch):
    from safetensors.torch import load_file

    calls = []

    def fill(items):
        calls.append([entry.name for _, entry in items])
        for view, entry in items:
            view[:] = entry.name.encode() * entry.nbytes

    entries = [WriteEntry("a", DType.U8, (3,), 3), WriteEntry("b", DType.U8, (2, 4), 8),
               WriteEntry("c", DType.F4, (2, 4), 4)]
    paths = save_sharded(entries, tmp_path / "m", num_shards=2, fill=fill,
                         shard_metadata=lambda own: {"names": ",".join(e.name for e in own)})
    assert calls == [["b", "c", "a"]]
    assert load_file(paths[0])["b"].tolist() == [[98] * 4] * 2
    paths = write_shards(plan_shards(entries[:2], shard_paths(tmp_path / "n", 1)),
                         per_entry_fill(lambda view, entry: view.__setitem__(slice(None),
                                                                             b"x" * entry.nbytes)))
    assert load_file(paths[0])["a"].tolist() == [120] * 3
    source = [plain_entry("t", torch.arange(5.0))]
    paths = save_sharded(source, tmp_path / "o", num_shards=1, fill=tensor_fill(2), fsync=True)
    assert load_file(paths[0])["t"].tolist() == [0, 1, 2, 3, 4]


def test_a_fill_that_fails_leaves_nothing(tmp_path):
    entries = [WriteEntry("a", DType.U8, (3,), 3)]
    with pytest.raises(ZeroDivisionError):
        save_sharded(entries, tmp_path / "m", num_shards=2,
                     fill=per_entry_fill(lambda view, entry: 1 / 0))
    kept = []
    with pytest.raises(ValueError, match="fill kept a view of a"):
        save_sharded(entries, tmp_path / "m", num_shards=2,
                     fill=lambda items: kept.append(memoryview(items[0][0])[1:]))
    kept.clear()
    with pytest.raises(OSError, match="not enough space in .* GiB needed, .* GiB free"):
        save_sharded(entries, tmp_path / "no/m", num_shards=2, min_free_bytes=10**18,
                     fill=lambda items: None)
    assert os.listdir(tmp_path) == []


def test_saver_refusals(torch):
    def plan(entry, **options):
        return plan_shards([entry] if entry else [], ["x"], **options)

    u8 = WriteEntry("a", DType.U8, (3,), 3)
    cases = [
        (lambda: plan_shards([u8, u8], ["x"]), "duplicate or reserved tensor name: a"),
        (lambda: plan(WriteEntry("__metadata__", DType.U8, (3,), 3)),
         "duplicate or reserved tensor name: __metadata__"),
        (lambda: plan(WriteEntry("a", DType.U8, (3,), 4)), r"a: U8\(3,\) is 3 bytes, not 4"),
        (lambda: plan(WriteEntry("a", DType.F4, (3,), 2)), "a: F4 requires an even last dimension"),
        (lambda: plan(WriteEntry("a", DType.AUTO, (3,), 3)), "a: AUTO is not an on-disk dtype"),
        (lambda: plan(WriteEntry("a", DType.U8, (-3,), 3)), "a: shape must be nonnegative"),
        (lambda: plan(None, header_align=4), "header_align must be a positive multiple of 8"),
        (lambda: plan(None, metadata={"a": 1}), "__metadata__ entries must be strings: 'a'"),
        (lambda: plan(None, shard_metadata=lambda own: {KEY_SHARD_INDEX: "1"}),
         "shard metadata key is reserved: fst.shard.index"),
        (lambda: ParallelSaver(num_shards=0), "num_shards must be positive"),
        (lambda: shard_paths("x", 0), "num_shards must be positive"),
        (lambda: plan_shards([u8], []), "paths must be nonempty and unique"),
        (lambda: plan_shards([u8], ["d/x", "d/../d/x"]), "paths must be nonempty and unique"),
        (lambda: write_shards(plan_shards([u8], ["x"]) * 2, print), "nonempty and unique"),
        (lambda: ParallelSaver(num_threads=0), "num_threads must be positive"),
        (lambda: ParallelSaver(framework="xx"), "Unknown framework name: xx"),
        (lambda: save_sharded([u8], "x"), "a: an entry without a source needs a fill"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="the name of a tensor must be a str, not 1"):
        plan(WriteEntry(1, DType.U8, (3,), 3))


def test_embeddings_keep_their_types(tmp_path, torch):
    import collections

    path = tmp_path / "e.safetensors"
    shared = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for value in (
        torch.ones(1), shared, torch.nn.Parameter(torch.ones(2)), torch.Size([2, 3]),
        torch.Size([]), (), [], {}, None, collections.OrderedDict(b=torch.ones(1), a=None),
        {"p": [shared, (shared, torch.Size([1]))], "t": torch.zeros(1)},
    ):
        save_embeddings_safetensors(value, path)
        found = load_embeddings_safetensors(path)
        assert types_of(found) == types_of(value)


def types_of(value):
    """Return the types of a structure with their attributes."""
    if isinstance(value, dict):
        return type(value), [(key, types_of(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(part) for part in value]
    return type(value), getattr(value, "requires_grad", value)


def test_embeddings_of_unsupported_types_are_refused(tmp_path, torch):
    import collections

    pair = collections.namedtuple("pair", "prompt pooled")

    class Named(dict):
        pass

    for value in (pair(torch.ones(1), None), collections.defaultdict(list, a=torch.ones(1)),
                  Named(a=torch.ones(1)), torch.nn.UninitializedParameter(), 5, "text"):
        with pytest.raises(TypeError, match=f"not {type(value).__name__}, at place"):
            save_embeddings_safetensors({"place": value}, tmp_path / "e.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("node", ['{"size": [-1]}', '{"size": ["x"]}', '{"size": 3}',
                                  '{"parameter": "a", "grad": 1}', '{"parameter": "a"}',
                                  '{"parameter": "b", "grad": true}', '{"ordered": [["a"]]}'])
def test_a_broken_structure_of_types_is_an_error(tmp_path, torch, node):
    from fastsafetensors.torch import save_file

    path = tmp_path / "e.safetensors"
    save_file({"a": torch.ones(1)}, path, {_STRUCTURE_KEY: node})
    with pytest.raises(SafetensorError, match="broken structure"):
        load_embeddings_safetensors(path)
