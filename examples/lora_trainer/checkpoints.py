# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the run, and the trained adapter in peft's format."""

import pathlib

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from utils.fast_loading import CheckpointManager, save_safetensors


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of other settings."""


class Adapter:
    """The adapter of a model, as something that has a state."""

    def __init__(self, model, settings):
        """Keep the model."""
        self._model, self._rank = model, settings.lora.rank

    def state_dict(self):
        """Return the rank and the weights."""
        return {"rank": self._rank, "weights": get_peft_model_state_dict(self._model)}

    def load_state_dict(self, state):
        """Set the weights. Checks them first, because resume() sets the optimizer after them."""
        if state["rank"] != self._rank:
            raise CheckpointError(f"the checkpoint has rank {state['rank']}, the settings have "
                                  f"{self._rank}; nothing was changed")
        if state["weights"].keys() != get_peft_model_state_dict(self._model).keys():
            raise CheckpointError("the checkpoint adapts other modules than the settings; nothing "
                                  "was changed")
        set_peft_model_state_dict(self._model, state["weights"])


class Checkpoints:
    """The checkpoints of a run. They are written while the training goes on."""

    def __init__(self, settings, model, optimizer):
        """Open the output folder."""
        self._manager = CheckpointManager(
            settings.output_dir, every=settings.train.save_every, keep_last=2, stage="lazy")
        # Before the optimizer changes a tensor, its bytes must have been copied.
        optimizer.register_step_pre_hook(self._manager.before_step)
        self._state = {"adapter": Adapter(model, settings), "optimizer": optimizer}

    def save(self, step, is_last):
        """Save at every save_every steps, and at the last one."""
        if self._manager.save(step, self._state, force=is_last) is not None:
            print(f"saving the checkpoint of step {step}")

    def resume(self, which):
        """Load the checkpoint of a step, or the "latest" intact one; return its step."""
        try:
            step = None if which == "latest" else int(which)
            done = self._manager.resume(self._state, step=step, verify=True)
        except CheckpointError:
            raise
        except Exception as error:  # each package raises its own class
            raise CheckpointError(f"no checkpoint {which!r} can be loaded ({error}); nothing was "
                                  "changed") from error
        if done == 0:
            raise CheckpointError(f"{self._manager.folder} has no complete checkpoint to resume "
                                  "from")
        return done

    def close(self):
        """Wait until all checkpoints are written."""
        self._manager.close()


def save_adapter(settings, model):
    """Save the adapter as peft.PeftModel.from_pretrained() loads it."""
    folder = pathlib.Path(settings.output_dir) / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous()
               for name, tensor in get_peft_model_state_dict(model).items()}
    save_safetensors(weights, folder / "adapter_model.safetensors",
                     {"format": "pt", "lora_rank": str(settings.lora.rank)})
    model.peft_config["default"].save_pretrained(folder)
    print(f"saved {folder}")


def as_batch(items, device):
    """Stack items of a cache to {name: tensor} on the device."""
    return {name: torch.stack([item[name] for item in items]).to(device) for name in items[0]}
