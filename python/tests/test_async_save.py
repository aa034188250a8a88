# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves store the state at the call."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy
import pytest
from object_store import KEY, SECRET, object_store

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors.async_save import SaveProgress, StagingPool, release_staging

torch = pytest.importorskip("torch")
from fastsafetensors.fast_loading import (  # noqa: E402
    load_safetensors_sharded,
    save_safetensors_sharded_async,
)
from fastsafetensors.torch import (  # noqa: E402
    load_file,
    load_model,
    save_file,
    save_file_async,
    save_model_async,
)

MIB = 1 << 20


def make(seed: int = 0, count: int = 12) -> dict:
    """Tensors of odd sizes and several dtypes, together about 13 MiB."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{i}": torch.randn(333, 257 * (1 + i), generator=generator)
               for i in range(count // 2)}
    tensors.update({f"h{i}": torch.randn(1 + 1001 * i, generator=generator).half()
                    for i in range(count // 2)})
    tensors["step"] = torch.tensor(3)
    tensors["none"] = torch.zeros(0, 3)
    return tensors


def clone(tensors: dict) -> dict:
    """Copies to compare with."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(path: object, wanted: dict) -> bool:
    """Whether a file holds just these tensors, bit for bit."""
    found = load_file(path, mode="load")
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted)


def change(tensors: dict) -> None:
    """Change the tensors in place, as an optimizer does."""
    for tensor in tensors.values():
        tensor.add_(1)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("stage", ["copy", "lazy", "none"])
def test_the_state_at_the_call_is_saved(tmp_path: pathlib.Path, stage: str, durable: bool) -> None:
    """Each stage, with changes at the first moment at which they are allowed."""
    tensors = make()
    wanted = clone(tensors)
    path = tmp_path / "a.safetensors"
    handle = save_file_async(tensors, path, {"a": "b"}, stage=stage, durable=durable)
    if stage == "lazy":
        handle.wait_staged()
    elif stage == "none":
        handle.wait()
    change(tensors)
    handle.wait()
    assert handle.done() and handle.exception() is None
    assert same(path, wanted)
    save_file(wanted, tmp_path / "b.safetensors", {"a": "b"})
    assert path.read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    stats = handle.stats
    assert stats["state"] == "done" and stats["stage"] == stage
    size = sum(tensor.nbytes for tensor in wanted.values())
    assert stats["bytes_staged"] == size  # each byte is copied once,
    assert stats["writer"]["bytes_written"] == path.stat().st_size  # written once,
    assert stats["writer"]["bytes_read"] == 0  # and read never
    assert handle.progress == SaveProgress(path.stat().st_size, path.stat().st_size, "done")


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "AdamW fused", "AdamW foreach"])
def test_every_optimizer_counts_its_changes(tmp_path: pathlib.Path, optimizer: str) -> None:
    """A step without the barrier is detected: the save fails, and the old file stays."""
    kind, _, way = optimizer.partition(" ")
    model = torch.nn.Linear(700, 700)
    made = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **({way: True} if way else {}))
    path = tmp_path / "a.safetensors"
    save_file({"old": torch.ones(3)}, path)
    model(torch.ones(2, 700)).sum().backward()
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    # 32 MiB are staged at most, so the thread can't have ended before the step.
    big = {f"big{i}": torch.ones(MIB) for i in range(40)}
    handle = save_file_async({**tensors, **big}, path, stage="none")
    made.step()
    assert isinstance(handle.exception(), SafetensorError)
    assert "changed" in str(handle.exception())
    assert same(path, {"old": torch.ones(3)})


def test_the_barrier_is_a_hook_of_torch(tmp_path: pathlib.Path) -> None:
    """register_step_pre_hook(handle.before_step) makes lazy saves right."""
    model = torch.nn.Linear(900, 900)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    current: list = []
    optimizer.register_step_pre_hook(lambda *a: current[-1].before_step(*a) if current else None)
    for number in range(10):
        model(torch.randn(3, 900)).pow(2).sum().backward()
        wanted = clone(model.state_dict())
        current.append(save_model_async(model, tmp_path / f"{number}.st", stage="lazy"))
        optimizer.step()
        current[-1].wait()
        assert same(tmp_path / f"{number}.st", wanted)


