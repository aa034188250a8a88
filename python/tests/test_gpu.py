# SPDX-License-Identifier: Apache-2.0
"""Loads to GPUs from Python, with fake drivers."""

import os

import pytest
from conftest import sample_tensors
from fake_gpu import run

from fastsafetensors.torch import save_file


@pytest.fixture
def sample(torch, tmp_path):
    """A file with a tensor of every dtype, and a larger one."""
    tensors = {**sample_tensors(torch), "large": torch.arange(3_000_000, dtype=torch.float32)}
    path = tmp_path / "sample.safetensors"
    save_file(tensors, path)
    return path


def test_tensors_have_their_device(sample):
    """Device, DLPack, streams, interfaces and copies of tensors on a GPU."""
    run("""
    import fastsafetensors._core as core
    model = core.Model(path)
    for kind, number in (("cuda", 2), ("hip", 10)):
        loader = model.load(["large"], device=f"{kind}:1")
        tensor = next(loader)
        assert tensor.device == f"{kind}:1" and tensor.__dlpack_device__() == (number, 1)
        good, bad = ((None, -1, 1, 2, 4096), (0, -2)) if kind == "cuda" else ((None, -1, 0), (1, 2))
        for stream in good:
            tensor.__dlpack__(stream=stream)
        for stream in bad:
            try:
                tensor.__dlpack__(stream=stream)
            except ValueError as error:
                assert "stream" in str(error)
            else:
                raise AssertionError(stream)
        tensor.__dlpack__(stream=-1, max_version=(1, 0), dl_device=(number, 1))
        for wrong in (dict(dl_device=(1, 0)), dict(copy=True)):
            try:
                tensor.__dlpack__(**wrong)
            except BufferError:
                continue
            raise AssertionError(wrong)
        assert not hasattr(tensor, "__array_interface__")
        assert not hasattr(tensor, "__array_struct__")
        assert hasattr(tensor, "__cuda_array_interface__") == (kind == "cuda")
        copy = ctypes.create_string_buffer(tensor.nbytes)
        tensor.copy_to(ctypes.addressof(copy), tensor.nbytes)
        assert copy.raw == ctypes.string_at(tensor.data_ptr, tensor.nbytes)
        assert copy.raw[4:12] == b"\\0\\0\\x80?\\0\\0\\0@"
        try:
            tensor.copy_to(ctypes.addressof(copy), 3)
        except ValueError:
            pass
        else:
            raise AssertionError
        stats = loader.stats()
        assert stats["device_bytes"] == 12_000_000 and "copied to the device" in stats["reason"]
        loader.close()
    pinned = next(model.load(["large"], device="pinned"))
    assert pinned.device == "pinned" and pinned.__dlpack_device__() == (1, 0)
    assert fake_gpu.count("locked_bytes") >= pinned.nbytes
    interface = next(model.load(["large"], device="cuda")).__cuda_array_interface__
    assert interface["version"] == 3 and interface["shape"] == (3000000,)
    """, sample)


def test_memory_of_the_callers(sample):
    """A callable allocates memory. It is freed with the last tensor, and failures are errors."""
    run("""
    import fastsafetensors._core as core
    model = core.Model(path)
    import weakref
    alive = []

    def take(size):
        memory = fake_gpu.Memory(size, 0)
        alive.append(size)
        weakref.finalize(memory, alive.pop)
        return memory

    for budget in (0, 16 << 20):
        loader = model.load(device="cuda:0", allocator=take, stream=1, budget=budget)
        tensors = list(loader)
        assert len(alive) >= 1 and loader.stats()["device_bytes"] > 12_000_000
        loader.close()
        assert len(alive) >= 1
        large = [t for t in tensors if t.name == "large"]
        tensors.clear()
        assert ctypes.string_at(large[0].data_ptr + 4, 4) == b"\\0\\0\\x80?"
        large.clear()
        gc.collect()
        assert not alive, alive

    def refuse(size):
        raise ValueError("no memory from me")

    def interrupt(size):
        raise KeyboardInterrupt

    for broken, kind in ((refuse, ValueError), (interrupt, KeyboardInterrupt),
                         (lambda size: object(), AttributeError), (lambda size: None, MemoryError)):
        try:
            model.load(device="cuda:0", allocator=broken)
        except kind:
            continue
        raise AssertionError
    try:
        model.load(device="cuda:0", allocator=3)
    except TypeError:
        pass
    assert core.live_buffers() == (0, 0)
    """, sample)


