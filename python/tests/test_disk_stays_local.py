# SPDX-License-Identifier: Apache-2.0
"""File names in files on disk never cause network access.

A server on the loopback interface counts connections; every test expects zero.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import numpy
import pytest
from web_server import WebServer, web_server

import fastsafetensors
from fastsafetensors import numpy as fst_numpy

INDEX = "model.safetensors.index.json"
SCHEMES = ("http", "HTTP", "s3", "gs", "az", "hf", "S3", "Hf")


@pytest.fixture()
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server that has the objects of these URLs and is the endpoint of every store."""
    served = tmp_path / "served"
    served.mkdir()
    fst_numpy.save_file({"a": numpy.full(4, 66, numpy.uint8)}, served / "x.safetensors")
    with web_server(served) as made:
        endpoint = made.url.rstrip("/")
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "s" * 40, "AWS_REGION": "us-east-1", "HF_ENDPOINT": endpoint,
            "HF_TOKEN": "hf_x", "STORAGE_EMULATOR_HOST": endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=x",
        }.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "model"
        folder.mkdir()
        monkeypatch.chdir(folder)
        yield made


def names_that_lead_away(server: WebServer) -> list[str]:
    """Return URLs of every supported scheme, in lower and upper case."""
    host = f"127.0.0.1:{server.server_address[1]}"
    return [f"{scheme}://{host}/x.safetensors" if scheme.lower() == "http"
            else f"{scheme}://box/name/x.safetensors" for scheme in SCHEMES]


def digest_of(path: str) -> str:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def write_index(name: str) -> None:
    pathlib.Path(INDEX).write_text(json.dumps({"weight_map": {"a": name}}))


def write_sums(name: str) -> None:
    digest = digest_of("model.safetensors")
    pathlib.Path("SHA256SUMS").write_text(f"{digest}  model.safetensors\n{digest}  {name}\n")


def write_escaped_sums(name: str) -> None:
    digest = digest_of("model.safetensors")
    pathlib.Path("SHA256SUMS").write_text(f"{digest}  model.safetensors\n\\{digest}  ./{name}\n")


def write_bsd_sums(name: str) -> None:
    digest = digest_of("model.safetensors")
    pathlib.Path("SHA256SUMS").write_text(
        f"SHA256 (model.safetensors) = {digest}\nSHA256 ({name}) = {digest}\n")


def write_kept_digests(name: str) -> None:
    digest = digest_of("model.safetensors")
    pathlib.Path("model.safetensors.digest").write_text(
        f'fastsafetensors-digest 1 sha256\nfile {digest} "model.safetensors"\n'
        f"file {digest} {json.dumps(name)}\n")


def write_manifest(name: str) -> None:
    text = f'fastsafetensors-manifest 1 sha256 1048576\nfile 0 {json.dumps(name)}\n'
    seal = hashlib.sha256(text.encode()).hexdigest()
    pathlib.Path("model.manifest").write_text(f"{text}seal {seal}\n")


LISTS = [write_sums, write_escaped_sums, write_bsd_sums, write_kept_digests, write_manifest]


@pytest.mark.parametrize("way", [INDEX, f"./{INDEX}", ".", f"../model/{INDEX}"])
def test_an_index_is_refused(server: WebServer, way: str, command: str) -> None:
    """Every API that opens an index by any path refuses its URLs before it connects."""
    for name in names_that_lead_away(server):
        write_index(name)
        for read in (fst_numpy.load_file, lambda path: fastsafetensors.safe_open(path, "np")):
            with pytest.raises((fastsafetensors.SafetensorError, OSError), match="PathEscapes"):
                read(way)
        for words in (["load"], ["inspect"], ["verify"], ["hash"], ["diff", way],
                      ["convert", "--dtype", "F16"]):
            target = ["out"] if words[0] == "convert" else []
            done = subprocess.run([command, *words, way, *target], capture_output=True, text=True)
            assert done.returncode not in (0, -11), (words, name, done.stdout)
    assert server.connections == 0


@pytest.mark.parametrize("write", LISTS)
def test_a_list_is_refused(server: WebServer, write: Callable[[str], None], command: str) -> None:
    """Lists of digests and manifests, checked or loaded by the bare name of the model."""
    fst_numpy.save_file({"a": numpy.zeros(4, numpy.uint8)}, "model.safetensors")
    for name in names_that_lead_away(server):
        write(name)
        found = [path for path in ("SHA256SUMS", "model.safetensors.digest", "model.manifest")
                 if os.path.exists(path)][0]
        for path in ("model.safetensors", "./model.safetensors", "."):
            with pytest.raises((fastsafetensors.SafetensorError, OSError)):
                fst_numpy.load_file(path, verify=True)
            with contextlib.suppress(fastsafetensors.SafetensorError, OSError):
                assert fastsafetensors.check_manifest(path, manifest=found)
            done = subprocess.run([command, "verify", f"--manifest={found}", path],
                                  capture_output=True, text=True)
            assert done.returncode != 0, (name, done.stdout)
    assert server.connections == 0


def test_remote_index_stays_within_its_folder(
    server: WebServer, tmp_path: pathlib.Path
) -> None:
    """The names in a downloaded index must stay within the folder of the index."""
    with web_server(tmp_path / "served") as first:
        for name in (*names_that_lead_away(server), "../x", "/x.safetensors", "//127.0.0.1/x"):
            (tmp_path / "served" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
            first.etags.clear()
            with pytest.raises((fastsafetensors.SafetensorError, OSError), match="PathEscapes"):
                fst_numpy.load_file(first.url + INDEX)
        assert {request.path for request in first.log} == {"/" + INDEX}
    assert server.connections == 0
