# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a CheckpointManager deletes, and what it says of those that it can't."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors import training  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402


def save_steps(folder: Path, *steps: int) -> None:
    """Save steps, and keep all."""
    with CheckpointManager(folder, durable=False, manifest=False) as manager:
        for step in steps:
            manager.save(step, {"x": step})


def test_a_resumed_step_0_is_kept(tmp_path: Path) -> None:
    """It is a step like any other."""
    save_steps(tmp_path, 0)
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert manager.resume({"x": None}, step=0) == 0
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
    assert [one.step for one in manager.checkpoints()] == [0, 2]


def test_one_that_cannot_be_renamed_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are deleted, and a warning names it."""
    save_steps(tmp_path, 1, 2, 3)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-1":
            raise PermissionError(1, "refused", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(4, {"x": 4})
    assert [one.step for one in manager.checkpoints()] == [1, 4]
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        f"{tmp_path / 'step-1'} can't be deleted"]


def test_what_is_left_of_a_deletion_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that can't be deleted is a warning, at the next start as well; links go."""
    save_steps(tmp_path, 1, 2)
    left = tmp_path / ".step-1.deleted"
    (left / "folder").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-2").rename(tmp_path / "elsewhere" / "step-2")
    (tmp_path / "step-2").symlink_to("elsewhere/step-2")
    (tmp_path / ".step-7.deleted").write_text("")
    rmdir, remove = os.rmdir, os.unlink
    monkeypatch.setattr(os, "rmdir", lambda path, **more: refuse(path, rmdir, more))
    monkeypatch.setattr(os, "unlink", lambda path, **more: refuse(path, remove, more))

    def refuse(path: Any, delete: Any, more: Any) -> None:
        if str(path).endswith("folder"):
            raise PermissionError(1, "refused", str(path))
        delete(path, **more)

    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert "step-1.deleted can't be deleted: [Errno 1] refused" in caplog.text
        manager.save(3, {"x": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-1.deleted", "elsewhere", "step-3"]
    assert (tmp_path / "elsewhere" / "step-2").is_dir()
    assert caplog.text.count("can't be deleted") == 1
    monkeypatch.undo()
    CheckpointManager(tmp_path).close()
    assert not left.exists()


class Held:
    """The handle of a save that has ended; its end is noted when the test says so."""

    at_exit = "wait"

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.done = self.may_end.is_set

    def exception(self) -> None:
        """Wait for the end."""
        self.may_end.wait(60)


@pytest.mark.parametrize("earlier, keep_last, steps, left", [
    ([], 2, [2, 6, 4], [2, 4, 6]),
    ([6, 7, 8, 9], 1, [10, 5], [5, 10]),
    ([2], 2, [2, 5, 6, 4, 3], [3, 4, 5, 6]),
    ([1, 2], 1, [3, 2, 4, 2, 1], [1, 2, 4]),
])
def test_each_save_is_followed_as_if_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: list[int], keep_last: int,
    steps: list[int], left: list[int]
) -> None:
    """The same stays, whenever the ends of saves are noted, and in whatever order."""
    save = training.start_alone
    for order in (0, 1, -1):
        folder = tmp_path / str(order)
        save_steps(folder, *earlier)
        held: list[Held] = []

        def start(*arguments: Any, held: list[Held] = held, **options: Any) -> Held:
            save(*arguments, **options).wait()
            held.append(Held())
            return held[-1]

        monkeypatch.setattr(training, "start_alone", start)
        with CheckpointManager(folder, keep_last=keep_last, durable=False) as manager:
            for step in steps:
                manager.save(step, {"x": step})
                if order == 0:
                    held[-1].may_end.set()
                    manager.wait()
            for one in held[::order or 1]:
                one.may_end.set()
                while one in [other.handle for other in manager._watchers._all
                              if not other.has_ended()]:
                    time.sleep(0.001)
        assert [one.step for one in manager.checkpoints()] == left, order
        monkeypatch.undo()