@pytest.mark.parametrize("hip", [False, True])
def test_torch_apis_load_to_the_gpu(sample, hip):
    """load_file, safe_open, the helpers and prefetch load to the GPU by themselves."""
    run(f"""
    torch = fake_gpu.give_torch_a_gpu({hip})
    import fastsafetensors
    import fastsafetensors._core as core
    from fastsafetensors.fast_loading import load_safetensors, load_safetensors_mmap
    from fastsafetensors.torch import load_file
    kind = 10 if {hip} else 2
    expected = load_file(path)
    def check(tensors, number):
        assert tensors and fake_gpu.taken and set(fake_gpu.taken) == {{(kind, number)}}
        fake_gpu.taken.clear()
        for name, tensor in tensors.items():
            same = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            mine = expected[name].reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            assert tensor.shape == expected[name].shape and torch.equal(same, mine), name
    fake_gpu.taken.clear()
    check(load_file(path, "cuda:0"), 0)
    check(load_file(path, "cuda"), 1)          # torch's current one
    check(load_file(path, 1, mode="map"), 1)
    check(load_file(path, torch.device("cuda", 0)), 0)
    check(load_safetensors(path, device="cuda:1"), 1)
    check(load_safetensors_mmap(path, ["large"], device="cuda:0"), 0)
    with fastsafetensors.safe_open(path, "pt", device="cuda:1") as f:
        check({{name: f.get_tensor(name) for name in f.keys()}}, 1)
        check(f.get_tensors(), 1)
        assert torch.equal(f.get_slice("large")[5:9], expected["large"][5:9])
        with f.prefetch({{"large": slice(2, 7)}}, device="cuda:0") as p:
            assert torch.equal(p.take("large"), expected["large"][2:7])
    half = load_file(path, "cuda:0", dtype="F16")["large"]
    assert half.dtype is torch.float16 and half[3] == 3
    del half, f, p, expected
    gc.collect()
    assert core.live_buffers() == (0, 0)
    assert 0 < core.pinned_bytes() <= 2 * 65 << 20
    core.trim()
    assert core.pinned_bytes() == 0
    for name in ("allocations", "streams", "events", "locked_bytes"):
        assert fake_gpu.count(name, "libamdhip64.so" if {hip} else "libcuda.so.1") == 0, name
    """, sample)


def test_loaders_of_05_load_to_the_gpu(sample):
    """The 0.5-style loaders: single files and batches, nogds and strict."""
    run("""
    torch = fake_gpu.give_torch_a_gpu()
    import fastsafetensors as f
    from fastsafetensors.torch import load_file
    expected = load_file(path)["large"]
    def check(get):
        fake_gpu.taken.clear()
        assert torch.equal(get(), expected) and set(fake_gpu.taken) == {(2, 1)}
    def one():
        loader = f.SafeTensorsFileLoader(f.SingleGroup(), torch.device("cuda:1"), nogds=True)
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        tensor = buffer.get_tensor("large")
        buffer.close(), loader.close()
        return tensor
    check(one)
    def opened():
        with f.fastsafe_open([path], device="cuda:1", nogds=True) as g:
            return g.get_tensor("large").clone()
    check(opened)
    import logging
    told = []
    logger = logging.getLogger("fastsafetensors._torch.gpu")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: told.append(record.getMessage()) or True)
    def batches():
        loader = f.ParallelLoader(f.SingleGroup(), [path], device="cuda:1", use_tqdm_on_load=False)
        found = {name: tensor.clone() for name, tensor in loader.iterate_weights()}
        loader.close()
        return found["large"]
    check(batches)
    check(batches)
    assert len(told) == 1 and "GPUDirect Storage is not used" in told[0], told  # and only once
    loader = f.SafeTensorsFileLoader(f.SingleGroup(), "cuda:1", strict=True)
    loader.add_filenames({0: [path]})
    os.environ["FAKE_GDS_MODE"] = "1"
    try:
        loader.copy_files_to_device()
    except RuntimeError as error:
        assert "gds" in str(error), error
    else:
        raise AssertionError
    try:
        f.SafeTensorsFileLoader(f.SingleGroup(), "cuda:1", strict=True, nogds=True)
    except ValueError:
        pass
    else:
        raise AssertionError
    """, sample, FAKE_GDS_MODE="1")


