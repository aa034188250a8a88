# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and saves under unusual conditions: multiprocessing, few file descriptors, unreadable
folders, signal handlers that save and raise."""

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors.torch import load_file  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402


CHILD_OF_MULTIPROCESSING = """
import multiprocessing, os, sys, threading, time, torch
from fastsafetensors.torch import save_file_async
from fastsafetensors._saving.save_handles import ThreadSave
from fastsafetensors.training import CheckpointManager

def work(ends):
    save_file_async({"w": torch.ones(3_000_000)}, "out.safetensors", durable=True)
    save_file_async({"w": torch.ones(9)}, "lazy.safetensors", stage="lazy", durable=True)
    manager = CheckpointManager("run", keep_last=1)
    for step in (1, 2):
        manager.save(step, {"model": {"w": torch.ones(3_000_000)}})
    threading.Thread(target=save_later).start()
    threading.Thread(target=train).start()
    if ends:
        sys.exit(3)

def train():
    with CheckpointManager("trained", keep_last=2) as manager:
        for step in range(1, 31):
            handle = manager.save(step, {"model": {"w": torch.full((300_000,), float(step))}})
            time.sleep(0.02)
        handle.wait()
        assert handle.done() and handle.stats["state"] == "done", repr(handle)
    open("thread ended", "w").close()

def save_later():
    while not multiprocessing.util.is_exiting():
        time.sleep(0.001)
    time.sleep(0.2)
    save_file_async({"w": torch.ones(3_000_000)}, "late.safetensors", durable=True)
    ThreadSave(lambda: (time.sleep(0.2), open("thread", "w").close()), "thread")

if __name__ == "__main__":
    for ends in (False, True):
        for name in ("late.safetensors", "thread", "thread ended"):
            if os.path.exists(name):
                os.unlink(name)
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(ends,))
        child.start()
        child.join()
        print(child.exitcode, os.path.exists("late.safetensors"), os.path.exists("thread"),
              os.path.exists("thread ended"), *sorted(os.listdir("trained")))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_wait_for_their_saves(method, tmp_path):
    (tmp_path / "program.py").write_text(CHILD_OF_MULTIPROCESSING)
    done = subprocess.run([sys.executable, "program.py", method], cwd=tmp_path, text=True,
                          capture_output=True, timeout=300)
    assert done.stdout.splitlines() == [
        f"{code} True True True step-29 step-30" for code in (0, 3)], done.stderr
    assert load_file(tmp_path / "out.safetensors")["w"].eq(1).all()
    assert load_file(tmp_path / "lazy.safetensors")["w"].eq(1).all()
    assert os.listdir(tmp_path / "run") == ["step-2"]


@contextlib.contextmanager
def free_descriptors(count):
    """So many descriptors can be opened."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("free", [0, 1])
def test_few_descriptors_hide_no_checkpoint(free, tmp_path):
    """With one, the files can be opened, and the folder cannot be listed again."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(3)}).wait()
        with free_descriptors(free):
            for read in (manager.latest, lambda: manager.resume({"a": None})):
                with pytest.raises(OSError, match="Too many open files"):
                    read()
        assert manager.latest().step == 1


def test_unreadable_checkpoints_are_named(tmp_path, monkeypatch, caplog):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"a": torch.ones(3)}, metric=step).wait()
        from fastsafetensors._checkpoints import checkpoint_folders as folders

        read = folders.read_checkpoint

        def refuse(path, step):
            if step == 2:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, step)

        monkeypatch.setattr(folders, "read_checkpoint", refuse)
        with caplog.at_level(logging.WARNING, "fastsafetensors"):
            assert [one.step for one in manager.checkpoints()] == [1]
    assert "step-2 is left out: [Errno 13] Permission denied" in caplog.text


class Preempted(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_handlers_that_save_and_raise_leave_keep_last(moment, tmp_path, monkeypatch):
    """Old checkpoints are still deleted afterwards, whether the save had started or not."""
    from fastsafetensors import training

    start = training.start_alone

    def interrupted(*arguments, **options):
        monkeypatch.setattr(training, "start_alone", start)
        if moment == "after":
            start(*arguments, **options)
        signal.raise_signal(signal.SIGUSR1)
        return start(*arguments, **options)

    with CheckpointManager(tmp_path, keep_last=1) as manager:
        def handler(*_):
            manager.save(1, {"n": 1})
            raise Preempted

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            monkeypatch.setattr(training, "start_alone", interrupted)
            with pytest.raises(Preempted):
                manager.save(2, {"x": torch.zeros(1000)})
        finally:
            signal.signal(signal.SIGUSR1, before)
        for step in range(3, 6):
            manager.save(step, {"n": step}).wait()
    assert os.listdir(tmp_path) == ["step-5"]


def test_a_name_that_is_not_unicode(tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match="not Unicode"):
        manager.save(1, {"a": {"\udc80": torch.ones(1)}})


def test_a_failure_is_logged_once(tmp_path, caplog):
    """Also where an exception ends the block of the manager."""
    (tmp_path / "step-1").write_text("in the way")
    with pytest.raises(KeyError), CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1})
        raise KeyError
    assert [record.getMessage()[:31] for record in caplog.records] == [
        "the checkpoint of step 1 failed"]


def test_old_checkpoints_are_looked_for_once_after_several_saves(tmp_path, monkeypatch):
    """Otherwise fast saves get ahead of the deletion, which reads more folders each time."""
    looks = []
    checkpoints = CheckpointManager.checkpoints
    monkeypatch.setattr(CheckpointManager, "checkpoints",
                        lambda self: looks.append(1) or checkpoints(self))
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        with manager._pruning:  # as while another thread deletes
            for step in range(1, 11):
                manager.save(step, {"x": step}).wait()
            while manager._saving:
                time.sleep(0.01)
    assert len(looks) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
