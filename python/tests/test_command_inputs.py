# SPDX-License-Identifier: Apache-2.0
"""Every command with every kind of input, with text and JSON output."""

import gzip
import json
import os
import subprocess

import pytest

from fastsafetensors.torch import save_file

# Arguments of a command in addition to the model, and its target, which is created for each case.
COMMANDS = {
    "inspect": (["inspect"], []),
    "show": (["show"], ["a"]),
    "verify": (["verify"], []),
    "verify --hash": (["verify", "--hash"], []),
    "load": (["load"], []),
    "bench": (["bench", "--repeat", "1"], []),
    "engines": (["engines"], []),
    "hash": (["hash"], []),
    "hash --embed": (["hash", "--embed", "{target}"], []),
    "convert": (["convert"], ["{target}"]),
    "extract": (["extract", "--select", "a"], ["{target}"]),
    "merge": (["merge"], ["{target}"]),
    "split": (["split", "--count", "2"], ["{folder}"]),
    "rescue": (["rescue"], ["{target}"]),
    "edit": (["edit", "--set", "k=v"], ["{target}"]),
    "diff": (["diff"], ["{model}"]),
}
# The exit code of a kind of input, and of commands that differ from the rest.
GOOD = {"verify --hash": 1}  # the page cache has no part of a pipe
BAD = {"diff": 2}  # 2, because 1 means that the models differ
KINDS = {
    "file": (0, GOOD),
    "folder": (0, GOOD | {"edit": 2, "diff": 1}),  # sharded models cannot be edited
    "index": (0, GOOD | {"edit": 2, "diff": 1}),
    "-": (0, GOOD | {"bench": 3}),  # a pipe can only be read once
    "/dev/stdin": (0, GOOD | {"bench": None}),
    "pipe": (0, GOOD | {"bench": 3, "engines": None}),
    "fifo": (2, {}),
    "missing": (2, BAD),
    "no models": (1, {"engines": None} | BAD),
    "unreadable": (2, {}),
    "lfs pointer": (1, {"engines": None} | BAD),
    "gzip": (1, {"engines": None} | BAD),
    "truncated": (1, {"engines": None, "rescue": 0} | BAD),
    "empty": (1, {"engines": None} | BAD),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, torch):
    """{kind: path} of one input of each kind."""
    top = tmp_path_factory.mktemp("inputs")
    top.chmod(0o755)
    model = top / "m.safetensors"
    save_file({"a": torch.ones(600), "b": torch.arange(90)}, model)
    names = ("folder", "none", "fifo", "secret", "lfs", "gz", "cut", "empty")
    files = {name: top / name / "m.safetensors" for name in names}
    for path in files.values():
        path.parent.mkdir()
    shards = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    for name, file in shards.items():
        save_file({name: torch.ones(30)}, files["folder"].parent / file)
    index = files["folder"].parent / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    os.mkfifo(files["fifo"])
    (top / "none/readme").write_text("nothing here")
    files["secret"].write_bytes(model.read_bytes())
    files["secret"].chmod(0)
    files["lfs"].write_text("version https://git-lfs.github.com/spec/v1\n"
                            f"oid sha256:{'0' * 64}\nsize 4000\n")
    files["gz"].write_bytes(gzip.compress(model.read_bytes()))
    files["cut"].write_bytes(model.read_bytes()[:-100])
    files["empty"].touch()
    return {"file": model, "folder": index.parent, "index": index, "-": "-", "pipe": "-",
            "/dev/stdin": "/dev/stdin", "fifo": files["fifo"], "missing": top / "nothing",
            "no models": files["none"].parent, "unreadable": files["secret"],
            "lfs pointer": files["lfs"], "gzip": files["gz"], "truncated": files["cut"],
            "empty": files["empty"]}


