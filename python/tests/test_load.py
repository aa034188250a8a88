# SPDX-License-Identifier: Apache-2.0
"""load_file and SafeTensorsFileLoader: bytes, lifetime, modes, statistics."""

import gc
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from conftest import same_bits

import fastsafetensors
from fastsafetensors import SafeTensorsFileLoader, _core
from fastsafetensors.torch import load_file

MODES = ["load", "map", "auto"]


@pytest.mark.parametrize("mode", MODES)
def test_same_as_safetensors(model, torch, mode):
    path, tensors = model
    loaded = load_file(path, mode=mode)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(torch, loaded[name], tensor), name
    names = _core.Model(path).names()
    assert list(loaded) == names  # file order


@pytest.mark.parametrize("engine", ["pread", "direct", "uring", "mmap"])
def test_every_engine(model, torch, engine):
    path, tensors = model
    try:
        loaded = load_file(path, mode="load", engine=engine)
    except RuntimeError as error:
        assert engine in str(error)
        pytest.skip(str(error))
    assert all(same_bits(torch, loaded[name], tensors[name]) for name in tensors)


def test_ring_and_numa_can_be_forced(model, torch):
    core = _core.Model(model[0])
    for ring in ("auto", "place", "slots"):
        for numa in ("default", "local", "interleave"):
            loader = core.load(["large"], mode="load", ring=ring, numa=numa)
            assert torch.equal(torch.from_dlpack(loader.item(0)), model[1]["large"])
    for wrong in ({"threads": -1}, {"budget": -1}):
        with pytest.raises(ValueError, match="negative"):
            core.load(**wrong)
    for wrong in ({"ring": "x"}, {"numa": "x"}, {"order": "x"}):
        with pytest.raises(ValueError, match="unknown"):
            core.load(**wrong)


def test_one_tensor_keeps_only_its_batch(tmp_path, torch):
    """With owned memory, a tensor keeps at most 64 MiB alive, or only itself."""
    from fastsafetensors import live_allocation_bytes
    from fastsafetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    sizes = [*[16 << 20] * 9, 80 << 20]
    save_file({f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)},
              path)
    gc.collect()  # what earlier tests left must not be freed meanwhile
    before = live_allocation_bytes()
    tensors = load_file(path, mode="load")
    whole = live_allocation_bytes() - before
    assert sum(sizes) <= whole <= sum(sizes) + (len(sizes) * 2 << 20)
    kept, large = tensors["t3"], tensors["t9"]
    del tensors
    gc.collect()
    assert (96 << 20) < live_allocation_bytes() - before <= (64 + 80 + 4) << 20
    del large
    assert live_allocation_bytes() - before <= 66 << 20
    assert int(kept[0]) == int(kept[-1]) == 3
    del kept
    assert live_allocation_bytes() == before


def test_statistics_have_every_counter_of_the_header(model):
    """One list makes the struct's fields known to Python and to the command."""
    import re

    from conftest import ROOT

    header = (ROOT / "include/fastsafetensors/loader.h").read_text()
    struct = header.partition("typedef struct fst_load_stats {")[2].partition("}")[0]
    fields = re.findall(r"^    \w+ (\w+)(?:\[\d+\])?;", struct, re.M)
    assert list(_core.Model(model[0]).load().stats()) == fields[1:] and "cache_bytes" in fields


def test_path_forms(model, sharded):
    path, tensors = model
    for form in (str(path), path, os.fsencode(path)):
        assert load_file(form).keys() == tensors.keys()
    folder, tensors = sharded
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    for form in (folder, str(folder), index, files, tuple(files), [str(f) for f in files]):
        assert load_file(form).keys() == tensors.keys()
    for form in (None, 3, object()):
        with pytest.raises(TypeError):
            load_file(form)
    with pytest.raises(ValueError):
        load_file([])
    with pytest.raises(ValueError, match="null"):
        load_file("a\0b")


