# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts, simulated by network namespaces. Needs root."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

CODE = textwrap.dedent("""
    import datetime, os, sys
    import torch
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader, RankError, SafeTensorsFileLoader
    from fastsafetensors.sharded import load_sharded

    folder, rank, size, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method="tcp://10.213.7.1:29517", rank=rank,
                            world_size=size, timeout=datetime.timedelta(seconds=600))
    path = f"{folder}/model.safetensors"
    big = torch.arange(300 * 1000, dtype=torch.float32).reshape(300, 1000)
    loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", timeout=600)
    try:
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
    except (RankError, FileNotFoundError) as error:
        # One host lacks the file: both know, and which it was.
        assert way == "one" and "model.safetensors" in str(error), error
        if rank == 0:
            assert "rank 1 failed" in str(error), error
        # A sharded load gets the parts of the host without the file from the one that has it.
        got = load_sharded(path, {"big": 0, "small": None}, dist.group.WORLD)
        assert torch.equal(got["big"], big.chunk(size)[rank]) and got["small"].eq(1).all()
        dist.barrier()
        os._exit(0)
    assert way == "both"
    assert torch.equal(buffer.get_tensor("big"), big)
    assert torch.equal(buffer.get_sharded("big", 0), big.chunk(size)[rank])
    assert torch.equal(buffer.get_sharded("big", 1), big.chunk(size, 1)[rank])
    for strategy in ("slice", "scatter", "broadcast", "auto"):
        got = load_sharded(path, {"big": 0, "small": None}, dist.group.WORLD, strategy=strategy)
        assert torch.equal(got["big"], big.chunk(size)[rank]), strategy
    everything = dict(ParallelLoader(dist.group.WORLD, [path], use_tqdm_on_load=False))
    assert torch.equal(everything["big"], big)
    dist.barrier()
    os._exit(0)
""")


def ip(*words):
    """Run the ip command."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts():
    """Return the names of two network namespaces that reach one another."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"fst{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"v{os.getpid()}a", "type", "veth", "peer", "name", f"v{os.getpid()}b")
        for side, name in enumerate(names):
            device = f"v{os.getpid()}{'ab'[side]}"
            ip("link", "set", device, "netns", name)
            ip("-n", name, "link", "set", device, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.213.7.{side + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("way", ["both", "one"])
def test_two_hosts(hosts, tmp_path, torch, way):
    """Each host has its own disk; with "one", only the first has the file on it."""
    from fastsafetensors.torch import save_file

    big = torch.arange(300 * 1000, dtype=torch.float32).reshape(300, 1000)
    for side in range(2):
        (tmp_path / f"host{side}").mkdir()
        if side == 0 or way == "both":
            save_file({"big": big, "small": torch.ones(3)},
                      tmp_path / f"host{side}/model.safetensors")
    ranks = [subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", CODE, tmp_path / f"host{side}",
         str(side), "2", way],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"})
        for side, name in enumerate(hosts)]
    try:
        said = [rank.communicate(timeout=900)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
