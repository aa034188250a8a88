# SPDX-License-Identifier: Apache-2.0
"""Remote models: every interface, version checks, and misbehaving servers."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy
import pytest
from web_server import Answer, Request, web_server

import fastsafetensors
from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

REFUSALS = (SafetensorError, OSError, ValueError, RuntimeError)
Tensors = dict[str, numpy.ndarray]


def make(path: pathlib.Path, count: int, rows: int, seed: int = 0) -> Tensors:
    """Save `count` tensors of `rows` x 256 floats to `path`."""
    generator = numpy.random.default_rng(seed)
    tensors = {
        f"layer.{i}.weight": generator.standard_normal((rows, 256), dtype=numpy.float32)
        for i in range(count)
    }
    fst_numpy.save_file(tensors, path)
    return tensors


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    remote.configure(retry_base_ms=2)
    yield
    remote.configure()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with one file of 10 MiB, and a set of three."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "model.safetensors", 10, 1024)
    (folder / "set").mkdir()
    shards = {}
    for i in range(9):
        name = f"part {i % 3}.safetensors"  # a URL can't contain the space unescaped
        shards[f"t{i}"] = name
        if i >= 6:
            held: Tensors = {
                f"t{k}": numpy.full((300, 100), k, numpy.int32) for k in range(i % 3, 9, 3)
            }
            fst_numpy.save_file(held, folder / "set" / name)
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (folder / "set" / "model.safetensors.index.json").write_text(index)
    return folder


def same(loaded: Tensors, path: pathlib.Path) -> bool:
    """Whether the tensors have the bytes of a local load."""
    local = fst_numpy.load_file(path)
    return loaded.keys() == local.keys() and all(
        loaded[name].tobytes() == local[name].tobytes() for name in local
    )


def test_every_api_accepts_a_url(folder: pathlib.Path) -> None:
    """load_file, safe_open, Model and index loads return the files' bytes from a URL."""
    with web_server(folder) as server:
        url = server.url + "model.safetensors"
        assert same(fst_numpy.load_file(url), folder / "model.safetensors")
        with fastsafetensors.safe_open(url, "numpy") as file:
            part = file.get_slice("layer.3.weight")[7:9, 5:6]
            whole = file.get_tensor("layer.3.weight")
        assert part.tobytes() == whole[7:9, 5:6].tobytes()
        [index] = (folder / "set").glob("*.index.json")
        loaded = fst_numpy.load_file(server.url + "set/" + index.name)
        assert {name: int(value[0, 0]) for name, value in loaded.items()} == {
            f"t{i}": i for i in range(9)
        }


def test_a_header_is_one_request(folder: pathlib.Path) -> None:
    """Inspecting a remote model takes one request of at most 64 KiB."""
    with web_server(folder) as server:
        with closing(Model(server.url + "model.safetensors")) as model:
            assert len(model.names()) == 10
        assert [request.headers["range"] for request in server.log] == ["bytes=0-65535"]


def test_each_range_request_is_conditional(folder: pathlib.Path) -> None:
    """Every request except the first has If-Match with the ETag of the first response."""
    with web_server(folder) as server:
        fst_numpy.load_file(server.url + "model.safetensors")
        etag = server.content("model.safetensors")
        assert etag is not None
        asked = [request.headers.get("if-match") for request in server.log]
        assert asked[0] is None and set(asked[1:]) == {etag[1]} and len(asked) > 3


def test_views_of_an_object_are_refused(folder: pathlib.Path) -> None:
    """mode="map" is an error that gives the reason."""
    with web_server(folder) as server:
        model = Model(server.url + "model.safetensors")
        with closing(model), pytest.raises(REFUSALS, match="can't be mapped"):
            model.load(mode="map")


def fails(folder: pathlib.Path, fault: Callable[[Request, Answer], Answer], words: str) -> str:
    """Return the error message of a load from a server with a fault."""
    with web_server(folder, fault) as server:
        with pytest.raises(REFUSALS, match=words) as caught:
            fst_numpy.load_file(server.url + "model.safetensors?token=SECRET")
        assert "SECRET" not in str(caught.value)
    return str(caught.value)


