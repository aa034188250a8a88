# SPDX-License-Identifier: Apache-2.0
"""Exceptions of signal handlers reach the program; they are neither lost nor the save's error."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fastsafetensors.torch  # noqa: E402
from fastsafetensors import _core  # noqa: E402
from fastsafetensors._ranks import ranks_async  # noqa: E402
from fastsafetensors._saving import save_handles  # noqa: E402
from fastsafetensors._saving.save_handles import SaveHandle, ThreadSave  # noqa: E402
from fastsafetensors._saving.running_saves import running  # noqa: E402
from fastsafetensors._saving.save_handles import was_cancelled  # noqa: E402
from fastsafetensors.distributed import save_on_ranks_async  # noqa: E402
from fastsafetensors.torch import load_file, save_file_async  # noqa: E402

COUNT = 20 << 20


class PreemptedError(Exception):
    """What a program's handler raises."""


KINDS = (PreemptedError, TimeoutError, SystemExit, KeyboardInterrupt)


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """The signals whose handler was called."""
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGINT)}
    yield []
    for one, handler in before.items():
        signal.signal(one, handler)


def _raise_at_signal(calls: list[int], kind: type[BaseException]) -> None:
    def handle(number: int, _frame: Any) -> None:
        calls.append(number)
        if number == signal.SIGUSR1:
            raise kind("of the handler")

    for one in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(one, handle)


class SignalledSave:
    """An AsyncSave; a signal arrives during the first call of a method, before it waits."""

    method = ""

    def __init__(self) -> None:
        """Make the real one."""
        self._core = _core.AsyncSave()
        self._left = 1

    def __getattr__(self, name: str) -> Any:
        """Return what the real one has; its method sends the signal first."""
        found = getattr(self._core, name)
        if name != self.method:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "start":
                found(*arguments, **options)
            if self._left:
                self._left = 0
                signal.raise_signal(signal.SIGUSR1)
            return None if name == "start" else found(*arguments, **options)

        return call


def _patched_core(method: str) -> Any:
    class Core:
        AsyncSave = type("AsyncSave", (SignalledSave,), {"method": method})

        def __getattr__(self, name: str) -> Any:
            return getattr(_core, name)

    return Core()


def _send_in_checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each check that tensors are unchanged sends a signal first; return whether it was here."""
    here: list[bool] = []

    def watch(_tensors: Any) -> Callable[[], bool]:
        def is_unchanged() -> bool:
            here.append(threading.current_thread() is threading.main_thread())
            os.kill(os.getpid(), signal.SIGUSR1)
            return True

        return is_unchanged

    monkeypatch.setattr(fastsafetensors.torch, "watch_changes", watch)
    return here


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_while_tensors_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int], kind: type[BaseException]
) -> None:
    """The exception is raised once, not in the check, and the save succeeds."""
    _raise_at_signal(calls, kind)
    here, tensor, raised = _send_in_checks(monkeypatch), torch.ones(COUNT), 0
    for number in range(1, 6):  # this thread or another one copies the last bytes, and checks
        with running.begun() as begun:
            try:
                save_file_async({"x": tensor}, tmp_path / "a", stage="lazy").before_step()
                while len(calls) < number:
                    time.sleep(0.001)
            except kind:
                raised += 1
        error = begun[-1].exception()
        # On a busy machine the check is over before the call returns, which is cancelled then.
        assert error is None or was_cancelled(error)
        assert raised == len(calls) == number
    assert here == [False] * 5


def test_a_handler_that_saves_while_tensors_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """Its save comes after the one that is checked, for whose end it waits."""
    def save_and_wait(_number: int, _frame: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            save_file_async({"y": torch.ones(3)}, tmp_path / "a").wait()

    signal.signal(signal.SIGUSR1, save_and_wait)
    _send_in_checks(monkeypatch)
    for _ in range(5):
        calls.clear()
        handle = save_file_async({"x": torch.ones(COUNT)}, tmp_path / "a", stage="lazy")
        handle.before_step()
        handle.wait()
        while not calls:
            time.sleep(0.001)
        assert list(load_file(tmp_path / "a")) == ["y"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_check_of_tensors_that_always_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception is no signal handler's: it is printed, and fails the save."""
    def is_unchanged() -> bool:
        raise PreemptedError

    monkeypatch.setattr(fastsafetensors.torch, "watch_changes", lambda _tensors: is_unchanged)
    handle = save_file_async({"x": torch.ones(3)}, tmp_path / "a", stage="lazy")
    handle.before_step()
    assert "was changed" in str(handle.exception())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("call", "method"), [
    ("before_step", "stage"), ("wait_staged", "stage"), ("wait", "wait"), ("exception", "wait"),
    ("cancel", "wait")])
def test_a_signal_during_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int], kind: type[BaseException],
    call: str, method: str
) -> None:
    """The handler's exception is raised, also by calls that return the save's error."""
    _raise_at_signal(calls, kind)
    monkeypatch.setattr(save_handles, "_core", _patched_core(method))
    handle = save_file_async({"x": torch.ones(3)}, tmp_path / "a", stage="lazy")
    while not handle.done():
        time.sleep(0.001)
    with pytest.raises(kind, match="^of the handler$") as raised:
        getattr(handle, call)()
    assert type(raised.value) is kind
    assert handle.exception() is None and len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("save", ["file", "ranks"])
