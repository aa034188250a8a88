# SPDX-License-Identifier: Apache-2.0
"""Programs written for fastsafetensors 0.5: their exact sequences of calls, on real files."""

import asyncio
import gc
import json
import logging
import os
import threading

import pytest
from conftest import same_bits

import fastsafetensors
from fastsafetensors import (
    AutoLoader,
    BudgetInfeasibleError,
    LoaderConfig,
    ParallelLoader,
    SafetensorError,
    SafeTensorsFileLoader,
    SafeTensorsMetadata,
    SingleGroup,
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    fastsafe_open,
    live_allocation_bytes,
    live_allocation_count,
    load_config,
    owned_expert_range,
)
from fastsafetensors.copier.base import CopierInterface, DummyDeviceBuffer
from fastsafetensors.copier.registry import (
    create_copier_constructor,
    get_copier_class,
    register_copier_constructor,
)
from fastsafetensors.frameworks import get_framework_op
from fastsafetensors.loader import BaseSafeTensorsFileLoader
from fastsafetensors.parallel_loader import PipelineParallel, enable_tqdm
from fastsafetensors.st_types import DTYPE_SIZES, Device, DeviceType, DType


@pytest.fixture
def files(sharded):
    """(sorted paths, tensors) of three files."""
    folder, tensors = sharded
    return sorted(str(p) for p in folder.glob("*.safetensors")), tensors


def check(torch, got, tensors):
    """Every tensor is there once and right."""
    got = list(got)
    assert sorted(name for name, _ in got) == sorted(tensors)
    for name, tensor in got:
        assert same_bits(torch, tensor, tensors[name]), name


def test_vllm(files, torch):
    paths, tensors = files
    for pg in (SingleGroup(), None):
        loader = ParallelLoader(pg=pg, hf_weights_files=paths, queue_size=0,
                                use_tqdm_on_load=False, device="cpu", nogds=True)
        try:
            check(torch, loader.iterate_weights(), tensors)
        finally:
            loader.close()
            loader.close()


def test_vllm_falls_back_on_gds_errors(files, torch, monkeypatch):
    """A RuntimeError that says gds before the first tensor: closed, and again with nogds."""
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
    check(torch, [first, *weights], tensors)


def test_vllm_before(files, torch):
    """The loop of older versions, and SGLang's, which never closes the buffer."""
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
        check(torch, got, tensors)
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
        check(torch, loader.iterate_weights(), tensors)
        loader.close()
    assert loader.config.max_batch_bytes == 40000


def test_atom(files, torch):
    paths, tensors = files
    for names in (paths, {0: paths}, tuple(paths)):
        with fastsafe_open(filenames=names, framework="pt", pg=None, device="cpu", nogds=True,
                           debug_log=False) as f:
            check(torch, ((n, f.get_tensor(n)) for n in f.keys()), tensors)  # noqa: SIM118
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
    """Loader and buffer kept for hours, closed elsewhere or never."""
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


def test_documents_first_example(model, torch):
    """R12, R21: the documents' own lines."""
    path, tensors = model
    with fastsafe_open(filenames=[path], nogds=True, device="cpu", debug_log=True) as f:
        loaded = {key: f.get_tensor(key).clone().detach() for key in f.get_keys()}
    check(torch, loaded.items(), tensors)
    check(torch, SafeTensorsFileLoader(path, num_threads=8).load().items(), tensors)
    assert isinstance(SafeTensorsFileLoader(path), SafeTensorsFileLoader)
    assert isinstance(SafeTensorsFileLoader(None), SafeTensorsFileLoader)


# ---- the loader ----


def test_filter(files):
    paths, tensors = files
    loader = SafeTensorsFileLoader(None)
    loader.add_filenames({0: paths})
    loader.add_filenames({0: paths[:1]})  # counts once
    assert len(loader.get_keys()) == len(tensors)
    keep = "layer.4.weight"
    loader.set_tensor_filter(lambda name: name == keep)
    assert loader.get_keys() == [keep]
    with pytest.raises(ValueError, match="get_shape: key layer.1.weight is filtered out"):
        loader.get_shape("layer.1.weight")
    with pytest.raises(KeyError):
        loader.get_shape("none")
    before = live_allocation_bytes()
    fb = loader.copy_files_to_device()
    assert list(fb.key_to_rank_lidx) == [keep]
    assert live_allocation_bytes() - before < 3 * 64 * 64 * 4
    with pytest.raises(ValueError, match="_get_rank: key layer.1.weight was not found in files"):
        fb.get_tensor("layer.1.weight")
    with pytest.raises(ValueError, match="close matches: layer.4.weight"):
        fb.get_tensor("layer.4.weigth")


