# SPDX-License-Identifier: Apache-2.0
"""Ranks of a CheckpointManager that save, delete and resume at different moments."""

from pathlib import Path

import pytest
from test_checkpoint_ranks import RUN
from test_rank_faults import run_ranks

pytest.importorskip("torch")
ORDER = RUN + """
options["keep_last"] = 1
for number in range(5):
    if rank == 0:
        with CheckpointManager(run) as alone:
            for step in (1, 2, 3):
                alone.save(step, {"x": step})
    dist.barrier()
    with CheckpointManager(run, **options) as manager:
        manager.save(4, {"x": 40 + number})
        if rank == 0:  # the other ranks come to the next save before old steps are deleted
            manager.wait()
        manager.save(3, {"x": 30 + number})
        manager.wait()
        dist.barrier()
        assert steps() == [3, 4], steps()
        assert rank == 0 or not manager._old._begun
        assert manager.resume({"x": 0}, step=3) == 3
        dist.barrier()
finish()
"""


def test_a_step_is_saved_again_while_rank_0_deletes_it(tmp_path: Path) -> None:
    """The other ranks begin to save a step again when rank 0 has deleted it."""
    run_ranks(ORDER, tmp_path, 2)


DELETES = RUN + """
import pathlib
options["keep_last"] = 1
with CheckpointManager(run, **options) as manager:
    manager.save(1, {"x": 1})
    manager.wait()
    if rank == 0:
        rename = pathlib.Path.rename
        def rename_late(*arguments):
            time.sleep(0.5)
            return rename(*arguments)
        pathlib.Path.rename = rename_late
    manager.save(2, {"x": 2}).wait()
    assert [one.step for one in manager.checkpoints()] == [2], rank
    assert not os.path.exists(f"{run}/step-1")
    assert manager.resume({"x": 0}) == 2
    dist.barrier()
finish()
"""


def test_no_rank_finds_a_checkpoint_that_rank_0_deletes(tmp_path: Path) -> None:
    """When a save has ended on a rank, old checkpoints are no longer there."""
    run_ranks(DELETES, tmp_path, 2)


REPLACED = RUN + """
import errno
import fastsafetensors
from fastsafetensors import training
with CheckpointManager(run, **options) as manager:
    manager.save(2, {"x": 2})
    manager.wait()
    listed, find = [], training.find_newest
    def find_newest(folder):
        listed.append(folder)
        return [(1, folder / "step-1")] if len(listed) == 1 else find(folder)
    training.find_newest = find_newest
    assert manager.resume({"x": 0}) == 2
    assert len(listed) == 2 and not manager._passed_over
    training.find_newest = lambda folder: [(1, folder / "step-1")]
    try:
        manager.resume({"x": 0})
    except fastsafetensors.SafetensorError as error:
        assert "faster than they can be read, or rank 0 lists" in str(error), error
    else:
        raise AssertionError("a start with step 0")
    # A rank that may not even look at the folder says so, and the others hear of it.
    def refuse(step):
        raise PermissionError(errno.EACCES, "no", "step-7")
    if rank == 1:
        manager._is_gone = refuse
    for _ in range(2):
        try:
            manager.resume({"x": 0}, step=7)
        except (PermissionError if rank == 1 else FileNotFoundError) as error:
            assert "step-7" in str(error), error
        else:
            raise AssertionError("a step that is not there")
"""

