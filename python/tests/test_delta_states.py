# SPDX-License-Identifier: Apache-2.0
"""Weight deltas of states in memory: which tensors they are made of, and written into."""

import shutil

import numpy
import pytest

from fastsafetensors import SafetensorError, deltas
from fastsafetensors.numpy import load_file as load_arrays

VERSIONS = {"version": "1", "base_version": "0"}


@pytest.fixture
def base(torch):
    generator = torch.Generator().manual_seed(1)
    return {"c": torch.randn(8, 6, dtype=torch.complex64, generator=generator),
            "w": torch.randn(8, generator=generator)}


@pytest.fixture
def old(tmp_path, base):
    from fastsafetensors.torch import save_file

    (tmp_path / "old").mkdir()
    save_file(base, tmp_path / "old/model.safetensors")
    return tmp_path / "old"


@pytest.fixture
def delta(tmp_path, base, old):
    """A delta to twice the values, made of plain tensors."""
    deltas.make(old, {name: 2 * tensor for name, tensor in base.items()}, tmp_path / "twice",
                **VERSIONS)
    return deltas.Delta(tmp_path / "twice")


def forms(torch, tensors):
    """The same values in other memory: {name of the form: tensors}."""
    plain = tensors["c"].clone(), tensors["w"].clone()
    padded = torch.zeros(8, 2)
    padded[:, 0] = plain[1]
    return {
        "conjugate": {"c": plain[0].conj().resolve_conj().conj(), "w": plain[1]},
        "transposed conjugate": {"c": plain[0].mH.resolve_conj().contiguous().mH, "w": plain[1]},
        "negative": {"c": plain[0], "w": torch._neg_view(-plain[1])},
        "strided": {"c": plain[0], "w": padded[:, 0]},
        "parameter": {"c": plain[0], "w": torch.nn.Parameter(plain[1])},
    }


FORMS = ("conjugate", "transposed conjugate", "negative", "strided", "parameter")


@pytest.mark.parametrize("form", FORMS)
def test_a_delta_is_made_of_values(form, tmp_path, torch, base, old):
    """Of a conjugate or negated view too, whose memory has other bytes."""
    wanted = {name: 2 * tensor for name, tensor in base.items()}
    deltas.make(old, forms(torch, wanted)[form], tmp_path / "delta", **VERSIONS)
    shutil.copytree(old, tmp_path / "copy")
    deltas.apply(tmp_path / "copy", tmp_path / "delta", version="0")
    made = load_arrays(tmp_path / "copy/model.safetensors")
    assert all(numpy.array_equal(made[name], wanted[name].numpy()) for name in wanted)


