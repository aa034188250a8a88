# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, or a signal handler that saves, at each line of the call that starts a save."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_rank_faults import COMMON, run_ranks

torch = pytest.importorskip("torch")

from fastsafetensors._ranks import ranks_async  # noqa: E402
from fastsafetensors._ranks.ranks_async import EmptySave, JointSave, wait_for_saves  # noqa: E402
from fastsafetensors._saving import background  # noqa: E402

# Calls `act` before a line, or a return, of the library's Python code in the main thread.
AT_LINES = """
import faulthandler, itertools, linecache, os, sys
faulthandler.dump_traceback_later(300, exit=True)  # a save that never ends

def with_act_at(number, modules, act, call):
    "Return what call() returns, and whether act() was called: at the line of this number."
    left = [number]
    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(modules):
            return None
        # Python calls no signal handler after "try:" or "pass", nor right before the end of "with".
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event in ("line", "return") and not source.startswith(("try:", "with ", "pass")):
            left[0] -= 1
            if left[0] == 0:
                act()
        return trace
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(None)
    return result, left[0] <= 0
"""

INTERRUPTED = COMMON + AT_LINES + """
import logging
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.training import CheckpointManager
logging.getLogger("fastsafetensors").setLevel(100)
how = sys.argv[5]
MODULES = ("ranks_async.py", "training.py", "checkpoint_ranks.py", "watcher.py")
side = dist.new_group(backend="gloo")
good = {"x": torch.ones(3)}

def interrupt():
    raise KeyboardInterrupt

if how == "manager":
    manager = CheckpointManager(f"{folder}/saved", group=side, keep_last=1)
    step = itertools.count(1)
    call = lambda: manager.save(next(step), good)
else:
    state = good if how == "tensors" else {"x": 3}
    call = lambda: save_on_ranks_async(state, f"{folder}/saved", side)
errors = []  # with the frames of the interrupted calls
for number in itertools.count(1):
    try:
        if not with_act_at(number, MODULES, interrupt, call)[1]:
            break
    except KeyboardInterrupt as error:
        errors.append(error)
    save_on_ranks_async(good, f"{folder}/next", side).wait()
    if how == "manager":
        manager.before_step()  # lets go of the handles
        manager.wait()
assert len(errors) > 20, len(errors)
finish()
"""

