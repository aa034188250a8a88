# SPDX-License-Identifier: Apache-2.0
"""The command's convert, extract, split, merge, diff and hash."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

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

    call.command = command
    return call


def ours():
    """An environment whose PATH finds this Python first."""
    folder = os.path.dirname(sys.executable)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


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
    run("convert", path, path)  # onto itself: the file is replaced after it was read
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def test_convert_dtype_and_alignment(run, sample, tmp_path, torch):
    path, tensors = sample
    run("convert", "--dtype", "F32", "--alignment", "4096", path, tmp_path / "out")
    loaded = load_file(tmp_path / "out")
    for name, tensor in tensors.items():
        wanted = tensor.float() if tensor.dtype.is_floating_point else tensor
        assert same_bits(torch, loaded[name], wanted), name
    out, _ = run("inspect", "--json", tmp_path / "out")
    for row in json.loads(out)["tensors"]:
        assert row["offset"] % 4096 == 0 or not row["bytes"]


def test_show_suggests_names(run, tmp_path, torch):
    tensors = {"layer.0.weight": torch.tensor([1.0, 2.0, 4.0]), "layer.1.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "m")
    _, err = run("show", tmp_path / "m", "layer.0.wieght", code=1)
    assert "'layer.0.wieght'. Close: layer.0.weight, layer.1.weight" in err
    _, err = run("show", tmp_path / "m", "layer.1.weight", "zzz", code=1)  # one of several
    assert err == "fastsafetensors: no tensor name matches 'zzz' [NoMatch]\n"
    row = json.loads(run("show", "--json", tmp_path / "m", "layer.0.weight")[0])
    assert row["std"] == pytest.approx(tensors["layer.0.weight"].std(unbiased=False).item())


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
    assert "no tensor name matches" in err
    assert not (tmp_path / "none").exists()


def test_dry_run_writes_nothing(run, sample, tmp_path):
    path, _ = sample
    out, _ = run("convert", "--dtype", "F16", "--dry-run", path, tmp_path / "out")
    assert "would write" in out and "converted to F16" in out
    out, _ = run("split", "--count", "2", "--dry-run", path, tmp_path / "out")
    assert "in 2 files" in out and "file 2:" in out
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_json_calls_bytes_of_files_and_bytes_of_tensors_by_different_names(run, sample, tmp_path):
    path, tensors = sample
    planned = json.loads(run("convert", "--json", "--dry-run", path, tmp_path / "out")[0])
    assert planned["tensor_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert planned["shards"][0]["tensor_bytes"] == planned["tensor_bytes"]
    assert "bytes" not in planned
    done = json.loads(run("convert", "--json", path, tmp_path / "out")[0])
    assert done["bytes"] == (tmp_path / "out").stat().st_size > planned["tensor_bytes"]


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
                  "only in B: new", "shape differs: empty",
                  "bytes differ: large: 1 of 700000 elements, by at most 0.5,", "6 differences"):
        assert words in out, out
    out, _ = run("diff", "--quiet", path, tmp_path / "other", code=1)
    assert out == ""
    run("diff", path, tmp_path / "none", code=2)


def test_usage(run, sample, tmp_path):
    path, _ = sample
    for arguments in (["convert", path], ["convert", "--dtype", "X", path, "y"],
                      ["convert", "--alignment", "3", path, "y"], ["split", path, "y"],
                      ["split", "--size", "0", path, "y"], ["extract", path, "y"],
                      ["merge", path], ["convert", "--size", "3", path, "y"], ["edit", path],
                      ["edit", "--set", "x", path], ["edit", "--rename", "a*=b", path],
                      ["split", "--count", "2", "--by-layer", path, "y"], ["diff", path],
                      ["hash"], ["convert", "--order", "z", path, "y"],
                      ["convert", path, path, "y"], ["convert", "--engine", "z", path, "y"]):
        _, err = run(*arguments, code=3, cwd=tmp_path)
        assert "--help" in err
    for name in ("convert", "extract", "split", "merge", "diff", "hash", "edit", "rescue"):
        out, _ = run(name, "--help")
        assert out.startswith(f"usage: fastsafetensors {name}")


def test_header_resembling_a_pickle(run, tmp_path):
    """Its length's first bytes are 80 03: 896 bytes of header."""
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(896)
    (tmp_path / "m").write_bytes(struct.pack("<Q", 896) + header + b"ab")
    run("convert", tmp_path / "m", tmp_path / "out")
    assert bytes(load_file(tmp_path / "out")["a"].tolist()) == b"ab"


