# SPDX-License-Identifier: Apache-2.0
"""The Python package on a real GPU with torch. Skipped without one; `make gpu-check` runs it."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import pytest
from conftest import sample_tensors

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)
import fastsafetensors  # noqa: E402
import fastsafetensors._core as core  # noqa: E402
from fastsafetensors.torch import (  # noqa: E402
    load_file,
    load_model,
    save_file,
    save_file_async,
    save_model,
)

DEVICE = "cuda:0"
KIND = "hip" if torch.version.hip else "cuda"
MIB = 1 << 20


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def check_equal(found: dict, expected: dict, device: str = DEVICE) -> None:
    """Check that tensors are on a device and equal others in name, dtype, shape and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert str(tensor.device) == device, name
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(bits(tensor), bits(expected[name])), name


def run(code: str, *arguments: object, **environment: str) -> str:
    """Run code in a new process; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(os.fspath, map(str, arguments))],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tensors() -> dict:
    """A tensor of every dtype, and some larger ones."""
    generator = torch.Generator().manual_seed(1)
    large = {f"w{i}": torch.randn(1000 + 7 * i, 1001, generator=generator) for i in range(8)}
    return {**sample_tensors(torch), **large}


@pytest.fixture(scope="module")
def path(tensors: dict, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The tensors in a file."""
    target = tmp_path_factory.mktemp("gpu") / "model.safetensors"
    save_file(tensors, target)
    return target


@pytest.fixture
def odd(tensors: dict, path: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The same file, with a header that makes all tensors begin at odd offsets."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    target = tmp_path / "odd.safetensors"
    target.write_bytes((size + 1).to_bytes(8, "little") + data[8:8 + size] + b" " + data[8 + size:])
    return target


@pytest.mark.parametrize("options", [
    {}, {"allocator": "own"}, {"gds": "off"}, {"mode": "load"}, {"threads": 1},
    {"names": ["w3", "t.bool", "empty"]}, {"engine": "pread"}, {"cache": "bypass"}])
def test_loads_equal_the_file(path: pathlib.Path, tensors: dict, options: dict) -> None:
    """Each way of loading gives the bytes of the file."""
    wanted = {name: tensors[name] for name in options.get("names", tensors)}
    check_equal(load_file(path, DEVICE, **options), wanted)


def test_misaligned_files(odd: pathlib.Path, tensors: dict) -> None:
    """Tensors at odd offsets are placed at aligned addresses by the kernel."""
    found = load_file(odd, DEVICE)
    check_equal(found, tensors)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found.values() if tensor.nbytes >= 16)


@pytest.mark.parametrize("dtype", [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2])
def test_conversions_equal_those_of_the_cpu(
        path: pathlib.Path, odd: pathlib.Path, dtype: torch.dtype) -> None:
    """Conversions on the device round like those on the CPU."""
    expected = load_file(path, dtype=dtype)
    check_equal(load_file(path, DEVICE, dtype=dtype), expected)
    check_equal(load_file(odd, DEVICE, dtype=dtype), expected)


def test_the_device_converts() -> None:
    """The kernel can be used on this device, so that conversions do not fall back to the CPU."""
    info = core.device_info(f"{KIND}:0")
    assert info["converts"], info


def test_safe_open(path: pathlib.Path, tensors: dict) -> None:
    """Tensors, slices and prefetches."""
    with fastsafetensors.safe_open(path, "pt", device=DEVICE) as f:
        check_equal({name: f.get_tensor(name) for name in f.keys()}, tensors)
        check_equal(f.get_tensors(), tensors)
        part = f.get_slice("w2")[5:900, 3:77]
        assert part.is_cuda and torch.equal(part.cpu(), tensors["w2"][5:900, 3:77])
        with f.prefetch({"w1": slice(2, 700)}, device=DEVICE) as loads:
            assert torch.equal(loads.take("w1").cpu(), tensors["w1"][2:700])


def test_loaders_of_05(path: pathlib.Path, tensors: dict) -> None:
    """SafeTensorsFileLoader, fastsafe_open and ParallelLoader with one process."""
    loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), DEVICE)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    check_equal({name: buffer.get_tensor(name) for name in loader.get_keys()}, tensors)
    buffer.close()
    loader.close()
    with fastsafetensors.fastsafe_open(str(path), device=DEVICE) as f:
        check_equal({name: f.get_tensor(name).clone() for name in f.get_keys()}, tensors)
    pairs = fastsafetensors.ParallelLoader(None, [str(path)], device=DEVICE,
                                           use_tqdm_on_load=False)
    check_equal({name: tensor.clone() for name, tensor in pairs.iterate_weights()}, tensors)


