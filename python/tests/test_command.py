# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, its exit codes, its manners."""

import json
import os
import pty
import struct
import subprocess
import time

import pytest

U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'


@pytest.fixture
def run(command):
    """Return a function that runs the command."""

    def call(*arguments, **options):
        return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True,
                              timeout=60, **options)

    return call


def test_inspect_table(run, raw):
    path = raw('{"__metadata__":{"k":"v"},"layer.weight":{"dtype":"BF16","shape":[2,3],'
               '"data_offsets":[0,12]}}', bytes(12))
    done = run("inspect", path)
    assert done.returncode == 0 and not done.stderr
    header = len(path.read_bytes()) - 12
    row = next(line for line in done.stdout.splitlines() if line.startswith("layer.weight"))
    assert row.split() == ["layer.weight", "BF16", "[2,", "3]", "12", str(header)]
    assert "1 tensors, 12 B, 6 elements" in done.stdout and "k: v" in done.stdout
    assert "\x1b" not in done.stdout


def test_inspect_json(run, model):
    path, tensors = model
    done = run("inspect", "--json", path)
    document = json.loads(done.stdout)
    assert {t["name"]: t["shape"] for t in document["tensors"]} == {
        n: list(t.shape) for n, t in tensors.items()}
    assert document["files"][0]["metadata"]["note"] == 'a"b\\c'
    assert document["totals"]["bytes"] == sum(t.nbytes for t in tensors.values())


def test_inspect_tree(run, sharded):
    done = run("inspect", "--tree", sharded[0])
    lines = done.stdout.splitlines()
    assert lines[0].startswith("layer  144.0 KiB, 9 tensors")
    assert lines[1].startswith("  0  16.0 KiB, 1 tensor") and lines[2].startswith("    weight")


def test_inspect_hostile_names(run, raw):
    path = raw('{"\\u001b[31mred":{' + U8 + '}}', b"ab")
    for form in ([], ["--json"], ["--tree"]):
        done = run("inspect", *form, path)
        assert done.returncode == 0 and "\x1b" not in done.stdout