def test_arrays_of_another_byte_order_and_layout(tmp_path, torch, base, old):
    arrays = {"c": numpy.asfortranarray(2 * base["c"].numpy()).astype(">c8"),
              "w": (2 * base["w"].numpy()).astype(">f4")}
    deltas.make(old, arrays, tmp_path / "delta", **VERSIONS)
    shutil.copytree(old, tmp_path / "copy")
    deltas.apply(tmp_path / "copy", tmp_path / "delta", version="0")
    made = load_arrays(tmp_path / "copy/model.safetensors")
    assert all(numpy.array_equal(made[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("form", FORMS)
def test_new_values_are_written_into_the_tensors(form, torch, base, delta):
    live = forms(torch, base)[form]
    delta.prepare(live, version="0").commit()
    assert all(torch.equal(live[name].detach(), 2 * base[name]) for name in base)


def test_tensors_that_cannot_be_written(torch, base, delta):
    good = {name: tensor.numpy().copy() for name, tensor in base.items()}
    for wrong, words in (
            (base["w"].numpy().astype(">f4"), "w: .*byte order, not >f4"),
            (torch.zeros(1).expand(8), "w: several elements of the tensor have the same memory"),
            (torch.zeros(9).as_strided((2, 4), (1, 1)), "w: several elements"),
            (torch.zeros(100).as_strided((2, 2, 2), (3, 3, 20)), "w: several elements"),
            (torch.zeros(9).as_strided((2, 2, 2), (1, 1, 5)), "w: several elements")):
        with pytest.raises(ValueError, match=words):
            delta.prepare({**good, "w": wrong})
    for shape, steps in (((2, 4), (4, 1)), ((2, 4), (3, 2))):  # the second one's rows interleave
        room = torch.zeros(20).as_strided(shape, steps).copy_(base["w"].view(shape))
        delta.prepare({**good, "w": room}).drop()


def test_a_tensor_of_another_dtype_is_named(torch, base, delta):
    """The error speaks of the dtype: the delta itself is not damaged."""
    for name in base:
        with pytest.raises(SafetensorError, match="another dtype or shape") as caught:
            delta.prepare({**base, name: base[name].to(torch.complex128)})
        assert caught.value.tag == "TensorInvalidInfo"


def test_a_module_is_a_state(tmp_path, torch, old):
    module = torch.nn.Module()
    module.c = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.complex64))
    module.w = torch.nn.Parameter(torch.ones(8))
    deltas.make(old, module, tmp_path / "delta", **VERSIONS)
    deltas.apply(old, tmp_path / "delta", version="0")
    assert (load_arrays(old / "model.safetensors")["w"] == 1).all()


def test_tied_tensors_of_a_module_are_left_out(tmp_path, torch):
    """As save_model() leaves them out of the checkpoint; prepare() accepts the module, too."""
    from fastsafetensors.torch import save_model

    def tied():
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.ones(6, 4))
        module.b = module.a
        module.c = torch.nn.Parameter(module.a.data)  # another object with the same memory
        return module

    (tmp_path / "tied").mkdir()
    module = tied()
    save_model(module, str(tmp_path / "tied/model.safetensors"))
    with torch.no_grad():
        module.a[3] = 5
    stats = deltas.make(tmp_path / "tied", module, tmp_path / "delta", **VERSIONS)
    assert stats["tensors"] == 1
    with deltas.Delta(tmp_path / "delta").prepare(served := tied()) as change:
        change.commit()
    assert torch.equal(served.c, module.a)


def test_a_tensor_that_the_old_checkpoint_lacks_is_named(tmp_path, torch, base, old):
    module = torch.nn.Module()
    for name in ("c", "w"):
        setattr(module, name, torch.nn.Parameter(base[name]))
    module.more = torch.nn.Parameter(torch.ones(2))
    for state in (module, {**base, "more": numpy.ones(2)}):
        with pytest.raises(SafetensorError, match="lacks a tensor of the new state") as caught:
            deltas.make(old, state, tmp_path / "delta", **VERSIONS)
        assert caught.value.tensor == "more"


def test_a_tensor_of_another_size_is_named_once(torch, base, delta):
    with pytest.raises(SafetensorError) as caught:
        delta.prepare({**base, "w": torch.zeros(11)})
    assert str(caught.value).count("tensor `w`") == 1


@pytest.mark.parametrize("prepares", [False, True], ids=["make", "prepare"])
def test_values_that_are_no_dense_tensors(prepares, tmp_path, torch, base, old, delta):
    def use(state):
        if prepares:
            return delta.prepare(state)
        return deltas.make(old, state, tmp_path / "delta", **VERSIONS)

    parameter = "tensors" if prepares else "new"
    for state in (None, 3, [("w", base["w"])]):
        with pytest.raises(TypeError, match=f"{parameter} must be a mapping of names to tensors"):
            use(state)
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
    for wrong, words in ((base["w"].to_sparse(), "w: .* not a sparse one"),
                         (nested, "w: .* not a nested one")):
        with pytest.raises(TypeError, match=words):
            use({**base, "w": wrong})
    with pytest.raises(NotImplementedError, match="w: .* meta device"):
        use({**base, "w": base["w"].to("meta")})


def test_errors_name_the_argument(tmp_path, base, old, delta):
    def make(**options):
        return deltas.make(old, base, tmp_path / "delta", **{**VERSIONS, **options})

    for name in ("version", "base_version", "encoding", "checksum", "dialect"):
        for wrong in (None, 3):
            with pytest.raises(TypeError, match=f"^{name} must be"):
                make(**{name: wrong})
    for wrong in (0, b"0"):
        with pytest.raises(TypeError, match="^version must be a str"):
            delta.prepare(base, version=wrong)
    with pytest.raises(TypeError, match="tensor names must be str, not 3"):
        deltas.make(old, {3: base["w"]}, tmp_path / "delta", **VERSIONS)
    with pytest.raises(TypeError, match="w: a torch tensor or numpy array is needed, not list"):
        deltas.make(old, {**base, "w": ["a"] * 8}, tmp_path / "delta", **VERSIONS)


