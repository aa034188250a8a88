# SPDX-License-Identifier: Apache-2.0
"""Weight deltas: round trips with independent readers and writers, live tensors, patches."""

import json
import os
import shutil

import delta_folders as folders
import numpy
import pytest
from delta_folders import SIZES, expect, read_checkpoint, same, write_chain
from delta_folders import write_checkpoint, write_delta

from fastsafetensors import deltas

zstandard = pytest.importorskip("zstandard", reason="needs the zstandard package")

KINDS = ("adler32", "xxh3-128", "blake3")


def make_chain(tmp_path, states, **options):
    """Write the deltas between successive states with this package."""
    made = []
    for i in range(1, len(states)):
        old = tmp_path / f"state{i - 1}"
        if not old.exists():
            write_checkpoint(old, states[i - 1])
        made.append(tmp_path / f"made_v{i:06d}")
        deltas.make(old, states[i], made[-1], version=f"{i:06d}", base_version=f"{i - 1:06d}",
                    durable=False, **options)
    return made


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_of_the_independent_writer_are_applied(tmp_path, states, local, encoding, kind):
    if folders.checksum(kind, b"") is None:
        pytest.skip(f"needs the package for {kind}")
    chain = write_chain(tmp_path, states, encoding=encoding, kind=kind)
    stats = deltas.apply(local, chain[0])
    assert same(read_checkpoint(local), states[1])
    assert stats["tensors"] == 3 and stats["bytes_hashed"] == 1_000_008
    deltas.apply(local, *chain[1:])
    assert same(read_checkpoint(local), states[3])
    assert deltas.version_of(local) == ("000003", False)
    assert sorted(os.listdir(local / ".weight_sync")) == ["lock", "state.json"]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_independent_reader_reads_our_deltas(tmp_path, states, encoding, kind):
    state = states[0]
    for number, folder in enumerate(
            make_chain(tmp_path, states, encoding=encoding, checksum=kind), 1):
        state = folders.apply_by_rules(state, folder)
        assert same(state, states[number])
        names = json.loads((folder / folders.INDEX).read_text())["weight_map"]
        assert set(names) == {"embed.weight", "layers.0.weight", "norm"}


def test_a_checkpoint_and_memory_make_the_same_delta(tmp_path, states):
    write_checkpoint(tmp_path / "state1", states[1])
    chain = make_chain(tmp_path, states[:2], threads=1)
    other = tmp_path / "other"
    deltas.make(tmp_path / "state0", tmp_path / "state1", other, version="000001",
                base_version="000000", threads=1)
    for path in chain[0].iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_the_numbered_shards_have_no_gaps(tmp_path, states):
    for folder in make_chain(tmp_path, states, threads=3):
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        count = len(shards)
        assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert sorted(path.name for path in folder.iterdir()) == [*shards, folders.INDEX]


@pytest.mark.parametrize("new_files", [True, False])
def test_an_unchanged_state_makes_an_empty_delta(new_files, tmp_path, states, local):
    write_checkpoint(tmp_path / "state0", states[0])
    folder = tmp_path / "v1"
    deltas.make(tmp_path / "state0", states[0], folder, version="000001", base_version="000000")
    assert json.loads((folder / folders.INDEX).read_text())["weight_map"] == {}
    assert deltas.apply(local, folder, new_files=new_files)["bytes_written"] == 0
    assert deltas.version_of(local).version == "000001"
    assert sorted(os.listdir(local / ".weight_sync")) == ["lock", "state.json"]
    assert "already" in expect("VersionMismatch", lambda: deltas.apply(local, folder))
    assert same(read_checkpoint(local), states[0])


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_chain_is_folded_into_one_version(tmp_path, states, local, encoding):
    chain = write_chain(tmp_path, states)
    folded = tmp_path / "folded"
    stats = deltas.convert(local, deltas.Delta(*chain), folded, encoding=encoding,
                           checksum="blake3")
    assert stats["bytes_read"] >= 1_000_008
    assert same(folders.apply_by_rules(states[0], folded), states[3])
    deltas.apply(local, folded)
    assert same(read_checkpoint(local), states[3])
    assert deltas.version_of(local).version == "000003"


