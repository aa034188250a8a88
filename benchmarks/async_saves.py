#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training loop: how long a save blocks it, and what it costs in all.

    benchmarks/async_saves.py [--lora] [--saves N] [--rounds N] [--only WORD] [--results FILE]

Trains linear layers with AdamW in one thread of torch, and saves parameters and moments. With
--lora, trains an adapter of a Llama as examples/lora_trainer does, and saves the adapter. Each
method of saving runs in a separate process, with one save to warm up. The methods are interleaved
over several rounds. Columns, medians [min-max] over all saves:

blocks   seconds in the call; for lazy saves the wait before the optimizer's step as well
done     seconds from the call until the files are complete, while the loop goes on
lost     seconds that the save costs in all: the time of the save and of the steps until two after
         its end, less the same number of undisturbed steps
stop     the longest stop, in milliseconds, of a loop in Python while an asynchronous save runs
slowed   by how many per cent that loop is slower than before and after the save
peak     MB of anonymous and shared memory of the process and its children above the loop's own
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def memory_of(process: int) -> int:
    """Anonymous and shared bytes of a process and its children."""
    total = 0
    try:
        for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
        children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
        total += sum(memory_of(int(child)) for child in children)
    except OSError:
        pass
    return total


class Peak:
    """Measures the peak memory while it runs."""

    def __init__(self) -> None:
        """Begin."""
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, memory_of(os.getpid()))

    def end(self) -> int:
        """Stop and return it."""
        self._stop.set()
        self._thread.join()
        return self.most


class Loop:
    """A training loop whose state is saved."""

    def __init__(self, layers: int, width: int) -> None:
        """Make the model, and its moments."""
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.torch = torch
        self.model = self.make_model(layers, width)
        self.learned = {name: parameter for name, parameter in self.model.named_parameters()
                        if parameter.requires_grad}
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=1e-5, fused=True)
        self.data = torch.randn(32, width)
        self.before_step: Callable[[], None] = lambda: None
        self.barrier_s = 0.0
        self.step()

    def make_model(self, layers: int, width: int) -> Any:
        """Linear layers."""
        linear = self.torch.nn.Linear
        return self.torch.nn.Sequential(*(linear(width, width) for _ in range(layers)))

    def loss(self) -> Any:
        """A pass."""
        return self.model(self.data).pow(2).mean()

    def step(self) -> None:
        """Two passes and a step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            self.loss().backward()
        begin = time.perf_counter()
        self.before_step()
        self.barrier_s += time.perf_counter() - begin
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Parameters and moments by name."""
        state = {name: value.detach() for name, value in self.learned.items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            state.update({f"{index}.{name}": value for name, value in moments.items()})
        return state


class LoraLoop(Loop):
    """A loop that trains an adapter of a Llama."""

    def make_model(self, layers: int, width: int) -> Any:
        """The base model and its adapter, by transformers and peft."""
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        base = LlamaForCausalLM(LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8))
        self.labels = self.torch.randint(256, (1, 32))
        return get_peft_model(base, LoraConfig(
            r=64, lora_alpha=128, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM"))

    def loss(self) -> Any:
        """A pass over embeddings."""
        return self.model(inputs_embeds=self.data[None], labels=self.labels).loss


Way = Callable[[dict[str, Any], pathlib.Path], "Callable[[], bool] | None"]


def sync_way(save: Callable[[dict[str, Any], pathlib.Path], None]) -> Way:
    """A save that is done when it returns."""
    def run(state: dict[str, Any], path: pathlib.Path) -> None:
        save(state, path)
    return run


def make_torch(loop: Loop) -> Way:
    """torch.save, with fsync."""
    def save(state: dict[str, Any], path: pathlib.Path) -> None:
        with open(path, "wb") as file:
            loop.torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    return sync_way(save)


def make_safetensors(loop: Loop) -> Way:
    """safetensors, with fsync."""
    def save(state: dict[str, Any], path: pathlib.Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return sync_way(save)


def make_ours_sync(loop: Loop) -> Way:
    """fastsafetensors, durable."""
    from fastsafetensors.torch import save_file

    return sync_way(lambda state, path: save_file(state, path, durable=True))


def make_ours(stage: str, **options: Any) -> Callable[[Loop], Way]:
    """fastsafetensors, asynchronous."""
    def make(loop: Loop) -> Way:
        from fastsafetensors.async_save import StagingPool
        from fastsafetensors.torch import save_file_async

        size = sum(value.nbytes for value in loop.state().values())
        more = {**options}
        memory = more.pop("memory", None)
        pool = StagingPool(memory, ready=memory or size + (4 << 20))

        def run(state: dict[str, Any], path: pathlib.Path) -> Callable[[], bool]:
            handle = save_file_async(state, path, stage=stage, durable=True, pool=pool, **more)
            loop.before_step = handle.before_step

            def done() -> bool:
                if handle.done():
                    handle.wait()
                    return True
                return False

            done.handle = handle  # type: ignore[attr-defined]
            return done
        return run
    return make


def make_manager(loop: Loop) -> Way:
    """Checkpoints as the LoRA trainer saves them, with checksums."""
    from fastsafetensors.training import CheckpointManager

    managers: list[CheckpointManager] = []
    steps = itertools.count()

    def run(state: dict[str, Any], path: pathlib.Path) -> Callable[[], bool]:
        if not managers:  # in the save that warms up
            managers.append(CheckpointManager(path.parent, keep_last=2, stage="lazy"))
        handle = managers[0].save(next(steps), {"state": state})
        loop.before_step = managers[0].before_step
        return lambda: handle.done() and handle.wait() is None
    return run


def make_dcp(loop: Loop) -> Way:
    """dcp.save."""
    import torch.distributed.checkpoint as dcp

    return sync_way(lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True))


def make_dcp_async(kind: str, kept: bool, ours: bool = False) -> Callable[[Loop], Way]:
    """dcp.async_save."""
    def make(loop: Loop) -> Way:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        dist.init_process_group("gloo", rank=0, world_size=1)
        shared = kind == "process"
        options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType[kind.upper()]}
        if kept:
            options["async_stager"] = DefaultStager(StagingOptions(
                use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False,
                use_non_blocking_copy=False))
        if ours:
            from fastsafetensors.checkpoint import FastSafetensorsWriter

            options["storage_writer"] = FastSafetensorsWriter("unused", durable=True)

        def run(state: dict[str, Any], path: pathlib.Path) -> Callable[[], bool]:
            future = dcp.async_save(state, checkpoint_id=path, **options)
            return lambda: future.done() and future.result() is not future
        return run
    return make


def make_disk(loop: Loop) -> Way:
    """Another program writes as many bytes: what the machine alone costs the loop."""
    size = sum(value.nbytes for value in loop.state().values())

    def write(state: dict[str, Any], path: pathlib.Path) -> Callable[[], bool]:
        writer = subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={size >> 22}", "oflag=direct",
             "conv=fsync", "status=none"])

        def done() -> bool:
            is_over = writer.poll() is not None
            if is_over:
                remove(path)
            return is_over
        return done
    return write