def test_inflight(model, torch):
    path, tensors = model
    loader = SafeTensorsFileLoader(None)
    loader.add_filenames({0: [path]})
    fb = loader.copy_files_to_device(allow_inflight=True)
    check(torch, ((n, fb.get_tensor(n)) for n in fb.key_to_rank_lidx), tensors)


def test_nothing_added():
    loader = SafeTensorsFileLoader(SingleGroup())
    fb = loader.copy_files_to_device()
    assert fb.key_to_rank_lidx == {}
    fb.close()
    fb.close()
    loader.close()
    loader.close()
    with pytest.raises(SafetensorError, match="is closed"):
        loader.add_filenames({0: []})
    with pytest.raises(SafetensorError, match="is closed"):
        loader.copy_files_to_device()


def test_refusals(files, tmp_path, torch):
    paths, _ = files
    cases = [
        (lambda: SafeTensorsFileLoader(7), TypeError,
         "pg must be an instance of torch.disributed.ProcessGroup"),
        (lambda: SafeTensorsFileLoader(None, framework="xx"), ValueError,
         "Unknown framework name: xx"),
        (lambda: SafeTensorsFileLoader(None, bbuf_size_kb=0), ValueError, "bbuf_size_kb"),
        (lambda: SafeTensorsFileLoader(None, max_threads=0), ValueError, "max_threads"),
        (lambda: SafeTensorsFileLoader(None, "aaa:0"), ValueError, "Unknown device type: aaa"),
        (lambda: SafeTensorsFileLoader(None, "cuda:-xxx"), ValueError, "Invalid index: -xxx"),
        (lambda: SafeTensorsFileLoader(None, unknown=1), TypeError, "unknown"),
        (lambda: SafeTensorsFileLoader(paths, num_threads=0), ValueError, "num_threads"),
        (lambda: SafeTensorsFileLoader(None).add_filenames({1: paths}), ValueError,
         "rank 1 is not in the group of 1"),
        (lambda: SafeTensorsFileLoader(None).add_filenames({0: paths[0]}), TypeError,
         "a list of paths is expected"),
        (lambda: SafeTensorsFileLoader(None).add_filenames({0: [tmp_path / "no"]}),
         FileNotFoundError, "no"),
        (lambda: SafeTensorsFileLoader(None).copy_files_to_device(max_copy_block_size=0),
         ValueError, "max_copy_block_size"),
        (lambda: fastsafe_open(None), TypeError, "filenames must be a path"),
        (lambda: BaseSafeTensorsFileLoader(None, "cpu", "zz"), KeyError,
         "Copier type 'zz' is not registered. Available types:"),
    ]
    if not torch.cuda.is_available():
        cases.append((lambda: SafeTensorsFileLoader(None, "cuda:0"), RuntimeError,
                      r"\[FAIL\] GPU runtime library not found"))
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def test_a_name_in_two_files(tmp_path, torch):
    before = live_allocation_bytes()
    for name in "xy":
        fastsafetensors.save_file({"same": torch.ones(1000)}, tmp_path / name)
    loader = SafeTensorsFileLoader(None)
    loader.add_filenames({0: [tmp_path / "x", tmp_path / "y"]})
    with pytest.raises(ValueError, match="key same must be unique among files"):
        loader.copy_files_to_device()
    assert live_allocation_bytes() == before
    pair = ParallelLoader(None, [tmp_path / "x", tmp_path / "y"], use_tqdm_on_load=False)
    assert [name for name, _ in pair.iterate_weights()] == ["same", "same"]


