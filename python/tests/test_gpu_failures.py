# SPDX-License-Identifier: Apache-2.0
"""Failing GPUs through every Python interface: each load ends, with the right error."""

import os
import shutil
import subprocess

import pytest
from fake_gpu import run
from test_gpu import sample  # noqa: F401

# Every API that loads to a GPU, each a function without arguments.
APIS = """
torch = fake_gpu.give_torch_a_gpu()
import fastsafetensors as f
from fastsafetensors.fast_loading import load_safetensors, load_safetensors_mmap
from fastsafetensors.torch import load_file, load_model
driver = fake_gpu.library() if {has_driver} else None

def opened():
    with f.safe_open(path, "pt", device="cuda:0") as g:
        return g.get_tensor("large")
def opened_all():
    with f.safe_open(path, "pt", device="cuda:0") as g:
        return g.get_tensors()
def ahead():
    with f.safe_open(path, "pt", device="cuda:0") as g, g.prefetch({{"large": None}}) as p:
        return p.take("large")
def batches():
    loader = f.ParallelLoader(f.SingleGroup(), [path], device="cuda:0", use_tqdm_on_load=False)
    try:
        return [tensor.clone() for _, tensor in loader.iterate_weights()]
    finally:
        loader.close()
def one():
    loader = f.SafeTensorsFileLoader(f.SingleGroup(), "cuda:0", nogds=True)
    loader.add_filenames({{0: [path]}})
    try:
        return loader.copy_files_to_device().get_tensor("large")
    finally:
        loader.close()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.empty(3000000, device="meta"))
APIS = {{
    "load_file": lambda: load_file(path, "cuda:0"),
    "load_file, own": lambda: load_file(path, "cuda:0", allocator="own"),
    "load_safetensors": lambda: load_safetensors(path, device="cuda:0"),
    "load_safetensors_mmap": lambda: load_safetensors_mmap(path, device="cuda:0"),
    "get_tensor": opened, "get_tensors": opened_all, "prefetch": ahead,
    "ParallelLoader": batches, "SafeTensorsFileLoader": one,
    "load_model": lambda: load_model(Net(), path, strict=False, device="cuda:0", assign=True),
    "core": lambda: list(f._core.Model(path).load(device="cuda:0")),
}}
def all_end(kind, *words):
    for name, api in APIS.items():
        try:
            api()
        except kind as error:
            assert any(word in str(error) for word in words), (name, error)
        else:
            raise AssertionError(name)
"""


def run_with_apis(code, path, has_driver=True, **environment):
    """Run code after the definitions of all APIs."""
    return run(APIS.format(has_driver=has_driver) + code, path, **environment)


@pytest.mark.parametrize(("words", "environment"), [
    ("no driver", {"LD_LIBRARY_PATH": "/nonexistent"}),
    ("too old", {"FAKE_GPU_VERSION": "10010"}),
    ("sees no device", {"FAKE_GPU_INIT_CODE": "100"}),
    ("could not be started", {"FAKE_GPU_INIT_CODE": "999"}),
], ids=["none", "old", "hidden", "broken"])
def test_drivers(sample, words, environment):  # noqa: F811
    """The error of every API names the fault of the driver."""
    has_driver = "LD_LIBRARY_PATH" not in environment
    run_with_apis(f"all_end(RuntimeError, {words!r})", sample, has_driver, **environment)


def test_full_memory(sample):  # noqa: F811
    """Every API raises MemoryError with the needed size."""
    run_with_apis('all_end(MemoryError, "bytes needed")', sample, FAKE_GPU_MEMORY="4000000")


def test_lost_device(sample):  # noqa: F811
    """After an illegal access every driver call fails until the process ends, and loads fail at
    once."""
    run_with_apis("""
held = load_file(path, "cuda:0", allocator="own")
driver.fake_gpu_set(b"sticky", 700)
all_end(RuntimeError, "700")
held.clear()
gc.collect()
f._core.trim()
driver.fake_gpu_set(b"sticky", 0)
assert load_file(path, "cuda:0")["large"][7] == 7
""", sample)