@pytest.mark.parametrize("mode", MODES)
def test_tensors_outlive_everything_and_free_their_memory(model, torch, mode, tmp_path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(model[0].read_bytes())
    gc.collect()
    before = fastsafetensors.live_allocation_count()
    loaded = load_file(copy, mode=mode)
    copy.unlink()
    kept = loaded["large"]
    del loaded
    gc.collect()
    assert torch.equal(kept, model[1]["large"])
    kept[0, 0] = 1.0  # writable, and its own
    assert fastsafetensors.live_allocation_count() > before
    assert fastsafetensors.live_allocation_bytes() > 0
    del kept
    gc.collect()
    assert fastsafetensors.live_allocation_count() == before


def test_alignment(raw, torch):
    path = raw('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
               '"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}', bytes(range(11)))
    for mode in MODES:
        loaded = load_file(path, mode=mode)
        assert loaded["b"].data_ptr() % 4 == 0
        assert bytes(loaded["b"].view(torch.uint8).tolist()) == bytes(range(3, 11))


def test_sub_byte_dtypes(raw, torch):
    path = raw('{"f4":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},'
               '"f6":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[4,7]}}', bytes(range(7)))
    for mode in MODES:
        loaded = load_file(path, mode=mode)
        assert loaded["f6"].dtype == torch.uint8 and loaded["f6"].tolist() == [4, 5, 6]
        if hasattr(torch, "float4_e2m1fn_x2"):
            assert loaded["f4"].dtype == torch.float4_e2m1fn_x2
            assert loaded["f4"].shape == (2, 2)
        assert loaded["f4"].view(torch.uint8).flatten().tolist() == [0, 1, 2, 3]


def test_loader_of_a_path(model, torch):
    path, tensors = model
    with SafeTensorsFileLoader(path, num_threads=4) as loader:
        assert loader.stats == {}
        first = loader.load()
        second = loader.load()
        stats = loader.stats
    assert all(same_bits(torch, first[n], tensors[n]) for n in tensors)
    assert first["large"].data_ptr() != second["large"].data_ptr()
    assert stats["mode"] == "load" and stats["reason"]
    assert stats["bytes_read"] == stats["bytes_requested"]
    assert stats["buffer_bytes"] <= path.stat().st_size + (4 << 20)
    loader.close()
    with pytest.raises(fastsafetensors.SafetensorError, match="is closed"):
        loader.load()
    with pytest.raises(ValueError, match="num_threads"):
        SafeTensorsFileLoader(path, num_threads=0)


def test_numpy(model):
    numpy = pytest.importorskip("numpy")
    from fastsafetensors.numpy import load_file as load_numpy

    path, tensors = model
    for mode in MODES:
        loaded = load_numpy(path, mode=mode)
        assert loaded.keys() == tensors.keys()
        assert loaded["large"].flags.writeable
        assert numpy.array_equal(loaded["large"], tensors["large"].numpy())
        assert loaded["empty"].shape == (0, 7) and loaded["scalar"].shape == ()
        assert loaded["t.bfloat16"].dtype.name == "bfloat16"
        assert loaded["t.float8_e4m3fn"].dtype.name == "float8_e4m3fn"
        bits = tensors["t.bfloat16"].view(__import__("torch").uint16).numpy()
        assert numpy.array_equal(loaded["t.bfloat16"].view("u2"), bits)
        held = loaded["large"]
        del loaded
        gc.collect()
        assert numpy.array_equal(held, tensors["large"].numpy())


def test_dlpack_both_versions(model):
    numpy = pytest.importorskip("numpy")
    loader = _core.Model(model[0]).load(["large"], mode="load")
    tensor = loader.item(0)
    loader.close()
    assert tensor.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(tensor.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(tensor.__dlpack__())
    array = numpy.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert numpy.array_equal(array, model[1]["large"].numpy())
    loader = _core.Model(model[0]).load(["large"], mode="map", read_only=True)
    tensor = loader.item(0)
    assert not tensor.writable
    with pytest.raises(BufferError):
        tensor.__dlpack__()
    with pytest.raises(BufferError):
        tensor.__dlpack__(stream=1)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    assert not numpy.from_dlpack(tensor).flags.writeable


def test_stream_in_order_within_a_budget(model, torch):
    path, tensors = model
    core = _core.Model(path)
    loader = core.load(mode="load", budget=16 << 20)
    core.close()
    names = []
    for tensor in loader:
        names.append(tensor.name)
        assert tensor.nbytes == tensors[tensor.name].nbytes
    assert names == _core.Model(path).names()
    loader.close()
    loader.close()
    with pytest.raises(fastsafetensors.SafetensorError, match="closed"):
        next(loader)
    with pytest.raises(ValueError, match="memory is 1000 bytes"):
        _core.Model(path).load(mode="load", budget=1000)


def modules_after(code):
    """Names of the modules that a fresh interpreter has imported after this code."""
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
                          capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("code, others", [
    ("import fastsafetensors", {"typing", "re", "threading", "contextlib",
                                "fastsafetensors._loading.open"}),
    ("import fastsafetensors; fastsafetensors.safe_open", set()),
])
def test_importing_needs_no_framework(code, others):
    """Nor modules that take longer than all of this package."""
    heavy = {"torch", "numpy", "importlib.abc", "tempfile", "urllib.parse", "sysconfig", "json",
             "dataclasses", "inspect", *others}
    assert not heavy & (modules_after(code) - modules_after(""))


def test_gil_is_released(tmp_path, torch):
    from safetensors.torch import save_file

    path = tmp_path / "big.safetensors"
    save_file({"a": torch.zeros(64 << 20, dtype=torch.uint8)}, path)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(1)
            stop.wait(0.0005)

    thread = threading.Thread(target=tick)
    loader = _core.Model(path).load(mode="load", engine="pread", threads=1)
    thread.start()
    loader.wait()
    seen = len(ticks)
    stop.set()
    thread.join()
    assert seen > 0
    assert loader.stats()["bytes_read"] == 64 << 20


def test_many_threads_share_a_model(model, torch):
    path, tensors = model
    core = _core.Model(path)
    wrong = []

    def read(start):
        names = sorted(tensors)
        for i in range(40):
            name = names[(start + i) % len(names)]
            loader = core.load([name], mode=MODES[i % 2])
            if next(loader).nbytes != tensors[name].nbytes:
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_interrupt_stops_a_load(tmp_path):
    code = """
import os, signal, sys, threading, time
from fastsafetensors import _core
path = sys.argv[1]
loader = _core.Model(path).load(mode="load", budget=8 << 20)
loader.__next__()  # the stream then waits for memory that nobody gives back
timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
timer.start()
held = []
try:
    while True:
        time.sleep(0.05)
        held.append(next(loader))
except KeyboardInterrupt:
    loader.close()
    timer.join()
    print("interrupted", threading.active_count())
except StopIteration:
    print("ended")
"""
    header = ",".join(f'"{i}":{{"dtype":"U8","shape":[1048576],"data_offsets":'
                      f'[{i << 20},{(i + 1) << 20}]}}' for i in range(64))
    path = tmp_path / "m.safetensors"
    encoded = ("{" + header + "}").encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(64 << 20))
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True,
                          timeout=300)  # otherwise the load would wait forever
    assert done.stdout.startswith("interrupted 1"), done.stdout + done.stderr


def test_fork(model):
    code = """
import os, sys
from fastsafetensors import safe_open
from fastsafetensors.numpy import load_file
path = sys.argv[1]
before = load_file(path, mode="load")
pid = os.fork()
if pid == 0:
    after = load_file(path, mode="load")
    os._exit(0 if (after["large"] == before["large"]).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code, str(model[0])], check=True, timeout=600)


def test_package_files_are_complete():
    folder = pathlib.Path(fastsafetensors.__file__).parent
    assert {"py.typed", "_core.pyi"} <= {p.name for p in folder.iterdir()}
    assert fastsafetensors.__version__ == _core.version


@pytest.mark.parametrize("gds", ["strict", "nonsense"])
def test_gpudirect_is_refused_on_the_cpu(model, gds):
    """An option that can't have an effect is an error, with all loaders that take it."""
    from fastsafetensors.torch import load_file

    with pytest.raises(ValueError, match="gds"):
        load_file(model[0], gds=gds)
