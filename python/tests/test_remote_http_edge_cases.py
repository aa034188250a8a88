# SPDX-License-Identifier: Apache-2.0
"""HTTP edge cases: slow responses, HTTP/1.0, proxies, unknown hosts, replaced objects."""

from __future__ import annotations

import json
import pathlib
import random
import socket
import subprocess
import threading
from contextlib import closing, suppress

import numpy
import pytest
from object_store import KEY, SECRET, object_store
from web_server import Answer, Request, web_server

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

REFUSALS = (SafetensorError, OSError, RuntimeError)


@pytest.fixture(autouse=True)
def _quick(own_home: pathlib.Path) -> None:
    remote.configure(retry_base_ms=2)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 3 MiB."""
    file = tmp_path / "m.safetensors"
    data = numpy.random.default_rng(1).integers(0, 256, 3 << 20, numpy.uint8)
    fst_numpy.save_file({"all": data}, file)
    return file


def serve_slowly(listener: socket.socket, stop: threading.Event) -> None:
    """Answer every request with valid headers, and then one byte each tenth of a second."""

    def answer(client: socket.socket) -> None:
        with closing(client):
            asked = client.recv(65536).split(b"Range: bytes=")[1]
            first = int(asked.split(b"-")[0])
            client.sendall(
                b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\nContent-Length: '
                b"%d\r\nContent-Range: bytes %d-65535/999999\r\n\r\n" % (65536 - first, first)
            )
            while not stop.wait(0.1):
                try:
                    client.sendall(b"x")
                except OSError:
                    return

    while not stop.is_set():
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(client,), daemon=True).start()


def test_trickling_response() -> None:
    """A server that sends a byte now and then times out like a silent one."""
    remote.configure(connect_ms=300, first_byte_ms=300, stall_ms=300, retry_base_ms=2, tries_max=3)
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_slowly, args=(listener, stop), daemon=True).start()
    with pytest.raises(OSError, match="does not respond"):
        Model(f"http://127.0.0.1:{listener.getsockname()[1]}/m.safetensors")
    stop.set()
    listener.close()


def test_http_1_0(path: pathlib.Path) -> None:
    """HTTP/1.0 works, with one connection per request."""

    def fault(request: Request, answer: Answer) -> Answer:
        lines = [f"HTTP/1.0 {answer.status}", f"Content-Length: {len(answer.body)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        answer.raw_head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        answer.end = "close"
        return answer

    with web_server(path.parent, fault) as server:
        loaded = fst_numpy.load_file(server.url + path.name)
        assert loaded["all"].tobytes() == fst_numpy.load_file(path)["all"].tobytes()
        assert server.connections == len(server.log)


def test_proxy_with_password(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 407, to a request or to CONNECT, is an error without retries."""

    def fault(request: Request, answer: Answer) -> Answer:
        return Answer("407 Proxy Authentication Required", {"Proxy-Authenticate": "Basic"})

    with web_server(path.parent, fault) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("NO_PROXY", "")
        with pytest.raises(PermissionError, match="407"):
            Model("http://example.invalid/m.safetensors")
        with pytest.raises(PermissionError, match="the proxy requires a name.*407"):
            Model("https://example.invalid/m.safetensors")
        assert len(proxy.log) == 2


def test_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS failure is reported after few attempts."""
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(OSError, match="unknown host"):
        Model("http://no-such-host.invalid/m.safetensors")


def test_default_port() -> None:
    """The signed Host header has no port if the URL has the default port of its scheme."""
    told: list[str] = []

    def refuse(request: Request) -> Answer | None:
        told.append(request.headers["host"])
        return None

    with object_store(keys={KEY: SECRET}) as server:
        server.refuse = refuse
        port = server.server_address[1]
        remote.configure(endpoint=f"http://LOCALHOST:{port}", access_key=KEY, secret_key=SECRET)
        fst_numpy.save_file({"a": numpy.ones(3)}, "s3://b/m.safetensors")
        assert list(fst_numpy.load_file("s3://b/m.safetensors")) == ["a"]
    assert {text.lower() for text in told} == {f"localhost:{port}"}


def test_an_etag_that_breaks_lines(path: pathlib.Path) -> None:
    """An ETag with a carriage return is never sent back."""

    def fault(request: Request, answer: Answer) -> Answer:
        answer.headers["ETag"] = '"a\rX-Injected: 1"'
        return answer

    with web_server(path.parent, fault) as server:
        with suppress(REFUSALS):
            fst_numpy.load_file(server.url + path.name)
        assert all("x-injected" not in r.headers and "\r" not in str(r.headers)
                   for r in server.log)  # fmt: skip


@pytest.mark.parametrize("has_date", [False, True])
def test_a_server_without_versions(
    path: pathlib.Path, has_date: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says that a replacement would not be noticed."""

    def fault(request: Request, answer: Answer) -> Answer:
        for name in ("ETag", "Last-Modified"):
            answer.headers.pop(name, None)
        if has_date:
            answer.headers["Last-Modified"] = "Sun, 22 Nov 2026 08:00:00 GMT"
        return answer

    with web_server(path.parent, fault) as server:
        fst_numpy.load_file(server.url + path.name)
    lines = [record.message for record in caplog.records if "names no version" in record.message]
    assert len(lines) == (0 if has_date else 1)
    assert has_date or lines[0].startswith(server.url + path.name)


