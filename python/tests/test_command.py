# SPDX-License-Identifier: Apache-2.0
"""The command: output, exit codes, options."""

import json
import os
import pty
import re
import resource
import shutil
import struct
import subprocess
import sys
import time

import pytest
from conftest import ROOT, write_raw, zstd_or_skip

U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'


@pytest.fixture
def run(command):
    """Return a function that runs the command."""

    def call(*arguments, **options):
        return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True,
                              timeout=300, **options)

    return call


def test_inspect_table(run, raw):
    path = raw('{"__metadata__":{"k":"v"},"layer.weight":{"dtype":"BF16","shape":[2,3],'
               '"data_offsets":[0,12]}}', bytes(12))
    done = run("inspect", path)
    assert done.returncode == 0 and not done.stderr
    header = len(path.read_bytes()) - 12
    row = next(line for line in done.stdout.splitlines() if line.startswith("layer.weight"))
    assert row.split() == ["layer.weight", "BF16", "[2,", "3]", "12", str(header)]
    assert "1 tensor, 12 B, 6 elements" in done.stdout and "k: v" in done.stdout
    assert "\x1b" not in done.stdout


def test_options_may_stand_before_the_command(run, model):
    """`fastsafetensors --json FILE` works, and the error names the command for help."""
    path, tensors = model
    for words in (["--json", path], ["--json", "inspect", path]):
        assert len(json.loads(run(*words).stdout)["tensors"]) == len(tensors), words
    answer = json.loads(run("--no-progress", "--json", "load", path).stdout)
    assert answer["tensors"] == len(tensors)
    assert json.loads(run("--json", "verify", path).stdout)["valid"]
    done = run("--json", "nope")
    assert done.returncode == 3 and json.loads(done.stdout)["error"]["kind"] == "Usage"
    general = run("help").stdout
    for words in (["help", "help"], ["help", "--help"], ["--json", "help"], ["-h"]):
        done = run(*words)
        assert (done.returncode, done.stdout) == (0, general), words


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


def test_hostile_paths(run, tmp_path, raw):
    """Whatever file names contain, they never control the terminal, and JSON output stays valid."""
    good = raw(f'{{"a":{{{U8}}}}}', b"ab", "good").read_bytes()
    folder = os.fsencode(tmp_path)
    odd = folder + b"/n\new\x1b[31m\xc2\x9b\xff.safetensors"
    os.mkfifo(folder + b"/\x1bfifo")
    for content in (good, good[:-1], b""):
        with open(odd, "wb") as file:
            file.write(content)
        for words in (["inspect"], ["verify"], ["load"], ["show"], ["hash"], ["engines"],
                      ["hash", "--write"], ["verify", "--hash"], ["bench", "--repeat", "1"],
                      ["convert"], ["edit", "--set", "a=b"], ["clean"], ["rescue"], ["diff"],
                      ["split", "--count", "1", "--dry-run"], ["nonsense"]):
            more = {"show": ["a"], "convert": [odd + b"2"], "rescue": [odd + b"2"],
                    "diff": [odd], "split": [odd + b"3"]}.get(words[0], [])
            for json_ in ([], ["--json"]):
                program = run.__closure__[0].cell_contents
                done = subprocess.run([program, *words, *json_, odd, *more],
                                      capture_output=True, cwd=tmp_path)
                both = done.stdout + done.stderr
                assert b"\x1b" not in both and b"\x9b" not in both and b"\xff" not in both, both
                both.decode()
                if json_ and done.returncode != 3:
                    for line in done.stdout.decode().replace("}\n{", "}\0{").split("\0"):
                        json.loads(line)
    done = subprocess.run([run.__closure__[0].cell_contents, "inspect", folder + b"/\x1bfifo"],
                          capture_output=True)
    assert done.returncode == 2 and b"standard input" in done.stderr and b"\x1b" not in done.stderr


