# SPDX-License-Identifier: Apache-2.0
"""Weight deltas: recovery after kills, subfolders, making, patches, and folders with gaps."""

import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import time

import delta_folders as folders
import numpy
import pytest
from delta_folders import expect, kill_in_a_write, make_states, read_checkpoint, same, write_chain
from delta_folders import write_checkpoint, write_delta, write_file

import fastsafetensors
from fastsafetensors import deltas

zstandard = pytest.importorskip("zstandard", reason="needs the zstandard package")


def kill_while_applying(local, *chain):
    """Apply deltas in a process that is killed meanwhile."""
    kill_in_a_write(local, "deltas.Delta(*sys.argv[2:]).apply(sys.argv[1], threads=1)", *chain)


# ---- recovery ----

def test_a_delta_that_was_replaced_is_not_used_for_recovery(tmp_path, states, local):
    chain = write_chain(tmp_path, states, shards=1)
    kill_while_applying(local, chain[0])
    os.rename(chain[0], tmp_path / "kept")
    for call in (lambda: deltas.recover(local), lambda: deltas.apply(local, tmp_path / "kept")):
        with pytest.raises(FileNotFoundError, match="an update by it was interrupted"):
            call()
    write_delta(chain[0], states[0], states[2], "000001", "000000", shards=1)
    for roll_back in (False, True):
        assert "replaced" in expect(
            "FileChanged", lambda back=roll_back: deltas.recover(local, roll_back=back))
    os.rename(chain[0], tmp_path / "other")
    os.rename(tmp_path / "kept", chain[0])
    assert deltas.recover(local, durable=True)["recovered"] == 1
    assert same(read_checkpoint(local), states[1])


def test_verify_names_an_interrupted_update(tmp_path, states, local):
    chain = write_chain(tmp_path, states, shards=1)
    kill_while_applying(local, chain[0])
    done = subprocess.run(["fastsafetensors", "verify", local], capture_output=True, text=True)
    assert done.returncode == 1
    assert "an update by a delta was interrupted" in done.stderr
    assert "delta recover" in done.stderr
    deltas.recover(local)
    assert subprocess.run(["fastsafetensors", "verify", local]).returncode == 0


