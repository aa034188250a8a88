# SPDX-License-Identifier: Apache-2.0
"""The callback by which a transformers Trainer saves through a CheckpointManager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._base.errors import shown


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

    if not callable(getattr(manager, "should_save", None)):
        raise TypeError(f"manager must be a CheckpointManager, not {shown(manager)}")
    taken = [name for name in _OWN_NAMES if name in more]
    if taken:
        raise ValueError(f"the trainer's own state is saved as {taken[0]!r}: give the further "
                         "state another name")

    class SaveCheckpoints(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Saves checkpoints while the training goes on."""

        before = 0  # steps before this training
        is_due = False  # at the end of the evaluation of this step
        saved = -1  # the step of the trainer that was saved last

        def on_train_begin(self, args: Any, state: Any, control: Any, **_parts: Any) -> None:
            self.is_due = False  # as of a training that was interrupted
            self.saved = state.global_step
            # The Trainer counts from 0 in every train() without a checkpoint of its own.
            last = max(manager._resumed or 0, manager._last_saved[1])
            self.before = max(0, last - state.global_step)

        def _save(self, state: Any, parts: Mapping[str, Any]) -> None:
            self.is_due = False
            self.saved = state.global_step
            named = {"model": parts["model"], "optimizer": parts.get("optimizer"),
                     "scheduler": parts.get("lr_scheduler"), **more}
            given = {name: value for name, value in named.items() if value is not None}
            given["trainer"] = {"global_step": state.global_step, "epoch": state.epoch}
            manager.save(self.before + state.global_step, given, _metric(state), force=True)

        def on_pre_optimizer_step(self, *_args: Any, **_parts: Any) -> None:
            manager.before_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            # The last step as well: the best model may be loaded before on_train_end().
            self.is_due = (manager.should_save(self.before + state.global_step)
                           or control.should_training_stop)
            # The Trainer requests the evaluation of an epoch after its last step.
            is_evaluated = control.should_evaluate or (
                getattr(args, "eval_strategy", "no") == "epoch" and _ends_epoch(state, control))
            if self.is_due and not is_evaluated:
                self._save(state, parts)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.is_due:  # the epoch before was not evaluated, because of eval_delay
                self._save(state, parts)

        def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.is_due:
                self._save(state, parts)

        def _save_last(self, state: Any, control: Any, parts: Mapping[str, Any]) -> None:
            """Save a step at which another callback has stopped the training."""
            if control.should_training_stop and self.saved != state.global_step:
                self._save(state, parts)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            # An evaluation that follows saves the step with its metric.
            if not control.should_evaluate and getattr(args, "eval_strategy", "no") != "epoch":
                self._save_last(state, control, parts)

        def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self._save_last(state, control, parts)

        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            has_best = getattr(args, "load_best_model_at_end", False) and getattr(
                state, "best_model_checkpoint", None) is not None
            if self.saved != state.global_step and not has_best:
                self._save(state, parts)
            manager.wait()

    return SaveCheckpoints()
