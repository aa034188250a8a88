# SPDX-License-Identifier: Apache-2.0
"""The command's JSON output is what docs/command-json.md describes."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from fastsafetensors.numpy import save_file

numpy = pytest.importorskip("numpy")

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = {"str": str, "int": int, "bool": bool, "object": dict, "null": type(None)}


def schemas():
    """Return {first words before a block: descriptions}, in the order of the page."""
    text = (ROOT / "docs/command-json.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", text, re.S)
    names = ["error", "inspect", "show", "verify", "load", "rewrite", "dry_run", "edit", "diff",
             "hash", "manifest", "digests", "sign", "clean", "cache list", "cache prune",
             "cache pin", "cache drop",
             "engines", "bench", "delta", "delta show", "delta version"]
    assert len(blocks) == len(names)
    return {name: json.loads(block) for name, block in zip(names, blocks, strict=True)}


def is_word(value, word):
    if word == "any":
        return True
    if word in ("int", "number"):
        wanted = int if word == "int" else (int, float)
        return isinstance(value, wanted) and not isinstance(value, bool)
    return isinstance(value, TYPES[word]) if word in TYPES else value == word


def compare(value, schema, place):
    """Fail unless a value has the described form."""
    if isinstance(schema, str):
        assert any(is_word(value, word) for word in schema.split("|")), f"{place}: {value!r}"
    elif isinstance(schema, list):
        assert isinstance(value, list), place
        for index, element in enumerate(value):
            compare(element, schema[0], f"{place}[{index}]")
    else:
        assert isinstance(value, dict), place
        known = {key.rstrip("?"): (key, form) for key, form in schema.items()}
        missing = {key for key in schema if key[-1] not in "?*"} - set(value)
        assert not missing, f"{place} lacks {missing}"
        for key, element in value.items():
            _, form = known.get(key, known.get("*", (None, None)))
            assert form is not None, f"{place} has an undescribed key {key}"
            compare(element, form, f"{place}.{key}")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    tensors = {"a": numpy.arange(12, dtype="f4").reshape(3, 4), "b.c": numpy.ones(5, "f8")}
    save_file(tensors, folder / "m.safetensors", metadata={"k": "v"})
    save_file({"a": tensors["a"] + 1}, folder / "n.safetensors")
    (folder / "bad.safetensors").write_bytes(b"\0" * 20)
    (folder / "signed").mkdir()
    shutil.copy(folder / "m.safetensors", folder / "signed")
    save_file({"a": numpy.zeros(1 << 20, "f4")}, folder / "large.safetensors")
    (folder / "cache").mkdir(mode=0o700)
    for number in (1, 2):
        (folder / f"state{number}").mkdir()
        save_file({"a": numpy.full(9, number, "f4")}, folder / f"state{number}/model.safetensors")
    return folder


COMMANDS = [
    ("inspect", ["inspect", "m.safetensors"]),
    ("show", ["show", "m.safetensors", "*"]),
    ("verify", ["verify", "m.safetensors", "n.safetensors"]),
    ("verify", ["verify", "bad.safetensors"]),
    ("verify", ["verify", "absent"]),
    ("verify", ["verify", "--hash", "absent"]),
    ("verify", ["verify", "--manifest", "absent"]),
    ("load", ["load", "m.safetensors"]),
    ("load", ["load", "--mode", "load", "--repeat", "2", "m.safetensors"]),
    ("rewrite", ["convert", "--dtype", "F16", "m.safetensors", "h.safetensors"]),
    ("rewrite", ["extract", "--select", "a", "m.safetensors", "e.safetensors"]),
    ("rewrite", ["split", "--count", "2", "m.safetensors", "s"]),
    ("rewrite", ["merge", "m.safetensors", "g.safetensors"]),
    ("rewrite", ["rescue", "m.safetensors", "r.safetensors"]),
    ("dry_run", ["convert", "--dry-run", "--dtype", "F16", "m.safetensors", "x.safetensors"]),
    ("rewrite", ["convert", "--compress", "m.safetensors", "c.safetensors"]),
    ("rewrite", ["convert", "--decompress", "c.safetensors", "o.safetensors"]),
    ("dry_run", ["edit", "--dry-run", "--set", "x=y", "m.safetensors"]),
    ("edit", ["edit", "--set", "x=y", "n.safetensors"]),
    ("diff", ["diff", "m.safetensors", "n.safetensors"]),
    ("hash", ["hash", "m.safetensors"]),
    ("manifest", ["hash", "--manifest", "signed"]),
    ("manifest", ["hash", "--sums", "signed"]),
    ("digests", ["hash", "--write", "m.safetensors"]),
    ("digests", ["hash", "--write", "--dry-run", "m.safetensors"]),
    ("verify", ["verify", "--hash", "m.safetensors"]),
    ("verify", ["verify", "--manifest", "signed"]),
    ("clean", ["clean", "."]),
    ("load", ["load", "--mode", "load", "--share", "node", "--share-grace", "99",
              "large.safetensors"]),
    ("cache list", ["cache", "list", "--cache-dir", "cache"]),
    ("cache drop", ["cache", "drop", "all"]),
    ("load", ["load", "--dtype", "F16", "--share", "node", "--share-grace", "99",
              "large.safetensors"]),
    ("cache pin", ["cache", "pin", "SEGMENT"]),
    ("cache pin", ["cache", "unpin", "SEGMENT"]),
    ("cache prune", ["cache", "prune", "--max", "1MiB", "--cache-dir", "cache"]),
    ("cache prune", ["cache", "clear", "--cache-dir", "cache"]),
    ("engines", ["engines", "m.safetensors"]),
    ("bench", ["bench", "--repeat", "1", "m.safetensors"]),
    ("delta", ["delta", "make", "state1", "state2", "d", "--version", "2", "--base-version", "1"]),
    ("delta show", ["delta", "show", "d"]),
    ("delta", ["delta", "verify", "state1", "d"]),
    ("delta", ["delta", "apply", "state1", "d"]),
    ("delta", ["delta", "recover", "state1"]),
    ("delta version", ["delta", "show", "state1"]),
    ("error", ["inspect", "bad.safetensors"]),
    ("error", ["load", "absent"]),
    ("error", ["load", "--nonsense"]),
]


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[" ".join(w) for _, w in COMMANDS])
def test_output_is_as_described(command, work, name, words):
    segments = work / "segments"
    if "SEGMENT" in words:
        words = [*words[:-1], next(p.name for p in segments.iterdir() if p.name != "lock")]
    done = subprocess.run([command, words[0], "--json", *words[1:]], cwd=work, capture_output=True,
                          text=True, env={**os.environ, "FASTSAFETENSORS_SHARE_DIR": str(segments)})
    decoder, text, count = json.JSONDecoder(), done.stdout.strip(), 0
    assert text, done.stderr
    while text:
        value, end = decoder.raw_decode(text)
        compare(value, schemas()[name], name)
        text, count = text[end:].strip(), count + 1
    assert count == (2 if {"n.safetensors", "*", "--repeat"} & set(words) and
                     name not in ("diff", "edit", "bench") else 1)


def test_a_file_that_cannot_be_read_again_is_an_error_of_its_path(command, tmp_path):
    save_file({"a": numpy.ones(3)}, tmp_path / "m.safetensors")
    for words in (["hash", "--write"], ["verify", "--json", "--hash"]):
        if words[0] == "verify":
            digests = tmp_path / "m.safetensors.digest"
            digests.write_text(digests.read_text().replace("digest 1 ", "digest 1 no", 1))
        done = subprocess.run([command, *words, "m.safetensors"], cwd=tmp_path, text=True,
                              capture_output=True)
    answer = json.loads(done.stdout)
    compare(answer, schemas()["verify"], "verify")
    assert answer["path"] == "m.safetensors" and answer["error"]["kind"] == "InvalidManifest"


def test_quiet_prints_nothing(command, work):
    for words in (["diff", "--quiet", "--json", "m.safetensors", "h.safetensors"],
                  ["diff", "--quiet", "--json", "m.safetensors", "m.safetensors"]):
        done = subprocess.run([command, *words], cwd=work, text=True, capture_output=True)
        assert (done.stdout, done.stderr) == ("", "")
        assert done.returncode == (0 if words[-1] == words[-2] else 1)


@pytest.mark.parametrize("words", [["convert", "m.safetensors", ""],
                                   ["convert", "--dry-run", "m.safetensors", ""],
                                   ["split", "--count", "2", "--dry-run", "m.safetensors", ""],
                                   ["edit", "--dry-run", "--clear", "m.safetensors", ""],
                                   ["edit", "--rename", "a=", "m.safetensors"],
                                   ["edit", "--rename", "a=x", "--rename", "b.c=x",
                                    "m.safetensors"]])
def test_wrong_command_lines_have_exit_code_3(command, work, words):
    done = subprocess.run([command, *words], cwd=work, text=True, capture_output=True)
    assert done.returncode == 3 and done.stderr.startswith("fastsafetensors: ")


def test_a_missing_driver_has_exit_code_4(command, work):
    words = [command, "load", "--device", "cuda", "m.safetensors"]
    done = subprocess.run(words, cwd=work, text=True, capture_output=True)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU driver")
    assert done.returncode == 4 and "libcuda" in done.stderr


def test_verify_is_quiet_about_valid_models(command, work, tmp_path):
    """Exit code 0 and no output; a model that is not valid is still printed."""
    model = tmp_path / "m.safetensors"
    shutil.copy(work / "m.safetensors", model)
    for words in (["hash", "--write", model], ["hash", "--manifest", model]):
        subprocess.run([command, *words], check=True, capture_output=True)
    for check in ([], ["--hash"], ["--manifest"]):
        words = [command, "verify", "--json", "--quiet", *check]
        done = subprocess.run([*words, model], text=True, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), check
        done = subprocess.run([*words, model, work / "bad.safetensors"], text=True,
                              capture_output=True)
        assert json.loads(done.stdout)["path"] == str(work / "bad.safetensors")
    with open(model, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    for check in (["--hash"], ["--manifest"]):
        done = subprocess.run([command, "verify", "--json", "--quiet", *check, model], text=True,
                              capture_output=True)
        assert done.returncode == 1 and not json.loads(done.stdout)["valid"]


def test_verify_says_that_there_are_no_digests(command, work):
    done = subprocess.run([command, "verify", "--json", "--hash", "n.safetensors"], cwd=work,
                          text=True, capture_output=True)
    assert done.returncode == 1 and json.loads(done.stdout)["error"]["kind"] == "NoDigests"


def test_rescue_says_what_is_lost(command, work, tmp_path):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((work / "m.safetensors").read_bytes()[:-8])
    for source, loss in ((cut, "1 of 2 tensors"), (work / "m.safetensors", None)):
        words = [command, "rescue", "--json", source, tmp_path / "out.safetensors"]
        done = subprocess.run(words, text=True, capture_output=True)
        answer = json.loads(done.stdout)
        compare(answer, schemas()["rewrite"], "rewrite")
        assert answer["loss"] is None if loss is None else loss in answer["loss"]
