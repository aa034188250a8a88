# SPDX-License-Identifier: Apache-2.0
"""The disk cache: saved requests, sharing between processes, and untrusted contents."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy
import pytest
from web_server import Answer, Request, web_server

import fastsafetensors
from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

REFUSALS = (SafetensorError, OSError, ValueError, RuntimeError)
MIB = 1 << 20
BLOCK = 65536


def make(path: pathlib.Path, count: int, rows: int, seed: int = 0) -> None:
    """Save `count` tensors of `rows` x 256 floats to `path`."""
    generator = numpy.random.default_rng(seed)
    fst_numpy.save_file(
        {
            f"layer.{i}.weight": generator.standard_normal((rows, 256), dtype=numpy.float32)
            for i in range(count)
        },
        path,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a file of a little more than 10 MiB, whose tensors end within cache blocks."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "model.safetensors", 10, 1031)
    return folder


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A configured cache folder that does not exist yet."""
    place = tmp_path / "cache"
    remote.configure(cache_dir=place, retry_base_ms=2)
    yield place
    remote.configure()


def load(url: str, **options: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Load a model; return the bytes of all tensors and the statistics."""
    with closing(Model(url)) as model, closing(model.load(**options)) as loader:
        tensors = {
            name: numpy.from_dlpack(loader.item(i)).tobytes()
            for i, name in enumerate(model.names())
        }
        return tensors, loader.stats()


def local(path: pathlib.Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a local file."""
    return {name: value.tobytes() for name, value in fst_numpy.load_file(path).items()}


def endings(cache: pathlib.Path) -> list[str]:
    """Return the name endings of the cache's object files."""
    return sorted(file.suffix for file in cache.iterdir() if file.suffix in (".data", ".part"))


def test_second_load_is_local(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """The second load makes one request without a body. Complete objects are read like local files,
    also as views."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        url = server.url + file.name
        tensors, stats = load(url)
        assert tensors == local(file)
        assert stats["disk_cache_written"] == file.stat().st_size
        assert stats["disk_cache_bytes"] < 10 * BLOCK  # where chunks meet
        assert server.sent_bytes == file.stat().st_size  # each byte once
        asked, sent = len(server.log), server.sent_bytes
        for _ in range(2):
            tensors, stats = load(url)
            assert tensors == local(file)
            assert stats["network_requests"] == 1 and stats["network_bytes"] == 0
            assert stats["disk_cache_bytes"] >= 10 * MIB
            assert "completely in the disk cache" in stats["reason"]
            assert "http" not in stats["engine"]
        views, stats = load(url, mode="map")
        assert views == local(file) and stats["mode"] == "map"
        assert len(server.log) == asked + 3 and server.sent_bytes == sent
        assert endings(cache) == [".data"]


def test_cached_parts_are_not_requested(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Cached blocks of a slice are read from the disk, and only the others from the server."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        url = server.url + file.name
        with fastsafetensors.safe_open(url, "numpy") as opened:
            first = opened.get_tensor("layer.3.weight")
        assert first.tobytes() == local(file)["layer.3.weight"]
        assert server.sent_bytes < first.nbytes + 3 * BLOCK
        tensors, stats = load(url)
        assert tensors == local(file)
        assert stats["disk_cache_bytes"] >= first.nbytes - BLOCK
        assert server.sent_bytes <= file.stat().st_size  # cached blocks are not requested again
        assert load(url)[1]["network_bytes"] == 0 and endings(cache) == [".data"]


def test_an_object_that_is_replaced_is_fetched_anew(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    """A new version gets a new cache file. The old one is kept until its space is needed."""
    file = tmp_path / "model.safetensors"
    with web_server(tmp_path) as server:
        for seed in range(2):
            make(file, 3, 500, seed)
            os.utime(file, ns=(seed + 1, seed + 1))
            assert load(server.url + file.name)[0] == local(file)
        assert load(server.url + file.name)[1]["network_bytes"] == 0
    assert endings(cache) == [".data", ".part"]


def damage(cache: pathlib.Path, ending: str, at: int, data: bytes) -> None:
    """Overwrite bytes of the only cache file with this ending."""
    [file] = cache.glob("*" + ending)
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def test_corrupt_cache_blocks_are_refetched(
    folder: pathlib.Path, cache: pathlib.Path
) -> None:
    """Blocks of zeros and a torn block map, as a power cut leaves them, are detected and fetched
    again."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        url = server.url + file.name
        load(url)
        damage(cache, ".part", 5 * BLOCK + 77, bytes(3 * BLOCK))
        sent = server.sent_bytes
        tensors, _ = load(url)
        assert tensors == local(file) and server.sent_bytes == sent + 4 * BLOCK
        damage(cache, ".part", 5 * BLOCK + 77, b"x")
        damage(cache, ".map", 30, b"torn")  # its head
        assert load(url)[0] == local(file)
        assert load(url)[0] == local(file) and endings(cache) == [".data"]


LOADER = """
import hashlib, os, sys
from fastsafetensors import numpy as fst_numpy, remote
remote.configure(cache_dir=sys.argv[2], cache_required=len(sys.argv) > 3,
                 connections_max=int(os.environ.get("CONNECTIONS_MAX", "0")))
tensors = fst_numpy.load_file(sys.argv[1])
print(hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest())
"""


def start(url: str, cache: pathlib.Path, *more: str) -> subprocess.Popen[str]:
    """A process that loads a model through the cache and prints its digest."""
    return subprocess.Popen(
        [sys.executable, "-c", LOADER, url, str(cache), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digest(path: pathlib.Path) -> str:
    """Return the output of these processes for a correct load."""
    import hashlib

    held = local(path)
    return hashlib.sha256(b"".join(held[name] for name in sorted(held))).hexdigest()


def test_processes_fetch_a_model_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For eight concurrent loads the server sends at most 1.01 times the model's bytes, and nothing
    for later loads."""
    monkeypatch.setenv("CONNECTIONS_MAX", "1")  # no hedged requests for late responses
    make(tmp_path / "model.safetensors", 16, 1024)  # 16 MiB
    size, wanted = (
        (tmp_path / "model.safetensors").stat().st_size,
        digest(tmp_path / "model.safetensors"),
    )

    def slow(request: Request, answer: Answer) -> Answer:
        answer.pause_before_s = 0.05  # so that all processes are waiting before the model exists
        return answer

    with web_server(tmp_path, slow) as server:
        url, cache = server.url + "model.safetensors", tmp_path / "cache"
        for limit in (1.01 * size, 0):
            sent = server.sent_bytes
            running = [start(url, cache, "required") for _ in range(8)]
            answers = [process.communicate(timeout=600) for process in running]
            assert [out.strip() for out, _ in answers] == [wanted] * 8, answers
            assert server.sent_bytes - sent <= limit


def test_killed_process_leaves_a_valid_cache(tmp_path: pathlib.Path) -> None:
    """After kill -9 at a random moment, the next load returns the right bytes and only requests
    missing ones."""
    make(tmp_path / "model.safetensors", 10, 1024)
    wanted, generator = local(tmp_path / "model.safetensors"), random.Random(22)
    size = (tmp_path / "model.safetensors").stat().st_size

    def slow(request: Request, answer: Answer) -> Answer:
        answer.pause_before_s = random.uniform(0, 0.05)  # blocks arrive one after the other
        return answer

    def forked(url: str) -> int:
        child = os.fork()
        if child == 0:
            good = False
            with contextlib.suppress(BaseException):
                good = load(url)[0] == wanted
            os._exit(0 if good else 1)
        return child

    saved = 0
    with web_server(tmp_path, slow) as server:
        url = server.url + "model.safetensors"
        for turn in range(15):
            remote.configure(cache_dir=tmp_path / f"cache{turn}", cache_required=True)
            until = server.sent_bytes + int(generator.uniform(0.1, 0.9) * size)
            killed = forked(url)
            while server.sent_bytes < until:  # independent of the machine's speed
                ended = os.waitid(os.P_PID, killed, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                assert ended is None, "the child ended before it had read so much"
                time.sleep(0.002)
            # this process may wait for the one that is killed
            other = forked(url) if turn % 2 else 0
            os.kill(killed, signal.SIGKILL)
            os.waitpid(killed, 0)
            assert other == 0 or os.waitpid(other, 0)[1] == 0
            tensors, stats = load(url)
            assert tensors == wanted
            saved += 0 if other else size - stats["network_bytes"]
            assert load(url)[1]["network_bytes"] == 0
            shutil.rmtree(tmp_path / f"cache{turn}")
        assert saved > MIB  # the killed processes have left some blocks
    remote.configure()


def test_a_cache_that_can_not_be_used(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The load continues without the cache and logs it. If the cache is required, it is an
    error."""
    file = folder / "model.safetensors"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o770)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "loop").symlink_to("loop")
    places = {"open": "everybody can write", "group": "its group can write", "file": "",
              "link": "", "loop/x": ""}
    with web_server(folder) as server:
        for place, words in places.items():
            remote.configure(cache_dir=tmp_path / place)
            tensors, stats = load(server.url + file.name)
            assert tensors == local(file) and stats["disk_cache_written"] == 0
            assert "not cached" in stats["reason"] and words in stats["reason"]
            remote.configure(cache_dir=tmp_path / place, cache_required=True)
            with pytest.raises(REFUSALS, match="cache"):
                load(server.url + file.name)
        remote.configure(cache_dir=tmp_path / "small", cache_bytes_max=MIB)
        tensors, stats = load(server.url + file.name)
        assert tensors == local(file) and "does not fit" in stats["reason"]
        remote.configure()
        with pytest.raises(REFUSALS, match="must be a local folder"):
            remote.configure(cache_dir="s3://bucket/cache")


def test_a_subfolder_of_an_open_folder_is_used(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The root of a shared volume (0777, or 2775 with a group) is refused, a subfolder works."""
    file = folder / "model.safetensors"
    for mode in (0o777, 0o2775):
        volume = tmp_path / f"volume{mode:o}"
        volume.mkdir()
        volume.chmod(mode)
        with web_server(folder) as server:
            remote.configure(cache_dir=volume, cache_required=True)
            with pytest.raises(PermissionError, match="subfolder"):
                load(server.url + file.name)
            remote.configure(cache_dir=volume / "objects", cache_required=True)
            load(server.url + file.name)
        assert (volume / "objects").stat().st_mode & 0o777 == 0o700
        shutil.rmtree(volume)
    remote.configure()


def test_planted_files_are_not_followed(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Symbolic and hard links in place of the cache's files are ignored."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        url = server.url + file.name
        load(url)
        load(url)
        [data] = cache.glob("*.data")
        kept = data.with_suffix(".kept")
        data.rename(kept)
        data.symlink_to(kept)
        tensors, _ = load(url)
        assert tensors == local(file) and not data.is_symlink()
        assert (cache.stat().st_mode & 0o777) == 0o700
        assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}


def test_offline(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Offline, no request is sent. Cached bytes are used, and missing bytes are an error that names
    the mode."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        url = server.url + file.name
        load(url)
        asked = len(server.log)
        remote.configure(cache_dir=cache, offline=True)
        tensors, stats = load(url)
        assert tensors == local(file) and stats["network_requests"] == 0
        with pytest.raises(REFUSALS, match="offline.*the disk cache does not have it"):
            load(server.url + "other.safetensors")
        remote.configure(
            offline=True, endpoint=server.url[:-1], access_key="key", secret_key="secret"
        )
        with pytest.raises(REFUSALS, match="I/O error: no request was sent"):
            fst_numpy.save_file({"a": numpy.zeros(3)}, "s3://bucket/key")
        assert len(server.log) == asked


def test_cache_stores_no_secrets(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Neither names nor contents of cache files contain a URL's query. Another signature means the
    same object."""
    file = folder / "model.safetensors"
    with web_server(folder) as server:
        for secret in ("SECRET1", "SECRET2"):
            load(f"{server.url}{file.name}?X-Amz-Signature={secret}&token=TOKEN")
        assert server.sent_bytes == file.stat().st_size
        load(f"{server.url}{file.name}?token=OTHER")  # may be another object
        assert server.sent_bytes > file.stat().st_size
    for path in cache.iterdir():
        held = path.read_bytes() + path.name.encode()
        assert not any(word in held for word in (b"SECRET", b"TOKEN", b"OTHER", b"X-Amz"))


def test_least_recently_used_is_evicted_first(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    """The cache stays within its size, and never evicts objects in use."""
    for name in "abcd":
        make(tmp_path / f"{name}.safetensors", 2, 1024, ord(name))
    remote.configure(cache_dir=cache, cache_bytes_max=7 * MIB)
    with web_server(tmp_path) as server:

        def kept() -> set[str]:
            return {entry["address"][-13] for entry in remote.cache_objects()}

        for name in "abc":
            load(f"{server.url}{name}.safetensors")
            time.sleep(0.01)
        assert kept() == {"a", "b", "c"}
        load(f"{server.url}a.safetensors")
        with closing(Model(f"{server.url}b.safetensors")):
            os.utime(next(cache.glob("*.map")))  # whatever the order
            load(f"{server.url}d.safetensors")
            assert "b" in kept() and "d" in kept() and len(kept()) == 3
            pruned = remote.cache_prune(0)
            assert pruned["left_count"] == 1 and kept() == {"b"}
        assert remote.cache_prune(0)["left_count"] == 0 and kept() == set()


def test_fork_during_a_cached_load(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Parent and child both read through the cache from a model that was opened before the fork."""
    file = folder / "model.safetensors"
    with web_server(folder) as server, closing(Model(server.url + file.name)) as model:
        child = os.fork()
        good = False
        try:
            with closing(model.load()) as loader:
                wanted = local(file)
                good = all(
                    numpy.from_dlpack(loader.item(i)).tobytes() == wanted[name]
                    for i, name in enumerate(model.names())
                )
        finally:
            if child == 0:
                os._exit(0 if good else 1)
        assert good and os.waitpid(child, 0)[1] == 0
        assert server.sent_bytes <= 1.01 * file.stat().st_size + BLOCK


def test_the_command(folder: pathlib.Path, tmp_path: pathlib.Path, command: str) -> None:
    """Subcommands that read URLs accept --cache-dir. `cache` lists the contents as text and JSON,
    and cleans them."""
    place = tmp_path / "cache"

    def run(*words: object, code: int = 0) -> str:
        environment = {**os.environ, "FASTSAFETENSORS_CACHE_DIR": str(place)}
        if "--cache-dir" in words:
            del environment["FASTSAFETENSORS_CACHE_DIR"]
        done = subprocess.run(
            [command, *map(str, words)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    assert "0 objects" in run("cache")
    assert json.loads(run("cache", "clear", "--json"))["removed"] == 0
    with web_server(folder) as server:
        url = server.url + "model.safetensors?token=SECRET"
        assert "layer.3.weight" in run("inspect", "--cache-dir", place, url)
        [entry] = json.loads(run("cache", "list", "--json"))["objects"]
        assert entry["kept_bytes"] == BLOCK and not entry["whole"]
        assert entry["address"] == server.url + "model.safetensors"
        for limit in (11 * MIB, 0):
            sent = server.sent_bytes
            stats = json.loads(run("load", "--cache-dir", place, "--json", url))
            assert server.sent_bytes - sent <= limit, stats
        run("verify", "--cache-dir", place, url)
        assert "whole" in run("cache") and "SECRET" not in run("cache")
        blocked = tmp_path / "blocked"
        blocked.write_text("")
        run("load", "--cache-dir", blocked, url, code=2)
        sent = server.sent_bytes
        run("load", url)  # by the environment
        assert server.sent_bytes == sent
    run("cache", "prune", code=3)
    assert "1 left" in run("cache", "prune", "--max", "1G")
    assert json.loads(run("cache", "prune", "--max", "1M", "--json"))["removed"] == 1


def test_sharded_models_through_every_api(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    """The second load of a sharded model requests no bytes, with every API."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.torch import load_file, load_model, save_file

    names = [f"{i}.weight" for i in range(6)]
    tensors = {name: torch.randn(300, 400) for name in names}
    for part in range(3):
        held = {name: tensors[name] for name in names[part::3]}
        save_file(held, tmp_path / f"part{part}.safetensors")
    index = {
        "metadata": {},
        "weight_map": {n: f"part{i % 3}.safetensors" for i, n in enumerate(names)},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layers = torch.nn.ModuleList(torch.nn.Linear(400, 300, bias=False) for _ in names)

    def by_load_file(url: str) -> bool:
        loaded = load_file(url)
        return all(torch.equal(loaded[name], tensors[name]) for name in names)

    def by_model(url: str) -> bool:
        load_model(layers, url)
        return all(torch.equal(layers[i].weight, tensors[n]) for i, n in enumerate(names))

    def by_open(url: str) -> bool:
        with fastsafetensors.safe_open(url, "pt") as opened:
            return all(torch.equal(opened.get_tensor(n), tensors[n]) for n in names)

    with web_server(tmp_path) as server:
        url = server.url + "model.safetensors.index.json"
        for api in (by_load_file, by_model, by_open):
            remote.cache_prune(0, cache) if cache.exists() else None
            assert api(url)
            sent, asked = server.sent_bytes, len(server.log)
            for other in (by_load_file, by_model, by_open):
                assert other(url)
            assert server.sent_bytes == sent
            assert len(server.log) - asked == 3 * 4  # a small request a file and start


def test_cancelled_load_releases_claims(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    """A cancelled load ends at once, whether it waits for another process's block or fetches
    one."""
    make(tmp_path / "model.safetensors", 4, 1024)
    remote.configure(cache_dir=cache, stall_ms=600_000, first_byte_ms=600_000)
    go, held = threading.Event(), threading.Event()
    over: list[bool] = []

    def hold(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] != "bytes=0-65535":
            held.set()
            over.append(go.wait(300))
        return answer

    with web_server(tmp_path, hold) as server:
        url = server.url + "model.safetensors"
        models = [Model(url), Model(url)]
        loaders = [model.load(mode="load") for model in models]
        assert held.wait(300)
        time.sleep(0.2)  # meanwhile the other process starts to wait for the block
        for loader in reversed(loaders):
            loader.close()
        assert not over
        go.set()
        assert load(url)[0] == local(tmp_path / "model.safetensors")


def test_objects_without_version_are_not_cached(tmp_path: pathlib.Path,
                                                cache: pathlib.Path) -> None:
    """Objects that only have a size are not cached. Objects with a date are."""
    file = tmp_path / "model.safetensors"
    gone = {"ETag": None, "Last-Modified": None}

    def strip(request: Request, answer: Answer) -> Answer:
        answer.headers.update(gone)  # type: ignore[arg-type]
        return answer

    with web_server(tmp_path, strip) as server:
        for seed in range(2):
            make(file, 3, 500, seed)
            os.utime(file, ns=(seed + 1, seed + 1))
            tensors, stats = load(server.url + file.name)
            assert tensors == local(file) and "neither a strong ETag nor" in stats["reason"]
        remote.configure(cache_dir=cache, cache_required=True)
        with pytest.raises(REFUSALS, match="neither a strong ETag nor"):
            load(server.url + file.name)
        del gone["Last-Modified"]
        sent = server.sent_bytes
        for _ in range(2):
            assert load(server.url + file.name)[0] == local(file)
        assert server.sent_bytes - sent == file.stat().st_size + BLOCK  # the second: its beginning
