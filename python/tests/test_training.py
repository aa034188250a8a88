# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager: retention, resuming, and the remains of killed runs."""

from __future__ import annotations

import enum
import fcntl
import os
import pathlib
import random
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from fastsafetensors import training  # noqa: E402
from fastsafetensors.training import RNG, CheckpointManager, trainer_callback  # noqa: E402


def steps_in(folder: pathlib.Path) -> list[int]:
    """Return the sorted step numbers of the folders."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.iterdir())


class Run:
    """A small training."""

    def __init__(self) -> None:
        """Make the model, the optimizer and the manager."""
        self.model = torch.nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.state = {"model": self.model, "optimizer": self.optimizer,
                      "scheduler": self.scheduler, "rng": RNG}

    def step(self) -> None:
        """One step, with random numbers of all generators."""
        self.optimizer.zero_grad()
        scale = random.random() + float(torch.rand(1))
        self.model(torch.randn(4, 40)).pow(2).mean().mul(scale).backward()
        self.optimizer.step()
        self.scheduler.step()


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: pathlib.Path, stage: str) -> None:
    """Ten steps in one run give the same values as a run that is resumed with new objects after the
    fourth step."""
    torch.manual_seed(1)
    random.seed(1)
    run = Run()
    with CheckpointManager(tmp_path, every=4, stage=stage) as manager:
        run.optimizer.register_step_pre_hook(manager.before_step)
        for number in range(1, 11):
            run.step()
            manager.save(number, run.state)
    assert steps_in(tmp_path) == [4, 8]
    (tmp_path / "step-8" / "checkpoint.safetensors").unlink()
    other = Run()
    manager = CheckpointManager(tmp_path)
    assert manager.resume(other.state, verify=True) == 4
    for _ in range(6):
        other.step()
    assert torch.equal(run.model.weight, other.model.weight)
    mine, theirs = run.optimizer.state_dict(), other.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert torch.equal(mine["state"][0]["exp_avg_sq"], theirs["state"][0]["exp_avg_sq"])
    assert run.scheduler.state_dict() == other.scheduler.state_dict()
    manager.close()


def test_the_last_and_the_best_are_kept(tmp_path: pathlib.Path) -> None:
    """keep_last and keep_best keep the last and the best checkpoints."""
    with CheckpointManager(tmp_path, keep_last=2, keep_best=2) as manager:
        for number in range(1, 11):
            manager.save(number, {"a": {"x": torch.ones(3)}}, metric=abs(number - 4))
        manager.wait()
        assert steps_in(tmp_path) == [4, 5, 9, 10]
        best, latest = manager.best(), manager.latest()
        assert best is not None and latest is not None
        assert (best.step, best.metric, latest.step) == (4, 0.0, 10)
    with CheckpointManager(tmp_path, keep_last=1, keep_best=1, best="max") as manager:
        manager.save(11, {"a": 1}, metric=-1.0)
    assert steps_in(tmp_path) == [10, 11]


def test_any_state_is_restored(tmp_path: pathlib.Path) -> None:
    """A state may have numbers, text, bytes, arrays and tuples. Tensors that are one object are
    stored once."""
    numpy = pytest.importorskip("numpy")
    shared = torch.arange(6.0)
    state = {"a": {1: (2.5, None, True, "text", b"\x00\xff"), "tensors": [shared, shared]},
             "b": numpy.arange(5), "c": [float("inf"), -0.0], "d": torch.zeros(0, 2),
             "e": shared[2:4], "f": torch.tensor(7, dtype=torch.int64), "g": numpy.float32(0.5)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.wait()
        found = manager.latest()
        assert found is not None
        loaded = found.load(verify=True)
    assert loaded["a"][1] == state["a"][1]
    assert all(torch.equal(one, shared) for one in loaded["a"]["tensors"])
    assert (loaded["b"] == state["b"]).all() and loaded["c"] == state["c"]
    assert loaded["d"].shape == (0, 2) and torch.equal(loaded["e"], shared[2:4])
    assert loaded["f"] == 7 and loaded["g"] == 0.5
    with pytest.raises(TypeError, match="a.x: an object can't be saved"), CheckpointManager(
            tmp_path) as manager:
        manager.save(2, {"a": {"x": object()}})


class Kind(str, enum.Enum):
    """Like the enumerations of transformers: str() is not the text."""

    MODEL = "model"


def test_names_and_values_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    """String enumerations are restored as strings, and arrays with shape and dtype. For other types
    save() raises TypeError with the path of the value."""
    numpy = pytest.importorskip("numpy")
    mapped = numpy.memmap(tmp_path / "mapped", "float32", "w+", shape=(1,))
    big = numpy.arange(3, dtype=">i4")
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {Kind.MODEL: model, "s": {"kind": Kind.MODEL, Kind.MODEL: 1},
                         "mapped": mapped, "big": big})
        manager.wait()
        latest = manager.latest()
        assert latest is not None
        loaded = latest.load()
        assert loaded["s"] == {"kind": "model", "model": 1}
        assert loaded["mapped"].shape == (1,) and loaded["mapped"].dtype == numpy.float32
        assert (loaded["big"] == big).all()
        assert manager.resume({"model": model}) == manager.resume({Kind.MODEL: model}) == 1
        for wrong, words in (({1: 1, "1": 2}, "must be str, not 1"),
                             ({"m": numpy.matrix([[5]])}, "m: a matrix"),
                             ({"m": {"t": numpy.array(["a"])}}, "m.t: an array of <U1")):
            with pytest.raises(TypeError, match=words):
                manager.save(2, wrong)


def test_damaged_checkpoints_are_skipped(tmp_path: pathlib.Path) -> None:
    """resume() takes the newest complete one; with verify, the newest whose bytes are right."""
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3):
            manager.save(number, {"a": {"x": torch.full((1000,), float(number))}})
    path = tmp_path / "step-3" / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / ".checkpoint.safetensors.0123456789abcdef.tmp").write_bytes(b"x")
    (tmp_path / ".step-0.deleted").mkdir()
    (tmp_path / "step-x").mkdir()
    manager = CheckpointManager(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-1", "step-2", "step-3", "step-x"]
    latest, right = manager.latest(), manager.latest(verify=True)
    assert latest is not None and right is not None and (latest.step, right.step) == (3, 2)
    path.write_bytes(data[:-8])
    latest = manager.latest()
    assert latest is not None and latest.step == 2
    manager.close()
    with CheckpointManager(tmp_path / "new", manifest=False) as manager:
        assert manager.resume({}) == 0 and manager.latest() is None and manager.best() is None
        manager.save(1, {"a": 1})
        manager.wait()
        with pytest.raises(FileNotFoundError, match="no checksums: its save was killed"):
            manager.latest(verify=True)


def test_views_that_look_alike(tmp_path: pathlib.Path) -> None:
    """A conjugate view shares memory but is stored as another tensor. No name can hide the
    description of the state."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    state = {"x": x, "y": x.conj(), "z": x.conj().imag, "i": x.imag,
             "fastsafetensors": {"state": torch.ones(2)}}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.wait()
        found = manager.latest()
        assert found is not None
        loaded = found.load()
    for name in ("x", "y", "z", "i"):
        assert torch.equal(loaded[name], state[name].resolve_conj().resolve_neg()), name
    assert torch.equal(loaded["fastsafetensors"]["state"], torch.ones(2))


