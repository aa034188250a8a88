# SPDX-License-Identifier: Apache-2.0
"""An argument of the wrong type or without effect is an error with the parameter and the value."""

import enum

import pytest

import fastsafetensors
from fastsafetensors import SafetensorError, load_file, numpy, open_stream, safe_open


class Place(str, enum.Enum):
    """Devices as programs name them in their settings."""

    CPU = "cpu"
    META = "meta"


@pytest.fixture
def path(tmp_path, torch):
    fastsafetensors.save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3)},
                              tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def loads(path, torch):
    """Functions that take a device, each of the same model."""
    from fastsafetensors import fast_loading
    from fastsafetensors.lazy import LazyModel

    fast_loading.save_embeddings_safetensors({"a": torch.arange(4.0)}, path.parent / "e.st")

    def lazy(device):
        with LazyModel(path, device) as model:
            return {"a": model["a"] + 0}

    def module(device):
        room = torch.nn.Module()
        room.a = torch.nn.Parameter(torch.empty(4, device="meta"))
        fastsafetensors.load_model(room, path, False, device, assign=True)
        return {"a": room.a.detach()}

    return {
        "load_file": lambda device: load_file(path, device),
        "open_stream": lambda device: dict(open_stream(path, device)),
        "safe_open": lambda device: safe_open(path, "pt", device).get_tensors(),
        "LazyModel": lazy,
        "load_model": module,
        "load_safetensors": lambda device: fast_loading.load_safetensors(path, device=device),
        "mmap": lambda device: fast_loading.load_safetensors_mmap(path, device=device),
        "sharded": lambda device: fast_loading.load_safetensors_sharded([path], device),
        "embeddings": lambda device: fast_loading.load_embeddings_safetensors(
            path.parent / "e.st", device),
    }


def test_a_state_dict_for_another_argument_is_named_by_its_type(tmp_path, torch):
    from fastsafetensors.torch import save_file, save_file_async
    from fastsafetensors.training import CheckpointManager, trainer_callback

    pytest.importorskip("transformers")
    state = {f"layer.{i}": torch.zeros(100) for i in range(100)}
    for call in (lambda: save_file_async("x", state), lambda: CheckpointManager(state),
                 lambda: save_file(state, tmp_path / "x", durable=state),
                 lambda: save_file_async(state, tmp_path / "x", pool=state),
                 lambda: trainer_callback(state),
                 lambda: CheckpointManager(tmp_path, group=state)):
        with pytest.raises(TypeError, match="not an object of type dict") as caught:
            call()
        assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="unknown stage .xxxxxxxxx") as caught:
        save_file_async(state, tmp_path / "x", stage="x" * 100_000)
    assert len(str(caught.value)) < 400


def test_devices_in_all_forms(path, torch):
    for device in ("cpu", "cpu:0", Place.CPU, torch.device("cpu"), torch.device("cpu:0"), None):
        for name, load in loads(path, torch).items():
            tensor = load(device)["a"]
            assert tensor.device.type == "cpu" and torch.equal(tensor, torch.arange(4.0)), name


@pytest.mark.parametrize("device", [True, 1.5, b"cpu", -1, "cpu:", "nowhere", ["cpu"]], ids=repr)
def test_devices_that_are_none(device, path, torch):
    for name, load in loads(path, torch).items():
        with pytest.raises(SafetensorError, match=r"^device .* is invalid.*cuda:1"):
            load(device)
            pytest.fail(name)


def test_numbers_of_numpy_are_devices(path, torch):
    np = pytest.importorskip("numpy")
    if torch.cuda.is_available():
        assert load_file(path, np.int64(0))["a"].device == torch.device("cuda:0")
        return
    for name, load in loads(path, torch).items():
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            load(np.int64(0))
        assert "invalid" not in str(caught.value), name


def test_the_meta_device(path, torch):
    for device in ("meta", Place.META, torch.device("meta")):
        for name, load in loads(path, torch).items():
            if name in ("open_stream", "safe_open", "LazyModel", "load_model"):
                with pytest.raises(SafetensorError, match=r"device meta is invalid.*load_file\(\)"):
                    load(device)
            else:
                assert load(device)["a"].is_meta, name


@pytest.mark.parametrize("given", [
    {"gds": "off"}, {"pin_memory": True}, {"allocator": "own"}, {"threads": 2},
    {"engine": "pread"}, {"cache": "keep"}, {"mode": "load"}, {"backend": "pread"},
    {"progress": print}, {"progress": True},
], ids=str)
def test_options_of_reads_have_no_effect_on_meta(given, path, torch):
    with pytest.raises(ValueError, match=f'^{next(iter(given))} has no effect with device="meta"'):
        load_file(path, "meta", **given)