@pytest.mark.parametrize("device", ["cuda:0", "pinned"])
def test_memory_that_stays_pinned_does_not_grow(sample, device):  # noqa: F811
    """When the driver has failed to unpin four times, no more memory is pinned. Loads to the GPU
    work without."""
    run_with_apis(f"""
driver.fake_gpu_set(b"stuck_pins", 1000)
locked, freed, refused = [], [], 0
for _ in range(10):
    try:
        loaded = list(f._core.Model(path).load(mode="load", device="{device}"))
        assert loaded[0].nbytes > 0
        loaded.clear()
    except RuntimeError as error:
        assert "the driver did not unpin earlier memory" in str(error)
        refused += 1
    freed.append(f._core.trim())
    locked.append(driver.fake_gpu_get(b"locked_bytes"))
assert locked[3] == locked[-1] > 0, locked
assert refused == (6 if "{device}" == "pinned" else 0)
if "{device}" == "pinned":
    sys.exit(0)
assert not any(freed), freed
""", sample)


def test_device_lost_during_a_load(sample):  # noqa: F811
    """If the n-th copy and all later calls fail, every API raises an error and none waits
    forever."""
    run_with_apis("""
for nth in (1, 3, 6):
    for name, api in APIS.items():
        driver.fake_gpu_fail(b"cuMemcpyHtoDAsync", ctypes.c_long(nth), ctypes.c_long(700))
        try:
            api()
        except RuntimeError as error:
            assert "700" in str(error), (name, error)
        else:
            assert nth > 1 or driver.fake_gpu_get(b"fail_left") > 0, name
        driver.fake_gpu_fail(None, ctypes.c_long(0), ctypes.c_long(0))
""", sample)


def test_driver_shut_down(sample):  # noqa: F811
    """At exit the driver shuts down before the last tensors are freed, which causes no message."""
    run_with_apis("""
held = load_file(path, "cuda:0", allocator="own")
driver.fake_gpu_set(b"gone", 1)
all_end(RuntimeError, "error 4")
held.clear()
gc.collect()
print("ended")
""", sample)


def test_a_forked_process(sample):  # noqa: F811
    """A child of a process that uses the driver gets an error, and frees inherited memory."""
    run_with_apis("""
held = load_file(path, "cuda:0", allocator="own")
child = os.fork()
if child == 0:
    try:
        all_end(RuntimeError, "fork", "MemoryError")
        held.clear()
        gc.collect()
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert held["large"][7] == 7
""", sample)


def cuda_row(command, folder):
    """What `engines` says of CUDA when its library is looked for in a folder."""
    done = subprocess.run([command, "engines"], capture_output=True, text=True, check=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(folder)})
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("cuda")]
    return row


def test_a_driver_that_cannot_be_loaded_is_not_called_absent(tmp_path, command):
    """The loader's own words say what is wrong with the library."""
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    assert "can't be loaded: " in cuda_row(command, tmp_path)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_driver_without_its_own_library_is_not_called_absent(tmp_path, command):
    """Also if that library's name begins like the driver's."""
    for name, more in (("libcuda.so.1.1", []), ("libcuda.so.1", ["libcuda.so.1.1"])):
        subprocess.run(["gcc", "-shared", "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", name,
                        "-x", "c", "/dev/null", "-x", "none", *more], cwd=tmp_path, check=True)
    (tmp_path / "libcuda.so.1.1").unlink()
    assert "can't be loaded: libcuda.so.1.1: cannot open" in cuda_row(command, tmp_path)


