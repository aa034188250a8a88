# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager in a group of ranks: one complete checkpoint of all ranks, or none."""

import json
import random
import shutil
import subprocess
import sys
import time

import pytest
from test_rank_faults import COMMON, run_ranks

torch = pytest.importorskip("torch")
from fastsafetensors.checkpoint import consolidate  # noqa: E402
from fastsafetensors.torch import load_file  # noqa: E402
from fastsafetensors.training import CheckpointManager  # noqa: E402

RUN = COMMON + """
from fastsafetensors.training import RNG, CheckpointManager
def steps():
    return sorted(int(name[5:]) for name in os.listdir(run))
def fill(value):
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(value))
    counts["step"], state["epoch"] = value, value
def check(value):
    for parameter in model.parameters():
        assert parameter.eq(value).all(), (rank, value, parameter)
    assert counts["step"] == state["epoch"] == value, (rank, value, state)
def all_agree(value):
    every = [None] * size
    dist.all_gather_object(every, value)
    assert len(set(every)) == 1, every
    return value
run = f"{folder}/run"
side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=300))
model, counts = torch.nn.Linear(300, 200 + rank), {}
model.register_parameter("tied", model.weight)
state = {"model": model, "counts": counts, "epoch": 0, "rng": RNG}
options = {"group": side, "keep_last": 2, "timeout": 250}
"""

EACH = RUN + """
me = 100 * rank
with CheckpointManager(run, every=2, stage="lazy", **options) as manager:
    for step in range(1, 9):
        fill(step + me)
        manager.save(step, state, metric=step)
        manager.before_step()
    manager.wait()
    dist.barrier()
    assert steps() == [6, 8], steps()
    assert manager.latest().ranks == size and manager.best().step == 6
with CheckpointManager(run, **options) as manager:
    fill(-1)
    torch.manual_seed(5)
    wanted = torch.rand(1)
    assert manager.resume(state, verify=True) == 8
    check(8 + me)
    assert manager.resume(state, step=6) == 6
    check(6 + me)
    # A file of the last rank is damaged: all ranks pass the checkpoint over.
    dist.barrier()
    path = f"{run}/step-8/checkpoint-{size:05d}-of-{size:05d}.safetensors"
    if rank == 0:
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
    dist.barrier()
    assert manager.resume(state, verify=True) == 6
    check(6 + me)
    # What one rank does wrong is an error on all, and the next save works.
    for bad, kind in (({"model": object()}, TypeError), (7, TypeError),
                      ({"missing": 1}, KeyError)):
        call = manager.resume if kind is KeyError else lambda given: manager.save(10, given)
        try:
            call(bad if rank == 1 else state)
            manager.wait()
        except (kind if rank == 1 else RankError) as error:
            assert rank == 1 or "rank 1 failed" in str(error), error
        else:
            raise AssertionError(bad)
        dist.barrier()
        assert 10 not in steps(), steps()
        check(6 + me)
        dist.barrier()
    fill(12 + me)
    manager.save(12, state)
    manager.wait()
    assert manager.resume(state, verify=True) == 12
    # Different steps: an error on all, and neither folder stays.
    manager.save(20 + 2 * rank, state)
    try:
        manager.wait()
    except RankError as error:
        assert "differ" in str(error), error
    else:
        raise AssertionError("the steps differ")
    dist.barrier()
    assert steps()[-1] == 12, steps()
    dist.barrier()
    # Cancelled on one rank: on all, or it was too late.
    handle = manager.save(14, state)
    cancelled = all_agree(handle.cancel() if rank == size - 1 else handle.exception() is not None)
    manager.wait()
    dist.barrier()
    assert (14 in steps()) is not cancelled
    dist.barrier()
try:
    CheckpointManager(run, **{**options, "keep_last": 2 + (rank == 1)})
except RankError as error:
    assert "keep_last 2; rank 1 has keep_last 3" in str(error), error
else:
    raise AssertionError("the arguments differ")
try:
    CheckpointManager(run, **{**options, "best": "most" if rank == 1 else "min"})
except (ValueError if rank == 1 else RankError) as error:
    assert "best must be" in str(error), error
else:
    raise AssertionError("an argument is invalid")
finish()
"""

ANOTHER_SIZE = RUN + """
fill(0)
with CheckpointManager(run, **options) as manager:
    for arguments in ({}, {"step": 12}):
        try:
            manager.resume(state, **arguments)
        except ValueError as error:
            assert f"was saved by {size + 1} ranks, and this group has {size}" in str(error), error
        else:
            raise AssertionError("a checkpoint of another size")
    check(0)
finish()
"""