UNREADABLE = RUN + """
import errno
import fastsafetensors
import logging
from fastsafetensors import training
logging.disable(logging.CRITICAL)
with CheckpointManager(run, **options) as manager:
    for step in range(3):
        manager.save(step, {"x": step})
    manager.wait()
    # At the first that is gone, all are listed again, and nothing else is read.
    find, read, reads, lists = training.find_newest, training.read_checkpoint, [], []
    def find_newest(folder):
        lists.append(folder)
        gone = [(step, folder / f"step-{step}") for step in (9, 8, 7)]
        return find(folder) if len(lists) == 3 else gone
    def read_checkpoint(path, step):
        reads.append(step)
        return read(path, step)
    training.find_newest, training.read_checkpoint = find_newest, read_checkpoint
    manager.checkpoints = None
    assert manager.resume({"x": 0}) == 2 and reads == [9, 9, 2], reads
    training.find_newest = find
    # One rank can't open files: that is no start with step 0.
    def refuse(path, step):
        raise OSError(errno.EMFILE, "Too many open files", str(path))
    if rank == 1:
        training.read_checkpoint = refuse
    try:
        manager.resume({"x": 0})
    except (OSError if rank == 1 else fastsafetensors.RankError) as error:
        assert "Too many open files" in str(error), error
    else:
        raise AssertionError("a start with step 0")
    # A signal handler of one rank raises an exception meanwhile.
    def interrupt(path, step):
        raise RuntimeError("preempted")
    if rank == 1:
        training.read_checkpoint = interrupt
    try:
        manager.resume({"x": 0})
    except (RuntimeError if rank == 1 else fastsafetensors.RankError) as error:
        assert "preempted" in str(error), error
    else:
        raise AssertionError("an older step")
    training.read_checkpoint = read
    assert manager.resume({"x": 0}) == 2
"""


def test_checkpoints_that_a_rank_cannot_read_are_no_start_with_step_0(tmp_path: Path) -> None:
    run_ranks(UNREADABLE, tmp_path, 2)



def test_a_checkpoint_that_another_process_deletes_is_listed_again(tmp_path: Path) -> None:
    """Its successor is there then."""
    run_ranks(REPLACED, tmp_path, 2)


OTHER_SIZE = RUN + """
import logging
logging.disable(logging.CRITICAL)
if rank == 0:
    os.symlink("run", f"{folder}/link")
both = {**options, "manifest": False}
with CheckpointManager(run, **both) as manager:
    manager.save(2, {"x": 2})
dist.barrier()
# The ranks save two states; a manager of another number of ranks sees another path on rank 1.
from fastsafetensors._checkpoints import checkpoint_ranks
place = run if rank == 0 else f"{folder}/link"
with CheckpointManager(place, **both) as manager:
    begin = checkpoint_ranks.Ranks._begin
    def begin_larger(self):
        found = begin(self)
        self.size = 3
        return found
    checkpoint_ranks.Ranks._begin = begin_larger
    for arguments in ({}, {"step": 2}):
        try:
            manager.resume({"x": 0}, **arguments)
        except ValueError as error:
            assert "was saved by 2 ranks, and this group has 3" in str(error), error
        else:
            raise AssertionError("a checkpoint of another size")
finish()
"""

NO_MANIFEST = RUN + """
with CheckpointManager(run, **{**options, "manifest": False}) as manager:
    manager.save(1, {"x": 1})
    manager.wait()
    if rank == 1:
        def refuse(*arguments, **options):
            raise PermissionError(13, "refused")
        manager._read_part = refuse
    try:
        manager.resume({"x": 0}, verify=True)
    except (FileNotFoundError if rank == 0 else PermissionError):
        pass
    else:
        raise AssertionError("resumed without a manifest")
    assert all_agree(manager.latest().step) == 1
finish()
"""

WRONG = RUN + """
class NoText:
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__
for bad in ({"ranks": "frist"}, {"timeout": -1}, {"timeout": "x"}, {"ranks": ["each"]},
            {"best": NoText()}):
    for wrong in ((1,), (0, 1)):
        try:
            CheckpointManager(run, **{**options, **(bad if rank in wrong else {})})
        except ((ValueError, TypeError) if rank in wrong else RankError) as error:
            assert rank in wrong or "rank 1 failed in CheckpointManager()" in str(error), error
        else:
            raise AssertionError(bad)
with CheckpointManager(run, **options) as manager:
    manager.save(1, {"x": 1})
    try:
        manager.resume({"x": 0}, step=10**4500 if rank == 1 else 1)
    except (ValueError if rank == 1 else RankError) as error:
        assert rank == 1 or "rank 1 failed in resume()" in str(error), error
    else:
        raise AssertionError("a step without a text")
finish()
"""


@pytest.mark.parametrize("program", [OTHER_SIZE, NO_MANIFEST, WRONG],
                         ids=["size", "manifest", "arguments"])
def test_ranks_find_the_same(tmp_path: Path, program: str) -> None:
    """All ranks raise an error or none does: for a checkpoint of another number of ranks under
    different paths, one without a manifest that a rank can't read, and invalid arguments."""
    run_ranks(program, tmp_path, 2)