def test_diff_of_values_across_dtypes(run, tmp_path, torch):
    """diff across dtypes reports how much the values differ, and where most."""
    tensors = {f"t{i}": torch.linspace(0, 10.0 ** i, 1000) for i in range(8)}
    tensors |= {"same": torch.ones(4), "ids": torch.arange(5), "long": torch.randn(3, 1 << 20)}
    save_file(tensors, tmp_path / "a")
    run("convert", "--dtype", "bfloat16", tmp_path / "a", tmp_path / "b")
    out, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b", code=1)
    error = {name: (t.double() - t.bfloat16().double()).abs() for name, t in tensors.items()}
    assert f"by at most {error['t7'].max().item():.6g}, on average" in out
    worst = out.split("most in\n")[1].splitlines()
    assert worst[0].split() == [f"{error['t7'].max().item():.6g}", "t7"] and len(worst) == 6
    out, _ = run("diff", "--values", "--json", tmp_path / "a", tmp_path / "b", code=1)
    rows = {row["name"]: row for row in json.loads(out)["differences"]}
    assert "ids" not in rows and rows["same"]["max_error"] == 0
    for name, row in rows.items():
        assert row["kind"] == "dtype" and row["elements"] == tensors[name].numel()
        assert row["max_error"] == pytest.approx(error[name].max().item(), rel=1e-6)
        assert row["mean_error"] == pytest.approx(error[name].mean().item(), rel=1e-5)
        assert row["differing"] == int((error[name] > 0).sum())


def test_values_of_empty_tensors(run, tmp_path, torch):
    """Tensors without elements have no difference."""
    save_file({"e": torch.empty(0, 3)}, tmp_path / "a")
    save_file({"e": torch.empty(0, 3, dtype=torch.float16)}, tmp_path / "b")
    out, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b", code=1)
    assert "there are no elements" in out and "has no values" not in out
    out, _ = run("diff", "--values", "--json", tmp_path / "a", tmp_path / "b", code=1)
    row, = json.loads(out)["differences"]
    assert row["elements"] == 0 and row["max_error"] == 0


