# SPDX-License-Identifier: Apache-2.0
"""Waits of checkpoints: after Ctrl-C, of several saves, after a fork; a Trainer's metrics."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import torch as fast_torch  # noqa: E402
from fastsafetensors._saving import save_handles  # noqa: E402
from fastsafetensors._checkpoints.watcher import Watcher  # noqa: E402
from fastsafetensors._saving.save_handles import FileSave, ThreadSave  # noqa: E402
from fastsafetensors.torch import save_file_async  # noqa: E402
from fastsafetensors.training import CheckpointManager, trainer_callback  # noqa: E402


def test_wait_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that Ctrl-C ends does not make the next one return early."""
    may_end = threading.Event()
    with CheckpointManager(tmp_path) as manager:
        follow = manager._follow

        def follow_late(*arguments: Any) -> None:
            may_end.wait()
            follow(*arguments)

        monkeypatch.setattr(manager, "_follow", follow_late)
        manager.save(1, {"x": torch.ones(3)})
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
        threading.Timer(0.5, may_end.set).start()
        manager.wait()
        assert may_end.is_set()
        newest = manager.latest()
        assert newest is not None and newest.step == 1


def test_wait_of_a_thread_after_an_interrupt() -> None:
    """The same for saves that a thread of Python's does."""
    may_end = threading.Event()
    handle = ThreadSave(may_end.wait, "x")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.wait(0.1)
    threading.Timer(0.3, may_end.set).start()
    handle.wait()
    assert may_end.is_set() and handle.done()


def test_a_step_waits_for_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the one before the last, which may still read tensors."""
    waited: list[str] = []

    def note(handle: FileSave) -> None:
        waited.append(handle._name)

    with CheckpointManager(tmp_path, stage="lazy") as manager:
        monkeypatch.setattr(FileSave, "done", lambda _handle: False)
        monkeypatch.setattr(FileSave, "before_step", note)
        for step in (1, 2):
            manager.save(step, {"x": torch.ones(3)})
        manager.before_step()
        assert len(waited) == 2 and waited[0] != waited[1]
        manager.before_step()
        assert len(waited) == 2
        monkeypatch.undo()


def test_a_save_in_a_child_has_its_own_pool(tmp_path: Path) -> None:
    """It does not share the parent's pool, whose threads may be in the middle of a save."""
    save_file_async({"x": torch.ones(3)}, tmp_path / "y.safetensors").wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        save_file_async({"x": torch.ones(3)}, tmp_path / "x.safetensors").wait()
        os._exit(0 if list(save_handles._shared) == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list(save_handles._shared) == [os.getpid()]


def test_check_in_a_child_whose_parent_held_the_lock(tmp_path: Path) -> None:
    """It refuses without waiting for the lock."""
    with CheckpointManager(tmp_path) as manager, manager._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                manager.check()
            except RuntimeError:
                os._exit(0)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_resume_waits_for_a_running_save(tmp_path: Path) -> None:
    """It loads what was saved last."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 30):
            manager.save(step, {"x": torch.full((50_000,), float(step))})
            found = torch.zeros(50_000)
            assert manager.resume({"x": found}) == step
            assert found.eq(step).all()


def make_trainer(tmp_path: Path, manager: CheckpointManager, **options: Any) -> Any:
    """A Trainer of a small model with ten steps an epoch."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=64, vocab_size=50)
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(0, 50, (7,)), "labels": torch.tensor(i % 2)}
            for i in range(40)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, **{"save_strategy": "no", **options})
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows,
                                callbacks=[trainer_callback(manager)])


@pytest.mark.parametrize(("options", "steps"), [
    ({"eval_strategy": "steps", "eval_steps": 4, "max_steps": 7}, (2, 4, 6, 7)),
    ({"eval_strategy": "epoch", "num_train_epochs": 2}, tuple(range(2, 22, 2))),
    ({"eval_strategy": "epoch", "max_steps": 16}, tuple(range(2, 18, 2))),
    ({"eval_strategy": "epoch", "eval_delay": 2, "num_train_epochs": 2}, tuple(range(2, 22, 2)))])
