# SPDX-License-Identifier: Apache-2.0
"""Ranks with invalid arguments, and time limits that end while rank 0 publishes a model."""

import pytest
from test_rank_faults import COMMON, run_ranks

torch = pytest.importorskip("torch")

# No rank waits for its time limit, which is longer than the test's.
ARGUMENTS = COMMON + """
from fastsafetensors import ParallelSaver
from fastsafetensors.distributed import (
    load_model_sharded, load_sharded, save_on_ranks, save_on_ranks_async)
from fastsafetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
if rank == 0:
    save_file({"w": torch.arange(8.0)}, f"{folder}/w.safetensors")
dist.barrier()
mesh = init_device_mesh("cpu", (size,))
mine = {f"r{rank}": torch.ones(3)}
saver = ParallelSaver(num_shards=size, group=WORLD, timeout=900)

def check(call, bad, good, kind, *words):
    try:
        call(**(bad if rank == 1 else good))
    except (kind if rank == 1 else RankError) as error:
        for word in ("rank 1 failed", *words) if rank != 1 else words:
            assert word in str(error), (rank, word, str(error))
    else:
        raise AssertionError(f"no error on rank {rank}: {bad}")
    assert call(**good) is not None

def load(**options):
    return load_sharded(f"{folder}/w.safetensors", {"w": 0}, WORLD, **{"timeout": 900, **options})

def load_model(**options):
    return load_model_sharded(f"{folder}/w.safetensors", mesh, **{"timeout": 900, **options})

def save(target=f"{folder}/saved", **options):
    return save_on_ranks(mine, target, WORLD, **{"timeout": 900, **options})

def save_async(target=f"{folder}/saved", **options):
    handle = save_on_ranks_async(mine, target, WORLD, **{"timeout": 900, **options})
    handle.wait()
    return handle

def save_parallel(base=f"{folder}/parallel"):
    return saver.save(mine, base)

for call in (load, load_model):
    check(call, {"strategy": "slices"}, {}, ValueError, "strategy must be one of")
    check(call, {"strategy": "slices"}, {"strategy": "slice"}, ValueError, "strategy must be")
    check(call, {"timeout": "x"}, {"timeout": 1e300}, TypeError, "timeout must be a number")
check(load, {"device": "no such device"}, {}, Exception, "no such device")
check(load, {"device": "hip:0"}, {}, Exception, "device hip:0 is invalid", "torch for ROCm")
module = lambda: torch.nn.ParameterDict({"w": torch.zeros(8)})
check(lambda **options: load_model_sharded(module(), mesh, timeout=900, **options), {},
      {"filename": f"{folder}/w.safetensors"}, ValueError, "needs filename=")
for call in (save, save_async):
    check(call, {"durable": "x"}, {}, TypeError, "durable must be True or False")
    check(call, {"manifest": 3}, {"manifest": True}, TypeError, "manifest must be")
    check(call, {"timeout": float("nan")}, {}, ValueError, "timeout must be")
    check(call, {"target": 3}, {}, TypeError, "folder must be a path")
    check(call, {"target": "s3://bucket/x"}, {}, NotImplementedError, "addresses")
check(save_parallel, {"base": 3}, {}, TypeError)
for wrong in ("mesh", None):
    try:
        load_model_sharded(f"{folder}/w.safetensors", wrong)
    except TypeError as error:
        assert "mesh must be a DeviceMesh" in str(error)
    else:
        raise AssertionError("no error")
finish()
"""

# Rank 0 publishes for longer than the others may wait; then rank 1 comes late to the outcome.
LIMITS = COMMON + """
from fastsafetensors._ranks import publish
from fastsafetensors.distributed import save_on_ranks
from fastsafetensors.torch import load_file
target, real = f"{folder}/saved", publish.publish_set
late = {"publication": 0, "outcome": 0}

def publish_late(*arguments):
    real(*arguments)
    time.sleep(late["publication"])
publish.publish_set = publish_late
agree = publish.Agreement.agree

def come(self, what, *arguments, **options):
    if what == "the publication" and rank == 1:
        time.sleep(late["outcome"])
    return agree(self, what, *arguments, **options)
publish.Agreement.agree = come

def save(value):
    save_on_ranks({f"r{rank}": torch.full((3,), value)}, target, WORLD, timeout=6)

def has(value):
    dist.barrier()
    assert all(tensor.eq(value).all() for tensor in load_file(target, mode="load").values())
    dist.barrier()
save(1.0)
has(1)
late["publication"] = 9
save(2.0)
has(2)
# Rank 1 does not come in time: rank 0 says that its model is there.
late.update(publication=0, outcome=10)
try:
    save(3.0)
    assert rank != 0
except RankError as error:
    assert rank == 0 and "rank 1 is late or stuck: all other ranks have" in str(error), error
    assert str(error).endswith(". The new model is in place"), error
assert all(tensor.eq(3).all() for tensor in load_file(target, mode="load").values())
if rank == 1:
    open(f"{folder}/ended", "w").close()
while not os.path.exists(f"{folder}/ended"):  # rank 1 would miss a rank that has ended
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.parametrize("size", [2])
def test_an_invalid_argument_of_one_rank_is_an_error_on_all(tmp_path, size):
    """The others hear of it in the first agreement instead of waiting for their time limit."""
    run_ranks(ARGUMENTS, tmp_path, size)


def test_the_publication_does_not_count_as_waiting(tmp_path):
    """A model that rank 0 has published is no error on other ranks, or one that says so."""
    run_ranks(LIMITS, tmp_path, 2)


UNPUBLISHED = COMMON + """
from fastsafetensors.distributed import save_on_ranks
target = f"{folder}/saved"
if rank == 0:
    os.makedirs(f"{target}/model.safetensors.index.json")
dist.barrier()
for _ in range(2):
    try:
        save_on_ranks({f"r{rank}": torch.ones(3000)}, target, WORLD)
    except (OSError, RuntimeError) as error:
        assert "a folder" in str(error), error
    else:
        raise AssertionError
    dist.barrier()
    assert os.listdir(target) == ["model.safetensors.index.json"], os.listdir(target)
    dist.barrier()
finish()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_cannot_be_published_leaves_no_files(tmp_path, size):
    """Each rank removes its file, which is complete."""
    run_ranks(UNPUBLISHED, tmp_path, size)