FIRST = RUN + """
with CheckpointManager(run, ranks="first", **options) as manager:
    for step in range(1, 4):
        fill(step + 100 * rank)
        manager.save(step, state if rank == 0 else {})
    manager.wait()
    dist.barrier()
    assert steps() == [2, 3]
    state["model"] = model = torch.nn.Linear(300, 200)
    model.register_parameter("tied", model.weight)
    assert manager.resume(state, verify=True) == 3
    check(3)
    handle = manager.save(4, state)
    cancelled = all_agree(handle.cancel() if rank == 1 else handle.exception() is not None)
    manager.wait()
    dist.barrier()
    assert (4 in steps()) is not cancelled
dist.barrier()
finish()
"""

DIES = RUN + """
side = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=20))
manager = CheckpointManager(run, **{**options, "group": side, "timeout": 15})
fill(1)
manager.save(1, state)
manager.wait()
dist.barrier()
if rank == 1 and sys.argv[5] == "before":
    os._exit(0)
fill(2)
state["large"] = torch.ones(30_000_000)
manager.save(2, state)
if rank == 1:
    os._exit(0)
try:
    manager.wait()
except RankError as error:
    assert "rank 1 has ended" in str(error), error
else:
    assert sys.argv[5] == "during"  # it had agreed before it died
try:
    manager.resume(state)
except RankError as error:
    assert "rank 1 has ended" in str(error), error
else:
    raise AssertionError("it resumed without rank 1")
os._exit(0)
"""

AGAIN = RUN + """
with CheckpointManager(run, **options) as manager:
    begin = manager.resume(state, verify=True)
    if begin:
        check(begin + 100 * rank)
    newest = [int(name[5:]) for name in os.listdir(run)]
    # A save that was killed between its files and their manifest has none.
    complete = [step for step in newest if os.path.exists(f"{run}/step-{step}/model.manifest")]
    assert begin == max(complete, default=0), (begin, newest)
    assert not [name for step in newest for name in os.listdir(f"{run}/step-{step}")
                if name.startswith(".")]
    dist.barrier()
    print(begin, flush=True)
    if sys.argv[5] == "look":
        manager.close()
        finish()
    for step in range(begin + 1, begin + 100000):
        fill(step + 100 * rank)
        manager.save(step, state)
"""


REFUSED = RUN + """
import logging
logging.disable(logging.CRITICAL)
with CheckpointManager(run, **options) as manager:
    fill(1 + rank)
    manager.save(1, state)
    manager.wait()
    for what in range(3):
        # A save fails on the disk, and the next save() raises that error.
        if rank == 0:
            open(f"{run}/step-{2 + what}", "w").close()
        dist.barrier()
        manager.save(2 + what, state).exception()
        try:
            manager.save(9, state)
        except Exception as error:
            assert "step-" in str(error) or "rank" in str(error), error
        else:
            raise AssertionError("the failure before was not raised")
        fill(-1)
        assert manager.resume(state) == 1
        check(1 + rank)
    if rank == 0:
        for step in (2, 3, 4):
            os.unlink(f"{run}/step-{step}")
    dist.barrier()
    # An invalid step on one rank is an error on both, and the next save works.
    try:
        manager.save("7" if rank == 1 else 7, state)
        manager.wait()
    except (TypeError if rank == 1 else RankError) as error:
        assert rank == 1 or "rank 1 failed" in str(error), error
    else:
        raise AssertionError("the step is invalid")
    manager.save(8, state)
    manager.wait()
    assert manager.resume(state) == 8
    # One rank does something else: an error on both, no abort.
    try:
        if rank == 0:
            manager.resume(state)
        else:
            manager.save(5, state)
            manager.wait()
    except RankError as error:
        assert "do different things" in str(error), error
    else:
        raise AssertionError("the ranks did different things")
    dist.barrier()
    assert steps() == [1, 8], steps()
finish()
"""

