# SPDX-License-Identifier: Apache-2.0
"""Redirects to private addresses of other hosts are refused before anything connects."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import subprocess
from collections.abc import Callable, Iterator

import numpy
import pytest
from web_server import Answer, Request, web_server

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy

REFUSALS = (SafetensorError, OSError, RuntimeError)
NAME = "model.safetensors"
# Hosts of the loopback interface, other than the requested one, in spellings that only a resolver
# understands; then other private networks, to which no connection may be made either.
LOOPBACK = ["127.0.0.2", "0x7f.0.0.2", "2130706434", "127.2", "0177.0.0.2", "[::ffff:127.0.0.2]",
            "[::ffff:7f00:2]", "[::1]", "localhost", "LOCALHOST", "localhost.", "0.0.0.0"]
OTHERS = ["169.254.169.254", "[fe80::1]", "10.0.0.1", "172.16.3.4", "192.168.1.1", "[fc00::1]",
          "[fd00:ec2::254]", "100.100.100.200", "metadata.google.internal", "2852039166"]


@pytest.fixture()
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder with a model, to be served."""
    fst_numpy.save_file({"a": numpy.arange(100_000)}, tmp_path / NAME)
    remote.configure(retry_base_ms=2)
    yield tmp_path
    remote.configure()


@pytest.fixture()
def listener() -> Iterator[socket.socket]:
    """A socket that listens at every address of the machine."""
    try:
        made = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        made = socket.create_server(("0.0.0.0", 0))
    made.setblocking(False)
    with made:
        yield made


def is_untouched(listener: socket.socket) -> bool:
    """Whether no connection was made."""
    with contextlib.suppress(BlockingIOError):
        listener.accept()
        return False
    return True


def send_to(place: str) -> Callable[[Request, Answer], Answer]:
    """A server that redirects everything."""
    return lambda request, answer: Answer("302 Found", {"Location": place})


@pytest.mark.parametrize("host", LOOPBACK + OTHERS)
def test_private_hosts_are_refused(
    host: str, folder: pathlib.Path, listener: socket.socket
) -> None:
    """The error names the reason and the option, and no connection was made."""
    port = listener.getsockname()[1]
    with web_server(folder, send_to(f"http://{host}:{port}/{NAME}")) as server:
        with pytest.raises(REFUSALS, match="redirects to a private address.*private_redirects"):
            fst_numpy.load_file(server.url + NAME)
        assert len(server.log) == 1  # not tried again
    assert is_untouched(listener)


def test_the_option_allows_them(
    folder: pathlib.Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """private_redirects allows them, and so does the environment variable, also for the command."""
    with web_server(folder) as target:
        place = f"http://localhost:{target.server_address[1]}/{NAME}"
        with web_server(folder, send_to(place)) as server:
            remote.configure(private_redirects=True)
            assert fst_numpy.load_file(server.url + "x")["a"][-1] == 99_999
            remote.configure()
            with pytest.raises(REFUSALS, match="private address"):
                fst_numpy.load_file(server.url + "x")
            words = [command, "load", server.url + "x"]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 2 and "private address" in done.stderr
            variables = dict(os.environ, FASTSAFETENSORS_PRIVATE_REDIRECTS="1")
            assert subprocess.run(words, capture_output=True, env=variables).returncode == 0
            monkeypatch.setenv("FASTSAFETENSORS_PRIVATE_REDIRECTS", "1")
            assert fst_numpy.load_file(server.url + "x")["a"][-1] == 99_999


def test_a_redirect_within_the_host_is_followed(folder: pathlib.Path) -> None:
    """A redirect within a host is followed, even if the host is private and the port differs."""
    with web_server(folder) as target, web_server(folder, send_to(target.url + NAME)) as server:
        assert fst_numpy.load_file(server.url + "x")["a"][-1] == 99_999


def test_a_proxy_may_be_private(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirects to public hosts still go through a proxy with a private address."""
    data = (folder / NAME).read_bytes()

    def fault(request: Request, answer: Answer) -> Answer:
        if "first.example" in request.headers["host"]:
            return Answer("302 Found", {"Location": "http://second.example/x"})
        begin, end = request.span(len(data)) or (0, len(data))
        headers = {"ETag": '"v"', "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        return Answer("206 Partial Content", headers, data[begin:end])

    with web_server(folder, fault) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        assert fst_numpy.load_file("http://first.example/x")["a"][-1] == 99_999
        hosts = {request.headers["host"] for request in proxy.log}
        assert hosts == {"first.example", "second.example"}


@pytest.fixture
def private_name() -> str:
    """A name of this machine that looks like any other and has a private address."""
    name = socket.gethostname()
    try:
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except OSError:
        pytest.skip("this machine's name has no address")
    if name.startswith("localhost") or not address.is_private:
        pytest.skip("this machine's name has no private address, or is refused by itself")
    return name


@pytest.mark.parametrize("variables", [
    {"https_proxy": "http://proxy.example:{port}", "http_proxy": ""},
    {"http_proxy": "http://proxy.example:{port}", "no_proxy": "127.0.0.1,{name}"},
    {"all_proxy": "socks5://proxy.example:{port}", "no_proxy": "127.0.0.1 .{name}"},
], ids=["other scheme", "exempt", "exempt domain"])
def test_a_proxy_that_is_not_used(
    variables: dict[str, str], private_name: str, folder: pathlib.Path, listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A private host is refused on the proxy's port, too, if no proxy makes the connection."""
    port = listener.getsockname()[1]
    for variable in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(port=port, name=private_name))
    with web_server(folder, send_to(f"http://{private_name}:{port}/{NAME}")) as server:
        with pytest.raises(REFUSALS, match="redirects to a private address"):
            fst_numpy.load_file(server.url + NAME)
    assert is_untouched(listener)
