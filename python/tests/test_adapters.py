# SPDX-License-Identifier: Apache-2.0
"""Adapters of frameworks: paddle (a fake if it is not installed), and DLPack."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from fastsafetensors.dlpack import DLManagedTensor, from_cuda_buffer
from fastsafetensors.st_types import Device, DType

# The functions of paddle that the adapter calls, implemented with numpy arrays.
STAND_IN = textwrap.dedent('''
    import sys, types
    import numpy as np

    paddle = types.ModuleType("paddle")

    class Dtype:
        def __init__(self, name): self.name = name
        def __str__(self): return "paddle." + self.name

    class Tensor:
        def __init__(self, array, name, place="cpu"):
            self.array, self.name, self.place = np.asarray(array), name, place
        shape = property(lambda self: list(self.array.shape))
        dtype = property(lambda self: Dtype(self.name))
        def numpy(self): return self.array
        def numel(self): return self.array.size
        def element_size(self): return self.array.itemsize
        def clone(self): return Tensor(self.array.copy(), self.name)
        def detach(self): return self
        def contiguous(self): return Tensor(np.ascontiguousarray(self.array), self.name)
        def reshape(self, shape): return Tensor(self.array.reshape(shape), self.name)
        def astype(self, name): return Tensor(self.array.astype(name), name)
        def view(self, name): return Tensor(self.array.view(name), name)
        def to(self, place): return Tensor(self.array, self.name, place)
        def data_ptr(self): return self.array.ctypes.data
        def __getitem__(self, key): return Tensor(self.array[key], self.name)

    def to_tensor(array, dtype=None, place=None):
        return Tensor(array, dtype or array.dtype.name)

    paddle.to_tensor = to_tensor
    paddle.empty = lambda shape, dtype: Tensor(np.empty(shape, dtype), dtype)
    paddle.concat = lambda parts, axis: Tensor(
        np.concatenate([p.array for p in parts], axis), parts[0].name)
    paddle.equal_all = lambda a, b: (a.array == b.array).all()
    sys.modules["paddle"] = paddle
''')

FASTDEPLOY = STAND_IN + textwrap.dedent('''
    from fastsafetensors import ParallelLoader, SafeTensorsFileLoader, SingleGroup, fastsafe_open
    from fastsafetensors.frameworks import get_framework_op
    from fastsafetensors.numpy import load_file, save_file
    from fastsafetensors.saver import ParallelSaver
    from fastsafetensors.st_types import Device, DType
    import ml_dtypes

    path = sys.argv[1]
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3),
              "b": np.arange(4).astype(ml_dtypes.bfloat16),
              "u": np.arange(3, dtype=np.uint32), "i": np.arange(3, dtype=np.int64)}
    save_file(arrays, path)
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, debug_log=False,
                                   framework="paddle")
    loader.add_filenames({0: [path]})
    fb = loader.copy_files_to_device()
    got = {}
    for name in list(fb.key_to_rank_lidx):
        tensor = fb.get_tensor(name)
        got[name] = tensor.clone()
        assert list(tensor.shape) == list(arrays[name].shape)
    fb.close(); loader.close()
    assert got["b"].name == "bfloat16" and got["b"].array.dtype == np.uint16
    assert (got["b"].array.view(ml_dtypes.bfloat16) == arrays["b"]).all()
    assert got["u"].name == "int32" and got["i"].name == "int64"
    assert (got["a"].array == arrays["a"]).all()

    op = get_framework_op("paddle")
    wrapped = op.wrap_tensor(got["a"])
    assert wrapped.dtype is DType.F32 and wrapped.get_shape() == [2, 3]
    assert wrapped.to(dtype=DType.F64).dtype is DType.F64
    assert wrapped.to(device=Device.from_str("cuda:1")).device.index == 1
    assert wrapped[0].reshape([3, 1]).contiguous().clone().detach().get_shape() == [3, 1]
    assert wrapped.view(DType.I32).get_raw().name == "int32" and wrapped.get_nbytes() == 24
    buffer = bytearray(24); wrapped.copy_to_buffer(memoryview(buffer))
    assert bytes(buffer) == arrays["a"].tobytes() and wrapped.data_ptr()
    both = op.concat_tensors([wrapped, wrapped], 0)
    assert both.get_shape() == [4, 3] and op.is_equal(wrapped, got["a"])
    assert op.get_empty_tensor([2], DType.F16, Device.from_str("cpu")).get_shape() == [2]
    assert op.get_process_group(None).size() == 1 and op.get_name() == "paddle"
    for bad in (7, "x"):
        try:
            op.get_process_group(bad)
        except TypeError as error:
            assert "paddle.distributed" in str(error)
        else:
            raise AssertionError
    group = types.SimpleNamespace(nranks=2, rank=1, ranks=[4, 5])
    assert op.get_process_group(group).rank() == 1

    weights = dict(ParallelLoader(None, [path], framework="paddle", use_tqdm_on_load=False))
    assert set(weights) == set(arrays)
    paths = ParallelSaver(num_shards=2, framework="paddle").save(
        {"a": got["a"], "i": got["i"]}, path + ".out")
    loaded = {}
    for part in paths:
        loaded.update(load_file(part))
    assert (loaded["a"] == arrays["a"]).all() and (loaded["i"] == arrays["i"]).all()
    import fastsafetensors.paddle as front
    front.save_file({"a": got["a"]}, path + ".front")
    assert (front.load_file(path + ".front")["a"].array == arrays["a"]).all()
    assert (front.load(front.save({"b": got["b"]}))["b"].array == got["b"].array).all()
''')


def test_fastdeploy(tmp_path):
    if importlib.util.find_spec("paddle"):
        pytest.skip("paddle itself is installed")
    done = subprocess.run([sys.executable, "-c", FASTDEPLOY, tmp_path / "m.safetensors"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_missing_paddle_is_named():
    if importlib.util.find_spec("paddle"):
        pytest.skip("paddle itself is installed")
    from fastsafetensors import SafeTensorsFileLoader

    with pytest.raises(ImportError, match="paddle"):
        SafeTensorsFileLoader(None, framework="paddle")


def test_memory_at_an_address(torch):
    import gc
    import weakref

    class Owner:
        pass

    owner = Owner()
    kept = weakref.ref(owner)
    base = torch.arange(12.0)
    cpu = Device.from_str("cpu")
    capsule = from_cuda_buffer(base.data_ptr(), [2, 3], [6, 2], DType.F32, cpu, owner)
    tensor = torch.from_dlpack(capsule)
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 10]]
    del owner, capsule
    gc.collect()
    assert kept() is not None  # the tensor holds it
    del tensor
    gc.collect()
    assert kept() is None
    owner = Owner()
    kept = weakref.ref(owner)
    del owner
    unused = from_cuda_buffer(base.data_ptr(), [1], [1], DType.F4, cpu, kept)
    del unused  # no consumer took it
    for dtype in (DType.F8_E4M3, DType.F8_E5M2):
        with pytest.raises(KeyError):
            from_cuda_buffer(base.data_ptr(), [1], [1], dtype, cpu)
    assert torch.from_dlpack(
        from_cuda_buffer(base.data_ptr(), [4], [1], DType.F8_E8M0, cpu)).dtype == torch.uint8
    with pytest.raises(ValueError, match="the number of strides must equal"):
        from_cuda_buffer(base.data_ptr(), [4], [], DType.F32, cpu)


def test_low_level_names(tmp_path):
    import os

    from fastsafetensors import cpp

    cpp.load_library_functions()
    assert not (cpp.is_cuda_found() or cpp.is_hip_found() or cpp.is_cufile_found())
    assert cpp.is_gds_supported(0) == 0 and cpp.is_gds_supported(-1) == -1
    assert cpp.init_gds() == cpp.close_gds() == cpp.set_numa_node(0) == 0
    assert cpp.get_alignment_size() == 4096
    cpp.set_debug_log(False)
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 64)
    address = cpp.cpu_malloc(1 << 20)
    assert address % 4096 == 0
    buffer = cpp.gds_device_buffer(address, 1 << 20, False)
    assert (buffer.get_base_address(), buffer.get_length()) == (address, 1 << 20)
    fd = os.open(path, os.O_RDONLY)
    reader = cpp.nogds_file_reader(False, 16, 4, False, 0)
    numbers = [reader.submit_read(fd, buffer, 100 * i, 1000, 4096 * i) for i in range(8)]
    for i, number in enumerate(numbers):
        assert reader.wait_read(number) == address + 4096 * i
        assert cpp.read_buffer(address + 4096 * i, 1000) == path.read_bytes()[100 * i :][:1000]
    assert reader.wait_read(reader.submit_read(fd, buffer, 16000, 1000, 0)) == 0  # short
    os.close(fd)
    assert reader.wait_read(reader.submit_read(fd, buffer, 0, 1000, 0)) == 0  # closed
    with pytest.raises(IndexError):
        reader.wait_read(99)
    with pytest.raises(ValueError, match="do not fit"):
        reader.submit_read(fd, buffer, 0, 1 << 20, 1)
    direct = cpp.gds_file_reader(4, False, 0)
    handle = cpp.gds_file_handle(str(path), False, False)
    assert direct.wait_read(direct.submit_read(handle, buffer, 0, 1 << 20, 0, 16384)) == 16384
    assert cpp.read_buffer(address, 16384) == path.read_bytes()
    spare = cpp.gds_device_buffer(cpp.cpu_malloc(4096), 4096, False)
    assert buffer.memmove(0, 5, spare, 10) == 0
    assert cpp.read_buffer(address, 10) == bytes(range(5, 15))
    assert buffer.memmove(0, 5, spare, 1 << 30) == -1
    assert buffer.cufile_register(0, 4096) == buffer.cufile_deregister(0) == 0
    with pytest.raises(RuntimeError, match="error = 2"):
        cpp.gds_file_handle(str(tmp_path / "none"), False, False)
    for call in (lambda: cpp.gpu_malloc(16), lambda: cpp.gds_device_buffer(address, 1, True)):
        with pytest.raises(RuntimeError, match="gds"):
            call()
    cpp.cpu_free(address)
    cpp.cpu_free(address)


def test_framework_api_of_05(torch):
    """The results are those of version 0.5.0."""
    from fastsafetensors.frameworks._torch import get_framework_op

    op = get_framework_op()
    assert op is get_framework_op() and op.get_name() == "pytorch"
    assert op.get_global_rank() == 0
    assert [path.rsplit("/", 2)[1:] for path in op.get_runtime_lib_dirs()] == [["torch", "lib"]]
    answers = {"F8_E4M3": "I8", "F8_E8M0": "U8", "F4": "U8", "BF16": "BF16", "U16": "U16"}
    assert all(op.as_workaround_dtype(DType(a)) is DType(b) for a, b in answers.items())
    assert op.get_storage_shape(DType.F4, [2, 3, 4], [12, 4, 1]) == ([12], [1])
    assert op.get_storage_shape(DType.F32, [2, 4], [4, 1]) == ([2, 4], [4, 1])
    some = (slice(0, 1), slice(None), slice(2, 4))
    assert op.get_native_slices(DType.F4, [2, 3, 4], some) == (*some[:2], slice(1, 2, 1))
    assert op.get_native_slices(DType.F32, [2, 3, 4], some) == some
    for bad in (slice(1, 3), slice(0, 4, 2), 1):
        with pytest.raises(ValueError, match="F4"):
            op.get_native_slices(DType.F4, [2, 4], (slice(0, 1), bad))
    if not torch.cuda.is_available():
        assert op.get_device_name(0) == ""
        with pytest.raises(RuntimeError):
            op.mmap_file_pinned("/proc/self/exe", 16, 8)


def test_the_timer_of_05():
    from fastsafetensors.parallel_loader import TimingContext, parse_time

    said = []
    with TimingContext("load", said.append, batch_id=3) as watch:
        pass
    assert said == [f"Batch 3: load took {watch.elapsed_ms:.3f} ms"]
    with TimingContext("load", said.append, threshold_ms=1e6):
        pass
    with TimingContext("load", said.append, log_on_exit=False):
        pass
    with pytest.raises(KeyError), TimingContext("bad", said.append):
        raise KeyError
    assert len(said) == 2 and said[1].startswith("bad took ")
    assert parse_time(1.5) == "1970-01-01 00:00:01.500"


def test_structs_of_capsules():
    """The ctypes structs of 0.5 can read our DLPack capsules."""
    import ctypes

    memory = (ctypes.c_float * 6)(*range(6))
    capsule = from_cuda_buffer(ctypes.addressof(memory), [2, 3], [3, 1], DType.F32,
                               Device.from_str("cpu"), memory)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = DLManagedTensor.from_address(get(capsule, b"dltensor")).dl_tensor
    assert (tensor.ndim, tensor.shape[:2], tensor.strides[:2]) == (2, [2, 3], [3, 1])
    assert tensor.data + tensor.byte_offset == ctypes.addressof(memory)
    assert (tensor.dtype.type_code, tensor.dtype.bits, tensor.device.device_type) == (2, 32, 1)
