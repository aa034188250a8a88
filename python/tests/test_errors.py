# SPDX-License-Identifier: Apache-2.0
"""Invalid files: class, name and position of the error, and the reference's verdict."""

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import types

import numpy
import pytest

from fastsafetensors import SafetensorError, safe_open, sign_folder, write_manifest, write_sums
from fastsafetensors._base.errors import add_location
from fastsafetensors.numpy import load_file, save_file

U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'


def test_format_error_has_every_field(raw):
    path = raw('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"abc")
    with pytest.raises(SafetensorError) as caught:
        load_file(path)
    error = caught.value
    assert error.tag == "InvalidOffset" and error.tensor == "a" and error.file == str(path)
    assert error.byte_offset == 8 + 2
    assert str(path) in str(error) and "`a`" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SafetensorError) and str(copy) == str(error)


@pytest.mark.parametrize(("header", "data", "tag"), [
    ("{", b"", "InvalidHeaderDeserialization"),
    (b'{"\xff":{}}', b"", "InvalidHeader"),
    (f'{{"a":{{{U8}}}}}', b"abc", "MetadataIncompleteBuffer"),
    (f'{{"a":{{{U8}}},"a":{{{U8}}}}}', b"ab", "InvalidHeaderDeserialization"),
    ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"ab", "MisalignedSlice"),
])
def test_names_of_faults(raw, header, data, tag):
    with pytest.raises(SafetensorError) as caught:
        load_file(raw(header, data))
    assert caught.value.tag == tag and tag in str(caught.value)


def test_system_errors_keep_their_kind(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")
    assert "No such file or directory" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors"):
        load_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    for special, kind in ((tmp_path / "fifo", "FIFO"), ("/dev/null", "device")):
        with pytest.raises(OSError, match=kind):
            load_file(special)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root can read everything: change the user for a moment
    try:
        with pytest.raises(PermissionError):
            load_file(secret)
    finally:
        os.seteuid(user)


def test_answers_of_the_command_have_the_same_classes(tmp_path):
    """What the package asks the command for fails like what the library does itself."""
    save_file({"a": numpy.zeros(4)}, tmp_path / "m.safetensors")
    model = str(tmp_path / "m.safetensors")
    for call in (lambda: write_manifest(model, f"{tmp_path}/./m.safetensors"),
                 lambda: write_sums(model, f"{tmp_path}/./m.safetensors"),
                 lambda: sign_folder(tmp_path, model), lambda: write_manifest("https://h/m")):
        with pytest.raises(ValueError, match="overwrite a model|private key|local files only"):
            call()
    with pytest.raises(FileNotFoundError):
        write_manifest(model, keep=tmp_path / "none")
    (tmp_path / "m.safetensors.manifest").write_text("nonsense")
    with pytest.raises(SafetensorError) as caught:
        write_manifest(model, keep=f"{model}.manifest")
    assert caught.value.tag == "InvalidManifest" and "m.safetensors.manifest" in caught.value.file


@pytest.mark.parametrize("target, tag", [("none/m", "FileNotFound"), ("folder", "IoError")])
def test_failed_saves_have_tags(tmp_path, target, tag):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SafetensorError) as caught:
        save_file({"a": numpy.zeros(4)}, tmp_path / target)
    assert caught.value.tag == tag and isinstance(caught.value, OSError)


def test_the_place_of_an_error_is_added_once(monkeypatch):
    ranks = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True,
                                  get_world_size=lambda: 2, get_rank=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch.distributed", ranks)
    error = SafetensorError("words")
    add_location(error, "w")
    add_location(error, "w")
    assert str(error) == "words, tensor `w`, rank 1 of 2"


def test_name_in_two_files(raw):
    files = [raw(f'{{"a":{{{U8}}}}}', b"ab", name) for name in ("x", "y")]
    with pytest.raises(SafetensorError) as caught:
        load_file(files)
    assert caught.value.tag == "DuplicateTensor" and caught.value.tensor == "a"


def test_unknown_words(raw):
    path = raw("{}")
    for wrong in ({"mode": "x"}, {"engine": "x"}):
        with pytest.raises(ValueError, match="unknown"):
            load_file(path, **wrong)
    assert load_file(path) == {}


