# SPDX-License-Identifier: Apache-2.0
"""Handles of saves and managers of checkpoints in a fork's child, and after they were closed."""

import os

import pytest

from fastsafetensors import save_file_async
from fastsafetensors._saving.save_handles import ThreadSave


def in_child(check):
    """Run `check` in a fork's child; its error is this process's."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check()
            os.write(writer, b"good")
        except BaseException as error:
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read().decode()
    os.waitpid(child, 0)
    assert answer == "good"


def test_a_handle_of_the_parent(tmp_path, torch):
    handle = save_file_async({"a": torch.ones(4)}, tmp_path / "m")
    other = ThreadSave(lambda: 3, "folder")

    def check():
        for one, name in ((handle, tmp_path / "m"), (other, "folder")):
            assert repr(one) == str(one) == f"<SaveHandle {name}: of the parent process>"
            assert one.cancel() is False
            for use in (one.wait, one.done, lambda one=one: one.progress,
                        lambda one=one: one.stats):
                with pytest.raises(RuntimeError, match="started before fork.*the parent"):
                    use()

    in_child(check)
    handle.wait()
    other.wait()
    assert repr(handle) == f"<SaveHandle {tmp_path / 'm'}: done>"


def test_a_manager_of_the_parent(tmp_path, torch):
    from fastsafetensors.training import CheckpointManager

    state = {"model": {"a": torch.ones(4)}}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.wait()

        def check():
            for use in (lambda: manager.save(2, state), manager.wait):
                with pytest.raises(RuntimeError, match="CheckpointManager was made before fork"):
                    use()
            assert [one.step for one in manager.checkpoints()] == [1]
            manager.close()

        in_child(check)
        manager.save(3, state)
    assert [one.step for one in manager.checkpoints()] == [1, 3]
    with pytest.raises(ValueError, match="the CheckpointManager is closed. Make another one"):
        manager.save(4, state)
    manager.close()


@pytest.mark.parametrize("timeout, kind", [("1", TypeError), (True, TypeError), ([], TypeError),
                                           (-1, ValueError), (float("nan"), ValueError)], ids=repr)
def test_timeouts_are_seconds(timeout, kind, tmp_path, torch):
    from fastsafetensors import deltas

    handle = save_file_async({"a": torch.ones(4)}, tmp_path / "m")
    other = ThreadSave(lambda: 3, "folder")
    for wait in (handle.wait, handle.wait_staged, other.wait,
                 lambda limit: deltas.pull(tmp_path, tmp_path, timeout=limit)):
        with pytest.raises(kind, match="^timeout must be"):
            wait(timeout)
    handle.wait(1e300)
    other.wait(1e300)


def test_the_timeout_of_ranks_is_for_all_waits_together(torch, monkeypatch):
    """Waits of 0.2 s each, of which none is longer than the limit, end when 0.5 s are used up."""
    import time

    from fastsafetensors import RankError
    from fastsafetensors._ranks import torch_group

    class Group:
        def size(self):
            return 2

        def rank(self):
            return 0

    class Work:
        def wait(self, limit):
            if limit.total_seconds() < 0.2:
                raise RuntimeError("Operation timed out!")
            time.sleep(0.2)

    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    for is_total, waits in ((False, 6), (True, 2)):
        group = torch_group.TorchProcessGroup(Group(), 0.5)
        if is_total:
            group.limit_waits()
        done = 0
        try:
            for _ in range(6):
                group._wait(Work, "the next step")
                done += 1
        except RankError:
            pass
        assert done == waits
    for timeout in ("1", -1):
        with pytest.raises((TypeError, ValueError), match="^timeout must be"):
            torch_group.TorchProcessGroup(Group(), timeout)