def test_a_signal_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int], kind: type[BaseException],
    save: str
) -> None:
    """The call raises the exception, and its save is cancelled or has ended."""
    _raise_at_signal(calls, kind)
    with (monkeypatch.context() as patched, running.begun() as begun,
          pytest.raises(kind, match="^of the handler$")):
        patched.setattr(save_handles, "_core", _patched_core("start"))
        if save == "file":
            save_file_async({"x": torch.ones(3)}, tmp_path / "a")
        else:
            save_on_ranks_async({"x": torch.ones(3)}, tmp_path / "a")
    error = begun[-1].exception()
    assert error is None or was_cancelled(error)
    save_on_ranks_async({"x": torch.ones(3)}, tmp_path / "b").wait(60)
    assert load_file(tmp_path / "b" / "model.safetensors")["x"].tolist() == [1, 1, 1]


class LateSave:
    """An AsyncSave whose start() returns after the save's end, and then a signal arrives."""

    def __init__(self) -> None:
        """Make the real one."""
        self._core = _core.AsyncSave()
        self._has_returned = False

    def __getattr__(self, name: str) -> Any:
        """Return what the real one has."""
        return getattr(self._core, name)

    def is_started(self) -> bool:
        """Whether start() has returned."""
        return self._has_returned

    def start(self, *arguments: Any, **options: Any) -> None:
        """Start it, and wait."""
        self._core.start(*arguments, **options)
        while self._core.stats()["state"] not in ("done", "failed"):
            time.sleep(0.001)
        self._has_returned = True
        signal.raise_signal(signal.SIGUSR1)


def test_a_signal_at_a_start_that_the_save_overtakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """The exception is raised all the same, and the save of the ranks is in place."""
    _raise_at_signal(calls, PreemptedError)
    core = _patched_core("start")
    core.AsyncSave = LateSave
    with monkeypatch.context() as patched, pytest.raises(PreemptedError):
        patched.setattr(save_handles, "_core", core)
        save_on_ranks_async({"x": torch.ones(3)}, tmp_path / "a")
    assert load_file(tmp_path / "a" / "model.safetensors")["x"].tolist() == [1, 1, 1]


def test_a_signal_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its TimeoutError stays one, and no save was begun."""
    def interrupted(*_arguments: Any) -> Any:
        raise TimeoutError("of the handler")

    monkeypatch.setattr(save_handles.Staging, "settings", interrupted)
    with pytest.raises(TimeoutError, match="^of the handler$"):
        save_file_async({"x": torch.ones(3)}, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_signal_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """The other ranks will hear of a call that the handler's exception has ended."""
    _raise_at_signal(calls, PreemptedError)

    def place(*_arguments: Any, **_options: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    group = threading.Event()  # stands for one, which the call does not use before
    monkeypatch.setattr(ranks_async, "Rows", place)
    with pytest.raises(PreemptedError):
        save_on_ranks_async({"x": torch.ones(3)}, tmp_path / "a", group)
    saves = ranks_async._saves_of(group)
    assert saves.queue == [] and saves.interrupted == {0: "a"}


def test_a_signal_during_the_wait_for_a_thread(calls: list[int]) -> None:
    """Also for a save that a thread of Python's does."""
    _raise_at_signal(calls, TimeoutError)
    go = threading.Event()
    handle = ThreadSave(lambda: go.wait(60), "a")
    thread = threading.Timer(0.05, lambda: signal.pthread_kill(
        threading.main_thread().ident, signal.SIGUSR1))  # type: ignore[arg-type]
    thread.start()
    with pytest.raises(TimeoutError, match="^of the handler$"):
        handle.exception()
    go.set()
    assert handle.exception() is None


def _wait_until_done(handle: SaveHandle) -> None:
    while not handle.done():
        time.sleep(0.001)


def _poll_progress(handle: SaveHandle) -> None:
    while handle.progress.state not in ("done", "failed"):
        time.sleep(0.001)


def _wait(handle: SaveHandle) -> None:
    try:
        handle.wait()
    except Exception as error:
        del error


@pytest.mark.parametrize("stage", ["lazy", "none"])
@pytest.mark.parametrize("way", [
    _wait_until_done, _poll_progress, _wait, SaveHandle.exception, SaveHandle.cancel])
@pytest.mark.parametrize("place", ["a", "missing/a"])
def test_tensors_of_a_save_that_has_ended(
    tmp_path: Path, stage: str, way: Callable[[SaveHandle], object], place: str
) -> None:
    """The handle does not keep them when it knows the end."""
    tensor = torch.ones(1 << 20)
    seen = weakref.ref(tensor)
    handle = save_file_async({"x": tensor}, tmp_path / place, stage=stage)
    del tensor
    way(handle)
    gc.collect()
    assert seen() is None and handle.done()


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("stage", ["copy", "lazy", "none"])
def test_a_save_after_the_handlers_of_the_exit(
    tmp_path: Path, stage: str, imported: bool,
) -> None:
    """An atexit handler that was registered before the import starts it and does not wait."""
    program = """
import atexit, sys
def save():
    global handle, tensors
    from fastsafetensors.torch import save_file_async
    tensors = {"x": torch.full((COUNT,), 7.0)}
    handle = save_file_async(tensors, sys.argv[1], stage=sys.argv[2])
atexit.register(save)
import torch
""".replace("COUNT", "8000000")
    if imported:  # otherwise the handler imports the package
        program += "from fastsafetensors.torch import save_file_async\n"
    path = tmp_path / "a"
    subprocess.run([sys.executable, "-c", program, path, stage], check=True, timeout=60)
    assert bool((load_file(path)["x"] == 7).all())


@pytest.mark.parametrize("attempt", range(3))
def test_a_late_save_is_written_before_its_call_returns(tmp_path: Path, attempt: int) -> None:
    """With numpy the interpreter ends sooner than with torch."""
    program = """
import atexit, sys
atexit.register(lambda: save_file_async(
    {"x": np.full(40 << 20, 7, np.uint8)}, sys.argv[1], durable=True))
import numpy as np
from fastsafetensors.numpy import save_file_async
"""
    path = tmp_path / "a"
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=100)
    assert path.stat().st_size > 40 << 20