def test_an_exception_of_an_allocator_ends_the_load(tmp_path):
    """It is raised also when later calls would succeed. A MemoryError is not the last word."""
    run_with_apis("""
import numpy
path = folder + "/many.safetensors"
f.numpy.save_file({f"{i:02}": numpy.ones(300_000, "f4") for i in range(40)}, path)
model = f._core.Model(path)

def load(error, nth):
    calls = []
    def allocate(size):
        calls.append(size)
        if len(calls) == nth:
            raise error
        return fake_gpu.Memory(size, 0)
    loader = model.load(device="cuda:0", allocator=allocate, stream=1, budget=16 << 20)
    try:
        return len(list(loader)), len(calls) > nth
    except BaseException as caught:
        assert caught is error, caught
        try:
            next(loader)
        except Exception as later:
            assert "cancelled the load" in str(later)
        return "raised", len(calls) > nth
    finally:
        loader.close()

for nth in (2, 3):
    for error in (KeyboardInterrupt(), RuntimeError("mine"), SystemExit(3)):
        assert load(error, nth) == ("raised", False)
    assert load(MemoryError("mine"), nth) == (40, True)

try:
    load(StopIteration(), 2)
    raise SystemExit("the iteration has ended")
except AssertionError as error:
    assert isinstance(error.args[0], RuntimeError) and "StopIteration" in str(error.args[0])

# The exception of an allocation that has succeeded since hides no other error.
calls = []
def allocate(size):
    calls.append(size)
    if len(calls) == 2:
        raise MemoryError("mine")
    return fake_gpu.Memory(size, 0)
loader = model.load(device="cuda:0", allocator=allocate, stream=1, budget=16 << 20)
try:
    for number, tensor in enumerate(loader):
        if number == 15:
            driver.fake_gpu_fail(b"cuMemcpyHtoDAsync", ctypes.c_long(1), ctypes.c_long(999))
except RuntimeError as error:
    assert "999" in str(error)
else:
    raise AssertionError
""", tmp_path)


def test_streams_to_a_gpu(sample):  # noqa: F811
    """open_stream() gives tensors on the GPU, with and without a limit."""
    run_with_apis("""
from fastsafetensors.torch import open_stream
for limit in (0, "16MiB"):
    for mode in ("auto", "load", "map"):
        with open_stream(path, device="cuda:0", memory=limit if mode != "map" else 0,
                         mode=mode) as stream:
            assert dict(stream)["large"][7] == 7
""", sample)


def test_an_allocator_may_close_its_load(tmp_path):
    """It is called by a thread that closing waits for. The load ends, and leaves nothing behind."""
    run_with_apis("""
import numpy, time
path = folder + "/many.safetensors"
f.numpy.save_file({f"{i:02}": numpy.ones(300_000, "f4") for i in range(40)}, path)
model = f._core.Model(path)

def load(end, nth, budget):
    box, calls = [], []
    def allocate(size):
        calls.append(size)
        if len(calls) == nth:
            while not box:  # the load's threads may be faster than its caller
                time.sleep(0.001)
            end(box)
        return fake_gpu.Memory(size, 0)
    box.append(model.load(device="cuda:0", allocator=allocate, stream=1, budget=budget))
    loader, ended = box[0], ""
    try:
        for tensor in loader:
            pass
    except Exception as error:
        ended = str(error)
    loader.close()
    return ended

for round in range(10):
    for nth in (2, 3):
        ended = load(lambda box: box[0].close(), nth, 16 << 20)
        assert "closed" in ended or "cancelled" in ended, ended
        load(lambda box: box[0].cancel(), nth, 16 << 20)
        load(lambda box: box.clear(), nth, 16 << 20)

def forgotten():
    box, calls = [], []
    def allocate(size):
        calls.append(size)
        if len(calls) == 2:
            while not box:
                time.sleep(0.001)
            box.clear()
        return fake_gpu.Memory(size, 0)
    box.append(model.load(device="cuda:0", allocator=allocate, stream=1, budget=16 << 20))
for round in range(10):
    forgotten()
class Near:
    def __init__(self, size):
        self.memory = ctypes.create_string_buffer(size + 8192)
    def data_ptr(self):
        end, Hook.end = Hook.end, None
        if end is not None:
            end()
        return (ctypes.addressof(self.memory) + 4095) & ~4095

class Hook(fake_gpu.Memory):
    def data_ptr(self):
        end, Hook.end = Hook.end, None
        if end is not None:
            end()
        return self.address.value
    end = None

class Bad:  # refused, because it is misaligned, and then freed
    def data_ptr(self):
        return 8
    def __del__(self):
        end, Hook.end = Hook.end, None
        if end is not None:
            end()

# The same by data_ptr() and by the end of the memory's object.
for device in ("cuda:0", "cpu"):
    for kind in (Hook, Bad):
        for end in ("close", "clear"):
            for round in range(5):
                box, left = {}, [2]
                def allocate(size):
                    left[0] -= 1
                    if left[0] < 0 and kind is Bad and Hook.end is not None:
                        return Bad()
                    return Hook(size, 0) if device == "cuda:0" else Near(size)
                box["l"] = model.load(device=device, stream=1 if device == "cuda:0" else 0,
                                      budget=16 << 20, threads=4, allocator=allocate)
                tensor = next(box["l"])
                Hook.end = box.clear if end == "clear" else box["l"].close
                del tensor
                try:
                    for tensor in list(box.values())[0] if box else ():
                        pass
                except Exception:
                    pass
                tensor = None
                Hook.end = None
                for loader in list(box.values()):
                    loader.close()
                loader = None
                box.clear()

for attempt in range(200):
    gc.collect()
    if f._core.live_buffers() == (0, 0):
        break
    time.sleep(0.02)
assert f._core.live_buffers() == (0, 0)
""", tmp_path)