# Ctrl-C in one call on some ranks; later calls have tensors of other values.
ON_SOME_RANKS = COMMON + """
import faulthandler, signal, threading
from fastsafetensors import training
from fastsafetensors._checkpoints import checkpoint_ranks
from fastsafetensors._ranks import ranks_async
from fastsafetensors.distributed import save_on_ranks_async
from fastsafetensors.torch import load_file
from fastsafetensors.training import CheckpointManager
faulthandler.dump_traceback_later(300, exit=True)
side = dist.new_group(backend="gloo")
how = sys.argv[5]
manager = CheckpointManager(f"{folder}/steps", group=side)

def call(value, name="model"):
    if how == "manager":
        return manager.save(value, {"x": torch.full((3,), float(value))})
    state = {f"{name}{rank}": torch.full((3,), float(value))}
    return save_on_ranks_async(state, f"{folder}/{name}", side)

def interrupted(value, ranks, name="model", at=None):
    "Call on all ranks; the handle, or None on the ranks that Ctrl-C interrupts, in a function."
    if rank not in ranks:
        return call(value, name)
    place = at or ((ranks_async, "make_rows") if how == "tensors" else
                   (checkpoint_ranks, "encode_state"))
    before = getattr(*place)

    def interrupt(*args, **options):
        setattr(*place, before)
        raise KeyboardInterrupt

    setattr(*place, interrupt)
    try:
        call(value, name)
    except KeyboardInterrupt:
        return None
    raise AssertionError("not interrupted")

def fails(handle, other):
    "The save has failed because of Ctrl-C on another rank."
    if handle is None:
        return
    try:
        handle.wait()
    except RankError as error:
        word = "Ctrl-C" if how == "tensors" else "ranks differ"
        assert word in str(error) and f"rank {other}" in str(error), error
    else:
        raise AssertionError("the save has not failed")

def is_saved(value, name="model", handle=None):
    (handle or call(value, name)).wait()
    dist.barrier()
    found = load_file(f"{folder}/{name}/model.safetensors.index.json")
    assert len(found) == size and all(t.eq(value).all() for t in found.values()), found
    dist.barrier()

if how == "tensors":
    is_saved(1)
    first = interrupted(2, [1])
    second = call(3)
    fails(first, 1)
    is_saved(3, handle=second)
    interrupted(4, range(size))
    is_saved(5)
    # Rank 0 alone has called a save; all save elsewhere, and the ranks are in step again.
    if rank == 0:
        interrupted(6, [0])
    is_saved(7, "other")
    first = interrupted(8, [1])
    second = call(9)
    fails(first, 1)
    is_saved(9, handle=second)
    # Two ranks, in calls of their own.
    first, second, third = interrupted(10, [0]), interrupted(11, [1]), call(12)
    fails(first, 0)
    fails(second, 1)
    is_saved(12, handle=third)
    # An argument that is an error on one rank is one call as well.
    try:
        save_on_ranks_async({}, folder, side, timeout="1" if rank == 0 else None).wait()
    except (RankError, TypeError):
        pass
    first, second = interrupted(13, [0]), call(14)
    fails(first, 0)
    is_saved(14, handle=second)
    # Before the call has its number, and before it knows the folder.
    for at in ((ranks_async, "_saves_of"), (ranks_async, "JointSave"),
               (ranks_async, "make_request")):
        first, second = interrupted(15, [1], at=at), call(16)
        fails(first, 1)
        is_saved(16, handle=second)
    # While the call with the wrong argument waits for the others.
    if rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            save_on_ranks_async({}, folder, side, timeout="1")
        except KeyboardInterrupt:
            pass
        first = None
    else:
        time.sleep(1.0)
        first = call(17)
    second = call(18)
    assert first is None or isinstance(first.exception(), RankError), first.exception()
    is_saved(18, handle=second)
else:
    call(1).wait()
    (interrupted(2, [1]) or call(2)).wait()  # rank 1 repeats the step
    step = 3
    for at in (None, (checkpoint_ranks, "JointSave"), (training, "step_number"),
               (ranks_async, "start_rows"), (ranks_async, "RanksSave")):
        first = interrupted(step, [1], at=at)
        second = call(step + 1)
        fails(first, 1)
        assert isinstance(second.exception(), RankError)
        for later in (2, 3):
            try:
                call(step + later).wait()
            except RuntimeError as error:  # of the earlier saves, on one rank or another
                assert "ranks differ" in str(error), error
        call(step + 4).wait()
        steps = [one.step for one in manager.checkpoints()]
        assert steps[-1] == step + 4 and not {step, step + 1} & set(steps), steps
        step += 5
    dist.barrier()
finish()
"""

REENTERED = AT_LINES + """
import torch
from fastsafetensors import metrics
from fastsafetensors.torch import load_file, save_file_async
from fastsafetensors.training import CheckpointManager
folder, how = sys.argv[1:]
MODULES = ("save_handles.py", "training.py", "background.py", "watcher.py", "counters.py",
           "threading.py")
state = {"x": torch.ones(3)}
metrics.enable()
manager = CheckpointManager(folder, manifest=False)
step = itertools.count(1)

def save():
    if how == "manager":
        manager.save(next(step), state)
        manager.check()
    else:
        save_file_async(state, f"{folder}/a").wait()

def handle_signal():
    if how == "manager":
        manager.save(10_000 + next(step), state)
        manager.wait()
    else:
        save_file_async(state, f"{folder}/b").wait()

for number in itertools.count(1):
    if not with_act_at(number, MODULES, handle_signal, save)[1]:
        break
    manager.wait()
    if how == "manager":
        assert len(manager.checkpoints()) == 2 * number, number
assert number > 20, number
"""