@pytest.mark.parametrize("what", ["resized", "freed"])
@pytest.mark.parametrize("options", [{"stage": "none"}, {"stage": "lazy", "memory": "32MiB"}])
def test_unmapped_memory_is_an_error(tmp_path: pathlib.Path, what: str, options: dict) -> None:
    """Memory that is unmapped during a save causes an error, and neither a crash nor a mixed
    file."""
    tensors = {f"w{i}": torch.ones(MIB) for i in range(40)}
    path = tmp_path / "a.safetensors"
    save_file({"old": torch.ones(3)}, path)
    handle = save_file_async(tensors, path, **options)
    tensors["w39"].untyped_storage().resize_(8 if what == "resized" else 0)
    assert isinstance(handle.exception(), SafetensorError)
    assert same(path, {"old": torch.ones(3)})


def test_tensors_may_be_dropped(tmp_path: pathlib.Path) -> None:
    """The handle keeps references while the tensors are read."""
    tensors = make(5)
    wanted = clone(tensors)
    handle = save_file_async(tensors, tmp_path / "a", stage="lazy")
    del tensors
    handle.wait()
    assert same(tmp_path / "a", wanted)


def test_staged_tensors_are_released(tmp_path: pathlib.Path) -> None:
    """A handle drops its reference to a tensor once the tensor is staged."""
    for stage in ("copy", "lazy"):
        tensors = {"a": torch.ones(1000)}
        gone = weakref.ref(tensors["a"])
        handle = save_file_async(tensors, tmp_path / "a", stage=stage)
        handle.wait_staged()
        del tensors
        assert gone() is None, stage
        handle.wait()


def test_a_budget_is_kept(tmp_path: pathlib.Path) -> None:
    """Less memory than tensors: the call waits for the disk, and the statistics say so."""
    tensors = {f"w{i}": torch.full((MIB,), float(i)) for i in range(24)}  # 96 MiB
    wanted = clone(tensors)
    with StagingPool(memory="40MiB") as pool:
        handle = save_file_async(tensors, tmp_path / "a", pool=pool)
        change(tensors)
        handle.wait()
        stats = handle.stats
        assert same(tmp_path / "a", wanted)
        assert stats["memory_limit_bytes"] == 40 * MIB >= stats["memory_peak_bytes"]
        # How often it waited depends on the disk; that it is counted: test_async_save.c.
        assert stats["memory_wait_count"] >= 0 and stats["blocked_ns"] > 0
        assert pool.nbytes == 40 * MIB
        handle = save_file_async(tensors, tmp_path / "a", pool=pool, memory="32MiB")
        assert handle.stats["memory_limit_bytes"] == 32 * MIB
        handle.wait()


def test_memory_is_kept_between_saves(tmp_path: pathlib.Path) -> None:
    """A pool that was filled in advance does not grow. The default pool is freed on request."""
    tensors = make()
    with StagingPool(ready="64MiB") as pool:
        assert pool.nbytes == 64 * MIB
        for _ in range(3):
            save_file_async(tensors, tmp_path / "a", pool=pool).wait()
            assert pool.nbytes == 64 * MIB
    with pytest.raises(ValueError, match="closed"):
        save_file_async(tensors, tmp_path / "a", pool=pool)
    save_file_async(tensors, tmp_path / "a").wait()
    release_staging()
    save_file_async(tensors, tmp_path / "a").wait()


def test_every_kind_of_save_works(tmp_path: pathlib.Path) -> None:
    """Async saves work with NumPy, modules with tied weights, sharded models, compression and
    manifests."""
    array = {"a": numpy.arange(100000), "b": numpy.ones((3, 5), numpy.float16)}
    handle = fst_numpy.save_file_async(array, tmp_path / "n", alignment=64)
    array["a"][:] = 0
    handle.wait()
    assert (fst_numpy.load_file(tmp_path / "n")["a"] == numpy.arange(100000)).all()
    with pytest.raises(ValueError, match="version counters"):
        fst_numpy.save_file_async(array, tmp_path / "n", stage="lazy")
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    model[1].weight = model[0].weight
    save_model_async(model, tmp_path / "m", durable=True).wait()
    other = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    other[1].weight = other[0].weight
    load_model(other, tmp_path / "m")
    assert torch.equal(other[1].weight, model[1].weight)
    tensors = make()
    wanted = clone(tensors)
    for stage in ("copy", "lazy"):
        handle = save_safetensors_sharded_async(tensors, tmp_path / "set", "3MB", stage=stage,
                                                manifest="blake3")
        handle.wait_staged()
        change(tensors)
        handle.wait()
        found = load_safetensors_sharded(tmp_path / "set")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        load_file(tmp_path / "set", verify=True)
        wanted = clone(tensors)


