# SPDX-License-Identifier: Apache-2.0
"""Folders of a CheckpointManager that killed saves, other users or disks have left."""

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors import SafetensorError, training  # noqa: E402
from fastsafetensors._checkpoints import checkpoint_folders, old_checkpoints  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402

STATE = {"a": {"x": torch.ones(300), "y": torch.zeros(300)}}
INDEX = "checkpoint.safetensors.index.json"
SHARD = "checkpoint-00002-of-00003.safetensors"


def save_steps(folder: Path, *steps: int) -> None:
    """Save steps of three files each."""
    with CheckpointManager(folder, max_shard_size="1KB") as manager:
        for step in steps:
            manager.save(step, STATE)


def hide_shards(folder: Path) -> list[Path]:
    """Give the shards the names that they have while an index of the same names is replaced."""
    index = json.loads((folder / INDEX).read_text())
    hidden = {}
    for name in set(index["weight_map"].values()):
        hidden[name] = f".{name}.0123456789abcdef.tmp"
        (folder / name).rename(folder / hidden[name])
    index["weight_map"] = {key: hidden[name] for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return [folder / name for name in hidden.values()]


@pytest.mark.parametrize("index", ["names", "damaged"])
def test_files_that_an_index_lists_are_kept(tmp_path: Path, index: str) -> None:
    """A kill while a step is published again may leave temporary files that its index lists. They
    stay, and so do all of a folder whose index can't be read."""
    save_steps(tmp_path, 1)
    hidden = hide_shards(tmp_path / "step-1")
    unused = tmp_path / "step-1" / ".checkpoint.safetensors.fedcba9876543210.tmp"
    unused.write_bytes(b"x")
    if index == "damaged":
        (tmp_path / "step-1" / INDEX).write_text("{")
    with CheckpointManager(tmp_path) as manager:
        assert all(path.exists() for path in hidden)
        assert unused.exists() == (index == "damaged")
        if index == "names":
            assert manager.resume({"a": {"x": torch.zeros(300)}}) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_that_is_saved_while_old_ones_are_listed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """keep_last never deletes a checkpoint that was saved after the save that it follows."""
    save_steps(tmp_path, 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep_last=1)
    list_them = manager.checkpoints

    def save_meanwhile() -> Any:
        monkeypatch.setattr(manager, "checkpoints", list_them)
        found = list_them()
        handle = manager.save(3, {"a": 7})
        assert handle is not None
        handle.wait()
        while manager._is_saving(3):
            time.sleep(0.01)
        return found if moment == "after" else list_them()

    monkeypatch.setattr(manager, "checkpoints", save_meanwhile)
    manager.save(4, STATE)
    manager.wait()
    manager.close()  # waits for what follows the save of step 3
    assert [one.step for one in manager.checkpoints()] == [3, 4]
    assert manager.checkpoints()[0].load() == {"a": 7}


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_folder_that_cannot_be_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: type[OSError]
) -> None:
    """Another user may own it, or another thread may delete it meanwhile, which is no warning."""
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-2" / INDEX).unlink()
    (tmp_path / "step-2" / SHARD).unlink()
    list_files = Path.iterdir

    def refuse(path: Path) -> Any:
        if path.name == "step-2":
            raise error(1, "refused", str(path))
        return list_files(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with CheckpointManager(tmp_path) as manager:
        newest = manager.latest()
        assert newest is not None and newest.step == 1
        assert manager.resume({"a": {"x": torch.zeros(300)}}) == 1
    assert ("step-2 is passed over" in caplog.text) == (error is PermissionError)


def remove_all(folder: Path) -> None:
    """Delete all files."""
    for path in folder.iterdir():
        path.unlink()


def put_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def put_link(path: Path) -> None:
    """Put a link to a missing file in the place of a file."""
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / SHARD).unlink(),
    lambda folder: put_folder(folder / SHARD),
    lambda folder: put_folder(folder / INDEX),
    lambda folder: put_link(folder / SHARD),
    remove_all,
], ids=["missing shard", "folder for shard", "folder for index", "link to nothing", "no files"])
def test_an_incomplete_checkpoint_of_a_chosen_step(tmp_path: Path, damage: Any) -> None:
    """FileNotFoundError says that there is no checkpoint of the step, or no manifest."""
    save_steps(tmp_path, 1, 2)
    with CheckpointManager(tmp_path) as manager:
        damage(tmp_path / "step-2")
        for verify in (False, True):
            with pytest.raises(SafetensorError, match="step-2") as caught:
                manager.resume({"a": {"x": torch.zeros(300)}}, step=2, verify=verify)
            assert not isinstance(caught.value, OSError)
            assert manager.resume({"a": {"x": torch.zeros(300)}}, verify=verify) == 1


