# SPDX-License-Identifier: Apache-2.0
"""Silent, slow and faulty servers: no wrong byte, and no endless wait."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy
import pytest
from web_server import Answer, Request, seeded, skip_without_libcurl, web_server

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

SIZE_BYTES = 12 << 20
REFUSALS = (SafetensorError, OSError, RuntimeError, ValueError)
QUICK = {"first_byte_ms": 300, "connect_ms": 1000, "stall_ms": 300, "retry_base_ms": 5}
LONG_S = 300.0  # longer than any timeout here; a pause ends when its server stops


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 12 MiB."""
    data = numpy.random.default_rng(1).integers(0, 256, SIZE_BYTES, numpy.uint8)
    fst_numpy.save_file({"all": data}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    remote.configure(retry_base_ms=5)
    yield
    remote.configure()


def load_stats(url: str) -> tuple[bytes, dict[str, object]]:
    """Load a model; return its bytes and the statistics."""
    with closing(Model(url)) as model, closing(model.load()) as loader:
        loader.wait()
        [tensor] = list(loader)
        return bytes(memoryview(numpy.from_dlpack(tensor)).cast("B")), loader.stats()


def once(path_of_fault: set[str], request: Request) -> bool:
    """Whether this range is requested for the first time, and is not part of a header."""
    span = request.headers["range"]
    is_new = span not in path_of_fault and span != "bytes=0-65535"
    path_of_fault.add(span)
    return is_new


def test_stalled_response_is_retried(path: pathlib.Path) -> None:
    """If a response stalls before, within or after its headers, a timer ends the attempt, and the
    rest is requested again."""
    remote.configure(**QUICK, tries_max=1000)  # slow responses are retried here, too
    seen: set[str] = set()
    kinds = ["before", "head", "middle"] * 4

    def fault(request: Request, answer: Answer) -> Answer:
        if once(seen, request) and kinds:
            kind = kinds.pop()
            if kind == "before":
                answer.end, answer.pause_within_s = "silent", LONG_S
            else:
                answer.send_bytes = 0 if kind == "head" else len(answer.body) // 2
                answer.pause_within_s = LONG_S
        return answer

    with web_server(path.parent, fault) as server:
        data, stats = load_stats(server.url + path.name)
        assert server.pauses_over == 0
    assert data == fst_numpy.load_file(path)["all"].tobytes()
    assert int(str(stats["network_retries"])) >= 5


def test_silent_server_times_out(path: pathlib.Path) -> None:
    """A server that accepts connections and never responds is an error that reports the timeout."""
    remote.configure(**QUICK, tries_max=2)
    with closing(socket.create_server(("127.0.0.1", 0), backlog=50)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=r"does not respond .*[12] tries"):
            Model(f"http://127.0.0.1:{port}/x.safetensors")


def test_late_range_is_hedged(path: pathlib.Path) -> None:
    """When no other request is left, a request that takes far longer than the others is sent a
    second time."""
    remote.configure(stall_ms=600_000, first_byte_ms=600_000)
    spans: list[str] = []  # of the last load
    late: list[str] = []

    def fault(request: Request, answer: Answer) -> Answer:
        spans.append(request.headers["range"])
        if is_last and len(spans) == 5:
            late.append(spans[-1])
            answer.pause_before_s = LONG_S
        return answer

    is_last = False
    with web_server(path.parent, fault) as server:
        big = numpy.random.default_rng(2).integers(0, 256, 40 << 20, numpy.uint8)
        fst_numpy.save_file({"all": big}, path)
        for number in range(3):  # the median is of what this server has answered before
            spans, is_last = [], number == 2
            data, stats = load_stats(server.url + path.name)
            assert data == big.tobytes()
        assert server.pauses_over == 0
    assert late and spans.count(late[0]) == 2
    assert stats["network_retries"] == 0


def test_cancelled_load_ends_quickly(path: pathlib.Path) -> None:
    """Closing a load does not wait for servers."""
    remote.configure(stall_ms=600_000, first_byte_ms=600_000)
    asked = threading.Event()

    def fault(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] != "bytes=0-65535":
            answer.end, answer.pause_within_s = "silent", LONG_S
            asked.set()
        return answer

    with web_server(path.parent, fault) as server, closing(Model(server.url + path.name)) as model:
        loader = model.load()
        assert asked.wait(LONG_S)
        loader.close()
        assert server.pauses_over == 0


def test_untrusted_certificates_are_refused(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A server with an untrusted certificate is an error; with its certificate in ca_file it is
    read."""
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
        with pytest.raises(OSError, match="certificate is not trusted"):
            Model(f"https://localhost:{port}/{path.name}")
        remote.configure(ca_file=str(certificate))
        data, _ = load_stats(f"https://localhost:{port}/{path.name}")
        with pytest.raises(OSError, match="certificate"):  # the certificate is for another name
            Model(f"https://127.0.0.1:{port}/{path.name}")
    assert data == fst_numpy.load_file(path)["all"].tobytes()


def test_no_wrong_byte_of_many_faults(path: pathlib.Path) -> None:
    """With faults in every third response, loads return the file's bytes or an error.

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
            try:
                data, _ = load_stats(server.url + path.name)
                assert hashlib.sha256(data).digest() == right
            except REFUSALS as error:
                assert server.url.rstrip("/") in str(error)
                failures += 1
            loads += 1
    print(f"{len(server.log)} requests, {loads} loads, {failures} failed by name")
    assert failures < loads / 4


@pytest.mark.parametrize("is_ignored", [False, True])
def test_an_object_that_is_replaced_at_any_point(tmp_path: pathlib.Path, is_ignored: bool) -> None:
    """An object is replaced fifty times at each of seven points. Loads return the old object, the
    new one or an error, also without If-Match."""
    file = tmp_path / "model.safetensors"
    versions = []
    for value in range(2):
        fst_numpy.save_file({"all": numpy.full(6 << 20, value, numpy.uint8)}, file)
        versions.append((file.read_bytes(), f'"{value}"'))
    generator = seeded(7)
    lock = threading.Lock()
    left = 0

    def replace(request: Request, answer: Answer) -> Answer:
        nonlocal left
        with lock:
            left -= 1
            data, etag = versions[1 if left < 0 else 0]
        if not is_ignored and request.headers.get("if-match", etag) != etag:
            return Answer("412 Precondition Failed", {"ETag": etag})
        begin, end = request.span(len(data)) or (0, len(data))
        headers = {"ETag": etag, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        answer = Answer("206 Partial Content", headers, data[begin:end])
        if generator.random() < 0.2:  # a short response continues after the replacement
            answer.send_bytes, answer.end = int(generator.random() * (end - begin)), "close"
        return answer

    ends = {"old": 0, "new": 0, "changed": 0}
    with web_server(tmp_path, replace) as server:
        for number in range(50):
            left = number % 7
            try:
                data, _ = load_stats(server.url + file.name)
                held = numpy.frombuffer(data, numpy.uint8)
                assert held.min() == held.max()
                ends["new" if held[0] == 1 else "old"] += 1
            except REFUSALS as error:
                assert (
                    "replaced" in str(error)
                    or "changed" in str(error).lower()
                    or "ETag" in str(error)
                ), error
                ends["changed"] += 1
    assert min(ends.values()) > 0, ends


def test_shard_headers_are_read_in_parallel(tmp_path: pathlib.Path) -> None:
    """Each header is a round trip, so those of eight files are requested at once and may end in any
    order. The error names the first file that failed."""
    names = [f"model-{i:05}-of-00008.safetensors" for i in range(1, 9)]
    for name in names:
        fst_numpy.save_file({name: numpy.ones(3)}, tmp_path / name)
    weights = {name: name for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    all_there = threading.Barrier(8)
    missing: set[str] = set()

    def meet(request: Request, answer: Answer) -> Answer:
        name = request.path.lstrip("/")
        if name in names and not all_there.broken:
            all_there.wait(60)
        return Answer("404 Not Found") if name in missing else answer

    with web_server(tmp_path, meet) as server:
        for _ in range(2):
            with closing(Model(server.url + index.name)) as model:
                assert sorted(model.names()) == names
        assert not all_there.broken
        missing |= {names[6], names[2], names[4]}
        with pytest.raises(FileNotFoundError, match="00003-of"):
            Model(server.url + index.name)
        all_there.abort()


def test_failures_reveal_no_secret(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message contains keys, tokens or queries, even if the server sends them back."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    numbers = seeded(3)
    statuses = [f"{status} Oh" for status in (400, 401, 403, 404, 405, 409, 412, 416, 500, 503)]
    statuses += ["206 Partial Content", "302 Found", "307 There", "200 OK"]

    def echo(request: Request, answer: Answer) -> Answer:
        known = f"{request.headers.get('authorization', '')} {request.query}"
        known += request.headers.get("x-amz-security-token", "")
        code = numbers.choice([known, known[-40:], known[:60], "AccessDenied"])
        headers = {"x-amz-request-id": code, "x-ms-error-code": code, "X-Error-Code": code}
        if numbers.random() < 0.3:
            headers["Location"] = f"{numbers.choice(['http', 'file', 'x'])}://h.invalid:1/?{known}"
        if numbers.random() < 0.2:
            headers["Content-Range"] = code
        body = f"<Error><Code>{code}</Code><Message>{known}</Message></Error>"
        return Answer(numbers.choice(statuses), headers, body.encode())

    secrets = ["KEYSECRET", "SESSIONSECRET", "TOKENSECRET", "SASSECRET", "QUERYSECRET"]
    with web_server(tmp_path, echo) as server:
        common = {"endpoint": server.url, "tries_max": 1, "retry_base_ms": 1}
        kinds = [
            ("s3://b/k.safetensors", {"access_key": "AKID", "secret_key": "KEYSECRET",
                                      "session_token": "SESSIONSECRET"}),
            ("gs://b/k.safetensors", {"bearer_token": "TOKENSECRET"}),
            ("hf://b/k/m.safetensors", {"bearer_token": "hf_TOKENSECRET"}),
            ("az://b/k.safetensors", {"account": "acct", "sas_token": "sv=1&sig=SASSECRET"}),
            (server.url + "m.safetensors?X-Amz-Signature=QUERYSECRET&a=b", {}),
        ]  # fmt: skip
        failures = 0
        for number in range(1000):
            address, settings = kinds[number % len(kinds)]
            remote.configure(**{**common, **settings})
            with pytest.raises(REFUSALS) as caught:
                if number % 7 == 0 and address[:2] in ("s3", "gs", "az"):
                    fst_numpy.save_file({"x": numpy.ones(3)}, address)
                    raise OSError("saved")  # a 200 response is the complete object
                Model(address)
            failures += 1
            told = f"{caught.value} {caught.value!r} {vars(caught.value)}"
            assert not any(secret in told for secret in secrets), told
        assert failures == 1000


STOPPED = """
import sys
from fastsafetensors import remote
from fastsafetensors._core import Model
remote.configure(connect_ms=2000, first_byte_ms=2000, stall_ms=2000, retry_base_ms=5)
print(len(Model(sys.argv[1]).names()))
"""


def test_stopped_process_resumes(path: pathlib.Path) -> None:
    """A process or its machine is stopped for longer than its timeouts. When it resumes, the
    response has arrived, so this is not a timeout."""
    skip_without_libcurl()
    fst_numpy.save_file({"all": numpy.ones(9)}, path)
    data = path.read_bytes()
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(data)}\r\nETag: \"1\"\r\n"
    head += f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}\r\n\r\n"
    with closing(socket.create_server(("127.0.0.1", 0), backlog=50)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.safetensors"
        run = [sys.executable, "-c", STOPPED, url]
        listener.settimeout(100)
        with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
            client, _ = listener.accept()
            with closing(client):
                assert client.recv(65536).startswith(b"GET /x")
                process.send_signal(signal.SIGSTOP)
                time.sleep(2.5)
                client.sendall(head.encode() + data)
                process.send_signal(signal.SIGCONT)
                assert process.communicate()[0] == "1\n"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):  # no second request was sent
                listener.accept()
