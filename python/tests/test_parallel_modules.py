# SPDX-License-Identifier: Apache-2.0
"""Modules that torch has split (FSDP2, tensor parallelism), saved and loaded
by the two ranks of a gloo group; and tensors over a forkserver."""

import multiprocessing
import textwrap

import pytest
from conftest import same_bits
from test_rank_faults import run_ranks

RANK = textwrap.dedent("""
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from fastsafetensors.torch import load_file, load_model, save_file, save_model

    folder, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    way = sys.argv[5]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(6, 10)
            self.down = torch.nn.Linear(10, 5)
            self.norm = torch.nn.BatchNorm1d(5)

        def forward(self, x):
            return self.norm(self.down(torch.relu(self.up(x))))

    def split(net):
        if way == "fsdp2":
            from torch.distributed.fsdp import fully_shard
            for layer in (net.up, net.down):
                fully_shard(layer, mesh=mesh)
            return fully_shard(net, mesh=mesh)
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module)
        return parallelize_module(
            net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    torch.manual_seed(3)  # the same on all ranks
    wanted = Net()
    wanted.norm.running_mean.fill_(7.0)
    wanted = {name: tensor.clone() for name, tensor in wanted.state_dict().items()}
    if rank == 0:
        save_file(wanted, f"{folder}/whole.st")
    dist.barrier()

    def check(net, where):
        split_tensors = 0
        for name, tensor in net.state_dict().items():
            split_tensors += isinstance(tensor, DTensor)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, wanted[name]), (where, name)
        assert split_tensors >= 3, (where, split_tensors)

    def fresh():
        torch.manual_seed(9)
        return split(Net())

    net = fresh()
    assert load_model(net, f"{folder}/whole.st") == (set(), [])
    check(net, "load_model")

    # Saved as they are they would lack what the other rank has: refused, and no file is left.
    for save_whole in (lambda path: save_file(net.state_dict(), path),
                       lambda path: save_model(net, path)):
        try:
            save_whole(f"{folder}/refused.{rank}.st")
        except (RuntimeError, ValueError, TypeError) as error:
            assert "full_tensor" in str(error), error
        else:
            raise AssertionError("a part was saved as the whole")
    assert not os.path.exists(f"{folder}/refused.{rank}.st")
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in net.state_dict().items()}
    save_file(full, f"{folder}/full.{rank}.st")
    again = load_file(f"{folder}/full.{rank}.st")
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)

    from torch.distributed.checkpoint import load, save
    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter
    save(net.state_dict(), storage_writer=FastSafetensorsWriter(f"{folder}/set"))
    net = fresh()
    state = net.state_dict()
    load(state, storage_reader=FastSafetensorsReader(f"{folder}/set"))
    net.load_state_dict(state)
    check(net, "checkpoint")
    assert all(torch.equal(t, wanted[n]) for n, t in load_file(f"{folder}/set").items())
    # One step of training with what was loaded: gradients reach the parts.
    net(torch.ones(4, 6)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    dist.destroy_process_group()
""")


@pytest.mark.parametrize("way", ["fsdp2", "tensor parallel"])
def test_split_modules_round_trip(torch, tmp_path, way):
    pytest.importorskip("torch.distributed.fsdp")
    if way == "fsdp2" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    run_ranks(RANK, tmp_path, 2, way)


def _read_in_server(path, name, out):
    """Runs in a process that neither forked nor inherited the handle, which was pickled."""
    out.put((path[name].tolist(), len(path)))


def test_handles_and_tensors_through_a_forkserver(torch, tmp_path):
    """A handle with readahead is pickled to a forkserver's child, which reads the right bytes."""
    from fastsafetensors import safe_open
    from fastsafetensors.torch import load_file, save_file

    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(20)}
    save_file(tensors, tmp_path / "m.st")
    context = multiprocessing.get_context("forkserver")
    out = context.Queue()
    with safe_open(tmp_path / "m.st", "pt") as f:
        for i in range(5):
            f.get_tensor(f"t{i}")
        child = context.Process(target=_read_in_server, args=(f, "t7", out))
        child.start()
        assert out.get(timeout=600) == ([7.0] * 1000, 20)
        child.join(60)
        assert child.exitcode == 0
        assert same_bits(torch, f.get_tensor("t8"), tensors["t8"])
    loaded = load_file(tmp_path / "m.st")
    child = context.Process(target=_read_in_server, args=(loaded, "t3", out))
    child.start()  # torch sends the memory itself
    assert out.get(timeout=600)[0] == [3.0] * 1000
    child.join(60)
    assert child.exitcode == 0
