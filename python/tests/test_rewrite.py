# SPDX-License-Identifier: Apache-2.0
"""The command's convert, extract, split, merge, diff and hash."""

import hashlib
import json
import os
import subprocess

import pytest
from conftest import same_bits, sample_tensors

from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def run(command):
    """Return a function that runs the command: (exit code, stdout, stderr)."""

    def call(*arguments, code=0, **options):
        done = subprocess.run([command, *map(os.fspath, map(str, arguments))],
                              capture_output=True, text=True, **options)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    return call


@pytest.fixture
def sample(tmp_path, torch):
    """(path, tensors) of a file of every dtype."""
    tensors = sample_tensors(torch)
    path = tmp_path / "sample.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path, tensors


def test_convert_alone_changes_nothing(run, sample, tmp_path):
    path, _ = sample
    for way in ([], ["--quick"], ["--engine", "buffered"]):
        run("convert", *way, path, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == path.read_bytes()
    run("convert", path, path)  # onto itself: read until the new one takes its place
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def test_convert_dtype_and_alignment(run, sample, tmp_path, torch):
    path, tensors = sample
    run("convert", "--dtype", "F32", "--align", "4096", path, tmp_path / "out")
    loaded = load_file(tmp_path / "out")
    for name, tensor in tensors.items():
        wanted = tensor.float() if tensor.dtype.is_floating_point else tensor
        assert same_bits(torch, loaded[name], wanted), name
    out, _ = run("inspect", "--json", tmp_path / "out")
    for row in json.loads(out)["tensors"]:
        if not row["name"].startswith("__padding__."):
            assert row["offset"] % 4096 == 0 or not row["bytes"]


def test_large_tensors_convert_in_pieces(run, tmp_path, torch):
    tensors = {"w": torch.randn(3, 5, 1 << 21), "row": torch.randn(1, 1 << 23),
               "turned": torch.randn(1 << 23, 1)}
    save_file(tensors, tmp_path / "big")
    run("convert", "--dtype", "BF16", tmp_path / "big", tmp_path / "small")
    loaded = load_file(tmp_path / "small")
    assert all(torch.equal(loaded[name], tensors[name].bfloat16()) for name in tensors)
    out, _ = run("diff", "--values", tmp_path / "big", tmp_path / "big")
    assert "3 tensors are the same" in out


def test_memory_of_a_conversion_is_bounded(command, tmp_path, torch):
    """A file of 512 MiB within 256 MiB."""
    import sys

    torch.manual_seed(0)
    save_file({f"t{i}": torch.zeros(1 << 24) for i in range(8)}, tmp_path / "big")
    script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
              "stdout=subprocess.DEVNULL); "
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    for arguments in (["convert", "--dtype", "F16"], ["split", "--count", "3"]):
        done = subprocess.run(
            [sys.executable, "-c", script, command, *arguments, tmp_path / "big",
             tmp_path / f"out-{arguments[0]}"], capture_output=True, text=True, check=True)
        assert int(done.stdout) <= 256 * 1024
    os.unlink(tmp_path / "big")


def test_split_and_merge(run, sample, tmp_path, torch):
    path, tensors = sample
    for way, check in [(["--size", "1000000"], None), (["--count", "3"], 3),
                       (["--count", "500"], len(tensors))]:
        folder = tmp_path / "set"
        run("split", *way, path, folder)
        files = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
        assert check is None or len(files) == check
        run("merge", folder, tmp_path / "merged")
        assert (tmp_path / "merged").read_bytes() == path.read_bytes()
    layers = {f"model.layers.{i}.{part}": torch.ones(3) for i in range(12) for part in "ab"}
    layers["embed"] = torch.ones(2)
    save_file(layers, path)
    run("split", "--by-layer", "--stem", "m", path, tmp_path / "layers")
    index = json.loads((tmp_path / "layers/m.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 13
    assert all(index[f"model.layers.{i}.a"] == index[f"model.layers.{i}.b"] for i in range(12))


def test_merge_refuses_a_name_in_two_files(run, tmp_path, torch):
    for name in "xy":
        save_file({"same": torch.ones(1), name: torch.ones(1)}, tmp_path / name)
    _, err = run("merge", tmp_path / "x", tmp_path / "y", tmp_path / "out", code=1)
    assert "same" in err
    assert not (tmp_path / "out").exists()


def test_extract(run, sample, tmp_path):
    path, tensors = sample
    run("extract", "--select", "t.float*", "--select", "scalar", path, tmp_path / "out")
    wanted = {name for name in tensors if name.startswith("t.float") or name == "scalar"}
    assert set(load_file(tmp_path / "out")) == wanted
    _, err = run("extract", "--select", "zzz", path, tmp_path / "none", code=1)
    assert "no tensor's name matches" in err
    assert not (tmp_path / "none").exists()


def test_dry_run_writes_nothing(run, sample, tmp_path):
    path, _ = sample
    out, _ = run("convert", "--dtype", "F16", "--dry-run", path, tmp_path / "out")
    assert "would write" in out and "converted to F16" in out
    out, _ = run("split", "--count", "2", "--dry-run", path, tmp_path / "out")
    assert "in 2 files" in out and "file 2:" in out
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_diff(run, sample, tmp_path, torch):
    path, tensors = sample
    out, _ = run("diff", path, path)
    assert "0 differences" in out
    other = dict(tensors)
    other["large"] = tensors["large"].clone()
    other["large"][3, 5] += 0.5
    other["new"] = other.pop("scalar")
    other["empty"] = torch.empty(0, 8)
    save_file(other, tmp_path / "other", {"format": "xx", "b": "1"})
    out, _ = run("diff", "--values", path, tmp_path / "other", code=1)
    for words in ("metadata differs: format", "metadata only in B: b", "only in A: scalar",
                  "only in B: new", "shape or dtype differs: empty",
                  "bytes differ: large: 1 of 700000 elements, by at most 0.5,", "6 differences"):
        assert words in out, out
    out, _ = run("diff", "--quiet", path, tmp_path / "other", code=1)
    assert out == ""
    run("diff", path, tmp_path / "none", code=2)


def test_hashes(run, sample, tmp_path):
    path, _ = sample
    done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True)
    kinds = [kind for kind, library in [("xxh3", "libxxhash"), ("sha256", "libcrypto")]
             if library in done.stdout]
    if not kinds:
        pytest.skip("neither libxxhash nor libcrypto is installed")
    for kind in kinds:
        out, _ = run("hash", "--algorithm", kind, path)
        if kind == "sha256":
            assert hashlib.sha256(path.read_bytes()).hexdigest() in out
        out, _ = run("hash", "--algorithm", kind, "--write", "--dry-run", path)
        assert "would write" in out and not os.path.exists(f"{path}.digest.new")
        run("hash", "--algorithm", kind, "--write", path)
        out, _ = run("verify", "--hash", path)
        assert f"all digests ({kind}) are right" in out
        run("hash", "--algorithm", kind, "--embed", tmp_path / "inside", path)
        run("verify", "--hash", tmp_path / "inside")
        run("diff", "--no-metadata", path, tmp_path / "inside")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    out, _ = run("verify", "--hash", path, code=1)
    assert "differs: tensor" in out and "differs: file" in out
    raw = bytearray((tmp_path / "inside").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "inside").write_bytes(raw)
    out, _ = run("verify", "--hash", tmp_path / "inside", code=1)
    assert "differs:" in out
    os.unlink(os.fspath(path) + ".digest")
    out, _ = run("verify", "--hash", path, code=1)
    assert "no digests are kept" in out
    _, err = run("hash", "--algorithm", "md5", path, code=3)
    assert "unknown algorithm" in err


def test_torch_files(run, tmp_path, torch):
    import sys

    environment = dict(os.environ, PATH=os.path.dirname(sys.executable) + ":" + os.environ["PATH"])
    tied = torch.arange(6.0).reshape(2, 3)
    state = {"a": tied, "tied": tied, "turned": tied.t(), "ids": torch.arange(3)}
    for nested in (state, {"state_dict": state, "epoch": 3}):
        torch.save(nested, tmp_path / "old.pt")
        out, _ = run("convert", "--dtype", "BF16", tmp_path / "old.pt", tmp_path / "new",
                     env=environment)
        assert "tensors" in out
        loaded = load_file(tmp_path / "new")
        assert torch.equal(loaded["a"], tied.bfloat16())
        assert loaded["ids"].dtype == torch.int64
        assert "tied" not in loaded
    torch.save({"a": tied, "epoch": 3}, tmp_path / "old.pt")
    _, err = run("convert", tmp_path / "old.pt", tmp_path / "bad", code=1, env=environment)
    assert "'epoch' is int" in err
    (tmp_path / "evil.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch " +
                                       os.fsencode(tmp_path) + b"/owned'\ntR.")
    run("convert", tmp_path / "evil.pt", tmp_path / "bad", code=1, env=environment)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "bad").exists()


def test_usage(run, sample, tmp_path):
    path, _ = sample
    for arguments in (["convert", path], ["convert", "--dtype", "X", path, "y"],
                      ["convert", "--align", "3", path, "y"], ["split", path, "y"],
                      ["split", "--size", "0", path, "y"], ["extract", path, "y"],
                      ["merge", "--select", "a", path, "y"], ["convert", "--size", "3", path, "y"],
                      ["split", "--count", "2", "--by-layer", path, "y"], ["diff", path],
                      ["hash"], ["convert", "--order", "z", path, "y"],
                      ["convert", path, path, "y"], ["convert", "--engine", "z", path, "y"]):
        _, err = run(*arguments, code=3, cwd=tmp_path)
        assert "--help" in err
    for name in ("convert", "extract", "split", "merge", "diff", "hash"):
        out, _ = run(name, "--help")
        assert out.startswith(f"usage: fastsafetensors {name}")
