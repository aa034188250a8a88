# SPDX-License-Identifier: Apache-2.0
"""The callback by which a transformers Trainer saves through a CheckpointManager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _metric(state: Any) -> float | None:
    """Return the loss of an evaluation at this step."""
    return next((entry["eval_loss"] for entry in reversed(state.log_history)
                 if "eval_loss" in entry and entry.get("step") == state.global_step), None)


def _ends_epoch(state: Any, control: Any) -> bool:
    is_whole: bool = abs(state.epoch - round(state.epoch)) < 1e-6
    return is_whole or bool(control.should_training_stop or control.should_epoch_stop)


_OWN_NAMES = ("model", "optimizer", "scheduler", "trainer")


def make_trainer_callback(manager: Any, more: Mapping[str, Any]) -> Any:
    """Return a TrainerCallback that saves with a manager. ImportError without transformers."""
    from transformers import TrainerCallback

    taken = [name for name in _OWN_NAMES if name in more]
    if taken:
        raise ValueError(f"the trainer's own state is saved as {taken[0]!r}: give the further "
                         "state another name")

    class SaveCheckpoints(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Saves checkpoints while the training goes on."""

        before = 0  # steps before this training
        is_due = False  # at the end of the evaluation of this step

        def on_train_begin(self, args: Any, state: Any, control: Any, **_parts: Any) -> None:
            self.is_due = False  # as of a training that was interrupted
            # The Trainer counts from 0 in every train() without a checkpoint of its own.
            last = max(manager._resumed or 0, manager._last_saved[1])
            self.before = max(0, last - state.global_step)

        def _save(self, state: Any, parts: Mapping[str, Any], force: bool) -> None:
            self.is_due = False
            named = {"model": parts["model"], "optimizer": parts.get("optimizer"),
                     "scheduler": parts.get("lr_scheduler"), **more}
            given = {name: value for name, value in named.items() if value is not None}
            given["trainer"] = {"global_step": state.global_step, "epoch": state.epoch}
            manager.save(self.before + state.global_step, given, _metric(state), force=force)

        def on_pre_optimizer_step(self, *_args: Any, **_parts: Any) -> None:
            manager.before_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.is_due = manager.should_save(self.before + state.global_step)
            # The Trainer requests the evaluation of an epoch after its last step.
            is_evaluated = control.should_evaluate or (
                getattr(args, "eval_strategy", "no") == "epoch" and _ends_epoch(state, control))
            if self.is_due and not is_evaluated:
                self._save(state, parts, force=False)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.is_due:  # the epoch before was not evaluated, because of eval_delay
                self._save(state, parts, force=False)

        def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.is_due:
                self._save(state, parts, force=False)

        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.is_due or not manager.should_save(self.before + state.global_step):
                self._save(state, parts, force=True)
            manager.wait()

    return SaveCheckpoints()