def test_freeing_and_trimming_do_not_block(sample):
    """While a kernel runs without end, tensors are freed without waiting, and only trim() waits."""
    run("""
    import signal, threading
    import fastsafetensors._core as core
    driver = fake_gpu.library()
    tensors = list(core.Model(path).load(device="cuda:0"))
    signal.alarm(300)
    driver.fake_gpu_hold(ctypes.c_void_p(0))
    tensors.clear()
    gc.collect()
    trimmed = threading.Thread(target=core.trim)
    trimmed.start()
    trimmed.join(0.2)
    assert trimmed.is_alive() and fake_gpu.count("allocations") >= 1
    driver.fake_gpu_let_go()
    trimmed.join()
    assert fake_gpu.count("allocations") == 0 and core.live_buffers() == (0, 0)
    """, sample)


def test_every_api_allocates_with_torch(sample):
    """Tensors are in memory of torch's allocator, by every API."""
    run("""
    torch = fake_gpu.give_torch_a_gpu()
    import fastsafetensors as f
    from fastsafetensors.fast_loading import load_safetensors, load_safetensors_mmap
    from fastsafetensors.torch import load_file, load_model
    driver = fake_gpu.library()
    driver.fake_gpu_set(b"alloc_calls", 0)
    def whole(get):
        fake_gpu.torch_bytes.clear()
        before = fake_gpu.count("alloc_calls")
        found = get()
        # Nothing but torch's, and the rings' places for chunks that the kernel takes apart.
        assert fake_gpu.torch_bytes and fake_gpu.count("alloc_calls") - before <= (
            len(fake_gpu.torch_bytes) + 4), fake_gpu.torch_bytes
        del found
        gc.collect()
    whole(lambda: load_file(path, "cuda:0"))
    whole(lambda: load_safetensors(path, device="cuda:0"))
    whole(lambda: load_safetensors_mmap(path, device="cuda:0"))
    def opened():
        with f.safe_open(path, "pt", device="cuda:1") as g:
            return [g.get_tensor(name) for name in g.keys()], g.get_tensors()
    whole(opened)
    def ahead():
        with f.safe_open(path, "pt", device="cuda:1") as g, g.prefetch({"large": None}) as p:
            return p.take("large")
    whole(ahead)
    def batches():
        loader = f.ParallelLoader(f.SingleGroup(), [path], device="cuda:1", use_tqdm_on_load=False)
        found = [tensor.clone() for _, tensor in loader.iterate_weights()]
        loader.close()
        return found
    whole(batches)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.large = torch.nn.Parameter(torch.empty(3000000, device="meta"))
    whole(lambda: load_model(Net(), path, strict=False, device="cuda:0", assign=True))
    fake_gpu.torch_bytes.clear()
    load_file(path, "cuda:0", allocator="own")
    assert not fake_gpu.torch_bytes
    """, sample)


