# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the adapter in peft's format, and the optimizer's state."""

import json
import pathlib

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from utils.fast_loading import load_safetensors, save_safetensors_async

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged or of other settings."""


class StartedCheckpoint:
    """A checkpoint whose files are being written while the training goes on."""

    def __init__(self, folder, saves, state):
        """Keep the handles of the saves."""
        self.folder = folder
        self._saves, self._state = saves, state

    def finish(self):
        """Wait for the files, then write the state file, which marks the checkpoint complete."""
        for save in self._saves:
            save.wait()
        (self.folder / STATE).write_text(json.dumps(self._state))
        print(f"saved {self.folder}")


def start_checkpoint(folder, model, optimizer, settings, step, loss):
    """Copy the state and start to save it. Call finish() on the result."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    weights = {name: tensor.detach().cpu().contiguous()
               for name, tensor in get_peft_model_state_dict(model).items()}
    metadata = {"format": "pt", "lora_rank": str(settings.lora.rank)}
    saves = [save_safetensors_async(weights, folder / ADAPTER, metadata)]
    model.peft_config["default"].save_pretrained(folder)
    moments = {
        f"{number}.{name}": value.detach().cpu().contiguous()
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    saves.append(save_safetensors_async(moments, folder / OPTIMIZER))
    state = {"step": step, "loss": loss, "lora_rank": settings.lora.rank}
    return StartedCheckpoint(folder, saves, state)


def find_checkpoint(output_dir, resume):
    """Return the folder to resume from: `resume`, or for "latest" the last complete one."""
    if resume != "latest":
        return pathlib.Path(resume)
    complete = [path.parent for path in pathlib.Path(output_dir).glob(f"checkpoint-*/{STATE}")]
    if not complete:
        raise CheckpointError(f"{output_dir} has no complete checkpoint to resume from")
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]))


def _load(path, settings):
    try:
        return load_safetensors(path, settings.fastsafetensors_num_threads)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is incomplete: {path.name} is missing; nothing "
                              "was changed") from None
    except Exception as error:  # each package raises its own class
        raise CheckpointError(f"{path} is damaged ({error}); nothing was changed") from error


def load_checkpoint(folder, model, optimizer, settings):
    """Restore a checkpoint and return its step. Reads every file before it changes anything."""
    folder = pathlib.Path(folder)
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error
    if state["lora_rank"] != settings.lora.rank:
        raise CheckpointError(f"{folder} has rank {state['lora_rank']}, the settings have "
                              f"{settings.lora.rank}; nothing was changed")
    weights = _load(folder / ADAPTER, settings)
    moments = _load(folder / OPTIMIZER, settings)
    current = get_peft_model_state_dict(model)
    if weights.keys() != current.keys():
        raise CheckpointError(f"{folder} adapts other modules than the settings")
    set_peft_model_state_dict(model, weights)
    layout = optimizer.state_dict()
    layout["state"] = {}
    for key, value in moments.items():
        number, _, name = key.partition(".")
        layout["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(layout)
    return state["step"]


def as_batch(items, device):
    """Stack items of a cache to {name: tensor} on the device."""
    return {name: torch.stack([item[name] for item in items]).to(device) for name in items[0]}
