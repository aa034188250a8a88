# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank between two messages of its group reaches the other ranks."""

import json
from pathlib import Path

import pytest
from test_rank_faults import COMMON, run_ranks, run_without_rank_1

torch = pytest.importorskip("torch")
from fastsafetensors.torch import save_file  # noqa: E402

FOLDERS = COMMON + """
from fastsafetensors.distributed import save_on_ranks, save_on_ranks_async
from fastsafetensors.training import CheckpointManager
mine = {f"t{rank}": torch.ones(3)}
bad_names = ("a\\0b", "\\ud800/b")
for number, bad in enumerate(bad_names):
    for save in (save_on_ranks, lambda *given: save_on_ranks_async(*given).wait()):
        try:
            save(mine, f"{folder}/{bad if rank == 1 else 'good'}", WORLD)
        except (RankError if rank == 0 else ValueError) as error:
            assert rank == 1 or "rank 1 failed" in str(error), error
        else:
            raise AssertionError(bad)
        dist.barrier()
        assert not os.path.exists(f"{folder}/good"), (save, bad)
        dist.barrier()
        save(mine, f"{folder}/next{number}", WORLD)
    manager = CheckpointManager(f"{folder}/{bad if rank == 1 else 'good'}", group=WORLD)
    manager.save(1, mine)
    try:
        manager.close()
    except (RankError if rank == 0 else ValueError) as error:
        assert rank == 1 or "rank 1 failed" in str(error), error
    else:
        raise AssertionError(bad)
    os.path.exists(f"{folder}/good") and os.rmdir(f"{folder}/good")
    dist.barrier()
finish()
"""

ENTRIES = COMMON + """
from fastsafetensors import ParallelSaver
from fastsafetensors.saver import WriteEntry
saver = ParallelSaver(num_shards=2, group=WORLD)
def entry(source):
    return WriteEntry(f"t{rank}", DType.F32, [3], 12, source)
good = entry(torch.ones(3))
for bad in (entry(None), entry(torch.ones(5)), 7):
    fails(lambda: saver.save_entries([bad if rank == 1 else good], f"{folder}/saved"),
          own=(ValueError, AttributeError))
    saver.save_entries([good], f"{folder}/saved")
finish()
"""

GONE = COMMON + """
from fastsafetensors import distributed
real = os.open
if rank == 1:
    def refuse(path, *arguments, **options):
        if str(path).endswith("large.safetensors"):
            raise PermissionError(13, "refused")
        return real(path, *arguments, **options)
    distributed.os.open = refuse
found = distributed.load_sharded(f"{folder}/large.safetensors", {"w": None}, WORLD)
assert found["w"].eq(1).all()
finish()
"""

TEXTLESS = COMMON + """
from fastsafetensors._ranks.agreement import Agreement
from fastsafetensors._ranks.torch_group import open_group
class Textless(Exception):
    def __str__(self):
        raise KeyError
agreement = Agreement(open_group(WORLD))
try:
    agreement.agree("it", error=Textless() if rank == 1 else None)
except (Textless if rank == 1 else RankError) as error:
    assert rank == 1 or "rank 1 failed in it: Textless" in str(error)
else:
    raise AssertionError
agreement.agree("it")
finish()
"""


DIFFERENT = COMMON + """
from fastsafetensors._ranks.torch_group import TorchProcessGroup
from fastsafetensors.distributed import load_sharded, save_on_ranks
path = f"{folder}/large.safetensors"
# One rank loads, with and without the file, while the other one saves.
for source in (path, f"{folder}/none"):
    try:
        if rank == 0:
            load_sharded(source, {"w": 0}, WORLD)
        else:
            save_on_ranks({"t": torch.ones(3)}, f"{folder}/saved", WORLD)
    except RankError as error:
        assert "ranks do different things: rank 0 came to the sharded load" in str(error), error
    else:
        raise AssertionError
# A rank without the file requests something else.
try:
    load_sharded(path if rank == 0 else f"{folder}/none", {"w": rank}, WORLD)
except (RankError, ValueError) as error:
    assert rank == 1 or "rank 1 failed in the sharded load" in str(error), error
else:
    raise AssertionError
# Verified bytes do not come from a rank that did not verify them.
from fastsafetensors import verifying
with verifying(rank == 1):
    try:
        load_sharded(path, {"w": 0}, WORLD)
    except (FileNotFoundError if rank == 1 else RankError) as error:
        assert "manifest" in str(error), error
    else:
        raise AssertionError
# Ranks meet twice: to agree before they read, and to hear of errors after it.
count, gather = 0, TorchProcessGroup._gather
def counted(*given):
    global count
    count += 1
    return gather(*given)
TorchProcessGroup._gather = counted
load_sharded(path, {"w": 0}, WORLD)
assert count == 2, count
finish()
"""