LATE = {
    "early handler": """
import atexit, sys
atexit.register(lambda: save_file_async({"x": np.zeros(9)}, sys.argv[1]))
import numpy as np
from fastsafetensors.numpy import save_file_async
""",
    "handles that are kept": """
import sys, time
import numpy as np
from fastsafetensors.numpy import save_file_async
keep = [save_file_async({"x": np.zeros(9)}, sys.argv[1])]
while not keep[0].done():
    time.sleep(0.01)
keep.append(save_file_async({"x": np.zeros(9)}, sys.argv[2]))
""",
    "the next save": """
import os, sys, time
import numpy as np
from fastsafetensors.numpy import save_file_async
handle = save_file_async({"x": np.zeros(9)}, sys.argv[1])
while not handle.done():
    time.sleep(0.01)
del handle
other = save_file_async({"x": np.zeros(9)}, sys.argv[2])
os._exit(0)
""",
    "a with block": """
import sys, time
import numpy as np
from fastsafetensors.numpy import save_file_async
try:
    with save_file_async({"x": np.zeros(9)}, sys.argv[1]) as handle:
        while not handle.done():
            time.sleep(0.01)
        raise KeyError
except KeyError:
    pass
""",
    "cancel()": """
import sys, time
import numpy as np
from fastsafetensors.numpy import save_file_async
handle = save_file_async({"x": np.zeros(9)}, sys.argv[1])
while not handle.done():
    time.sleep(0.01)
assert not handle.cancel()
""",
}


@pytest.mark.parametrize("when", LATE)
def test_a_failure_that_nobody_heard_is_logged_once(tmp_path: Path, when: str) -> None:
    program = LATE[when]
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "none/a", tmp_path / "b"],
                          timeout=100, text=True, capture_output=True)
    assert done.returncode == 0
    assert done.stderr.count("its result was never requested") == 1, done.stderr


def test_no_save_begins_in_a_finalizer_at_the_end(tmp_path: Path) -> None:
    """Of objects that the interpreter frees last, when no other thread can go on."""
    program = """
import sys, torch
from fastsafetensors.distributed import save_on_ranks_async
class Trainer:
    def __init__(self):
        self.state, self.save, self.place = {"x": torch.zeros(9)}, save_on_ranks_async, sys.argv[1]
    def __del__(self):
        self.save(self.state, self.place)
trainer = Trainer()
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "m"], timeout=100, text=True,
                          capture_output=True)
    assert done.returncode == 0 and "no asynchronous save can begin" in done.stderr, done.stderr


def test_saves_of_a_daemon_thread_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Those whose call has returned are written, and no call finds its handle closed."""
    program = """
import atexit, itertools, os, sys, threading, time
atexit.register(time.sleep, 0.2)
import numpy as np
from fastsafetensors.numpy import save_file_async
def save():
    for number in itertools.count():
        save_file_async({"x": np.full(8 << 20, 1, np.uint8)}, f"{sys.argv[1]}/{number}",
                        durable=True).before_step()
        os.write(1, f"{number} ".encode())
        time.sleep(0.005)
threading.Thread(target=save, daemon=True).start()
time.sleep(0.1)
"""
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", program, folder], timeout=100, text=True,
                              capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        missing = [number for number in done.stdout.split() if not (folder / number).exists()]
        assert not missing, (attempt, done.stdout)


@pytest.mark.parametrize("stage", ["copy", "lazy", "none"])
def test_tensors_of_a_save_that_has_failed(tmp_path: Path, stage: str) -> None:
    """before_step() lets go of them when the save has ended."""
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    handle = save_file_async({"x": tensor}, tmp_path / "missing/a", stage=stage)
    del tensor
    for _ in range(10_000):
        handle.before_step()
        if alive() is None:
            return
        time.sleep(0.001)
    raise AssertionError("the tensor is kept")