def test_every_api_retries_on_a_full_device(sample):
    """torch's cache holds half of the device memory. The load empties the cache and continues."""
    for memory in ("torch", "own"):
        run(f"""
        memory = {memory!r}
        torch = fake_gpu.give_torch_a_gpu()
        import fastsafetensors as f
        from fastsafetensors.fast_loading import load_safetensors
        from fastsafetensors.torch import load_file
        kept = []
        def keep():
            kept[:] = [fake_gpu.Memory(10 << 20, 0)]
        torch.cuda.empty_cache = kept.clear
        def loads(get):
            keep()
            got = get()
            assert not kept
            del got
            gc.collect()
            f._core.trim()
        loads(lambda: load_file(path, "cuda:0", allocator=memory))
        if memory == "torch":
            loads(lambda: load_safetensors(path, device="cuda:0"))
            def opened():
                with f.safe_open(path, "pt", device="cuda:0") as g:
                    return g.get_tensors()
            loads(opened)
            def batches():
                loader = f.ParallelLoader(f.SingleGroup(), [path], device="cuda:0",
                                          use_tqdm_on_load=False)
                found = [tensor.clone() for _, tensor in loader.iterate_weights()]
                loader.close()
                return found
            loads(batches)
        """, sample, FAKE_GPU_MEMORY="20000000")


def test_full_device_empties_the_torch_cache(sample):
    """A full device is a MemoryError with the needed size, after the cache was emptied and one
    retry."""
    run("""
    torch = fake_gpu.give_torch_a_gpu()
    from fastsafetensors.torch import load_file
    fake_gpu.taken.clear()
    try:
        load_file(path, "cuda:0")
    except MemoryError as error:
        assert "bytes needed" in str(error) and "cuda:0" in str(error), error
        # Files cannot be mapped there.
        assert "open_stream(memory=...), or load fewer tensors" in str(error), error
    else:
        raise AssertionError
    assert fake_gpu.taken == ["emptied"]
    """, sample, FAKE_GPU_MEMORY="4000000")


@pytest.mark.parametrize("memory", ["own", "torch"])
@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuStreamCreate",
                                      "cuMemcpyHtoDAsync", "cuEventRecord", "cuLaunchKernel"])
def test_a_device_without_memory_for_the_driver_is_full(sample, function, memory):
    """For a context, a stream or a copy: torch gives back what it keeps, and the load succeeds."""
    run(f"""
    import ctypes
    torch = fake_gpu.give_torch_a_gpu()
    from fastsafetensors.torch import load_file
    driver = fake_gpu.library()
    fake_gpu.taken.clear()
    driver.fake_gpu_fail({function.encode()!r}, ctypes.c_long(1), ctypes.c_long(2))
    load_file(path, "cuda:0", allocator={memory!r})
    assert "emptied" in fake_gpu.taken, fake_gpu.taken
    """, sample)


