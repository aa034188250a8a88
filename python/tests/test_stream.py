# SPDX-License-Identifier: Apache-2.0
"""open_stream(): all tensors in file order, a bound on what is read ahead, early ends, errors."""

import importlib

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
    assert list(stream) == [] and float(tensor.sum()) == 0
    assert stream.stats["bytes_requested"] >= 0
    assert stream.stats == stream.stats


def test_errors(path, torch):
    import fastsafetensors
    from fastsafetensors.torch import open_stream

    with pytest.raises(ValueError, match="memory is 1048576 bytes"):
        next(open_stream(path, memory="1MiB"))
    for memory in (-1, "much", True):
        with pytest.raises(ValueError, match="memory must be"):
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