def test_an_empty_version_is_not_left_out(tmp_path, old, delta):
    for dialect in ("sglang", "modelexpress"):
        for name in ("version", "base_version"):
            with pytest.raises(ValueError, match="version"):
                deltas.convert(old, delta, tmp_path / "converted", dialect=dialect, **{name: ""})
    assert not (tmp_path / "converted/model.safetensors.index.json").exists()


SHARED = {"tied": (0, 300_000), "views": (100_000, 400_000), "inside": (200_001, 200_777)}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("differs", [False, True])
def test_tensors_that_share_memory(torch, tmp_path, kind, differs):
    """All get their new bytes, or the delta is refused. Pieces of 1 MiB begin at other places."""
    from fastsafetensors.torch import save_file

    first, second = slice(0, 300_000), slice(*SHARED[kind])

    def named(values, copies=False):
        parts = {"a": values[first], "b": values[second], "c": values[450_000:]}
        return {name: part.clone() if copies else part for name, part in parts.items()}

    values = torch.randn(500_000, generator=torch.Generator().manual_seed(1))
    (tmp_path / "old").mkdir()
    save_file(named(values, copies=True), tmp_path / "old/model.safetensors")
    new = values.clone()
    new[::7] += 1
    made = named(new, copies=True)
    if differs:
        made["b"][123 if kind == "inside" else 150_000] += 1
    deltas.make(tmp_path / "old", made, tmp_path / "delta", **VERSIONS)
    live = values.clone()
    if differs:
        with pytest.raises(ValueError, match="shares memory with tensor '[ab]'"):
            deltas.Delta(tmp_path / "delta").prepare(named(live))
        assert torch.equal(live, values)
    else:
        deltas.Delta(tmp_path / "delta").prepare(named(live)).commit()
        assert all(torch.equal(part, made[name]) for name, part in named(live).items())


def test_a_checkpoint_that_lacks_the_changed_tensor(torch, tmp_path, delta, base):
    from fastsafetensors.torch import save_file

    (tmp_path / "other").mkdir()
    save_file({"c": base["c"]}, tmp_path / "other/model.safetensors")
    with pytest.raises(SafetensorError, match="changes tensor `w`, which the checkpoint lacks"):
        list(delta.patches(tmp_path / "other"))


def test_a_copy_that_is_not_listed(tmp_path, delta, old):
    """An update was killed, and .weight_sync was deleted."""
    copy = old / "model.safetensors.delta-tmp"
    copy.write_bytes(b"x")
    with pytest.raises(OSError, match="delete it if a killed update left it"):
        delta.apply(old, new_files=True)
    copy.unlink()
    delta.apply(old, new_files=True)


def test_a_compressed_checkpoint_names_the_command(torch, tmp_path, base, delta):
    from fastsafetensors.torch import save_file

    (tmp_path / "packed").mkdir()
    large = {"w": base["w"], "c": base["c"], "x": torch.randn(1 << 20)}
    save_file(large, tmp_path / "packed/model.safetensors", compress=True)
    with pytest.raises(RuntimeError, match="'fastsafetensors convert --decompress'"):
        delta.apply(tmp_path / "packed")


def test_a_dtensor_is_a_part(torch, tmp_path, old, delta, base):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = {"c": base["c"], "w": distribute_tensor(base["w"], mesh)}
        with pytest.raises(RuntimeError, match="commit\\(\\) cannot write to parts"):
            delta.prepare(parts)
        with pytest.raises(RuntimeError, match="full_tensor"):
            deltas.make(old, parts, tmp_path / "made", **VERSIONS)
        live = dict(base)
        change = delta.prepare(live)
        live["w"] = parts["w"]
        with pytest.raises(ValueError, match="exchanged"):
            change.commit()
    finally:
        dist.destroy_process_group()
