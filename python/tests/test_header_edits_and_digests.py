# SPDX-License-Identifier: Apache-2.0
"""Header edits without reading tensors, digests, and detection of damage."""

import hashlib
import os
import stat

import pytest

import fastsafetensors
from fastsafetensors import SafetensorError, edit_header, hash_file, verify_file
from fastsafetensors._base import command
from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def path(tmp_path, torch):
    """A file of two tensors with metadata."""
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "m.st", {"note": "x", "old": "y"})
    return tmp_path / "m.st"


def test_metadata_is_edited(path, torch):
    os.chmod(path, 0o640)
    edit_header(path, {"note": "1\u00e9", "old": None, "new": ""}, durable=True)
    header = fastsafetensors.read_header(path)
    assert header.metadata[str(path)] == {"note": "1\u00e9", "new": ""}
    assert torch.equal(load_file(path)["a"], torch.arange(6.0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    edit_header(path, {"only": "1"}, clear=True)
    assert fastsafetensors.read_header(path).metadata[str(path)] == {"only": "1"}


def test_names_are_edited(path, torch, tmp_path):
    before = path.read_bytes()
    edit_header(path, renames={"a": "b", "b": "a"}, target=tmp_path / "other.st")
    assert path.read_bytes() == before
    other = load_file(tmp_path / "other.st")
    assert torch.equal(other["b"], torch.arange(6.0)) and other["a"].shape == (2, 3)


def test_edits_that_are_refused(path, tmp_path):
    before = path.read_bytes()
    with pytest.raises(SafetensorError, match="nope"):
        edit_header(path, renames={"nope": "x"})
    with pytest.raises(Exception, match="b"):
        edit_header(path, renames={"a": "b"})
    with pytest.raises(FileNotFoundError):
        edit_header(tmp_path / "nope.st", {"a": "b"})
    with pytest.raises(FileNotFoundError):
        edit_header(path, {"a": "b"}, target=tmp_path / "nope" / "x.st")
    for wrong in ({1: "a"}, {"a": 1}, {"a": b"b"}):
        with pytest.raises(TypeError):
            edit_header(path, wrong)
    with pytest.raises(TypeError):
        edit_header(path, renames={"a": None})
    with pytest.raises(UnicodeEncodeError):
        edit_header(path, {"a": "\ud800"})
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["m.st"]


@pytest.fixture
def digests(path):
    """Digests by sha256."""
    if command.find_command() is None:
        pytest.skip("the command is not installed with the package")
    try:
        return hash_file(path, "sha256", write=True)
    except SafetensorError as error:
        pytest.skip(str(error))


def test_digests_are_sha256s(path, digests, torch):
    assert digests.algorithm == "sha256"
    assert digests.files == {"m.st": hashlib.sha256(path.read_bytes()).hexdigest()}
    for name, tensor in load_file(path).items():
        assert digests.tensors[name] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_damage_is_found(path, digests):
    assert verify_file(path) == [] == verify_file(path, digests=True)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert verify_file(path) == []
    problems = verify_file(os.fsencode(path), digests=True)
    assert [p.kind for p in problems] == ["DigestMismatch"] * 2 and "b" in problems[0].message
    path.write_bytes(content[:-4])
    (problem,) = verify_file(path)
    assert problem.kind == "MetadataIncompleteBuffer" and problem.file == str(path)
    (missing,) = verify_file(path.with_name("none"))
    assert missing.kind == "FileNotFound"


def test_missing_digests(path, digests, tmp_path):
    os.unlink(f"{path}.digest")
    (problem,) = verify_file(path, digests=True)
    assert problem.kind == "NoDigests"
    with pytest.raises(FileNotFoundError):
        hash_file(tmp_path / "none")
    with pytest.raises(ValueError, match="md5"):
        hash_file(path, "md5")


def test_without_the_command(path, monkeypatch):
    monkeypatch.setattr(command, "find_command", lambda: None)
    with pytest.raises(FileNotFoundError, match="command"):
        hash_file(path)