def test_an_allocator_may_fail_while_its_load_is_closed(tmp_path):
    """Closing wakes threads that wait for work, also one that is just calling the allocator."""
    run_with_apis("""
import numpy, threading, time
path = folder + "/many.safetensors"
f.numpy.save_file({f"{i:02}": numpy.ones(300_000, "f4") for i in range(40)}, path)
model = f._core.Model(path)
for engine in ("auto", "pread", "uring"):
    for round in range(6):
        calls, inside = [], threading.Event()
        def allocate(size):
            calls.append(size)
            if len(calls) == 2 + round % 2:
                inside.set()
                time.sleep(0.02)
                raise ValueError("mine")
            return fake_gpu.Memory(size, 0)
        try:
            loader = model.load(device="cuda:0", engine=engine, allocator=allocate, stream=1,
                                budget=16 << 20)
        except Exception as error:
            assert engine == "uring", error  # the file system has no direct reads
            break
        inside.wait(1)
        loader.close()
""", tmp_path)


def test_an_allocator_cannot_wait_for_its_load(tmp_path):
    """It would wait for itself. A closed load does not keep its allocator."""
    run_with_apis("""
import numpy, weakref
path = folder + "/many.safetensors"
f.numpy.save_file({f"{i:02}": numpy.ones(300_000, "f4") for i in range(40)}, path)
model = f._core.Model(path)
for call in (lambda l: l.wait(), lambda l: l.item(30), lambda l: next(l),
             lambda l: l.export(None, None, 0)):
    refused, box = [], {}
    def allocate(size):
        if box:
            try:
                call(box["l"])
            except RuntimeError as error:
                refused.append(str(error))
        return fake_gpu.Memory(size, 0)
    box["l"] = model.load(device="cuda:0", allocator=allocate, stream=1, budget=16 << 20)
    assert len(list(box["l"])) == 40
    assert any("cannot wait" in words or "another thread" in words for words in refused), refused
    box["l"].close()

class Pool:
    def allocate(self, size):
        return fake_gpu.Memory(size, 0)
pool = Pool()
pool.load = model.load(device="cuda:0", allocator=pool.allocate, stream=1)
list(pool.load)
pool.load.close()
gone = weakref.ref(pool)
del pool
gc.collect()
assert gone() is None
""", tmp_path)


def test_an_allocator_closes_other_loads_as_usual(tmp_path):
    """When close() has returned, the other load writes to the program's memory no more."""
    run_with_apis("""
import numpy, time
path = folder + "/many.safetensors"
f.numpy.save_file({f"{i:02}": numpy.ones(300_000, "f4") for i in range(40)}, path)
big = folder + "/big.safetensors"
f.numpy.save_file({"big": numpy.zeros(20_000_000, "f4")}, big)
model, other = f._core.Model(path), f._core.Model(big)
buffer, wrong = numpy.full(20_000_000, 7, "f4"), []
def allocate(size):
    load = other.load([("big", buffer.ctypes.data, buffer.nbytes)], mode="load", engine="pread")
    time.sleep(0.003)
    load.close()
    buffer[:] = 1
    time.sleep(0.03)
    wrong.append(int((buffer != 1).sum()))
    return fake_gpu.Memory(size, 0)
loader = model.load(device="cuda:0", allocator=allocate, stream=1, budget=6 << 20)
assert len(list(loader)) == 40
loader.close()
assert len(wrong) > 5 and not any(wrong), wrong
""", tmp_path)