@pytest.mark.parametrize("values", [[float("nan"), 2.5], [1.5, float("nan")]])
def test_a_difference_that_is_nan_is_the_largest(run, tmp_path, torch, values):
    save_file({"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(1)}, tmp_path / "a")
    save_file({"a": torch.tensor(values), "b": torch.ones(1)}, tmp_path / "b")
    out, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b", code=1)
    assert "by at most nan" in out
    assert out.split("most in\n")[1].splitlines()[0].split() == ["nan", "a"]


def test_whole_numbers_keep_all_their_digits(run, tmp_path, torch):
    """Integers above 2 ** 53 are compared exactly, which doubles could not do."""
    big = 2 ** 60
    save_file({"i": torch.tensor([big, big + 5, -big, 1234567])}, tmp_path / "a")
    save_file({"i": torch.tensor([big + 1, big + 5, -big - 3, 1234567])}, tmp_path / "b")
    out, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b", code=1)
    assert "2 of 4 elements, by at most 3, on average 1" in out
    out, _ = run("show", tmp_path / "a", "i")
    assert f"min {-big}  max {big + 5}" in out and f"first {big} {big + 5} {-big} 1234567" in out
    row = json.loads(run("show", "--json", tmp_path / "b", "i")[0])
    assert row["min"] == -big - 3 and row["first"][0] == big + 1 and row["max"] == big + 5
    limits = [2 ** 64 - 1, 0, 2 ** 63]
    header = b'{"u":{"dtype":"U64","shape":[3],"data_offsets":[0,24]}}'
    (tmp_path / "u").write_bytes(struct.pack("<Q", len(header)) + header +
                                 struct.pack("<3Q", *limits))
    row = json.loads(run("show", "--json", tmp_path / "u", "u")[0])
    assert row["first"] == limits and row["max"] == limits[0] and row["min"] == 0


def test_conversion_without_effect_warns(run, tmp_path, torch):
    save_file({"a": torch.ones(3), "i": torch.arange(3)}, tmp_path / "m")
    for words in ([], ["--dry-run"]):
        _, err = run("convert", "--dtype", "F32", *words, tmp_path / "m", tmp_path / "out")
        assert "has no effect" in err and "F32" in err
        _, err = run("convert", "--dtype", "F16", *words, tmp_path / "m", tmp_path / "out")
        assert err == ""
    for dtype, said in (("F32", True), ("I8", True), ("F16", False)):
        for more in ([], ["--budget", "16M"]):
            _, err = run("load", "--dtype", dtype, *more, tmp_path / "m")
            assert ("has no effect" in err) == said, (dtype, err)
    out, _ = run("convert", "--json", "--dtype", "F32", tmp_path / "m", tmp_path / "out")
    assert json.loads(out)["converted"] == 0
    torch.save({"a": torch.ones(3)}, tmp_path / "t.bin")
    _, err = run("convert", "--dtype", "F32", tmp_path / "t.bin", tmp_path / "out", env=ours())
    assert "has no effect" in err


def wait_until_caught(process, number):
    """Wait until a program has installed its signal handler, or has ended."""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.M)
            if caught and int(caught[1], 16) >> (number - 1) & 1:
                return
        time.sleep(0.002)


@pytest.mark.parametrize("words", [["convert", "--dtype", "F16", "big", "out/new"],
                                   ["split", "--count", "3", "big", "out/set"],
                                   ["edit", "--set", "a=b", "big", "out/new"]],
                         ids=lambda words: words[0])
def test_a_signal_leaves_nothing(command, tmp_path, words):
    """After Ctrl-C or SIGTERM in the middle neither file nor folder remains, and the exit status is
    the signal."""
    tensors, size = 8, 512 << 20
    entries = ",".join(f'"t{i}":{{"dtype":"F32","shape":[{size // 4096},1024],'
                       f'"data_offsets":[{i * size},{(i + 1) * size}]}}' for i in range(tensors))
    header = ("{" + entries + "}").encode()
    with open(tmp_path / "big", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + tensors * size)  # a hole
    (tmp_path / "out").mkdir()
    if shutil.disk_usage(tmp_path).free < 3 * tensors * size:
        pytest.skip("not enough space")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([command, *words, "--quick"], cwd=tmp_path,
                                   stderr=subprocess.PIPE)
        wait_until_caught(process, number)
        time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        if process.returncode == 0:
            pytest.skip("it was done before the signal came")
        assert process.returncode == -number and b"cancelled" in err
        assert os.listdir(tmp_path / "out") == []


def test_missing_targets_and_paths(run, sample, tmp_path):
    path, _ = sample
    _, err = run("convert", path, tmp_path / "nodir/x", code=2)
    assert f"the folder '{tmp_path}/nodir' does not exist" in err
    _, err = run("clean", tmp_path / "nope", code=2)
    assert "No such file" in err
    (tmp_path / ".gone.0123456789abcdef.tmp").touch()  # a first save that was killed
    assert "1 file removed" in run("clean", tmp_path / "gone")[0]
    small = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash"]
    for words in (["convert", path, "y"], ["split", "--count", "2", path, "made"],
                  ["edit", "--set", "a=b", path, "y"]):
        done = subprocess.run([*small, run.__closure__[0].cell_contents, *words], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 2 and "(ulimit -f)" in done.stderr, words
    assert sorted(os.listdir(tmp_path)) == [path.name]


def test_invalid_index_names_its_kind(run, tmp_path, sample):
    path, _ = sample
    index = tmp_path / "model.safetensors.index.json"
    for content, words in ((b"version https://git-lfs.github.com/spec/v1\nsize 77\n", "git-lfs"),
                           (b"<!DOCTYPE html><html>", "web page"), (b"\x1f\x8b\x08\0", "gzip"),
                           (path.read_bytes(), "a safetensors file"), (b"", "empty"),
                           (b'{"error": "not found"}', "JSON response"), (bytes(50), "zeros"),
                           (b'{"weight_map": 3}', "expected"), (b'{"a": 1}', "is missing")):
        index.write_bytes(content)
        for source in (index, tmp_path):
            _, err = run("inspect", source, code=1)
            assert words in err and "JsonError" in err, (words, err)


def test_many_keys_of_one_kind_are_counted(run, tmp_path, torch):
    save_file({"a": torch.ones(2)}, tmp_path / "a")
    save_file({"a": torch.ones(2)}, tmp_path / "b", {f"k{i}": "v" for i in range(100)})
    out, _ = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert len(out.splitlines()) < 12 and "92 more keys" in out and "100 differences" in out
    assert "1 tensor is the same" in out


def test_edit(run, tmp_path, torch):
    path = tmp_path / "m"
    tensors = {f"model.layers.{i}.w": torch.full((2,), i) for i in range(3)} | {"x": torch.ones(1)}
    save_file(tensors, path, {"a": "1", "b": "2"})
    run("edit", "--set", "c=3=4", "--unset", "a", "--set", "b=old", "--set", "b=new",
        "--rename", "model.*=*", "--rename", "x=y", path, tmp_path / "out")
    loaded = load_file(tmp_path / "out")
    assert sorted(loaded) == ["layers.0.w", "layers.1.w", "layers.2.w", "y"]
    assert torch.equal(loaded["layers.2.w"], tensors["model.layers.2.w"])
    out, _ = run("inspect", "--json", tmp_path / "out")
    assert json.loads(out)["files"][0]["metadata"] == {"b": "new", "c": "3=4"}
    run("edit", "--clear", path)
    out, _ = run("inspect", "--json", path)
    assert not json.loads(out)["files"][0]["metadata"]
    assert sorted(load_file(path)) == sorted(tensors)
    _, err = run("edit", "--rename", "none=other", path, code=1)
    assert "no tensor name matches" in err
    before = path.read_bytes()
    _, err = run("edit", "--rename", "model.layers.*=x", path, code=3)
    run("edit", "--rename", "model.layers.0.w=x", path, code=3)  # there is an x
    assert path.read_bytes() == before


def test_an_edit_writes_the_header_alone_where_blocks_are_shared(run, tmp_path, torch):
    """With shared blocks, an edit is a copy by the kernel, or writes the header and at most one
    block."""
    path = tmp_path / "m"
    save_file({"a": torch.randn(1 << 20), "b": torch.ones(3)}, path)
    before = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for value in ("short", "x" * 10000, ""):
        answer = json.loads(run("edit", "--json", "--set", f"k={value}", path)[0])
        assert answer["bytes_shared"] + answer["bytes_copied"] == (4 << 20) + 12
        assert answer["engine"] != "shared" or answer["bytes_copied"] < 4096
        loaded = load_file(path)
        assert all(torch.equal(loaded[name], before[name]) for name in before)
    out, err = run("edit", "--unset", "nobody", "--dry-run", path)
    assert "the metadata has no key 'nobody'" in err and "would write" in out
    _, err = run("edit", "--rename", "a=c", "--rename", "none=d", path, code=1)
    assert "no tensor name matches 'none'" in err and set(load_file(path)) == {"a", "b"}
    run("split", "--count", "2", path, tmp_path / "set")
    _, err = run("edit", "--rename", "a=c", tmp_path / "set/model-00001-of-00002.safetensors",
                 code=3)
    assert "an index in the folder lists this file" in err


def test_standard_input_is_a_source(command, run, sample, tmp_path, torch):
    path, tensors = sample
    torch.save({"w": torch.ones(2)}, tmp_path / "t.bin")

    def pipe(source, *words, code=0, env=None):
        with open(source, "rb") as file:
            reader = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
            done = subprocess.run([command, *map(os.fspath, words)], stdin=reader.stdout,
                                  capture_output=True, cwd=tmp_path, env=env, timeout=300)
            reader.stdout.close()
            reader.wait()
        assert done.returncode == code, done.stderr
        return done.stdout.decode(errors="replace"), done.stderr.decode()

    wanted = run("inspect", path)[0].replace(os.fspath(path), "/dev/stdin")
    assert pipe(path, "inspect", "-")[0] == pipe(path, "-")[0] == wanted
    with open(path) as file:  # a file is opened, not copied
        assert run("inspect", "-", stdin=file)[0] == wanted
    assert "valid" in pipe(path, "verify", "-")[0]
    assert "0 differences" in pipe(path, "diff", path, "-")[0]
    assert "scalar" in pipe(path, "show", "-", "scalar")[0]
    assert json.loads(pipe(path, "load", "--json", "-")[0])["tensors"] == len(tensors)
    pipe(path, "edit", "--set", "k=v", "-", "out")
    assert "k: v" in run("inspect", tmp_path / "out")[0]
    pipe(tmp_path / "t.bin", "convert", "-", "out", env=ours())
    assert set(load_file(tmp_path / "out")) == {"w"}
    for words in (["convert", "-", "-"], ["edit", "--set", "k=v", "-", "-"]):
        done = subprocess.run([command, *words], input=path.read_bytes(), capture_output=True)
        (tmp_path / "out").write_bytes(done.stdout)
        assert set(load_file(tmp_path / "out")) == set(tensors), words
    done = subprocess.run(["bash", "-c", f"'{command}' diff <(cat '{path}') <(cat '{path}')"],
                          capture_output=True, text=True)
    assert "0 differences" in done.stdout, done.stderr
    for words in (["diff", "-", "-"], ["edit", "--set", "k=v", "-"], ["hash", "--write", "-"],
                  ["bench", "-"], ["clean", "-"]):
        pipe(path, *words, code=3)
    assert "gzip" not in os.listdir(tmp_path) and "-" not in os.listdir(tmp_path)


def test_invalid_standard_input_ends_early(command, run, tmp_path):
    """Invalid input, even without an end, is rejected after its first block."""
    for source, code in (("yes", 1), ("cat /dev/zero", 1), ("cat /dev/urandom", 1), ("true", 1)):
        done = subprocess.run(["bash", "-c", f"{source} | '{command}' inspect -"], text=True,
                              capture_output=True, timeout=600,
                              env={**os.environ, "TMPDIR": tmp_path})
        assert done.returncode == code and "/dev/stdin" in done.stderr, (source, done.stderr)
    _, err = run("inspect", "-", stdin=subprocess.PIPE, env={**os.environ, "TMPDIR": "/none"},
                 code=2)
    assert "TMPDIR" in err


def test_rescue(run, tmp_path, torch):
    tensors = {f"t{i}": torch.full((1000,), i) for i in range(5)}
    save_file(tensors, tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-12000])
    run("convert", tmp_path / "cut", tmp_path / "out", code=1)
    _, err = run("rescue", tmp_path / "cut", tmp_path / "out")
    assert f"12000 of {len(raw)} bytes are missing, 3 of 5 tensors are complete" in err
    loaded = load_file(tmp_path / "out")
    assert sorted(loaded) == ["t0", "t1", "t2"] and torch.equal(loaded["t2"], tensors["t2"])
    _, err = run("rescue", tmp_path / "cut", tmp_path / "cut", code=3)
    assert "is SOURCE" in err and len((tmp_path / "cut").read_bytes()) == len(raw) - 12000
    _, err = run("verify", tmp_path / "cut", code=1)
    assert "'fastsafetensors rescue' writes these" in err
    (tmp_path / "cut").write_bytes(raw[:700])
    _, err = run("verify", tmp_path / "cut", code=1)
    assert "0 of 5 tensors are complete" in err and "writes these" not in err
    (tmp_path / "cut").write_bytes(raw[:40])
    run("rescue", tmp_path / "cut", tmp_path / "none", code=1)
    assert not (tmp_path / "none").exists()


def test_folders_are_accepted_as_paths(run, sample, tmp_path):
    path, tensors = sample
    run("split", "--count", "3", path, tmp_path / "set")
    run("convert", "--dtype", "F16", "--select", "large", path, tmp_path / "extra")
    run("edit", "--rename", "large=other", tmp_path / "extra")
    run("merge", tmp_path / "set", tmp_path / "extra", tmp_path / "all")
    assert set(load_file(tmp_path / "all")) == {*tensors, "other"}
    for words in (["engines"], ["bench", "--repeat", "1"], ["verify"], ["load"], ["inspect"]):
        run(*words, tmp_path / "set")
    run("diff", path, tmp_path / "set")


def test_answers_as_json(run, sample, tmp_path):
    path, tensors = sample
    out, _ = run("convert", "--json", path, tmp_path / "out")
    assert json.loads(out)["tensors"] == len(tensors)
    out, _ = run("split", "--json", "--dry-run", "--count", "2", path, tmp_path / "set")
    assert json.loads(out)["files"] == len(json.loads(out)["shards"]) == 2
    assert not (tmp_path / "set").exists()
    out, _ = run("diff", "--json", path, tmp_path / "out")
    assert json.loads(out) == {"differences": [], "same": len(tensors), "different": 0}
    out, _ = run("engines", "--json", path)
    assert sum(row["chosen"] for row in json.loads(out)["engines"]) >= 1
    out, _ = run("bench", "--json", "--repeat", "1", path)
    assert json.loads(out)["methods"][0]["possible"]
    out, _ = run("show", "--json", path, "scalar")
    row = json.loads(out)
    assert row["min"] == row["max"] == row["mean"] == 3.5 and row["first"] == [3.5]
    for words, kind, code in ((["convert", "--json", "none", "out"], "FileNotFound", 2),
                              (["load", "--json", "--mode", "x", path], "Usage", 3),
                              (["inspect", "--nonsense", "--json", path], "Usage", 3),
                              (["show", "--json", path, "none*"], "NoMatch", 1)):
        out, err = run(*words, code=code, cwd=tmp_path)
        assert json.loads(out)["error"]["kind"] == kind and err == ""


def test_clean_removes_leftovers(run, tmp_path, torch):
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    left = tmp_path / ".m.safetensors.0123456789abcdef.tmp"
    left.write_bytes(bytes(1000))
    other = tmp_path / ".m.safetensors.short.tmp"
    other.touch()
    out, _ = run("clean", "--dry-run", tmp_path)
    assert left.name in out and "would be removed" in out and left.exists()
    out, _ = run("clean", "--json", tmp_path)
    answer = json.loads(out)
    assert answer["removed"] == 1 and answer["leftovers"][0]["bytes"] == 1000
    assert not left.exists() and other.exists() and (tmp_path / "m.safetensors").exists()
    assert "0 files removed" in run("clean", tmp_path)[0]


def test_standard_output_is_a_target(command, sample, tmp_path):
    """Standard output gets exactly the bytes of a file, also aligned, converted and in several
    pieces."""
    path, _ = sample
    for more in ([], ["--alignment", "4096"], ["--dtype", "F16"], ["--select", "t.*"],
                 ["--order", "name"]):
        subprocess.run([command, "convert", "--quick", *more, path, tmp_path / "out"], check=True,
                       capture_output=True)
        done = subprocess.run([command, "convert", *more, path, "-"], capture_output=True,
                              cwd=tmp_path)
        assert done.returncode == 0 and done.stdout == (tmp_path / "out").read_bytes()
    assert not (tmp_path / "-").exists()
    for words in (["split", "--count", "2", path, "-"], ["convert", "--json", path, "-"]):
        done = subprocess.run([command, *words], capture_output=True, cwd=tmp_path)
        assert done.returncode == 3
    with open("/dev/full", "w") as full:
        done = subprocess.run([command, "convert", path, "-"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"No space left" in done.stderr


def test_rescue_without_intact_tensors_replaces_nothing(run, tmp_path, torch):
    save_file({"w": torch.ones(1000)}, tmp_path / "good")
    save_file({"w": torch.ones(1000)}, tmp_path / "cut")
    good = (tmp_path / "good").read_bytes()
    (tmp_path / "cut").write_bytes(good[:-100])
    run("rescue", tmp_path / "cut", tmp_path / "good", code=1)
    assert (tmp_path / "good").read_bytes() == good


def one_tensor(tmp_path, torch):
    save_file({"a": torch.ones(9)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_renames_of_one_tensor_twice(tmp_path, run, torch):
    path = one_tensor(tmp_path, torch)
    _, err = run("edit", "--rename", "a=x", "--rename", "a=y", path, code=1)
    assert err == ("fastsafetensors: no tensor name matches 'a', except those that an earlier "
                   "--rename matches [NoMatch]\n")


def test_a_value_of_an_option_that_needs_none(tmp_path, run, torch):
    path = one_tensor(tmp_path, torch)
    _, err = run("convert", "--compress", "all", path, tmp_path / "out", code=3)
    assert "A value of --compress follows a '=': --compress[=WHICH]" in err
    _, err = run("hash", "--manifest", "--chunk", "100000", path, code=3)
    assert "--chunk must be a power of two from 64K to 1M, not '100000'" in err


def test_the_written_file_is_named(tmp_path, run, torch):
    path = one_tensor(tmp_path, torch)
    for words, name in ((("--manifest",), f"{path}.manifest"), (("--sums",), f"{path}.sha256"),
                        (("--sums", "--output", f"{path}.sums"), f"{path}.sums")):
        out, _ = run("hash", *words, path)
        assert out.endswith(f", written to {name}\n")
        out, _ = run("hash", "--json", *words, path)
        assert json.loads(out)["target"] == name
