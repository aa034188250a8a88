# SPDX-License-Identifier: Apache-2.0
"""Folders of a CheckpointManager that killed saves, other users or disks have left."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors.training import CheckpointManager  # noqa: E402

STATE = {"a": {"x": torch.ones(300), "y": torch.zeros(300)}}
INDEX = "checkpoint.safetensors.index.json"
SHARD = "checkpoint-00002-of-00003.safetensors"


def save_steps(folder: Path, *steps: int) -> None:
    """Save steps of three files each."""
    with CheckpointManager(folder, max_shard_size="1KB") as manager:
        for step in steps:
            manager.save(step, STATE)


def hide_shards(folder: Path) -> list[Path]:
    """Give the shards the names that they have while an index of the same names is replaced."""
    index = json.loads((folder / INDEX).read_text())
    hidden = {}
    for name in set(index["weight_map"].values()):
        hidden[name] = f".{name}.0123456789abcdef.tmp"
        (folder / name).rename(folder / hidden[name])
    index["weight_map"] = {key: hidden[name] for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return [folder / name for name in hidden.values()]


@pytest.mark.parametrize("index", ["names", "damaged"])
def test_files_that_an_index_lists_are_kept(tmp_path: Path, index: str) -> None:
    """A kill while a step is published again may leave temporary files that its index lists. They
    stay, and so do all of a folder whose index can't be read."""
    save_steps(tmp_path, 1)
    hidden = hide_shards(tmp_path / "step-1")
    unused = tmp_path / "step-1" / ".checkpoint.safetensors.fedcba9876543210.tmp"
    unused.write_bytes(b"x")
    if index == "damaged":
        (tmp_path / "step-1" / INDEX).write_text("{")
    with CheckpointManager(tmp_path) as manager:
        assert all(path.exists() for path in hidden)
        assert unused.exists() == (index == "damaged")
        if index == "names":
            assert manager.resume({"a": {"x": torch.zeros(300)}}) == 1
