# SPDX-License-Identifier: Apache-2.0
"""Weight deltas that are refused: lineage, damaged frames, lists, indexes and shards."""

import json
import os
import struct

import delta_folders as folders
import numpy
import pytest
from delta_folders import expect, make_states, read_checkpoint, same, write_chain
from delta_folders import write_checkpoint, write_delta

import fastsafetensors
from fastsafetensors import deltas

zstandard = pytest.importorskip("zstandard", reason="needs the zstandard package")


# ---- lineage ----

def test_versions_out_of_order(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    before = folders.digest_folder(local)
    expect("VersionMismatch", lambda: deltas.Delta(chain[0], chain[2]))
    assert "missing" in expect("VersionMismatch",
                               lambda: deltas.apply(local, chain[1], version="000000"))
    assert folders.digest_folder(local) == before
    deltas.apply(local, *chain[:2])
    before = folders.digest_folder(local)
    assert "already" in expect("VersionMismatch", lambda: deltas.apply(local, chain[1]))
    assert "older" in expect("VersionMismatch", lambda: deltas.apply(local, chain[0]))
    expect("VersionMismatch", lambda: deltas.apply(local, chain[2], version="000009"))
    assert folders.digest_folder(local) == before
    deltas.apply(local, chain[2])
    assert same(read_checkpoint(local), states[3])


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("options", [{}, {"check_first": True}, {"new_files": True}], ids=str)
def test_a_wrong_base_changes_nothing(tmp_path, states, local, encoding, options):
    folder = write_delta(tmp_path / "v2", states[1], states[2], "2", "1", encoding=encoding)
    before = folders.digest_folder(local)
    message = expect("DigestMismatch",
                     lambda: deltas.apply(local, folder, **options))
    assert "not version 1" in message
    assert folders.digest_folder(local) == before
    assert not list(local.glob("*.delta-tmp"))
    assert deltas.version_of(local) == (None, False)


def test_a_file_that_was_changed_meanwhile(tmp_path, states, local):
    chain = write_chain(tmp_path, states)
    deltas.apply(local, chain[0])
    path = next(local.glob("*.safetensors"))
    os.utime(path, ns=(1, 1))
    expect("FileChanged", lambda: deltas.apply(local, chain[1]))


def test_full_versions_are_not_deltas(tmp_path, local):
    with pytest.raises(ValueError, match="full version"):
        deltas.Delta(local)


# ---- bad input: an error, and nothing is changed ----

def first_of(tables):
    table = next(table for table in tables if table["tensors"])
    return table, next(iter(table["tensors"]))


def tamper(index, tables):
    table, name = first_of(tables)
    payload = bytearray(zstandard.ZstdDecompressor().decompress(table["tensors"][name]))
    payload[len(payload) // 2] ^= 1
    table["tensors"][name] = zstandard.ZstdCompressor().compress(bytes(payload))


def flip_frame(index, tables):
    table, name = first_of(tables)
    payload = bytearray(table["tensors"][name])
    payload[3] ^= 0xFF
    table["tensors"][name] = bytes(payload)


def cut_frame(index, tables):
    table, name = first_of(tables)
    table["tensors"][name] = table["tensors"][name][:-5]


def add_garbage(index, tables):
    table, name = first_of(tables)
    table["tensors"][name] += b"garbage"


def add_frame(index, tables):
    table, name = first_of(tables)
    table["tensors"][name] += zstandard.ZstdCompressor().compress(b"")


def lengthen(index, tables):
    table, name = first_of(tables)
    payload = zstandard.ZstdDecompressor().decompress(table["tensors"][name])
    table["tensors"][name] = zstandard.ZstdCompressor().compress(payload + b"x")


def shorten(index, tables):
    table, name = first_of(tables)
    payload = zstandard.ZstdDecompressor().decompress(table["tensors"][name])
    table["tensors"][name] = zstandard.ZstdCompressor().compress(payload[:-1])


def put_bomb(index, tables):
    table, name = first_of(tables)
    table["tensors"][name] = zstandard.ZstdCompressor().compress(bytes(1 << 30))


def widen_window(index, tables):
    table, name = first_of(tables)
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = zstandard.ZstdDecompressor().decompress(table["tensors"][name])
    table["tensors"][name] = compressor.compress(payload) + compressor.flush()


def empty_entry(index, tables):
    table, name = first_of(tables)
    table["tensors"][name] = b""


FRAMES = [flip_frame, cut_frame, add_garbage, add_frame, lengthen, shorten, put_bomb,
          widen_window, empty_entry]


@pytest.mark.parametrize("change", FRAMES)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_damaged_frames(tmp_path, states, local, change, encoding):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", encoding=encoding,
                         change=change)
    before = folders.digest_folder(local)
    expect("CorruptData", lambda: deltas.apply(local, folder))
    expect("CorruptData", lambda: deltas.verify(local, folder))
    live = {name: value.copy() for name, value in states[0].items()}
    expect("CorruptData", lambda: deltas.Delta(folder).prepare(live))
    assert same(live, states[0])
    assert folders.digest_folder(local) == before
    assert deltas.version_of(local) == (None, False)
    assert not (local / ".weight_sync" / "journal").exists()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_damaged_version_of_a_chain_is_named(tmp_path, states, local, encoding):
    first = write_delta(tmp_path / "v1", states[0], states[1], "1", "0", encoding=encoding)
    second = write_delta(tmp_path / "v2", states[1], states[2], "2", "1", encoding=encoding,
                         change=flip_frame)
    live = {name: value.copy() for name, value in states[0].items()}
    for call in (lambda: deltas.apply(local, first, second),
                 lambda: deltas.Delta(first, second).prepare(live)):
        message = expect("CorruptData", call)
        assert str(second) in message and str(first) not in message


def test_a_tampered_payload(tmp_path, states, local):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", change=tamper)
    before = folders.digest_folder(local)
    expect("DigestMismatch", lambda: deltas.apply(local, folder))
    expect("DigestMismatch", lambda: deltas.Delta(folder).prepare(dict(states[0])))
    assert folders.digest_folder(local) == before


def replace_list(places, values, count=None):
    """Replace the first overwrite list."""
    def change(index, tables):
        table, name = first_of(tables)
        payload = struct.pack("<I", len(places) if count is None else count)
        payload += numpy.array(places, "<u4").tobytes() + bytes(values)
        table["tensors"][name] = zstandard.ZstdCompressor().compress(payload)

    return change


@pytest.mark.parametrize(("places", "count"), [
    ([5, 10**9], None), ([9, 5], None), ([5, 5], None), ([5], 2**32 - 1), ([5], 0),
    ([5, 700002], 2),
])
def test_bad_overwrite_lists(tmp_path, states, local, places, count):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", encoding="overwrite",
                         change=replace_list(places, [1] * len(places), count))
    before = folders.digest_folder(local)
    expect("CorruptData", lambda: deltas.apply(local, folder))
    assert folders.digest_folder(local) == before