def test_a_tensor_without_a_counter_is_refused(tmp_path: pathlib.Path) -> None:
    """Inference tensors count no changes."""
    with torch.inference_mode():
        tensors = {"a": torch.ones(3)}
    with pytest.raises(RuntimeError, match='use stage="copy"'):
        save_file_async(tensors, tmp_path / "a", stage="lazy")
    save_file_async(tensors, tmp_path / "a").wait()


@pytest.mark.parametrize("option, value", [
    ("memory", 0), ("memory", "much"), ("stage", "never"), ("overlap", "both"), ("nice", 20),
    ("at_exit", "run"), ("copy_threads", -1)])
def test_bad_arguments(tmp_path: pathlib.Path, option: str, value: object) -> None:
    """Bad arguments are errors of the call, which has not begun a save."""
    with pytest.raises(ValueError, match=f"{value}"):
        save_file_async({"a": torch.ones(3)}, tmp_path / "a", **{option: value})
    assert not list(tmp_path.iterdir())


def test_bad_tensors(tmp_path: pathlib.Path) -> None:
    """Bad tensors raise the same errors as in save_file()."""
    a = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_file_async({"a": a, "b": a}, tmp_path / "a")
    with pytest.raises(ValueError, match="sparse"):
        save_file_async({"a": a.to_sparse()}, tmp_path / "a")
    with pytest.raises(ValueError, match="must be positive"):
        StagingPool(memory=0)


def test_disk_errors_are_raised_by_the_handle(tmp_path: pathlib.Path) -> None:
    """A missing folder, and a file that grows too large."""
    handle = save_file_async(make(), tmp_path / "none" / "a")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            handle.wait()
    assert isinstance(handle.exception(), SafetensorError)
    assert handle.stats["state"] == handle.progress.state == "failed"
    handle.before_step()  # the training goes on


def test_a_full_disk_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    """In a process whose files may not grow."""
    program = textwrap.dedent("""
        import resource, signal, sys
        import torch
        from fastsafetensors.torch import load_file, save_file, save_file_async
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save_file({"old": torch.ones(3)}, sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        for stage in ("copy", "lazy", "none"):
            tensors = {f"w{i}": torch.ones(1 << 20) for i in range(20)}
            handle = save_file_async(tensors, sys.argv[1], stage=stage)
            assert isinstance(handle.exception(), OSError), handle.exception()
            assert load_file(sys.argv[1])["old"].sum() == 3
        """)
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], check=True, timeout=600)
    assert len(list(tmp_path.iterdir())) == 1


def test_saves_are_ordered_or_superseded(tmp_path: pathlib.Path) -> None:
    """The model of the last call is saved, however many calls are in flight."""
    tensors = make()
    handles = []
    for _ in range(6):
        change(tensors)
        handles.append(save_file_async(tensors, tmp_path / "a"))
    wanted = clone(tensors)
    for handle in handles:
        handle.wait()
    assert same(tmp_path / "a", wanted)
    change(tensors)
    first = save_file_async(tensors, tmp_path / "a", durable=True)
    change(tensors)
    second = save_file_async(tensors, tmp_path / "a", overlap="supersede")
    second.wait()
    assert first.done()
    assert same(tmp_path / "a", tensors)


def test_a_handle_outlives_later_saves(tmp_path: pathlib.Path) -> None:
    """wait() and the attributes of a handle work after later saves have ended."""
    first = save_file_async(make(), tmp_path / "a")
    failed = save_file_async(make(), tmp_path / "none" / "a")
    while not (first.done() and failed.done()):
        time.sleep(0.001)
    for number in range(3):
        save_file_async(make(), tmp_path / f"{number}").wait()
    first.wait()
    assert first.stats["writer"]["file_count"] == 1
    assert isinstance(failed.exception(), FileNotFoundError)


def test_cancel(tmp_path: pathlib.Path) -> None:
    """Cancelled at any moment, a save leaves the old file or the new one, and no other file."""
    generator = random.Random(3)
    tensors = make()
    save_file(tensors, tmp_path / "a")
    old = clone(tensors)
    for _ in range(30):
        change(tensors)
        handle = save_file_async(tensors, tmp_path / "a", durable=True)
        time.sleep(generator.random() * 0.01)
        cancelled = handle.cancel()
        error = handle.exception()
        assert cancelled == handle.cancel() == (error is not None)
        if error is None:
            old = clone(tensors)
        else:
            assert "cancelled" in str(error)
        assert same(tmp_path / "a", old)
    assert os.listdir(tmp_path) == ["a"]


