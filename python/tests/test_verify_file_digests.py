# SPDX-License-Identifier: Apache-2.0
"""Verified loads with digests of whole files and of tensors."""

import hashlib
import json
import os
import pathlib
import subprocess

import pytest
import torch

from fastsafetensors import (
    SafetensorError,
    SignedBy,
    check_signature,
    safe_open,
    sign_folder,
    verifying,
    write_sums,
)
from fastsafetensors import torch as fast_torch
from fastsafetensors._base.command import find_command
from fastsafetensors._core import Model

WEIGHTS = {
    f"layer.{number}": torch.arange(262144.0).reshape(512, 512) + number for number in range(3)
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run(
        [find_command(), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def make_sums(path: pathlib.Path) -> pathlib.Path:
    """Write a checksum list of the folder."""
    assert run("hash", "--sums", path.parent).returncode == 0
    return path


def make_own_sum(path: pathlib.Path) -> pathlib.Path:
    """Write a checksum list of the file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = write_sums(path)
    assert (made.algorithm, made.files, made.bytes_read) == ("sha256", 1, os.path.getsize(path))
    assert pathlib.Path(f"{path}.sha256").read_text() == f"{digest}  {path.name}\n"
    return path


def make_sidecar(path: pathlib.Path) -> pathlib.Path:
    """Write a .digest file with 64-bit digests of the file and its tensors."""
    assert run("hash", "--write", "--algorithm", "xxh3", path).returncode == 0
    return path


def make_inside(path: pathlib.Path) -> pathlib.Path:
    """Embed digests of the tensors in the file."""
    made = path.parent / "inside.safetensors"
    done = run("hash", "--algorithm", "sha256", "--embed", made, path)
    assert done.returncode == 0, done.stderr
    return made


def make_hub(path: pathlib.Path) -> pathlib.Path:
    """Make a snapshot folder like the Hub's cache."""
    blobs, snapshot = path.parent / "blobs", path.parent / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(blob)
    link = snapshot / path.name
    link.symlink_to(f"../../blobs/{blob.name}")
    return link


MAKERS = {
    "sums": make_sums,
    "own": make_own_sum,
    "sidecar": make_sidecar,
    "tensors": make_inside,
    "hub": make_hub,
}


@pytest.fixture(params=MAKERS)
def model(request, tmp_path: pathlib.Path) -> tuple[pathlib.Path, str]:
    """A file, and the digests to verify it with."""
    path = tmp_path / "model.safetensors"
    fast_torch.save_file(WEIGHTS, path)
    return MAKERS[request.param](path), "sums" if request.param == "own" else request.param


def flip(path: pathlib.Path, at: int) -> None:
    """Change a bit."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))


def test_digest_source_is_found_used_and_reported(model) -> None:
    """verify=True finds the digests, in every interface."""
    path, source = model
    assert Model(path, verify=True).verification()["source"] == source
    loaded = fast_torch.load_file(path, verify=True)
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)
    with safe_open(path, "pt", verify=True) as file:
        assert torch.equal(file.get_slice("layer.1")[3:5], WEIGHTS["layer.1"][3:5])
    with verifying():
        assert torch.equal(fast_torch.load_file(path)["layer.2"], WEIGHTS["layer.2"])


def test_every_bit_flip_is_refused(model) -> None:
    """Flipped bits in header, data and digests are errors. The bit is restored after each."""
    path, source = model
    size = os.path.getsize(path)
    for at in [9, 40, *range(1000, size, size // 12), size - 1]:
        flip(path, at)
        with pytest.raises((SafetensorError, FileNotFoundError)):
            fast_torch.load_file(path, verify=True)
        flip(path, at)
    lists = [p for p in path.parent.iterdir() if p.suffix in (".sha256", ".digest") or
             p.name == "SHA256SUMS"]
    for found in lists:
        start = found.read_text().find("file ") + 5 if source == "sidecar" else 0
        for at in range(start, start + 16, 3):
            flip(found, at)
            with pytest.raises((SafetensorError, FileNotFoundError)):
                fast_torch.load_file(path, verify=found)
            flip(found, at)
    fast_torch.load_file(path, verify=True)


def test_changes_after_opening_are_refused(model) -> None:
    """Chunks are compared with the digests that were read at opening."""
    path, _ = model
    with safe_open(path, "pt", verify=True) as file:
        with open(path, "r+b") as other:
            other.seek(-100, os.SEEK_END)
            other.write(b"\1" * 50)
        with pytest.raises(SafetensorError, match="layer.2|differs|changed"):
            file.get_tensor("layer.2")


def test_a_list_is_given_by_its_path(tmp_path) -> None:
    """verify=PATH accepts lists in other folders, and reports files that they lack."""
    path = tmp_path / "model.safetensors"
    fast_torch.save_file(WEIGHTS, path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (elsewhere / "list").write_text(f"SHA256 (model.safetensors) = {digest}\n")
    assert set(fast_torch.load_file(path, verify=elsewhere / "list")) == set(WEIGHTS)
    (elsewhere / "list").write_text(f"{digest}  other.safetensors\n")
    with pytest.raises(SafetensorError, match="the digest list lacks it"):
        fast_torch.load_file(path, verify=elsewhere / "list")


def test_sets_and_their_index(tmp_path) -> None:
    """A folder's list includes its index. A changed index is an error before it is parsed."""
    fast_torch.save_file(WEIGHTS, tmp_path / "whole.safetensors")
    folder = tmp_path / "set"
    done = run("split", "--size", "2M", tmp_path / "whole.safetensors", folder)
    assert done.returncode == 0, done.stderr
    assert run("hash", "--sums", folder).returncode == 0
    with safe_open(folder, "pt", verify=True) as file:
        assert set(file.keys()) == set(WEIGHTS)
    index = next(folder.glob("*.index.json"))
    text = json.loads(index.read_text())
    index.write_text(json.dumps(text))
    with pytest.raises(SafetensorError, match="SHA256SUMS"), safe_open(folder, "pt", verify=True):
        pass


def test_tensors_without_embedded_digest(tmp_path) -> None:
    """Digests of some tensors are not enough; an unknown algorithm does not count as a digest."""
    path = tmp_path / "model.safetensors"
    fast_torch.save_file(WEIGHTS, path, metadata={"digest.algorithm": "xxh3"})
    with pytest.raises(SafetensorError, match=r"digests lack this tensor, tensor `layer\.0`"):
        fast_torch.load_file(path, verify=True)
    fast_torch.save_file(WEIGHTS, path, metadata={"digest.algorithm": "md5"})
    with pytest.raises(SafetensorError, match="unknown algorithm"):
        fast_torch.load_file(path, verify=True)


def test_a_bundle_without_a_manifest(tmp_path) -> None:
    """A signed bundle lists whole files: each is read and compared with it."""
    private, public = tmp_path / "key.pem", tmp_path / "pub.pem"
    try:
        subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out",
                        private], check=True, capture_output=True)
        subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True,
                       capture_output=True)
    except FileNotFoundError:
        pytest.skip("the openssl command, which makes keys, is not installed")
    folder = tmp_path / "signed"
    folder.mkdir()
    path = folder / "model.safetensors"
    fast_torch.save_file(WEIGHTS, path)
    made = sign_folder(folder, private)
    assert (made.files, made.bytes_read, made.path) == (
        1, os.path.getsize(path), os.fspath(folder / "model.sig"))
    assert sign_folder(folder, private, keep=folder / "model.sig").files == 1
    assert set(fast_torch.load_file(path, verify=SignedBy(public))) == set(WEIGHTS)
    assert check_signature(folder, public) == []
    flip(path, 5000)
    problem, = check_signature(folder, public, folder / "model.sig")
    assert (problem.kind, problem.file) == ("DigestMismatch", path.name)
    with pytest.raises(SafetensorError, match="digest of the whole file"):
        fast_torch.load_file(path, verify=SignedBy(public))
    flip(path, 5000)
    flip(folder / "model.sig", 600)
    with pytest.raises(SafetensorError):
        check_signature(folder, public)
    with pytest.raises(FileNotFoundError):
        check_signature(folder, tmp_path / "no.pem")
    with pytest.raises(SafetensorError):
        fast_torch.load_file(path, verify=SignedBy(public))
