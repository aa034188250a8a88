# SPDX-License-Identifier: Apache-2.0
"""close() of a load returns when the load is freed, whatever its other callers do."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from fastsafetensors import numpy as fst_numpy

numpy = pytest.importorskip("numpy")

# A load of small batches. Its allocator, once `is_on`, stays in a call until `go_on` is set.
PROGRAM = """
import ctypes, faulthandler, gc, signal, sys, threading, time, weakref
from fastsafetensors import _core
faulthandler.dump_traceback_later(50, exit=True)
model = _core.Model(sys.argv[1])

class Memory:
    def __init__(self, size):
        self.memory = ctypes.create_string_buffer(size + 4096)
    def data_ptr(self):
        return (ctypes.addressof(self.memory) + 4095) & ~4095

class Held:
    def __init__(self):
        self.inside, self.go_on, self.is_on = threading.Event(), threading.Event(), False
    def __call__(self, size):
        if self.is_on:
            self.is_on = False
            self.inside.set()
            self.go_on.wait()
            self.act()
        return Memory(size)
    def act(self):
        pass

def begin(allocate):
    return model.load(mode="load", engine="pread", threads=1, budget=17 << 16, allocator=allocate)

def hold(held, load):  # returns with a thread of the load inside the allocator
    held.is_on = True
    while not held.inside.wait(0.05):
        next(load)

def begin_held():
    held = Held()
    load = begin(held)
    hold(held, load)
    return held, load

def in_thread(call, *arguments):
    begun, ended = threading.Event(), threading.Event()
    def run():
        begun.set()
        try:
            call(*arguments)
        except Exception:
            pass
        ended.set()
    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return ended

def check_freed():
    for _ in range(500):
        gc.collect()
        if _core.live_buffers() == (0, 0):
            return
        time.sleep(0.01)
    raise AssertionError(_core.live_buffers())
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of 12 tensors of 1 MiB."""
    path = tmp_path_factory.mktemp("m") / "m.safetensors"
    fst_numpy.save_file({f"{i:02}": numpy.full(1 << 18, i, "f4") for i in range(12)}, path)
    return path


def run(code, path, output="", **environment):
    """Run the program and `code` in a new process, which prints `output`."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + code, path], text=True, timeout=60,
                          env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == output


@pytest.mark.parametrize("other", ["lambda load: list(load)", "lambda load: load.item(11)",
                                   "lambda load: load.close()"], ids=["next", "item", "close"])
def test_close_waits_for_other_threads(path, other):
    """Also if another thread frees the load, after its own call or in its own close()."""
    run(f"""
held, load = begin_held()
other = in_thread({other}, load)
time.sleep(0.1)
closed = in_thread(load.close)
assert not closed.wait(0.3)  # the load still uses its memory
held.go_on.set()
assert closed.wait(50) and other.wait(50)
load.close()
load = None
check_freed()
""", path)


def test_ctrl_c_ends_close(path):
    """The load is then closed by its last caller, for which a second close() waits."""
    run("""
held, load = begin_held()
other = in_thread(list, load)
time.sleep(0.1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    load.close()
    raise SystemExit("close() returned")
except KeyboardInterrupt:
    pass
closed = in_thread(load.close)
assert not closed.wait(0.3)
held.go_on.set()
assert closed.wait(50) and other.wait(50)
load = None
check_freed()
""", path)


def test_close_inside_a_call_of_the_load(path):
    """A signal handler cannot wait for the call that it interrupts, which then closes the load."""
    run("""
def close(*_):
    load.close()
    in_handler.append(load)
for call in (list, lambda load: load.item(11)):
    held, load = begin_held()
    in_handler = []
    signal.signal(signal.SIGALRM, close)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    threading.Timer(0.5, held.go_on.set).start()
    try:
        call(load)
    except Exception:
        pass
    assert in_handler == [load]
    load.close()
in_handler.clear()
load = model.load(mode="load", engine="pread")
try:
    load.wait(lambda *_: load.close())
except Exception:
    pass
load = None
check_freed()
""", path)


def test_allocators_that_close_each_other(path):
    """One of them does not wait for the load that waits for it."""
    run("""
loads, both, ended = [], threading.Barrier(2, timeout=50), []
class Closing(Held):
    def act(self):
        both.wait()
        loads[0 if self is allocators[1] else 1].close()
        ended.append(self)
allocators = [Closing(), Closing()]
loads += [begin(one) for one in allocators]
for held, load in zip(allocators, loads):
    hold(held, load)
for held in allocators:
    held.go_on.set()
while len(ended) < 2:
    time.sleep(0.01)
for load in loads:
    load.close()
load = held = None
loads.clear()
ended.clear()
allocators.clear()
check_freed()
""", path)


