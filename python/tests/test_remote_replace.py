# SPDX-License-Identifier: Apache-2.0
"""A save over an existing set: at every step a reader gets the old set or the new one."""

from __future__ import annotations

import numpy
import pytest
from object_store import failure, object_store, use_store
from web_server import Answer, Request

from fastsafetensors import SafetensorError, safe_open
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Writer

pytestmark = pytest.mark.usefixtures("own_home")
FOLDER, INDEX = "s3://bucket/m/", "/bucket/m/model.safetensors.index.json"
KIB = 1024
Tensors = dict[str, numpy.ndarray]
CHANGES = [(3, 3), (2, 3), (1, 3), (3, 1), (1, 1)]


def open_set(files: int, seed: int) -> tuple[Writer, Tensors]:
    """Open a save of a sharded model whose names and bytes depend on the seed."""
    value = numpy.full(KIB * 8, seed, numpy.uint8)
    rows = [(f"t{i}", "U8", value.shape, value.ctypes.data, value.nbytes) for i in range(6)]
    where = [i % files for i in range(6)]
    writer = Writer(FOLDER, rows, None, file_of=where, file_count=files, owners=[value])
    return writer, {f"t{i}": value for i in range(6)}


def save(files: int, seed: int) -> Tensors:
    """Save a sharded model whose names and bytes depend on the seed."""
    writer, tensors = open_set(files, seed)
    try:
        writer.commit()
    finally:
        writer.close()
    return tensors


def seed_of(tensors: Tensors) -> int:
    """Return the seed of a loaded model. A mixture of two models is an error."""
    assert sorted(tensors) == [f"t{i}" for i in range(6)]
    [seed] = {int(v) for tensor in tensors.values() for v in numpy.unique(tensor)}
    return seed


def is_change(request: Request) -> bool:
    """Whether a request changes the store."""
    return request.method in ("PUT", "POST", "DELETE")


def count_changes(before: int, after: int, has_index: bool) -> int:
    """Return the number of requests of a save that change the store."""
    with object_store() as server:
        use_store(server)
        save(before, 1)
        if not has_index:
            server.objects.pop(INDEX, None)
        server.log.clear()
        save(after, 2)
        return sum(map(is_change, server.log))


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_each_step_refused(before: int, after: int, has_index: bool) -> None:
    """A save that fails at any step leaves the old model; after the last step, the new one."""
    for step in range(count_changes(before, after, has_index)):
        with object_store() as server:
            use_store(server)
            save(before, 1)
            if not has_index:
                server.objects.pop(INDEX, None)
            seen = []

            def refuse(request: Request, step: int = step, seen: list[str] = seen) -> Answer | None:
                if is_change(request):
                    seen.append(request.path)
                return failure("403 Forbidden", "No") if len(seen) == step + 1 else None

            server.refuse = refuse
            try:
                save(after, 2)
                expected = 2
            except PermissionError:
                expected = 1
            server.refuse = lambda request: None
            assert seed_of(fst_numpy.load_file(FOLDER)) == expected
            assert seed_of(save(after, 3)) == seed_of(fst_numpy.load_file(FOLDER)) == 3


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_reader_at_each_step(before: int, after: int, has_index: bool) -> None:
    """After every change a load returns one complete model, or an error if there was no index
    before."""
    seen: list[int] = []

    def look(request: Request, answer: Answer) -> Answer:
        if is_change(request) and server.refuse is watching:
            try:
                seen.append(seed_of(fst_numpy.load_file(FOLDER)))
            except (OSError, SafetensorError):
                assert not has_index and before > 1
        return answer

    def watching(request: Request) -> Answer | None:
        return None

    with object_store(look) as server:
        use_store(server)
        save(before, 1)
        if not has_index:
            server.objects.pop(INDEX, None)
        server.refuse = watching
        save(after, 2)
        assert seen == sorted(seen) and seen[-1] == 2 and seen[0] in (1, 2)
        assert seed_of(fst_numpy.load_file(FOLDER)) == 2
        # All files of the old model were deleted.
        assert len(server.objects) == (after + 1 if after > 1 else 1)


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_open_readers_keep_the_model_or_get_an_error(steps: int) -> None:
    """Tensors read later are those of the opened model, or an error."""
    handles = []

    def look(request: Request, answer: Answer) -> Answer:
        if is_change(request) and handles:
            handles.append(None)
            if len(handles) == steps + 1:
                handles[0] = safe_open(f"s3:/{INDEX}", framework="np").__enter__()
        return answer

    with object_store(look) as server:
        use_store(server)
        save(3, 1)
        handles.append(None)
        save(3, 2)
        opened = handles[0]
        assert opened is not None
        values = set()
        for name in [f"t{i}" for i in range(6)]:
            try:
                values |= set(numpy.unique(opened.get_tensor(name)).tolist())
            except (OSError, SafetensorError):
                values.add(1)  # the old one, which is deleted
        opened.__exit__(None, None, None)
        assert values == ({1} if steps < 4 else {2})


def test_lost_response_to_an_index_upload() -> None:
    """The index may or may not have been stored, so the files that it names stay."""
    lost = [False]

    def lose(request: Request, answer: Answer) -> Answer:
        if lost[0] and request.method == "PUT" and "index" in request.path:
            return failure("500 Internal Server Error", "InternalError")
        return answer

    with object_store(lose) as server:
        use_store(server)
        save(3, 1)
        lost[0] = True
        with pytest.raises(OSError, match="it is unknown whether the object was stored"):
            save(3, 2)
        assert seed_of(fst_numpy.load_file(FOLDER)) == 2  # the store has the index