class End:
    """Waiting for a save that has already ended."""

    def __init__(self, waits: list[Any], name: str) -> None:
        """Keep a list that notes the waits."""
        self._waits, self._name = waits, name

    def wait(self, _seconds: float) -> bool:
        """Note the wait."""
        self._waits.append(self._name)
        return True


class Group:
    """A group, for the order of its saves."""


@pytest.mark.parametrize("how", ["tensors", "errors", "manager"])
def test_an_interrupted_save_of_ranks_blocks_no_other(tmp_path: Path, how: str) -> None:
    """The next save of the group ends, though the interrupted one will never."""
    run_ranks(INTERRUPTED, tmp_path, 1, how)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["tensors", "manager"])
def test_ranks_join_no_save_of_another_call(tmp_path: Path, how: str, ranks: int) -> None:
    """After Ctrl-C on some ranks, the tensors of a model are of one call."""
    run_ranks(ON_SOME_RANKS, tmp_path, ranks, how)


@pytest.mark.parametrize("how", ["files", "manager"])
def test_a_signal_handler_may_save(tmp_path: Path, how: str) -> None:
    """No lock that it needs is held by the call that it interrupts, and no save is lost."""
    done = subprocess.run([sys.executable, "-c", REENTERED, tmp_path, how], timeout=600,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_save_that_leaves_keeps_the_order_of_the_others() -> None:
    """The third save of a group waits for the first, when the second has left."""
    group, waits = Group(), []  # type: ignore[var-annotated]
    first, second, third = saves = [JointSave(group, None) for _ in range(3)]
    for one in saves:
        one.enter()
    first.end = End(waits, "first")  # type: ignore[assignment]
    third.end = End(waits, "third")  # type: ignore[assignment]
    second.leave()
    wait_for_saves(group, third._place_in_queue)
    assert waits == ["first"]
    wait_for_saves(group)
    assert waits == ["first", "first", "third"]


def test_nobody_waits_for_a_save_that_does_not_exist_any_more() -> None:
    """Also if it is deleted during the wait."""
    group = Group()
    saves = [JointSave(group, None) for _ in range(2)]
    for one in saves:
        one.enter()

    class Abandoned:
        def wait(self, _seconds: float) -> bool:
            saves.clear()
            return False

    saves[0].end = Abandoned()  # type: ignore[assignment]
    del one
    wait_for_saves(group)
    assert ranks_async._saves_of(group).queue == []


def test_an_interrupted_part_without_files_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when its thread is started."""
    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    joint = JointSave(Group(), None)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("_thread.start_new_thread", interrupt)
        EmptySave(joint, "a", ValueError("a"))
    wait_for_saves(joint.group)
    assert joint.end.is_set()


@pytest.mark.parametrize("act", ["set", "wait"])
def test_a_signal_handler_may_use_what_the_program_waits_for(act: str) -> None:
    """At each line of wait() and of set(), with other threads that wait."""
    for method in ("wait", "set"):
        for number in itertools.count(1):
            end = background.OneTimeEvent()
            others = [threading.Thread(target=end.wait) for _ in range(2)]
            for other in others:
                other.start()
            left = [number]

            def trace(frame: Any, event: str, _argument: Any, end: Any = end, left: Any = left
                      ) -> Any:
                if frame.f_code.co_filename not in (background.__file__, threading.__file__):
                    return None
                left[0] -= event == "line"
                if event == "line" and left[0] == 0:
                    end.set() if act == "set" else end.wait(0.001)
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                end.wait(0.001) if method == "wait" else end.set()
            finally:
                sys.settrace(before)
            end.set()
            for other in others:
                other.join()
            assert end.is_set() and end.wait() and not end._waiters
            if left[0] > 0:
                break
        assert number > 3, number