def test_inspect_many_tensors_quickly(run, tmp_path):
    count = 250_000
    entries = ",".join(
        f'"model.layers.{i // 1000}.experts.{i % 1000}.w":'
        f'{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    header = ("{" + entries + "}").encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    for form in ([], ["--json"], ["--tree"]):
        with open(tmp_path / "out", "w") as out:
            start = time.monotonic()
            subprocess.run([run.__closure__[0].cell_contents, "inspect", *form, path], stdout=out,
                           check=True)
            seconds = time.monotonic() - start
        assert len((tmp_path / "out").read_text().splitlines()) >= count
        assert seconds < 30  # the promise of one second is a benchmark's; this catches quadratics


def test_verify_exit_codes(run, raw, tmp_path):
    good = raw(f'{{"a":{{{U8}}}}}', b"ab", "good")
    padded = raw(f'{{"a":{{{U8}}}}}', b"abc", "padded")
    assert run("verify", good).returncode == 0
    done = run("verify", padded)
    assert done.returncode == 1 and "MetadataIncompleteBuffer" in done.stdout
    assert "at byte" in done.stderr
    assert run("verify", "--lenient", padded).returncode == 0
    assert run("verify", tmp_path / "none").returncode == 2
    assert run("verify", good, padded).returncode == 1
    assert run("verify", good, tmp_path / "none", padded).returncode == 2
    done = run("verify", "--quiet", good)
    assert done.returncode == 0 and not done.stdout


@pytest.mark.parametrize("arguments", [
    [], ["--mode", "load"], ["--mode", "map"], ["--engine", "pread", "--threads", "2"],
    ["--select", "large"], ["--budget", "16M", "--mode", "load"], ["--repeat", "3"],
    ["--device", "cpu", "--no-progress"]], ids=str)
def test_load(run, model, arguments):
    done = run("load", "--json", *arguments, model[0])
    assert done.returncode == 0, done.stderr
    loads = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(loads) == (3 if "--repeat" in arguments else 1)
    assert loads[0]["reason"] and loads[0]["mode"] in ("load", "map")
    assert loads[0]["tensors"] == (1 if "--select" in arguments else len(model[1]))
    text = run("load", *arguments, model[0]).stdout
    assert "GB/s" in text and "engine" in text


def test_a_selection_that_matches_nothing_is_an_answer(run, model):
    done = run("load", "--select", "nomatch*", model[0])
    assert done.returncode == 1 and "no tensor's name matches" in done.stderr and not done.stdout


def test_engines(run, model):
    for arguments in ([], [model[0]]):
        done = run("engines", *arguments)
        assert done.returncode == 0
        assert [line.split()[0] for line in done.stdout.splitlines()] == [
            "pread", "direct", "uring", "mmap", "cuda", "cufile", "hip", "hipfile"]
    assert "chosen" in done.stdout
    assert run("engines", "/nonexistent").returncode == 2


def test_bench(run, model):
    for arguments in ([], ["--cold"]):
        done = run("bench", "--runs", "1", *arguments, model[0])
        assert done.returncode == 0, done.stderr
        rows = done.stdout.splitlines()
        assert len(rows) == 10 and "median of 1 runs" in rows[0]
        assert all("GB/s" in row or "not possible here" in row for row in rows[1:])
    assert run("bench", "/nonexistent").returncode == 2
    assert run("bench", model[0].parent).returncode == 3


@pytest.mark.parametrize("arguments", [
    [], ["nonsense"], ["inspect"], ["inspect", "a", "b"], ["inspect", "--nonsense", "a"],
    ["inspect", "--json", "--tree", "a"], ["verify"], ["verify", "-x"], ["load"],
    ["load", "--mode", "x", "a"], ["load", "--engine", "x", "a"], ["load", "--threads", "-1", "a"],
    ["load", "--threads", "x", "a"], ["load", "--budget", "12Q", "a"],
    ["load", "--budget", "0", "a"],
    ["load", "--budget", "99999999999999G", "a"], ["load", "--repeat", "0", "a"],
    ["load", "--device", "tpu", "a"], ["load", "--gds", "x", "a"], ["load", "--select"],
    ["engines", "a", "b"],
    ["engines", "-x"], ["bench"], ["bench", "--runs", "0", "a"], ["load", "--ring", "x", "a"],
    ["load", "--dtype", "x", "a"], ["load", "--gds", "strict", "a"],
    ["load", "--mode", "map", "--engine", "uring", "a"],
    ["load", "--engine", "pread", "--ring", "place", "a"], ["hash", "--dry-run", "a"],
    ["hash", "--algorithm", "md5", "a"]], ids=str)
def test_wrong_usage(run, arguments):
    done = run(*arguments)
    assert done.returncode == 3
    assert "--help" in done.stderr + done.stdout


def test_help_and_version(run):
    import fastsafetensors

    assert run("--version").stdout == f"fastsafetensors {fastsafetensors.__version__}\n"
    for arguments in (["--help"], ["inspect", "--help"], ["verify", "--help"], ["load", "--help"],
                      ["engines", "--help"], ["bench", "--help"]):
        done = run(*arguments)
        assert done.returncode == 0 and "usage: fastsafetensors" in done.stdout


def test_broken_pipe_is_quiet(command, sharded):
    done = subprocess.run(f"{command} inspect --json {sharded[0]} | head -c 10",
                          shell=True, capture_output=True, text=True)
    assert done.stdout == '{"files": ' and done.stderr == ""


def test_full_disk_is_noticed(command, model):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([command, "inspect", model[0]], stdout=full, stderr=subprocess.PIPE,
                              text=True)
    assert done.returncode == 2 and "No space left" in done.stderr


def on_terminal(arguments, **variables):
    """Return what a program prints on a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(arguments, stdout=child, stderr=child, close_fds=True,
                               env={**os.environ, "NO_COLOR": "", **variables})
    os.close(child)
    output = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
    process.wait()
    os.close(parent)
    return output.decode()


def test_colours_and_bar_on_a_terminal_only(command, model):
    assert "\x1b[1m" in on_terminal([command, "inspect", str(model[0])])
    assert "\x1b" not in on_terminal([command, "inspect", str(model[0])], NO_COLOR="1")
    output = on_terminal([command, "load", "--mode", "load", str(model[0])])
    assert "[####" in output and "tensors" in output
    assert "[####" not in on_terminal([command, "load", "--no-progress", str(model[0])])


def test_completion_offers_commands_and_options():
    import pathlib

    script = pathlib.Path(__file__).parents[2] / "cli/fastsafetensors.bash"

    def complete(*words):
        quoted = " ".join(f"'{w}'" for w in words)
        return subprocess.run(
            ["bash", "-c", f"source {script}; COMP_WORDS=({quoted}); "
             f"COMP_CWORD={len(words) - 1}; _fastsafetensors; echo \"${{COMPREPLY[@]}}\""],
            capture_output=True, text=True, check=True).stdout.split()

    assert complete("fastsafetensors", "in") == ["inspect"]
    assert complete("fastsafetensors", "load", "--mo") == ["--mode"]
    assert complete("fastsafetensors", "load", "--mode", "m") == ["map"]
