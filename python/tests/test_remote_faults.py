# SPDX-License-Identifier: Apache-2.0
"""Servers that are silent, late, slow, or wrong now and then: no wrong byte, no endless wait."""

from __future__ import annotations

import hashlib
import os
import pathlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy
import pytest
from web_server import Answer, Request, seeded, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model

SIZE_BYTES = 12 << 20
QUICK = {"first_byte_ms": 300, "connect_ms": 1000, "stall_ms": 300, "retry_base_ms": 5}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 12 MiB."""
    data = numpy.random.default_rng(1).integers(0, 256, SIZE_BYTES, numpy.uint8)
    fst_numpy.save_file({"all": data}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    remote.configure(**QUICK)
    yield
    remote.configure()


def load_stats(url: str) -> tuple[bytes, dict[str, object]]:
    """(the bytes of a load, its statistics)."""
    with closing(Model(url)) as model, closing(model.load()) as loader:
        loader.wait()
        [tensor] = list(loader)
        return bytes(memoryview(numpy.from_dlpack(tensor)).cast("B")), loader.stats()


def once(path_of_fault: set[str], request: Request) -> bool:
    """Whether this range is asked for the first time, and is none of a header."""
    span = request.headers["range"]
    is_new = span not in path_of_fault and span != "bytes=0-65535"
    path_of_fault.add(span)
    return is_new


def test_silence_ends_and_is_asked_again(path: pathlib.Path) -> None:
    """Before the head, behind it, in the middle: the timers end it, the rest is asked for."""
    seen: set[str] = set()
    kinds = ["before", "head", "middle"] * 4

    def fault(request: Request, answer: Answer) -> Answer:
        if once(seen, request) and kinds:
            kind = kinds.pop()
            if kind == "before":
                answer.end, answer.pause_within_s = "silent", 2.0
            else:
                answer.send_bytes = 0 if kind == "head" else len(answer.body) // 2
                answer.pause_within_s = 2.0
        return answer

    with web_server(path.parent, fault) as server:
        data, stats = load_stats(server.url + path.name)
    assert data == fst_numpy.load_file(path)["all"].tobytes()
    assert int(str(stats["network_retries"])) >= 5


def test_a_server_that_says_nothing_is_given_up(path: pathlib.Path) -> None:
    """It accepts, and that is all: an error that says so."""
    remote.configure(**QUICK, tries_max=2)
    with closing(socket.create_server(("127.0.0.1", 0), backlog=50)) as listener:
        port = listener.getsockname()[1]
        begin = time.monotonic()
        with pytest.raises(OSError, match="does not answer"):
            Model(f"http://127.0.0.1:{port}/x.safetensors")
        assert time.monotonic() - begin < 20


def test_a_late_range_is_asked_for_beside(path: pathlib.Path) -> None:
    """When nothing else is to be done, a request that takes far longer than others gets company."""
    remote.configure(stall_ms=20000, first_byte_ms=20000)
    late = threading.Event()

    def fault(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] == "bytes=2097152-4194303" and not late.is_set():
            late.set()
            answer.pause_before_s = 8.0
        return answer

    with web_server(path.parent, fault) as server:
        big = numpy.random.default_rng(2).integers(0, 256, 40 << 20, numpy.uint8)
        fst_numpy.save_file({"all": big}, path)
        for _ in range(3):  # the median is of what this server has answered before
            data, stats = load_stats(server.url + path.name)
            assert data == big.tobytes()
    if late.is_set():
        assert int(str(stats["total_ns"])) < 8_000_000_000


def test_a_cancelled_load_ends_soon(path: pathlib.Path) -> None:
    """Closing waits for no server."""
    remote.configure()

    def fault(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] != "bytes=0-65535":
            answer.end, answer.pause_within_s = "silent", 3.0
        return answer

    with web_server(path.parent, fault) as server, closing(Model(server.url + path.name)) as model:
        loader = model.load()
        time.sleep(0.2)
        begin = time.monotonic()
        loader.close()
        assert time.monotonic() - begin < 2


def test_certificates_that_nobody_trusts_are_refused(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """TLS is verified; with ca_file the same server is read."""
    import ssl

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key),
         "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("no openssl command here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with web_server(path.parent) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        port = server.server_address[1]
        with pytest.raises(OSError, match="certificate is not to be trusted"):
            Model(f"https://localhost:{port}/{path.name}")
        remote.configure(**QUICK, ca_file=str(certificate))
        data, _ = load_stats(f"https://localhost:{port}/{path.name}")
        with pytest.raises(OSError, match="certificate"):  # another name than it is made for
            Model(f"https://127.0.0.1:{port}/{path.name}")
    assert data == fst_numpy.load_file(path)["all"].tobytes()


def test_no_wrong_byte_of_many_faults(path: pathlib.Path) -> None:
    """Requests with every third answer spoilt: loads give the file's bytes, or an error.

    10,000 requests with FASTSAFETENSORS_TESTS=all, else 600.
    """
    wanted = 10_000 if os.environ.get("FASTSAFETENSORS_TESTS") == "all" else 600
    numbers = seeded(22)
    lock = threading.Lock()
    fatal = [
        {"Content-Range": "bytes 0-9/99"},
        {"ETag": '"another"'},
        {"Content-Encoding": "gzip"},
        {"Content-Length": "99999999999999999999"},
    ]

    def fault(request: Request, answer: Answer) -> Answer:
        with lock:
            kind, number = numbers.random(), numbers.random()
        if kind < 0.12:
            answer.send_bytes, answer.end = int(number * len(answer.body)), "close"
        elif kind < 0.2:
            answer.send_bytes, answer.end = int(number * len(answer.body)), "reset"
        elif kind < 0.3:
            status = ["503 Slow Down", "500 Oh", "502 Bad", "504 Late", "429 Many"][int(number * 5)]
            return Answer(status, {"Retry-After": "0"}, b"<Code>SlowDown</Code>")
        elif kind < 0.3005:
            answer.headers.update(fatal[int(number * len(fatal))])
        elif kind < 0.301:
            answer.body += b"more"
            answer.headers["Content-Length"] = None  # type: ignore[assignment]
            answer.end = "close"
        return answer

    right = hashlib.sha256(fst_numpy.load_file(path)["all"].tobytes()).digest()
    loads = failures = 0
    with web_server(path.parent, fault) as server:
        while len(server.log) < wanted:
            begin = time.monotonic()
            try:
                data, _ = load_stats(server.url + path.name)
                assert hashlib.sha256(data).digest() == right
            except (OSError, RuntimeError) as error:
                assert server.url.rstrip("/") in str(error)
                failures += 1
            loads += 1
            assert time.monotonic() - begin < 30
    assert failures < loads / 4
