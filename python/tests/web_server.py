# SPDX-License-Identifier: Apache-2.0
"""A web server for tests. It serves ranges of a folder's files, with faults on request."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import random
import socket
import socketserver
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DATE = "Sun, 22 Nov 2026 10:00:00 GMT"
MODIFIED = "Sun, 22 Nov 2026 09:00:00 GMT"  # so long before DATE that it identifies a version


@dataclass
class Request:
    """A client's request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""

    def span(self, size: int) -> tuple[int, int] | None:
        """The requested range within `size` bytes; None: everything."""
        text = self.headers.get("range")
        if text is None:
            return None
        first, last = text.removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1, size)


@dataclass
class Answer:
    """A response; tests change it to make faults."""

    status: str = "206 Partial Content"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw_head: bytes | None = None  # instead of status and headers
    pause_before_s: float = 0.0  # before the headers; ends early if the server stops
    send_bytes: int | None = None  # of the body; then `end`
    pause_within_s: float = 0.0  # after send_bytes; also ends early
    end: str = "keep"  # keep, close, reset


# A fault changes a response or returns another one.
Fault = Callable[[Request, Answer], Answer]


def skip_without_libcurl() -> None:
    """Skip the running test if the library can't read URLs here."""
    import pytest

    try:
        ctypes.CDLL("libcurl.so.4")
    except OSError:
        pytest.skip("libcurl is not installed")


class WebServer(socketserver.ThreadingTCPServer):
    """Counts requests, and returns faulty responses on request."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: pathlib.Path, fault: Fault | None = None, port: int = 0) -> None:
        """Serve the files of `folder` on `port` of the loopback interface (0: a free one).

        A test that needs a server is skipped without libcurl.
        """
        if "PYTEST_CURRENT_TEST" in os.environ:
            skip_without_libcurl()
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder
        self.fault = fault
        self.etags: dict[str, str] = {}
        self.log: list[Request] = []
        self.sent: list[int] = []
        self.sent_bytes = 0
        self.connections = 0
        self.pauses_over = 0  # of Answer.pause_before_s and pause_within_s
        self.ending = threading.Event()
        self.sockets: set[socket.socket] = set()  # of connections, each with its thread
        self.count_lock = threading.Lock()
        self._contents: dict[tuple[str, int], tuple[bytes, str]] = {}

    def pause(self, seconds: float) -> None:
        """Wait for the time, at most until the server stops."""
        if seconds > 0:
            self.ending.wait(seconds)
            with self.count_lock:
                self.pauses_over += 1

    def shutdown(self) -> None:
        """Stop the server and end its pauses."""
        self.ending.set()
        super().shutdown()

    def server_close(self) -> None:
        """Close all connections and so end their threads, because clients keep connections open."""
        super().server_close()
        with self.count_lock:
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """The server's URL, ending in a slash."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[bytes, str] | None:
        """(bytes, ETag) of a file, or None."""
        file = self.folder / urllib.parse.unquote(path.lstrip("/"))
        if ".." in path or not file.is_file():
            return None
        key = (path, file.stat().st_mtime_ns)
        if key not in self._contents:
            data = file.read_bytes()
            self._contents[key] = (data, '"' + hashlib.md5(data).hexdigest() + '"')
        return self._contents[key]

    def answer(self, request: Request) -> Answer:
        """Return the response of a server without faults."""
        found = self.content(request.path)
        if found is None:
            return Answer("404 Not Found", {}, b"<Error><Code>NoSuchKey</Code></Error>")
        data, etag = found
        headers = {"ETag": etag, "Last-Modified": MODIFIED, "Accept-Ranges": "bytes"}
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != etag:
            return Answer("412 Precondition Failed", headers)
        if request.headers.get("if-none-match") == etag:
            return Answer("304 Not Modified", headers)
        span = request.span(len(data))
        if span is None:
            return Answer("200 OK", headers, data)
        begin, end = span
        if begin >= len(data):
            return Answer(
                "416 Range Not Satisfiable", {**headers, "Content-Range": f"bytes */{len(data)}"}
            )
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return Answer("206 Partial Content", headers, data[begin:end])


class Handler(socketserver.BaseRequestHandler):
    """One connection."""

    server: WebServer

    def handle(self) -> None:
        """Answer requests until the client disconnects or a fault ends it."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.count_lock:
            self.server.connections += 1
            self.server.sockets.add(self.request)
        file = self.request.makefile("rb")
        with contextlib.suppress(OSError):
            while (request := self.read_request(file)) is not None:
                answer = self.server.answer(request)
                if self.server.fault is not None:
                    answer = self.server.fault(request, answer)
                with self.server.count_lock:
                    self.server.log.append(request)
                if not self.send(answer):
                    break
        with self.server.count_lock:
            self.server.sockets.discard(self.request)

    def read_request(self, file: Any) -> Request | None:
        """One request; None at the end."""
        line = file.readline(65536).decode("latin-1").split()
        if len(line) != 3:
            return None
        headers = {}
        while (text := file.readline(65536).decode("latin-1").strip()) != "":
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        body = file.read(int(headers.get("content-length", "0")))
        path, _, query = line[1].partition("?")
        return Request(line[0], path, query, headers, body)

    def send(self, answer: Answer) -> bool:
        """Send the response; False if the connection must be closed."""
        self.server.pause(answer.pause_before_s)
        head = answer.raw_head
        if head is None:
            lines = [f"HTTP/1.1 {answer.status}"]
            fields = {"Content-Length": str(len(answer.body)), "Date": DATE, **answer.headers}
            lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
            head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        body = answer.body if answer.send_bytes is None else answer.body[: answer.send_bytes]
        if answer.end == "silent":
            self.server.pause(answer.pause_within_s)
            return False
        with self.server.count_lock:  # counted before the client can receive the response
            self.server.sent_bytes += len(body)
        self.request.sendall(head)
        self.request.sendall(body)
        self.server.pause(answer.pause_within_s)
        if answer.end == "reset":
            linger = struct.pack("ii", 1, 0)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return answer.end == "keep" and answer.send_bytes is None


@contextlib.contextmanager
def web_server(
    folder: pathlib.Path, fault: Fault | None = None, port: int = 0
) -> Iterator[WebServer]:
    """Run a server during a `with` block."""
    server = WebServer(folder, fault, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def seeded(seed: int) -> random.Random:
    """Return a separate random generator for faults, because many threads use it."""
    return random.Random(seed)


def main() -> None:
    """web_server.py FOLDER: serve until it is interrupted, and print requests."""
    import sys

    def print_request(request: Request, answer: Answer) -> Answer:
        wanted = request.headers.get("range", "all")
        print(request.method, request.path, wanted, "->", answer.status, flush=True)
        return answer

    with web_server(pathlib.Path(sys.argv[1]), print_request) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