def change_metadata(folder: Path, ranks: str) -> None:
    """Write a checkpoint of so many ranks, as its metadata say."""
    for path in folder.iterdir():
        path.unlink()
    save_file({"x": torch.ones(2)}, folder / "checkpoint.safetensors",
              {"step": folder.name[5:], "ranks": ranks})


def change_description(folder: Path, text: bytes) -> None:
    """Damage what describes the state."""
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b'{"a"', text))


def put_long_link(path: Path) -> None:
    """Put a link with a name that is too long in the place of a file."""
    path.unlink()
    path.symlink_to("a" * 300)


@pytest.mark.parametrize("damage", [
    lambda folder: change_metadata(folder, "0"),
    lambda folder: change_metadata(folder, "-1"),
    lambda folder: change_metadata(folder, "1000000000000"),
    lambda folder: change_metadata(folder, "two"),
    lambda folder: change_metadata(folder, "1"),
    lambda folder: change_description(folder, b"{{a\""),
    lambda folder: change_description(folder, b"\xff\"a\""),
    lambda folder: put_long_link(folder / SHARD),
], ids=["no ranks", "-1 ranks", "many ranks", "ranks in words", "other file", "JSON", "UTF-8",
        "long link"])
def test_a_damaged_checkpoint_of_a_chosen_step(tmp_path: Path, damage: Any) -> None:
    """It is a SafetensorError if it is asked for, and is passed over if not."""
    save_steps(tmp_path, 1, 2)
    with CheckpointManager(tmp_path) as manager:
        damage(tmp_path / "step-2")
        with pytest.raises(SafetensorError, match="step-2"):
            manager.resume({"a": {"x": torch.zeros(300)}}, step=2)
        assert manager.resume({"a": {"x": torch.zeros(300)}}) == 1


def test_a_folder_for_the_manifest(tmp_path: Path) -> None:
    """It is damage as well."""
    save_steps(tmp_path, 1)
    put_folder(tmp_path / "step-1" / "model.manifest")
    with CheckpointManager(tmp_path) as manager, pytest.raises(SafetensorError, match="manifest"):
        manager.resume({"a": {"x": torch.zeros(300)}}, step=1, verify=True)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("ask, answer", [
    (lambda manager: manager.latest().step, 3),
    (lambda manager: [one.step for one in manager.checkpoints()], [3]),
    (lambda manager: manager.best().step, 3),
    (lambda manager: manager.resume({"a": {"x": torch.zeros(300)}}), 3),
], ids=["latest", "checkpoints", "best", "resume"])
def test_a_checkpoint_that_is_replaced_while_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    ask: Any, answer: Any, moment: str
) -> None:
    """Another process saves a later step, and deletes those that were listed."""
    others = tmp_path / "others"
    with CheckpointManager(others, max_shard_size="1KB") as manager:
        for step in (1, 2, 3):
            manager.save(step, STATE, metric=step)
    run = tmp_path / "run"
    manager = CheckpointManager(run)
    (others / "step-1").rename(run / "step-1")
    is_folder = Path.is_dir

    def replace(path: Path) -> bool:
        found = is_folder(path)
        step = int(path.name[5:]) if path.parent == run else 0
        if found and step in (1, 2):
            (others / f"step-{step + 1}").rename(run / f"step-{step + 1}")
            path.rename(others / path.name)
        return found if moment == "after" else is_folder(path)

    monkeypatch.setattr(Path, "is_dir", replace)
    assert ask(manager) == answer
    assert not caplog.records
    manager.close()