def flip_last_byte(path: pathlib.Path) -> None:
    """Damage a file in a way that only a checksum shows."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_does_not_evict_a_good_one(tmp_path: pathlib.Path) -> None:
    """A damaged checkpoint does not count for keep_last. The last saved and the resumed checkpoint
    stay."""
    with CheckpointManager(tmp_path) as manager:
        for number in (10, 50, 100):
            manager.save(number, {"a": {"x": torch.full((1000,), float(number))}})
    flip_last_byte(tmp_path / "step-100" / "checkpoint.safetensors")
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert manager.resume({}, verify=True) == 50
        manager.save(60, {"a": {"x": torch.ones(3)}})
        manager.wait()
        assert steps_in(tmp_path) == [50, 60, 100]
        manager.save(100, {"a": {"x": torch.ones(3)}})
        manager.wait()
        assert steps_in(tmp_path) == [50, 100]


def test_a_run_that_begins_again_keeps_what_it_saves(tmp_path: pathlib.Path) -> None:
    """Checkpoints with higher steps, from an earlier run, are neither deleted nor counted."""
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1000, {"a": 1})
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for number in (100, 200, 300):
            manager.save(number, {"a": 1})
    assert steps_in(tmp_path) == [200, 300, 1000]


def test_a_chosen_step_is_resumed(tmp_path: pathlib.Path) -> None:
    """resume(step=N) loads that checkpoint or raises; it never loads another one instead."""
    model = torch.nn.Linear(2, 2, bias=False)

    def value() -> float:
        return float(model.weight.detach()[0, 0])

    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3):
            torch.nn.init.constant_(model.weight, number)
            manager.save(number, {"model": model})
        manager.wait()
        assert manager.resume({"model": model}, step=2) == 2 and value() == 2
        assert manager.resume({"model": model}) == 3 and value() == 3
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 9 .*: 1, 2, 3"):
            manager.resume({"model": model}, step=9)
        with pytest.raises(ValueError, match="negative"):
            manager.resume({"model": model}, step=-1)
        flip_last_byte(tmp_path / "step-2" / "checkpoint.safetensors")
        with pytest.raises(Exception, match="step-2"):
            manager.resume({"model": model}, step=2, verify=True)
        assert value() == 3


class HeldSave:
    """The handle of a save that ends when the test says so."""

    at_exit = "wait"

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: Exception | None = None

        self.done = self.may_end.is_set

    def exception(self) -> Exception | None:
        """Wait for the end; return the error."""
        self.may_end.wait(60)
        return self.error


def test_a_failed_save_leaves_the_folder_to_another_save_of_its_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty folder of a failed save is deleted only if no other save is about to use it."""
    held: list[HeldSave] = []

    def start(folder: pathlib.Path, *_arguments: Any) -> HeldSave:
        folder.mkdir(exist_ok=True)
        held.append(HeldSave())
        return held[-1]

    monkeypatch.setattr(training, "start_alone", start)
    manager = CheckpointManager(tmp_path)
    for _ in range(2):
        manager.save(3, {"a": 1})
    first, second = held
    first.error = OSError(28, "no space left")
    first.may_end.set()
    next(one for one in manager._watchers._all if one.handle is first).wait()
    assert (tmp_path / "step-3").is_dir()
    second.error = OSError(28, "no space left")
    second.may_end.set()
    with pytest.raises(OSError, match="no space left"):
        manager.wait()
    assert not (tmp_path / "step-3").exists()


