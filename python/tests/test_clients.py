# SPDX-License-Identifier: Apache-2.0
"""Programs written for fastsafetensors 0.5: their sequences of calls, on real files."""

import gc
import json
import threading

import pytest
from conftest import check_pairs

from fastsafetensors import (
    AutoLoader,
    ParallelLoader,
    SafetensorError,
    SafeTensorsFileLoader,
    SingleGroup,
    fastsafe_open,
    live_allocation_count,
)
from fastsafetensors.st_types import DType


def test_vllm(files, torch):
    paths, tensors = files
    for pg in (SingleGroup(), None):
        loader = ParallelLoader(pg=pg, hf_weights_files=paths, queue_size=0,
                                use_tqdm_on_load=False, device="cpu", nogds=True)
        try:
            check_pairs(torch, loader.iterate_weights(), tensors)
        finally:
            loader.close()
            loader.close()


def test_vllm_falls_back_on_gds_errors(files, torch, monkeypatch):
    """After a RuntimeError with "gds" before the first tensor, vLLM closes the loader and retries
    with nogds."""
    paths, tensors = files

    def load(nogds):
        loader = ParallelLoader(pg=SingleGroup(), hf_weights_files=paths, queue_size=0,
                                use_tqdm_on_load=False, device="cpu", nogds=nogds)
        if not nogds:
            def fail(batch):
                raise RuntimeError("gds is not there")
            monkeypatch.setattr(loader, "_start", fail)
        try:
            yield from loader.iterate_weights()
        finally:
            loader.close()

    weights = load(nogds=False)
    try:
        first = next(weights)
    except RuntimeError as error:
        assert "gds" in str(error)
        weights.close()
        weights = load(nogds=True)
        first = next(weights)
    check_pairs(torch, [first, *weights], tensors)


def test_vllm_of_05(files, torch):
    """The loop of older vLLM versions and of SGLang, which never closes the buffer."""
    paths, tensors = files
    gc.collect()
    before = live_allocation_count()
    for close_buffer in (True, False):
        got = []
        for batch in ([p] for p in paths):
            loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
            loader.add_filenames({i: [f] for i, f in enumerate(batch)})
            try:
                fb = loader.copy_files_to_device()
                for key in list(fb.key_to_rank_lidx.keys()):
                    got.append((key, fb.get_tensor(key)))
                if close_buffer:
                    fb.close()
            finally:
                loader.close()
            del fb
        check_pairs(torch, got, tensors)
        del got
        gc.collect()
        assert live_allocation_count() == before


def test_rtp_llm(files, torch, tmp_path, monkeypatch):
    import inspect

    paths, tensors = files
    assert "device" in inspect.signature(AutoLoader.__init__).parameters
    monkeypatch.chdir(tmp_path)
    for settings in ({}, {"parallel": {"use_pipeline": True, "queue_size": 1},
                          "base": {"copier_type": "nogds", "bbuf_size_kb": 1024},
                          "debug": {"debug_log": True}, "unknown": 3},
                     {"use_pipeline": True, "max_batch_bytes": 40000}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(tmp_path / "config.json"))
        loader = AutoLoader(None, paths, device="cpu")
        check_pairs(torch, loader.iterate_weights(), tensors)
        loader.close()
    assert loader.config.max_batch_bytes == 40000


def test_atom(files, torch):
    paths, tensors = files
    for names in (paths, {0: paths}, tuple(paths)):
        with fastsafe_open(filenames=names, framework="pt", pg=None, device="cpu", nogds=True,
                           debug_log=False) as f:
            check_pairs(torch, ((n, f.get_tensor(n)) for n in f.keys()), tensors)  # noqa: SIM118
            assert f.get_keys() == f.keys() == list(f)
            assert len(f) == len(tensors) and paths[0] not in f and f.keys()[0] in f


def test_tgis(files, torch):
    paths, tensors = files
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", bbuf_size_kb=1024, max_threads=4,
                                   nogds=True, debug_log=False)
    loader.add_filenames({0: paths})
    fb = loader.copy_files_to_device(DType.F16, use_buf_register=True,
                                     max_copy_block_size=1 << 20)
    name, other = list(tensors)[:2]
    assert torch.equal(fb.get_sharded(name, 1), tensors[name].half())
    assert torch.equal(fb.get_tensor(name, dtype=torch.float64), tensors[name].half().double())
    pair = fb.get_multi_cols([other, name], dim=1).get_raw()
    assert torch.equal(pair, torch.cat([tensors[other], tensors[name]], 1).half())
    assert torch.equal(fb.push_tensor(name, 0), tensors[name].half())
    assert set(fb.as_dict({name: 0, other: -1})) == {name, other}
    assert [n for n, _ in fb.iter_local_tensors([name])] == [name]
    with pytest.raises(ValueError, match="get_multi_cols: no names"):
        fb.get_multi_cols([], 0)


def test_comfyui_and_scripts(files, torch):
    """Loader and buffer are kept for a long time, and closed elsewhere or never."""
    paths, tensors = files
    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"))
    loader.add_filenames({0: [paths[0]]})
    metadata, rank = loader.meta[paths[0]]
    assert metadata.metadata == "" and rank == 0
    fb = loader.copy_files_to_device()
    name = next(iter(fb.key_to_rank_lidx))
    kept = fb.get_tensor(name)
    assert fb.get_tensor(name) is kept
    assert fb.get_filename(name) == paths[0]
    assert fb.get_shape(name) == list(tensors[name].shape) == loader.get_shape(name)
    loader = SafeTensorsFileLoader(pg=None, device="cpu", bbuf_size_kb=64)
    loader.add_filenames({0: [paths[1]]})
    fb = loader.copy_file_to_device()
    got = {n: fb.get_tensor(n) for n in fb.key_to_rank_lidx}
    del loader, fb
    assert torch.equal(kept, tensors[name])
    assert all(torch.equal(got[n], tensors[n]) for n in got)


def test_caches(model, torch):
    path, tensors = model
    handle = fastsafe_open(path, framework="pt", device="cpu", nogds=True)
    assert (next(iter(handle.metadata().values())) or {})["format"] == "pt"
    tensor = handle.get_tensor("large")
    thread = threading.Thread(target=handle.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert handle.metadata() == {}
    assert torch.equal(tensor, tensors["large"])
    clone = fastsafe_open(str(path), device="cpu", nogds=True).get_tensor("large").clone().detach()
    assert torch.equal(clone, tensors["large"])
    with pytest.raises(SafetensorError, match="is closed"):
        handle.get_tensor("large")


def test_first_documented_example(model, torch):
    """The first example in the documentation of 0.5, line by line."""
    path, tensors = model
    with fastsafe_open(filenames=[path], nogds=True, device="cpu", debug_log=True) as f:
        loaded = {key: f.get_tensor(key).clone().detach() for key in f.get_keys()}
    check_pairs(torch, loaded.items(), tensors)
    check_pairs(torch, SafeTensorsFileLoader(path, num_threads=8).load().items(), tensors)
    assert isinstance(SafeTensorsFileLoader(path), SafeTensorsFileLoader)
    assert isinstance(SafeTensorsFileLoader(None), SafeTensorsFileLoader)