def test_a_frame_that_states_another_size_than_its_list(tmp_path, states, local):
    def change(index, tables):
        table, name = first_of(tables)
        payload = struct.pack("<I", 1) + bytes(4) + b"x" + bytes(10**7)
        table["tensors"][name] = zstandard.ZstdCompressor().compress(payload)

    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", encoding="overwrite",
                         change=change)
    assert "holds 10000009 bytes, but the tensor needs 9" in expect(
        "CorruptData", lambda: deltas.verify(local, folder))


def set_metadata(**values):
    def change(index, tables):
        for key, value in values.items():
            if value is None:
                index["metadata"].pop(key)
            else:
                index["metadata"][key] = value

    return change


def escape(index, tables):
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../" + index["weight_map"][name]


def enter_folder(index, tables):
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "sub/" + index["weight_map"][name]


def drop_from_index(index, tables):
    index["weight_map"].pop(next(iter(index["weight_map"])))


def add_to_index(index, tables):
    index["weight_map"]["more"] = next(iter(index["weight_map"].values()))


def rename_in_shard(index, tables):
    table, name = first_of(tables)
    table["tensors"]["other"] = table["tensors"].pop(name)
    table["sums"]["other"] = table["sums"].pop(name)


def drop_checksum(index, tables):
    table, name = first_of(tables)
    table["sums"].pop(name)


