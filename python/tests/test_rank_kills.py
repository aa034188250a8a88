# SPDX-License-Identifier: Apache-2.0
"""kill -9 of ranks during a joint save: the old model or the new one remains.

tests/unit/save/test_publish_faults.c ends the process at each system call of the publishing step.
Here every API that saves on ranks is killed at random moments.
"""

import subprocess
import sys
import textwrap

import pytest

KILLED = textwrap.dedent("""
    import datetime, os, random, signal, sys, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from fastsafetensors import ParallelSaver
    from fastsafetensors.checkpoint import FastSafetensorsWriter
    from fastsafetensors.distributed import save_on_ranks
    from fastsafetensors.torch import load_file

    folder, kind, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ranks = 1 if kind == "saver alone" else 2
    target = f"{folder}/model"
    torch.set_num_threads(1)

    def tensors(rank, value):
        return {f"{rank}.{i}": torch.full((1 << 15,), value) for i in range(6)}

    def save(rank, value, group):
        if kind == "ranks":
            save_on_ranks(tensors(rank, value), target, group)
        elif kind == "checkpoint":
            dcp.save(tensors(rank, value), no_dist=group is None,
                     storage_writer=FastSafetensorsWriter(target, max_shard_size=1 << 19))
        else:
            saver = ParallelSaver(num_shards=4, group=group, timeout=600)
            saver.save(tensors(rank, value), f"{target}/model")

    def whole():
        found = load_file(target, mode="load")
        values = {int(v) for t in found.values() for v in t.unique()}
        assert len(found) == 6 * ranks and len(values) == 1, (len(found), values)
        return values.pop()

    def run(rank, store, first, told):
        group = None
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                    world_size=ranks, timeout=datetime.timedelta(seconds=600))
            group = dist.group.WORLD
        for value in range(first, first + 1000):
            save(rank, value, group)
            if rank == 0 and value == first:
                os.write(told, b".")

    rng = random.Random(11)
    seen = set()
    for number in range(rounds):
        reading, told = os.pipe()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    run(rank, f"{folder}/store{number}", 1000 * (number + 1), told)
                finally:
                    os._exit(1)
            children.append(child)
        os.close(told)
        assert os.read(reading, 1) == b".", "no save ended"
        os.close(reading)
        time.sleep(rng.random() * 0.12)
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        seen.add(whole())
    visible = [name for name in os.listdir(target) if not name.startswith(".")]
    assert len(seen) == rounds, seen
    print(sorted(visible))
    os._exit(0)
""")


@pytest.mark.parametrize("kind", ["ranks", "checkpoint", "saver", "saver alone"])
def test_killed_while_ranks_save(tmp_path, torch, kind):
    """After every kill the folder has one complete model, and the next save works."""
    rounds = 25
    child = subprocess.run([sys.executable, "-c", KILLED, tmp_path, kind, str(rounds)],
                           capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr[-3000:]