def test_the_metric_of_a_trainer_s_checkpoint(
    tmp_path: Path, options: dict[str, Any], steps: tuple[int, ...]
) -> None:
    """The metric of a checkpoint is that of the evaluation at its step, or none."""
    with CheckpointManager(tmp_path / "saved", every=2) as manager:
        trainer = make_trainer(tmp_path, manager, **options)
        trainer.train()
        evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history
                     if "eval_loss" in entry}
        assert evaluated
        found = [(one.step, one.metric) for one in manager.checkpoints()]
        assert found == [(step, evaluated.get(step)) for step in steps]
        counted = [one.load()["trainer"]["global_step"] for one in manager.checkpoints()]
        assert counted == list(steps)


@pytest.mark.parametrize("stops", [False, True])
def test_the_last_checkpoint_of_a_trainer_that_loads_the_best(
    tmp_path: Path, stops: bool
) -> None:
    """It has the weights of its step, also if a callback stops the training earlier."""
    transformers = pytest.importorskip("transformers")

    class Stop(transformers.TrainerCallback):
        """Stops the training in its second evaluation."""

        def on_evaluate(self, args: Any, state: Any, control: Any, **_parts: Any) -> None:
            if stops and state.global_step == 6:
                control.should_training_stop = True

    with CheckpointManager(tmp_path / "saved", every=4) as manager:
        trainer = make_trainer(
            tmp_path, manager, eval_strategy="steps", eval_steps=3, save_strategy="steps",
            save_steps=3, max_steps=9, load_best_model_at_end=True, learning_rate=1.0)
        trainer.add_callback(Stop())
        trainer.train()
        found = manager.checkpoints()
        last = 6 if stops else 9
        assert [one.step for one in found] == ([4, 6] if stops else [4, 8, 9])
        assert found[-1].metric is not None
        weights = fast_torch.load_file(tmp_path / f"out/checkpoint-{last}/model.safetensors")
        saved = found[-1].load()["model"]
        assert all(saved[name].equal(weights[name]) for name in weights)


def test_trainings_of_one_manager(tmp_path: Path) -> None:
    """The steps of a second training count on, so that resume() finds the newest weights."""
    with CheckpointManager(tmp_path / "saved", every=4) as manager:
        trainer = make_trainer(tmp_path, manager, max_steps=8)
        trainer.train()
        trainer.train()
        assert [one.step for one in manager.checkpoints()] == [4, 8, 12, 16]
        for name in ("model", "optimizer", "scheduler", "trainer"):
            with pytest.raises(ValueError, match=f"the trainer's own state is saved as '{name}'"):
                trainer_callback(manager, **{name: torch.nn.Linear(1, 1)})


def test_an_interrupted_evaluation(tmp_path: Path) -> None:
    """The next training saves nothing in place of the last checkpoint."""
    with CheckpointManager(tmp_path / "saved", every=2) as manager:
        trainer = make_trainer(tmp_path, manager, eval_strategy="steps", eval_steps=4, max_steps=6)
        evaluate = trainer.evaluate

        def interrupt(*_arguments: Any, **_options: Any) -> None:
            trainer.evaluate = evaluate
            raise KeyboardInterrupt

        trainer.evaluate = interrupt
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        manager.wait()
        found = [one.load()["trainer"] for one in manager.checkpoints()]
        assert [row["global_step"] for row in found] == [2]
        trainer.train()
        assert [one.step for one in manager.checkpoints()] == [2, 4, 6, 8]
        assert manager.checkpoints()[0].load()["trainer"] == found[0]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_a_save_gets_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The save is still waited for, and counted once."""
    start = Watcher.start

    def interrupt(thread: Watcher) -> None:
        monkeypatch.setattr(Watcher, "start", start)
        if moment == "after":
            start(thread)
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(Watcher, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, {"x": torch.ones(3_000_000)})
        assert manager.resume({"x": torch.zeros(3_000_000)}) == 1
        assert not manager._saving
