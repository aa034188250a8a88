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