def test_the_command_does_not_advise_to_map_on_a_device(sample):
    import subprocess

    from fake_gpu import fakes_folder

    environment = {**os.environ, "LD_LIBRARY_PATH": fakes_folder(), "FAKE_GPU_MEMORY": "4000000"}
    done = subprocess.run(["fastsafetensors", "load", "--device", "cuda:0", sample],
                          env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "--budget SIZE" in done.stderr, done.stderr
    assert "map" not in done.stderr
    done = subprocess.run(["fastsafetensors", "load", "--device", "cuda:0", "--budget", "20M",
                           sample], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "use a smaller --budget" in done.stderr, done.stderr


def test_missing_devices(sample):
    """No driver, no such device, after a fork: errors that say so."""
    run("""
    import fastsafetensors._core as core
    model = core.Model(path)
    assert core.device_count("cuda") == 0
    try:
        model.load(device="cuda:0")
    except RuntimeError as error:
        assert "no driver" in str(error), error
    else:
        raise AssertionError
    """, sample, LD_LIBRARY_PATH="/nonexistent")
    run("""
    import fastsafetensors._core as core
    model = core.Model(path)
    info = core.device_info("cuda:1")
    assert info["name"] == "Fake GPU 1" and info["converts"] and core.device_count("cuda") == 2
    for device, words in (("cuda:2", "does not exist"), ("tpu", "unknown device")):
        try:
            model.load(device=device)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError
    names = [row[0] for row in core.engines(path)]
    assert names[-4:] == ["cuda", "cufile", "hip", "hipfile"], names
    tensors = list(model.load(device="cuda:0"))
    child = os.fork()
    if child == 0:
        try:
            model.load(device="cuda:0")
        except RuntimeError as error:
            tensors.clear()
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    """, sample)


def test_machines_with_amd_gpus_alone(command, sample, tmp_path):
    """The fault of their driver is reported, and not that there is no other."""
    import subprocess

    from fake_gpu import fakes_folder

    folder = tmp_path / "amd"
    folder.mkdir()
    for name in ("libamdhip64.so", "libhiprtc.so"):
        (folder / name).symlink_to(f"{fakes_folder()}/{name}")

    def said(device, **more):
        done = subprocess.run([command, "load", "--device", device, sample], text=True,
                              env={**os.environ, "LD_LIBRARY_PATH": os.fspath(folder), **more},
                              capture_output=True, check=False)
        assert done.returncode != 0
        return done.stderr

    for device in ("gpu", "pinned", "hip:0"):
        words = said(device, FAKE_GPU_DEVICES="0")
        assert "hip can't be used: the driver sees no device" in words, (device, words)


def test_missing_devices_of_models(sample):
    """torch's error, before the model is opened, although nothing is assigned."""
    from fastsafetensors.torch import load_model

    import torch

    with pytest.raises(Exception, match="(?i)cuda"):
        load_model(torch.nn.Linear(2, 2), sample, device="cuda:63", strict=False)


def test_pinned_and_torch_memory(sample):
    """load_file's pin_memory and memory options."""
    run("""
    torch = fake_gpu.give_torch_a_gpu()
    from fastsafetensors.torch import load_file
    pinned = load_file(path, pin_memory=True)
    assert set(fake_gpu.taken) == {(1, 0)} and pinned["large"][7] == 7
    for wrong in (dict(pin_memory=True, device="cuda"), dict(allocator="mine"), dict(gds="maybe")):
        try:
            load_file(path, **{"device": "cuda:0", **wrong})
        except ValueError:
            continue
        raise AssertionError(wrong)
    """, sample)


@pytest.mark.parametrize("memory", ["own", "torch"])
def test_sharded_models_load_to_the_gpu(torch, memory, tmp_path):
    """Each file is a separate batch, whose memory is allocated while others are being read."""
    for i in range(6):
        tensors = {f"t{i}.{k}": torch.full((300_000,), float(6 * k + i)) for k in range(10)}
        save_file(tensors, tmp_path / f"m-{i}.safetensors")
    run(f"""
    fake_gpu.give_torch_a_gpu()
    import glob, weakref
    import fastsafetensors._torch.gpu as gpu
    from fastsafetensors.torch import load_file
    given, take = [], gpu._allocate
    gpu._allocate = lambda *args: given.append(args[0]) or take(*args)
    paths = sorted(glob.glob(path + "/*.safetensors"))
    for device in (0, 1):
        for _ in range(2):
            loaded = load_file(paths, device=f"cuda:{{device}}", allocator={memory!r})
            assert len(loaded) == 60
            for name, tensor in loaded.items():
                i, k = map(int, name[1:].split("."))
                assert (tensor == 6 * k + i).all(), name
            del loaded, tensor
    assert len(given) == ({memory!r} == "torch") * 6 * 4, given
    """, tmp_path)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cpu", "cuda:1")])
def test_parts_of_ranks_are_read_to_their_gpus(torch, devices, tmp_path):
    """By the pipeline of the GPU, through the page cache; in memory of torch's allocator."""
    from concurrent.futures import ThreadPoolExecutor

    generator = torch.Generator().manual_seed(3)
    tensors = {f"t{i}": torch.randn(64, 4096, generator=generator) for i in range(6)}
    save_file(tensors, tmp_path / "m.safetensors")
    store = tmp_path / "store"

    def rank(number):
        return run(f"""
        torch = fake_gpu.give_torch_a_gpu()
        import torch.distributed as dist
        import fastsafetensors.distributed as ranks
        ranks.check_present = lambda device: None
        dist.init_process_group("gloo", init_method="file://" + folder, rank={number},
                                world_size=2)
        device = {devices[number]!r}
        dims = {{f"t{{i}}": (0, 1, None)[i % 3] for i in range(6)}}
        loaded = ranks.load_sharded(path, dims, dist.group.WORLD, device=device)
        assert loaded.stats["slice"] == 6 and loaded.stats["bytes_sent"] == 0
        assert list(loaded) == list(dims)
        if device != "cpu":
            assert {{n for _, n in fake_gpu.torch_bytes}} == {{{number}}}
            assert fake_gpu.count("copies") > 0
        from safetensors.torch import load_file
        whole = load_file(path)
        for name, dim in dims.items():
            part = whole[name] if dim is None else whole[name].chunk(2, dim)[{number}]
            assert torch.equal(loaded[name], part), name
        dist.destroy_process_group()
        """, tmp_path / "m.safetensors", store)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))