def test_bad_files_carry_their_tags(raw):
    cases = [
        (b"", b"", "InvalidHeaderDeserialization"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"abc", "InvalidOffset"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,3]}}', b"abc", "TensorInvalidInfo"),
    ]
    for header, data, tag in cases:
        path = raw(header, data)
        loader = SafeTensorsFileLoader(None)
        with pytest.raises(SafetensorError, match=tag) as caught:
            loader.add_filenames({0: [path]})
        assert os.fspath(path) in str(caught.value)
        assert caught.value.tag == tag
    path = raw('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab and padding")
    assert SafeTensorsMetadata.from_file(path).size_bytes == path.stat().st_size  # tolerated


def test_metadata_and_frames(model, tmp_path):
    path, tensors = model
    meta = SafeTensorsMetadata.from_file(path, get_framework_op("pytorch"))
    assert list(meta.tensors) == fastsafetensors.safe_open(path, "pt").offset_keys()
    assert meta.metadata["format"] == "pt" and meta.src == os.fspath(path) and meta.aligned
    frame = meta.tensors["large"]
    assert (frame.dtype, frame.shape, frame.strides) == (DType.F32, [700, 1000], [1000, 1])
    part = frame[10:20, ::2]
    assert (part.shape, part.offsets, part.strides, part.sliced) == ([10, 500], [10, 0],
                                                                     [1000, 2], True)
    assert frame[-1].shape == [1, 1000]
    with pytest.raises(IndexError):
        frame[700]
    with pytest.raises(ValueError, match="step"):
        frame[::-1]
    with open(path, "rb") as file:
        assert list(SafeTensorsMetadata.from_fd(file.fileno(), "x", None).tensors) == \
            list(meta.tensors)
    import ctypes

    raw = path.read_bytes()
    buffer = ctypes.create_string_buffer(raw, len(raw))
    again = SafeTensorsMetadata.from_buffer(ctypes.addressof(buffer), len(raw), "memory", None)
    assert list(again.tensors) == list(meta.tensors)
    begin, end = meta.select_byte_ranges(lambda name: name == "large")[0]
    assert end - begin == tensors["large"].nbytes
    whole = meta.select_byte_ranges(lambda name: True)
    assert whole == [(meta.header_length, meta.size_bytes)]


def test_types():
    assert DTYPE_SIZES[DType.F4] == 0.5 and DTYPE_SIZES[DType.F64] == 8
    assert DTYPE_SIZES[DType.F6_E2M3] == 0.75 and DTYPE_SIZES[DType.C64] == 8
    assert Device.from_str("cuda:1") == Device(DeviceType.CUDA, 1)
    assert Device.from_str("gpu").as_str() == "gpu"
    assert SingleGroup().size() == 1 and SingleGroup().rank() == 0


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
    # Memory comes in huge pages: up to one more for each batch.
    assert live_allocation_bytes() - before <= (budget << 20) + batches * ((2 << 20) + 8192)


def test_budget_that_nothing_fits(tmp_path, torch):
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
        check(torch, loader.iterate_weights(), tensors)  # a second iteration begins anew
        weights = loader.iterate_weights()
        next(weights)
        with pytest.raises(RuntimeError, match="already under way"):
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

    check(torch, asyncio.run(collect()), tensors)


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
    check(torch, PipelineParallel(None, loader, paths, use_tqdm_on_load=False), tensors)
    assert enable_tqdm(False) is False


def test_progress_bar(files, capsys):
    pytest.importorskip("tqdm")
    paths, _ = files
    assert enable_tqdm(True) is True
    list(ParallelLoader(None, paths).iterate_weights())  # no terminal: no bar
    assert "Loading" not in capsys.readouterr().err


# ---- settings ----


def test_configuration(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert load_config() == LoaderConfig()
    (tmp_path / "fastsafetensors.json").write_text('{"loader": "zz", "3fs": {"entries": 7}}')
    with caplog.at_level(logging.INFO):
        config = load_config()
    assert "Loaded config from JSON: ./fastsafetensors.json" in caplog.text
    assert config.get_extension_config("3fs") == {"mount_point": "/mnt/3fs", "entries": 7,
                                                  "io_depth": 0, "buffer_size": 64 << 20}
    with pytest.raises(ValueError, match=r"Unknown loader type: 'zz'. Available: \['base', '3fs'\]"):
        AutoLoader(None, [])
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", "nowhere.json")
    with pytest.raises(FileNotFoundError,
                       match="Config file specified by FASTSAFETENSORS_CONFIG not found: nowhere"):
        load_config()
    assert LoaderConfig().create_parallel_kwargs()["queue_size"] == -1
    for bad in ({"queue_size": "1"}, {"use_pipeline": 1}, {"max_batch_bytes": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LoaderConfig.from_dict(bad)
    (tmp_path / "three.json").write_text('{"loader": "3fs"}')
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", "three.json")
    with pytest.raises(ModuleNotFoundError, match="fastsafetensor-3fs-reader"):
        AutoLoader(None, [])
    kwargs = SafeTensorsFileLoader.process_extension_config({"copier_type": "gds"}, a=1)
    assert kwargs == {"nogds": False, "a": 1}
    assert SafeTensorsFileLoader.process_extension_config({"copier_type": "x"})["nogds"] is True
    assert SafeTensorsFileLoader.process_extension_config({"copier_type": "fgds"})["use_fgds"]


# ---- a reader of one's own ----


class TwiceReader(CopierInterface):
    """Reads the file plainly and doubles every value."""

    def __init__(self, metadata, device, framework):
        self.metadata, self.framework, self.names = metadata, framework, None

    def set_chunk(self, ranges, names, allocation_size=None):
        self.names = names

    def submit_io(self, use_buf_register, max_copy_block_size):
        return DummyDeviceBuffer()

    def wait_io(self, gbuf, dtype=DType.AUTO, noalign=False, owner=None):
        import torch

        raw = open(self.metadata.src, "rb").read()[self.metadata.header_length:]  # noqa: SIM115
        return {
            name: self.framework.wrap_tensor(torch.frombuffer(
                bytearray(raw[slice(*frame.data_offsets)]), dtype=torch.float32)
                .reshape(frame.shape) * 2)
            for name, frame in self.metadata.tensors.items()
            if self.names is None or name in self.names
        }


def test_a_reader_of_ones_own(files, torch):
    paths, tensors = files

    @register_copier_constructor("twice", TwiceReader)
    def make(device, **settings):
        assert settings == {"level": 3}
        return TwiceReader

    assert get_copier_class("twice") is TwiceReader
    assert create_copier_constructor("twice", Device.from_str("cpu"), level=3) is TwiceReader
    loader = BaseSafeTensorsFileLoader(None, "cpu", "twice", level=3)
    loader.add_filenames({0: paths})
    fb = loader.copy_files_to_device()
    check(torch, ((n, fb.get_tensor(n) / 2) for n in fb.key_to_rank_lidx), tensors)
    for options in ({}, {"max_batch_bytes": 40000}):
        loader = BaseSafeTensorsFileLoader(None, "cpu", "twice", level=3)
        weights = PipelineParallel(None, loader, paths, use_tqdm_on_load=False, **options)
        check(torch, ((n, t / 2) for n, t in weights), tensors)


def test_wrapped_tensors(model, torch):
    path, tensors = model
    with fastsafe_open(path) as f:
        large = f.get_tensor_wrapped("large")
    assert large.get_shape() == [700, 1000] and large.get_nbytes() == 2800000
    assert large.dtype is DType.F32 and large.device.as_str() == "cpu"
    assert large.to(dtype=DType.F16).dtype is DType.F16
    assert large[3].clone().detach().contiguous().reshape([10, 100]).get_shape() == [10, 100]
    assert large.view(DType.I32).get_raw().dtype == torch.int32
    buffer = bytearray(large.get_nbytes())
    large.copy_to_buffer(memoryview(buffer))
    assert bytes(buffer) == tensors["large"].numpy().tobytes()
    op = get_framework_op("pytorch")
    assert op.is_equal(large, tensors["large"]) and op.get_name() == "pytorch"
    assert op.get_mem_used() == live_allocation_bytes()


def test_import_is_light():
    import subprocess
    import sys

    code = ("import sys, fastsafetensors; assert 'torch' not in sys.modules and "
            "'numpy' not in sys.modules; fastsafetensors.SingleGroup; "
            "assert set(fastsafetensors.__all__) <= set(dir(fastsafetensors)) | "
            "{n for n in fastsafetensors.__all__ if getattr(fastsafetensors, n) is not None}")
    subprocess.run([sys.executable, "-c", code], check=True)