SUPERSEDED = RUN + """
from fastsafetensors.distributed import save_on_ranks_async
if sys.argv[5] == "slow calls":
    from fastsafetensors._ranks.ranks_async import JointSave
    set_target = JointSave.set_target
    def set_target_later(*arguments):
        time.sleep(0.02)
        set_target(*arguments)
    JointSave.set_target = set_target_later
with CheckpointManager(run, overlap="supersede", **options) as manager:
    big = torch.zeros(3_000_000)
    for step in range(1, 40):
        manager.save(step, {"x": big})
    manager.wait()
    dist.barrier()
    assert len(steps()) <= 2, steps()
    assert not [name for name in os.listdir(run) if not os.listdir(f"{run}/{name}")]
# The folder of the first save, whose parent the second one needs as well.
for number in range(6):
    first, second = (save_on_ranks_async({f"x{rank}": big}, f"{folder}/new{number}/{name}", side,
                                         overlap="supersede") for name in "ab")
    second.wait()
    first.exception()
    dist.barrier()
    assert sorted(os.listdir(f"{folder}/new{number}")) in (["b"], ["a", "b"])
    assert all(os.listdir(f"{folder}/new{number}/{name}")
               for name in os.listdir(f"{folder}/new{number}"))
    dist.barrier()
finish()
"""

FAILS_ONCE = RUN + """
options["keep_last"] = None
manager = CheckpointManager(run, **options)
for step in range(1, 8):
    bad = {"x": object()} if (step, rank) == (2, 1) else {}
    try:
        handle = manager.save(step, {**state, **bad})
        failed = handle.exception() is not None
    except Exception as error:
        assert str(error).count("an earlier checkpoint failed") <= 1, error
        failed = True
    assert not failed or step in (2, 3), step
    all_agree(failed)
manager.close()  # the failure of step 3 was that of step 2, which was raised
dist.barrier()
assert steps() == [1, 4, 5, 6, 7], steps()
"""

INTERRUPTED = RUN + """
from fastsafetensors import _core
from fastsafetensors._saving import save_handles
class Interrupted:
    def __init__(self):
        self._core = _core.AsyncSave()
    def __getattr__(self, name):
        return getattr(self._core, name)
    def start(self, *arguments, **options):
        self._core.start(*arguments, **options)
        raise KeyboardInterrupt
class Core:
    AsyncSave = Interrupted
    def __getattr__(self, name):
        return getattr(_core, name)
options["keep_last"] = None
with CheckpointManager(run, stage=sys.argv[5], **options) as manager:
    manager.save(1, {"x": torch.ones(3)}).wait()
    save_handles._core = Core() if rank == 1 else _core
    try:
        handle = manager.save(2, {"x": torch.full((20_000_000,), 2.0)})
        assert rank == 0
    except KeyboardInterrupt:
        assert rank == 1
    save_handles._core = _core
    found = {"x": None}
    assert all_agree(manager.resume(found)) in (1, 2)
    assert not manager._saving
    dist.barrier()
    manager.save(3, {"x": torch.full((5 + rank,), 3.0)}).wait()
    manager.wait()
    found = {"x": None}
    assert manager.resume(found) == 3 and found["x"].eq(3).all()
dist.barrier()
assert [one.step for one in CheckpointManager(run).checkpoints()] == steps()
"""

LATE = RUN + """
import time
short = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=300))
manager = CheckpointManager(run, **{**options, "group": short, "timeout": 1.5})
manager.save(1, state).wait()
for step in (2, 3, 4):
    if rank == 1 and step == 2:
        time.sleep(4)
    try:
        manager.save(step, state).wait()
        raise AssertionError(step)
    except RuntimeError:
        pass
try:
    manager.close()
except RuntimeError:
    pass
again = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=300))
with CheckpointManager(run, **{**options, "group": again}) as manager:
    manager.save(5, state).wait()
dist.barrier()
assert 5 in steps(), steps()
"""


@pytest.fixture
def folder(tmp_path):
    """Return an empty folder."""
    return tmp_path


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_saves_its_state(folder, size):
    """Every rank resumes from its own state of the newest step that all can read."""
    run_ranks(EACH, folder, size)
    found = folder / "run/step-12"
    names = {path.name for path in found.iterdir()}
    assert names == {"checkpoint.safetensors.index.json", "model.manifest",
                     *(f"checkpoint-{at:05d}-of-{size:05d}.safetensors"
                       for at in range(1, size + 1))}
    with CheckpointManager(folder / "run") as manager:
        latest = [one for one in manager.checkpoints() if one.step == 12][0]
        with pytest.raises(ValueError, match=f"the states of {size} ranks: rank must be 0 to"):
            latest.load()
        with pytest.raises(ValueError, match="read it with Checkpoint.load|rank must be 0 to"):
            manager.resume({"epoch": 1}, step=12)
        for rank in range(size):
            assert latest.load(rank=rank, verify=True)["epoch"] == 12 + 100 * rank
    if size == 3:
        (folder / "store").unlink(missing_ok=True)
        run_ranks(ANOTHER_SIZE, folder, 2)
    path = consolidate(found, folder / "hf", prefix="rank-1.model.")
    found = load_file(path)
    assert found.keys() == {"weight", "bias", "tied"}
    assert all(found[name].eq(112).all() for name in found)


