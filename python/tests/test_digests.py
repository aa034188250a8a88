# SPDX-License-Identifier: Apache-2.0
"""The command's digests: kept beside models and inside, and what becomes of them."""

import hashlib
import os
import subprocess

import pytest
from test_rewrite import run, sample  # noqa: F401 - fixtures

from fastsafetensors import safe_open
from fastsafetensors.torch import save_file


def hash_kinds():
    """The algorithms that the machine has a library for; skips where there is none."""
    done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True)
    kinds = [kind for kind, library in [("xxh3", "libxxhash"), ("sha256", "libcrypto")]
             if library in done.stdout]
    if not kinds:
        pytest.skip("neither libxxhash nor libcrypto is installed")
    return kinds


def test_embedded_digests_do_not_outlive_what_they_are_of(run, tmp_path, torch):
    """A sound file must not be called damaged: changed bytes and other files drop digests."""
    save_file({"p": torch.ones(40), "q": torch.ones(8)}, tmp_path / "one.safetensors")
    save_file({"r": torch.ones(40)}, tmp_path / "other.safetensors")
    kind = hash_kinds()[0]
    run("hash", "--algorithm", kind, "--embed", tmp_path / "em.safetensors",
        tmp_path / "one.safetensors")
    run("convert", "--order", "name", tmp_path / "em.safetensors", tmp_path / "same.safetensors")
    run("verify", "--hash", tmp_path / "same.safetensors")
    for words in (["convert", "--dtype", "BF16", tmp_path / "em.safetensors"],
                  ["convert", "--align", "4096", tmp_path / "em.safetensors"],
                  ["merge", tmp_path / "em.safetensors", tmp_path / "other.safetensors"]):
        run(*words, tmp_path / "new.safetensors")
        with safe_open(tmp_path / "new.safetensors", "pt") as f:
            assert not [key for key in f.metadata() or {} if key.startswith("digest.")]
        (tmp_path / "new.safetensors").unlink()


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
    assert "xxh3, sha256" in err
