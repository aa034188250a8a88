# SPDX-License-Identifier: Apache-2.0
"""The command's digests: in files, embedded, and after changes of the model."""

import ctypes
import hashlib
import json
import os
import subprocess

import pytest
from test_rewrite import run, sample  # noqa: F401 - fixtures

import fastsafetensors
from fastsafetensors import safe_open
from fastsafetensors.torch import save_file


def hash_kinds():
    """Return the available algorithms. SHA-256 needs libcrypto."""
    try:
        ctypes.CDLL("libcrypto.so.3")
    except OSError:
        return ["xxh3", "xxh3-128", "blake3"]
    return ["xxh3", "xxh3-128", "blake3", "sha256"]


@pytest.mark.parametrize("algorithm", hash_kinds())
def test_every_algorithm_is_stored_and_found(run, tmp_path, torch, algorithm):  # noqa: F811
    """`hash` stores the digests, and `verify --hash` and verified loads use them."""
    path, inside = tmp_path / "m.safetensors", tmp_path / "inside.safetensors"
    save_file({"a": torch.arange(70000.0), "b": torch.ones(3, dtype=torch.int8)}, path)
    run("hash", "--algorithm", algorithm, "--embed", inside, path)
    run("hash", "--algorithm", algorithm, "--write", path)
    for one, source in ((path, "sidecar"), (inside, "tensors")):
        run("verify", "--hash", one)
        told = json.loads(run("load", "--verify", "--json", one)[0])
        assert told["verified_by"] == source and told["digest"] == algorithm
        data = bytearray(one.read_bytes())
        data[-100] ^= 4
        one.write_bytes(data)
        run("verify", "--hash", one, code=1)
        run("load", "--verify", one, code=1)


@pytest.fixture
def embedded(run, tmp_path, torch):  # noqa: F811
    """Return (folder, algorithms). em.safetensors has embedded digests of p and q,
    other.safetensors has none."""
    kinds = hash_kinds()
    save_file({"p": torch.ones(40), "q": torch.ones(7)}, tmp_path / "one.safetensors")
    save_file({"r": torch.ones(40)}, tmp_path / "other.safetensors")
    run("hash", "--algorithm", kinds[0], "--embed", tmp_path / "em.safetensors",
        tmp_path / "one.safetensors")
    return tmp_path, kinds


def kept_digests(path):
    """Return the names of the tensors with embedded digests, and the names of all tensors."""
    with safe_open(path, "pt") as f:
        keys = [key for key in f.metadata() or {} if key.startswith("digest.")]
        names = {key.removeprefix("digest.tensor.") for key in keys} - {"digest.algorithm"}
        return names, set(f.keys())


# A command that writes a new file from em.safetensors, and whether the digests stay.
REWRITES = [
    (["convert", "--order", "name", "em"], True),
    (["convert", "--alignment", "4096", "em"], True),
    (["convert", "--dtype", "F32", "em"], True),  # has no effect
    (["convert", "--dtype", "BF16", "em"], False),
    (["extract", "--select", "p", "em"], True),
    (["merge", "em"], True),
    (["merge", "em", "other"], False),
    (["rescue", "em"], True),
    (["rescue", "half"], True),
    (["edit", "--rename", "p=new", "em"], True),
    (["edit", "--rename", "p=q", "--rename", "q=p", "em"], True),
    (["edit", "--set", "a=b", "em"], True),
    (["edit", "--clear", "em"], False),
]


@pytest.mark.parametrize(("words", "stays"), REWRITES, ids=lambda words: "-".join(words[:-1])
                         if isinstance(words, list) else str(words))
def test_embedded_digests_follow_their_tensors(run, embedded, words, stays):  # noqa: F811
    """A valid file is never reported as damaged, and no digest of a missing tensor remains."""
    folder, _ = embedded
    raw = (folder / "em.safetensors").read_bytes()
    (folder / "half.safetensors").write_bytes(raw[:-1])
    words = [str(folder / f"{word}.safetensors") if word in ("em", "other", "half") else word
             for word in words]
    run(*words, folder / "new.safetensors")
    digests, names = kept_digests(folder / "new.safetensors")
    assert digests == (names if stays else set())
    out, _ = run("verify", "--hash", folder / "new.safetensors", code=0 if stays else 1)
    assert ("match" if stays else "no stored digests") in out
    if words[0] in ("edit", "convert"):  # the same through a pipe
        with open(folder / "piped.safetensors", "wb") as piped:
            subprocess.run([run.command, *words, "-"], stdout=piped, check=True)
        assert kept_digests(folder / "piped.safetensors") == (digests, names)