def test_mapped_tensors_are_not_pinned(path, torch):
    with pytest.raises(ValueError, match='^mode="map" .*pin_memory'):
        load_file(path, mode="map", pin_memory=True)


def test_no_mode_is_auto(path, torch):
    from fastsafetensors.lazy import LazyModel

    with LazyModel(path, mode=None) as model:
        assert torch.equal(model["a"] + 0, torch.arange(4.0))


# ---- progress ----


@pytest.mark.parametrize("progress", [True, 1, "x"], ids=repr)
def test_progress_of_saves_is_a_callable(progress, path, torch):
    from fastsafetensors import fast_loading

    tensors, before = {"a": torch.zeros(4)}, path.read_bytes()
    for call in (
        lambda: fastsafetensors.save_file(tensors, path, progress=progress),
        lambda: fastsafetensors.save_model(torch.nn.Linear(1, 1), path, progress=progress),
        lambda: numpy.save_file({"a": tensors["a"].numpy()}, path, progress=progress),
        lambda: fast_loading.save_safetensors_sharded(tensors, path.parent, progress=progress),
    ):
        with pytest.raises(TypeError, match="^progress must be a callable or None, not"):
            call()
    assert path.read_bytes() == before


@pytest.mark.parametrize("progress", [1, "x"], ids=repr)
def test_progress_of_loads_is_checked_first(progress, path, torch):
    for call in (
        lambda: load_file(path, progress=progress), lambda: numpy.load_file(path, names=[],
                                                                         progress=progress),
        lambda: load_file(path, names=[], progress=progress),
        lambda: load_file(path, "meta", progress=progress),
    ):
        with pytest.raises(TypeError, match="^progress must be a callable, True or False, not"):
            call()


# ---- switches ----


def switches(path, torch, tmp_path):
    """{parameter: calls with a value of it}."""
    from fastsafetensors import deltas, fast_loading
    from fastsafetensors.checkpoint import FastSafetensorsWriter
    from fastsafetensors.distributed import save_on_ranks
    from fastsafetensors.lazy import LazyModel
    from fastsafetensors.training import Checkpoint, CheckpointManager

    tensors, room, new = {"a": torch.ones(4)}, torch.nn.Linear(1, 1), tmp_path / "new"
    return {
        "durable": [
            lambda v: fastsafetensors.save_file(tensors, new, durable=v),
            lambda v: fastsafetensors.save_file_async(tensors, new, durable=v),
            lambda v: numpy.save_file({"a": tensors["a"].numpy()}, new, durable=v),
            lambda v: fastsafetensors.save_model(room, new, durable=v),
            lambda v: fast_loading.save_safetensors_sharded(tensors, new, durable=v),
            lambda v: fast_loading.save_safetensors_sharded_async(tensors, new, durable=v),
            lambda v: fastsafetensors.edit_header(path, {"a": "b"}, durable=v),
            lambda v: FastSafetensorsWriter(new, durable=v),
            lambda v: save_on_ranks(tensors, new, durable=v),
            lambda v: CheckpointManager(new, durable=v),
            lambda v: deltas.apply(new, new, durable=v),
            lambda v: deltas.recover(new, durable=v),
        ],
        "pin_memory": [lambda v: load_file(path, pin_memory=v)],
        "strict": [lambda v: fastsafetensors.load_model(room, path, v)],
        "assign": [lambda v: fastsafetensors.load_model(room, path, assign=v)],
        "ahead": [lambda v: LazyModel(path, ahead=v)],
        "force_contiguous": [lambda v: fastsafetensors.save_model(room, new, None, v)],
        "write": [lambda v: fastsafetensors.hash_file(path, write=v)],
        "digests": [lambda v: fastsafetensors.verify_file(path, digests=v)],
        "tensors": [lambda v: fastsafetensors.write_manifest(path, tensors=v)],
        "clear": [lambda v: fastsafetensors.edit_header(path, {"a": "b"}, clear=v)],
        "check_first": [lambda v: deltas.apply(new, new, check_first=v)],
        "new_files": [lambda v: deltas.apply(new, new, new_files=v)],
        "verify": [lambda v: Checkpoint(path, 1, None).load(verify=v),
                   lambda v: CheckpointManager(tmp_path).latest(verify=v),
                   lambda v: CheckpointManager(tmp_path).resume({}, verify=v)],
        "force": [lambda v: CheckpointManager(tmp_path).save(1, {}, force=v)],
    }


