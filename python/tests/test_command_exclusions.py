# SPDX-License-Identifier: Apache-2.0
"""Options of the command that exclude each other, and targets that could not be opened."""

import subprocess

import pytest


@pytest.fixture
def run(command, tmp_path, torch):
    """Run the command in a folder with model.safetensors."""
    from fastsafetensors.torch import save_file

    save_file({"l.0.a": torch.ones(4), "l.1.a": torch.zeros(4)}, tmp_path / "m.safetensors",
              metadata={"k": "old"})

    def run_command(*words):
        return subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True)

    return run_command


@pytest.mark.parametrize("words, said", [
    (["verify", "--hash", "--manifest"], "--hash, --manifest and --signature cannot be combined"),
    (["verify", "--manifest", "--signature", "s", "--public-key", "k"], "cannot be combined"),
    (["verify", "--hash", "--signature", "s", "--public-key", "k"], "cannot be combined"),
    (["verify", "--lenient", "--manifest"], "--lenient has no effect"),
    (["edit", "--set", "k=v", "--unset", "k"], "--set and --unset cannot be combined for the key"),
    (["edit", "--unset", "k", "--set", "k=v"], "--set and --unset cannot be combined for the key"),
], ids=" ".join)
def test_options_that_exclude_each_other(words, said, run, tmp_path):
    before = (tmp_path / "m.safetensors").read_bytes()
    done = run(*words, "m.safetensors")
    assert done.returncode == 3 and said in done.stderr
    assert (tmp_path / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize("words, said", [
    (["--by-layer", "--count", "2"], "--count and --by-layer cannot be combined"),
    (["--by-layer", "--size", "5G"], "--size and --by-layer cannot be combined"),
    (["--count", "2", "--size", "5G"], "--size and --count cannot be combined"),
    ([], "expected --size, --count or --by-layer"),
], ids=" ".join)
def test_ways_to_split(words, said, run, tmp_path):
    done = run("split", *words, "m.safetensors", "folder")
    assert done.returncode == 3 and said in done.stderr
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("word", ["convert", "merge", "extract", "rescue"])
def test_one_file_is_no_index(word, run, tmp_path):
    options = ["--select", "*"] if word == "extract" else []
    done = run(word, *options, "m.safetensors", "model.safetensors.index.json")
    assert done.returncode == 3 and "has the name of an index" in done.stderr
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_a_folder_has_one_index(run, tmp_path):
    assert run("split", "--count", "2", "m.safetensors", "folder").returncode == 0
    done = run("split", "--count", "2", "--stem", "other", "m.safetensors", "folder")
    assert done.returncode == 2 and "model.safetensors.index.json" in done.stderr
    assert run("verify", "folder").returncode == 0
    assert run("split", "--by-layer", "m.safetensors", "folder").returncode == 0
    assert run("verify", "folder").returncode == 0


def test_what_a_model_does_not_allow_is_no_usage(run, tmp_path):
    """Exit code 3 is for words that are wrong whatever the files hold."""
    assert run("split", "--count", "2", "m.safetensors", "folder").returncode == 0
    done = run("edit", "--set", "k=v", "folder")
    assert done.returncode == 2 and "is a sharded model" in done.stderr
