# SPDX-License-Identifier: Apache-2.0
"""Wrong options: errors name the parameter, and none is taken silently."""

import pickle

import pytest

import fastsafetensors
from fastsafetensors import _core, numpy, open_stream, safe_open
from fastsafetensors.async_save import StagingPool


@pytest.fixture
def path(tmp_path, torch):
    fastsafetensors.save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def calls(path, torch):
    """Functions that take `threads`, each with a model of its own."""
    from fastsafetensors import deltas, fast_loading, integrations
    from fastsafetensors.checkpoint import FastSafetensorsReader
    from fastsafetensors.lazy import LazyModel

    tensors, folder = {"a": torch.ones(4)}, path.parent / "saved"
    return {
        "load_file": lambda **o: fastsafetensors.load_file(path, **o),
        "load_file of no name": lambda **o: fastsafetensors.load_file(path, names=[], **o),
        "load_file to meta": lambda **o: fastsafetensors.load_file(path, "meta", **o),
        "numpy": lambda **o: numpy.load_file(path, **o),
        "open_stream": lambda **o: open_stream(path, names=[], **o),
        "load_model": lambda **o: fastsafetensors.load_model(torch.nn.Module(), path, False, **o),
        "read_ahead": lambda **o: safe_open(path, "pt").read_ahead(**o),
        "LazyModel": lambda **o: LazyModel(path, names=[], **o),
        "reader": lambda **o: FastSafetensorsReader(path, **o),
        "accelerate": lambda **o: integrations.accelerate_from_pretrained(**o),
        "sharded": lambda **o: fast_loading.save_safetensors_sharded(tensors, folder, **o),
        "sharded async": lambda **o: fast_loading.save_safetensors_sharded_async(
            tensors, folder, **o),
        "recover": lambda **o: deltas.recover(path.parent, **o),
    }


@pytest.mark.parametrize("threads, kind", [(-1, ValueError), (2**33, ValueError),
                                           (10**30, ValueError), (1.5, TypeError),
                                           ("2", TypeError), (True, TypeError), (None, TypeError)])
def test_threads_are_a_number_of_threads(threads, kind, path, torch):
    for name, call in calls(path, torch).items():
        with pytest.raises(kind, match="^threads must be"):
            call(threads=threads)
            pytest.fail(name)
    assert not (path.parent / "saved").exists()


@pytest.mark.parametrize("option", ["mode", "engine", "cache"])
@pytest.mark.parametrize("value, kind", [(3, TypeError), (None, TypeError), ("x", ValueError)])
def test_words_of_loads(option, value, kind, path):
    with pytest.raises(kind, match=f"{option}.* (one of|of:) ?auto"):
        numpy.load_file(path, **{"mode": "load", option: value} if option != "mode" or value
                        else {"mode": 3})


@pytest.mark.parametrize("given", [
    {"engine": 3}, {"alignment": 3}, {"alignment": -1}, {"alignment": 2**64}, {"alignment": "3"},
    {"alignment": 1 << 21}, {"compress": 3}, {"compress": "much"}, {"manifest": 3},
], ids=str)
def test_options_of_saves(given, path, torch):
    before, saves = path.read_bytes(), (fastsafetensors.save_file, fastsafetensors.save_file_async)
    for save in saves:
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(given))} "):
            save({"a": torch.zeros(4)}, path, **given)
    assert path.read_bytes() == before


@pytest.mark.parametrize("memory", [-1, 2**63, 10**30, 1.5, "much", True])
def test_sizes_are_named(memory, path, torch):
    from fastsafetensors.checkpoint import FastSafetensorsWriter
    from fastsafetensors.lazy import LazyModel

    kind = TypeError if memory in (1.5, True) else ValueError
    for call in (lambda: open_stream(path, memory=memory), lambda: LazyModel(path, memory=memory),
                 lambda: StagingPool(memory), lambda: fastsafetensors.save_file_async(
                     {"a": torch.ones(4)}, path, memory=memory)):
        with pytest.raises(kind, match="^memory must be"):
            call()
    with pytest.raises(kind, match="^ready must be"):
        StagingPool(None, memory)
    with pytest.raises(kind, match="^max_shard_size must be"):
        FastSafetensorsWriter(path.parent, memory)


def test_staging_memory_is_at_least_one_block(path, torch):
    for call in (lambda: StagingPool("31MiB"), lambda: fastsafetensors.save_file_async(
            {"a": torch.ones(4)}, path, memory=(32 << 20) - 1)):
        with pytest.raises(ValueError, match="memory must be at least 32 MiB"):
            call()
    StagingPool("32MiB").close()


@pytest.mark.parametrize("given, name", [
    ({"mode": "map", "engine": "pread"}, "engine"), ({"allocator": "own"}, "allocator"),
    ({"device": "meta", "gds": "strict"}, "gds"), ({"device": "meta", "gds": "off"}, "gds"),
    ({"device": "meta", "pin_memory": True}, "pin_memory"),
], ids=str)
def test_load_options_without_effect(given, name, path, torch):
    with pytest.raises(ValueError, match=f"^{name}.* (has no effect|needs a GPU)"):
        fastsafetensors.load_file(path, **given)