def reference_verdict(path):
    """Return the names that the safetensors package reads from a file, or None if it rejects it."""
    from safetensors import SafetensorError as Reference
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as f:
            return {n: tuple(f.get_slice(n).get_shape()) for n in f.keys()}, f.metadata()
    except Reference:
        return None


def our_verdict(path):
    """Return the names that this package reads, or None."""
    from fastsafetensors import _core

    try:
        model = _core.Model(path)
    except SafetensorError:
        return None
    names = model.names()
    return {n: model.info(model.find(n))[1] for n in names}, model.metadata(0)


EXTRA_FIELDS = ['"x":1e5', '"x":{"y":[]}', '"x":"\\u00e9"', '"x":-0.0', '"x":1e999',
                '"x":"\\ud800"', '"dtype":"U8"', '"x":nul',
                '"x":1.7976931348623157e308', '"x":[1,]', '"x":01']


def generate(random_):
    """Return a header text, usually with a small fault, and its number of data bytes."""
    entries, offset = [], 0
    for i in range(random_.randrange(4)):
        dtype, bits = random_.choice(
            [("U8", 8), ("F32", 32), ("F4", 4), ("BF16", 16), ("I64", 64)])
        shape = [random_.choice([0, 1, 2, 4]) for _ in range(random_.randrange(4))]
        count = 1
        for size in shape:
            count *= size
        end = offset + count * bits // 8
        begin = offset
        if random_.random() < 0.1:
            begin, end = begin + random_.choice([0, 1]), end + random_.choice([-1, 0, 1, 2**64])
        fields = [f'"dtype":"{dtype}"', f'"shape":{shape}', f'"data_offsets":[{begin},{end}]']
        random_.shuffle(fields)
        if random_.random() < 0.1:
            fields.append(random_.choice(EXTRA_FIELDS))
        if random_.random() < 0.04:
            fields.pop()
        name = random_.choice([f"n{i}", f"n{i}\\u0041", f"\\n{i}", f"é{i}", f"__metadata_{i}"])
        entries.append(f'"{name}":{{{",".join(fields)}}}')
        offset = max(offset, end if end < 10000 else offset)
    if random_.random() < 0.3:
        entries.append(random_.choice([
            '"__metadata__":{}', '"__metadata__":null', '"__metadata__":{"a":"b","a":"c"}',
            '"__metadata__":{"a":1}', '"__metadata__":{"a":"\\ud83d\\ude00"}',
            '"__metadata__":[]']))
    random_.shuffle(entries)
    text = random_.choice(["", " "]) + "{" + ",".join(entries) + "}" + " " * random_.randrange(3)
    if random_.random() < 0.25 and text:
        at = random_.randrange(len(text))
        byte = random_.choice(['"', "{", "}", ",", ":", "x", "\\", "\0", "0", "é", ""])
        text = text[:at] + byte + text[at + random_.randrange(2):]
    data = offset + random_.choice([0, 0, 0, 0, 0, 1])
    return text.encode(), data


def test_same_verdict_as_the_reference(tmp_path):
    random_ = random.Random(20261121)
    path = tmp_path / "m.safetensors"
    accepted = 0
    for case in range(3000):
        header, data = generate(random_)
        length = len(header) + (random_.choice([-1, 1, 2**40]) if random_.random() < 0.02 else 0)
        path.write_bytes(struct.pack("<Q", max(length, 0)) + header + bytes(data))
        ours, theirs = our_verdict(path), reference_verdict(path)
        # An intended difference: only this package refuses a duplicate tensor name.
        assert ours == theirs, (case, header, data)
        accepted += ours is not None
    assert 500 < accepted < 2500


def test_truncated_everywhere(tmp_path):
    path = tmp_path / "m.safetensors"
    header = f'{{"a":{{{U8}}}}}'.encode()
    whole = struct.pack("<Q", len(header)) + header + b"ab"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SafetensorError):
            load_file(path)


