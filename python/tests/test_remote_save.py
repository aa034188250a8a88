# SPDX-License-Identifier: Apache-2.0
"""Saves to URLs: multipart uploads, atomicity, and misbehaving stores."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import numpy
import pytest
from object_store import KEY, SECRET, ObjectStore, failure, object_store
from web_server import Answer, Request

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Writer

pytestmark = pytest.mark.usefixtures("own_home")
ADDRESS = "s3://bucket/a folder/model.safetensors"
PLACE = "/bucket/a folder/model.safetensors"
MIB = 1 << 20
Tensors = dict[str, numpy.ndarray]


def use_store(server: ObjectStore, **more: object) -> None:
    """Make S3 URLs use this store."""
    settings: dict[str, object] = {"access_key": KEY, "secret_key": SECRET, "retry_base_ms": 2}
    remote.configure(endpoint=server.url, **{**settings, **more})


def make(mib: int, seed: int = 0) -> Tensors:
    """Make tensors of odd sizes, `mib` MiB in total."""
    generator = numpy.random.default_rng(seed)
    sizes = [mib * MIB // 2, mib * MIB // 2 - 12345, 3, 0]
    return {f"t{i}": generator.integers(0, 255, n, numpy.uint8) for i, n in enumerate(sizes)}


def open_writer(size: int, path: str = ADDRESS) -> Writer:
    """Open a save of one tensor whose bytes are written later."""
    return Writer(path, [("x", "U8", (size,), None, size)], None)


def put(writer: Writer, at: int, data: bytes) -> None:
    """Write some bytes of the tensor."""
    held = numpy.frombuffer(data, numpy.uint8)
    writer.write(0, at, held.ctypes.data, held.nbytes)


def same(loaded: Tensors, saved: Tensors) -> bool:
    """Whether the bytes are the same."""
    return loaded.keys() == saved.keys() and all(
        loaded[n].tobytes() == saved[n].tobytes() for n in saved
    )


@pytest.mark.parametrize("mib", [1, 20])
def test_a_file(tmp_path: pathlib.Path, mib: int) -> None:
    """A saved object equals a local save, sent in one request or in signed parts. No unfinished
    upload remains."""
    tensors = make(mib)
    fst_numpy.save_file(tensors, tmp_path / "local.safetensors", metadata={"a": "b"})
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file(tensors, ADDRESS, metadata={"a": "b"})
        data, _ = server.objects[PLACE]
        assert data == (tmp_path / "local.safetensors").read_bytes()
        assert not server.uploads
        methods = [request.method for request in server.log]
        # The requests include one for an old manifest next to it.
        parts = ["POST", *["PUT"] * 3, "GET", "POST"]
        assert methods == (["GET", "PUT"] if mib == 1 else parts)
        assert same(fst_numpy.load_file(ADDRESS), tensors)


def test_object_is_invisible_until_complete() -> None:
    """The old object stays until the last request. A save that is closed early leaves no object and
    no parts."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file({"old": numpy.ones(3)}, ADDRESS)
        old = server.objects[PLACE]
        writer = open_writer(20 * MIB)
        put(writer, 0, bytes(17 * MIB))
        put(writer, 17 * MIB, bytes(3 * MIB))
        writer.finish()
        assert server.objects[PLACE] == old and len(server.uploads) == 1
        writer.close()
        assert server.objects[PLACE] == old and not server.uploads


