# SPDX-License-Identifier: Apache-2.0
"""The disk cache: its limit, similar names, backfilled chunks, forks, leftovers."""

from __future__ import annotations

import contextlib
import email.utils
import fcntl
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy
import pytest
from test_remote_cache import BLOCK, MIB, REFUSALS, endings, load, local, make
from web_server import Answer, Request, web_server

import fastsafetensors
from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A configured cache folder that does not exist yet."""
    place = tmp_path / "cache"
    remote.configure(cache_dir=place, retry_base_ms=2)
    yield place
    remote.configure()


def test_leftovers_of_a_killed_process_are_listed(tmp_path: pathlib.Path, command: str) -> None:
    """An entry without a size, as kill -9 leaves it, is listed and can be cleared."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    (place / ("0" * 32 + ".part")).touch(mode=0o600)
    (place / ("0" * 32 + ".map")).write_bytes(b"fst-cache-map 1\n")
    assert [entry["size_bytes"] for entry in remote.cache_objects(place)] == [0]
    for words, said in ((["list"], "0 % of it"), (["clear"], "1 object removed")):
        done = subprocess.run(
            [command, "cache", *words, "--cache-dir", place], capture_output=True, text=True
        )
        assert done.returncode == 0 and said in done.stdout, done


def test_objects_that_grow_stay_within_the_limit(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    """Partial objects count with their full size, so that there is space when more is read."""
    names = [f"{name}.safetensors" for name in "abcdef"]
    for name in names:
        make(tmp_path / name, 2, 1024, ord(name[0]))
    remote.configure(cache_dir=cache, cache_bytes_max=5 * MIB)
    with web_server(tmp_path) as server:

        def used() -> int:
            return sum(entry["disk_bytes"] for entry in remote.cache_objects())

        for name in names:
            Model(server.url + name).close()  # the header
        assert len(remote.cache_objects()) == len(names)
        for name in names:
            assert load(server.url + name)[0] == local(tmp_path / name)
            assert used() <= 5 * MIB, name
        # Without space for the rest, cached blocks are used, and other blocks are not stored.
        remote.cache_prune(0)
        file = tmp_path / names[0]
        with fastsafetensors.safe_open(server.url + file.name, "numpy") as opened:
            opened.get_tensor("layer.0.weight")
        remote.configure(cache_dir=cache, cache_bytes_max=MIB)
        kept = used()
        tensors, stats = load(server.url + file.name)
        assert tensors == local(file) and "No space" in stats["reason"], stats
        assert stats["disk_cache_bytes"] >= MIB - BLOCK and used() == kept
        remote.configure(cache_dir=cache, cache_bytes_max=MIB, cache_required=True)
        with pytest.raises(REFUSALS, match="does not fit in the cache: "):
            load(server.url + file.name)


@pytest.mark.parametrize("is_whole", [False, True])
def test_unchanged_date_with_other_bytes(
    tmp_path: pathlib.Path, cache: pathlib.Path, is_whole: bool
) -> None:
    """Two files of one size and one date, from a server that sends no ETag, are not mixed."""
    file = tmp_path / "model.safetensors"

    def strip(request: Request, answer: Answer) -> Answer:
        answer.headers.update({"ETag": None})  # type: ignore[dict-item]
        return answer

    with web_server(tmp_path, strip) as server:
        url = server.url + file.name
        make(file, 3, 500, 1)
        for _ in range(2):
            if is_whole:
                assert load(url)[0] == local(file)
        with fastsafetensors.safe_open(url, "numpy") as opened:
            assert opened.get_tensor("layer.2.weight").tobytes() == local(file)["layer.2.weight"]
        assert endings(cache) == [".data" if is_whole else ".part"]
        make(file, 3, 500, 2)
        os.utime(file, ns=(5, 5))
        for _ in range(2):
            assert load(url)[0] == local(file)  # no byte of the first file


def test_different_urls_are_different_objects(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    """A server that uses version numbers as ETags has the same ETag for different objects."""
    files = [tmp_path / "first", tmp_path / "second"]
    for seed, file in enumerate(files):
        make(file, 1, 300, seed)
    pairs = [
        ("a=1&b=2", "a=1?b=2"),
        ("policy=first", "policy=second"),
        ("x-amz-meta=first", "x-amz-meta=second"),
        ("mysig=1&sr=first", "mysig=1&sr=second"),
    ]
    places = {query: file for pair in pairs for query, file in zip(pair, files, strict=True)}

    def choose(request: Request, answer: Answer) -> Answer:
        headers = {"range": request.headers["range"]}
        if request.headers.get("if-none-match") == '"1"':
            return Answer("304 Not Modified", {"ETag": '"1"'})
        content = server.answer(Request("GET", places[request.query].name, "", headers))
        content.headers["ETag"] = '"1"'
        return content

    with web_server(tmp_path, choose) as server:
        for pair in pairs:
            for query, file in zip(pair, files, strict=True):
                assert load(f"{server.url}x?{query}")[0] == local(file), query


def test_padding_between_tensors_is_cached_too(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    """A load requests no block of padding. The second start requests these, and the third none."""
    file = tmp_path / "model.safetensors"
    generator = numpy.random.default_rng(3)
    tensors = {name: generator.standard_normal(700_001).astype("f4") for name in "abc"}
    fst_numpy.save_file(tensors, file, alignment=1 << 20)
    with web_server(tmp_path) as server:
        url = server.url + file.name
        assert load(url)[0] == local(file)
        assert server.sent_bytes < file.stat().st_size - BLOCK  # some was filled up
        tensors_read, stats = load(url)
        assert tensors_read == local(file) and server.sent_bytes == file.stat().st_size
        assert endings(cache) == [".data"] and "completely in the disk cache" in stats["reason"]
        assert load(url)[1]["network_bytes"] == 0
        [data] = cache.glob("*.data")
        assert data.read_bytes() == file.read_bytes()


def test_forks_keep_no_locks(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    """A child that was forked while an object was being opened does not block other processes."""
    make(tmp_path / "model.safetensors", 2, 100)
    go, begun = threading.Event(), threading.Event()

    def hold(request: Request, answer: Answer) -> Answer:
        begun.set()
        go.wait(300)
        return answer

    with web_server(tmp_path, hold) as server:
        url = server.url + "model.safetensors"
        thread = threading.Thread(target=load, args=(url,))
        thread.start()
        assert begun.wait(300)  # lets the thread run
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        try:
            go.set()
            thread.join()
            with (cache / "turns").open("r+b") as turns, (cache / "lock").open("r+b") as lock:
                # BlockingIOError: the child still holds the lock
                fcntl.lockf(turns, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("date", ["Date", "clock"])
def test_objects_with_a_young_date_are_not_cached(
    tmp_path: pathlib.Path, cache: pathlib.Path, date: str
) -> None:
    """An object may be replaced in the second of its date, so only an old date is a version."""
    file = tmp_path / "model.safetensors"
    age = [1]
    whole = threading.Event()
    now = 1700000000 if date == "Date" else time.time()

    def strip(request: Request, answer: Answer) -> Answer:
        sent = email.utils.formatdate(now, usegmt=True) if date == "Date" else None
        modified = email.utils.formatdate(now - age[0], usegmt=True)
        fields = {"ETag": None, "Last-Modified": modified, "Date": sent}
        answer.headers.update(fields)  # type: ignore[arg-type]
        if whole.is_set() or request.headers["range"] == "bytes=0-65535":
            return answer
        return Answer("404 Not Found", {})  # the first load ends after the first blocks

    with web_server(tmp_path, strip) as server:
        url = server.url + file.name
        make(file, 3, 5000, 0)
        with contextlib.suppress(*REFUSALS):
            load(url)
        whole.set()
        make(file, 3, 5000, 1)  # replaced: the same size and date
        os.utime(file, ns=(1, 1))
        tensors, stats = load(url)
        assert tensors == local(file) and "neither a strong ETag nor" in stats["reason"]
        assert not list(cache.glob("*.ref"))
        age[0] = 59 if date == "Date" else 20
        assert "neither a strong ETag nor" in load(url)[1]["reason"]
        age[0] = 60
        assert load(url)[0] == local(file)
        assert list(cache.glob("*.ref"))


def test_files_of_others_are_kept(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    """Only files whose contents are the cache's are listed, counted and deleted."""
    cache.mkdir(0o700)
    names = [letter * 32 + ending for letter, endings in (
        ("a", [".data", ".map"]), ("b", [".part"]), ("c", [".map"]), ("d", [".ref", ".7.tmp"]),
        ("e", [".data"])) for ending in endings]
    for name in names:
        (cache / name).write_bytes(b"precious" * 1000)
        os.utime(cache / name, (1, 1))
    make(tmp_path / "model.safetensors", 10, 1031)
    with web_server(tmp_path) as server:
        remote.configure(cache_dir=cache, cache_bytes_max="12MiB")
        load(server.url + "model.safetensors")
        load(server.url + "model.safetensors?other")  # evicts the first one
        assert len(remote.cache_objects(cache)) == 1
    pruned = remote.cache_prune(0, cache)
    assert pruned["removed_count"] == 1 and pruned["left_count"] == 0
    kept = {path.name for path in cache.iterdir()}
    assert set(names) <= kept and kept <= {*names, "lock", "turns", "CACHEDIR.TAG"}


@pytest.mark.parametrize("version", [b'"n"\r', b'"n\x1b[31m"'])
def test_stored_versions_with_control_bytes_are_not_used(
    version: bytes, tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    """No line that a .ref file holds reaches a request with control bytes, whatever its check."""
    xxhash = pytest.importorskip("xxhash")
    make(tmp_path / "m.safetensors", 2, 100, 1)
    with web_server(tmp_path) as server:
        url = server.url + "m.safetensors"
        load(url)
        (ref,) = cache.glob("*.ref")
        stored = ref.read_bytes()
        changed = version + stored[stored.index(b"\n"):]
        ref.write_bytes(stored[:16] + xxhash.xxh3_64_digest(changed) + changed)
        before = len(server.log)
        assert load(url)[0] == local(tmp_path / "m.safetensors")
        sent = [request.headers.get("if-none-match") for request in server.log[before:]]
    assert sent == [None]