@pytest.mark.parametrize("mode", ["load", "map"])
def test_shrinking_file_is_an_error(tmp_path, mode):
    from fastsafetensors import _core

    path = tmp_path / "m.safetensors"
    size = 32 << 20
    header = f'{{"a":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    model = _core.Model(path)
    os.truncate(path, 1 << 20)
    with pytest.raises(SafetensorError) as caught:
        model.load(mode=mode).wait()
    assert caught.value.tag == "FileChanged" and str(path) in str(caught.value)


KINDS = {
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n",
    "90868376 bytes": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n",
    "web page": b"<!DOCTYPE html>\n<html><body>Sign in</body></html>",
    "server's JSON response": b'{"error":"Repository not found"}',
    "GGUF": b"GGUF\x03\0\0\0" + bytes(64),
    "fastsafetensors convert": b"PK\x03\x04" + bytes(26) + b"archive/data.pkl",
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0\x02\xff",
    "zeros": bytes(5000),
    "empty": b"",
}


@pytest.mark.parametrize("words", KINDS)
def test_other_file_kinds_are_named(words, tmp_path, command):
    """Every API has the same message for them. Class and kind of the error are unchanged."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(KINDS[words])
    for load in (load_file, lambda name: safe_open(name, framework="numpy")):
        with pytest.raises(SafetensorError, match=words) as caught:
            load(path)
        assert str(caught.value).startswith("Error while deserializing header: ")
    done = subprocess.run([command, "verify", path], capture_output=True, text=True)
    assert done.returncode == 1 and words in done.stderr
    assert "invalid: Header" in done.stdout or "invalid: InvalidHeader" in done.stdout


def test_truncated_file_reports_missing_bytes(raw):
    """The count is right if the header lists the tensors in reverse order, too."""
    entries = [f'"t{i}":{{"dtype":"U8","shape":[10],"data_offsets":[{10 * i},{10 * i + 10}]}}'
               for i in range(5)]
    for order in (entries, entries[::-1]):
        path = raw("{" + ",".join(order) + "}", bytes(35))
        size = path.stat().st_size + 15
        words = f"15 of {size} bytes are missing, 3 of 5 tensors are complete"
        with pytest.raises(SafetensorError, match=words) as caught:
            load_file(path)
        assert caught.value.tag == "MetadataIncompleteBuffer"


def test_folder_without_models_lists_its_contents(tmp_path, raw):
    """The message names pipelines, torch files, unfinished downloads, variants and URLs."""
    def refusal(kind=FileNotFoundError, path=tmp_path):
        with pytest.raises(kind) as caught:
            load_file(path)
        return str(caught.value)

    (tmp_path / "pytorch_model.bin").touch()
    assert "'fastsafetensors convert' can convert pytorch_model.bin" in refusal()
    (tmp_path / "model.safetensors.incomplete").touch()
    assert "unfinished download: model.safetensors.incomplete" in refusal()
    for name in ("unet", "vae", "scheduler", ".cache"):
        (tmp_path / name).mkdir()
    for name in ("unet", "vae", ".cache"):
        raw(f'{{"a":{{{U8}}}}}', b"ab", f"{name}/model.safetensors")
    text = refusal()
    assert "these subfolders contain models" in text and "unet" in text and "vae" in text
    assert "scheduler" not in text and ".cache" not in text
    raw(f'{{"a":{{{U8}}}}}', b"ab", "unet/model.fp16.safetensors")
    assert "variants of one model?" in refusal(SafetensorError, tmp_path / "unet")
    assert "unsupported URL scheme" in refusal(path="ftp://host/model.safetensors")


def test_every_missing_shard_is_named(raw, tmp_path):
    """The message names them with and without an index, and the kind of the error is the same."""
    (tmp_path / "m").mkdir()
    name = "m/model-0000{}-of-00004.safetensors"
    raw(f'{{"a":{{{U8}}}}}', b"ab", name.format(1))
    raw(f'{{"d":{{{U8}}}}}', b"ab", name.format(4))
    with pytest.raises(FileNotFoundError, match="00002.*00003"):
        load_file(tmp_path / "m")
    names = {key: name.format(i + 1)[2:] for i, key in enumerate("abcd")}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FileNotFoundError, match="00002.*00003"):
        load_file(tmp_path / "m")
