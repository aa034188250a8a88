# SPDX-License-Identifier: Apache-2.0
"""The command `fastsafetensors delta`: each action, its JSON and its exit codes."""

import json
import subprocess

import pytest
from delta_folders import make_states, read_checkpoint, same, write_checkpoint


@pytest.fixture
def run(command, tmp_path):
    """Return a function that runs `delta` in a folder with three states of a checkpoint."""
    states = make_states(3)
    for number, state in enumerate(states):
        write_checkpoint(tmp_path / f"s{number}", state)

    def call(*words):
        return subprocess.run([command, "delta", *words], cwd=tmp_path, capture_output=True,
                              text=True, timeout=300)

    call.states, call.folder = states, tmp_path
    return call


def make(run, number, *more):
    return run("make", f"s{number - 1}", f"s{number}", f"v{number}", "--version", str(number),
               "--base-version", str(number - 1), *more)


def test_every_action(run):
    done = make(run, 1, "--encoding", "overwrite", "--checksum", "blake3", "--threads", "1")
    assert done.returncode == 0 and "made: 3 tensors" in done.stdout
    assert make(run, 2, "--level", "3", "--quick").returncode == 0
    shown = json.loads(run("show", "--json", "v1").stdout)
    assert (shown["version"], shown["encoding"], shown["checksum"]) == ("1", "overwrite", "blake3")
    assert [row["name"] for row in shown["tensors"]] == ["embed.weight", "layers.0.weight", "norm"]
    assert "version 2 based on 0" in run("show", "v1", "v2").stdout
    assert "verified: 3 tensors" in run("verify", "s0", "v1", "v2").stdout
    assert same(read_checkpoint(run.folder / "s0"), run.states[0])
    assert run("convert", "s0", "v1", "v2", "both").returncode == 0
    answer = json.loads(run("apply", "--json", "--check-first", "s0", "both").stdout)
    assert answer["recovered"] == 0 and answer["bytes_written"] > 0
    assert same(read_checkpoint(run.folder / "s0"), run.states[2])
    assert run("show", "s0").stdout == "version 2\n"
    assert json.loads(run("show", "--json", "s0").stdout) == {"version": "2", "interrupted": False}
    assert "nothing to recover" in run("recover", "s0").stdout
    assert run("apply", "--new-files", "s1", "v2").returncode == 0
    assert same(read_checkpoint(run.folder / "s1"), run.states[2])


def test_a_full_version_without_a_note_is_shown(run):
    (run.folder / "s0" / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {}}')
    done = run("show", "s0")
    assert (done.returncode, done.stderr) == (0, "") and "no version note" in done.stdout
    answer = json.loads(run("show", "--json", "s0").stdout)
    assert answer == {"version": "", "interrupted": False}


def test_a_checkpoint_of_one_file_is_shown(run):
    folder = run.folder / "one"
    folder.mkdir()
    (run.folder / "s0/model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    done = run("show", "one")
    assert (done.returncode, done.stderr) == (0, "") and "no version note" in done.stdout
    assert json.loads(run("show", "--json", "one").stdout)["version"] == ""
    done = run("show", "one/model.safetensors")
    assert done.returncode == 3 and "folder, not to a file" in done.stderr
    assert run("show", ".").returncode == 2


def test_versions_that_are_refused(run):
    assert make(run, 1).returncode == 0
    for version, words in (("0", "version '0' must be newer than base_version '0'"),
                           ("5", "must be base_version + 1"), ("", "version is empty")):
        done = run("convert", "s0", "v1", "made", "--version", version)
        assert done.returncode == 3 and words in done.stderr
        assert not (run.folder / "made").exists()
    assert "version is empty" in run("verify", "s0", "v1", "--version", "").stderr


def test_errors_and_exit_codes(run):
    assert make(run, 1).returncode == 0
    done = run("apply", "s1", "v1")
    assert done.returncode == 1 and "checksum" in done.stderr
    assert run("apply", "s0", "v1").returncode == 0
    done = run("apply", "--json", "s0", "v1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["kind"] == "VersionMismatch"
    assert run("apply", "s0", "nowhere").returncode == 2
    (run.folder / "s0/.weight_sync/journal").write_bytes(b"")
    assert "interrupted" in run("show", "s0").stdout
    for words in (["make", "s0", "s1"], ["make", "s0", "s1", "x"], ["apply", "s0"], ["show"],
                  ["recover"], ["convert", "s0", "v1"], ["nothing", "s0"],
                  ["apply", "--encoding", "xor", "s0", "v1"], ["show", "--quick", "v1"],
                  ["verify", "--roll-back", "s0", "v1"],
                  ["make", "s0", "s1", "x", "--level", "20"],
                  ["make", "s0", "s1", "x", "--threads", "many"]):
        done = run(*words)
        assert done.returncode == 3, (words, done.stderr)
