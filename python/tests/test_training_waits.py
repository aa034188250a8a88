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

from fastsafetensors._saving import save_handles  # noqa: E402
from fastsafetensors._saving.save_handles import FileSave, ThreadSave  # noqa: E402
from fastsafetensors.torch import save_file_async  # noqa: E402
from fastsafetensors.training import CheckpointManager, trainer_callback  # noqa: E402


def test_wait_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that Ctrl-C ends does not make the next one return early."""
    may_end = threading.Event()
    with CheckpointManager(tmp_path) as manager:
        finish = manager._finish

        def finish_late(*arguments: Any) -> None:
            may_end.wait()
            finish(*arguments)

        monkeypatch.setattr(manager, "_finish", finish_late)
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


def test_a_save_in_a_child_whose_parent_held_the_lock(tmp_path: Path) -> None:
    """A thread of the parent was taking the shared pool when another one forked."""
    with save_handles._shared_lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            save_file_async({"x": torch.ones(3)}, tmp_path / "x.safetensors").wait()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_metric_of_a_trainer_s_checkpoint(tmp_path: Path) -> None:
    """The metric of a checkpoint is that of the evaluation at its step, or none."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=64, vocab_size=50)
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(0, 50, (7,)), "labels": torch.tensor(i % 2)}
            for i in range(40)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), save_strategy="no", report_to=[], max_steps=7,
        eval_strategy="steps", eval_steps=4, per_device_train_batch_size=4, use_cpu=True,
        disable_tqdm=True)
    with CheckpointManager(tmp_path / "saved", every=2) as manager:
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows,
                                       eval_dataset=rows, callbacks=[trainer_callback(manager)])
        trainer.train()
        evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history
                     if "eval_loss" in entry}
        assert 4 in evaluated and 2 not in evaluated
        assert [(one.step, one.metric) for one in manager.checkpoints()] == [
            (step, evaluated.get(step)) for step in (2, 4, 6, 7)]