def test_the_first_rank_saves_for_all(folder):
    """The checkpoint is an ordinary one, which any number of ranks and one process can load."""
    run_ranks(FIRST, folder, 2)
    with CheckpointManager(folder / "run") as manager:
        model = torch.nn.Linear(300, 200)
        model.register_parameter("tied", model.weight)
        assert manager.resume({"model": model}, step=3, verify=True) == 3
        assert model.weight.eq(3).all()


def test_a_failure_of_one_rank_is_over_after_one_more_save(folder):
    """The error that repeats it on another rank does not fail a further save."""
    run_ranks(FAILS_ONCE, folder, 2)


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_an_interrupted_rank_cancels_the_save(folder, stage):
    """Ctrl-C when its part has started: the save ends on all ranks before the next one begins."""
    run_ranks(INTERRUPTED, folder, 2, stage)


UNLISTED = RUN + """
manager = CheckpointManager(run, group=side)
fill(1)
manager.save(1, state)
manager.wait()
from fastsafetensors import training
real = training.find_newest
def refuse(*arguments):
    raise PermissionError(13, "refused")
for _ in range(2):
    training.find_newest = refuse if rank == 1 else real
    try:
        manager.resume(state)
    except (OSError, RuntimeError) as error:
        assert "refused" in str(error), error
        assert isinstance(error, OSError) == (rank == 1), error
    else:
        raise AssertionError
training.find_newest = real
fill(9)
assert manager.resume(state) == 1
check(1)
manager.close()
finish()
"""


def test_an_error_of_one_rank_in_listing_the_steps_is_one_on_all(folder):
    """A rank may lose its mount of the folder."""
    run_ranks(UNLISTED, folder, 2)


def test_calls_after_a_refused_save(folder):
    """They wait until the save that was refused uses the group no more."""
    run_ranks(REFUSED, folder, 2)


@pytest.mark.parametrize("calls", ["quick calls", "slow calls"])
def test_superseded_saves_leave_no_folders(folder, calls):
    """Nothing is left of a save that was cancelled while it wrote, or while another was called."""
    run_ranks(SUPERSEDED, folder, 2, calls)


def test_a_late_rank_ends_the_saves_of_its_group(folder):
    """Each save is an error until there is a new group; no process is aborted by gloo."""
    run_ranks(LATE, folder, 2)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_rank_that_dies_is_named(folder, when):
    """The save fails on the others within the time limit, and the old checkpoint stays."""
    run_ranks(DIES, folder, 2, when)
    with CheckpointManager(folder / "run") as manager:
        steps = [one.step for one in manager.checkpoints()]
        assert steps in ([1], [1, 2]) and (when == "during" or steps == [1])
        assert manager.latest().load(rank=1, verify=True)["epoch"] == steps[-1]
    left = {path.name for step in (folder / "run").iterdir() for path in step.iterdir()}
    assert not [name for name in left if name.startswith(".")], left


def test_ranks_killed_at_random_moments(folder):
    """After kill -9 of all ranks, or of one, the next run resumes from a complete checkpoint."""
    generator = random.Random(7)
    last, size = 0, 2
    for number in range(5):
        (folder / "store").unlink(missing_ok=True)
        ranks = [subprocess.Popen([sys.executable, "-c", AGAIN, folder, folder / "store", str(rank),
                                   str(size), "run"], stdout=subprocess.PIPE, text=True)
                 for rank in range(size)]
        begins = [json.loads(rank.stdout.readline()) for rank in ranks]
        assert begins[0] == begins[1] >= last
        last = begins[0]
        time.sleep(0.2 + generator.random() * 0.5)
        for rank in ranks[number % 2:]:
            rank.kill()
        if number % 2:
            time.sleep(generator.random() * 0.2)
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    assert last > 0
    (folder / "store").unlink(missing_ok=True)
    run_ranks(AGAIN, folder, size, "look")
    shutil.rmtree(folder / "run")
