# SPDX-License-Identifier: Apache-2.0
"""Verification of remote models: manifests, lists and signatures next to them."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing

import numpy
import pytest
from object_store import ObjectStore, failure, object_store
from web_server import Answer, Request, web_server

from fastsafetensors import SafetensorError, remote, safe_open, write_manifest
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model, Writer
from fastsafetensors._loading.verified_open import SignedBy

pytestmark = pytest.mark.usefixtures("own_home")
NAMES = ["model.safetensors", "a b.safetensors"]


def make_set(folder: pathlib.Path) -> None:
    """Make a model of two files with its index."""
    folder.mkdir()
    value = numpy.arange(300000, dtype=numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(4)]
    with closing(Writer(str(folder), rows, None, file_of=[0, 1, 0, 1], file_count=2)) as writer:
        writer.commit()


def fill(server: ObjectStore, folder: pathlib.Path, place: str) -> None:
    """Copy the files of a folder to a store."""
    for path in folder.iterdir():
        server.objects[f"/bucket/{place}{path.name}"] = (path.read_bytes(), f'"{path.name}"')


def spoil(path: pathlib.Path) -> None:
    """Change a byte of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def sums(path: pathlib.Path) -> None:
    """Return a checksum list in sha256sum's format."""
    names = sorted(p.name for p in path.iterdir())
    text = subprocess.run(
        ["sha256sum", *names], cwd=path, capture_output=True, text=True, check=True
    ).stdout
    (path / "SHA256SUMS").write_text(text)