def test_allocator_lives_as_long_as_the_load(sample):
    """The load releases the allocator when it is complete, because the allocator may refer to the
    load."""
    run("""
    import weakref
    import fastsafetensors._core as core
    class Giver:
        def __call__(self, size):
            return fake_gpu.Memory(size, 0)
    model, giver = core.Model(path), Giver()
    watch = weakref.ref(giver)
    fake_gpu.Memory.data_ptr = lambda self: self.address.value
    loader = giver.loader = model.load(device="cuda:0", allocator=giver)
    loader.wait()
    del giver
    gc.collect()
    assert watch() is None
    assert len(list(loader)) == len(model.names())
    """, sample)


def test_tensors_of_a_gpu_are_saved_by_blocks(sample, tmp_path):
    """The writer reads rows of a device; a wrong device is an error."""
    run("""
    import fastsafetensors._core as core
    model = core.Model(path)
    tensors = list(model.load(device="cuda:1"))
    rows = [(t.name, t.dtype, t.shape, t.data_ptr, t.nbytes, t.device) for t in tensors]
    writer = core.Writer(folder + "/far.safetensors", rows)
    writer.commit()
    writer.close()
    other = core.Model(folder + "/far.safetensors")
    for name in model.names():
        pair = [next(m.load([name], mode="load")) for m in (model, other)]
        one, two = (ctypes.string_at(tensor.data_ptr, tensor.nbytes) for tensor in pair)
        assert one == two
    try:
        core.Writer(folder + "/x", [(*rows[0][:5], "tpu:1")])
    except ValueError as error:
        assert "unknown device" in str(error)
    else:
        raise AssertionError
    """, sample, tmp_path)


def test_command_loads_to_the_gpu(command, sample):
    """The command's --device and --gds, with and without a driver."""
    import json
    import os
    import subprocess

    from fake_gpu import fakes_folder

    def call(*arguments, fakes=True):
        environment = {**os.environ, "LD_LIBRARY_PATH": fakes_folder() if fakes else ""}
        return subprocess.run([command, "load", *arguments, sample], env=environment, text=True,
                              capture_output=True, timeout=600, check=False)

    done = call("--device", "cuda:1", "--json", "--dtype", "F16", "--gds", "off")
    stats = json.loads(done.stdout)
    assert done.returncode == 0 and stats["device_launches"] >= 1 and stats["device_bytes"] > 0
    assert "sent to the device" in call("--device", "hip", "--gds", "off").stdout
    done = call("--device", "cuda:0", fakes=False)
    assert done.returncode == 4 and "no driver" in done.stderr
    done = call("--device", "cuda:9")
    assert done.returncode == 3 and "does not exist" in done.stderr
