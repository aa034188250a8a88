# SPDX-License-Identifier: Apache-2.0
"""The disk cache: stopped processes, full and read-only disks, names, limits."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from test_remote_cache import BLOCK, LOADER, digest, endings, load, local, make, start
from web_server import Answer, Request, web_server

from fastsafetensors import SafetensorError, remote


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 12 MiB."""
    make(tmp_path / "model.safetensors", 12, 1024)
    return tmp_path / "model.safetensors"


def test_stopped_process_does_not_block_others(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """If a process is stopped while it fetches blocks, others bypass the cache. The process resumes
    without errors."""
    held, go = threading.Event(), threading.Event()

    def hold(request: Request, answer: Answer) -> Answer:
        if request.span(1 << 40) != (0, BLOCK) and not held.is_set():
            held.set()
            assert go.wait(300)
        return answer

    place = tmp_path / "cache"
    with web_server(tmp_path, hold) as server:
        url = server.url + model.name
        stopped = start(url, place)
        try:
            assert held.wait(120)
            stopped.send_signal(signal.SIGSTOP)
            os.waitpid(stopped.pid, os.WUNTRACED)
            remote.configure(cache_dir=place)
            assert load(url)[0] == local(model)
            # It still has its claims, so the blocks are missing, and no other process writes them.
            assert stopped.poll() is None and not go.is_set() and endings(place) != [".data"]
            assert server.sent_bytes <= 2 * model.stat().st_size
            stopped.send_signal(signal.SIGCONT)
            go.set()
            out, errors = stopped.communicate(timeout=600)
            assert out.strip() == digest(model), errors
            sent = server.sent_bytes
            assert load(url)[0] == local(model) and endings(place) == [".data"]
            assert load(url)[0] == local(model) and server.sent_bytes - sent <= 2 * BLOCK
        finally:
            go.set()
            stopped.kill()
            stopped.communicate()
            remote.configure()


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(__import__("sys").argv.pop()),) * 2)
"""


@pytest.mark.parametrize("limit", [100, 5000, 65536, 1 << 20, 8 << 20])
@pytest.mark.parametrize("required", [False, True])
def test_files_may_not_grow(
    model: pathlib.Path, tmp_path: pathlib.Path, limit: int, required: bool
) -> None:
    """With a limit on file sizes, a load returns the right bytes or an error, and the next load is
    complete."""
    place = tmp_path / "cache"
    with web_server(tmp_path) as server:
        url = server.url + model.name
        words = [url, str(place), *(["required"] if required else []), str(limit)]
        done = subprocess.run(
            [sys.executable, "-c", LIMITED + LOADER, *words], capture_output=True, text=True
        )
        if required:
            assert done.returncode == 1 and "cache" in done.stderr, done
        else:
            assert done.stdout.strip() == digest(model), done
        for _ in range(2):
            running = start(url, place, "required")
            out, errors = running.communicate(timeout=600)
            assert out.strip() == digest(model), errors
        assert endings(place) == [".data"]


def test_a_full_disk(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With 4 MiB of disk for 12 MiB the load is right. If the cache is required, it is an error
    with the reason."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["sh", "-c", f'mount -t tmpfs -o size=4m,mode=0700 tmpfs "{place}"'], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs rights")
    try:
        with web_server(tmp_path) as server:
            url = server.url + model.name
            for _ in range(2):
                out, errors = start(url, place).communicate(timeout=600)
                assert out.strip() == digest(model), errors
            running = start(url, place, "required")
            out, errors = running.communicate(timeout=600)
            assert running.returncode == 1 and "No space left" in errors, out + errors
            remote.cache_prune(0, place)
            (place / "filler").write_bytes(b"x" * (4 << 20 >> 1))
            assert start(url, place).communicate(timeout=600)[0].strip() == digest(model)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_folder_that_may_only_be_read(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Complete objects in a read-only cache are used. Other loads bypass it."""
    place = tmp_path / "cache"
    done = subprocess.run(["sh", "-c", "unshare --mount true"], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting needs rights")
    with web_server(tmp_path) as server:
        url = server.url + model.name
        for is_whole in (False, True):
            if is_whole:
                for _ in range(2):
                    start(url, place).communicate(timeout=600)
                assert endings(place) == [".data"]
            place.mkdir(mode=0o700, exist_ok=True)
            script = f'mount --bind -o ro "{place}" "{place}" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, "-"]
            ran = subprocess.run(
                [*command, sys.executable, "-c", LOADER, url, str(place)],
                capture_output=True,
                text=True,
            )
            assert ran.stdout.strip() == digest(model), ran


def test_planted_cache_files_are_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Links, folders and pipes with the cache's file names are neither followed nor waited for."""
    place, precious = tmp_path / "cache", tmp_path / "precious"
    precious.write_bytes(b"precious")
    with web_server(tmp_path) as server:
        url = server.url + model.name
        out, errors = start(url, place).communicate(timeout=600)
        assert out.strip() == digest(model), errors
        names = [path.name for path in place.iterdir() if path.suffix in (".part", ".map", ".ref")]
        assert len(names) == 3
        for kind in ("symlink", "hard link", "fifo", "folder"):
            for name in names:
                path = place / name
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                path.unlink(missing_ok=True)
                if kind == "symlink":
                    path.symlink_to(precious)
                elif kind == "hard link":
                    path.hardlink_to(precious)
                elif kind == "fifo":
                    os.mkfifo(path)
                else:
                    path.mkdir()
                out, errors = start(url, place).communicate(timeout=600)
                assert out.strip() == digest(model), (kind, name, errors)
                assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("size", [99999999, 70000], ids=["larger", "smaller"])
def test_wrong_size_is_corrected(tmp_path: pathlib.Path, size: int) -> None:
    """The cached size does not belong to that version: the next open of the URL revalidates it."""
    make(tmp_path / "m.safetensors", 4, 64 * 1024, 3)
    remote.configure(cache_dir=tmp_path / "cache", retry_base_ms=2)
    lies = [1]

    def lie(request: Request, answer: Answer) -> Answer:
        if lies:
            lies.pop()
            span = answer.headers["Content-Range"].split("/")[0]
            answer.headers["Content-Range"] = f"{span}/{size}"
        return answer

    try:
        with web_server(tmp_path, lie) as server:
            address = server.url + "m.safetensors"
            with pytest.raises(SafetensorError):
                load(address)
            for _ in range(2):
                assert load(address)[0] == local(tmp_path / "m.safetensors")
    finally:
        remote.configure()