def become_other_user():
    """Root can read everything, so change to another user."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def call(command, kind, words, model, nobody):
    """Run the command with the model as standard input, as a pipe if requested."""
    with open(model, "rb") as file:
        reader = None
        if kind == "pipe":
            reader = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = subprocess.run([command, *map(os.fspath, words)], capture_output=True, timeout=600,
                              stdin=file if reader is None else reader.stdout,
                              preexec_fn=become_other_user if nobody else None, cwd="/")
        if reader is not None:
            reader.stdout.close()
            reader.wait()
    return done


def objects(text):
    """The JSON values that follow one another in a text."""
    decoder, found = json.JSONDecoder(), []
    while text.strip():
        value, end = decoder.raw_decode(text.strip())
        found.append(value)
        text = text.strip()[end:]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_answers(command, places, tmp_path, kind):
    usual, others = KINDS[kind]
    model = places["file"]
    wrong = []
    for name, (before, behind) in COMMANDS.items():
        if name == "bench" and kind in ("folder", "index"):
            continue  # each run makes about a dozen calls that wait for the disk
        codes = []
        for number, form in enumerate(([], ["--json"])):
            fill = {"target": tmp_path / f"{name}{number}.new", "model": model,
                    "folder": tmp_path / f"{name}{number}"}
            words = [word.format(**fill) for word in (*before, *form, "{source}", *behind)
                     if word != "{source}"]
            words.insert(len(before) + len(form), places[kind])
            done = call(command, kind, words, model, nobody=kind == "unreadable")
            out, err = done.stdout.decode(), done.stderr.decode()
            codes.append(done.returncode)
            expected = others.get(name, usual)
            if expected is not None and done.returncode != expected:
                wrong.append((name, form, done.returncode, out + err))
            if done.returncode not in (0, 1, 2, 3):
                wrong.append((name, form, done.returncode, err))
            if done.returncode and not (out + err).strip():
                wrong.append((name, form, "empty payload"))
            if form:
                found = objects(out)
                if not found and done.returncode:
                    wrong.append((name, "no JSON", err))
                if done.returncode > 1 and not any("error" in o or "errors" in o for o in found):
                    wrong.append((name, "no error in JSON", out))
            elif done.returncode > 1 and not err.startswith("fastsafetensors: "):
                wrong.append((name, "an error not on stderr", out + err))
        if codes[0] != codes[1]:
            wrong.append((name, "codes differ", codes))
    assert not wrong, "\n".join(map(str, wrong))


def test_pipe_is_read_no_further_than_needed(command, places):
    """inspect stops reading after the header. verify counts the remaining bytes without keeping
    them."""
    model = places["file"]
    endless = f"(cat '{model}'; cat /dev/zero) | '{command}' inspect -"
    done = subprocess.run(["bash", "-c", endless], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "2 tensors" in done.stdout, done.stderr
    for source, code, said in ((f"cat '{model}'", 0, "valid, 2 tensors"),
                               (f"head -c -1 '{model}'", 1, "1 of 3248 bytes are missing"),
                               (f"(cat '{model}'; echo x)", 1, "the file holds 3122 bytes")):
        done = subprocess.run(["bash", "-c", f"{source} | '{command}' verify -"],
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == code and said in done.stdout + done.stderr, done


def test_names_of_standard_output(command, places, tmp_path):
    model = places["file"]
    for target in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        done = subprocess.run([command, "convert", model, target], capture_output=True)
        assert done.stdout == model.read_bytes(), target
        with open(tmp_path / "out", "wb") as out:
            subprocess.run([command, "edit", "--set", "a=b", model, target], stdout=out,
                           check=True)
        assert b'"a":"b"' in (tmp_path / "out").read_bytes(), target
    done = subprocess.run([command, "convert", "--json", model, "/dev/stdout"],
                          capture_output=True)
    assert done.returncode == 3 and json.loads(done.stdout)["error"]["kind"] == "Usage"


def test_unwritable_folders(command, places):
    done = subprocess.run([command, "convert", places["file"], "/proc/x"], capture_output=True,
                          text=True)
    assert done.returncode == 2 and "no file can be created in the folder '/proc'" in done.stderr