def test_folders_that_are_made_are_durable(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder that gets a new entry is synced, and no other; without durable, none."""
    synced: list[str] = []
    monkeypatch.setattr(training.os, "fsync",
                        lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    CheckpointManager(tmp_path / "a" / "b").close()
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a")]
    CheckpointManager(tmp_path / "a" / "b").close()
    CheckpointManager(tmp_path / "c", durable=False).close()
    assert len(synced) == 2


def test_nan_is_not_a_metric(tmp_path: pathlib.Path) -> None:
    """A checkpoint with a metric of NaN is never the best."""
    with CheckpointManager(tmp_path, keep_last=1, keep_best=1) as manager:
        for number, metric in enumerate((float("nan"), 2.0, 3.0, float("nan"))):
            manager.save(number, {"a": 1}, metric=metric)
        manager.wait()
        best = manager.best()
        assert best is not None and best.step == 1
    assert steps_in(tmp_path) == [1, 3]


def test_a_manager_keeps_to_its_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is that of the constructor: a program that changes its current folder
    saves, prunes and reads no other checkpoints."""
    (tmp_path / "other").mkdir()
    state = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(tmp_path / "other/run") as other:
        for step in (1, 2, 3):
            other.save(step, state)
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run", keep_last=1) as manager:
        manager.save(4, state)
        monkeypatch.chdir(tmp_path / "other")
        manager.wait()
        manager.save(5, state)
        manager.wait()
        latest = manager.latest()
        assert latest is not None and latest.path == tmp_path / "run/step-5"
        assert manager.resume(state) == 5
    assert steps_in(tmp_path / "run") == [5]
    assert steps_in(tmp_path / "other/run") == [1, 2, 3]


@pytest.mark.parametrize("step", [100.0, "1", None, -5])
def test_a_step_must_be_an_integer(tmp_path: pathlib.Path, step: Any) -> None:
    """A step must be an integer, because its folder would not be found again. A tensor of one
    integer is accepted."""
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises((TypeError, ValueError)):
            manager.save(step, {"a": 1})
        manager.save(torch.tensor(7), {"a": 1})
        manager.wait()
        assert [one.step for one in manager.checkpoints()] == [7]


def test_files_of_other_programs_stay(tmp_path: pathlib.Path) -> None:
    """Opening deletes temporary files that no save holds, and folders of nothing else."""
    others = ["step-1/checkpoint.pt", "step-2/checkpoint/__0_0.distcp", "step-3/checkpoint.distcp",
              "step-4/checkpoint-00001-of-00002.safetensors", "step-5/.checkpoint.tmp"]
    leftover = ".checkpoint.safetensors.0123456789abcdef.tmp"
    held = tmp_path / "step-7" / leftover
    for name in [*others, f"step-1/{leftover}", f"step-6/{leftover}", f"step-7/{leftover}"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        CheckpointManager(tmp_path).close()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*others, f"step-7/{leftover}"}
    assert not (tmp_path / "step-6").exists()


def test_a_checkpoint_without_its_manifest_is_skipped(
        tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill between the last file and the manifest leaves such a checkpoint, and resume() skips
    it."""
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, {"a": 1})
        manager.wait()
        (tmp_path / "step-2" / "model.manifest").rename(
            tmp_path / "step-2" / ".model.manifest.0123456789abcdef.tmp")
    with CheckpointManager(tmp_path) as manager:
        assert len(list((tmp_path / "step-2").iterdir())) == 1
        assert manager.resume({}, verify=True) == 1 and manager.resume({}) == 2
    assert "step-2 is passed over" in caplog.text


def test_a_failure_is_raised_once(tmp_path: pathlib.Path) -> None:
    """A failed save raises at the next save or at wait(). Exceptions of the loop take
    precedence."""
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "step-1").write_text("in the way")
        manager.save(1, {"a": 1})
        with pytest.raises(OSError):
            manager.wait()
        manager.save(2, {"a": 1})
        manager.wait()
        assert [one.step for one in manager.checkpoints()] == [2]
        manager.save(1, {"a": 1})
        deadline = time.monotonic() + 60
        while "failure" not in manager._errors and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(OSError):
            manager.save(3, {"a": 1})
        manager.save(3, {"a": 1})
    with pytest.raises(KeyError, match="no state of other"), CheckpointManager(
            tmp_path) as manager:
        manager.resume({"other": RNG})


def test_a_failed_save_differs_from_a_cancelled_one(
        tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is recognised whatever the folder's name is, and logged at once, because the
    program may never query it."""
    folder = tmp_path / "cancelled"
    with CheckpointManager(folder) as manager:
        (folder / "step-1").write_text("in the way")
        manager.save(1, {"a": 1})
        with pytest.raises(OSError):
            manager.wait()
        assert "the checkpoint of step 1 failed" in caplog.text
        handle = manager.save(2, {"a": torch.ones(1 << 20)})
        assert handle is not None
        handle.cancel()
        manager.wait()


EXIT = """
import sys, torch
from fastsafetensors.training import CheckpointManager
manager = CheckpointManager(sys.argv[1], at_exit=sys.argv[2])
manager.save(1, {"a": {"x": torch.ones(1 << 26)}})
"""


@pytest.mark.parametrize("at_exit", ["wait", "cancel"])
def test_exit(tmp_path: pathlib.Path, at_exit: str) -> None:
    """The interpreter's exit waits for the checkpoint, and deletes old ones; or it cancels it."""
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path), at_exit],
                          capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""
    assert [one.step for one in CheckpointManager(tmp_path).checkpoints()] == (
        [1] if at_exit == "wait" else [])
    if at_exit == "wait":
        found = CheckpointManager(tmp_path).latest(verify=True)
        assert found is not None and found.step == 1