def test_other_options_without_effect(path, torch):
    for given in ({"memory": "64MiB"}, {"copy_threads": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} has no effect with stage"):
            fastsafetensors.save_file_async({"a": torch.ones(4)}, path, stage="none", **given)


@pytest.mark.parametrize("given", [{"overlap": "x"}, {"at_exit": "x"}, {"memory": 5},
                                   {"max_shard_size": "x"}], ids=str)
def test_the_manager_checks_when_it_is_made(given, tmp_path, torch):
    from fastsafetensors.training import CheckpointManager

    with pytest.raises(ValueError, match=next(iter(given))):
        CheckpointManager(tmp_path / "c", **given)
    assert not (tmp_path / "c").exists()


def test_messages_have_words_of_python(path, torch, tmp_path):
    fastsafetensors.save_file({"a": torch.ones(1 << 20)}, path)
    with pytest.raises(ValueError, match="memory is 4096 bytes"):
        open_stream(path, memory=4096)
    with pytest.raises(ValueError, match='cache="keep" is not possible'):
        fastsafetensors.load_file(path, mode="load", engine="direct", cache="keep")
    with pytest.raises(ValueError, match='cache="bypass" is not possible'):
        fastsafetensors.load_file(path, mode="load", engine="pread", cache="bypass")
    with pytest.raises(ValueError, match="alignment must be") as caught:
        _core.layout(None, [], alignment=3)
    assert "alignment_bytes" not in str(caught.value)
    with pytest.raises(ValueError, match="use None for"):
        fastsafetensors.remote.configure(cache_dir="")


def test_shown_names_are_public(path, torch):
    from fastsafetensors import RankError, SafetensorError
    from fastsafetensors._saving.save_handles import ThreadSave

    assert (RankError.__module__, RankError.__qualname__) == ("fastsafetensors", "RankError")
    assert pickle.loads(pickle.dumps(RankError("x"))).args == ("x",)
    with safe_open(path, "pt") as file, pytest.raises(SafetensorError) as caught:
        file.get_tensor("b")
    assert type(caught.value).__qualname__ == "SafetensorError"
    with pytest.raises(SafetensorError) as caught:
        fastsafetensors.save_file({"a": torch.ones(4)}, path.parent / "no/such/folder")
    assert type(caught.value).__qualname__ == "SafetensorError"
    handle = fastsafetensors.save_file_async({"a": torch.ones(4)}, path)
    handle.wait()
    assert repr(handle) == f"<SaveHandle {path}: done>"
    own = ThreadSave(lambda: None, "folder")
    own.wait()
    assert repr(own) == "<SaveHandle folder: done>"
    loader = fastsafetensors.SafeTensorsFileLoader
    with pytest.raises(TypeError, match=r"^SafeTensorsFileLoader\.__init__\(\)"):
        loader(fastsafetensors.SingleGroup(), colour=3)
    with fastsafetensors.fastsafe_open([str(path)]) as file:
        assert type(file.loader).__name__ == "SafeTensorsFileLoader"


@pytest.mark.parametrize("word", ["sha265", "blake", "xxh128", "sha-256", "SHA256", "md5", "true"])
def test_misspelt_algorithms_are_no_paths(word, path, torch, monkeypatch):
    monkeypatch.chdir(path.parent)
    with pytest.raises(ValueError, match=f"unknown algorithm '{word}'; expected"):
        fastsafetensors.save_file({"a": torch.ones(4)}, path, manifest=word)
    fastsafetensors.save_file({"a": torch.ones(4)}, path, manifest=f"./{word}")
    assert (path.parent / word).exists()


@pytest.mark.parametrize("error", [RuntimeError("Operation timed out!"), RuntimeError()])
def test_a_failed_wait_is_not_repeated(torch, monkeypatch, error):
    """The steps that report a missing rank begin no further collective."""
    from fastsafetensors import RankError
    from fastsafetensors._ranks import torch_group

    class Group:
        def size(self):
            return 2

        def rank(self):
            return 0

    class Work:
        def wait(self, *timeout):
            raise error

    begun = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    group = torch_group.TorchProcessGroup(Group(), 5)
    for _ in range(2):
        with pytest.raises(RankError, match="next step: .*not all ranks arrived"):
            group._wait(lambda: begun.append(1) or Work(), "the next step")
    assert len(begun) == 1


def test_models_have_the_options_of_files(path, torch):
    """save_model() writes the bytes that save_file() does; load_model(mode="load") owns memory."""
    module, options = torch.nn.Linear(3, 5), {"alignment": 64, "engine": "buffered"}
    fastsafetensors.save_model(module, path, **options)
    other = path.with_name("other")
    fastsafetensors.save_file(dict(module.state_dict()), other, **options)
    assert path.read_bytes() == other.read_bytes()
    empty = torch.nn.Linear(3, 5, device="meta")
    fastsafetensors.load_model(empty, path, assign=True, mode="load")
    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a view would change
    assert torch.equal(empty.weight, module.weight)
    with pytest.raises(ValueError, match="unknown mode 'x'"):
        fastsafetensors.load_model(empty, path, mode="x")
    with pytest.raises(ValueError, match="unknown engine"):
        fastsafetensors.save_model(module, path, engine="x")


def test_numbers_of_numpy_are_accepted(path, torch):
    np = pytest.importorskip("numpy")
    tensors = {"a": torch.arange(8.0)}
    fastsafetensors.save_file(tensors, path, alignment=np.int32(64))
    loaded = fastsafetensors.load_file(path, threads=np.int64(2))
    assert torch.equal(loaded["a"], tensors["a"])
    assert [name for name, _ in open_stream(path, memory=np.int64(1 << 26))] == ["a"]
    fastsafetensors.save_file_async(tensors, path, memory=np.int64(64 << 20)).wait()


def test_no_device_is_the_cpu(path, torch):
    from fastsafetensors.fast_loading import load_safetensors_mmap

    assert load_safetensors_mmap(path, device=None).keys() == fastsafetensors.load_file(path).keys()


def test_handles_check_their_timeouts(path, torch):
    """exception() returns the save's error only; a handle of ranks checks wait_staged() too."""
    from fastsafetensors.distributed import save_on_ranks_async

    handles = [fastsafetensors.save_file_async({"a": torch.ones(3)}, path),
               save_on_ranks_async({"a": torch.ones(3)}, path.parent / "ranks")]
    for handle in handles:
        for call in (handle.exception, handle.wait, handle.wait_staged):
            for value, kind in (("5", TypeError), (-1, ValueError), (float("nan"), ValueError)):
                with pytest.raises(kind, match="timeout must be"):
                    call(value)
            call(10**400)  # more than a float holds
        assert handle.exception() is None


def test_arguments_of_the_old_classes(path, torch):
    """Wrong options are errors when the object is made, also without a group."""
    from fastsafetensors import ParallelSaver, SafeTensorsFileLoader

    for options, kind, words in (
        ({"fsync": "no"}, TypeError, "fsync must be True or False"),
        ({"min_free_bytes": -5}, ValueError, "min_free_bytes must be 0 to"),
        ({"min_free_bytes": "5"}, TypeError, "min_free_bytes must be a whole number"),
        ({"timeout": "abc"}, TypeError, "timeout must be a number of seconds"),
    ):
        with pytest.raises(kind, match=words):
            ParallelSaver(**options)
    for options, words in (({"nogds": "x"}, "nogds must be True or False"),
                           ({"timeout": "x"}, "timeout must be a number of seconds")):
        with pytest.raises(TypeError, match=words):
            SafeTensorsFileLoader(None, "cpu", **options)


def test_limits_of_groups_may_be_of_any_size(torch, monkeypatch):
    """A timedelta holds fewer seconds than a float."""
    from fastsafetensors._ranks import torch_group

    class Group:
        size = staticmethod(lambda: 2)
        rank = staticmethod(lambda: 1)

    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    for seconds in (1e300, 10**400):
        group = torch_group.TorchProcessGroup(Group(), seconds)
        group.limit_waits()
        assert group._limit() is None or group._limit().total_seconds() >= 1e8


def test_options_without_effect(path, torch):
    with pytest.raises(ValueError, match="^ready is 67108864 bytes, more than memory"):
        StagingPool("32MiB", ready="64MiB")
    with StagingPool("64MiB") as pool:
        with pytest.raises(ValueError, match="the pool holds at most 67108864"):
            fastsafetensors.save_file_async({"a": torch.ones(4)}, path, pool=pool, memory="1GiB")
        fastsafetensors.save_file_async({"a": torch.ones(4)}, path, pool=pool,
                                        memory="64MiB").wait()
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(4))
    for mode in ("auto", "load", "map"):
        with pytest.raises(ValueError, match="mode has no effect without assign=True"):
            fastsafetensors.load_model(model, path, mode=mode)
    fastsafetensors.load_model(model, path, backend="pread")  # of the safetensors package
    assert float(model.a.detach().sum()) == 4


def test_all_functions_take_the_same_devices(path, torch):
    from fastsafetensors.lazy import LazyModel

    for device in ("cpu", "cpu:0", "cpu:1", torch.device("cpu", 1), None):
        assert fastsafetensors.load_file(path, device)["a"].device.type == "cpu"
        with LazyModel(path, device) as model:
            assert model["a"].device.type == "cpu" and float(model["a"].sum()) == 4
        assert [tensor.device.type for _, tensor in open_stream(path, device=device)] == ["cpu"]
        with safe_open(path, "pt", device=device) as file:
            assert file.get_tensor("a").device.type == "cpu"


def test_names_of_lazy_tensors_are_text(path):
    from fastsafetensors.lazy import LazyModel

    with LazyModel(path) as model:
        for name in (3, None, ["a"]):
            with pytest.raises(TypeError, match="the name of a tensor must be a str, not"):
                model[name]
        with pytest.raises(KeyError):
            model["b"]
