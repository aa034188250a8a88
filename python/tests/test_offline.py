# SPDX-License-Identifier: Apache-2.0
"""Offline mode opens no connection: not for objects, credentials, metadata or cached versions.

A server on the loopback interface stands for every store and service, and counts connections.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import numpy
import pytest
from web_server import WebServer, web_server

import fastsafetensors
from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote

REFUSALS = (fastsafetensors.SafetensorError, OSError)
KINDS = ["option", "environment", "environment in words"]


def forbid(kind: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Forbid the network by one of the possible settings."""
    if kind == "option":
        remote.configure(offline=True, **settings)
    else:
        remote.configure(offline=False, **settings)
        monkeypatch.setenv("FASTSAFETENSORS_OFFLINE", "1" if kind == "environment" else "Yes")


@pytest.fixture()
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server with one model that is the endpoint of all stores and metadata services."""
    served = tmp_path / "served"
    (served / "box").mkdir(parents=True)
    for place in ("x.safetensors", "box/x.safetensors"):
        fst_numpy.save_file({"a": numpy.arange(300_000)}, served / place)
    with web_server(served) as made:
        endpoint = made.url.rstrip("/")
        for name in ("AWS_EC2_METADATA_DISABLED", "NO_GCE_CHECK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint,
            "AWS_REGION": "us-east-1", "HF_ENDPOINT": endpoint, "STORAGE_EMULATOR_HOST": endpoint,
            "GCE_METADATA_HOST": endpoint.removeprefix("http://"),
            "AZURE_STORAGE_ACCOUNT_NAME": "acct", "IDENTITY_ENDPOINT": endpoint,
            "IDENTITY_HEADER": "x", "AZURE_STORAGE_CONNECTION_STRING":
            f"AccountName=acct;AccountKey=a2V5;BlobEndpoint={endpoint}/acct",
        }.items():
            monkeypatch.setenv(name, value)
        yield made
    monkeypatch.undo()
    remote.configure()


def actions(url: str) -> list[Callable[[], object]]:
    """All calls that connect to a server, or to a service for credentials."""
    tensors = {"a": numpy.zeros(4, numpy.float32)}
    made: list[Callable[[], object]] = []
    for address in (url + "x.safetensors", url + "model.safetensors.index.json",
                    "s3://box/x.safetensors", "s3://box/", "s3://box", "gs://box/x.safetensors",
                    "az://box/x.safetensors", "hf://owner/name/x.safetensors",
                    "hf://owner/name@main/sub/", "hf://owner/name/model.safetensors.index.json"):
        made.append(lambda address=address: fst_numpy.load_file(address))  # type: ignore[misc]
        made.append(lambda address=address: fst_numpy.load_file(  # type: ignore[misc]
            address, verify=True))
        made.append(lambda address=address: fastsafetensors.safe_open(  # type: ignore[misc]
            address, "np"))
    for address in ("s3://box/new.safetensors", "gs://box/new.safetensors",
                    "az://box/new.safetensors"):
        made.append(lambda address=address: fst_numpy.save_file(  # type: ignore[misc]
            tensors, address))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_offline_opens_no_connection(
    kind: str, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads, listings, verification and saves are errors, and none connects to the server."""
    forbid(kind, monkeypatch, retry_base_ms=2)
    for act in actions(server.url):
        with pytest.raises(REFUSALS) as caught:
            act()
        assert "offline" in str(caught.value) or "manifest" in str(caught.value), caught.value
    assert server.connections == 0


@pytest.mark.parametrize("kind", KINDS)
def test_cached_objects_are_served(
    kind: str, server: WebServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete object is read from the cache, without revalidation and without credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    addresses = (server.url + "x.safetensors", "s3://box/x.safetensors")
    remote.configure(cache_dir=tmp_path / "cache")
    for address in addresses:
        fst_numpy.load_file(address)
        fst_numpy.load_file(address)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")  # from here on only a metadata service has keys
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    before = server.connections, len(server.log)
    forbid(kind, monkeypatch, cache_dir=tmp_path / "cache")
    for address in addresses:
        assert fst_numpy.load_file(address)["a"][-1] == 299_999
    with pytest.raises(FileNotFoundError, match="offline"):
        fst_numpy.load_file(server.url + "other.safetensors")
    assert (server.connections, len(server.log)) == before


@pytest.mark.parametrize("value", ["0", "", "false", "No", "off"])
def test_values_that_leave_the_network_on(
    value: str, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is off when it is empty, 0, false, no or off."""
    monkeypatch.setenv("FASTSAFETENSORS_OFFLINE", value)
    assert fst_numpy.load_file(server.url + "x.safetensors")["a"][-1] == 299_999


@pytest.mark.parametrize("way", ["--offline", "environment"])
def test_the_command(way: str, server: WebServer, tmp_path: pathlib.Path, command: str) -> None:
    """Subcommands read cached URLs, and refuse other URLs."""
    url, cache = server.url + "x.safetensors", os.fspath(tmp_path / "cache")
    for _ in range(2):
        subprocess.run([command, "load", "--cache-dir", cache, url], check=True,
                       capture_output=True)
    before = server.connections
    variables = dict(os.environ, **({"FASTSAFETENSORS_OFFLINE": "1"} if way != "--offline" else {}))
    option = [way] if way == "--offline" else []

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *words], capture_output=True, text=True, env=variables)

    other = server.url + "box/x.safetensors"
    target = os.fspath(tmp_path / "o.safetensors")
    for words in (["inspect", other], ["show", other, "a"], ["load", other], ["verify", other],
                  ["diff", other, other], ["convert", "--dtype", "F32", other, target],
                  ["split", "--size", "1M", other, target], ["merge", other, other, target],
                  ["extract", "--select", "a", other, target], ["rescue", other, target],
                  ["load", "s3://box/y"], ["load", "gs://box/y"], ["load", "hf://a/b/y"]):
        done = run(words[0], *option, *words[1:])
        assert done.returncode == 2, (words, done)
        assert "offline" in done.stderr, (words, done.stderr)
    for words in (["inspect"], ["load"], ["verify"]):
        for order in ([*option, "--cache-dir", cache], ["--cache-dir", cache, *option]):
            assert run(*words, *order, url).returncode == 0
    assert server.connections == before