def test_cancel_says_whether_it_was_in_time(tmp_path: pathlib.Path) -> None:
    """False for a save that is done, and for one that has failed."""
    done = save_file_async(make(), tmp_path / "a")
    done.wait()
    assert done.cancel() is False and done.exception() is None
    failed = save_file_async(make(), tmp_path / "none" / "a")
    assert isinstance(failed.exception(), FileNotFoundError) and failed.cancel() is False
    tensors = {f"w{i}": torch.ones(MIB) for i in range(60)}
    early = save_file_async(tensors, tmp_path / "b", stage="none", durable=True)
    assert early.cancel() is True and early.cancel() is True
    with pytest.raises(RuntimeError, match="^cancelled$"):
        early.wait()
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_context_ends_the_save(tmp_path: pathlib.Path) -> None:
    """The end of a `with` block waits for the save; an exception cancels it."""
    with save_file_async(make(), tmp_path / "a") as handle:
        pass
    assert handle.progress.state == "done"
    with pytest.raises(KeyError), save_file_async(make(), tmp_path / "a") as handle:
        raise KeyError("x")
    assert handle.done()


def test_timeouts(tmp_path: pathlib.Path) -> None:
    """TimeoutError while it runs; negative ones are refused."""
    tensors = {f"w{i}": torch.ones(MIB) for i in range(60)}
    handle = save_file_async(tensors, tmp_path / "a", stage="none", durable=True)
    with pytest.raises(TimeoutError):
        handle.wait_staged(0)
    with pytest.raises(TimeoutError):
        handle.wait(0)
    with pytest.raises(TimeoutError):
        handle.exception(0)
    with pytest.raises(ValueError, match="timeout must be"):
        handle.wait(-1)
    handle.wait(600)


def test_a_forked_child(tmp_path: pathlib.Path) -> None:
    """A forked child does not affect the parent's saves, and can start its own."""
    tensors = make()
    handle = save_file_async(tensors, tmp_path / "a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the parent"):
                handle.wait()
            save_file_async(tensors, tmp_path / "child").wait()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    handle.wait()
    assert same(tmp_path / "a", tensors) and same(tmp_path / "child", tensors)


EXIT = textwrap.dedent("""
    import sys, torch
    from fastsafetensors.torch import save_file_async
    tensors = {f"w{i}": torch.full((1 << 20,), 7.0) for i in range(40)}
    handle = save_file_async(tensors, sys.argv[1], stage=sys.argv[2], at_exit=sys.argv[3],
                             durable=True)
    if sys.argv[4] == "raise":
        raise SystemExit(5)
    """)


@pytest.mark.parametrize("stage", ["copy", "lazy", "none"])
@pytest.mark.parametrize("end", ["return", "raise"])
def test_exit_waits(tmp_path: pathlib.Path, stage: str, end: str) -> None:
    """A program that ends right after the call completes the save first."""
    path = tmp_path / "a"
    done = subprocess.run([sys.executable, "-c", EXIT, str(path), stage, "wait", end], timeout=600)
    assert done.returncode == (5 if end == "raise" else 0)
    assert all(bool((tensor == 7).all()) for tensor in load_file(path).values())