def test_inspect_many_tensors_quickly(run, tmp_path):
    count = 250_000
    entries = ",".join(
        f'"model.layers.{i // 1000}.experts.{i % 1000}.w":'
        f'{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    header = ("{" + entries + "}").encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)

    def limit():  # a benchmark measures the time; this limit only detects quadratic cost
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    for form in ([], ["--json"], ["--tree"]):
        with open(tmp_path / "out", "w") as out:
            subprocess.run([run.__closure__[0].cell_contents, "inspect", *form, path], stdout=out,
                           check=True, preexec_fn=limit)
        assert len((tmp_path / "out").read_text().splitlines()) >= count


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


@pytest.mark.parametrize("way, stays", [("keep", True), ("bypass", False)])
def test_page_cache_is_kept_or_bypassed(run, model, way, stays):
    """The page cache has the expected pages after a load. One successful round of several is
    enough, because other programs may empty the cache."""
    def load(cache):
        done = run("load", "--json", "--mode", "load", "--cache", cache, model[0])
        return json.loads(done.stdout)

    for _ in range(5):
        fd = os.open(model[0], os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        first, second = load(way), load("bypass")
        if first["chunks_resident"] == 0 and (stays or first["bytes_direct"]):
            if second["chunks_resident"] == (second["chunk_count"] if stays else 0):
                return
            last = second
        else:
            last = None  # a file system without direct I/O, or tmpfs
    if last is None:
        pytest.skip("this file system has nothing but its cache")
    raise AssertionError((way, last["chunks_resident"], last["chunk_count"]))


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
    assert "engine" in text and ("GB/s" in text) == (loads[0]["mode"] == "load")


def test_empty_selection_exits_with_1(run, model):
    done = run("load", "--select", "nomatch*", model[0])
    assert done.returncode == 1 and "no tensor name matches" in done.stderr and not done.stdout


def test_engines(run, model):
    for arguments in ([], [model[0]]):
        done = run("engines", *arguments)
        assert done.returncode == 0
        assert [line.split()[0] for line in done.stdout.splitlines()] == [
            "pread", "direct", "uring", "mmap", "http", "cuda", "cufile", "hip", "hipfile"]
    assert run("engines", "/nonexistent").returncode == 2


def test_engines_reports_the_choice_of_a_load(run, model):
    def chosen():
        rows = json.loads(run("engines", "--json", model[0]).stdout)["engines"]
        return [row["name"] for row in rows if row["chosen"]], {x["name"]: x for x in rows}

    told = json.loads(run("load", "--json", model[0]).stdout)
    names, rows = chosen()
    assert told["mode"] == "map" and names == ["mmap"]
    # The load reports the same choice, because both use the same policy.
    assert told["reason"].split(";")[0] in rows["mmap"]["reason"]
    assert "kept in the page cache" in rows["mmap"]["reason"]


def test_engines_of_unmappable_files(run, model, tmp_path):
    zstd_or_skip()
    packed = tmp_path / "packed.safetensors"
    assert run("convert", "--compress", model[0], packed).returncode == 0
    told = json.loads(run("load", "--json", packed).stdout)
    rows = json.loads(run("engines", "--json", packed).stdout)["engines"]
    assert told["mode"] == "load"
    assert [row["name"] for row in rows if row["chosen"]] == [told["engine"]]
    # A file that is not a model is hashed like any other.
    (tmp_path / "plain").write_bytes(b"x" * 5000)
    assert run("engines", tmp_path / "plain").returncode == 0


def test_bench(run, model):
    for arguments in ([], ["--cold"]):
        done = run("bench", "--repeat", "1", *arguments, model[0])
        assert done.returncode == 0, done.stderr
        rows = done.stdout.splitlines()
        assert len(rows) == 10 and "median of 1 runs" in rows[0]
        assert all("GB/s" in row or "not possible here" in row for row in rows[1:])
    assert run("bench", "/nonexistent").returncode == 2


@pytest.mark.parametrize("arguments", [
    [], ["nonsense"], ["inspect"], ["inspect", "a", "b"], ["inspect", "--nonsense", "a"],
    ["inspect", "--json", "--tree", "a"], ["verify"], ["verify", "-x"], ["load"],
    ["load", "--mode", "x", "a"], ["load", "--engine", "x", "a"], ["load", "--threads", "-1", "a"],
    ["load", "--threads", "x", "a"], ["load", "--budget", "12Q", "a"],
    ["load", "--budget", "0", "a"],
    ["load", "--budget", "99999999999999G", "a"], ["load", "--repeat", "0", "a"],
    ["load", "--device", "tpu", "a"], ["load", "--gds", "x", "a"], ["load", "--select"],
    ["engines", "a", "b"],
    ["engines", "-x"], ["bench"], ["bench", "--repeat", "0", "a"], ["load", "--ring", "x", "a"],
    ["load", "--dtype", "x", "a"], ["load", "--gds", "strict", "a"],
    ["load", "--mode", "map", "--engine", "uring", "a"],
    ["load", "--engine", "pread", "--ring", "place", "a"], ["hash", "--dry-run", "a"],
    ["hash", "--algorithm", "md5", "a"], ["hash", "--manifest", "--output", "-", "a"],
    ["sign", "--private-key", "k", "--output", "/dev/stdout", "a"]], ids=str)
def test_wrong_usage(run, arguments):
    done = run(*arguments)
    assert done.returncode == 3
    if "--json" in arguments:
        assert json.loads(done.stdout)["error"]["kind"] == "Usage"
    else:
        assert "help" in done.stderr + done.stdout


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


def test_colours_on_a_terminal_only(command, model):
    assert "\x1b[1m" in on_terminal([command, "inspect", str(model[0])])
    assert "\x1b" not in on_terminal([command, "inspect", str(model[0])], NO_COLOR="1")


def test_bar_is_drawn_seldom_and_ends_full(command, tmp_path):
    """A bar for 100,000 tensors is drawn at most ten times a second, from half a second on, and
    fits the terminal."""
    size = 3 << 30
    path = tmp_path / "large.safetensors"
    count = 100_000
    step = size // count
    entries = ",".join(f'"t{i}":{{"dtype":"U8","shape":[{step}],"data_offsets":'
                       f'[{i * step},{(i + 1) * step}]}}' for i in range(count))
    header = ("{" + entries + "}").encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + count * step)  # a hole: reads cost little
    start = time.monotonic()
    output = on_terminal([command, "diff", str(path), str(path)])
    seconds = time.monotonic() - start
    bars = [line for line in output.replace("\n", "\r").split("\r") if " of 3.0 GiB" in line]
    assert seconds < 0.5 or len(bars) <= 10 * seconds + 2
    if bars:
        assert "100 %" in bars[-1] and all(len(bar.replace("\x1b[K", "")) < 80 for bar in bars)
        assert "GB/s" in bars[0] and "left" in bars[0]
    assert "100000 tensors are the same" in output
    assert "%" not in on_terminal([command, "diff", "--no-progress", str(path), str(path)])
    small = write_raw(tmp_path / "small", f'{{"a":{{{U8}}}}}', b"ab")
    assert "%" not in on_terminal([command, "load", "--mode", "load", str(small)])


def complete(command, *words):
    """Return what the bash completion offers."""
    script = ROOT / "cli/fastsafetensors.bash"
    quoted = " ".join(f"'{w}'" for w in (command, *words))
    return subprocess.run(
        ["bash", "-c", f"source {script}; COMP_WORDS=({quoted}); "
         f"COMP_CWORD={len(words)}; _fastsafetensors; printf '%s\\n' \"${{COMPREPLY[@]}}\""],
        capture_output=True, text=True, check=True).stdout.split()


def test_completion_knows_commands_options_values_and_files(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.safetensors").touch()
    assert complete(command, "in") == ["inspect", "inner.safetensors"]
    assert complete(command, "help", "ver") == ["verify"]
    assert complete(command, "load", "--mo") == ["--mode"]
    assert complete(command, "load", "--mode", "l") == ["load"]
    assert complete(command, "load", "--mode", "=", "l") == ["load"]
    assert "BF16" in complete(command, "convert", "--dtype", "")
    assert complete(command, "convert", "inner") == ["inner.safetensors"]
    assert complete(command, "load", "--threads", "") == []


def test_completion_offers_operands_and_values_behind_an_equal_sign(command, tmp_path, monkeypatch):
    """Completion works although bash makes '=' a separate word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").touch()
    assert complete(command, "cache", "") == ["list", "prune", "clear", "pin", "unpin", "drop"]
    assert complete(command, "cache", "pr") == ["prune"]
    digests = ["xxh3-128", "blake3", "sha256"]
    assert complete(command, "convert", "--manifest", "=") == digests
    assert complete(command, "convert", "--manifest", "=", "b") == ["blake3"]
    assert complete(command, "convert", "--compress", "=") == ["float", "all"]
    assert complete(command, "load", "--mode", "=") == ["auto", "load", "map"]
    assert complete(command, "hash", "--output", "=", "a") == ["a.safetensors"]


def test_inspect_prints_equal_metadata_of_shards_once(run, tmp_path):
    def write(number, note):
        header = f'{{"__metadata__":{{"note":"{note}"}},"t{number}":{{{U8}}}}}'
        write_raw(tmp_path / f"m-{number}.safetensors", header, b"ab")

    for number in range(4):
        write(number, "same")
    out = run("inspect", tmp_path).stdout
    assert "metadata of all 4 files\n" in out and out.count("note: same") == 1
    write(3, "other")
    out = run("inspect", tmp_path).stdout
    assert "m-0.safetensors and the next 2 files\n" in out
    assert out.count("note: same") == 1 and out.count("note: other") == 1


def test_a_dumb_terminal_gets_no_escape_sequences(command, model):
    arguments = [command, "inspect", str(model[0])]
    assert "\x1b" in on_terminal(arguments, TERM="xterm")
    assert "\x1b" not in on_terminal(arguments, TERM="dumb")


def test_other_shells_have_completion(command, tmp_path):
    for shell, words in (("fish", ["fish", "-n", ROOT / "cli/fastsafetensors.fish"]),
                         ("zsh", ["zsh", "-n", ROOT / "cli/_fastsafetensors"])):
        if shutil.which(shell):
            subprocess.run(words, check=True)
    for name in ("fastsafetensors.fish", "_fastsafetensors"):
        assert "__complete" in (ROOT / "cli" / name).read_text()


def all_commands(run):
    """Return the names of all subcommands."""
    return [word for word in run("__complete", "").stdout.split()
            if word not in ("help", "--help", "--version", ":files")]


def test_every_command_and_option_is_in_help(run):
    for name in all_commands(run):
        text = run("help", name).stdout
        assert text == run(name, "--help").stdout
        assert text.startswith(f"usage: fastsafetensors {name} ")
        assert max(map(len, text.splitlines())) <= 100
        for option in run("__complete", name, "--").stdout.split():
            assert option in text, (name, option)


def test_common_options_are_described_once(run):
    """The general help describes common options. The help of a command only names those that it
    has."""
    general = run("help").stdout
    for option in ("--json", "--no-progress", "--cache-dir FOLDER", "--help"):
        assert f"\n  {option} " in general, option
    for name in all_commands(run):
        text = run("help", name).stdout
        assert "\n  --json" not in text and "\n  --help" not in text
        line = next(row for row in text.splitlines() if row.startswith("common options"))
        assert set(re.findall(r"--[a-z-]+", line)) <= set(re.findall(r"--[a-z-]+", general))
        assert "--help" in line


def test_manual_says_what_help_says(command):
    tool = ROOT / "tools/make_manual.py"
    done = subprocess.run([sys.executable, tool, "--check", command], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout


def test_misspelled_words_get_suggestions(run, model):
    done = run("inspct", model[0])
    assert done.returncode == 3 and "Did you mean 'inspect'?" in done.stderr
    done = run("load", "--mdoe", "load", model[0])
    assert done.returncode == 3 and "Did you mean '--mode'?" in done.stderr
    done = run("load", "--mode", "lod", model[0])
    assert done.returncode == 3 and "auto, load, map" in done.stderr
    assert run("help", "nonsense").returncode == 3
    assert run("load", "--no-prog", model[0]).returncode == 0  # a beginning that is one option's
    done = run("load", "--e", "pread", "--mo=load", "--json", model[0])
    assert json.loads(done.stdout)["engine"] == "pread"
    assert run("inspect", "--", model[0]).returncode == 0
    assert "bfloat16" in run("load", "--dtype", "bf17", model[0]).stderr
    assert run("load", "--mode", "load", "--dtype", "torch.bfloat16", model[0]).returncode == 0


@pytest.mark.parametrize("word, here", [
    ("hlep", "Did you mean 'help'?"), ("ls", "Use 'inspect'"),
    ("rename", "Use 'edit --rename OLD=NEW'"), ("quantize", "Use 'convert'"),
    ("sync", "and no such file")])
def test_words_of_other_programs_get_suggestions(run, word, here):
    """The error for another program's word for a command or option has our word for it."""
    done = run(word, "x")
    assert done.returncode == 3 and here in done.stderr and not done.stdout



def test_a_path_alone_is_inspected(run, model, sharded):
    for path in (model[0], sharded[0]):
        assert run(path).stdout == run("inspect", path).stdout
    gone = run("/nonexistent/model.safetensors")
    assert gone.returncode == 2 and "No such file" in gone.stderr


def test_inspect_selects_sorts_and_fits(run, command, raw):
    long = "n" * 300
    path = raw('{"__metadata__":{"k":"' + "v" * 5000 + '"},'
               '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
               f'"{long}":{{"dtype":"U8","shape":[9],"data_offsets":[2,11]}},'
               '"layer.10.b":{"dtype":"F16","shape":[2],"data_offsets":[11,15]},'
               '"layer.9.b":{"dtype":"F16","shape":[3],"data_offsets":[15,21]}}', bytes(21))

    def names(*words):
        document = json.loads(run("inspect", "--json", *words, path).stdout)
        return [tensor["name"] for tensor in document["tensors"]]

    assert names("--sort", "name") == ["a", "layer.9.b", "layer.10.b", long]
    assert names("--sort", "size") == [long, "layer.9.b", "layer.10.b", "a"]
    assert names("--sort", "dtype")[-1] == "layer.10.b"
    assert names("--select", "layer.*", "--select", "a") == ["a", "layer.10.b", "layer.9.b"]
    assert "3 of 4 tensors" in run("inspect", "--select", "?*.*", "--select", "a", path).stdout
    assert run("inspect", "--select", "none", path).returncode == 1
    lines = on_terminal([command, "inspect", str(path)], NO_COLOR="1").splitlines()
    assert max(len(line) for line in lines) < 200 and "5000 bytes; --wide" in "".join(lines)
    assert long in on_terminal([command, "inspect", "--wide", str(path)])


def test_verify_reports_every_fault(run, sharded, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(sharded[0], folder)
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards[:2]:
        shard.write_bytes(shard.read_bytes()[:-10])
    (folder / "rest.safetensors.incomplete").touch()
    done = run("verify", folder)
    assert done.returncode == 1
    for name in (shards[0].name, shards[1].name, "rest.safetensors.incomplete"):
        assert done.stderr.count(name) == 1
    errors = json.loads(run("verify", "--json", folder).stdout)["errors"]
    assert [e["kind"] for e in errors[:2]] == ["MetadataIncompleteBuffer"] * 2
    assert all(e["byte"] > 0 and e["file"] for e in errors[:2]) and len(errors) == 3
    shards[0].unlink()
    done = run("verify", folder)
    assert done.returncode == 1 and shards[0].name in done.stderr and shards[1].name in done.stderr


def test_diff_takes_all_nans_as_equal(run, tmp_path, torch):
    from fastsafetensors.torch import save_file

    infinite, path = torch.tensor([float("inf")]), tmp_path
    nan = torch.tensor([0x7fc00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([-0x40], dtype=torch.int16).view(torch.bfloat16)  # with its sign bit set
    save_file({"a": torch.cat([nan, infinite])}, path / "a")
    save_file({"a": torch.cat([other, infinite.bfloat16()])}, path / "b")
    assert "0 of 2 elements" in run("diff", "--values", path / "a", path / "b").stdout
