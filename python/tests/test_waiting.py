# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and cancellation end every wait."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from fastsafetensors import ParallelLoader
from fastsafetensors.torch import save_file

# Reads after byte HOLD_FROM block while a certain file exists, like reads from an unreachable file
# server, and the page cache seems empty.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
ssize_t preadv64v2(int fd, const struct iovec *rooms, int count, off_t offset, int flags) {
    static ssize_t (*real)(int, const struct iovec *, int, off_t, int);
    if (!real) real = (ssize_t (*)(int, const struct iovec *, int, off_t, int))dlsym(RTLD_NEXT,
                                                                        "preadv64v2");
    const char *hold = getenv("HOLD");
    if (!(flags & RWF_NOWAIT) || !hold || access(hold, F_OK) != 0)
        return real(fd, rooms, count, offset, flags);
    errno = EAGAIN;
    return -1;
}
ssize_t preadv2(int fd, const struct iovec *rooms, int count, off_t offset, int flags) {
    return preadv64v2(fd, rooms, count, offset, flags);
}
ssize_t pread64(int fd, void *buffer, size_t size, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    const char *hold = getenv("HOLD"), *from = getenv("HOLD_FROM");
    while (offset >= (from ? atol(from) : 1 << 20) && hold && access(hold, F_OK) == 0)
        usleep(10000);
    return real(fd, buffer, size, offset);
}
ssize_t pread(int fd, void *buffer, size_t size, off_t offset) {
    return pread64(fd, buffer, size, offset);
}
"""

PROGRAM = """
import json, os, signal, sys, threading, time
import fastsafetensors, fastsafetensors.torch as fst
from fastsafetensors import _core, safe_open, ParallelLoader, SafeTensorsFileLoader

path, hold = sys.argv[1], os.environ["HOLD"]
OPTIONS = dict(mode="load", engine="pread")

def item():
    _core.Model(path).load(**OPTIONS).item(5)

def slow(model):  # our own engine for reads that the stand-in holds up
    load = model.load
    class Slow:
        def __getattr__(self, name):
            return getattr(model, name)
        def load(self, items=None, **options):
            return load(items, **{**options, **OPTIONS})
    return Slow()

def get_tensor():
    with safe_open(path, "pt", mode="load") as f:
        f._model = slow(f._model)
        f.get_tensor("t5")

def get_slice():
    with safe_open(path, "pt", mode="load") as f:
        f._model = slow(f._model)
        f.get_slice("t5")[1 << 10 :]  # a few bytes are read by the caller itself

def read_ahead():
    with safe_open(path, "pt", mode="load") as f:
        f._ahead._model = slow(f._ahead._model)
        f.read_ahead = None
        f._ahead._eager = True
        f.get_tensor("t5")

def load_file():
    fst.load_file(path, mode="load", engine="pread")

def parallel():
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    with ParallelLoader(None, [path], use_tqdm_on_load=False) as weights:
        for _ in weights:
            pass

def open_model():
    _core.Model(path)

def open_file():
    safe_open(path, "pt")

def open_index():  # which is at hand; what it leads to is not
    index = os.path.join(os.path.dirname(path), "m.safetensors.index.json")
    with open(index, "w") as file:
        json.dump({"weight_map": {f"t{i}": os.path.basename(path) for i in range(8)}}, file)
    _core.Model(index)

def fork_in_handler():  # the child has no helper that it could wait for
    def fork(*_):
        if os.fork() == 0:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.alarm(0)
    signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    before = os.getpid()
    try:
        _core.Model(path)
    except RuntimeError as error:
        assert os.getpid() != before and "forked" in str(error)
        with open(os.environ["HOLD"] + ".child", "w") as told:
            told.write("went on")
        os._exit(0)

def start():  # reads of a load before it starts threads
    model.load(mode="load", engine="direct").wait()

def small():  # what the page cache lacks, and is more than a few bytes
    model.load([("t5", [1 << 18], [1 << 19])], mode="load").wait()

def by_path():
    loader = SafeTensorsFileLoader(path)
    loader._model = slow(loader._model)
    loader.load()

model = _core.Model(path)
open(hold, "w").close()
main = threading.main_thread().ident

def interrupt():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    if os.path.exists(hold):
        os.unlink(hold)  # a wait that did not end: let it

threading.Thread(target=interrupt, daemon=True).start()
try:
    globals()[sys.argv[2]]()
    print("not interrupted")
