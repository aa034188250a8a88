# SPDX-License-Identifier: Apache-2.0
"""An empty path, such as an unset variable, is an error. It is not the current folder or "/"."""

import os
import subprocess

import pytest

import fastsafetensors
from fastsafetensors import checkpoint, deltas, distributed, remote, training

CALLS = {
    "sign_folder": lambda: fastsafetensors.sign_folder("", "key.pem"),
    "sign_folder bytes": lambda: fastsafetensors.sign_folder(b"", "key.pem"),
    "check_signature": lambda: fastsafetensors.check_signature("", "pub.pem"),
    "verify_file": lambda: fastsafetensors.verify_file(""),
    "verify_file digests": lambda: fastsafetensors.verify_file("", digests=True),
    "hash_file": lambda: fastsafetensors.hash_file("", write=True),
    "write_manifest": lambda: fastsafetensors.write_manifest(""),
    "write_sums": lambda: fastsafetensors.write_sums(""),
    "check_manifest": lambda: fastsafetensors.check_manifest(""),
    "save_on_ranks": lambda: distributed.save_on_ranks({}, ""),
    "CheckpointManager": lambda: training.CheckpointManager(""),
    "FastSafetensorsWriter": lambda: checkpoint.FastSafetensorsWriter(""),
    "FastSafetensorsReader": lambda: checkpoint.FastSafetensorsReader(b""),
    "reset": lambda: checkpoint.FastSafetensorsWriter("there").reset(""),
    "changed_tensors": lambda: fastsafetensors.changed_tensors("", "old"),
    "edit_header": lambda: fastsafetensors.edit_header("", {"a": "b"}),
    "deltas.make": lambda: deltas.make("", "", "", version="2", base_version="1"),
    "deltas.apply": lambda: deltas.apply("", "v1"),
    "deltas.recover": lambda: deltas.recover(""),
    "deltas.version_of": lambda: deltas.version_of(""),
    "deltas.pull": lambda: deltas.pull("", "versions"),
    "deltas.pending": lambda: deltas.pending("local", ""),
}


# Optional paths: (parameter, call).
OPTIONAL = [
    ("target", lambda path: fastsafetensors.write_manifest("m", path)),
    ("keep", lambda path: fastsafetensors.write_manifest("m", keep=path)),
    ("target", lambda path: fastsafetensors.write_sums("m", path)),
    ("manifest", lambda path: fastsafetensors.check_manifest("m", path)),
    ("signature", lambda path: fastsafetensors.sign_folder(".", "key.pem", path)),
    ("keep", lambda path: fastsafetensors.sign_folder(".", "key.pem", keep=path)),
    ("private_key", lambda path: fastsafetensors.sign_folder(".", path)),
    ("signature", lambda path: fastsafetensors.check_signature(".", "pub.pem", path)),
    ("public_key", lambda path: fastsafetensors.check_signature(".", path)),
    ("public_key", lambda path: fastsafetensors.load_file(
        "m", verify=fastsafetensors.SignedBy(path))),
    ("signature", lambda path: fastsafetensors.load_file(
        "m", verify=fastsafetensors.SignedBy("pub.pem", path))),
    ("manifest", lambda path: fastsafetensors.load_file(
        "m", verify=fastsafetensors.SignedBy("pub.pem", manifest=path))),
    ("target", lambda path: fastsafetensors.edit_header("m", {"a": "b"}, target=path)),
    ("old", lambda path: fastsafetensors.changed_tensors("m", path)),
    ("manifest", lambda path: fastsafetensors.changed_tensors("m", "old", path)),
    ("ca_file", lambda path: remote.configure(ca_file=path)),
    ("cache_dir", lambda path: remote.cache_objects(path)),
    ("cache_dir", lambda path: remote.cache_prune(0, path)),
]


@pytest.mark.parametrize("value, kind", [("", FileNotFoundError), (3, TypeError)])
@pytest.mark.parametrize("number", range(len(OPTIONAL)), ids=lambda n: f"{n}-{OPTIONAL[n][0]}")
def test_optional_paths(number, value, kind, empty_folder, torch):
    name, call = OPTIONAL[number]
    with pytest.raises(kind, match=f"{name} (is an empty|must be a) path"):
        call(value)
    assert os.listdir(empty_folder) == []


@pytest.mark.parametrize("name", ["endpoint", "bucket_style"])
def test_remote_settings_are_text(name):
    with pytest.raises(TypeError, match=f"^{name} must be text or None"):
        remote.configure(**{name: 3})


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Return the current folder, which has nothing in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_python(name, empty_folder, torch):
    before = sorted(os.listdir("/"))
    with pytest.raises(FileNotFoundError):
        CALLS[name]()
    assert os.listdir(empty_folder) == [] and sorted(os.listdir("/")) == before


@pytest.mark.parametrize("words", [
    ["sign", "--private-key", "key.pem", ""],
    ["sign", "--private-key", "key.pem", "--output", "x.sig", ""],
    ["verify", "--signature", "x.sig", "--public-key", "pub.pem", ""], ["verify", ""], ["hash", ""],
    ["clean", ""], ["delta", "recover", ""], ["delta", "show", ""],
    ["delta", "make", "", "", "", "--version", "2", "--base-version", "1"]])
def test_command(words, empty_folder, command):
    before = sorted(os.listdir("/"))
    done = subprocess.run([command, *words], capture_output=True, text=True)
    assert done.returncode in (2, 3) and "empty" in done.stderr, done
    assert os.listdir(empty_folder) == [] and sorted(os.listdir("/")) == before
