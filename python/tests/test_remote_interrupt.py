# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a store has not responded: the save ends."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
from object_store import ObjectStore, object_store
from web_server import Answer, Request

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Writer

PROGRAM = """
import signal, sys, numpy
from fastsafetensors import remote
from fastsafetensors._core import Writer
remote.configure(endpoint=sys.argv[1], anonymous=len(sys.argv) < 6)
mib, files = int(sys.argv[3]), int(sys.argv[4])
some = numpy.ones(mib << 20, numpy.uint8)
rows = [(f"t{i}", "U8", some.shape, some.ctypes.data, some.nbytes) for i in range(max(files, 1))]
more = {"file_of": list(range(files)), "file_count": files} if files else {}
writer = None
try:
    writer = Writer(sys.argv[2], rows, None, **more)
    writer.commit()
    print("saved", flush=True)
except KeyboardInterrupt:
    if writer is not None:
        writer.close()
    print("interrupted", flush=True)
sys.stdin.readline()
"""
FILE, FOLDER = "s3://bucket/m.safetensors", "s3://bucket/m"


class Held:
    """Responses that a store holds back until it is released."""

    def __init__(self, which: Callable[[Request], bool]) -> None:
        """Hold the responses to requests that `when` selects."""
        self.which = which
        self.count = 0  # selected requests so far
        self.held, self.released, self.removed = (threading.Event() for _ in range(3))

    def __call__(self, request: Request, answer: Answer) -> Answer:
        """Hold the response after the store has done the requested work."""
        if self.which(request):
            self.count += 1
            self.held.set()
            self.released.wait(300)
        if request.method == "DELETE" and "uploadId" in request.query:
            self.removed.set()
        return answer


Saving = Iterator[tuple[ObjectStore, subprocess.Popen[str]]]


@contextlib.contextmanager
def saving(
    held: Held,
    path: str,
    mib: int,
    files: int = 0,
    prepare: Callable[[ObjectStore], None] = lambda server: None,
    more: tuple[str, ...] = (),
) -> Saving:
    """Run a save in another process, and interrupt it once a response is held."""
    with object_store(held) as server:
        prepare(server)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.url, path, str(mib), str(files), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert held.held.wait(120)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            assert process.stdout.readline() == "interrupted\n"
            assert not held.released.is_set()
            yield server, process
        finally:
            held.released.set()
            process.kill()
            process.communicate()


def is_join(request: Request) -> bool:
    """Whether a request completes a multipart upload."""
    return request.method == "POST" and "uploadId" in request.query


@pytest.mark.parametrize("step", ["part", "join", "whole", "list", "index"])
def test_interrupt_before_the_first_response(step: str) -> None:
    """Every wait of a save ends, and the store keeps no files of it except from the held
    request."""
    which: dict[str, Callable[[Request], bool]] = {
        "part": lambda r: "partNumber=2" in r.query,
        "join": is_join,
        "whole": lambda r: r.method == "PUT",
        "list": lambda r: "list-type" in r.query,
        "index": lambda r: r.method == "PUT" and r.path.endswith("index.json"),
    }
    mib, files = (1, 2) if step in ("list", "index") else (1, 0) if step == "whole" else (20, 0)
    with saving(Held(which[step]), FOLDER if files else FILE, mib, files) as (server, _):
        assert not server.uploads
        # The store may have executed the request whose response it holds. Files that a written
        # index may name stay.
        kept = {"join": 1, "whole": 1, "index": 3}
        assert len(server.objects) == kept.get(step, 0)


def test_interrupt_after_the_upload_is_created() -> None:
    """The upload is aborted, although its ID is in a response that arrives after the interrupt."""
    held = Held(lambda r: r.method == "POST" and "uploadId" not in r.query)
    with saving(held, FILE, 20) as (server, _):
        assert len(server.uploads) == 1 and not held.removed.is_set()
        held.released.set()
        assert held.removed.wait(120)
        assert not server.uploads and not server.objects


def test_interrupt_with_a_silent_store() -> None:
    """The roll-back ends after two seconds, although the store does not respond."""
    held = Held(lambda r: "partNumber=2" in r.query or r.method == "DELETE")
    with saving(held, FILE, 20) as (server, _):
        assert not server.objects


@pytest.mark.usefixtures("own_home")
def test_an_old_file_is_being_removed() -> None:
    """The new model is complete. Only the pending deletion of an old file is waited for."""
    held = Held(lambda r: r.method == "DELETE")

    def prepare(server: ObjectStore) -> None:
        remote.configure(endpoint=server.url, anonymous=True)
        value = numpy.zeros(8, numpy.uint8)
        rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, 8) for i in range(40)]
        writer = Writer(FOLDER, rows, None, file_of=list(range(40)), file_count=40, owners=[value])
        writer.commit()
        writer.close()

    with saving(held, FOLDER, 1, 2, prepare) as (server, _):
        assert held.count == 1
        held.released.set()
        assert {len(v) for v in fst_numpy.load_file(FOLDER + "/").values()} == {1 << 20}


def test_interrupt_rolls_back() -> None:
    """Files that no index names are deleted. The save waits at most two seconds for that."""
    log: list[Request] = []

    def is_held(request: Request) -> bool:
        has_files = any(r.method == "PUT" for r in log)
        return request.method == "DELETE" or ("list-type" in request.query and has_files)

    def prepare(server: ObjectStore) -> None:
        server.log = log

    held = Held(is_held)
    with saving(held, FOLDER, 1, 2, prepare):
        assert held.count == 2  # the check before the index is written, and one delete


def test_credentials_are_being_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A silent credential service does not delay a program that cancels."""
    token = tmp_path / "token"
    token.write_text("t")

    def prepare(server: ObjectStore) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))

    held = Held(lambda r: r.path == "/")
    with saving(held, FILE, 1, 0, prepare, ("signed",)) as (server, _):
        assert held.count == 1 and server.log == []
