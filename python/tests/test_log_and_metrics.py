# SPDX-License-Identifier: Apache-2.0
"""The library's log in Python's logging, and the counters of fastsafetensors.metrics."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors._base import log
from fastsafetensors import metrics, safe_open  # noqa: E402
from fastsafetensors.torch import load_file, save_file  # noqa: E402


def save(path: Path) -> None:
    save_file({"w": torch.ones(1 << 16), "b": torch.ones(4)}, path)


def test_library_lines_reach_the_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fastsafetensors"):
        save(tmp_path / "m.safetensors")
    lines = [one for one in caplog.records if one.name == "fastsafetensors"]
    assert any("saved" in one.getMessage() and one.levelno == logging.INFO for one in lines)


def test_only_enabled_levels_are_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(log, "log_start", lambda emit, level: levels.append(level))
    monkeypatch.setattr(log, "_level", -1)
    logger = logging.getLogger("fastsafetensors")
    before = logger.level
    try:
        for level in (logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG, logging.ERROR):
            logger.setLevel(level)
            log.follow_logging()
    finally:
        logger.setLevel(before)
    assert levels == [0, 1, 2, 0]


def test_lines_of_other_threads_are_forwarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fastsafetensors"):
        threads = [threading.Thread(target=save, args=(tmp_path / f"{number}.safetensors",))
                   for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    messages = [one.getMessage() for one in caplog.records if "saved" in one.getMessage()]
    assert len(messages) == 8


def test_a_handler_that_fails_does_not_reach_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(found.exc_value))
    logger = logging.getLogger("fastsafetensors")

    def fail(record: logging.LogRecord) -> bool:
        raise ValueError("a filter that fails")

    logger.addFilter(fail)
    try:
        with caplog.at_level(logging.INFO, "fastsafetensors"):
            save(tmp_path / "m.safetensors")
    finally:
        logger.removeFilter(fail)
    assert [str(error) for error in seen] == ["a filter that fails"]


PROGRAM = """
import logging, os, sys, threading
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s %(process)d")
import numpy
from fastsafetensors.numpy import save_file
path = sys.argv[1]
print("parent", os.getpid(), flush=True)
save_file({"w": numpy.ones(4)}, path)
child = os.fork()
if child == 0:
    save_file({"w": numpy.ones(4)}, path + ".child")  # a child logs nothing, and does not hang
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
def run():
    while True:
        save_file({"w": numpy.ones(4)}, path + ".thread")
threading.Thread(target=run, daemon=True).start()  # logs until the interpreter ends, and after
save_file({"w": numpy.ones(4)}, path)
"""


def test_forks_and_the_end_of_the_interpreter(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "m.safetensors")],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (parent,) = re.findall(r"parent (\d+)", done.stdout)
    assert set(re.findall(r"^fastsafetensors (\d+)$", done.stdout, re.MULTILINE)) == {parent}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsafetensors._base.counters.is_on", False)


def test_loads_and_saves_are_counted_once_enabled(tmp_path: Path, counting: None) -> None:
    path = tmp_path / "m.safetensors"
    save(path)
    before = metrics.snapshot()
    load_file(path)
    assert metrics.snapshot() == before
    metrics.enable()
    save(path)
    load_file(path, mode="load", cache="bypass")
    with safe_open(path, "pt") as file:
        file.get_tensors()
    rise = {name: value - before[name] for name, value in metrics.snapshot().items()}
    assert (rise["saves"], rise["save_tensors"], rise["save_files"]) == (1, 2, 1)
    assert (rise["loads"], rise["load_tensors"]) == (2, 4)
    assert rise["load_bytes"] == 2 * 4 * ((1 << 16) + 4)
    assert rise["load_seconds"] > 0 and rise["save_seconds"] > 0
    assert rise["save_bytes"] > 0 and rise["chunks"] > 0 and rise["network_requests"] == 0
    assert set(rise) == set(metrics._DESCRIPTIONS)


def test_a_forked_process_counts_from_zero(tmp_path: Path, counting: None) -> None:
    metrics.enable()
    save(tmp_path / "m.safetensors")
    child = os.fork()
    if child == 0:
        os._exit(0 if not any(metrics.snapshot().values()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_prometheus_exports_the_counters(tmp_path: Path, counting: None) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    metrics.register_prometheus(registry)
    save(tmp_path / "m.safetensors")
    text = client.generate_latest(registry).decode()
    assert "# TYPE fastsafetensors_saves_total counter" in text
    assert f"fastsafetensors_saves_total {metrics.snapshot()['saves']}" in text


def test_opentelemetry_observes_the_counters(tmp_path: Path, counting: None) -> None:
    pytest.importorskip("opentelemetry.metrics")

    class Meter:
        made: dict[str, Any] = {}

        def create_observable_counter(self, name: str, callbacks: Any, unit: str,
                                      description: str) -> str:
            self.made[name] = callbacks[0]
            return name

    names = metrics.register_opentelemetry(Meter())
    save(tmp_path / "m.safetensors")
    assert len(names) == len(metrics.snapshot())
    (observation,) = Meter.made["fastsafetensors.saves"](None)
    assert observation.value == metrics.snapshot()["saves"] > 0


@pytest.mark.parametrize("name", ["prometheus_client", "opentelemetry"])
def test_an_exporter_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    register = (metrics.register_prometheus if name == "prometheus_client"
                else metrics.register_opentelemetry)
    with pytest.raises(ImportError, match=name):
        register()