except KeyboardInterrupt:
    print("in time" if os.path.exists(hold) else "late")
sys.stdout.flush()
if os.path.exists(hold):
    os.unlink(hold)
time.sleep(0.1)
print("alive")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Build the library that blocks reads."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that holds up reads")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    built = subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "shim.so",
                            folder / "shim.c", "-ldl"], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"the library that holds up reads does not build: {built.stderr[:200]}")
    return folder / "shim.so"


@pytest.fixture(scope="module")
def path(tmp_path_factory, torch):
    """A file of 8 tensors of 4 MiB, outside the page cache where that is possible."""
    path = tmp_path_factory.mktemp("m") / "m.safetensors"
    save_file({f"t{i}": torch.full((1 << 20,), float(i)) for i in range(8)}, path, durable=True)
    return path


@pytest.mark.parametrize("wait", ["item", "get_tensor", "get_slice", "read_ahead", "load_file",
                                  "parallel", "by_path", "open_model", "open_file",
                                  "open_index", "fork_in_handler", "start", "small"])
def test_an_interrupt_ends_the_wait(wait, shim, path, tmp_path):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "HOLD": str(tmp_path / "hold")}
    if wait in ("open_model", "open_file", "open_index", "fork_in_handler", "start", "small"):
        environment["HOLD_FROM"] = "0"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM), path, wait],
                          env=environment, capture_output=True, text=True, timeout=600)
    if done.stdout.startswith("not interrupted"):
        pytest.skip("these reads go another way on this machine")
    assert done.stdout.split("\n")[:2] == ["in time", "alive"], done.stdout + done.stderr
    if wait == "fork_in_handler":
        assert (tmp_path / "hold.child").read_text() == "went on"


def test_a_cancelled_iteration(path, torch):
    """The cancellation is raised, also while a thread waits for the next tensor."""
    steps = []

    class Slow(ParallelLoader):
        def _iterate(self):
            for item in super()._iterate():
                steps.append(item[0])
                threading_event.wait(0.2)
                yield item

    import threading

    threading_event = threading.Event()

    async def consume(loader):
        async for _ in loader:
            await asyncio.sleep(0)

    async def run():
        loader = Slow(None, [path], use_tqdm_on_load=False)
        task = asyncio.ensure_future(consume(loader))
        while not steps:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loader.close()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consume(Slow(None, [path], use_tqdm_on_load=False)), 0.1)

    asyncio.run(run())
    assert len(steps) < 16


def test_an_asynchronous_iteration_gives_all(path, torch):
    async def run():
        return {name: int(t[0]) async for name, t in ParallelLoader(None, [path],
                                                                    use_tqdm_on_load=False)}

    assert asyncio.run(run()) == {f"t{i}": i for i in range(8)}


def test_leaving_an_asynchronous_loop(path, torch):
    async def run():
        loader = ParallelLoader(None, [path], use_tqdm_on_load=False)
        stream = loader.__aiter__()
        async for name, _ in stream:
            break
        await stream.aclose()
        return name, [n async for n, _ in loader]

    first, names = asyncio.run(run())
    assert first == "t0" and len(names) == 8


def test_closed_loader_is_an_error(path):
    loader = ParallelLoader(None, [path], use_tqdm_on_load=False)
    loader.close()
    with pytest.raises(Exception, match="ParallelLoader is closed"):
        loader.iterate_weights()
    with ParallelLoader(None, [path], use_tqdm_on_load=False) as loader:
        pass
    with pytest.raises(Exception, match="ParallelLoader is closed"):
        iter(loader)


def test_a_signal_ends_a_save_to_bytes_in_the_middle():
    """A signal during the copy of one gigabyte raises in the copy, which then returns no bytes."""
    torch = pytest.importorskip("torch")
    from fastsafetensors.torch import save

    tensors = {"w": torch.zeros(1 << 28)}
    events = []

    def note(frame, event, argument):
        if event.startswith("c_") and getattr(argument, "__name__", "") == "serialize":
            events.append(event)

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(20):  # a signal may arrive before the copy begins, or only after its end
            events.clear()
            sys.setprofile(note)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                save(tensors)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            if events == ["c_call", "c_exception"]:
                return
    finally:
        signal.signal(signal.SIGALRM, before)
    pytest.fail("no copy was ended by a signal")
