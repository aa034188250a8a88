# SPDX-License-Identifier: Apache-2.0
"""SafeTensorsFileLoader with groups: its buffer, its settings, and custom readers."""

import logging
import os

import pytest
from conftest import check_pairs, same_bits

import fastsafetensors
from fastsafetensors import (
    AutoLoader,
    LoaderConfig,
    ParallelLoader,
    SafetensorError,
    SafeTensorsFileLoader,
    SafeTensorsMetadata,
    SingleGroup,
    fastsafe_open,
    live_allocation_bytes,
    load_config,
)
from fastsafetensors.copier import registry
from fastsafetensors.copier.base import CopierInterface, DummyDeviceBuffer
from fastsafetensors.copier.registry import (
    create_copier_constructor,
    get_copier_class,
    register_copier_constructor,
)
from fastsafetensors.frameworks import get_framework_op
from fastsafetensors.loader import BaseSafeTensorsFileLoader
from fastsafetensors.parallel_loader import PipelineParallel
from fastsafetensors.st_types import DTYPE_SIZES, Device, DeviceType, DType

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
    check_pairs(torch, ((n, fb.get_tensor(n)) for n in fb.key_to_rank_lidx), tensors)


def test_empty_loader():
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
         "expected a list of paths"),
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


def test_errors_of_bad_files_have_tags(raw):
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
    words = r"Unknown loader type: 'zz'. Available: \['base', '3fs'\]"
    with pytest.raises(ValueError, match=words):
        AutoLoader(None, [])
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", "nowhere.json")
    with pytest.raises(FileNotFoundError,
                       match="Config file specified by FASTSAFETENSORS_CONFIG not found: nowhere"):
        load_config()
    assert LoaderConfig().create_parallel_kwargs()["queue_size"] == -1
    for bad in ({"queue_size": "1"}, {"use_pipeline": 1}, {"max_batch_bytes": True},
                {"max_concurrent_producers": 2}):
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


# ---- custom readers ----


class TwiceReader(CopierInterface):
    """A custom reader that reads the file and doubles every value."""

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


def test_custom_reader(files, torch):
    paths, tensors = files

    @register_copier_constructor("twice", TwiceReader)
    def make(device, **settings):
        given.append(settings)
        return TwiceReader

    given = []
    assert get_copier_class("twice") is TwiceReader
    assert get_copier_class("none") is CopierInterface
    assert create_copier_constructor("twice", Device.from_str("cpu"), level=3) is TwiceReader
    assert given.pop() == {"level": 3}
    loader = BaseSafeTensorsFileLoader(None, "cpu", "twice", level=3)
    loader.add_filenames({0: paths})
    fb = loader.copy_files_to_device()
    check_pairs(torch, ((n, fb.get_tensor(n) / 2) for n in fb.key_to_rank_lidx), tensors)
    for options in ({}, {"max_batch_bytes": 40000}):
        loader = BaseSafeTensorsFileLoader(None, "cpu", "twice", level=3)
        weights = PipelineParallel(None, loader, paths, use_tqdm_on_load=False, **options)
        check_pairs(torch, ((n, t / 2) for n, t in weights), tensors)
    assert given.pop() == {"framework": loader.framework, "set_numa": True, "level": 3}


def test_a_registered_reader_may_have_a_name_of_ours(files):
    """Its factory gets what 0.5 gives it."""
    given = []
    register_copier_constructor("nogds")(lambda device, **settings: given.append(settings))
    try:
        SafeTensorsFileLoader(None, "cpu", nogds=True, bbuf_size_kb=32, max_threads=3)
    finally:
        registry._factories.pop("nogds")
    framework = given[0].pop("framework")
    assert framework.get_name() == "pytorch"
    assert given == [{"set_numa": True, "bbuf_size_kb": 32, "max_threads": 3}]


def test_one_file_by_hand(model, torch):
    from fastsafetensors.allocation import SharedDeviceAllocation
    from fastsafetensors.tensor_factory import LazyTensorFactory

    path, tensors = model
    op, cpu = get_framework_op("pytorch"), Device.from_str("cpu")
    metadata = SafeTensorsMetadata.from_file(path, op)
    copier = create_copier_constructor("nogds", cpu)(metadata, cpu, op)
    factory = LazyTensorFactory(metadata, cpu, 0, 0, 1, 0, copier, op)
    factory.submit_io()
    factory.wait_io()
    check_pairs(torch, ((n, t.get_raw()) for n, t in factory.tensors.items()), tensors)
    factory.close()
    freed = []

    class Op:
        def free_tensor_memory(self, gbuf, device):
            freed.append(gbuf)

    shared = SharedDeviceAllocation("buffer", Op(), cpu)
    shared.acquire()
    assert shared.refcount() == 2 and shared.live
    shared.release()
    assert not freed
    shared.release()
    shared.release()
    assert freed == ["buffer"] and not shared.live
    with pytest.raises(RuntimeError, match="released"):
        shared.acquire()


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


def test_environment_and_logs(model, monkeypatch, caplog, torch):
    import logging

    from fastsafetensors import loader as module

    path, tensors = model

    def load(**options):
        caplog.clear()
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", **options)
        loader.add_filenames({0: [str(path)]})
        fb = loader.copy_files_to_device()
        assert same_bits(torch, fb.get_tensor("large"), tensors["large"])
        stats = fb.rank_loaders[0][0].loader.stats()
        fb.close()
        return stats, caplog.text

    with caplog.at_level(logging.INFO, "fastsafetensors"):
        plain = load()[1].count("\n")
        assert load(debug_log=True)[1].count("\n") == plain + 1
        monkeypatch.setenv("FASTSAFETENSORS_DEBUG", "true")
        said = load()[1]
        assert str(path) in said and f"{len(tensors)} tensors" in said
        monkeypatch.delenv("FASTSAFETENSORS_DEBUG")
        monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "0")
        assert load()[0]["engine"] == "pread"
        monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "1")
        module._warn_of_rejection.cache_clear()
        stats, said = load()
        assert stats["engine"] == "direct" or "filesystem rejected O_DIRECT for" in said
        monkeypatch.setattr(module, "_ENGINES", {"1": "nonsense"})
        with pytest.raises(ValueError, match="unknown engine"):
            load()
    monkeypatch.delenv("FASTSAFETENSORS_ODIRECT")
    assert load(max_threads=1)[0]["thread_count"] == 1
    assert module._warn_once("x", OSError("y")) is None


def test_a_file_system_without_direct_reads(torch, caplog, monkeypatch):
    import os
    import pathlib
    import tempfile

    from fastsafetensors import loader as module
    from fastsafetensors.torch import save_file

    if not pathlib.Path("/dev/shm").is_dir() or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "1")
    module._warn_of_rejection.cache_clear()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/m"
        save_file({"a": torch.ones(10)}, path)
        for _ in range(2):
            loader = SafeTensorsFileLoader(None)
            loader.add_filenames({0: [path]})
            assert loader.copy_files_to_device().get_tensor("a").eq(1).all()
    warned = [r for r in caplog.records if "filesystem rejected O_DIRECT for" in r.message]
    assert len(warned) <= 1
