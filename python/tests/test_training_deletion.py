# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a CheckpointManager deletes, and what it says of those that it can't."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors.training import CheckpointManager  # noqa: E402


def save_steps(folder: Path, *steps: int) -> None:
    """Save steps, and keep all."""
    with CheckpointManager(folder, durable=False, manifest=False) as manager:
        for step in steps:
            manager.save(step, {"x": step})


def test_a_resumed_step_0_is_kept(tmp_path: Path) -> None:
    """It is a step like any other."""
    save_steps(tmp_path, 0)
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert manager.resume({"x": None}, step=0) == 0
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
    assert [one.step for one in manager.checkpoints()] == [0, 2]