def test_mixed_encodings_in_a_chain(tmp_path, states, local):
    chain = [write_delta(tmp_path / f"v{i}", states[i - 1], states[i], str(i), str(i - 1),
                         encoding=("xor", "overwrite")[i % 2]) for i in (1, 2, 3)]
    deltas.verify(local, *chain)
    assert same(read_checkpoint(local), states[0])
    deltas.apply(local, *chain)
    assert same(read_checkpoint(local), states[3])


def test_a_chain_whose_first_pass_was_done(tmp_path, states, local):
    """A kill between two passes: the same call goes on from the version that the folder has."""
    chain = [write_delta(tmp_path / f"v{i}", states[i - 1], states[i], str(i), str(i - 1),
                         encoding=("overwrite", "xor")[i % 2]) for i in (1, 2, 3)]
    deltas.apply(local, chain[0])
    assert deltas.apply(local, *chain)
    assert same(read_checkpoint(local), states[3])
    assert "already" in expect("VersionMismatch", lambda: deltas.apply(local, *chain))


def test_a_long_overwrite_list_is_decoded_in_parts(tmp_path):
    generator = numpy.random.default_rng(0)
    old = {"w": generator.integers(0, 256, 4_000_000, numpy.uint8)}
    new = {"w": old["w"] ^ 1}
    write_checkpoint(tmp_path / "local", old)
    write_checkpoint(tmp_path / "old", old)
    folder = write_delta(tmp_path / "v1", old, new, "1", "0", encoding="overwrite")
    deltas.apply(tmp_path / "local", folder)
    assert same(read_checkpoint(tmp_path / "local"), new)
    made = tmp_path / "made"
    deltas.make(tmp_path / "old", new, made, version="1", base_version="0", encoding="overwrite")
    assert same(folders.apply_by_rules(old, made), new)


def test_frames_without_a_size_are_read(tmp_path, states, local):
    def stream(index, tables):
        for table in tables:
            for name in table["tensors"]:
                payload = zstandard.ZstdDecompressor().decompress(table["tensors"][name])
                compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
                table["tensors"][name] = compressor.compress(payload) + compressor.flush()

    for encoding in ("xor", "overwrite"):
        folder = write_delta(tmp_path / encoding, states[0], states[1], "1", "0",
                             encoding=encoding, change=stream)
        deltas.verify(local, folder)


def test_versions_may_be_numbers_or_words(tmp_path, states, local):
    def number(index, tables):
        index["metadata"].update(version=7, base_version=6)

    first = write_delta(tmp_path / "a", states[0], states[1], "", "", change=number)
    second = write_delta(tmp_path / "b", states[1], states[2], "step-8", "000007")
    deltas.apply(local, first, version="6")
    assert deltas.version_of(local).version == "7"
    deltas.apply(local, second)
    assert deltas.version_of(local).version == "step-8"


# ---- a running model ----

def test_prepare_leaves_the_tensors_alone_until_commit(tmp_path, states):
    chain = write_chain(tmp_path, states)
    live = {name: value.copy() for name, value in states[0].items()}
    delta = deltas.Delta(*chain)
    with delta.prepare(live):
        assert same(live, states[0])
    assert same(live, states[0])
    change = delta.prepare(live, version="000000")
    change.commit()
    assert same(live, states[3])
    with pytest.raises(ValueError, match="already"):
        change.commit()
    change.drop()
    expect("DigestMismatch", lambda: delta.prepare(live))
    expect("VersionMismatch", lambda: delta.prepare(live, version="000002"))
    with pytest.raises(KeyError):
        delta.prepare({"norm": live["norm"]})
    assert same(live, states[3])