WAYS: dict[str, Callable[[Loop], Way]] = {
    "dd in another process": make_disk,
    "torch.save + fsync": make_torch,
    "safetensors + fsync": make_safetensors,
    "fastsafetensors, durable": make_ours_sync,
    "dcp.save": make_dcp,
    "dcp.async_save, thread": make_dcp_async("thread", False),
    "dcp.async_save, thread, kept stager": make_dcp_async("thread", True),
    "dcp.async_save, process": make_dcp_async("process", False),
    "dcp.async_save, process, kept stager": make_dcp_async("process", True),
    "dcp.async_save, thread, FastSafetensorsWriter": make_dcp_async("thread", False, ours=True),
    "fastsafetensors async, copy": make_ours("copy"),
    "fastsafetensors async, copy, one thread": make_ours("copy", copy_threads=1),
    "fastsafetensors async, copy, 256 MiB": make_ours("copy", memory=256 << 20),
    "fastsafetensors async, lazy": make_ours("lazy"),
    "fastsafetensors async, lazy, 256 MiB": make_ours("lazy", memory=256 << 20),
    "fastsafetensors async, lazy, nice 10": make_ours("lazy", nice=10),
    "CheckpointManager, lazy": make_manager,
}


def remove(path: pathlib.Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def one_save(loop: Loop, way: Way, path: pathlib.Path) -> dict[str, float]:
    """Save once while the loop goes on; what it cost."""
    undisturbed = []
    for _ in range(5):
        begin = time.perf_counter()
        loop.step()
        undisturbed.append(time.perf_counter() - begin)
    loop.before_step, loop.barrier_s = lambda: None, 0.0
    begin = time.perf_counter()
    done = way(loop.state(), path)
    blocked = time.perf_counter() - begin
    finished = begin + blocked if done is None else 0.0
    steps, left = 0, 2
    watch = threading.Thread(target=lambda: None)
    if done is not None:
        ended: list[float] = []

        def look() -> None:
            while not done():
                time.sleep(0.005)
            ended.append(time.perf_counter())
        watch = threading.Thread(target=look)
        watch.start()
    while left > 0:
        loop.step()
        steps += 1
        if done is None or ended:
            left -= 1
    end = time.perf_counter()
    if done is not None:
        watch.join()
        finished = ended[0]
    lost = end - begin - steps * statistics.median(undisturbed)
    return {"blocks": blocked + loop.barrier_s, "call": blocked, "done": finished - begin,
            "lost": lost, "step": statistics.median(undisturbed)}


def spin(seconds: float, is_over: Callable[[], bool]) -> tuple[float, float]:
    """Run a loop in Python; return its longest stop in seconds, and its iterations per second."""
    longest, count = 0.0, 0
    begin = last = time.perf_counter()
    looked = 0.0  # seconds in is_over()
    next_look = begin + 0.02
    while last - begin < seconds:
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        count += 1
        if now > next_look:
            over = is_over()
            last = time.perf_counter()
            looked += last - now
            next_look = last + 0.02
            if over:
                break
    return longest, count / (last - begin - looked)


def disturb_python(loop: Loop, way: Way, path: pathlib.Path) -> tuple[float, float] | None:
    """What an asynchronous save does to a loop in Python, after its call.

    Returns the longest stop in seconds and the slowdown as a fraction, the median of several saves
    between undisturbed loops; None for other saves.
    """
    longest, slowdowns = 0.0, []
    _, before = spin(0.5, lambda: False)
    for _ in range(5):
        remove(path)
        done = way(loop.state(), path)
        if done is None:
            return None
        stop, disturbed = spin(600.0, done)
        longest = max(longest, stop)
        loop.before_step()
        loop.before_step = lambda: None
        _, after = spin(0.5, lambda: False)
        slowdowns.append(1 - disturbed * 2 / (before + after))
        before = after
    return longest, statistics.median(slowdowns)


def check_file(loop: Loop, way: Way, path: pathlib.Path) -> None:
    """Save while the loop goes on; the file must have the state at the call."""
    wanted = {name: value.clone() for name, value in loop.state().items()}
    done = way(loop.state(), path)
    loop.step()
    while done is not None and not done():
        time.sleep(0.005)
    if not path.is_file():
        return  # folders of torch.distributed.checkpoint are not read here
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except Exception:
        found = loop.torch.load(path)
    if found.keys() != wanted.keys() or not all(
            loop.torch.equal(found[name], wanted[name]) for name in wanted):
        raise SystemExit("the file does not have the state at the call")


def run_way(name: str, arguments: argparse.Namespace) -> None:
    """Run one measurement in a separate process; print a line of JSON."""
    loop = (LoraLoop if arguments.lora else Loop)(arguments.layers, arguments.width)
    base = memory_of(os.getpid())
    way = WAYS[name](loop)
    path = pathlib.Path(arguments.folder) / "saves" / "checkpoint"
    path.parent.mkdir()
    saves: list[dict[str, float]] = []
    peak = Peak()
    for number in range(arguments.saves + 1):
        remove(path)
        saves.append(one_save(loop, way, path))
        if number == 0:
            saves.clear()  # to warm up
    most = peak.end()
    remove(path)
    loop.before_step = lambda: None
    disturbed = disturb_python(loop, way, path)
    size = sum(value.nbytes for value in loop.state().values())
    remove(path)
    loop.before_step = lambda: None
    check_file(loop, way, path)
    remove(path.parent)
    result: dict[str, Any] = {"saves": saves, "peak": (most - base) / 1e6, "state": size / 1e6}
    if disturbed is not None:
        result.update(stop=disturbed[0] * 1e3, slowed=disturbed[1] * 100)
    print("RESULT " + json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def spread(values: list[float], digits: int) -> str:
    """Median [min-max]."""
    return (f"{statistics.median(values):.{digits}f} "
            f"[{min(values):.{digits}f}-{max(values):.{digits}f}]")


def measure(arguments: argparse.Namespace) -> None:
    """Run every way in turn, several rounds, and print a table."""
    names = [name for name in WAYS if re.search(arguments.only, name)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    kept = pathlib.Path(arguments.results) if arguments.results else None
    if kept is not None and kept.exists():
        results.update(json.loads(kept.read_text()))
    for _ in range(arguments.rounds):
        for name in names:
            command = [sys.executable, __file__, "--way", name, "--saves", str(arguments.saves),
                       "--layers", str(arguments.layers), "--width", str(arguments.width),
                       "--folder", arguments.folder, *(["--lora"] if arguments.lora else [])]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if lines:
                results.setdefault(name, []).append(json.loads(lines[-1][7:]))
                if kept is not None:
                    kept.write_text(json.dumps(results))
            else:
                print(f"{name}: failed\n{done.stderr[-800:]}", file=sys.stderr)
    print_table(results)


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print the medians of all runs."""
    print("| way | n | blocks, s | done, s | lost, s | stop, ms | slowed, % | peak, MB |\n"
          "|---|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        saves = [save for run in runs for save in run["saves"]]
        if not saves:
            continue
        columns = [spread([save[key] for save in saves], 3) for key in ("blocks", "done", "lost")]
        columns += [spread([run[key] for run in runs], 1) if key in runs[0] else "-"
                    for key in ("stop", "slowed")]
        columns.append(spread([run["peak"] for run in runs], 0))
        print(f"| {name} | {len(saves)} | {' | '.join(columns)} |")
    first = next((run for runs in results.values() for run in runs), None)
    if first is not None:
        steps = [save["step"] for runs in results.values() for run in runs for save in run["saves"]]
        print(f"\nstate {first['state']:.0f} MB; undisturbed step {spread(steps, 3)} s")


def main() -> None:
    """Measure, or run one way."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=3, help="of each process, after one more")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--lora", action="store_true", help="train an adapter of a Llama")
    parser.add_argument("--only", default="", help="a regular expression of ways")
    parser.add_argument("--folder", default="build/bench")
    parser.add_argument("--results", help="a file that results are added to; the table has all")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    pathlib.Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    if arguments.way:
        run_way(arguments.way, arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