def later(change: Callable[[Answer], object]) -> Callable[[Request, Answer], Answer]:
    """Apply a fault to all responses except the first."""

    def fault(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] != "bytes=0-65535":
            change(answer)
        return answer

    return fault


def test_invalid_responses_are_reported(folder: pathlib.Path) -> None:
    """A response that violates any rule is an error, and no byte of it is used."""

    def header(name: str, value: str | None) -> Callable[[Request, Answer], Answer]:
        return later(lambda answer: answer.headers.update({name: value}))  # type: ignore[dict-item]

    size = (folder / "model.safetensors").stat().st_size
    fails(folder, header("Content-Range", f"bytes 0-99/{size}"), "a different range")
    fails(folder, header("Content-Range", None), "no Content-Range")
    fails(folder, header("Content-Range", "bytes 5-4/3"), "Content-Range is invalid")
    fails(folder, header("Content-Encoding", "gzip"), "Content-Encoding")
    fails(folder, header("Content-Type", "multipart/byteranges; boundary=x"), "multipart")
    fails(folder, header("Content-Length", "18446744073709551617"), "Content-Length is invalid")
    fails(folder, header("X-Large", "x" * 70000), "headers are too large")
    fails(folder, later(lambda answer: setattr(answer, "status", "200 OK")), "status 200")
    fails(folder, later(lambda answer: setattr(answer, "status", "418 Teapot")), "418")
    fails(folder, later(lambda answer: setattr(answer, "status", "403 Forbidden")), "denied access")
    fails(folder, later(lambda answer: setattr(answer, "status", "404 Not Found")), "not exist")


def test_a_replaced_object_is_an_error(folder: pathlib.Path) -> None:
    """It is detected by status 412, another ETag (from servers that ignore If-Match), another size,
    or status 416."""

    def header(name: str, value: str) -> Callable[[Request, Answer], Answer]:
        return later(lambda answer: answer.headers.update({name: value}))

    size = (folder / "model.safetensors").stat().st_size
    fails(folder, header("ETag", '"other"'), "its ETag changed")
    fails(folder, later(lambda answer: setattr(answer, "status", "412 No")), "replaced")
    fails(folder, later(lambda answer: setattr(answer, "status", "416 No")), "smaller")
    fails(folder, header("Content-Range", f"bytes 0-99/{size + 1}"), "its size changed")


def test_redirects(folder: pathlib.Path) -> None:
    """Redirects to another host are followed and remembered. Loops and other schemes are errors."""

    def send_to(place: str) -> Callable[[Request, Answer], Answer]:
        return lambda request, answer: Answer("302 Found", {"Location": place})

    with web_server(folder) as target:
        url = target.url + "model.safetensors?signature=SECRET"
        with web_server(folder, send_to(url)) as server:
            loaded = fst_numpy.load_file(server.url + "anything.safetensors")
            assert same(loaded, folder / "model.safetensors")
            assert len(server.log) == 1 and len(target.log) > 3
    fails(folder, send_to("/model.safetensors"), "too many redirects")
    fails(folder, send_to("file:///etc/passwd"), "not http or https")
    fails(folder, send_to("gopher://127.0.0.1/"), "not http or https")


def test_broken_requests_are_retried(folder: pathlib.Path) -> None:
    """A body that ends early is continued at the first missing byte. 503 and connection resets are
    retried."""
    random_numbers = random.Random(4)

    def fault(request: Request, answer: Answer) -> Answer:
        kind = random_numbers.choice(["good"] * 6 + ["cut", "reset", "busy", "gone"])
        if kind == "cut" and len(answer.body) > 1000:
            answer.send_bytes, answer.end = random_numbers.randrange(len(answer.body)), "close"
        elif kind == "reset":
            answer.send_bytes, answer.end = len(answer.body) // 3, "reset"
        elif kind == "busy":
            return Answer("503 Slow Down", {"Retry-After": "0"}, b"<Code>SlowDown</Code>")
        elif kind == "gone":
            answer.raw_head, answer.body, answer.end = b"", b"", "close"
        return answer

    with web_server(folder, fault) as server:
        loaded = fst_numpy.load_file(server.url + "model.safetensors")
        assert same(loaded, folder / "model.safetensors")
        size = (folder / "model.safetensors").stat().st_size
        assert server.sent_bytes < 1.5 * size + 65536  # bytes that had arrived stay