LISTS: dict[str, Callable[[pathlib.Path], object]] = {
    "manifest": lambda path: write_manifest(path),
    "sums": sums,
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_set(tmp_path: pathlib.Path, kind: str, scheme: str, whole: bool) -> None:
    """A verified folder or index loads. Changed bytes are an error that names the file."""
    folder = tmp_path / "my set"
    make_set(folder)
    LISTS[kind](folder)
    if not whole:
        spoil(folder / "model-00002-of-00002.safetensors")
    with web_server(tmp_path) as web, object_store() as store:
        fill(store, folder, "my set/")
        if scheme == "s3":
            remote.configure(endpoint=store.url, anonymous=True)
        index = "model.safetensors.index.json"
        addresses = [f"{web.url}my%20set/{index}?token=SECRET"]
        if scheme == "s3":
            addresses = ["s3://bucket/my set/", f"s3://bucket/my set/{index}"]
        for address in addresses:
            if whole:
                loaded = fst_numpy.load_file(address, verify=True)
                assert sorted(loaded) == ["t0", "t1", "t2", "t3"]
                continue
            with pytest.raises(SafetensorError, match=r"00002-of-00002") as caught:
                fst_numpy.load_file(address, verify=True)
            assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ending", [".manifest", ".sha256", "SHA256SUMS", ".digest"])
def test_a_file(tmp_path: pathlib.Path, name: str, ending: str, command: str) -> None:
    """Each kind of list that is searched next to a file works, in Python and in the command."""
    path = tmp_path / name
    fst_numpy.save_file({"a": numpy.arange(1 << 20, dtype=numpy.uint8)}, path)
    if ending == ".manifest":
        write_manifest(path)
    elif ending == ".digest":
        subprocess.run([command, "hash", "--write", path], check=True, capture_output=True)
    else:
        sums(tmp_path)
        if ending == ".sha256":
            (tmp_path / "SHA256SUMS").rename(tmp_path / f"{name}.sha256")
    with web_server(tmp_path) as server:
        url = server.url + name.replace(" ", "%20") + "?token=SECRET"
        assert fst_numpy.load_file(url, verify=True)["a"].nbytes == 1 << 20
        with safe_open(url, "np", verify=True) as opened:
            assert opened.get_tensor("a").nbytes == 1 << 20
        run = [command, "load", "--verify", "--json", url]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0 and "SECRET" not in done.stdout, done
        assert json.loads(done.stdout)
        spoil(path)
        with pytest.raises(SafetensorError) as caught:
            fst_numpy.load_file(url, verify=True)
        assert "SECRET" not in str(caught.value) and name.split()[-1] in str(caught.value)
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode != 0 and "SECRET" not in done.stderr, done


def test_remote_model_without_manifest(tmp_path: pathlib.Path) -> None:
    """A missing manifest, and one that is forbidden because of missing list permission, are the
    same error. A failing store is another one."""
    fst_numpy.save_file({"a": numpy.ones(3)}, tmp_path / "m.safetensors")
    for status, words in (
        ("404 Not Found", "no digests to verify against"),
        ("403 Forbidden", "no digests to verify against"),
        ("501 Not Implemented", "m.safetensors.manifest"),
    ):

        def refuse(request: Request, answer: Answer, status: str = status) -> Answer:
            is_it = request.path.endswith("m.safetensors")
            return answer if is_it else failure(status, "No")

        with web_server(tmp_path, refuse) as server:
            remote.configure(tries_max=1, retry_base_ms=1)
            with pytest.raises(OSError, match=words):
                fst_numpy.load_file(f"{server.url}m.safetensors", verify=True)


def test_remote_model_with_a_missing_shard(tmp_path: pathlib.Path) -> None:
    """A folder without an index must have all files of its manifest."""
    folder = tmp_path / "set"
    make_set(folder)
    write_manifest(folder)
    with object_store() as store:
        fill(store, folder, "set/")
        remote.configure(endpoint=store.url, anonymous=True)
        del store.objects["/bucket/set/model.safetensors.index.json"]
        with pytest.raises(SafetensorError, match="lists .*index.json, which is missing"):
            fst_numpy.load_file("s3://bucket/set/", verify=True)


def test_signed(tmp_path: pathlib.Path, command: str) -> None:
    """A bundle next to the model works with its key. Another key and unsigned bytes are errors."""
    if shutil.which("openssl") is None:
        pytest.skip("keys are made by openssl")
    folder = tmp_path / "set"
    make_set(folder)
    for name in ("key", "other"):
        make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"]
        subprocess.run([*make, tmp_path / f"{name}.pem"], check=True, capture_output=True)
        words = ["openssl", "ec", "-in", tmp_path / f"{name}.pem", "-pubout", "-out"]
        subprocess.run([*words, tmp_path / f"{name}.pub"], check=True, capture_output=True)
    write_manifest(folder, algorithm="sha256")
    subprocess.run(
        [command, "sign", "--private-key", tmp_path / "key.pem", folder], check=True,
        capture_output=True
    )
    assert (folder / "model.sig").exists()
    good, bad = SignedBy(tmp_path / "key.pub"), SignedBy(tmp_path / "other.pub")
    with object_store() as store, web_server(tmp_path) as web:
        fill(store, folder, "set/")
        remote.configure(endpoint=store.url, anonymous=True)
        index = f"{web.url}set/model.safetensors.index.json"
        for address in ("s3://bucket/set/", index, index + "?token=SECRET"):
            assert len(fst_numpy.load_file(address, verify=good)) == 4
            with pytest.raises(SafetensorError, match="a different key") as caught:
                fst_numpy.load_file(address, verify=bad)
            assert "SECRET" not in str(caught.value)
        spoil(folder / "model-00001-of-00002.safetensors")
        with pytest.raises(SafetensorError, match="00001-of-00002"):
            fst_numpy.load_file(index, verify=good)


def test_verification_source_is_available(tmp_path: pathlib.Path) -> None:
    """The source of the verification is reported without the signature in its URL."""
    path = tmp_path / "m.safetensors"
    fst_numpy.save_file({"a": numpy.ones(3)}, path)
    write_manifest(path)
    with web_server(tmp_path) as server:
        url = f"{server.url}{path.name}?token=SECRET"
        with closing(Model(url, verify=True)) as model:
            assert model.verification()["manifest"] == f"{server.url}{path.name}.manifest"