@pytest.mark.parametrize("value", ["no", 2, None, 0.0, []], ids=repr)
def test_switches_are_true_or_false(value, path, torch, tmp_path):
    before = path.read_bytes()
    for name, calls in switches(path, torch, tmp_path).items():
        for number, call in enumerate(calls):
            with pytest.raises(TypeError, match=f"^{name} must be True or False, not"):
                call(value)
                pytest.fail(f"{name} {number}")
    assert not (tmp_path / "new").exists() and path.read_bytes() == before


def test_switches_of_numpy_are_accepted(path, torch):
    np = pytest.importorskip("numpy")
    fastsafetensors.save_file({"a": torch.ones(4)}, path, durable=np.bool_(True))
    fastsafetensors.save_file({"a": torch.ones(4)}, path, durable=1)
    assert load_file(path, verify=np.bool_(False)).keys() == {"a"}


@pytest.mark.parametrize("verify", [1, 0, 1.5, [], b"", ""], ids=repr)
def test_verify_is_named(verify, path, torch):
    from fastsafetensors.lazy import LazyModel

    for call in (lambda: load_file(path, verify=verify), lambda: numpy.load_file(
            path, verify=verify), lambda: safe_open(path, "pt", verify=verify),
            lambda: LazyModel(path, verify=verify), lambda: open_stream(path, verify=verify),
            lambda: load_file(path, "meta", verify=verify),
            lambda: fastsafetensors.verifying(verify).__enter__()):
        with pytest.raises((TypeError, ValueError), match=r"^verify must be True, False, a path or "
                                                          r"SignedBy\(\), not"):
            call()


@pytest.mark.parametrize("size, kind", [("x", ValueError), (None, TypeError), (1.5, TypeError),
                                        (True, TypeError), (-1, ValueError), (2**63, ValueError),
                                        ("8192 PB", ValueError)])
def test_kept_memory_is_a_size(size, kind):
    with pytest.raises(kind, match="^size must be "):
        fastsafetensors.keep_memory(size)


def test_kept_memory_is_a_number_of_numpy_too():
    np = pytest.importorskip("numpy")
    fastsafetensors.keep_memory(np.int64(0))
    fastsafetensors.keep_memory(size="0 GiB")


def test_alignment_is_a_size(tmp_path, torch):
    from fastsafetensors import checkpoint

    fastsafetensors.save_file({"a": torch.ones(3), "b": torch.ones(4096)}, tmp_path / "m",
                              alignment="4KiB")
    with fastsafetensors.safe_open(tmp_path / "m", "pt") as model:
        assert {name: model.get_tensor(name).data_ptr() % 4096 for name in "ab"} == {"a": 0, "b": 0}
    for wrong in ("3KiB", "2MiB", -4096):
        for call in (lambda: fastsafetensors.save_file({"a": torch.ones(3)}, tmp_path / "n",
                                                       alignment=wrong),
                     lambda: checkpoint.consolidate(tmp_path, tmp_path / "n", alignment=wrong)):
            with pytest.raises(ValueError, match="^alignment must be "):
                call()


def test_no_number_of_threads_is_one_per_cpu(path, torch):
    from fastsafetensors.fast_loading import load_safetensors

    assert load_safetensors(path, num_threads=0).keys() == {"a", "b"}
    with pytest.raises(ValueError, match="^num_threads must be 0 to"):
        load_safetensors(path, num_threads=-1)


# ---- names, callables, modules ----


def with_names(path, torch):
    """{parameter: functions that take names}."""
    from fastsafetensors import fast_loading
    from fastsafetensors.lazy import LazyModel

    return {
        "names": [lambda v: load_file(path, names=v), lambda v: load_file(path, "meta", names=v),
                  lambda v: numpy.load_file(path, names=v), lambda v: open_stream(path, names=v),
                  lambda v: LazyModel(path, names=v)],
        "changed": [lambda v: fastsafetensors.load_model(torch.nn.Module(), path, False,
                                                         changed=v)],
        "keys": [lambda v: fast_loading.load_safetensors_mmap(path, v)],
    }


@pytest.mark.parametrize("names", ["a", b"a", [1], [b"a"], ["a", None], 3, 1.5], ids=repr)
def test_names_are_a_list_of_names(names, path, torch):
    for name, calls in with_names(path, torch).items():
        for number, call in enumerate(calls):
            with pytest.raises(TypeError, match=f"^{name} must be a list of names, not"):
                call(names)
                pytest.fail(f"{name} {number}")