def raise_checksum(index, tables):
    table, name = first_of(tables)
    table["sums"][name] = "ABCDEF01"


def cut_checksum(index, tables):
    table, name = first_of(tables)
    table["sums"][name] = table["sums"][name][:-1]


@pytest.mark.parametrize(("change", "tag"), [
    (set_metadata(version=None), "JsonError"),
    (set_metadata(base_version=None), "JsonError"),
    (set_metadata(base_version=""), "JsonError"),
    (set_metadata(version=[1]), "JsonError"),
    (set_metadata(version=1.5), "JsonError"),
    (set_metadata(version=""), "JsonError"),
    (set_metadata(version="x" * 300), "JsonError"),
    (set_metadata(version="a\0b"), "JsonError"),
    (set_metadata(version="000000"), "VersionMismatch"),
    (set_metadata(delta_encoding="sparse"), "Unsupported"),
    (set_metadata(compression_format="lz4"), "Unsupported"),
    (set_metadata(compression_format=None), "Unsupported"),
    (set_metadata(checksum_format="md5"), "Unsupported"),
    (set_metadata(checksum_format=None), "Unsupported"),
    (escape, "PathEscapes"),
    (enter_folder, "PathEscapes"),
    (drop_from_index, "TensorNotFound"),
    (add_to_index, "TensorNotFound"),
    (rename_in_shard, "TensorNotFound"),
    (drop_checksum, "TensorInvalidInfo"),
    (raise_checksum, "TensorInvalidInfo"),
    (cut_checksum, "TensorInvalidInfo"),
])
def test_bad_indexes_and_shards(tmp_path, states, change, tag):
    folder = write_delta(tmp_path / "v", states[0], states[1], "000001", "000000", change=change)
    try:
        deltas.Delta(folder)
    except fastsafetensors.SafetensorError as error:
        assert error.tag == tag, str(error)
    except RuntimeError as error:
        assert tag == "Unsupported", repr(error)
    else:
        pytest.fail("it was opened")


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b'{"metadata": {}}', b'{"metadata": 1, "weight_map": {}}',
    b'{"metadata": {"version": "1", "version": "2"}, "weight_map": {}}',
    b'{"metadata": {}, "metadata": {}, "weight_map": {}}', b"\xff",
    b'{"metadata": {"version": "1"} "weight_map": {}}',
])
def test_indexes_of_the_wrong_json_form(tmp_path, text):
    (tmp_path / folders.INDEX).write_bytes(text)
    with pytest.raises((fastsafetensors.SafetensorError, ValueError)):
        deltas.Delta(tmp_path)


def test_a_name_given_twice(tmp_path, states):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    text = (folder / folders.INDEX).read_text()
    (folder / folders.INDEX).write_text(
        text.replace('{"embed', '{"norm": "model-00000-of-00002.safetensors", "embed'))
    expect("DuplicateTensor", lambda: deltas.Delta(folder))


def test_entries_must_be_bytes(tmp_path, states):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0", shards=1)
    path = next(folder.glob("*.safetensors"))
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    row = next(row for name, row in header.items() if name != "__metadata__")
    row["dtype"] = "I8"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
    expect("TensorInvalidInfo", lambda: deltas.Delta(folder))


