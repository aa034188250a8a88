# SPDX-License-Identifier: Apache-2.0
"""Servers that restart during a load are waited for; unreachable hosts fail fast."""

from __future__ import annotations

import pathlib
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing

import numpy
import pytest
from web_server import Answer, Request, skip_without_libcurl, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model

SIZE_BYTES = 24 << 20
DOWN_S = 0.5
# The waits between eight attempts add up to at least 1.27 s, those between four to at most 0.14 s.
RETRY_BASE_MS = 10

LOAD_PROGRAM = """
import sys
from fastsafetensors import numpy, remote
remote.configure(retry_base_ms=1, tries_max=int(sys.argv[2]))
try:
    numpy.load_file(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 24 MiB."""
    data = numpy.random.default_rng(2).integers(0, 256, SIZE_BYTES, numpy.uint8)
    fst_numpy.save_file({"all": data}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def load_with_restart(path: pathlib.Path, down_s: float) -> dict[str, object]:
    """Load the file while its server stops at the second range and restarts `down_s` later."""
    stop = threading.Event()
    loaded: list[bytes] = []
    stats: dict[str, object] = {}
    failures: list[Exception] = []

    def stop_at_ranges(request: Request, answer: Answer) -> Answer:
        if request.headers["range"] != "bytes=0-65535":
            stop.set()
            answer.send_bytes, answer.end = 1000, "reset"
        return answer

    def load() -> None:
        try:
            with closing(Model(url)) as model, closing(model.load()) as loader:
                loader.wait()
                [tensor] = list(loader)
                loaded.append(bytes(memoryview(numpy.from_dlpack(tensor)).cast("B")))
                stats.update(loader.stats())
        except Exception as error:
            failures.append(error)

    with web_server(path.parent, stop_at_ranges) as server:
        port = server.server_address[1]
        url = server.url + path.name
        thread = threading.Thread(target=load)
        thread.start()
        assert stop.wait(60)
    threading.Event().wait(down_s)
    with web_server(path.parent, port=port):
        thread.join(60)
    assert not thread.is_alive()
    assert failures == []
    assert loaded == [path.read_bytes()[-SIZE_BYTES:]]
    return stats


def test_load_survives_a_server_restart(path: pathlib.Path) -> None:
    """A host that has responded before is retried up to tries_max times."""
    remote.configure(retry_base_ms=RETRY_BASE_MS)
    try:
        stats = load_with_restart(path, DOWN_S)
    finally:
        remote.configure()
    assert int(str(stats["network_retries"])) >= 2
    # The server was down for longer than this, and the load waited for it.
    assert int(str(stats["network_retry_wait_ns"])) >= DOWN_S * 0.5e9


def test_statistics_count_the_time_to_the_first_byte(path: pathlib.Path) -> None:
    """The delay of a slow server counts in network_first_byte_ns, not in the time between
    retries."""
    pause_s = 0.02

    def answer_late(request: Request, answer: Answer) -> Answer:
        answer.pause_before_s = pause_s
        return answer

    with (
        web_server(path.parent, answer_late) as server,
        closing(Model(server.url + path.name)) as model,
        closing(model.load()) as loader,
    ):
        loader.wait()
        stats = loader.stats()
    answers = int(str(stats["network_requests"])) - int(str(stats["network_hedges"]))
    assert int(str(stats["network_first_byte_ns"])) >= answers * pause_s * 1e9
    assert stats["network_retry_wait_ns"] == 0


@pytest.mark.parametrize(("tries_max", "expected"), [(8, 4), (2, 2)])
def test_a_host_that_never_answered_fails_after_four_tries(tries_max: int, expected: int) -> None:
    """A wrong port or a dead host fails sooner than a busy one, after four attempts."""
    skip_without_libcurl()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # reserved for the test; nothing listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/model.safetensors"
        arguments = [sys.executable, "-c", LOAD_PROGRAM, url, str(tries_max)]
        told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"\b{expected} tries", told), told
