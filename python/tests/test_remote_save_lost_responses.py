# SPDX-License-Identifier: Apache-2.0
"""No model is lost by saves to stores that lose responses, hide objects, or accept another save
meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
from object_store import KINDS, PLACES, ObjectStore, failure, object_store, use_store
from web_server import Answer, Request

from fastsafetensors import SafetensorError
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Writer

pytestmark = pytest.mark.usefixtures("own_home")
INDEX = "model.safetensors.index.json"
LARGE = 3 << 20  # bytes of tensors whose files are sent in several parts


def open_set(kind: str, files: int, seed: int, size: int = 1024) -> Writer:
    """Open a save of a sharded model whose bytes depend on the seed."""
    value = numpy.full(size, seed, numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(6)]
    where = [i % files for i in range(6)]
    return Writer(f"{kind}://box/m", rows, None, file_of=where, file_count=files, owners=[value])


def save(kind: str, files: int, seed: int, size: int = 1024) -> None:
    """Save a sharded model whose bytes depend on the seed."""
    writer = open_set(kind, files, seed, size)
    try:
        writer.commit()
    finally:
        writer.close()


def seed_of(kind: str) -> int:
    """Return the seed of the complete model in the store."""
    loaded = fst_numpy.load_file(f"{kind}://box/m/")
    assert sorted(loaded) == [f"t{i}" for i in range(6)]
    [seed] = {int(v) for tensor in loaded.values() for v in numpy.unique(tensor[:: 1 << 10])}
    return seed


def removals(server: ObjectStore) -> list[str]:
    """Return the objects named in delete requests."""
    return [request.path.rsplit("/", 1)[1] for request in server.log
            if request.method == "DELETE" and "uploadId" not in request.query]


def set_of(kind: str, seed: int, size: int = 1024) -> Callable[[ObjectStore], None]:
    """Return the objects of another complete save, to be put into a store at once."""
    with object_store() as other:
        use_store(other, kind)
        save(kind, 2, seed, size)
        objects, numbers = dict(other.objects), dict(other.generations or {})

    def put(server: ObjectStore) -> None:
        server.objects.update(objects)
        if server.generations is not None:
            server.generations.update(numbers)

    return put


@pytest.mark.parametrize("code", ["403 Forbidden", "409 Conflict", "412 Precondition Failed"])
@pytest.mark.parametrize("kind", KINDS)
def test_lost_response_to_an_index_upload(kind: str, code: str) -> None:
    """The store has stored the index and rejects the retry. The index and its files stay."""
    tries = 0

    def is_index(request: Request) -> bool:
        return request.method == "PUT" and request.path.endswith(INDEX)

    def lose(request: Request, answer: Answer) -> Answer:
        nonlocal tries
        tries += is_index(request)
        if is_index(request) and tries == 1:
            answer.raw_head, answer.send_bytes, answer.end = b"", 0, "reset"
        return answer

    with object_store() as server:
        use_store(server, kind)
        save(kind, 3, 1)
        server.fault = lose
        server.refuse = lambda request: (
            failure(code, "No") if is_index(request) and tries >= 1 else None)
        save(kind, 2, 2)
        assert tries == 2 and seed_of(kind) == 2


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_file_completed_by_another_save_between_attempts(kind: str) -> None:
    """After a failed completion another save publishes its file. The retry is rejected, and that
    file stays."""
    put_theirs = set_of(kind, 7, LARGE)
    joins = 0

    def refuse(request: Request) -> Answer | None:
        nonlocal joins
        joins += request.method == "POST" and "uploadId" in request.query
        if joins == 1 and "uploadId" in request.query and request.method == "POST":
            put_theirs(server)
            return failure("500 Internal Server Error", "InternalError")
        return None

    with object_store() as server:
        use_store(server, kind)
        server.refuse = refuse
        with pytest.raises((SafetensorError, OSError)):
            save(kind, 2, 2, LARGE)
        assert joins == 2 and removals(server) == [] and seed_of(kind) == 7


def test_a_file_that_azure_refuses() -> None:
    """If Azure rejects a file with 409 because another model was published meanwhile, that model
    stays."""
    put_theirs = set_of("az", 7, LARGE)

    def refuse(request: Request) -> Answer | None:
        if request.method != "PUT" or "comp=blocklist" not in request.query:
            return None
        put_theirs(server)
        return failure("409 Conflict", "BlobAlreadyExists")

    with object_store() as server:
        use_store(server, "az")
        server.refuse = refuse
        with pytest.raises((SafetensorError, OSError)):
            save("az", 2, 2, LARGE)
        assert removals(server) == [] and seed_of("az") == 7


@pytest.mark.parametrize("kind", KINDS)
def test_permanent_failure_during_another_save(kind: str) -> None:
    """It is unknown whether the files are this save's, so they stay."""
    put_theirs = set_of(kind, 7)

    def refuse(request: Request) -> Answer | None:
        if request.method != "PUT":
            return None
        put_theirs(server)
        return failure("500 Internal Server Error", "InternalError")

    with object_store() as server:
        use_store(server, kind)
        server.refuse = refuse
        with pytest.raises((SafetensorError, OSError)):
            save(kind, 2, 2)
        server.refuse = lambda request: None
        assert removals(server) == [] and seed_of(kind) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_save_without_list_permission_deletes_nothing(kind: str) -> None:
    """Without list permission the files of an old model stay, and the save reports them."""
    for files in (3, 1):
        with object_store() as server:
            use_store(server, kind)
            save(kind, files, 1)
            before = set(server.objects)
            server.refuse = lambda request: (
                Answer("403 Forbidden", {}) if request.method == "HEAD" else None)
            save(kind, 2, 2)
            assert before <= set(server.objects) and removals(server) == []
            assert seed_of(kind) == 2


