# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while an asynchronous save starts: the save is cancelled, or watched to its end."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import _core, training  # noqa: E402
from fastsafetensors._ranks.publish import SetTarget  # noqa: E402
from fastsafetensors._ranks.ranks_async import JointSave  # noqa: E402
from fastsafetensors._saving import save_handles  # noqa: E402
from fastsafetensors._saving.background import Background  # noqa: E402
from fastsafetensors._saving.running_saves import running  # noqa: E402
from fastsafetensors._saving.save_handles import ThreadSave, was_cancelled  # noqa: E402
from fastsafetensors.torch import load_file, save_file_async  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402

COUNT = 8 << 20

DROPPED = """
import sys, torch
from fastsafetensors import _core
from fastsafetensors._torch.torch_state import make_rows
tensors = {f"w{i}": torch.ones(1 << 20) for i in range(20)}
rows, owners = make_rows(tensors, on_device=True)
calls = []
def is_unchanged():
    calls.append(sum(len(str(number)) for number in range(1000)))
    return True
def start():
    save = _core.AsyncSave()
    save.start(("lazy", "order", 0, 0, 0, None, is_unchanged, None), sys.argv[1], rows, None,
               owners=owners)
    return save
try:
    -start()  # the TypeError is set when the last reference to the save goes
except TypeError:
    pass
assert len(calls) == 1, calls
"""


class InterruptedSave:
    """An AsyncSave; Ctrl-C comes when it has started."""

    def __init__(self) -> None:
        """Make the real one."""
        self._core = _core.AsyncSave()

    def __getattr__(self, name: str) -> Any:
        """Return what the real one has."""
        return getattr(self._core, name)

    def start(self, *arguments: Any, **options: Any) -> None:
        """Start the save, and raise."""
        self._core.start(*arguments, **options)
        raise KeyboardInterrupt


class InterruptedCore:
    """The module _core with the other AsyncSave."""

    AsyncSave = InterruptedSave

    def __getattr__(self, name: str) -> Any:
        """Return what the module has."""
        return getattr(_core, name)


def test_an_object_that_is_dropped_with_an_exception_set(tmp_path: Path) -> None:
    """Its last copy of tensors calls Python code, which knows nothing of the exception."""
    done = subprocess.run([sys.executable, "-c", DROPPED, str(tmp_path / "a")], timeout=600,
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stage", ["copy", "lazy", "none"])
def test_a_save_that_is_interrupted_at_its_start_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """When KeyboardInterrupt is raised, no thread writes any more."""
    path = tmp_path / "a"
    with (monkeypatch.context() as patched, running.begun() as begun,
          pytest.raises(KeyboardInterrupt)):
        patched.setattr(save_handles, "_core", InterruptedCore())
        save_file_async({"x": torch.ones(COUNT)}, path, stage=stage)
    handle = begun[-1]
    assert handle.done()
    error = handle.exception()
    assert was_cancelled(error) or (error is None and load_file(path)["x"].eq(1).all())
    assert [one for one in tmp_path.iterdir() if one != path] == []


def test_a_save_that_could_not_start_has_ended(tmp_path: Path) -> None:
    """The exit of the interpreter does not wait for it."""
    with running.begun() as begun, pytest.raises(ValueError, match="null byte"):
        save_file_async({"x": torch.ones(3)}, tmp_path / "\0")
    handle = begun[-1]
    assert handle.done() and not handle.is_started()
    core = _core.AsyncSave()
    assert not core.is_started()
    for call in (core.stats, core.cancel, lambda: core.wait(0), lambda: core.stage(0)):
        with pytest.raises(RuntimeError, match="not started"):
            call()
    core.close()
    with pytest.raises(RuntimeError, match="once"):
        core.start(("copy", "order", 0, 0, 0, None, None, None), tmp_path / "a", [], None)


def test_a_thread_that_was_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's exit does not wait for a save whose start was interrupted."""
    def interrupt(_thread: Background) -> None:
        raise KeyboardInterrupt

    with (monkeypatch.context() as patched, running.begun() as begun,
          pytest.raises(KeyboardInterrupt)):
        patched.setattr(Background, "start", interrupt)
        ThreadSave(lambda: None, "a")
    handle = begun[-1]
    assert not handle.is_started()
    handle._end()
    running._handles.discard(handle)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_work_whose_start_was_interrupted_is_done_once(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whoever waits for it starts it again."""
    calls = []
    begin = _thread.start_new_thread

    def interrupt(*arguments: Any) -> None:
        monkeypatch.setattr(_thread, "start_new_thread", begin)
        if moment == "after":
            begin(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupt)
    work = Background(lambda: calls.append(1))
    with pytest.raises(KeyboardInterrupt):
        work.start()
    assert work.wait(60) and work.wait(60) and work.has_ended() and calls == [1]


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_a_checkpoint_that_is_interrupted_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """wait() returns when it has ended, and no empty folder stays."""
    with CheckpointManager(tmp_path, stage=stage) as manager:
        manager.save(1, {"x": torch.ones(3)})
        manager.wait()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(save_handles, "_core", InterruptedCore())
            manager.save(2, {"x": torch.ones(COUNT)})
        manager.wait()
        assert not manager._saving
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {f"step-{one.step}" for one in manager.checkpoints()}
        manager.save(2, {"x": torch.ones(7)})
        manager.wait()
        assert manager.resume({"x": torch.zeros(7)}) == 2


def test_an_interrupt_after_the_start_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save goes on, and wait() waits for it, though save() did not get its handle."""
    real = training.start_alone

    def start_and_interrupt(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "start_alone", start_and_interrupt)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, {"x": torch.ones(COUNT)})
        manager.wait()
        assert [one.step for one in manager.checkpoints()] == [1]
        assert not manager._saving


def test_an_interrupt_when_a_checkpoint_is_counted(tmp_path: Path) -> None:
    """A step whose save was not begun is not taken for one that is being saved."""
    class Lock:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_error: object) -> None:
            manager._lock = lock
            raise KeyboardInterrupt

    with CheckpointManager(tmp_path) as manager:
        lock = manager._lock
        manager._lock = Lock()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            manager._begin(1, lambda: pytest.fail("it was started"))
        assert not manager._saving


def test_a_rank_that_has_left_publishes_nothing(tmp_path: Path) -> None:
    """The group belongs to the next save then."""
    joint = JointSave(None, None, SetTarget(str(tmp_path), "model", durable=False))
    joint.leave()
    written = tmp_path / ".a"
    written.touch()
    assert joint.publish([str(written)], None) == "cancelled"
    assert was_cancelled(joint.error) and not written.exists()


_COLLECTED = """
import gc, os, sys, time, torch
from fastsafetensors.torch import load_file, save_file, save_file_async
small, handles = {"x": torch.ones(4)}, []
class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        if sys.argv[2] == "sync":
            save_file(small, sys.argv[1])
        else:
            handles.append(save_file_async(small, sys.argv[1]))
save_file(small, sys.argv[1])
tensors = {"big": torch.ones(30_000_000)}
tensors.update({f"t{i}": torch.ones(4) for i in range(200)})
gc.collect()
handle = save_file_async(tensors, sys.argv[1], stage="lazy")
Garbage()
kept = []
while gc.get_count()[0] < 698:  # the next collection is in what the library asks
    kept.append([])
time.sleep(0.5)
handle.wait(20)
for other in handles:
    other.wait(20)
print("ended")
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_garbage_may_save_while_the_library_asks(tmp_path: Path, kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", _COLLECTED, tmp_path / "model", kind],
                          capture_output=True, text=True, timeout=120)
    assert done.stdout == "ended\n", done.stderr[-2000:]
