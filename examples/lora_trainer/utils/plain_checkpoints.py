# SPDX-License-Identifier: Apache-2.0
"""What fastsafetensors.training.CheckpointManager does, by torch.save while the training waits."""

import os
import pathlib

import torch


class CheckpointManager:
    """Saves checkpoints into a folder, one file each."""

    def __init__(self, folder, every=1, keep_last=2, stage="copy"):
        """Make the folder. `stage` has no effect."""
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._every, self._keep_last = every, keep_last

    def _paths(self):
        """The files by step."""
        return dict(sorted((int(path.stem.partition("-")[2]), path)
                           for path in self.folder.glob("step-*.pt")))

    def save(self, step, state, force=False):
        """Save the state_dict() of each value; None if the step is not one of `every`."""
        if step % self._every and not force:
            return None
        path = self.folder / f"step-{step}.pt"
        hidden = path.with_suffix(".tmp")
        torch.save({name: value.state_dict() for name, value in state.items()}, hidden)
        os.replace(hidden, path)
        earlier = [old for number, old in self._paths().items() if number <= step]
        for old in earlier[: -self._keep_last]:
            old.unlink()
        return path

    def resume(self, state, step=None, verify=False):
        """Load the checkpoint of a step, by default the last. Return 0 without checkpoints."""
        paths = self._paths()
        if step is None and not paths:
            return 0
        number = max(paths) if step is None else step
        loaded = torch.load(paths[number], weights_only=True)
        for name, target in state.items():
            target.load_state_dict(loaded[name])
        return number

    def before_step(self, *_args):
        """Do nothing: save() has written everything."""

    def close(self):
        """Do nothing."""