def test_torch_tensors_and_modules(tmp_path, states):
    torch = pytest.importorskip("torch")
    chain = write_chain(tmp_path, states)
    kept = [name for name in states[0] if name != "empty"]

    class Holder(torch.nn.Module):
        def state_dict(self, keep_vars=False):
            return self.live

    module = Holder()
    # One of the tensors is not contiguous, so it is changed through a copy.
    module.live = {name: torch.from_numpy(states[0][name].copy()) for name in kept}
    wide = torch.zeros(SIZES["norm"], 2, dtype=torch.uint8)
    wide[:, 0] = module.live["norm"]
    module.live["norm"] = wide[:, 0]
    deltas.Delta(*chain).prepare(module).commit()
    for name in kept:
        assert numpy.array_equal(module.live[name].numpy(), states[3][name])
    assert not wide[:, 1].any()


@pytest.mark.parametrize("indices", ["int32", "int64"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_patches_are_the_changed_elements(tmp_path, states, local, indices, framework):
    if framework == "torch":
        pytest.importorskip("torch")
    chain = write_chain(tmp_path, states)
    made = {name: value.copy() for name, value in states[0].items()}
    for patch in deltas.Delta(*chain).patches(local, framework=framework, indices=indices,
                                              nan_is_dense=False):
        values, places = patch.values, patch.indices
        assert str(places.dtype).endswith(indices)
        if framework == "torch":
            values, places = values.view(__import__("torch").int16).numpy(), places.numpy()
        assert numpy.all(numpy.diff(places) > 0)
        made[patch.name].view(numpy.int16)[places] = values.view(numpy.int16)
        old = states[0][patch.name].view(numpy.int16)[places]
        assert numpy.all(old != values.view(numpy.int16))
    assert same(made, states[3])


def test_a_nan_makes_a_dense_patch(tmp_path):
    torch = pytest.importorskip("torch")
    old = {"a": torch.ones(100, dtype=torch.bfloat16), "b": torch.ones(100, dtype=torch.bfloat16)}
    new = {name: value.clone() for name, value in old.items()}
    new["a"][3], new["b"][4] = float("nan"), 2

    def bytes_of(state):
        return {name: value.view(torch.uint8).numpy() for name, value in state.items()}

    write_checkpoint(tmp_path / "local", bytes_of(old))
    folder = write_delta(tmp_path / "v", bytes_of(old), bytes_of(new), "1", "0")
    found = {patch.name: patch for patch in deltas.Delta(folder).patches(tmp_path / "local")}
    assert found["a"].indices is None and found["a"].values.shape == (100,)
    assert found["b"].indices.tolist() == [4] and found["b"].values.tolist() == [2]
    weights = dict(deltas.Delta(folder).weights(tmp_path / "local"))
    assert torch.equal(weights["b"], new["b"]) and weights["a"].isnan().sum() == 1


def test_deltas_are_read_from_s3(tmp_path, states, local, own_home, monkeypatch):
    from object_store import KEY, SECRET, signature
    from web_server import Answer, web_server

    def check(request, answer):
        wrong = signature(request, SECRET) if "authorization" in request.headers else "unsigned"
        return Answer("403 Forbidden", {}, wrong.encode()) if wrong else answer

    write_chain(tmp_path / "bucket" / "run 1", states)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with web_server(tmp_path, check) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        chain = [f"s3://bucket/run 1/weight_v{version:06d}" for version in (1, 2, 3)]
        deltas.apply(local, *chain)
    assert same(read_checkpoint(local), states[3])


# ---- vLLM's own code ----

def vllm_patches():
    """Import vLLM's module of checkpoint patches, a copy of the one file."""
    pytest.importorskip("torch")
    return pytest.importorskip("checkpoint_weight_patch",
                               reason="needs vLLM's file: make build/receivers/.ready")


@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_vllm_loads_the_patches(tmp_path, indices):
    module = vllm_patches()
    import torch

    generator = torch.Generator().manual_seed(1)

    class Model(torch.nn.Module):
        """A model with one parameter that fuses two checkpoint tensors, as in inference engines."""

        def __init__(self, state):
            super().__init__()
            self.fused = torch.nn.Parameter(torch.cat([state["q"], state["k"]]))
            self.norm = torch.nn.Parameter(state["norm"].clone())

        def load_weights(self, weights):
            for name, tensor in weights:
                rows = {"q": self.fused[:8], "k": self.fused[8:], "norm": self.norm}[name]
                rows.data.copy_(tensor)
            return {name for name, _ in weights}

    old = {name: torch.randn(shape, generator=generator).to(torch.bfloat16)
           for name, shape in (("q", (8, 32)), ("k", (8, 32)), ("norm", (32,)))}
    new = {name: value.clone() for name, value in old.items()}
    new["q"][3, ::5] = 2
    new["k"][0, 0] = float("nan")
    new["norm"][7] = 0.5

    def bytes_of(state):
        return {name: value.view(torch.uint8).numpy() for name, value in state.items()}

    write_checkpoint(tmp_path / "local", bytes_of(old))
    folder = write_delta(tmp_path / "v", bytes_of(old), bytes_of(new), "1", "0")
    model = Model(old)
    found = [module.CheckpointWeightPatch(**vars(patch))
             for patch in deltas.Delta(folder).patches(tmp_path / "local", indices=indices)]
    for sparse in (True, False):
        module.load_checkpoint_weight_patches(
            model, [patch for patch in found if (patch.indices is not None) == sparse])
    assert [patch.name for patch in found if patch.indices is None] == ["k"]
    expected = Model(new)
    for name, value in model.named_parameters():
        other = dict(expected.named_parameters())[name]
        assert torch.equal(value.data.view(torch.uint8), other.data.view(torch.uint8))


# ---- ModelExpress's own code ----

def test_modelexpress_reads_our_deltas(tmp_path, states):
    receiver = pytest.importorskip("modelexpress_rl.inference.receiver",
                                   reason="needs modelexpress: make build/receivers/.ready")
    from modelexpress_rl.object_storage import ObjectStorageType

    class Objects:
        def get(self, uri):
            return (tmp_path / uri.removeprefix("s3://bucket/")).read_bytes()

        def size(self, uri):
            return len(self.get(uri))

    seed = tmp_path / "seed"
    write_checkpoint(seed, states[0])
    config = receiver.ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3, initial_base_version_id="v-a",
        seed_checkpoint_path=seed, refit_checkpoint_dir=tmp_path / "cache")
    opened = receiver._LocalCheckpoint(model_name="m", config=config, s3=Objects())
    opened.initialize()
    chain, before = [], "v-a"
    for number, word in ((1, "v-b"), (2, "v-c")):
        folder = tmp_path / word
        write_checkpoint(tmp_path / f"old{number}", states[number - 1])
        deltas.make(tmp_path / f"old{number}", states[number], folder, version=word,
                    base_version=before, dialect="modelexpress")
        chain.append(receiver._S3Version(word, before, receiver.WeightPayloadFormat.XOR_DELTA,
                                         f"s3://bucket/{word}/{folders.INDEX}"))
        before = word
    prepared = opened.prepare_chain(tuple(chain))
    assert same(read_checkpoint(prepared.path), states[2])


def test_deltas_from_modelexpress_are_applied(tmp_path, states, local):
    pytest.importorskip("modelexpress_rl.train.methods.canonical_delta",
                        reason="needs modelexpress: make build/receivers/.ready")
    from modelexpress_rl.utils import Adler32Checksum, compress_delta, compute_delta

    def send(index, tables):
        for table in tables:
            for name in table["tensors"]:
                delta, _ = compute_delta(states[1][name], states[0][name])
                table["tensors"][name] = compress_delta(delta).tobytes()
                sum_ = Adler32Checksum()
                sum_.update(states[1][name])
                table["sums"][name] = sum_.hexdigest()

    folder = write_delta(tmp_path / "v", states[0], states[1], "id-b", "id-a", change=send)
    deltas.apply(local, folder, version="id-a")
    assert same(read_checkpoint(local), states[1])


def test_sglang_and_this_package_take_turns(tmp_path, states, local):
    """SGLang's receiver and this package read each other's version notes."""
    chain = write_chain(tmp_path, states)
    deltas.apply(local, chain[0])
    note = json.loads((local / ".weight_sync" / "state.json").read_text())
    assert note["version"] == "000001"
    # Another receiver applies the next version and writes its own note.
    shutil.rmtree(local)
    write_checkpoint(local, folders.apply_by_rules(states[1], chain[1]))
    (local / ".weight_sync").mkdir()
    (local / ".weight_sync" / "state.json").write_text('{"version": "000002"}')
    deltas.apply(local, chain[2])
    assert same(read_checkpoint(local), states[3])


# ---- folders of versions, and the engines' loaders ----

def test_pull_applies_the_following_versions(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    assert deltas.pull(local, source) is None
    chain = write_chain(source, states)
    (source / "weight_v000009").mkdir()  # not published yet
    stats = deltas.pull(local, source)
    assert stats["tensors"] == 3 and same(read_checkpoint(local), states[3])
    assert deltas.pull(local, source) is None
    assert deltas.pending(local, source) == []
    shutil.rmtree(chain[0])
    assert deltas.pull(local, source) is None
    assert deltas.version_of(local).version == "000003"


def test_pull_waits_for_other_processes(tmp_path, states, local):
    import fcntl
    import threading

    source = tmp_path / "source"
    source.mkdir()
    write_chain(source, states)
    (local / ".weight_sync").mkdir()
    with open(local / ".weight_sync" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            deltas.pull(local, source, timeout=0)
        puller = threading.Thread(target=deltas.pull, args=(local, source))
        puller.start()
        fcntl.flock(lock, fcntl.LOCK_UN)
        puller.join()
    assert same(read_checkpoint(local), states[3])


def test_two_chains_need_a_note(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    write_delta(source / "a", states[0], states[1], "1", "0")
    write_delta(source / "b", states[0], states[1], "9", "8")
    with pytest.raises(ValueError, match="several chains"):
        deltas.pull(local, source)


def test_an_engine_reload_applies_pending_deltas(tmp_path, states, local):
    pytest.importorskip("torch")
    import logging

    from fastsafetensors._engine_weights import iterate, split_options

    source = tmp_path / "source"
    source.mkdir()
    options, _ = split_options({"deltas": str(source), "progress": False}, ())
    for version in range(4):
        if version > 0:
            write_delta(source / f"v{version}", states[version - 1], states[version],
                        str(version), str(version - 1))
        files = [str(path) for path in local.glob("*.safetensors")]
        for name, tensor in iterate(files, options, logging.getLogger("test"), device="cpu"):
            made = tensor.clone().view(__import__("torch").uint8).numpy()
            assert numpy.array_equal(made, states[version][name])


def test_a_folder_is_not_changed_while_an_engine_reads_it(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    deltas.apply(local, chain[0])
    with deltas.reading(local) as note:
        assert note.version == "000001"
        with pytest.raises(TimeoutError):
            deltas.apply(local, chain[1])
    deltas.apply(local, chain[1])
    (local / ".weight_sync" / "journal").write_bytes(b"")
    with pytest.raises(RuntimeError, match="two versions"), deltas.reading(local):
        pass


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_new_files_leave_the_old_ones_to_their_readers(tmp_path, states, local, encoding):
    chain = write_chain(tmp_path, states, encoding=encoding)
    for path in local.glob("*.safetensors"):  # as in the Hugging Face cache
        blob = tmp_path / ("blob" + path.name)
        path.rename(blob)
        path.symlink_to(blob)
    opened = [open(path, "rb") for path in sorted(local.glob("*.safetensors"))]
    before = [file.read() for file in opened]
    deltas.apply(local, *chain, new_files=True, durable=True)
    assert same(read_checkpoint(local), states[3])
    assert not any(path.is_symlink() for path in local.glob("*.safetensors"))
    for file, old in zip(opened, before):
        file.seek(0)
        assert file.read() == old
        file.close()
    assert sorted(os.listdir(local / ".weight_sync")) == ["lock", "state.json"]
    assert not list(local.glob("*.delta-tmp"))


def test_a_check_does_not_recover(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    deltas.apply(local, chain[0])
    (local / ".weight_sync" / "journal").write_bytes(b"")
    assert "recover" in expect("VersionMismatch", lambda: deltas.verify(local, chain[1]))