def test_names_in_any_collection(path, torch):
    for names in ({"a"}, ("a",), iter(["a"]), {"a": 1}.keys()):
        for calls in with_names(path, torch).values():
            calls[0](names if not hasattr(names, "__next__") else iter(["a"]))


def test_functions_of_names_are_callable(path, torch):
    from fastsafetensors.lazy import LazyModel

    for name, call in (
        ("filter", lambda: load_file(path, filter=3)),
        ("filter", lambda: load_file(path, "meta", filter=3)),
        ("filter", lambda: numpy.load_file(path, filter=3)),
        ("filter", lambda: open_stream(path, filter=3)),
        ("filter", lambda: LazyModel(path, filter="a")),
        ("expects", lambda: LazyModel(path, expects=3)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a callable, not"):
            call()
    with pytest.raises(TypeError, match="^habits must be a dict, not 3"):
        LazyModel(path, habits=3)


@pytest.mark.parametrize("state", [None, [1], 3, "x", {"a": 3}, {1: None}], ids=repr)
def test_state_to_save(state, tmp_path, torch):
    from fastsafetensors import fast_loading
    from fastsafetensors.distributed import save_on_ranks
    from fastsafetensors.torch import save, save_model, save_model_async

    for call in (
        lambda: fast_loading.save_safetensors_sharded(state, tmp_path / "s"),
        lambda: fast_loading.save_safetensors_sharded_async(state, tmp_path / "s"),
        lambda: fast_loading.save_safetensors_sharded_async(state, tmp_path / "s", stage="lazy"),
        lambda: fastsafetensors.save_file(state, tmp_path / "s"),
        lambda: fastsafetensors.save_file_async(state, tmp_path / "s"),
        lambda: save_on_ranks(state, tmp_path / "s"), lambda: save(state),
    ):
        with pytest.raises((TypeError, ValueError), match="torch.Tensor|tensor names must be str"):
            call()
    for call in (lambda: save_model(state, tmp_path / "s"),
                 lambda: save_model_async(state, tmp_path / "s"),
                 lambda: fastsafetensors.load_model(state, tmp_path / "s")):
        with pytest.raises(TypeError, match="^model must be a torch.nn.Module, not"):
            call()
    assert not (tmp_path / "s").exists()


def test_state_of_a_module_that_is_no_tensor(tmp_path, torch):
    class Counting(torch.nn.Linear):
        def get_extra_state(self):
            return 3

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match="Key `_extra_state` is invalid, expected torch.Tensor"):
        fastsafetensors.save_model(Counting(1, 1), tmp_path / "s")


@pytest.mark.parametrize("value", [[1], 3, "x"], ids=repr)
def test_mappings_are_mappings(value, path, torch):
    tied = torch.nn.Linear(2, 2, bias=False)
    tied.other = tied.weight
    for name, call in (
        ("metadata must be a dict of str to str", lambda: fastsafetensors.save_model(
            tied, path, value)),
        ("metadata must map str to str or None", lambda: fastsafetensors.edit_header(path, value)),
        ("renames must map str to str", lambda: fastsafetensors.edit_header(path, renames=value)),
    ):
        with pytest.raises(TypeError, match=f"^{name}, not"):
            call()


@pytest.mark.parametrize("value", [None, 3, [1], b"a{suffix}.safetensors", "x"], ids=repr)
def test_patterns_and_variants(value, path, torch):
    from fastsafetensors import fast_loading

    kind = ValueError if value == "x" else TypeError
    for save in (fast_loading.save_safetensors_sharded,
                 fast_loading.save_safetensors_sharded_async):
        with pytest.raises(kind, match=r"^filename_pattern must be .*{suffix}\.safetensors"):
            save({"a": torch.ones(1)}, path.parent / "s", filename_pattern=value)
    if value is not None and value != "x":
        with pytest.raises(TypeError, match="^variant must be a str or None, not"):
            fast_loading.load_safetensors_sharded(path.parent, variant=value)


@pytest.mark.parametrize("value", [None, 3, ["x"], 1.5], ids=repr)
def test_paths_are_named(value, path, torch):
    from fastsafetensors import deltas, fast_loading
    from fastsafetensors.checkpoint import FastSafetensorsReader, FastSafetensorsWriter
    from fastsafetensors.distributed import save_on_ranks
    from fastsafetensors.training import CheckpointManager

    tensors, room = {"a": torch.ones(4)}, torch.nn.Linear(1, 1)
    calls = {
        "filename": [
            lambda: fastsafetensors.save_file(tensors, value),
            lambda: fastsafetensors.save_file_async(tensors, value),
            lambda: fastsafetensors.save_model(room, value),
            lambda: fastsafetensors.edit_header(value, {"a": "b"}),
            lambda: fastsafetensors.hash_file(value), lambda: fastsafetensors.verify_file(value),
            lambda: fastsafetensors.write_manifest(value),
            lambda: fastsafetensors.write_sums(value),
            lambda: fastsafetensors.check_manifest(value),
            lambda: numpy.save_file({"a": tensors["a"].numpy()}, value),
        ],
        "output_dir": [lambda: fast_loading.save_safetensors_sharded(tensors, value),
                       lambda: fast_loading.save_safetensors_sharded_async(tensors, value)],
        "path": [lambda: fast_loading.save_safetensors(tensors, value),
                 lambda: fast_loading.save_embeddings_safetensors(tensors, value),
                 lambda: fast_loading.load_embeddings_safetensors(value),
                 lambda: FastSafetensorsWriter(value)],
        "folder": [lambda: CheckpointManager(value), lambda: save_on_ranks(tensors, value),
                   lambda: fastsafetensors.sign_folder(value, "key.pem")],
        "checkpoint": [lambda: deltas.apply(value, path), lambda: deltas.recover(value),
                       lambda: deltas.version_of(value)],
    }
    if not isinstance(value, list):
        calls["filename"] += [lambda: load_file(value), lambda: numpy.load_file(value),
                              lambda: open_stream(value), lambda: safe_open(value, "pt"),
                              lambda: fastsafetensors.read_header(value)]
        calls["path"].append(lambda: FastSafetensorsReader(value))
    for name, those in calls.items():
        for number, call in enumerate(those):
            with pytest.raises(TypeError, match=f"^(argument )?'?{name}'?(:| must be)"):
                call()
                pytest.fail(f"{name} {number}")


# ---- tensors without plain bytes ----


def test_tensors_without_one_shape_or_values(tmp_path, torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fastsafetensors import fast_loading
    from fastsafetensors.torch import save

    with FakeTensorMode():
        fake = torch.ones(3)
    rows = [torch.ones(2), torch.ones(3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    nested = torch.nested.nested_tensor(rows)
    path = tmp_path / "m"
    for tensor, kind, text in (
        (fake, RuntimeError, "`a` is a FakeTensor.*has a shape and no values"),
        (jagged, ValueError, r"`a` is a nested tensor.*`\.values\(\)`"),
        (nested, RuntimeError, r"`a` is a nested tensor.*`\.to_padded_tensor"),
        (torch.ones(2, 2).to_sparse(), ValueError, "'a'.*to_dense"),
        (torch.ones(2, device="meta"), NotImplementedError, "`a` is on the meta device"),
    ):
        room = torch.nn.Module()
        room.register_buffer("a", tensor)
        for call in (lambda: fastsafetensors.save_file({"a": tensor}, path),
                     lambda: fastsafetensors.save_file_async({"a": tensor}, path),
                     lambda: fastsafetensors.save_file_async({"a": tensor}, path, stage="lazy"),
                     lambda: save({"a": tensor}), lambda: fastsafetensors.save_model(room, path),
                     lambda: fast_loading.save_safetensors_sharded({"a": tensor}, path),
                     lambda: fast_loading.save_embeddings_safetensors({"a": tensor}, path)):
            with pytest.raises(kind, match=text):
                call()
    assert not path.exists()


def test_refused_writes_of_digests_have_an_errno(path):
    """hash_file(), write_manifest() and write_sums() run the command, which reports the errno."""
    path.with_name("m.safetensors.digest").mkdir()
    missing = path.parent / "no/manifest"
    for call, number in ((lambda: fastsafetensors.hash_file(path, write=True), 21),
                         (lambda: fastsafetensors.write_manifest(path, missing), 2),
                         (lambda: fastsafetensors.write_sums(path, missing), 2)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == number and caught.value.filename


def test_progress_is_documented(torch):
    import pydoc

    import fastsafetensors.types

    assert "bytes done" in fastsafetensors.types.Progress.__doc__
    # Classes of torch tensors inherit torch's own.
    for name in ("types", "numpy", "fast_loading", "training", "deltas", "distributed",
                 "checkpoint", "async_save"):
        module = __import__(f"fastsafetensors.{name}", fromlist=["x"])
        assert "ForwardRef" not in pydoc.render_doc(module), name