def test_file_deleted_before_the_check() -> None:
    """A listed file no longer exists when it is checked. Only checked objects are deleted."""
    with object_store() as server:
        use_store(server, "s3")
        save("s3", 1, 1)
        server.knows_conditions = False

        def refuse(request: Request) -> Answer | None:
            is_it = request.method == "HEAD" and request.path.endswith("/model.safetensors")
            return Answer("404 Not Found", {}) if is_it else None

        server.refuse = refuse
        save("s3", 2, 2)
        assert removals(server) == [] and "/box/m/model.safetensors" in server.objects


@pytest.mark.parametrize("kind", KINDS)
def test_single_file_over_an_unlistable_model(kind: str) -> None:
    """Without list permission the existing index was read, and now names the new file."""
    with object_store() as server:
        use_store(server, kind)
        save(kind, 3, 1)
        server.refuse = lambda request: (
            failure("403 Forbidden", "No") if "list" in request.query else None)
        save(kind, 1, 2)
        server.refuse = lambda request: None
        assert seed_of(kind) == 2 and len(server.objects) == 5


def test_concurrent_save_writes_its_manifest() -> None:
    """A manifest that another save writes between this save's check and deletion is deleted as
    well."""
    place, name = PLACES["s3"] + "x.safetensors", "s3://box/m/x.safetensors"

    def save_one(seed: int, **options: object) -> None:
        fst_numpy.save_file({"a": numpy.full(64, seed, numpy.uint8)}, name, **options)

    with object_store() as server:
        use_store(server, "s3")
        save_one(7, manifest=True)
        theirs = dict(server.objects)
        save_one(1, manifest=True)
        looks = 0

        def fault(request: Request, answer: Answer) -> Answer:
            nonlocal looks
            is_look = request.method == "GET" and request.path.endswith(".manifest")
            looks += is_look
            if is_look and looks == 1:
                server.objects.update(theirs)
            return answer

        server.fault = fault
        save_one(2)
        assert looks == 2 and place + ".manifest" not in server.objects
        assert int(fst_numpy.load_file(name)["a"][0]) == 2


def test_undeletable_manifest() -> None:
    """If the store refuses to delete a manifest, the model that it describes is kept."""
    name = "s3://box/m/x.safetensors"
    with object_store() as server:
        use_store(server, "s3")
        fst_numpy.save_file({"a": numpy.ones(64, numpy.uint8)}, name, manifest=True)
        before = dict(server.objects)
        server.refuse = lambda request: (
            failure("409 Conflict", "ConditionalRequestConflict")
            if request.method == "DELETE" else None)
        with pytest.raises((SafetensorError, OSError), match="keeps recreating the object"):
            fst_numpy.save_file({"a": numpy.zeros(64, numpy.uint8)}, name)
        assert server.objects == before


def test_a_large_object_with_a_manifests_name() -> None:
    """A large object with a manifest's name is ignored."""
    with object_store() as server:
        use_store(server, "s3")
        key = PLACES["s3"] + "x.safetensors.manifest"
        server.objects[key] = (bytes((256 << 20) + 1), '"z"')
        fst_numpy.save_file({"a": numpy.ones(8, numpy.uint8)}, "s3://box/m/x.safetensors")
        assert sorted(server.objects) == [key.removesuffix(".manifest"), key]
