#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Save checkpoints of an accelerate training in the background.

    make install; pip install torch accelerate
    python accelerate_checkpoints.py FOLDER [STEPS]     # or: accelerate launch ...

Run it again, even after a kill: it continues from the newest complete checkpoint.
"""

import argparse

import torch
from accelerate import Accelerator

from fastsafetensors.training import RNG, CheckpointManager


def main():
    """Train a small model on random numbers."""
    parser = argparse.ArgumentParser(description="Save checkpoints of an accelerate training.")
    parser.add_argument("folder")
    parser.add_argument("steps", nargs="?", type=int, default=100)
    options = parser.parse_args()
    folder, steps = options.folder, options.steps
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer,
             "scheduler": scheduler, "rng": RNG}
    # Every process has the same state here: the first one saves for all. Processes with states of
    # their own use ranks="each". The group is for the manager's messages alone.
    group = torch.distributed.new_group(backend="gloo") if accelerator.num_processes > 1 else None
    with CheckpointManager(folder, every=10, keep_last=2, keep_best=1, stage="lazy", group=group,
                           ranks="first") as manager:
        begin = manager.resume(state, verify=True)
        # Before the optimizer changes a tensor, its bytes must have been copied.
        optimizer.optimizer.register_step_pre_hook(manager.before_step)
        loss = torch.zeros(())
        for step in range(begin + 1, steps + 1):
            data = torch.randn(16, 64, device=accelerator.device)
            loss = (model(data) - data.sum(1, keepdim=True)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            manager.save(step, state, metric=loss.item())
        manager.wait()
        kept = [checkpoint.step for checkpoint in manager.checkpoints()]
        if begin < steps:
            accelerator.print(f"steps {begin + 1} to {steps}, loss {loss.item():.4f}")
        accelerator.print(f"checkpoints {kept}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
