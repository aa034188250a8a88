# SPDX-License-Identifier: Apache-2.0
"""An empty path, such as an unset variable, is an error. It is not the current folder or "/"."""

import os
import subprocess

import pytest

import fastsafetensors
from fastsafetensors import deltas, distributed, training

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
    "deltas.make": lambda: deltas.make("", "", "", version="2", base_version="1"),
    "deltas.apply": lambda: deltas.apply("", "v1"),
    "deltas.recover": lambda: deltas.recover(""),
    "deltas.version_of": lambda: deltas.version_of(""),
    "deltas.pull": lambda: deltas.pull("", "versions"),
    "deltas.pending": lambda: deltas.pending("local", ""),
}


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
    ["sign", "--key", "key.pem", ""], ["sign", "--key", "key.pem", "--output", "x.sig", ""],
    ["verify", "--signature", "x.sig", "--key", "pub.pem", ""], ["verify", ""], ["hash", ""],
    ["clean", ""], ["delta", "recover", ""], ["delta", "show", ""],
    ["delta", "make", "", "", "", "--version", "2", "--base-version", "1"]])
def test_command(words, empty_folder, command):
    before = sorted(os.listdir("/"))
    done = subprocess.run([command, *words], capture_output=True, text=True)
    assert done.returncode in (2, 3) and "empty" in done.stderr, done
    assert os.listdir(empty_folder) == [] and sorted(os.listdir("/")) == before