INTERRUPTED = COMMON + """
import signal, time
from fastsafetensors.distributed import load_sharded
path = f"{folder}/large.safetensors"
def interrupt(*given):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.5)
else:
    time.sleep(1.5)
# The one that is interrupted comes back while the other one is in its first load.
for _ in range(2 - rank):
    try:
        load_sharded(path, {"w": 0}, WORLD)
    except (KeyboardInterrupt, RankError):
        pass
for _ in range(2):
    assert load_sharded(path, {"w": None}, WORLD)["w"].eq(1).all()
finish()
"""

UNALIGNED = COMMON + """
from fastsafetensors.distributed import load_sharded
shared = f"{folder}/shared"
os.environ["FASTSAFETENSORS_SHARE_DIR"] = shared
# Tensors that can't be views are in memory of each rank.
got = load_sharded(f"{folder}/unaligned.safetensors", {"a": None, "w": 0}, WORLD)
assert got["w"].eq(3).all() and got["w"].shape[0] == 1 << 19 and got["a"].eq(1).all()
assert not os.path.exists(shared) or not os.listdir(shared)
finish()
"""


def write_unaligned(path: Path) -> None:
    """A file whose F32 tensor begins at an odd offset, which safetensors would not write."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [1025], "data_offsets": [0, 1025]},
                         "w": {"dtype": "F32", "shape": [1 << 20],
                               "data_offsets": [1025, 1025 + (4 << 20)]}}).encode()
    header += b" " * (-len(header) % 8)
    values = torch.full((1 << 20,), 3.0).numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * 1025 + values)


@pytest.mark.parametrize("program", [FOLDERS, ENTRIES, GONE, TEXTLESS, DIFFERENT, INTERRUPTED,
                                     UNALIGNED],
                         ids=["folders", "entries", "unreadable", "textless", "different",
                              "interrupted", "unaligned"])
def test_one_rank_fails_between_two_messages(tmp_path: Path, program: str) -> None:
    """The other ranks get a RankError, or the result, and the group is as good as before."""
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "large.safetensors")
    write_unaligned(tmp_path / "unaligned.safetensors")
    for number in range(4):
        save_file({f"t{number}.a": torch.full((4,), float(number))},
                  tmp_path / f"{number}.safetensors")
    run_ranks(program, tmp_path, 2)


LOST_BEFORE = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from fastsafetensors import RankError
from fastsafetensors.distributed import load_sharded, save_on_ranks, save_on_ranks_async
from fastsafetensors.training import CheckpointManager

folder, store, rank, size, way = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size,
                        timeout=datetime.timedelta(seconds=6))
group, tensors = dist.group.WORLD, {f"t{rank}": torch.ones(3)}
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
calls = {
    "load": lambda: load_sharded(f"{folder}/none", {"a": 0}, group),
    "save": lambda: save_on_ranks(tensors, f"{folder}/out", group),
    "save later": lambda: save_on_ranks_async(tensors, f"{folder}/out", group).wait(),
    "checkpoints": lambda: CheckpointManager(f"{folder}/run", group=group),
}
for call in (calls[way], calls["save"]):  # the second one fails at once, and names it as well
    try:
        call()
    except RankError as error:
        open(f"{folder}/said.{rank}", "a").write(f"{error}\\n")
open(f"{folder}/end.{rank}", "w").close()
while len([name for name in os.listdir(folder) if name.startswith("end.")]) < size - 1:
    time.sleep(0.05)  # a rank that ended now would be named as well
os._exit(0)
"""


@pytest.mark.parametrize("way", ["load", "save", "save later", "checkpoints"])
def test_a_rank_that_was_lost_before_is_named(tmp_path, way):
    """Also where the group's first message meets the loss."""
    run_without_rank_1(LOST_BEFORE, tmp_path, way)
    for rank in (0, 2, 3):
        lines = (tmp_path / f"said.{rank}").read_text().splitlines()
        assert len(lines) == 2, lines
        for line in lines:
            assert "1" in line.partition("yet from rank")[2].partition(":")[0], line
