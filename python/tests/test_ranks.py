# SPDX-License-Identifier: Apache-2.0
"""Several processes in a gloo group, on one machine."""

import textwrap

import pytest
from test_rank_faults import run_ranks

RANK = textwrap.dedent("""
    import os, sys
    import torch
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader, SafeTensorsFileLoader
    from fastsafetensors.st_types import DType

    folder, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    expected = torch.load(f"{folder}/expected.pt")
    files = [f"{folder}/{i}.safetensors" for i in range(4)]
    large = expected.pop("large")

    files.append(f"{folder}/large.safetensors")
    loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames({0: files[:3], 1: files[3:]})      # uneven, empty for the others
    fb = loader.copy_files_to_device()
    same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    assert same(fb.get_tensor("large"), large)
    for name in expected:
        assert same(fb.get_tensor(name), expected[name]), name
        assert same(fb.get_tensor(name), expected[name]), name     # and once more
    for name, tensor in expected.items():
        for dim in range(tensor.dim()):
            block = -(-tensor.shape[dim] // size)
            begin = min(rank * block, tensor.shape[dim])
            wanted = tensor.narrow(dim, begin, min(block, tensor.shape[dim] - begin))
            assert same(fb.get_sharded(name, dim), wanted), (name, dim)
        assert same(fb.get_sharded(name, -1), tensor)
        pushed = fb.push_tensor(name, size - 1)
        assert (pushed is None) == (rank != size - 1)
        assert pushed is None or same(pushed, tensor)
    try:
        fb.get_tensor("none")
    except ValueError as error:
        assert "was not found in files" in str(error)
    else:
        raise AssertionError("no error")
    fb.close()
    loader.close()

    for strategy in ("auto", "slice", "broadcast", "scatter"):
        loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", strategy=strategy)
        loader.add_filenames({0: files[:3], 1: files[3:]})
        fb = loader.copy_files_to_device(dtype=DType.F32)
        for name, tensor in {**expected, "large": large}.items():
            floats = tensor.is_floating_point() and not tensor.is_complex()
            tensor = tensor.float() if floats else tensor
            assert same(fb.get_tensor(name), tensor), (strategy, name)
            for dim in range(tensor.dim()):
                block = -(-tensor.shape[dim] // size)
                begin = min(rank * block, tensor.shape[dim])
                wanted = tensor.narrow(dim, begin, min(block, tensor.shape[dim] - begin))
                assert same(fb.get_sharded(name, dim), wanted), (strategy, name, dim)
            assert same(fb.get_sharded(name, -1), tensor)
        try:
            fb.get_sharded("large", 7)
        except ValueError as error:
            assert "no dimension 7" in str(error)
        else:
            raise AssertionError("no error")
        fb.close()
        loader.close()

    files.pop()
    calls = []
    real = dist.broadcast
    dist.broadcast = lambda *a, **k: (calls.append(1), real(*a, **k))[1]
    for options in ({}, {"broadcast_run_tensors": 3}, {"broadcast_run_bytes": 100},
                    {"broadcast_run_bytes": 0}, {"overlap_io": False}):
        calls.clear()
        got = dict(ParallelLoader(dist.group.WORLD, files, use_tqdm_on_load=False, **options))
        assert set(got) == set(expected)
        assert all(same(got[name], expected[name]) for name in expected)
        # 4 files of 9 tensors with bytes and one without.
        wanted = {"broadcast_run_tensors": 16, "broadcast_run_bytes": None}
        key = next(iter(options), "")
        if key in ("", "overlap_io"):
            assert len(calls) == 4, (options, len(calls))
        elif options.get("broadcast_run_bytes") == 0:
            assert len(calls) == 36, (options, len(calls))
        elif wanted[key]:
            assert len(calls) == wanted[key], (options, len(calls))
    dist.broadcast = real
    assert set(got) == set(expected)
    assert all(same(got[name], expected[name]) for name in expected)
    mine = dict(ParallelLoader(dist.group.WORLD, files, use_tqdm_on_load=False, all_local=True,
                               tensor_filter=lambda name: name.endswith(str(rank))))
    assert all(same(mine[name], expected[name]) for name in mine)
    alone = dict(ParallelLoader(None, files, use_tqdm_on_load=False))
    assert set(alone) == set(expected)
    if size == 3:
        group = dist.new_group([1, 2])
        if rank > 0:
            sub = SafeTensorsFileLoader(group, "cpu")
            sub.add_filenames({0: files[:2], 1: files[2:]})
            inner = sub.copy_files_to_device()
            for name in inner.key_to_rank_lidx:
                assert same(inner.get_tensor(name), expected[name])
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads of a subgroup may outlive it, and abort an ordinary exit
""")


@pytest.mark.parametrize("size", [2, 3])
def test_ranks(tmp_path, torch, size):
    """Broadcast, shards and pushes work for every dtype, uneven files, empty shards and
    subgroups."""
    from fastsafetensors.torch import save_file

    expected = {}
    dtypes = [torch.float32, torch.bfloat16, torch.int16, torch.uint16, torch.uint64, torch.bool,
              torch.float8_e4m3fn, torch.complex64]
    for number in range(4):
        part = {f"f{number}.{i}": torch.arange(15).reshape(5, 3).to(dtype)
                for i, dtype in enumerate(dtypes)}
        part |= {f"f{number}.scalar": torch.tensor(2.0), f"f{number}.none": torch.empty(0, 2)}
        save_file(part, tmp_path / f"{number}.safetensors")
        expected |= part
    large = {"large": torch.randn(701, 800)}  # above what "auto" gives whole to all
    save_file(large, tmp_path / "large.safetensors")
    torch.save(expected | large, tmp_path / "expected.pt")
    run_ranks(RANK, tmp_path, size)