def test_infinite_and_nan_timeouts(tmp_path: pathlib.Path) -> None:
    """Infinity waits; NaN is refused."""
    handle = save_file_async({"a": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(ValueError, match="timeout"):
        handle.wait(float("nan"))
    handle.wait(float("inf"))


def test_exit_cancels(tmp_path: pathlib.Path) -> None:
    """A save that is cancelled at exit leaves no file or the complete one, and no temporary
    file."""
    path = tmp_path / "a"
    subprocess.run([sys.executable, "-c", EXIT, str(path), "none", "cancel", "return"],
                   check=True, timeout=600)
    if path.exists():
        assert len(load_file(path)) == 40
    assert len(list(tmp_path.iterdir())) == path.exists()


def test_an_unqueried_error_is_logged(tmp_path: pathlib.Path) -> None:
    """An error of a handle that is never queried is logged, at the latest when the program ends."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "none" / "a"), "copy", "wait", "return"],
        check=True, timeout=600, capture_output=True, text=True)
    assert "its result was never requested" in done.stderr and "none" in done.stderr


def test_ctrl_c_while_the_call_blocks(tmp_path: pathlib.Path) -> None:
    """Ctrl-C cancels the save, and KeyboardInterrupt is raised."""
    tensors = {f"w{i}": torch.ones(MIB) for i in range(200)}
    path = tmp_path / "a"
    save_file({"old": torch.ones(3)}, path)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    interrupted = False
    try:
        save_file_async(tensors, path, memory="32MiB", durable=True).wait()
        time.sleep(5)
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted
    timer.join()
    assert len(load_file(path)) in (1, 200)


def test_killed_at_random_moments(tmp_path: pathlib.Path) -> None:
    """After kill -9 the old file or the new one exists, complete."""
    program = textwrap.dedent("""
        import sys, torch
        from fastsafetensors.torch import save_file_async
        path, value = sys.argv[1], float(sys.argv[2])
        tensors = {f"w{i}": torch.full((1 << 18,), value) for i in range(20)}
        print("begin", flush=True)
        while True:
            value += 1
            for tensor in tensors.values(): tensor.fill_(value)
            save_file_async(tensors, path, stage=sys.argv[3]).wait_staged()
        """)
    generator = random.Random(4)
    path = tmp_path / "a"
    for number in range(6):
        stage = ("copy", "lazy")[number % 2]
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(1000 * number), stage],
            stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"begin\n"
        limit = time.monotonic() + 60
        while number == 0 and not path.exists() and time.monotonic() < limit:
            time.sleep(0.01)  # at least one save is complete before the first kill
        time.sleep(0.05 + generator.random() * 0.3)
        process.kill()
        process.wait()
        process.stdout.close()
        if path.exists():
            values = {float(v) for t in load_file(path, mode="load").values() for v in t.unique()}
            assert len(values) == 1, values
    assert path.exists()


def test_torture(tmp_path: pathlib.Path) -> None:
    """Random values are written while saves run: each file is the state at its call."""
    generator = random.Random(5)
    rounds = 1000
    model = torch.nn.Sequential(torch.nn.Linear(64, 65), torch.nn.Linear(65, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state = dict(model.state_dict())
    for index, moments in optimizer.state_dict()["state"].items():
        state.update({f"{index}.{name}": value for name, value in moments.items()})
    with StagingPool(ready="32MiB") as pool:
        before = None
        for number in range(rounds):
            stage = generator.choice(("copy", "lazy"))
            wanted = clone(state)
            path = tmp_path / f"{number % 2}"
            handle = save_file_async(state, path, stage=stage, pool=pool,
                                     copy_threads=generator.randrange(4))
            if stage == "lazy":
                handle.before_step()
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            if before is not None:
                before[0].wait()
                assert same(before[1], before[2]), number
            before = (handle, path, wanted)
        assert before is not None
        before[0].wait()


@pytest.mark.usefixtures("own_home")
def test_a_store(tmp_path: pathlib.Path) -> None:
    """An object becomes visible when it is complete. A failed upload leaves the old object."""
    tensors = make()
    wanted = clone(tensors)

    def ask(secret: str) -> None:
        remote.configure(endpoint=server.url, access_key=KEY, secret_key=secret, retry_base_ms=2)

    with object_store(keys={KEY: SECRET}) as server:
        ask(SECRET)
        handle = save_file_async(tensors, "s3://bucket/a.safetensors")
        change(tensors)
        handle.wait()
        assert same("s3://bucket/a.safetensors", wanted)
        ask("another")
        handle = save_file_async(tensors, "s3://bucket/a.safetensors")
        assert isinstance(handle.exception(), PermissionError)
        ask(SECRET)
        assert same("s3://bucket/a.safetensors", wanted)
        assert not server.uploads


@pytest.mark.parametrize(("option", "words"), [
    ({"pool": "x"}, "pool must be a StagingPool, not 'x'"),
    ({"copy_threads": "2"}, "copy_threads must be a whole number, not '2'"),
    ({"nice": "5"}, "nice must be a whole number, not '5'"),
])
def test_options_of_the_wrong_type_are_named(tmp_path, torch, option, words):
    from fastsafetensors.torch import save_file_async

    with pytest.raises(TypeError, match=words):
        save_file_async({"w": torch.ones(2)}, tmp_path / "m.safetensors", **option)


def test_a_manifest_never_replaces_another_model(tmp_path, torch):
    import fastsafetensors.numpy as numpy_api
    from fastsafetensors import edit_header
    from fastsafetensors.torch import load_file, save_file, save_file_async

    tensors = {"w": torch.ones(2)}
    kept, path = tmp_path / "kept.safetensors", tmp_path / "m.safetensors"
    save_file(tensors, kept)
    words = "would overwrite a model"
    with pytest.raises(ValueError, match=words):
        save_file(tensors, path, manifest=kept)
    with pytest.raises(ValueError, match=words):
        numpy_api.save_file({"w": tensors["w"].numpy()}, path, manifest=kept)
    with pytest.raises(ValueError, match=words):
        save_file_async(tensors, path, manifest=kept).wait()
    assert not path.exists()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=words):
        edit_header(path, {"a": "b"}, manifest=kept)
    assert load_file(kept)["w"].eq(1).all()