def test_callbacks_that_close_each_others_loads(path):
    """The same for progress callbacks, which are inside wait()."""
    run("""
loads = [model.load(mode="load", engine="pread") for _ in range(2)]
both = threading.Barrier(2, timeout=50)
def wait(number):
    def progress(*_):
        both.wait()
        loads[1 - number].close()
    loads[number].wait(progress)
ended = [in_thread(wait, 0), in_thread(wait, 1)]
assert all(one.wait(50) for one in ended)
for load in loads:
    load.close()
load = None
loads.clear()
check_freed()
""", path)


def test_a_load_dropped_in_its_allocator_keeps_its_memory(path, tmp_path):
    """If no thread can be started that closes it, both stay."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that refuses threads")
    (tmp_path / "refuse.c").write_text("""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
int refuses_threads;
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *of) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return refuses_threads ? EAGAIN : real(thread, how, run, of);
}
""")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "refuse.so",
                    tmp_path / "refuse.c", "-ldl"], check=True)
    run("""
refuses = ctypes.c_int.in_dll(ctypes.CDLL(None), "refuses_threads")
class Dropping(Held):
    def act(self):
        refuses.value = 1
        self.load = None
        refuses.value = 0
        done.set()
done, held = threading.Event(), Dropping()
held.load = begin(held)
hold(held, held.load)
go_on, gone = held.go_on, weakref.ref(held)
del held
go_on.set()
assert done.wait(50)
time.sleep(0.2)
assert gone() is not None
""", path, LD_PRELOAD=os.fspath(tmp_path / "refuse.so"))


GREENLETS = """
import greenlet
main = greenlet.getcurrent()
def deeper(depth, call):  # on the stack of C: the stack of the other greenlet is moved away
    return call() if depth == 0 else next(map(lambda _: deeper(depth - 1, call), [0]))
"""


def test_greenlet_inside_a_progress_callback(path):
    """It is inside wait() while another greenlet of its thread closes loads."""
    pytest.importorskip("greenlet")
    run(GREENLETS + """
for _ in range(20):
    first, second, third = (model.load(mode="load", engine="pread") for _ in range(3))
    within = greenlet.greenlet(lambda: first.wait(lambda *_: main.switch()))
    within.switch()
    deeper(30, second.close)
    first.close()  # which only stops it
    also = greenlet.greenlet(lambda: third.wait(lambda *_: main.switch()))
    also.switch()
    within.switch()
    also.switch()
    third.close()
    first.close()
first = second = third = within = also = None
check_freed()
""", path)


def test_greenlet_inside_an_allocator(path):
    """The load's thread is refused by its own load only."""
    pytest.importorskip("greenlet")
    run(GREENLETS + """
def allocate(size):
    main.switch()
    return Memory(size)
for _ in range(20):
    other = model.load(mode="load", engine="pread")
    loads = []
    within = greenlet.greenlet(lambda: loads.append(begin(allocate)))
    within.switch()
    deeper(30, lambda: (other.wait(), other.item(3), other.close()))
    while not within.dead:
        within.switch()
    try:
        loads[0].close()
    except greenlet.error:
        pass  # threads of the load cannot switch to this one
other = within = None
loads.clear()
check_freed()
""", path)


AT_EXIT = {
    "stream": """
from fastsafetensors import numpy as fst_numpy
stream, items = fst_numpy.open_stream(sys.argv[1]), queue.Queue()
in_thread(lambda: [items.put(item) for item in stream])
items.get()
return stream
""",
    "next": """
load = begin_held()[1]
in_thread(list, load)
return load
""",
    "wait": """
load, inside = model.load(mode="load", engine="pread"), threading.Event()
in_thread(load.wait, lambda *_: inside.set() or threading.Event().wait())
inside.wait()
return load
""",
    "allocator": "return begin_held()[1]",
    "close": """
class Closing(Held):
    def act(self):
        self.load.close()
        inside.set()
        threading.Event().wait()
held, inside = Closing(), threading.Event()
held.load = load = begin(held)
hold(held, load)
held.go_on.set()
inside.wait()
return load
"""}


@pytest.mark.parametrize("begin", AT_EXIT.values(), ids=AT_EXIT)
def test_close_at_exit_does_not_wait_for_threads_that_ended(path, begin):
    """A daemon thread, or one of a load that needs the GIL, does not return from its call then."""
    run(f"""
import queue
def begin_load():
{textwrap.indent(begin, " ")}
class Owner:
    def __init__(self):
        self.load = begin_load()
    def __del__(self):
        self.load.close()
        print("closed", flush=True)
sys.modules["owner"] = Owner()  # which the end of the interpreter frees
""", path, "closed")