def test_a_tensor_that_the_checkpoint_lacks(tmp_path, states, local):
    old, new = dict(states[0]), dict(states[1])
    old["more"], new["more"] = old["norm"], new["norm"]
    folder = write_delta(tmp_path / "v", old, new, "1", "0")
    before = folders.digest_folder(local)
    expect("TensorNotFound", lambda: deltas.apply(local, folder))
    assert folders.digest_folder(local) == before


def test_a_missing_shard_or_folder(tmp_path, states, local):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError):
        deltas.apply(local, folder)
    with pytest.raises(FileNotFoundError):
        deltas.apply(tmp_path / "nowhere", folder)
    with pytest.raises(FileNotFoundError):
        deltas.Delta(tmp_path / "nowhere")


def test_links_are_not_written_through(tmp_path, states, local):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    for path in local.glob("*.safetensors"):
        blob = tmp_path / ("blob" + path.name)
        path.rename(blob)
        path.symlink_to(blob)
    with pytest.raises(Exception, match="symbolic link"):
        deltas.apply(local, folder)
    for path in local.glob("*.safetensors"):
        blob = path.resolve()
        path.unlink()
        os.link(blob, path)
    with pytest.raises(Exception, match="hard links"):
        deltas.apply(local, folder)
    assert same(read_checkpoint(local), states[0])