def test_permanent_failures_are_errors(folder: pathlib.Path) -> None:
    """The message has the status, the code and the number of attempts."""

    def fault(request: Request, answer: Answer) -> Answer:
        return Answer("503 Slow Down", {"x-amz-request-id": "47"}, b"<Code>SlowDown</Code>")

    message = fails(folder, fault, "the server failed")
    assert "status 503 SlowDown, request 47, 8 tries" in message


def test_invalid_urls(folder: pathlib.Path) -> None:
    """The error has the reason, and no part of the URL that may be a password."""
    for url, words in {
        "http://user:hunter2@host/model.safetensors": "user or password",
        "http://host:99999/x": "port",
        "http:///x": "no host",
        "https://host/a b": "a space",
        "https://host/a#b": "fragment",
        "ftp://host/x": "unsupported URL scheme",
    }.items():
        with pytest.raises(REFUSALS, match=words) as caught:
            fst_numpy.load_file(url)
        assert "hunter2" not in str(caught.value)


def test_forked_child_uses_new_connections(folder: pathlib.Path) -> None:
    """A forked child loads models that the parent opened, with its own threads and connections."""
    with web_server(folder) as server, closing(Model(server.url + "model.safetensors")) as model:
        code = os.fork()
        if code == 0:
            loader = model.load()
            loader.wait()
            os._exit(0 if server.connections == 1 else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]) == 0
        assert server.connections > 1


def test_missing_libcurl_is_one_clear_error(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The error names the package to install. Local files load without libcurl."""
    for name in ("libcurl.so.4", "libcurl-gnutls.so.4"):
        (tmp_path / name).write_bytes(b"not a library")
    program = (
        "import sys, fastsafetensors.numpy as n\n"
        "assert len(n.load_file(sys.argv[1])) == 10\n"
        "try: n.load_file('http://127.0.0.1:1/x.safetensors')\n"
        "except Exception as error: print(error)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(folder / "model.safetensors")],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "libcurl4" in shown.stdout


def test_only_needed_ranges_are_requested(tmp_path: pathlib.Path) -> None:
    """Loads of three of forty tensors, and of an eighth of their rows, request at most 1.1 times
    the needed bytes."""
    file = tmp_path / "m.safetensors"
    tensors = {f"t{i:02}": numpy.full((256, 1024), i, numpy.float32) for i in range(40)}
    fst_numpy.save_file(tensors, file)
    with web_server(tmp_path) as server:
        with fastsafetensors.safe_open(server.url + file.name, "numpy") as opened:
            for name in ("t03", "t17", "t31"):
                assert (opened.get_tensor(name) == tensors[name]).all()
        assert server.sent_bytes <= 1.1 * 3 * tensors["t03"].nbytes
        before = server.sent_bytes
        with fastsafetensors.safe_open(server.url + file.name, "numpy") as opened:
            for name, value in tensors.items():
                assert (opened.get_slice(name)[64:96] == value[64:96]).all()
        assert server.sent_bytes - before <= 1.1 * sum(t.nbytes // 8 for t in tensors.values())


def test_gaps_are_read_over_where_requests_cost_more(tmp_path: pathlib.Path) -> None:
    """Half rows are read in a few requests with twice the bytes. Quarter rows get a request
    each."""
    file = tmp_path / "m.safetensors"
    rows = numpy.arange(64 * 65536, dtype=numpy.float32).reshape(64, 65536)  # 256 KiB each
    fst_numpy.save_file({"t": rows}, file)
    with web_server(tmp_path) as server:
        for part, most_requests, most_bytes in ((2, 20, rows.nbytes), (4, 70, rows.nbytes / 4)):
            columns = rows.shape[1] // part
            asked, sent = len(server.log), server.sent_bytes
            with fastsafetensors.safe_open(server.url + file.name, "numpy") as opened:
                assert (opened.get_slice("t")[:, :columns] == rows[:, :columns]).all()
            assert len(server.log) - asked <= most_requests
            assert server.sent_bytes - sent <= most_bytes + (128 << 10)