@pytest.mark.parametrize("options", [
    {"every": 0}, {"keep_last": 0}, {"keep_best": -1}, {"best": "most"}, {"stage": "none"},
    {"keep_best": 2},
    {"memory": 0}, {"max_shard_size": "x"}, {"keep_last": 2.0}, {"keep_best": 1.0}, {"every": "2"},
    {"every": None}, {"manifest": "SHA256"}])
def test_bad_arguments(tmp_path: pathlib.Path, options: dict) -> None:
    """Bad arguments are named in a TypeError or ValueError, and no folder is created."""
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        CheckpointManager(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_url_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL does not become a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="not to s3://bucket/run"):
        CheckpointManager("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


KILLED = textwrap.dedent("""
    import sys, torch
    from fastsafetensors.training import CheckpointManager
    manager = CheckpointManager(sys.argv[1], keep_last=2, max_shard_size=300000, durable=False)
    target = torch.nn.Linear(200, 200)
    begin = manager.resume({"m": target})
    print(begin, flush=True)
    for step in range(begin + 1, begin + 10000):
        torch.nn.init.constant_(target.weight, float(step))
        torch.nn.init.constant_(target.bias, float(step))
        manager.save(step, {"m": target, "step": {"s": step}, "more": {"x": [
            torch.full((50000,), float(step)) for _ in range(4)]}})
    """)


def test_killed_at_random_moments(tmp_path: pathlib.Path) -> None:
    """After kill -9 each run resumes from a complete checkpoint, never from an older one than
    before."""
    generator = random.Random(6)
    last = 0
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)],
                                   stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        begin = int(process.stdout.readline())
        assert begin >= last
        last = begin
        time.sleep(0.1 + generator.random() * 0.5)
        process.kill()
        process.wait()
        process.stdout.close()
        manager = CheckpointManager(tmp_path)
        found = manager.latest(verify=True)
        if found is not None:
            state = found.load()
            values = {float(value) for tensor in [*state["m"].values(), *state["more"]["x"]]
                      for value in tensor.unique()}
            assert values == {float(found.step)} and state["step"] == {"s": found.step}
            newest = manager.latest()
            assert newest is not None  # no complete one is damaged; the manifest comes last
            assert newest.step == found.step or not [*newest.path.glob("*manifest")]
        manager.close()
    assert last > 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("value, words", [
    ("longdouble", "x.0: a longdouble can't be saved"),
    (10**5000, "x.0: an int of 16610 bits can't be saved"),
    (3 + 4j, "x.0: a complex can't be saved; .* int, float, bool, str"),
    ("nested", "x.0: a nested tensor can't be saved"), ("itself", "x: contains itself"),
], ids=["longdouble", "int", "complex", "nested", "itself"])
def test_values_that_cannot_be_saved(tmp_path: pathlib.Path, value: Any, words: str) -> None:
    """The error has the path of the value."""
    state = [value]
    if value == "longdouble":
        state = [pytest.importorskip("numpy").longdouble(1.5)]
    if value == "nested":
        state = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    if value == "itself":
        state.append(state)
    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match=f"^{words}"):
        manager.save(1, {"x": state})