def test_pull_reports_a_finished_recovery(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    chain = write_chain(source, states[:2])
    kill_while_applying(local, *chain)
    stats = deltas.pull(local, source, durable=True)
    assert stats is not None and stats["recovered"] == 1
    assert deltas.pull(local, source) is None
    assert same(read_checkpoint(local), states[1])


def test_pull_keeps_to_its_folders(tmp_path, states, local, monkeypatch):
    """Relative folders are those of the call, also if another thread changes the current one."""
    (tmp_path / "source").mkdir()
    write_chain(tmp_path / "source", states[:2])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    real = deltas.version_of

    def change_folder(checkpoint):
        monkeypatch.chdir(tmp_path / "elsewhere")
        return real(checkpoint)

    monkeypatch.setattr(deltas, "version_of", change_folder)
    assert deltas.pull(local.relative_to(tmp_path), "source") is not None
    assert same(read_checkpoint(local), states[1])
    with pytest.raises(TypeError, match="source must be a path"):
        deltas.pull(local, None)


def test_pull_raises_errors_of_recovery(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    chain = write_chain(source, states[:2])
    kill_while_applying(local, *chain)
    journal = local / ".weight_sync" / "journal"
    data = journal.read_bytes()
    boot = open("/proc/sys/kernel/random/boot_id", "rb").read().strip()
    assert boot in data
    journal.write_bytes(data.replace(boot, bytes(reversed(boot))))
    assert "restarted" in expect("VersionMismatch", lambda: deltas.pull(local, source))


def test_recover_removes_only_copies_that_an_application_made(tmp_path, states, local):
    """The list of an application that was killed names its copies."""
    first, second = sorted(local.glob("*.safetensors"))
    copies = [path.with_name(path.name + ".delta-tmp") for path in (first, second)]
    for copy in copies:
        copy.write_bytes(b"part")
    deltas.recover(local)
    assert all(copy.exists() for copy in copies)
    (local / ".weight_sync").mkdir()
    (local / ".weight_sync" / "copies").write_text(
        json.dumps({"version": "0", "files": {first.name: [0, 0]}}))
    deltas.recover(local)
    assert [copy.exists() for copy in copies] == [False, True]


@pytest.mark.parametrize("roll_back", [False, True])
@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("same_inode", [False, True])
def test_files_that_were_saved_after_a_kill_stay(tmp_path, states, local, version, same_inode,
                                                 roll_back):
    """The base, the new version or another one, in the same file or in a new one."""
    chain = write_chain(tmp_path, states)
    kill_while_applying(local, chain[0])
    write_checkpoint(tmp_path / "saved", states[version])
    for path in (tmp_path / "saved").glob("*.safetensors"):
        if not same_inode:
            os.unlink(local / path.name)
        shutil.copyfile(path, local / path.name)
    calls = [lambda: deltas.recover(local, roll_back=roll_back),
             lambda: deltas.apply(local, chain[0])]
    for call in calls:
        assert "delete .weight_sync" in expect("FileChanged", call)
        assert same(read_checkpoint(local), states[version])
    shutil.rmtree(local / ".weight_sync")
    assert deltas.version_of(local) == (None, False)


def test_a_journal_does_not_lead_to_the_network(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    kill_while_applying(local, chain[0])
    journal = local / ".weight_sync" / "journal"
    folder = os.fsencode(chain[0])
    data = journal.read_bytes()
    assert folder in data
    url = b"http://127.0.0.1:9/"
    journal.write_bytes(data.replace(folder, url + b"q" * (len(folder) - len(url))))
    with pytest.raises((ValueError, RuntimeError, OSError), match="journal names it"):
        deltas.recover(local)


def test_a_linked_weight_sync_is_refused(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "undo").write_bytes(b"kept")
    os.symlink(tmp_path / "other", local / ".weight_sync")
    for call in (lambda: deltas.apply(local, chain[0]), lambda: deltas.reading(local).__enter__(),
                 lambda: deltas.recover(local), lambda: deltas.version_of(local)):
        with pytest.raises(RuntimeError, match="symbolic link"):
            call()
    assert os.listdir(tmp_path / "other") == ["undo"]


# ---- subfolders ----

def write_nested(folder, state):
    """Write a checkpoint whose two files are in a subfolder."""
    write_checkpoint(folder, state)
    (folder / "parts").mkdir()
    index = json.loads((folder / folders.INDEX).read_text())
    index["weight_map"] = {name: "parts/" + file for name, file in index["weight_map"].items()}
    (folder / folders.INDEX).write_text(json.dumps(index))
    for path in list(folder.glob("*.safetensors")):
        path.rename(folder / "parts" / path.name)


@pytest.mark.parametrize("new_files", [False, True])
def test_shards_in_subfolders(tmp_path, states, new_files):
    local = tmp_path / "nested"
    write_nested(local, states[0])
    for step, folder in enumerate(write_chain(tmp_path, states)):
        deltas.apply(local, folder, new_files=new_files)
        assert same(read_checkpoint(local / "parts"), states[step + 1])
    assert not list(local.glob("**/*.delta-tmp"))


def test_a_copy_that_is_missing_is_an_error(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    (local / ".weight_sync").mkdir()
    name = next(local.glob("*.safetensors")).name
    (local / ".weight_sync" / "renames").write_text(
        '{"version": "000001", "files": {"%s": [1, 1], "%s": [2, 2]}}' % (name, name))
    assert "delete .weight_sync" in expect(
        "FileChanged", lambda: deltas.apply(local, chain[1]))
    assert deltas.version_of(local).interrupted


# ---- making ----

@pytest.mark.parametrize("name", [
    "model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors.bak",
    "other.safetensors"])
def test_make_deletes_no_files_of_others(tmp_path, states, name):
    write_checkpoint(tmp_path / "old", states[0])
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / name).write_bytes(b"kept")
    make = lambda: deltas.make(  # noqa: E731
        tmp_path / "old", states[1], tmp_path / "made", version="1", base_version="0")
    if name.endswith(".safetensors"):
        with pytest.raises(ValueError, match="files of a model"):
            make()
        assert os.listdir(tmp_path / "made") == [name]
    else:
        make()
    assert (tmp_path / "made" / name).read_bytes() == b"kept"


def test_a_make_that_fails_leaves_nothing(tmp_path, states):
    write_checkpoint(tmp_path / "old", states[0])
    write_delta(tmp_path / "v2", states[1], states[2], "2", "1")
    expect("DigestMismatch", lambda: deltas.convert(
        tmp_path / "old", tmp_path / "v2", tmp_path / "made"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("shape", "dtype", "words"), [
    ((20, 10), "U8", "[10, 20]"), ((10, 10), "BF16", "U8")])
def test_make_refuses_another_dtype_or_shape(tmp_path, shape, dtype, words):
    data = numpy.zeros((10, 20), numpy.uint8)
    write_file(tmp_path / "old.safetensors", {"a": data})
    made = data.reshape(shape) if dtype == "U8" else data
    write_file(tmp_path / "new.safetensors", {"a": made}, dtype=dtype)
    assert words in expect("TensorInvalidInfo", lambda: deltas.make(
        tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "made",
        version="1", base_version="0"))


def test_make_refuses_torch_tensors_of_another_kind(tmp_path):
    torch = pytest.importorskip("torch")
    write_file(tmp_path / "old.safetensors", {"a": numpy.zeros((10, 20), numpy.uint8)},
               dtype="BF16")
    for made in (torch.zeros(10, 10, dtype=torch.float16),
                 torch.zeros(5, 20, dtype=torch.bfloat16)):
        assert "BF16 [10, 10]" in expect("TensorInvalidInfo", lambda made=made: deltas.make(
            tmp_path / "old.safetensors", {"a": made}, tmp_path / "made", version="1",
            base_version="0"))
    deltas.make(tmp_path / "old.safetensors", {"a": torch.ones(10, 10, dtype=torch.bfloat16)},
                tmp_path / "made", version="1", base_version="0")


def test_make_and_readers_look_at_the_note(tmp_path, states, local):
    chain = write_chain(tmp_path, states, encoding="overwrite")
    deltas.apply(local, chain[0])
    made = tmp_path / "made"
    calls = [
        lambda: deltas.make(local, states[2], made, version="000006", base_version="000005"),
        lambda: deltas.convert(local, chain[0], made),
        lambda: list(deltas.Delta(chain[0]).patches(local, framework="numpy"))]
    for call in calls:
        assert "its version note" in expect("VersionMismatch", call)
    (local / ".weight_sync" / "journal").write_bytes(b"")
    write_checkpoint(tmp_path / "base", states[0])
    calls.append(lambda: deltas.make(tmp_path / "base", local, made, version="000006",
                                     base_version="000005"))
    for call in calls:
        assert "interrupted" in expect("VersionMismatch", call)
    assert not made.exists()


def test_make_keeps_a_temporary_index_of_another_program(tmp_path, states):
    write_checkpoint(tmp_path / "old", states[0])
    made = tmp_path / "made"
    made.mkdir()
    foreign = made / (folders.INDEX + ".tmp")
    foreign.write_bytes(b"kept")
    for _ in range(2):
        with pytest.raises(ValueError, match="Choose another folder"):
            deltas.make(tmp_path / "old", states[1], made, version="000001", base_version="000000")
        assert foreign.read_bytes() == b"kept"
        assert os.listdir(made) == [foreign.name]


@pytest.mark.parametrize("how", ["saved again", "copied"])
def test_a_note_of_other_files_is_an_error(tmp_path, states, local, command, how):
    """The files were saved again, or copied without their times."""
    chain = write_chain(tmp_path, states)
    deltas.apply(local, chain[0])
    if how == "copied":
        shutil.copytree(local, tmp_path / "copy", copy_function=shutil.copyfile)
        local = tmp_path / "copy"
    else:
        for path in local.glob("*.safetensors"):
            path.write_bytes(path.read_bytes())
    for call in (lambda: deltas.version_of(local), lambda: deltas.pull(local, tmp_path),
                 lambda: deltas.pending(local, tmp_path),
                 lambda: deltas.reading(local).__enter__()):
        assert "saved again, or copied without its times" in expect("FileChanged", call)
    shown = subprocess.run([command, "delta", "show", local], capture_output=True, text=True)
    assert shown.returncode == 2 and "copied without its times" in shown.stderr


def test_a_base_that_has_the_new_values_is_refused(tmp_path, states):
    write_checkpoint(tmp_path / "new", states[1])
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", encoding="overwrite")
    assert "all new values" in expect("VersionMismatch", lambda: deltas.convert(
        tmp_path / "new", folder, tmp_path / "made"))


@pytest.mark.parametrize(("base", "version"), [("9", "5"), ("7", "007"), ("", "a"), ("a", "")])
def test_make_refuses_versions_that_cannot_be_opened(tmp_path, states, base, version):
    write_checkpoint(tmp_path / "old", states[0])
    with pytest.raises(ValueError, match="version"):
        deltas.make(tmp_path / "old", states[1], tmp_path / "made", version=version,
                    base_version=base, dialect="modelexpress")


# ---- manifests ----

def test_a_manifest_of_the_result_covers_unchanged_tensors(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    write_checkpoint(tmp_path / "new", states[3])
    manifest = tmp_path / "new.manifest"
    fastsafetensors.write_manifest(local)  # becomes stale
    fastsafetensors.write_manifest(tmp_path / "new", manifest)
    shutil.copytree(local, tmp_path / "copy")
    deltas.apply(local, *chain, manifest=manifest)
    assert fastsafetensors.check_manifest(local) == []
    damaged = next(path for path in (tmp_path / "copy").glob("*.safetensors")
                   if "same" in folders.read_file(path)[0])
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1  # of a tensor that no delta changes
    damaged.write_bytes(data)
    assert "no delta changed" in expect("DigestMismatch", lambda: deltas.apply(
        tmp_path / "copy", *chain, manifest=manifest))
    with pytest.raises(TypeError, match="^manifest must be a path"):
        deltas.apply(local, *chain, manifest=3)


def test_pull_uses_the_manifest_of_the_last_version(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    chain = write_chain(source, states)
    write_checkpoint(tmp_path / "new", states[3])
    fastsafetensors.write_manifest(tmp_path / "new", chain[-1] / "model.manifest")
    deltas.pull(local, source)
    assert fastsafetensors.check_manifest(local) == []
    assert same(read_checkpoint(local), states[3])


# ---- patches and live tensors ----

@pytest.mark.parametrize(("dtype", "nan"), [
    ("BF16", b"\xc0\x7f"), ("F16", b"\x00\xfe"),
    ("F64", b"\0\0\0\0\0\0\xf8\x7f")])
def test_nans_are_found_by_numpy(tmp_path, dtype, nan):
    local = tmp_path / "local"
    local.mkdir()
    header = json.dumps({"a": {"dtype": dtype, "shape": [64 // len(nan)],
                               "data_offsets": [0, 64]}}).encode()
    (local / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(64))
    old, finite = numpy.zeros(64, numpy.uint8), numpy.zeros(64, numpy.uint8)
    finite[0] = 1
    special = old.copy()
    special[:len(nan)] = numpy.frombuffer(nan, numpy.uint8)
    for number, (new, is_sparse) in enumerate(((finite, True), (special, False))):
        folder = write_delta(tmp_path / f"v{number}", {"a": old}, {"a": new}, "1", "0")
        patch, = deltas.Delta(folder).patches(local, framework="numpy")
        assert (patch.indices is not None) == is_sparse
        assert len(patch.values) == (1 if is_sparse else 64 // len(nan))


def test_patches_of_fp8_are_dense(tmp_path):
    """vLLM's receiver has no index_copy_ of these on the CPU."""
    local = tmp_path / "local"
    local.mkdir()
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [64],
                               "data_offsets": [0, 64]}}).encode()
    (local / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(64))
    old, new = numpy.zeros(64, numpy.uint8), numpy.zeros(64, numpy.uint8)
    new[5] = 1
    folder = write_delta(tmp_path / "v1", {"a": old}, {"a": new}, "1", "0")
    for nan_is_dense in (True, False):
        patch, = deltas.Delta(folder).patches(local, framework="numpy", nan_is_dense=nan_is_dense)
        assert (patch.indices is None) == nan_is_dense
        assert patch.values.tobytes() == (new.tobytes() if nan_is_dense else b"\x01")


def test_prepare_compares_versions_as_numbers(tmp_path, states):
    chain = write_chain(tmp_path, states)
    live = {name: value.copy() for name, value in states[0].items()}
    with deltas.Delta(chain[0]).prepare(live, version="0") as change:
        change.commit()
    assert same(live, states[1])
    expect("VersionMismatch", lambda: deltas.Delta(chain[1]).prepare(live, version="7"))


def test_invalid_arguments(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    delta = deltas.Delta(chain[0])
    for call in (lambda: delta.apply(local, threads=-1), lambda: delta.verify(local, threads=-1),
                 lambda: delta.prepare({}, threads=-1), lambda: deltas.recover(local, threads=-1),
                 lambda: deltas.convert(local, delta, tmp_path / "m", threads=-1)):
        with pytest.raises((ValueError, KeyError), match="threads|not among"):
            call()
    for level in (0, 20):
        with pytest.raises(ValueError, match="level"):
            deltas.convert(local, delta, tmp_path / "m", level=level)
    with pytest.raises(TypeError, match="list"):
        delta.prepare({name: [1, 2] for name in states[0]})


# ---- the source, and readers ----

def test_a_gap_in_the_source_is_an_error(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    chain = write_chain(source, states)
    deltas.apply(local, chain[0])
    os.rename(chain[1], tmp_path / "later")
    assert "missing" in expect("VersionMismatch", lambda: deltas.pull(local, source))
    os.rename(tmp_path / "later", chain[1])
    deltas.pull(local, source)
    assert same(read_checkpoint(local), states[3])


@pytest.mark.parametrize("has_note", [True, False])
@pytest.mark.parametrize("has_manifests", [True, False])
def test_versions_that_form_a_cycle_are_an_error(has_note, has_manifests, tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    write_delta(source / "1", states[0], states[1], "b", "a")
    write_delta(source / "2", states[1], states[0], "a", "b")
    write_checkpoint(tmp_path / "b", states[1])
    if has_note:
        write_checkpoint(tmp_path / "z", states[2])
        write_delta(tmp_path / "0", states[2], states[0], "a", "z")
        shutil.rmtree(local)
        (tmp_path / "z").rename(local)
        deltas.apply(local, tmp_path / "0")
    if has_manifests:
        fastsafetensors.write_manifest(tmp_path / "b", source / "1/model.manifest")
        fastsafetensors.write_manifest(local, source / "2/model.manifest")
    assert "cycle" in expect("VersionMismatch", lambda: deltas.pull(local, source))
    assert "cycle" in expect("VersionMismatch", lambda: deltas.pending(local, source))
    assert same(read_checkpoint(local), states[0])
    if has_note:
        deltas.pull(local, source, until="b")
        assert deltas.version_of(local).version == "b"


@pytest.mark.parametrize("cycle", [[("b", "a"), ("a", "b")], [("b", "b")]])
def test_a_cycle_hides_no_other_chain(cycle, tmp_path, states, local):
    """Without a note, the only version without a predecessor need not be the checkpoint's."""
    source = tmp_path / "source"
    source.mkdir()
    write_delta(source / "2", states[1], states[2], "y", "x")
    for number, (version, base) in enumerate(cycle):
        write_delta(source / f"1{number}", states[0], states[1], version, base)
    assert "cycle" in expect("VersionMismatch", lambda: deltas.pull(local, source))
    assert same(read_checkpoint(local), states[0])


def test_of_two_folders_with_one_base_the_last_is_used(tmp_path, states, local):
    source = tmp_path / "source"
    source.mkdir()
    for name in "weight_v000001", "weight_v000001-retry":
        write_delta(source / name, states[0], states[1], "000001", "000000")
    assert deltas.pending(local, source) == [str(source / "weight_v000001-retry")]


def test_pull_applies_a_long_chain_in_parts(tmp_path, monkeypatch):
    many = make_states(20, share=0.0001)
    local, source = tmp_path / "local", tmp_path / "source"
    write_checkpoint(local, many[0])
    source.mkdir()
    write_chain(source, many)
    counts = []
    apply = deltas.apply
    monkeypatch.setattr(deltas, "apply", lambda checkpoint, *chain, **options: (
        counts.append(len(chain)), apply(checkpoint, *chain, **options))[1])
    assert deltas.pull(local, source) is not None
    assert counts == [16, 3] and same(read_checkpoint(local), many[19])


@pytest.mark.parametrize("text", [
    '{"metadata": {"delta_encoding": "xor", "version": "' + "9" * 5000 + '", '
    '"base_version": "' + "8" * 5000 + '"}}', '{"metadata": ' + "[" * 100_000])
def test_a_bad_index_does_not_stop_others(tmp_path, states, local, text):
    source = tmp_path / "source"
    source.mkdir()
    write_chain(source, states)
    deltas.apply(local, source / "weight_v000001")
    (source / "bad").mkdir()
    (source / "bad" / folders.INDEX).write_text(text)
    assert deltas.pull(local, source) is not None
    assert same(read_checkpoint(local), states[3])


def test_the_first_load_is_locked_too(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    with deltas.reading(local), pytest.raises(TimeoutError):
        deltas.apply(local, chain[0])
    deltas.apply(local, chain[0])
    with pytest.raises(FileNotFoundError), deltas.reading(tmp_path / "nowhere"):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_lock(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    reader, writer = os.pipe()
    deltas.apply(local, chain[0])
    with deltas.reading(local):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent is done
            os._exit(0)
    os.close(reader)
    try:
        deltas.apply(local, chain[1])
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_engine_options_that_do_not_go_together(tmp_path, states, local):
    pytest.importorskip("torch")
    import logging

    from fastsafetensors._engine_weights import iterate, split_options

    for more in ({"verify": True}, {"public_key": "key"}):
        with pytest.raises(ValueError, match="manifest"):
            split_options({"deltas": "x", **more}, ())
    with pytest.raises(ValueError, match="local folder"):
        split_options({"deltas": "s3://bucket/deltas"}, ())
    options, _ = split_options({"deltas": str(tmp_path / "later"), "progress": False}, ())
    files = [str(path) for path in local.glob("*.safetensors")]
    assert len(list(iterate(files, options, logging.getLogger("test"), device="cpu"))) == 5


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_roll_back_of_files_that_have_the_new_version(tmp_path, encoding):
    """Another program has copied the new version over the files: they are not changed."""
    old = {f"t{i}": numpy.zeros(300_000, numpy.uint8) for i in range(5)}
    new = {name: value.copy() for name, value in old.items()}
    for value in new.values():
        value[::10] = 1
    for name, state in (("local", old), ("new", new)):
        write_checkpoint(tmp_path / name, state)
    delta = write_delta(tmp_path / "v1", old, new, "1", "0", encoding=encoding)
    kill_while_applying(tmp_path / "local", delta)
    time.sleep(0.02)  # a tick of the file system's times
    for path in (tmp_path / "new").glob("*.safetensors"):
        shutil.copyfile(path, tmp_path / "local" / path.name)
    expect("FileChanged", lambda: deltas.recover(tmp_path / "local", roll_back=True))
    assert same(read_checkpoint(tmp_path / "local"), new)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_new_files_keep_owner_group_and_access_list(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    entry = struct.Struct("<HHI")  # acl(5): an entry's tag, permissions and user
    access = struct.pack("<I", 2) + b"".join(itertools.starmap(entry.pack, [
        (1, 6, 2**32 - 1), (2, 6, 1234), (4, 0, 2**32 - 1), (16, 6, 2**32 - 1),
        (32, 0, 2**32 - 1)]))
    files = sorted(local.glob("*.safetensors"))
    for path in files:
        os.chown(path, 1234, 5555)
        path.chmod(0o640)
    os.setxattr(files[0], "system.posix_acl_access", access)
    deltas.apply(local, chain[0], new_files=True)
    for path in files:
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (1234, 5555)
        assert found.st_mode & 0o777 == (0o660 if path == files[0] else 0o640)
    assert os.getxattr(files[0], "system.posix_acl_access") == access
    assert same(read_checkpoint(local), states[1])