def test_the_lock_is_held_by_one_process(tmp_path, states, local):
    import fcntl

    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    (local / ".weight_sync").mkdir()
    with open(local / ".weight_sync" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process"):
            deltas.apply(local, folder)
    deltas.apply(local, folder)


def test_a_damaged_journal_is_refused(tmp_path, states, local):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    (local / ".weight_sync").mkdir()
    for content in (b"", b"x" * 5000, b"fst-delta-jrn-1\0" + b"\xff" * 8000):
        (local / ".weight_sync" / "journal").write_bytes(content)
        expect("CorruptData", lambda: deltas.apply(local, folder))
        assert deltas.version_of(local).interrupted
    assert same(read_checkpoint(local), states[0])


def test_bad_version_notes(tmp_path, states, local):
    folder = write_delta(tmp_path / "v", states[0], states[1], "1", "0")
    (local / ".weight_sync").mkdir()
    for text in ("", "[]", "{}", '{"version": null}', '{"version": "0", "files": {"../x": [1, 2]}}',
                 '{"version": "0", "files": {"x": [1]}}'):
        (local / ".weight_sync" / "state.json").write_text(text)
        expect("JsonError", lambda: deltas.apply(local, folder))
    (local / ".weight_sync" / "state.json").write_text('{"version": 0}')
    deltas.apply(local, folder)


# ---- making ----

def test_arguments_that_make_refuses(tmp_path, states):
    write_checkpoint(tmp_path / "old", states[0])
    new = dict(states[1])

    def make(**options):
        given = {"version": "000001", "base_version": "000000", **options}
        state = given.pop("state", new)
        return deltas.make(tmp_path / "old", state, tmp_path / "made", **given)

    for options, words in (
            ({"encoding": "sparse"}, "encoding"), ({"checksum": "md5"}, "checksum"),
            ({"dialect": "other"}, "dialect"), ({"version": "x"}, "decimal"),
            ({"version": "000003"}, "base_version \\+ 1"), ({"level": 20}, "level"),
            ({"dialect": "modelexpress", "encoding": "overwrite"}, "ModelExpress"),
            ({"dialect": "modelexpress", "checksum": "blake3"}, "ModelExpress")):
        with pytest.raises(ValueError, match=words):
            make(**options)
    expect("TensorNotFound", lambda: make(state={"norm": new["norm"]}))
    expect("TensorNotFound", lambda: make(state={**new, "more": new["norm"]}))
    expect("TensorInvalidInfo", lambda: make(state={**new, "norm": new["same"]}))
    assert not (tmp_path / "made" / folders.INDEX).exists()
    make()
    with pytest.raises(ValueError, match="holds a version already"):
        make()
    assert sorted(states[1]) == sorted(new)


def test_remains_of_a_killed_make_are_removed(tmp_path, states):
    write_checkpoint(tmp_path / "old", states[0])
    made = tmp_path / "made"
    made.mkdir()
    shard = made / "model-00003-of-00004.safetensors"
    shard.write_bytes(b"old")
    (made / "making.tmp").write_text(
        f"fastsafetensors-making 1\nshard {shard.stat().st_ino} 3 {shard.name}\n")
    (made / "shard-00000.tmp").write_bytes(b"old")
    (made / "notes.txt").write_text("stays")
    deltas.make(tmp_path / "old", states[1], made, version="1", base_version="0", threads=1)
    assert sorted(os.listdir(made)) == [
        "model-00000-of-00001.safetensors", folders.INDEX, "notes.txt"]
    assert same(folders.apply_by_rules(states[0], made), states[1])


SHARD, MARK = "model-00001-of-00002.safetensors", b"fastsafetensors-making 1\n"


@pytest.mark.parametrize("mark, name", [
    (b"", SHARD), (b"", "shard-00000.tmp"), (b"notes", SHARD), (b"notes", "shard-00000.tmp"),
    (MARK, SHARD), (MARK + b"shard 1 3 " + SHARD.encode() + b"\n", SHARD)])
def test_files_that_no_killed_make_has_written_stay(tmp_path, states, mark, name):
    """A file with the name of a shard is only removed if the mark lists it."""
    write_checkpoint(tmp_path / "old", states[0])
    made = tmp_path / "made"
    made.mkdir()
    (made / name).write_bytes(b"mine")
    (made / "making.tmp").write_bytes(mark)
    with pytest.raises(ValueError, match="holds"):
        deltas.make(tmp_path / "old", states[1], made, version="1", base_version="0")
    assert (made / name).read_bytes() == b"mine"
    assert (made / "making.tmp").read_bytes() == mark


def test_all_files_that_a_killed_make_has_written_are_removed(tmp_path, states):
    """Whatever the length of the list, and wherever in it a line is."""
    write_checkpoint(tmp_path / "old", states[0])
    made = tmp_path / "made"
    made.mkdir()
    lines = [MARK]
    for number in range(1, 401):
        path = made / f"model-{number:05}-of-00400.safetensors"
        path.write_bytes(b"left")
        lines.append(f"shard {path.stat().st_ino} 4 {path.name}\n".encode())
    (made / "making.tmp").write_bytes(b"".join(lines))
    deltas.make(tmp_path / "old", states[1], made, version="1", base_version="0")
    assert not list(made.glob("*-of-00400.safetensors"))
    assert not (made / "making.tmp").exists()


@pytest.mark.parametrize("checksum", ["adler32", "blake3"])
def test_a_conversion_verifies_its_input(tmp_path, states, local, checksum):
    folder = write_delta(tmp_path / "v", states[1], states[2], "2", "1")
    expect("DigestMismatch", lambda: deltas.convert(local, folder, tmp_path / "made",
                                                    checksum=checksum))
    assert not (tmp_path / "made").exists()


def test_long_chains_are_split_or_refused(tmp_path):
    many = make_states(20, share=0.0001)
    local = tmp_path / "local"
    write_checkpoint(local, many[0])
    chain = write_chain(tmp_path, many)
    with pytest.raises(RuntimeError, match="16"):
        deltas.convert(local, deltas.Delta(*chain), tmp_path / "made")
    with pytest.raises(RuntimeError, match="16"):
        deltas.Delta(*chain).prepare(dict(many[0]))
    with pytest.raises(RuntimeError, match="16"):
        deltas.verify(local, *chain)
    with pytest.raises(RuntimeError, match="16"):
        list(deltas.Delta(*chain).patches(local, framework="numpy"))
    deltas.apply(local, *chain)
    assert same(read_checkpoint(local), many[19])