@pytest.mark.parametrize("metric", ["0.5", torch.ones(2), 10**400, 1j],
                         ids=["text", "tensor", "int", "complex"])
def test_metrics_are_numbers(tmp_path: pathlib.Path, metric: Any) -> None:
    """Other metrics are refused before anything is saved."""
    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match="^metric must be"):
        manager.save(1, {"x": torch.ones(2)}, metric)


def test_should_save_checks_the_step(tmp_path: pathlib.Path) -> None:
    """As save() does."""
    with CheckpointManager(tmp_path, every=2) as manager:
        assert manager.should_save(4) and not manager.should_save(5)
        for step, kind in (("x", TypeError), (1.5, TypeError), (-2, ValueError)):
            with pytest.raises(kind):
                manager.should_save(step)


def test_transformers_callback(tmp_path: pathlib.Path) -> None:
    """A Trainer saves through the manager with lazy staging, and resumes from its checkpoint."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=64, vocab_size=50)
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.randint(0, 50, (7,)), "labels": torch.tensor(i % 2)}
            for i in range(40)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), save_strategy="no", report_to=[], max_steps=7,
        per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True)
    with CheckpointManager(tmp_path / "saved", every=3, keep_last=2, stage="lazy") as manager:
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows,
                                       callbacks=[trainer_callback(manager)])
        trainer.train()
        assert [one.step for one in manager.checkpoints()] == [6, 7]
        other = transformers.BertForSequenceClassification(config)
        assert manager.resume({"model": other}, verify=True) == 7
        latest = manager.latest()
        assert latest is not None
        assert latest.load()["trainer"]["global_step"] == 7
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
        # The Trainer counts from 0 again; the checkpoints go on, so the newest is the last one.
        arguments.max_steps = 2
        trainer_of_rest = transformers.Trainer(model=other, args=arguments, train_dataset=rows,
                                               callbacks=[trainer_callback(manager)])
        trainer_of_rest.train()
        assert [one.step for one in manager.checkpoints()][-1] == 9


def test_the_thread_of_an_earlier_save_may_run_last(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    """Which checkpoint is the newest is decided by the order of the calls of save()."""
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        monkeypatch.setattr(manager, "_watch", lambda handle, _step: handle)
        handles = [manager.save(step, {"a": 1}) for step in (1, 2)]
        for handle in handles:
            assert handle is not None
            handle.wait()
        for number in (2, 1):
            handle = handles[number - 1]
            assert handle is not None
            manager._note(handle, (number, number))
            manager._follow()
    assert steps_in(tmp_path) == [2]
