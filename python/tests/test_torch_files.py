# SPDX-License-Identifier: Apache-2.0
"""The command's convert for torch.save files."""

import json
import os
import pickle
import subprocess

import pytest
from test_rewrite import ours

from fastsafetensors.torch import load_file


@pytest.fixture
def convert(command):
    """Return a function that runs convert with this Python: (stdout, stderr)."""

    def call(*arguments, code=0):
        done = subprocess.run([command, "convert", *map(str, arguments)], env=ours(), text=True,
                              capture_output=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    return call


def test_torch_files(convert, tmp_path, torch):
    tied = torch.arange(6.0).reshape(2, 3)
    state = {"a": tied, "tied": tied, "turned": tied.t(), "ids": torch.arange(3)}
    for nested in (state, {"state_dict": state, "epoch": 3}):
        torch.save(nested, tmp_path / "old.pt")
        out, err = convert("--dtype", "BF16", tmp_path / "old.pt", tmp_path / "new")
        assert "tensors" in out
        assert "tied tensors are saved once, without tied (the same as a)" in err
        loaded = load_file(tmp_path / "new")
        assert torch.equal(loaded["a"], tied.bfloat16())
        assert loaded["ids"].dtype == torch.int64
        assert "tied" not in loaded
    torch.save({"a": tied, "epoch": 3}, tmp_path / "old.pt")
    _, err = convert(tmp_path / "old.pt", tmp_path / "bad", code=1)
    assert "'epoch' is int" in err
    (tmp_path / "evil.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch " +
                                       os.fsencode(tmp_path) + b"/owned'\ntR.")
    convert(tmp_path / "evil.pt", tmp_path / "bad", code=1)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "bad").exists()


def test_torch_files_take_the_options_of_convert(command, convert, tmp_path, torch):
    """convert accepts its options for torch files as well, with JSON output and standard output."""
    source, out = tmp_path / "t.bin", tmp_path / "out"
    torch.save({"b": torch.ones(3, 5), "a": torch.arange(4)}, source)
    text, _ = convert("--json", "--dtype", "bfloat16", "--alignment=4096", "--ord", "given",
                      "--quick", source, out)
    answer = json.loads(text)
    assert (answer["tensors"], answer["converted"]) == (2, 1)
    assert answer["bytes"] == out.stat().st_size
    assert answer["promise"] == "quick" and answer["target"] == str(out)
    assert load_file(out)["b"].dtype == torch.bfloat16
    text, _ = convert("--json", "--dry-run", "--select", "b", source, "no")
    assert json.loads(text)["dry_run"] and json.loads(text)["tensors"] == 1
    assert json.loads(text)["shards"][0]["tensors"] == 1
    (tmp_path / "bad.bin").write_bytes(b"\x80\x02}q\x00.")
    text, err = convert("--json", tmp_path / "bad.bin", out, code=1)
    assert json.loads(text)["error"]["file"] == str(tmp_path / "bad.bin") and err == ""
    done = subprocess.run([command, "convert", "--select", "a*", source, "-"], cwd=tmp_path,
                          capture_output=True, env=ours())
    out.write_bytes(done.stdout)
    assert load_file(out)["a"].tolist() == [0, 1, 2, 3] and not (tmp_path / "-").exists()
    for words in (["--lenient", source, out], ["--json", source, "-"]):
        convert(*words, code=3)


def test_torch_files_are_compressed_and_get_manifests(convert, tmp_path, torch):
    """The options for compression and manifests work for torch files as well."""
    from fastsafetensors import check_manifest

    weights = {"w": torch.randn(300, 1000).bfloat16()}
    torch.save(weights, tmp_path / "old.pt")
    new = tmp_path / "new.safetensors"
    convert("--compress", "--manifest=blake3", tmp_path / "old.pt", new)
    assert os.path.getsize(new) < 0.7 * 600000
    assert not check_manifest(new)
    assert "blake3" in (tmp_path / "new.safetensors.manifest").read_text()
    assert torch.equal(load_file(new, verify=True)["w"], weights["w"])


def test_torch_files_with_other_objects_are_named(convert, tmp_path, torch):
    """The message is ours, because torch's recommends running the code and may contain escape
    sequences."""
    (tmp_path / "evil.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    name = tmp_path / "a\x1b[31mb.pt"
    (tmp_path / "evil.pt").rename(name)
    _, err = convert(name, tmp_path / "out", code=1)
    assert "\x1b" not in err and "weights_only" in err and "arbitrary code" not in err
    assert "system" in err
    # An operation that the restricted loader does not know; and a name that the format cannot have.
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": {1, 2}}, 4))
    out, err = convert("--json", tmp_path / "plain.pt", tmp_path / "out", code=1)
    error = json.loads(out)["error"]
    assert error["kind"] == "NotTensors" and "Save its tensors alone" in error["message"]
    assert err == "" and "weights_only" in error["message"] and "Re-running" not in out
    torch.save({1: torch.ones(2)}, tmp_path / "number.pt")
    _, err = convert(tmp_path / "number.pt", tmp_path / "out", code=1)
    assert "names of tensors must be strings, and the file has 1" in err


def test_no_tensor_of_a_torch_file_is_left_out(convert, tmp_path, torch):
    """Additional weights in a checkpoint are an error; other contents are not."""
    weights = {"w": torch.ones(2)}
    for more in ({"extra": torch.ones(3)}, {"ema": {"w": torch.zeros(2)}}):
        torch.save({"model": weights, **more}, tmp_path / "m.bin")
        _, error = convert(tmp_path / "m.bin", tmp_path / "out", code=1)
        assert next(iter(more)) in error and not (tmp_path / "out").exists()
    torch.save({"model": weights, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "m.bin")
    _, told = convert(tmp_path / "m.bin", tmp_path / "out")
    assert set(load_file(tmp_path / "out")) == {"w"} and "not epoch, optimizer" in told


def test_torch_files_that_are_not_archives(convert, tmp_path, torch):
    torch.save({"w": torch.arange(5.0)}, tmp_path / "old.bin",
               _use_new_zipfile_serialization=False)
    convert(tmp_path / "old.bin", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.arange(5.0))