def test_a_fifo_in_the_place_of_an_index(tmp_path: Path) -> None:
    """The start does not wait for a writer to open the FIFO."""
    save_steps(tmp_path, 1)
    os.mkfifo(tmp_path / "step-1" / "model.safetensors.index.json")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(15)  # ends the test if it waits
    try:
        CheckpointManager(tmp_path).close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "step-1" / INDEX).exists()


def test_a_folder_that_changes_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first listing shows neither the new step nor the old one, which is deleted after it."""
    (tmp_path / "step-1").mkdir()
    os.utime(tmp_path, ns=(0, 0))
    real = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        found = [path for path in real(self) if path.name != "step-1"]
        if (tmp_path / "step-1").exists():
            (tmp_path / "step-2").mkdir()
            (tmp_path / "step-1").rename(tmp_path / "old")
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [step for step, _ in checkpoint_folders.find_steps(tmp_path)] == [2]


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()],
                         ids=["files", "memory"])
def test_checkpoints_that_cannot_be_read_are_not_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A training that began again with step 0 would lose what they hold."""
    read = training.read_checkpoint
    refused: set[int] = {1, 2}

    def read_checkpoint(path: Path, step: int) -> Any:
        if step in refused:
            raise error
        return read(path, step)

    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"x": step})
        manager.wait()
        monkeypatch.setattr(training, "read_checkpoint", read_checkpoint)
        for call in (manager.latest, lambda: manager.resume({"x": 0})):
            with pytest.raises(type(error)):
                call()
        refused.remove(1)
        assert manager.resume({"x": 0}) == 1


def test_checkpoints_that_are_always_deleted_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "find_newest", lambda folder: [(1, folder / "step-1")])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(SafetensorError, match="delete checkpoints faster than"):
            manager.resume({"x": 0})


@pytest.mark.parametrize("error", [RuntimeError("preempted"), TimeoutError("preempted")])
@pytest.mark.parametrize("call", [
    lambda manager: manager.latest(),
    lambda manager: manager.best(),
    lambda manager: manager.checkpoints(),
    lambda manager: manager.resume({"x": 0}),
    lambda manager: manager.save(2, {"x": 0}),
], ids=["latest", "best", "checkpoints", "resume", "save"])
def test_exceptions_of_signal_handlers_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, error: Exception
) -> None:
    """They say nothing about the checkpoint that was being read."""
    def read_checkpoint(path: Path, step: int) -> Any:
        raise error

    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(2, {"x": 2}, metric=1)
        manager.wait()
        for module in (training, checkpoint_folders, old_checkpoints):
            monkeypatch.setattr(module, "read_checkpoint", read_checkpoint)
        with pytest.raises(type(error), match="preempted"):
            call(manager)
        monkeypatch.undo()
        assert manager.resume({"x": 0}) == 2


def test_exceptions_of_signal_handlers_while_folders_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1})
        manager.wait()

        def interrupted(_path: Any) -> Any:
            raise TimeoutError("preempted")

        monkeypatch.setattr(checkpoint_folders, "_indexed_files", interrupted)
        with pytest.raises(TimeoutError, match="preempted"):
            CheckpointManager(tmp_path)
        monkeypatch.setattr(Path, "iterdir", interrupted)
        with pytest.raises(TimeoutError, match="preempted"):
            checkpoint_folders._has_files(tmp_path)
        monkeypatch.undo()


def test_a_file_is_not_a_folder_of_checkpoints(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError) as caught:
            CheckpointManager(path)
        assert "Not a directory" in str(caught.value)