@pytest.mark.parametrize("obeys", [True, False])
def test_replaced_at_random_points(path: pathlib.Path, obeys: bool) -> None:
    """If an object is replaced while it is loaded, the load returns the old object or an error.

    Checked with servers that obey If-Match and servers that ignore it.
    """
    old = path.read_bytes()
    new = bytearray(old)
    new[-(3 << 20) :] = bytes(b ^ 0xFF for b in old[-(3 << 20) :])
    versions = [(old, '"old"'), (bytes(new), '"new"')]
    state = {"count": 0, "at": 0}
    lock = threading.Lock()

    def fault(request: Request, answer: Answer) -> Answer:
        with lock:
            data, etag = versions[state["count"] >= state["at"]]
            state["count"] += 1
        begin, end = request.span(len(data)) or (0, len(data))
        wanted = request.headers.get("if-match")
        if obeys and wanted is not None and wanted != etag:
            return Answer("412 Precondition Failed", {})
        head = {"ETag": etag, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        return Answer("206 Partial Content", head, data[begin:end])

    numbers = random.Random(22)
    changed = 0
    right = [numpy.frombuffer(data[-(3 << 20) :], numpy.uint8) for data, _ in versions]
    with web_server(path.parent, fault) as server:
        for _ in range(50):
            state["count"], state["at"] = 0, numbers.randrange(4)
            try:
                loaded = fst_numpy.load_file(server.url + path.name)["all"]
            except REFUSALS as error:
                assert "replaced" in str(error) or "changed" in str(error)
                changed += 1
                continue
            assert any((loaded == data).all() for data in right)
    assert changed > 5


def test_merging_presigned_addresses(tmp_path: pathlib.Path, command: str) -> None:
    """The queries of presigned URLs, of files and of an index, are sent with every request and
    never printed."""
    names = ["one", "two"]
    for name in names:
        fst_numpy.save_file({name: numpy.ones((9, 9), numpy.float32)}, tmp_path / f"{name}.st")
    index = {"weight_map": {name: f"{name}.st" for name in names}}
    (tmp_path / "all.index.json").write_text(json.dumps(index))
    fst_numpy.save_file({"three": numpy.ones(3, numpy.float32)}, tmp_path / "three.st")

    def fault(request: Request, answer: Answer) -> Answer:
        if "MySecret" in request.query:
            return answer
        return Answer("403 Forbidden", {}, b"<Error><Code>AccessDenied</Code></Error>")

    out = tmp_path / "out.safetensors"
    with web_server(tmp_path, fault) as server:
        for sources in (["one.st", "two.st"], ["all.index.json", "three.st"]):
            asked = [f"{server.url}{name}?X-Amz-Signature=MySecret" for name in sources]
            run = [command, "merge", *asked, str(out)]
            done = subprocess.run(run, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert "MySecret" not in done.stdout + done.stderr
            assert set(names) <= set(fst_numpy.load_file(out))
            out.unlink()
        again = [f"{server.url}one.st?X-Amz-Signature=MySecret"] * 2
        run = [command, "merge", *again, str(out)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=600)
        assert "in two files" in done.stderr and "MySecret" not in done.stderr


def test_messages_without_a_cache(path: pathlib.Path) -> None:
    """Messages without a cache have no empty parts. verify=True lists the files that it searched
    for."""
    with web_server(path.parent) as server:
        with closing(Model(server.url + path.name)) as model, closing(model.load()) as loader:
            reason = loader.stats()["reason"]
        assert "by range requests" in reason and "; ," not in reason, reason
        with pytest.raises(FileNotFoundError, match="no digests to verify against"):
            fst_numpy.load_file(server.url + path.name, verify=True)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http"])
@pytest.mark.parametrize("bucket", [".", ".."])
def test_dot_segments_in_bucket_names(scheme: str, bucket: str) -> None:
    """A bucket named `..` is rejected, because it would leave the endpoint's path."""
    with object_store() as server:
        remote.configure(endpoint=server.url, anonymous=True)
        with pytest.raises(ValueError, match="name is invalid"):
            fst_numpy.load_file(f"{scheme}://{bucket}/x.safetensors")
        assert server.log == []


def test_bidirectional_characters_are_escaped(tmp_path: pathlib.Path) -> None:
    """Control and bidirectional characters in server responses and names are escaped in
    messages."""
    turns = [0x7F, 0x85, 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    kept = [0x2027, 0x202F, 0x2065, 0x206A, 0x61D, 0x200D]
    text = "".join(map(chr, turns + kept))

    def fault(request: Request, answer: Answer) -> Answer:
        return Answer("404 Not Found", {}, f"<Error><Code>{text}</Code></Error>".encode())

    with web_server(tmp_path, fault) as server:
        with pytest.raises(FileNotFoundError) as caught:
            fst_numpy.load_file(f"{server.url}a{text[2:]}b.safetensors")
        assert not {ord(c) for c in str(caught.value)} & set(turns)
    with pytest.raises(FileNotFoundError) as caught:
        fst_numpy.load_file(tmp_path / f"a{text}b.safetensors")
    assert "???" in caught.value.strerror or "???" in str(caught.value)