def test_faults_during_a_save() -> None:
    """If the store is busy, silent or breaks connections, parts are sent again and the object is
    right."""
    tensors = make(33)
    seen: dict[str, int] = {}

    def fault(request: Request, answer: Answer) -> Answer:
        count = seen[request.query] = seen.get(request.query, 0) + 1
        if request.method == "GET" or count > 2:
            return answer
        kind = (len(seen) + count) % 4
        if kind == 0:
            return failure("503 Slow Down", "SlowDown")
        if kind == 1:
            return failure("500 Internal Server Error", "InternalError")
        if kind == 2:
            answer.send_bytes, answer.end = 0, "reset"
        return answer

    with object_store(fault, {KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file(tensors, ADDRESS)
        assert same(fst_numpy.load_file(ADDRESS), tensors)
        # If the response to the creation of an upload is lost, that upload stays, without parts.
        assert not any(parts for _, parts in server.uploads.values())


REFUSALS = {
    "begin": ("uploads", "403 Forbidden", "AccessDenied", PermissionError, "AccessDenied"),
    "bucket": ("uploads", "404 Not Found", "NoSuchBucket", FileNotFoundError, "NoSuchBucket"),
    "part": ("partNumber=3", "400 Bad Request", "BadDigest", OSError, "BadDigest"),
    "busy": ("partNumber=2", "503 Slow Down", "SlowDown", OSError, "SlowDown.*3 tries"),
    "join": ("uploadId", "400 Bad Request", "InvalidPart", OSError, "InvalidPart"),
    "within": ("uploadId", "200 OK", "InternalError", OSError, "200 with the error InternalErr"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_failed_save_leaves_nothing(kind: str) -> None:
    """If any request of an upload is rejected, the error has the reason, and neither object nor
    parts remain."""
    where, status, code, error, words = REFUSALS[kind]

    def refuse(request: Request) -> Answer | None:
        is_it = where in request.query and request.method != "DELETE"
        if where == "uploadId" and request.method != "POST":
            is_it = False
        return failure(status, code) if is_it else None

    with object_store(keys={KEY: SECRET}) as server:
        server.refuse = refuse
        use_store(server, tries_max=3)
        with pytest.raises((error, SafetensorError), match=words) as caught:
            fst_numpy.save_file(make(20), ADDRESS)
        assert isinstance(caught.value, error)
        assert SECRET not in str(caught.value) and KEY not in str(caught.value)
        assert not server.objects and not server.uploads


def test_lost_response_to_complete_upload() -> None:
    """The retry finds no upload, but the object exists, so the save succeeds."""
    tensors = make(10)
    lost: list[Request] = []

    def fault(request: Request, answer: Answer) -> Answer:
        if request.method == "POST" and "uploadId" in request.query and not lost:
            lost.append(request)
            answer.send_bytes, answer.end = 0, "reset"
        return answer

    with object_store(fault, {KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file(tensors, ADDRESS)
        assert lost and server.log[-1].method == "HEAD"
        assert same(fst_numpy.load_file(ADDRESS), tensors)


def test_failed_complete_upload_is_an_error() -> None:
    """If the upload no longer exists and the object is an older one of the same size, the save
    fails."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file(make(10), ADDRESS)
        old = server.objects[PLACE]
        server.dates[PLACE] = "Sun, 22 Nov 2026 09:00:00 GMT"
        tries = []

        def refuse(request: Request) -> Answer | None:
            if request.method != "POST" or "uploadId" not in request.query:
                return None
            tries.append(request)
            server.uploads.clear()
            is_first = len(tries) == 1
            return failure("500 Internal Server Error", "InternalError") if is_first else None

        server.refuse = refuse
        with pytest.raises(OSError, match="NoSuchUpload.*unknown whether the object was stored"):
            fst_numpy.save_file(make(10, 1), ADDRESS)
        assert len(tries) == 2 and server.objects[PLACE] == old


def test_complete_upload_of_other_stores() -> None:
    """Responses of stores that name the XML element differently are accepted."""

    def fault(request: Request, answer: Answer) -> Answer:
        answer.body = answer.body.replace(b"UploadResult>", b"UploadResponse>")
        return answer

    with object_store(fault, {KEY: SECRET}) as server:
        use_store(server)
        fst_numpy.save_file(make(10), ADDRESS)
        assert same(fst_numpy.load_file(ADDRESS), make(10))


def save_set(mib: int, files: int, path: str, seed: int = 0) -> Tensors:
    """Save a set."""
    generator = numpy.random.default_rng(seed)
    rows, tensors = [], {}
    for i in range(files):
        value = generator.integers(0, 255, mib * MIB, numpy.uint8)
        tensors[f"t{i}"] = value
        rows.append((f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes))
    writer = Writer(path, rows, None, file_of=list(range(files)), file_count=files)
    try:
        writer.commit()
    finally:
        writer.close()
    return tensors


def test_a_set() -> None:
    """The index of a sharded model is published last. The old model's files are deleted, and no
    other files."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        saved = save_set(9, 3, "s3://bucket/m")
        puts = [r.path for r in server.log if r.method == "PUT" and not r.query]
        assert puts == ["/bucket/m/model.safetensors.index.json"]
        assert same(fst_numpy.load_file("s3://bucket/m/"), saved)
        server.objects["/bucket/m/other.safetensors"] = (b"", '"x"')
        server.objects["/bucket/m/deep/model-00009-of-00009.safetensors"] = (b"", '"x"')
        again = save_set(1, 2, "s3://bucket/m/", 1)
        assert same(fst_numpy.load_file("s3://bucket/m/model.safetensors.index.json"), again)
        names = sorted(re.sub("-[0-9a-f]{16}", "-TAG", name) for name in server.objects)
        assert names == [
            "/bucket/m/deep/model-00009-of-00009.safetensors",
            "/bucket/m/model-00001-of-00002-TAG.safetensors",
            "/bucket/m/model-00002-of-00002-TAG.safetensors",
            "/bucket/m/model.safetensors.index.json",
            "/bucket/m/other.safetensors",
        ]
        save_set(1, 1, "s3://bucket/m", 2)
        assert sorted(server.objects) == [
            "/bucket/m/deep/model-00009-of-00009.safetensors",
            "/bucket/m/model.safetensors",
            "/bucket/m/other.safetensors",
        ]


def test_a_set_that_fails_at_the_end() -> None:
    """If a save fails at its end, its published files are deleted, and no index is written."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        for name in ("00003-of", "index"):

            def refuse(request: Request, name: str = name) -> Answer | None:
                is_it = name in request.path and request.method == "PUT"
                return failure("403 Forbidden", "No") if is_it else None

            server.refuse = refuse
            with pytest.raises(PermissionError, match="No.*credentials: an argument"):
                save_set(1, 3, "s3://bucket/m")
            assert not server.objects and not server.uploads


def test_bytes_in_any_order() -> None:
    """Writes may alternate between a few offsets. So many offsets that their buffers would fill the
    memory are an error."""
    size = 76 * MIB
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        writer = open_writer(size)
        pieces = list(range(0, size, MIB // 2))
        for at in sorted(pieces, key=lambda at: (at // (24 * MIB), at * 7919 % 1000)):
            put(writer, at, bytes([at // MIB % 251]) * (MIB // 2))
        writer.commit()
        writer.close()
        loaded = fst_numpy.load_file(ADDRESS)["x"]
        assert all(loaded[at] == at // MIB % 251 for at in pieces)
        with pytest.raises(Exception, match="one after the other"):
            writer = open_writer(size)
            for at in range(0, size, 8 * MIB):
                put(writer, at, bytes(MIB // 2))
        writer.close()
        assert not server.uploads


def test_file_only_operations_are_refused(tmp_path: pathlib.Path) -> None:
    """Options that only apply to files, and servers that are not stores, are errors."""
    tensors = {"a": numpy.ones(3)}
    with object_store() as server:
        use_store(server)
        with pytest.raises(Exception, match="copy it"):
            fst_numpy.save_file(tensors, ADDRESS, compress=True)
        with pytest.raises(Exception, match="saved to web servers or the Hub"):
            fst_numpy.save_file(tensors, server.url + "x.safetensors?sig=SECRET")
        with pytest.raises(Exception, match="saved to web servers or the Hub"):
            fst_numpy.save_file(tensors, "hf://me/model/x.safetensors")
        with pytest.raises(Exception, match="must be a str, not a path object"):
            fst_numpy.save_file(tensors, pathlib.Path(ADDRESS))
        with pytest.raises(Exception, match="a file name is missing"):
            fst_numpy.save_file(tensors, "s3://bucket/")
        assert server.log == []


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_joint_saves_to_urls_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: type[str] | type[pathlib.Path]
) -> None:
    """Joint saves of ranks to a URL are an error, and no local folder with the URL's name is
    made."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.checkpoint import FastSafetensorsWriter
    from fastsafetensors.distributed import save_on_ranks

    monkeypatch.chdir(tmp_path)
    for address in ("s3://bucket/m", "GS://bucket/m", "https://host/m"):
        with pytest.raises(NotImplementedError, match="save to a folder"):
            save_on_ranks({"a": torch.ones(3)}, kind(address))
        with pytest.raises(NotImplementedError, match="save to a folder"):
            FastSafetensorsWriter(kind(address))
        writer = FastSafetensorsWriter(tmp_path)
        with pytest.raises(NotImplementedError, match="save to a folder"):
            writer.reset(kind(address))
    assert list(tmp_path.iterdir()) == []


def test_create_only() -> None:
    """With create_only an existing object stays and FileExistsError is raised, for small and large
    saves."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server, create_only=True)
        fst_numpy.save_file(make(1), ADDRESS)
        old = server.objects[PLACE]
        for mib in (1, 10):
            with pytest.raises(FileExistsError, match="already"):
                fst_numpy.save_file(make(mib, 1), ADDRESS)
        assert server.objects[PLACE] == old and not server.uploads


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("az://box/m.safetensors", {"account": "acct", "sas_token": "sv=1&sig=x"}),
        ("gs://box/m.safetensors", {"bearer_token": "ya29.x"}),
    ],
)
def test_other_stores_decide_as_well(address: str, settings: dict[str, str]) -> None:
    """With create_only Azure and Google reject the second save, small or large."""
    with object_store() as server:
        remote.configure(endpoint=server.url, create_only=True, **settings)
        fst_numpy.save_file(make(1), address)
        old = dict(server.objects)
        for mib in (1, 10):
            with pytest.raises(FileExistsError, match="already"):
                fst_numpy.save_file(make(mib, 1), address)
        assert server.objects == old


@pytest.mark.parametrize(("before", "files"), [(2, 1), (1, 3), (3, 3), (2, 3), (1, 1)])
def test_create_only_of_a_sharded_model(before: int, files: int) -> None:
    """With create_only an existing model with another number of files stays, and no data is
    sent."""
    with object_store(keys={KEY: SECRET}) as server:
        use_store(server)
        save_set(1, before, "s3://bucket/m")
        old = dict(server.objects)
        use_store(server, create_only=True)
        with pytest.raises(FileExistsError, match="a model exists already"):
            save_set(1, files, "s3://bucket/m", 1)
        assert server.objects == old and server.log[-1].method == "GET"
        save_set(1, files, "s3://bucket/other", 1)


def test_no_overwrite_with_lost_responses() -> None:
    """If the response to the first attempt is lost, the object is recognised as this save's."""
    lost: list[Request] = []

    def fault(request: Request, answer: Answer) -> Answer:
        if request.method == "PUT" and not lost:
            lost.append(request)
            answer.raw_head, answer.send_bytes, answer.end = b"", 0, "reset"
        return answer

    with object_store(fault, {KEY: SECRET}) as server:
        use_store(server, create_only=True)
        lost.append(Request("PUT", "", "", {}))
        # one connection is kept alive
        fst_numpy.save_file(make(1), "s3://bucket/before.safetensors")
        lost.clear()
        fst_numpy.save_file(make(1), ADDRESS)
        assert lost and same(fst_numpy.load_file(ADDRESS), make(1))
        for seed in (0, 1):
            with pytest.raises(FileExistsError):
                fst_numpy.save_file(make(1, seed), ADDRESS)
        lost.clear()
        with pytest.raises(FileExistsError):
            fst_numpy.save_file(make(1, 1), ADDRESS)
        assert lost and same(fst_numpy.load_file(ADDRESS), make(1))


def test_two_saves_of_a_blob() -> None:
    """Concurrent uploads to one blob share its uncommitted blocks. No block becomes part of the
    other object."""
    with object_store() as server:
        remote.configure(endpoint=server.url, account="acct", sas_token="sv=1&sig=x")
        one, other = (open_writer(10 * MIB, "az://box/m.safetensors") for _ in range(2))
        put(one, 0, b"\1" * (10 * MIB))
        one.finish()
        put(other, 0, b"\2" * (10 * MIB))
        other.finish()
        one.commit()
        assert (fst_numpy.load_file("az://box/m.safetensors")["x"] == 1).all()
        with pytest.raises(OSError, match="InvalidBlockList"):
            other.commit()
        one.close()
        other.close()


def test_google_and_azure() -> None:
    """Saves to Google (with a token) and Azure (by blocks) have the bytes of a local save."""
    tensors = make(20)
    with object_store() as server:
        remote.configure(endpoint=server.url, bearer_token="ya29.SECRET")
        fst_numpy.save_file(tensors, "gs://bucket/m.safetensors")
        assert all(r.headers["authorization"] == "Bearer ya29.SECRET" for r in server.log)
        remote.configure(endpoint=server.url, account="acct", sas_token="sv=1&sig=SECRET%3D")
        server.log.clear()
        for mib in (1, 20):
            fst_numpy.save_file(make(mib), f"az://box/m{mib}.safetensors")
        assert all(r.query.startswith("sv=1&sig=SECRET%3D") for r in server.log)
        [small] = [r for r in server.log if "x-ms-blob-type" in r.headers]
        assert small.path == "/acct/box/m1.safetensors"
        assert not server.blocks.get("/acct/box/m20.safetensors")
        one, other = (
            server.objects["/bucket/m.safetensors"],
            server.objects["/acct/box/m20.safetensors"],
        )
        assert one[0] == other[0]
        assert same(fst_numpy.load_file("az://box/m20.safetensors"), tensors)


def test_memory_is_bounded() -> None:
    """At most 64 MiB of a save of 120 MiB wait in memory."""
    program = """
import resource, sys, numpy
from fastsafetensors import numpy as fst_numpy, remote
remote.configure(endpoint=sys.argv[1], anonymous=True)
data = {"x": numpy.ones(120 << 20, numpy.uint8)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fst_numpy.save_file(data, "s3://bucket/x.safetensors")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    with object_store() as server:
        result = subprocess.run(
            [sys.executable, "-c", program, server.url], capture_output=True, text=True, check=True
        )
    assert int(result.stdout) < 64 + 32


def test_interrupted_and_forked() -> None:
    """Ctrl-C deletes the uploaded parts. A forked child that closes its copy of a writer deletes
    nothing."""
    program = """
import os, signal, sys, numpy
from fastsafetensors import remote
some = numpy.ones(20 << 20, numpy.uint8)
from fastsafetensors._core import Writer
remote.configure(endpoint=sys.argv[1], anonymous=True)
writer = Writer("s3://bucket/x.safetensors", [("x", "U8", (64 << 20,), None, 64 << 20)], None)
try:
    writer.write(0, 0, some.ctypes.data, some.nbytes)
    child = os.fork()
    if child == 0:
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    print("child", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGINT)
finally:
    writer.close()
"""
    with object_store() as server:
        process = subprocess.Popen(
            [sys.executable, "-c", program, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "child\n"
        assert len(server.uploads) == 1
        _, text = process.communicate("go\n", timeout=600)
        assert "KeyboardInterrupt" in text
        assert not server.uploads and not server.objects