def test_sharded_models(tensors: dict, tmp_path: pathlib.Path) -> None:
    """A folder of shards is loaded as one model."""
    names = [name for name in tensors if name.startswith("w")]
    for i, name in enumerate(names):
        save_file({name: tensors[name]}, tmp_path / f"m-{i + 1:05}-of-{len(names):05}.safetensors")
    check_equal(load_file(tmp_path, DEVICE), {name: tensors[name] for name in names})


def test_models_are_loaded_in_place(tmp_path: pathlib.Path) -> None:
    """load_model writes to the parameters' memory after the queued work on the current stream."""
    source = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.LayerNorm(3000))
    path = tmp_path / "m.safetensors"
    save_model(source, path)
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.LayerNorm(3000))
        model = model.to(DEVICE, dtype)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        work = torch.randn(4000, 4000, device=DEVICE)
        for _ in range(30):
            work = work @ work
        for parameter in model.parameters():
            parameter.data.fill_(1)
        load_model(model, path)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        wanted = {name: value.to(dtype) for name, value in source.state_dict().items()}
        check_equal(model.state_dict(), wanted)


@pytest.mark.parametrize("stage", ["copy", "lazy"])
def test_saves_of_gpu_tensors(tensors: dict, path: pathlib.Path, tmp_path: pathlib.Path,
                              stage: str) -> None:
    """Saves write the state at the call: work queued before it, and no changes made after it."""
    far = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    save_file(far, tmp_path / "plain.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == path.read_bytes()
    work = torch.randn(4000, 4000, device=DEVICE)
    far = {name: torch.zeros_like(tensor) for name, tensor in far.items()}
    for _ in range(30):
        work = work @ work
    for name, tensor in tensors.items():
        far[name].copy_(tensor, non_blocking=True)
    handle = save_file_async(far, tmp_path / "async.safetensors", stage=stage)
    handle.before_step()
    for tensor in far.values():
        tensor.zero_()
    handle.wait()
    assert (tmp_path / "async.safetensors").read_bytes() == path.read_bytes()


def test_saves_of_views(tmp_path: pathlib.Path) -> None:
    """Views with strides are saved as on the CPU."""
    base = torch.randn(600, 700)
    far = base.to(DEVICE)
    for number, (one, two) in enumerate([(base.T, far.T), (base[::2, 3:], far[::2, 3:])]):
        save_file({"x": one.contiguous()}, tmp_path / f"{number}.cpu")
        save_file({"x": two.contiguous()}, tmp_path / f"{number}.gpu")
        found = [(tmp_path / f"{number}.{kind}").read_bytes() for kind in ("cpu", "gpu")]
        assert found[0] == found[1]


def test_a_training_is_resumed(tmp_path: pathlib.Path) -> None:
    """Checkpoints of a training on the GPU continue it bit by bit, random numbers included."""
    from fastsafetensors.training import RNG, CheckpointManager

    def make() -> tuple:
        model = torch.nn.Linear(400, 400, device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return model, optimizer, {"model": model, "optimizer": optimizer, "rng": RNG}

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(40, 400, device=DEVICE)).pow(2).mean().backward()
        optimizer.step()

    torch.manual_seed(1)
    model, optimizer, state = make()
    with CheckpointManager(tmp_path, every=4) as manager:
        optimizer.register_step_pre_hook(manager.before_step)
        for number in range(1, 7):
            step(model, optimizer)
            manager.save(number, state)
    other, its_optimizer, its_state = make()
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(its_state, verify=True) == 4
        for _ in range(2):
            step(other, its_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_deltas_change_a_model_in_place(tmp_path: pathlib.Path) -> None:
    """A delta changes the weights of a model on the GPU."""
    from fastsafetensors import deltas

    model = torch.nn.Linear(1000, 1000)
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        save_file(dict(model.state_dict()), tmp_path / folder / "model.safetensors")
        if folder == "old":
            far = torch.nn.Linear(1000, 1000, device=DEVICE)
            load_model(far, tmp_path / "old/model.safetensors")
            with torch.no_grad():
                model.weight[::7, 5] += 1
    deltas.make(tmp_path / "old", tmp_path / "new", tmp_path / "delta", version="2",
                base_version="1")
    address = far.weight.data_ptr()
    deltas.Delta(tmp_path / "delta").prepare(far).commit()
    assert far.weight.data_ptr() == address
    check_equal(dict(far.state_dict()), dict(model.state_dict()))


def test_memory_is_from_torch(path: pathlib.Path, tensors: dict) -> None:
    """torch counts the memory, takes it back, and reuses it; nothing of ours stays."""
    gc.collect()
    torch.cuda.empty_cache()
    before, kept = torch.cuda.memory_allocated(), core.live_buffers()
    size = sum(tensor.nbytes for tensor in tensors.values())
    for _ in range(3):
        found = load_file(path, DEVICE)
        assert size <= torch.cuda.memory_allocated() - before <= size + 2 * MIB
        del found
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert core.live_buffers() == kept
    core.trim()
    assert core.pinned_bytes() == 0


def test_full_memory_is_an_error_with_figures(path: pathlib.Path) -> None:
    """A load that does not fit says how much it needs, and the next one that fits succeeds."""
    print(run("""
    import sys, torch
    from fastsafetensors.torch import load_file
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((8 << 20) / total)
    try:
        load_file(sys.argv[1], "cuda:0")
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        print(type(error), error)
        assert "device memory" in str(error) and "needed" in str(error), error
    else:
        raise AssertionError("no error")
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert load_file(sys.argv[1], "cuda:0")
    """, path))


def test_pinned_memory(path: pathlib.Path, tensors: dict) -> None:
    """Pinned tensors are pinned in torch's view, and can be copied without blocking."""
    found = load_file(path, pin_memory=True)
    assert all(tensor.is_pinned() for tensor in found.values() if tensor.numel())
    check_equal(found, tensors, "cpu")
    check_equal({n: t.to(DEVICE, non_blocking=True) for n, t in found.items()}, tensors)


def test_streams_and_threads(path: pathlib.Path, tensors: dict) -> None:
    """Tensors are complete on every stream; several threads load on their own streams."""
    errors = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(4):
                    check_equal(load_file(path, DEVICE), tensors)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_graph_capture_of_another_thread(path: pathlib.Path, tensors: dict) -> None:
    """A load does not disturb a CUDA graph that another thread captures at the same time."""
    x = torch.ones(1000, device=DEVICE)
    start, stop, errors = threading.Event(), threading.Event(), []

    def load() -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for allocator in ("own", "torch"):
                    check_equal(load_file(path, DEVICE, allocator=allocator, gds="off"), tensors)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            errors.append(error)
        stop.set()

    load_file(path, DEVICE)  # the caches of torch and ours are filled
    thread = threading.Thread(target=load)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        start.set()
        assert stop.wait(60)
        y = y + 1
    thread.join()
    assert not errors, errors[0]
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 11


def test_other_frameworks(path: pathlib.Path, tensors: dict) -> None:
    """CuPy and numba's interface see the memory of a loaded tensor."""
    cupy = pytest.importorskip("cupy")
    model = core.Model(os.fspath(path))
    tensor = next(model.load(["large"], device=f"{KIND}:0"))
    for array in (cupy.from_dlpack(tensor), cupy.asarray(tensor)):
        assert array.data.ptr == tensor.data_ptr
        assert (cupy.asnumpy(array) == tensors["large"].numpy()).all()


def test_jax(path: pathlib.Path, tensors: dict) -> None:
    """jax gets a tensor through DLPack."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU support here")
    import numpy

    model = core.Model(os.fspath(path))
    array = jax.dlpack.from_dlpack(next(model.load(["large"], device=f"{KIND}:0")))
    assert (numpy.asarray(array) == tensors["large"].numpy()).all()


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_settings_of_torch(path: pathlib.Path, settings: str) -> None:
    """Loads use torch's allocator whatever its settings are."""
    run("""
    import sys, torch
    from fastsafetensors.torch import load_file
    expected = load_file(sys.argv[1])
    for _ in range(3):
        found = load_file(sys.argv[1], "cuda:0")
        assert torch.cuda.memory_allocated() >= sum(t.nbytes for t in found.values())
        for name, tensor in found.items():
            if tensor.numel():
                same = tensor.cpu().reshape(-1).view(torch.uint8)
                assert torch.equal(same, expected[name].reshape(-1).view(torch.uint8)), name
    """, path, PYTORCH_CUDA_ALLOC_CONF=settings, PYTORCH_ALLOC_CONF=settings)


def test_forked_processes(path: pathlib.Path) -> None:
    """A child of a process that used the GPU gets an error, and can load to the CPU."""
    run("""
    import os, sys
    import fastsafetensors._core as core
    from fastsafetensors.torch import load_file
    kept = load_file(sys.argv[1], "cuda:0")
    model = core.Model(sys.argv[1])
    child = os.fork()
    if child == 0:
        try:
            list(model.load(device="cuda:0"))
        except RuntimeError as error:
            assert "fork" in str(error), error
        else:
            os._exit(2)
        os._exit(0 if load_file(sys.argv[1], mode="load") else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert len(load_file(sys.argv[1], "cuda:0")) == len(kept)
    """, path)


def test_reset_context(path: pathlib.Path) -> None:
    """After a reset of the primary context, loads to the device are errors."""
    run("""
    import ctypes, sys
    import fastsafetensors._core as core
    model = core.Model(sys.argv[1])
    model.load(device="cuda:0").wait()
    core.trim()  # waits for the thread that frees what the load had
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuDevicePrimaryCtxReset_v2(0) == 0
    try:
        model.load(device="cuda:0").wait()
    except RuntimeError as error:
        assert "was reset" in str(error), error
    else:
        raise AssertionError("no error")
    model.load(mode="load").wait()
    """, path)


def test_missing_devices(path: pathlib.Path) -> None:
    """Devices that do not exist are errors that name them."""
    model = core.Model(os.fspath(path))
    count = torch.cuda.device_count()
    with pytest.raises(Exception, match=f"{KIND}:{count}"):
        model.load(device=f"{KIND}:{count}")
    with pytest.raises(Exception, match="device|ordinal"):
        load_file(path, f"cuda:{count}")
    run("""
    import sys
    import fastsafetensors._core as core
    try:
        core.Model(sys.argv[1]).load(device="cuda:0").wait()
    except Exception as error:
        print(error)
    else:
        raise AssertionError
    """, path, CUDA_VISIBLE_DEVICES="")


def test_strict_gds_ends(path: pathlib.Path) -> None:
    """gds="strict" loads through GPUDirect Storage, or is an error with the reason; it never
    hangs."""
    print(run("""
    import sys, torch
    from fastsafetensors.torch import load_file
    try:
        load_file(sys.argv[1], "cuda:0", gds="strict")
        print("loaded")
    except (RuntimeError, OSError) as error:
        print(error)
    """, path))


def test_tensors_are_sent_to_other_processes(path: pathlib.Path) -> None:
    """torch.multiprocessing sends copies of loaded tensors by IPC.

    Of the tensors themselves it can send only the first of a file, because torch looks an
    allocation up by its first address.
    """
    program = path.parent / "ipc.py"
    program.write_text(textwrap.dedent("""
    import sys, torch
    from fastsafetensors.torch import load_file
    def receive(tensors, sums):
        for tensor in iter(tensors.get, None):
            sums.put(int(tensor.view(torch.uint8).sum(dtype=torch.int64)))
            del tensor
    if __name__ == "__main__":
        context = torch.multiprocessing.get_context("spawn")
        tensors, sums = context.Queue(), context.Queue()
        child = context.Process(target=receive, args=(tensors, sums), daemon=True)
        child.start()
        for name, tensor in load_file(sys.argv[1], "cuda:0", names=["w0", "w1", "w2"]).items():
            tensor = tensor.clone()
            tensors.put(tensor)
            want = int(tensor.view(torch.uint8).sum(dtype=torch.int64))
            assert sums.get(timeout=60) == want, name
        tensors.put(None)
        child.join()
    """))
    done = subprocess.run([sys.executable, program, path], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_groups_of_one_rank(path: pathlib.Path, tensors: dict, tmp_path: pathlib.Path) -> None:
    """A process group with NCCL: the loader of 0.5, checkpoints of torch, and FSDP's DTensors."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    print(run("""
    import sys, os, torch
    import torch.distributed as dist
    import fastsafetensors
    from fastsafetensors import distributed as ranks
    from fastsafetensors.torch import load_file
    path, folder = sys.argv[1:]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method="file://" + folder + "/store", rank=0,
                            world_size=1, device_id=torch.device("cuda:0"))
    expected = load_file(path)
    loader = fastsafetensors.SafeTensorsFileLoader(dist.group.WORLD, "cuda:0")
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    for name in ("w0", "large"):
        assert torch.equal(buffer.get_tensor(name).cpu(), expected[name])
        assert torch.equal(buffer.get_sharded(name, 0).cpu(), expected[name])
    dims = {"w0": 0, "large": None}
    parts = ranks.load_sharded(path, dims, dist.group.WORLD, device="cuda:0")
    for name, part in parts.items():
        assert str(part.device) == "cuda:0" and torch.equal(part.cpu(), expected[name])
    from torch.distributed.fsdp import fully_shard
    import torch.distributed.checkpoint as dcp
    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter
    model = fully_shard(torch.nn.Linear(512, 512, device="cuda:0"))
    state = {"model": model.state_dict()}
    dcp.save(state, storage_writer=FastSafetensorsWriter(folder + "/dcp"))
    before = model.weight.to_local().clone()
    with torch.no_grad():
        model.weight.zero_()
    dcp.load({"model": model.state_dict()}, storage_reader=FastSafetensorsReader(folder + "/dcp"))
    assert torch.equal(model.weight.to_local(), before)
    dist.destroy_process_group()
    """, path, tmp_path))


def test_transformers(tmp_path: pathlib.Path) -> None:
    """from_pretrained() loads to the GPU through the installed replacement of safetensors."""
    transformers = pytest.importorskip("transformers")
    from fastsafetensors.integrations import accelerate_from_pretrained

    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=4, vocab_size=1000)
    source = transformers.LlamaForCausalLM(config)
    source.save_pretrained(tmp_path)
    with accelerate_from_pretrained():
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map=DEVICE)
    check_equal(dict(model.state_dict()), dict(source.state_dict()))
