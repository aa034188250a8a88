# SPDX-License-Identifier: Apache-2.0
"""ParallelLoader: batches, budgets, filters, and loops that end early."""

import asyncio
import gc
import threading

import pytest
from conftest import check_pairs

import fastsafetensors
from fastsafetensors import (
    BudgetInfeasibleError,
    ParallelLoader,
    SafetensorError,
    SafeTensorsFileLoader,
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    live_allocation_bytes,
    live_allocation_count,
    owned_expert_range,
)
from fastsafetensors.parallel_loader import PipelineParallel, enable_tqdm

# ---- the parallel loader ----


def budget_files(tmp_path, torch):
    """3 files of 4 x 1 MiB."""
    paths = []
    for number in range(3):
        path = tmp_path / f"{number}.safetensors"
        fastsafetensors.save_file({f"f{number}.t{i}": torch.full((1 << 18,), float(i))
                                   for i in range(4)}, path)
        paths.append(path)
    return paths


@pytest.mark.parametrize(("budget", "queue", "batches"), [(13, -1, 6), (16, 2, 8), (20, 2, 5),
                                                          (64, 2, 3)])
def test_memory_budget(tmp_path, torch, budget, queue, batches):
    gc.collect()
    before = live_allocation_bytes()
    loader = ParallelLoader(None, budget_files(tmp_path, torch), queue_size=2,
                            device_memory_budget=budget << 20, use_tqdm_on_load=False)
    assert (loader.queue_size, len(loader._plan())) == (queue, batches)
    got = dict(loader.iterate_weights())
    assert len(got) == 12
    # Memory is allocated in huge pages: up to one more for each batch.
    assert live_allocation_bytes() - before <= (budget << 20) + batches * ((2 << 20) + 8192)


def test_budget_too_small_for_any_tensor(tmp_path, torch):
    paths = budget_files(tmp_path, torch)
    with pytest.raises(BudgetInfeasibleError, match=r"Model does not fit device_memory_budget: "
                       r"loading '.*2.safetensors' needs >= 13631488 bytes \(12582912 resident "
                       r"\+ 1 x 1048576 transient \+ 0 chunk overhead\), budget is 4194304\."):
        ParallelLoader(None, paths, device_memory_budget=4 << 20)
    loader = ParallelLoader(None, paths, device_memory_budget=4 << 20, accumulate_resident=False,
                            use_tqdm_on_load=False)
    assert sum(1 for _ in loader.iterate_weights()) == 12


def test_chunks(tmp_path, torch):
    paths = budget_files(tmp_path, torch)
    loader = ParallelLoader(None, paths, max_batch_bytes=2 << 20, use_tqdm_on_load=False,
                            use_chunk_budget_as_allocation_size=True)
    assert len(loader._plan()) == 6
    assert [name for name, _ in loader] == [f"f{f}.t{t}" for f in range(3) for t in range(4)]
    fastsafetensors.keep_memory(0)
    with pytest.raises(ValueError, match="max_batch_bytes=1000 is smaller than tensor 'f0.t0' "
                       r"\(1048576 bytes\)"):
        ParallelLoader(None, paths, max_batch_bytes=1000)


def test_expert_parallel(tmp_path, torch):
    names = [f"l.experts.{i}.w" for i in range(8)] + ["l.shared_experts.1.w", "embed"]
    path = tmp_path / "m.safetensors"
    fastsafetensors.save_file({name: torch.ones(2) for name in names}, path)
    assert [owned_expert_range(10, 4, rank) for rank in range(4)] == \
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    for bad in ((0, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)):
        with pytest.raises(ValueError, match="no experts"):
            owned_expert_range(*bad)
    loader = ParallelLoader(pg=None, hf_weights_files=[path], all_local=True,
                            tensor_filter=expert_parallel_filter(8, 4, 1),
                            max_batch_bytes=2 << 30, use_tqdm_on_load=False)
    assert {name for name, _ in loader.iterate_weights()} == \
        {"l.experts.2.w", "l.experts.3.w", "l.shared_experts.1.w", "embed"}