def test_embedded_digests_of_a_split_model(run, embedded):  # noqa: F811
    folder, _ = embedded
    run("split", "--count", "2", folder / "em.safetensors", folder / "set")
    run("verify", "--hash", folder / "set")
    for shard in (folder / "set").glob("*.safetensors"):
        run("verify", "--hash", shard)


def test_digest_kinds_do_not_mix(run, embedded):  # noqa: F811
    folder, kinds = embedded
    run("hash", "--algorithm", kinds[1], "--embed", folder / "em2.safetensors",
        folder / "other.safetensors")
    run("merge", folder / "em.safetensors", folder / "em2.safetensors", folder / "new.safetensors")
    assert kept_digests(folder / "new.safetensors")[0] == set()


def test_json_is_not_valid_where_bytes_differ(run, embedded):  # noqa: F811
    folder, _ = embedded
    assert json.loads(run("verify", "--hash", "--json", folder / "em.safetensors")[0])["valid"]
    raw = bytearray((folder / "em.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "em.safetensors").write_bytes(raw)
    said = json.loads(run("verify", "--hash", "--json", folder / "em.safetensors", code=1)[0])
    assert said["valid"] is False and said["different"] == [
        {"problem": "changed", "kind": "tensor", "name": "q"}]
    said = json.loads(run("verify", "--hash", "--json", folder / "other.safetensors", code=1)[0])
    assert said["valid"] is False and said["digests"] is None


def test_tensors_and_files_that_come_and_go_are_named(run, tmp_path, torch):  # noqa: F811
    """Others, whose lines lie elsewhere then, are not called damaged."""
    from fastsafetensors import verify_file

    folder = tmp_path / "m"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for name, tensors in (("a", "xy"), ("b", "zw")):
        save_file({tensor: torch.ones(4) for tensor in tensors}, folder / f"{name}.safetensors")
    where = {"x": "a", "y": "a", "z": "b", "w": "b"}

    def list_tensors(names):
        index.write_text(json.dumps({"weight_map": {n: f"{where[n]}.safetensors" for n in names}}))

    list_tensors("xyz")
    run("hash", "--write", folder)
    assert verify_file(folder, digests=True) == []
    list_tensors("yzw")
    out, _ = run("verify", "--hash", folder, code=1)
    assert out.splitlines()[1:] == ["missing: tensor x", "no digest is stored: tensor w"]
    assert [problem.message for problem in verify_file(folder, digests=True)] == [
        'tensor "x" is missing, but its digest was kept',
        'tensor "w" is new: its digest was not kept']


def test_missing_names_are_as_they_were(run, tmp_path, torch):  # noqa: F811
    """In JSON also those of quotes, control characters and emoji."""
    names = ['a"b', "back\\slash", "new\nline", "\u202e", "\U0001f600", "\u00e9"]
    path = tmp_path / "m.safetensors"
    save_file({name: torch.ones(1) for name in (*names, "z")}, path)
    run("hash", "--write", path)
    kept = (tmp_path / "m.safetensors.digest").read_bytes()
    save_file({"z": torch.ones(1)}, path)
    (tmp_path / "m.safetensors.digest").write_bytes(kept)
    said = json.loads(run("verify", "--hash", "--json", path, code=1)[0])["different"]
    assert {row["name"] for row in said if row["problem"] == "missing"} == set(names)


@pytest.mark.parametrize("damage", ["cut", "other", "zero", "empty", "line", "algorithm"])
def test_a_damaged_digest_file_is_named(run, tmp_path, torch, damage):  # noqa: F811
    path, kept = tmp_path / "m.safetensors", tmp_path / "m.safetensors.digest"
    save_file({"a": torch.ones(4)}, path)
    run("hash", "--write", path)
    text = kept.read_bytes()
    kept.write_bytes({"cut": text[:-1], "other": b"fastsafetensors-digest 2 xxh3\n",
                      "zero": text + b"\0", "empty": b"", "line": text + b"tensor ab\n",
                      "algorithm": text.replace(b"xxh3", b"xxh4")}[damage])
    _, errors = run("verify", "--hash", path, code=1)
    assert "m.safetensors.digest: not a file that 'hash --write' wrote" in errors
    said = json.loads(run("verify", "--hash", "--json", path, code=1)[0])["error"]
    assert said["kind"] == "InvalidManifest" and said["file"].endswith("m.safetensors.digest")
    problems = fastsafetensors.verify_file(path, digests=True)
    assert [(one.kind, one.file) for one in problems] == [("InvalidManifest", f"{path}.digest")]


@pytest.mark.parametrize("found", ["model", "text", "short"])
def test_only_digest_files_are_overwritten(run, tmp_path, torch, found):  # noqa: F811
    """Another file of that name is the user's. Empty files and links are replaced."""
    path, place = tmp_path / "m.safetensors", tmp_path / "m.safetensors.digest"
    save_file({"a": torch.ones(4)}, path)
    place.write_bytes({"model": path.read_bytes(), "text": b"notes of mine, longer than a word",
                       "short": b"x"}[found])
    before = place.read_bytes()
    for options in (["--dry-run"], []):
        _, errors = run("hash", "--write", *options, path, code=3)
        assert "'hash --write' did not write" in errors and place.read_bytes() == before
    with pytest.raises(ValueError, match="did not write"):
        fastsafetensors.hash_file(path, write=True)
    place.write_bytes(b"")
    run("hash", "--write", path)
    place.unlink()
    (tmp_path / "own").write_bytes(before)
    place.symlink_to("own")
    run("hash", "--write", path)
    (tmp_path / "m.safetensors.digest.0").mkdir()  # a name like that of the file, and not its name
    run("hash", "--write", path)
    run("verify", "--hash", path)
    assert (tmp_path / "own").read_bytes() == before


def test_a_pipe_is_not_overwritten(run, tmp_path, torch):  # noqa: F811
    """A dry run refuses it as well. It prints the same path for each way to write the folder."""
    folder = tmp_path / "models"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / "m.safetensors")
    for spelling in ("models", "models/", "models/."):
        out, _ = run("hash", "--write", "--dry-run", spelling, cwd=tmp_path)
        assert out.startswith(f"would write {tmp_path}/models.digest, ")
    os.mkfifo(tmp_path / "models.digest")
    for options in (["--dry-run"], []):
        _, errors = run("hash", "--write", *options, folder, code=3)
        assert "models.digest: this would overwrite a pipe or device" in errors
    assert (tmp_path / "models.digest").is_fifo()


def test_names_that_are_not_utf8_are_not_stored(run, tmp_path, torch):  # noqa: F811
    """Two of them would have the same name in the text."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in (b"a\xe8.safetensors", b"a\xe9.safetensors"):
        path = folder / os.fsdecode(name)
        save_file({name.hex(): torch.ones(4)}, path)
        _, errors = run("hash", "--write", path, code=3)
        assert "a?.safetensors: a .digest file cannot have this name" in errors
        with pytest.raises(ValueError, match="which is not UTF-8"):
            fastsafetensors.hash_file(path, write=True)
        run("hash", path)
    path.rename(folder / "\u00e9\ufffd.safetensors")
    run("hash", "--write", folder, code=3)
    (folder / os.fsdecode(b"a\xe8.safetensors")).unlink()
    run("hash", "--write", folder)
    run("verify", "--hash", folder)
    assert len(os.listdir(folder)) == 1 and (tmp_path / "models.digest").exists()


def test_names_in_problems_are_printable(run, tmp_path, torch):  # noqa: F811
    path = tmp_path / "m.safetensors"
    save_file({"a\x1b]0;evil\x07\u202e": torch.ones(4)}, path)
    run("hash", "--write", path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    texts = [problem.message for problem in fastsafetensors.verify_file(path, digests=True)]
    assert texts and all(text.isprintable() for text in texts)


def test_hashes(run, sample, tmp_path):
    path, _ = sample
    kinds = hash_kinds()
    for kind in kinds:
        out, _ = run("hash", "--algorithm", kind, path)
        if kind == "sha256":
            assert hashlib.sha256(path.read_bytes()).hexdigest() in out
        out, _ = run("hash", "--algorithm", kind, "--write", "--dry-run", path)
        assert "would write" in out and not os.path.exists(f"{path}.digest.new")
        run("hash", "--algorithm", kind, "--write", path)
        out, _ = run("verify", "--hash", path)
        assert f"all digests ({kind}) match" in out
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
    assert "no stored digests" in out
    _, err = run("hash", "--algorithm", "md5", path, code=3)
    assert "xxh3, sha256" in err
