# SPDX-License-Identifier: Apache-2.0
"""open_stream(): all tensors in file order, a bound on what is read ahead, early ends, errors."""

import importlib
import subprocess
import sys

import pytest

MIB = 1 << 20


@pytest.fixture
def path(tmp_path, torch):
    from fastsafetensors.torch import save_file

    tensors = {f"t{i}": torch.full((MIB,), float(i)) for i in range(12)}
    save_file(tensors, tmp_path / "m.safetensors", manifest=True)
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("memory", [0, 16 * MIB, "16MiB"])
def test_all_tensors_in_file_order(framework, memory, path):
    module = importlib.import_module(f"fastsafetensors.{framework}")
    wanted = module.load_file(path)
    with module.open_stream(path, memory=memory) as stream:
        assert len(stream) == 12
        found = dict(stream)
        assert list(stream) == []  # once
        stats = stream.stats
    assert list(found) == list(wanted)
    assert all((found[name] == wanted[name]).all() for name in wanted)
    assert stats["mode"] == ("load" if memory else "map")


def test_memory_limits_readahead(path):
    from fastsafetensors.numpy import open_stream

    with open_stream(path, memory="16MiB", threads=2) as stream:
        for _, array in stream:
            del array
        assert 4 * MIB <= stream.stats["buffer_bytes_peak"] <= 16 * MIB
        assert stream.stats["bytes_requested"] >= 48 * MIB


def test_names_filter_dtype_and_verify(path, torch):
    from fastsafetensors.torch import open_stream

    with open_stream(path, names=["t3", "t1", "t2"], filter=lambda name: name != "t2",
                     dtype=torch.float16, verify=True) as stream:
        assert {(name, t.dtype, float(t[0])) for name, t in stream} == {
            ("t3", torch.float16, 3.0), ("t1", torch.float16, 1.0)}
    assert list(open_stream(path, names=[])) == []


def test_an_early_end_stops_the_reads_and_keeps_the_tensors(path):
    from fastsafetensors.torch import open_stream

    stream = open_stream(path, memory="16MiB")
    _, tensor = next(stream)
    stream.close()
    stream.close()
    with pytest.raises(RuntimeError, match="closed before its last tensor was returned"):
        list(stream)
    assert float(tensor.sum()) == 0
    assert stream.stats["bytes_requested"] >= 0
    assert stream.stats == stream.stats


def test_errors(path, torch):
    import fastsafetensors
    from fastsafetensors.torch import open_stream

    with pytest.raises(ValueError, match="memory is 1048576 bytes"):
        next(open_stream(path, memory="1MiB"))
    for memory, kind in ((-1, ValueError), ("much", ValueError), (True, TypeError)):
        with pytest.raises(kind, match="memory must be"):
            open_stream(path, memory=memory)
    with pytest.raises(KeyError):
        open_stream(path, names=["none"])
    with pytest.raises(fastsafetensors.SafetensorError):
        open_stream(path, names=["none"])
    with pytest.raises(FileNotFoundError):
        open_stream(path.with_name("gone.safetensors"))
    with pytest.raises(fastsafetensors.SafetensorError, match="device nowhere is invalid"):
        open_stream(path, "nowhere")
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(fastsafetensors.SafetensorError, match="differs from its"):
        list(open_stream(path, verify=True))


def test_modes(path):
    from fastsafetensors import numpy, torch

    for open_stream in (numpy.open_stream, torch.open_stream):
        for mode, expected in (("load", "load"), ("map", "map"), ("auto", "map")):
            with open_stream(path, mode=mode) as stream:
                assert len(list(stream)) == len(stream)
                assert stream.stats["mode"] == expected
        with open_stream(path, mode="load", memory="64MiB") as stream:
            assert len(list(stream)) == len(stream)
        with pytest.raises(ValueError, match=r'mode="map" returns views .* no memory limit'):
            open_stream(path, mode="map", memory="1GiB")
        with pytest.raises(ValueError, match="unknown mode 'fast'; expected"):
            open_stream(path, mode="fast")


SHARED = """
import sys, threading
import numpy
from fastsafetensors.numpy import open_stream, save_file

save_file({f"t{i}": numpy.full(16384, i, "float32") for i in range(256)}, sys.argv[1])
shared = 0
for _ in range(20):
    found, refused = [], []
    with open_stream(sys.argv[1], memory="1MiB") as stream:
        def work():
            while True:
                try:
                    for name, array in stream:
                        found.append((name, array.min(), array.max()))
                    return
                except RuntimeError as error:
                    refused.append(str(error))
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert sorted(found) == sorted((f"t{i}", i, i) for i in range(256)), len(found)
    assert all("one thread at a time" in text for text in refused), set(refused)
    shared += len({*refused})
print("refused" if shared else "never at once")
"""


def test_threads_that_share_a_stream_do_not_crash(tmp_path):
    run = subprocess.run([sys.executable, "-c", SHARED, tmp_path / "m.safetensors"],
                         capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "refused\n", "")


def test_a_stream_is_closed_by_another_thread(path):
    import threading

    from fastsafetensors import SafetensorError
    from fastsafetensors.numpy import open_stream

    for _ in range(20):
        stream = open_stream(path, memory="16MiB")
        failures = []

        def work(stream=stream, failures=failures):
            try:
                for _ in stream:
                    pass
            except (SafetensorError, RuntimeError):
                pass  # closed, or cancelled
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work)]
        threads += [threading.Thread(target=stream.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