def test_expert_filter_from_env(monkeypatch):
    assert expert_parallel_filter_from_env() is None
    for key, value in {"SLICE": "1", "NUM_EXPERTS": "4", "SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(f"FASTSAFETENSORS_EP_{key}", value)
    keep = expert_parallel_filter_from_env()
    assert keep("a.experts.2.w") and not keep("a.experts.1.w") and keep("b")
    monkeypatch.delenv("FASTSAFETENSORS_EP_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert expert_parallel_filter_from_env() is None
    monkeypatch.setenv("FASTSAFETENSORS_EP_NUM_EXPERTS", "x")
    with pytest.raises(ValueError, match="must be a number, not 'x'"):
        expert_parallel_filter_from_env()


def test_leaving_the_loop_stops_everything(files, torch):
    paths, tensors = files
    gc.collect()
    before = live_allocation_count(), threading.active_count()
    for queue in (-1, 0, 3):
        loader = ParallelLoader(None, paths, queue_size=queue, use_tqdm_on_load=False)
        for name, tensor in loader.iterate_weights():
            assert torch.equal(tensor, tensors[name])
            break
        check_pairs(torch, loader.iterate_weights(), tensors)  # a second iteration begins anew
        weights = loader.iterate_weights()
        next(weights)
        with pytest.raises(RuntimeError, match="already running"):
            next(loader.iterate_weights())
        loader.close()
        with pytest.raises(SafetensorError, match="is closed"):
            next(weights)
        with pytest.raises(SafetensorError, match="is closed"):
            next(loader.iterate_weights())
        with pytest.raises(ZeroDivisionError):
            for _ in ParallelLoader(None, paths, use_tqdm_on_load=False).iterate_weights():
                raise ZeroDivisionError
    del name, tensor, weights, loader, _
    gc.collect()
    assert (live_allocation_count(), threading.active_count()) == before


def test_async(files, torch):
    paths, tensors = files

    async def collect():
        return [pair async for pair in ParallelLoader(None, paths, use_tqdm_on_load=False)]

    check_pairs(torch, asyncio.run(collect()), tensors)


def test_parallel_refusals(files):
    paths, _ = files
    for options, words in [
        ({"max_concurrent_producers": 2}, "max_concurrent_producers must be 1"),
        ({"use_chunk_budget_as_allocation_size": True}, "needs max_batch_bytes"),
        ({"resident_tensor": lambda n: True, "accumulate_resident": False}, "resident_tensor"),
        ({"borrowed_tensors": True}, "borrowed_tensors needs accumulate_resident=False"),
        ({"broadcast_run_bytes": -1}, "broadcast_run_bytes"),
        ({"max_batch_bytes": 0}, "max_batch_bytes must be positive"),
    ]:
        with pytest.raises(ValueError, match=words):
            ParallelLoader(None, paths, **options)
    assert list(ParallelLoader(None, [], use_tqdm_on_load=False).iterate_weights()) == []
    with pytest.raises(FileNotFoundError):
        next(ParallelLoader(None, ["none"], use_tqdm_on_load=False).iterate_weights())
    with pytest.raises(FileNotFoundError):
        ParallelLoader(None, ["none"], max_batch_bytes=5)


def test_pipeline_over_a_given_loader(files, torch):
    paths, tensors = files
    loader = SafeTensorsFileLoader(None)
    check_pairs(torch, PipelineParallel(None, loader, paths, use_tqdm_on_load=False), tensors)
    assert enable_tqdm(False) is False


def test_progress_bar(files, capsys):
    pytest.importorskip("tqdm")
    paths, _ = files
    assert enable_tqdm(True) is True
    list(ParallelLoader(None, paths).iterate_weights())  # no terminal: no bar
    assert "Loading" not in capsys.readouterr().err
