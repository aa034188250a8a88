# SPDX-License-Identifier: Apache-2.0
"""Responses of stores to saves: redirects, retries, errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
from object_store import KEY, SECRET, ObjectStore, failure, object_store, use_store
from web_server import Answer, Request

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Writer

pytestmark = pytest.mark.usefixtures("own_home")
ADDRESS, PLACE = "s3://box/m/m.safetensors", "/box/m/m.safetensors"
LARGE = 9 << 20  # bytes of a file that is sent in two parts
Which = Callable[[Request], bool]
REQUESTS: dict[str, tuple[int, Which]] = {
    "whole": (8, lambda r: r.method == "PUT"),
    "begin": (LARGE, lambda r: r.method == "POST" and r.query == "uploads"),
    "part": (LARGE, lambda r: "partNumber=2" in r.query),
    "join": (LARGE, lambda r: r.method == "POST" and "uploadId" in r.query),
    "removal": (8, lambda r: r.method == "DELETE"),
}


def save(size: int, seed: int = 1, manifest: bool = False) -> None:
    """Save one file whose bytes depend on the seed."""
    fst_numpy.save_file({"a": numpy.full(size, seed, numpy.uint8)}, ADDRESS, manifest=manifest)


def seed_of() -> int:
    """Which one is there."""
    return int(fst_numpy.load_file(ADDRESS)["a"][-1])


def save_set(files: int, seed: int) -> None:
    """Save a sharded model whose bytes depend on the seed."""
    value = numpy.full(99, seed, numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(6)]
    where = [i % files for i in range(6)]
    writer = Writer("s3://box/m", rows, None, file_of=where, file_count=files, owners=[value])
    try:
        writer.commit()
    finally:
        writer.close()


def sign(server: ObjectStore) -> None:
    """Sign requests, and make the store check the signatures."""
    server.keys = {KEY: SECRET}
    remote.configure(endpoint=server.url, retry_base_ms=2, tries_max=2, access_key=KEY,
                     secret_key=SECRET)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect",
                                    "308 Permanent Redirect"])
@pytest.mark.parametrize("what", list(REQUESTS))
def test_writes_never_follow_redirects_to_other_hosts(what: str, status: str) -> None:
    """The other host gets no request, so neither model nor signature. The save fails."""
    size, which = REQUESTS[what]
    with object_store() as server, object_store() as other:
        sign(server)
        if what == "removal":
            save(size, 1, manifest=True)  # the next save deletes the manifest
        before = dict(server.objects)

        def refuse(request: Request) -> Answer | None:
            to = other.url.rstrip("/") + request.path
            to += "?" + request.query if request.query else ""
            return Answer(status, {"Location": to}) if which(request) else None

        server.refuse = refuse
        with pytest.raises(OSError, match="another host, which is not allowed"):
            save(size, 2)
        assert other.log == [] and server.objects == before and not server.uploads


@pytest.mark.parametrize("what", list(REQUESTS))
def test_redirect_within_the_host(what: str) -> None:
    """A redirect within the host is followed, and the new request is signed for its target."""
    size, which = REQUESTS[what]
    with object_store() as server:
        sign(server)
        if what == "removal":
            save(size, 1, manifest=True)
        moved: list[str] = []

        def refuse(request: Request) -> Answer | None:
            if request.path.startswith("/moved"):
                if server.refusal(request) is None:
                    moved.append(request.headers["authorization"])
                request.path = request.path.removeprefix("/moved")
                return server.act(request)
            if not which(request):
                return None
            to = "/moved" + request.path + ("?" + request.query if request.query else "")
            return Answer("307 Temporary Redirect", {"Location": server.url.rstrip("/") + to})

        server.refuse = refuse
        save(size, 2)
        server.refuse = lambda request: None
        assert len(moved) == 1 and seed_of() == 2 and list(server.objects) == [PLACE]


def test_region_without_conditional_writes() -> None:
    """One small save handles both a redirect to another region and a store without conditional
    writes."""
    with object_store() as server:
        sign(server)
        save_set(3, 1)
        told: list[str] = []

        def refuse(request: Request) -> Answer | None:
            is_there = "/eu-north-1/s3/" in request.headers["authorization"]
            if request.method == "PUT" and not is_there:
                told.append("region")
                answer = failure("400 Bad Request", "AuthorizationHeaderMalformed")
                answer.headers["x-amz-bucket-region"] = "eu-north-1"
                return answer
            if request.method == "PUT" and {"if-match", "if-none-match"} & set(request.headers):
                told.append("condition")
                return failure("501 Not Implemented", "NotImplemented")
            return None

        server.refuse = refuse
        save_set(2, 2)
        assert told.count("condition") == 1 and told.count("region") == 3
        server.refuse = lambda request: None
        loaded = fst_numpy.load_file("s3://box/m/")
        assert all((v == 2).all() for v in loaded.values()) and len(server.objects) == 3


@pytest.mark.parametrize("what", ["index", "removal", "join"])
def test_delayed_write(what: str) -> None:
    """After 409 ConditionalRequestConflict the request is repeated with the same condition."""
    is_it: dict[str, Which] = {
        "index": lambda r: r.method == "PUT" and r.path.endswith(".json"),
        "removal": lambda r: r.method == "DELETE",
        "join": lambda r: r.method == "POST" and "uploadId" in r.query,
    }
    asked: list[str | None] = []

    def refuse(request: Request) -> Answer | None:
        if not is_it[what](request):
            return None
        asked.append(request.headers.get("if-match"))
        conflict = failure("409 Conflict", "ConditionalRequestConflict")
        return conflict if len(asked) == 1 else None

    with object_store() as server:
        use_store(server)
        if what == "index":
            save_set(3, 1)
        elif what == "removal":
            save(8, 1, manifest=True)
        server.refuse = refuse
        if what == "index":
            save_set(2, 2)
            assert {int(v[0]) for v in fst_numpy.load_file("s3://box/m/").values()} == {2}
        else:
            save(LARGE if what == "join" else 8, 2)
            assert seed_of() == 2
        assert len(asked) == 2 and asked[0] == asked[1]
        assert (asked[0] is None) == (what == "join")


@pytest.mark.parametrize("answer", [
    failure("503 Slow Down", "SlowDown"), failure("200 OK", "SlowDown"),
    failure("200 OK", "InternalError"), failure("500 Internal Server Error", "InternalError")])
def test_complete_upload_is_retried(answer: Answer) -> None:
    """A failed completion is retried. If it never succeeds, the error reports the state of the
    object."""
    count = 0

    def refuse(request: Request) -> Answer | None:
        nonlocal count
        if request.method != "POST" or "uploadId" not in request.query:
            return None
        count += 1
        return Answer(answer.status, {}, answer.body) if count <= bad else None

    with object_store() as server:
        use_store(server)
        server.refuse = refuse
        bad = 1
        save(LARGE, 1)
        assert count == 2 and seed_of() == 1
        count, bad = 0, 1 << 30
        with pytest.raises(OSError, match="it is unknown whether the object was stored"):
            save(LARGE, 2)
        assert count == 2 and seed_of() == 1 and not server.uploads


def save_there(kind: str, is_set: bool, seed: int, files: int = 4) -> None:
    """Save a set of files, or one file."""
    value = numpy.full(99, seed, numpy.uint8)
    if not is_set:
        fst_numpy.save_file({"t": value}, f"{kind}://box/m/m.safetensors")
        return
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(6)]
    writer = Writer(f"{kind}://box/m", rows, None, file_of=[i % files for i in range(6)],
                    file_count=files, owners=[value])
    try:
        writer.commit()
    finally:
        writer.close()


def seed_there(kind: str, is_set: bool) -> set[int]:
    """Which one is there."""
    name = "model.safetensors.index.json" if is_set else "m.safetensors"
    return {int(v[0]) for v in fst_numpy.load_file(f"{kind}://box/m/{name}").values()}


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("body", [b"<Error><Code>InternalError</Code></Error>", b""],
                         ids=["error", "empty"])
@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_success_without_an_etag_is_an_error(kind: str, body: bytes, is_set: bool) -> None:
    """A 200 response with an error or without an ETag means that the store did nothing, so the
    request is repeated. If it never succeeds, the save fails and the old model stays complete."""
    with object_store() as server:
        use_store(server, kind)
        save_there(kind, is_set, 1)
        last = "index.json" if is_set else "m.safetensors"
        refused: list[Request] = []

        def refuse(request: Request, most: float) -> Answer | None:
            if request.method != "PUT" or not request.path.endswith(last) or len(refused) >= most:
                return None
            refused.append(request)
            return Answer("200 OK", {}, body)

        server.refuse = lambda request: refuse(request, 1)
        save_there(kind, is_set, 2)
        assert len(refused) == 1 and seed_there(kind, is_set) == {2}
        before = dict(server.objects)
        server.refuse = lambda request: refuse(request, float("inf"))
        with pytest.raises(OSError, match="does not confirm the object"):
            save_there(kind, is_set, 3)
        server.refuse = lambda request: None
        assert seed_there(kind, is_set) == {2} and server.objects == before


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_failure_after_success(kind: str, is_new: bool, is_set: bool) -> None:
    """A proxy sends the request twice, and the second response reports that the object exists. The
    object and all files that it names have our bytes, so the save succeeds."""
    with object_store() as server:
        use_store(server, kind)
        if not is_new:
            save_there(kind, is_set, 1)
        last = "index.json" if is_set else "m.safetensors"
        refused: list[Request] = []

        def spoil(request: Request, answer: Answer) -> Answer:
            if request.method == "PUT" and request.path.endswith(last) and not refused:
                refused.append(request)
                return failure("412 Precondition Failed", "PreconditionFailed")
            return answer

        server.fault = spoil
        save_there(kind, is_set, 2)
        assert refused and seed_there(kind, is_set) == {2}


def test_precondition_failure_on_a_new_object() -> None:
    """With create_only the same bytes may have existed before, so the error says "unknown"."""
    with object_store() as server:
        remote.configure(endpoint=server.url, anonymous=True, create_only=True)
        save_there("s3", False, 1)
        with pytest.raises(FileExistsError):
            save_there("s3", False, 1)
        with pytest.raises(FileExistsError):
            save_there("s3", False, 2)
        assert seed_there("s3", False) == {1}
