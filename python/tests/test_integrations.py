# SPDX-License-Identifier: Apache-2.0
"""from_pretrained of libraries with this package: same results, and uninstallation."""

import importlib
import random
import sys
import threading
import types
import warnings

import pytest
from conftest import same_bits

import fastsafetensors
from fastsafetensors import integrations, live_allocation_count, safe_open
from fastsafetensors.integrations import accelerate_from_pretrained


@pytest.fixture(autouse=True)
def fresh():
    """Each test begins with the integration disabled and without an issued warning."""
    integrations._state.warned = False
    yield
    assert integrations._state.depth == 0


def bound():
    """Return every module attribute that refers to a function of the reference."""
    import safetensors
    import safetensors.torch

    names = {id(safetensors.safe_open): "open", id(safetensors.torch.load_file): "load"}
    return {(m, k): id(v) for m, module in list(sys.modules.items())
            if m.partition(".")[0] in (*integrations.LIBRARIES, "safetensors")
            for k, v in list(vars(module).items()) if id(v) in names}


@pytest.fixture(scope="module")
def llama(tmp_path_factory, torch):
    """Folder of a small Llama of several shards."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                                      num_attention_heads=4, vocab_size=500)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
        folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", [None, "load", "map"])
def test_transformers(llama, torch, dtype, mode):
    import transformers

    def load():
        return transformers.LlamaForCausalLM.from_pretrained(llama, dtype=getattr(torch, dtype))

    before = bound()
    expected = load().state_dict()
    switch = accelerate_from_pretrained(threads=2, mode=mode)
    reads = switch.reads
    with switch:
        model = load()
        assert bound() != before
    assert switch.reads >= reads + len(list(llama.glob("*.safetensors")))
    assert bound() == before
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(torch, state[name], expected[name]) for name in expected)
    with torch.no_grad():  # the model owns the memory
        next(model.parameters()).zero_()


@pytest.mark.parametrize("options", [{}, {"dtype": "auto"}, {"dtype": "float64"},
                                  {"dtype": "float16", "device_map": "cpu"},
                                  {"dtype": "float32", "device_map": "auto"}])
def test_parameters_are_plain_with_every_option(llama, torch, options):
    """Lazily loaded tensors become plain parameters, with the values that safetensors loads."""
    import transformers

    named = options.get("dtype", "auto")
    options = {**options, "dtype": getattr(torch, named, named)} if options else options
    expected = transformers.LlamaForCausalLM.from_pretrained(llama, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with accelerate_from_pretrained():
            model = transformers.LlamaForCausalLM.from_pretrained(llama, **options)
    for name, own in expected.named_parameters():
        found = model.get_parameter(name)
        assert type(found) is torch.nn.Parameter and type(found.data) is torch.Tensor
        assert same_bits(torch, found.data, own.data)


def test_device_map(llama, torch):
    import transformers

    pytest.importorskip("accelerate")
    with accelerate_from_pretrained():
        model = transformers.LlamaForCausalLM.from_pretrained(llama, device_map="cpu")
    expected = transformers.LlamaForCausalLM.from_pretrained(llama, device_map="cpu")
    assert getattr(model, "hf_device_map", None) == getattr(expected, "hf_device_map", None)
    for name, tensor in expected.state_dict().items():
        assert same_bits(torch, model.state_dict()[name], tensor)


def test_diffusers(tmp_path, torch):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(sample_size=8, in_channels=1, out_channels=1,
                                  block_out_channels=(32, 32), layers_per_block=1,
                                  down_block_types=("DownBlock2D", "DownBlock2D"),
                                  up_block_types=("UpBlock2D", "UpBlock2D"))
    model.save_pretrained(tmp_path)
    switch = accelerate_from_pretrained()
    reads = switch.reads
    with switch:
        loaded = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert switch.reads > reads
    expected = model.state_dict()
    assert all(same_bits(torch, t, expected[n]) for n, t in loaded.state_dict().items())


def test_peft(llama, tmp_path, torch):
    import transformers

    peft = pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"],
                                                      init_lora_weights=False))
    model.save_pretrained(tmp_path)
    expected = {n: t.clone() for n, t in model.state_dict().items() if "lora" in n}
    switch = accelerate_from_pretrained()

    @switch
    def load():
        base = transformers.LlamaForCausalLM.from_pretrained(llama)
        reads = switch.reads
        model = peft.PeftModel.from_pretrained(base, tmp_path)
        assert switch.reads > reads
        return model

    state = load().state_dict()
    assert expected and all(same_bits(torch, state[n], t) for n, t in expected.items())


def test_accelerate(tmp_path, torch):
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    expected = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors", {"format": "pt"})
    switch = accelerate_from_pretrained().enable().enable()
    reads = switch.reads
    try:
        accelerate.load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
        other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path), device_map={"": "cpu"})
    finally:
        switch.disable()
        switch.disable()
    assert switch.reads > reads + 1
    for loaded in (model, other):
        assert all(same_bits(torch, t, expected[n]) for n, t in loaded.state_dict().items())


def test_timm(tmp_path, torch):
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18", pretrained=False)
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "m.safetensors")
    switch = accelerate_from_pretrained()
    reads = switch.reads
    with switch:
        loaded = timm.create_model("resnet18", checkpoint_path=str(tmp_path / "m.safetensors"))
    assert switch.reads > reads
    expected = model.state_dict()
    assert all(same_bits(torch, t, expected[n]) for n, t in loaded.state_dict().items())


def test_failures_fall_back_to_safetensors(model, torch, monkeypatch):
    import safetensors
    import safetensors.torch

    path, tensors = model
    state = integrations._state
    reads = state.reads

    def broken(*args, **kwargs):
        raise OSError("ours is broken")

    with accelerate_from_pretrained():
        monkeypatch.setattr(fastsafetensors.torch, "load_file", broken)
        with pytest.warns(RuntimeWarning, match="ours is broken") as caught:
            loaded = safetensors.torch.load_file(path)
            loaded = safetensors.torch.load_file(path)
        assert len(caught) == 1
        assert state.reads == reads
        with safetensors.safe_open(path, "pt") as f:
            monkeypatch.setattr(fastsafetensors.safe_open, "get_tensor", broken)
            monkeypatch.setattr(fastsafetensors.safe_open, "get_slice", broken)
            assert same_bits(torch, f.get_tensor("large"), tensors["large"])
            assert same_bits(torch, f.get_slice("large")[2:4], tensors["large"][2:4])
            assert f.metadata() == {"format": "pt", "note": 'a"b\\c'}
        monkeypatch.setattr(integrations, "safe_open", broken)
        with safetensors.safe_open(path, "pt") as f:
            assert same_bits(torch, f.get_tensor("large"), tensors["large"])
    assert all(same_bits(torch, loaded[name], tensors[name]) for name in tensors)


def test_shared_errors_are_the_originals(tmp_path, torch):
    import safetensors.torch

    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"junk")
    with warnings.catch_warnings(), accelerate_from_pretrained():
        warnings.simplefilter("error")
        with pytest.raises(FileNotFoundError):
            safetensors.torch.load_file(tmp_path / "none")
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(bad)


def test_modules_imported_meanwhile(model, tmp_path, monkeypatch):
    import safetensors

    original = safetensors.safe_open
    (tmp_path / "timm_part.py").write_text("from safetensors import safe_open\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(integrations, "LIBRARIES", ("timm_part",))
    with accelerate_from_pretrained(), accelerate_from_pretrained():
        late = importlib.import_module("timm_part")
        assert late.safe_open is not original
    assert late.safe_open is original and safetensors.safe_open is original
    with accelerate_from_pretrained():
        assert late.safe_open is not original
    assert late.safe_open is original
    del sys.modules["timm_part"]


def test_a_wrapper_that_was_kept_is_the_original_when_off(model):
    import safetensors.torch

    with accelerate_from_pretrained() as switch:
        kept_open, kept_load = safetensors.safe_open, safetensors.torch.load_file
    reads = switch.reads
    with kept_open(model[0], framework="pt") as f:
        assert "large" in f.keys()  # noqa: SIM118
    kept_load(model[0])
    assert switch.reads == reads
    with pytest.raises(ZeroDivisionError), switch:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="mode"):
        accelerate_from_pretrained(mode="x")
    with pytest.raises(ValueError, match="threads"):
        accelerate_from_pretrained(threads=-1)


# ---- reading ahead ----


@pytest.mark.parametrize("mode", ["load", "map", "auto"])
@pytest.mark.parametrize("eager", [False, True])
def test_any_order_gives_the_same(model, torch, mode, eager):
    path, tensors = model
    before = live_allocation_count()
    orders = [list(tensors), sorted(tensors), list(tensors)[::-1], list(tensors) * 2]
    orders.append(random.Random(1).sample(list(tensors), len(tensors)))
    for names in orders:
        with safe_open(path, "pt", mode=mode) as f:
            if eager:
                f.read_ahead(threads=2)
            for name in names:
                assert same_bits(torch, f.get_tensor(name), tensors[name]), name
                assert same_bits(torch, f.get_slice(name)[...], tensors[name]), name
    assert live_allocation_count() == before


def test_reading_ahead_by_many_threads(model, torch):
    path, tensors = model
    f = safe_open(path, "pt", mode="load")
    f.read_ahead()
    names, faults = iter(list(tensors) * 20), []
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                name = next(names, None)
            if name is None:
                return
            if not same_bits(torch, f.get_tensor(name), tensors[name]):
                faults.append(name)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    f.close()
    with pytest.raises(fastsafetensors.SafetensorError, match="closed"):
        f.get_tensor("large")


class CountingModel:
    """Stands in for a model of 100 tensors of 1 MiB; notes what is loaded."""

    def __init__(self, cached=range(0)):
        self.loads = []
        self.cached = cached  # tensors that the page cache has

    def names(self):
        return [str(i) for i in range(100)]

    def nbytes(self, index):
        return 1 << 20

    def cached_view(self, index, begin, end):
        assert (begin, end) == (0, 1 << 20)
        return object() if index in self.cached else None

    def load(self, names, mode, threads):
        self.loads.append((int(names[0]), len(names)))
        return types.SimpleNamespace(close=lambda: None)


def test_each_byte_is_read_once():
    from fastsafetensors._loading.readahead import ReadAhead

    model = CountingModel()
    ahead = ReadAhead(model, {"mode": "auto"}, eager=True)
    assert all(ahead.take(i) is not None for i in range(100))
    assert model.loads == [(0, 64), (64, 36)]


@pytest.mark.parametrize("cached, options, loads", [
    (range(100), {"mode": "auto"}, [(0, 100)]),
    (range(100), {"mode": "map"}, [(0, 100)]),
    (range(99), {"mode": "auto"}, [(0, 64), (64, 36)]),
    (range(1, 100), {"mode": "auto"}, [(0, 64), (64, 36)]),
])
@pytest.mark.parametrize("begins", [False, True])
def test_views_of_cached_files_are_one_load(cached, options, loads, begins):
    from fastsafetensors._loading.readahead import ReadAhead

    model = CountingModel(cached)
    ahead = ReadAhead(model, options, eager=True)
    if begins:
        ahead.begin()
    # In the order of names, as programs request them, which is not the file's order.
    order = range(100) if len(loads) > 1 else sorted(range(100), key=str, reverse=True)
    assert all(ahead.take(i) is not None for i in order)
    expected = loads if not begins or len(loads) == 1 else [(0, 100)]
    assert sum(count for _, count in model.loads) == 100 and model.loads == expected


def test_collected_slices_are_read_ahead(tmp_path, torch):
    """Readahead begins with the eighth requested slice, one file at a time."""
    safetensors = pytest.importorskip("safetensors")
    from fastsafetensors.torch import save_file

    tensors = {f"t{i:02}": torch.full((64, 1024), i, dtype=torch.int16) for i in range(20)}
    for name in ("a.st", "b.st"):
        save_file(tensors, tmp_path / name)
    with integrations.accelerate_from_pretrained():
        files = [safetensors.safe_open(tmp_path / name, "pt") for name in ("a.st", "b.st")]
        slices = [[], []]
        for file, kept in zip(files, slices):
            for i, name in enumerate(tensors):
                windows = files[0]._replacement._ahead._windows
                assert bool(windows) == (file is files[1] or i >= 8), i
                kept.append(file.get_slice(name))
        assert len(windows) == 20 and not files[1]._replacement._ahead._windows
        for kept in slices:
            for part, tensor in zip(kept, tensors.values()):
                assert same_bits(torch, part[...], tensor)
        # All tensors of the first file were read by the window that was started.
        assert files[0]._replacement._ahead._alone_bytes == 0
        assert files[0]._replacement._ahead._opened_bytes == 20 * 128 * 1024
        for file in files:
            file.__exit__(None, None, None)
        # The next file is read ahead.
        with safetensors.safe_open(tmp_path / "b.st", "pt") as file:
            for name in list(tensors)[:8]:
                file.get_slice(name)
            assert file._replacement._ahead._windows


def test_patched_class_is_importable(tmp_path, torch):
    """isinstance, issubclass and derived classes, as before it was replaced."""
    safetensors = pytest.importorskip("safetensors")
    from fastsafetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "m.st")
    original = safetensors.safe_open
    theirs = original(tmp_path / "m.st", "pt")
    with integrations.accelerate_from_pretrained():
        with safetensors.safe_open(tmp_path / "m.st", "pt") as f:
            assert isinstance(f, safetensors.safe_open) and type(f) is not original
            assert isinstance(theirs, safetensors.safe_open)
        assert not isinstance(3, safetensors.safe_open)
        assert issubclass(original, safetensors.safe_open)
        assert safetensors.safe_open.__name__ == "safe_open"
        try:
            derived = type("Derived", (original,), {})
        except TypeError:  # of some versions the class can't be derived from
            with pytest.raises(TypeError):
                class Derived(safetensors.safe_open):
                    pass
        else:
            class Derived(safetensors.safe_open):
                pass
            assert Derived.__mro__[1:] == derived.__mro__[1:]
    assert safetensors.safe_open is original


@pytest.mark.parametrize("mode", ["auto", "load", "map"])
def test_closed_file_is_an_error(model, mode):
    path, tensors = model
    name = next(iter(tensors))
    with accelerate_from_pretrained(mode=mode):
        with sys.modules["safetensors"].safe_open(path, "pt") as f:
            part = f.get_slice(name)
        for use in (lambda: f.get_tensor(name), lambda: f[name], lambda: f.get_slice(name),
                    lambda: part[:], lambda: part[...], f.keys):
            with pytest.raises(fastsafetensors.SafetensorError, match="File is closed"):
                use()
