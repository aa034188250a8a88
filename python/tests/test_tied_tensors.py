# SPDX-License-Identifier: Apache-2.0
"""Sharded saves: one tensor under several names, and views of other tensors."""

import pytest

from fastsafetensors import safe_open
from fastsafetensors.fast_loading import load_safetensors_sharded, save_safetensors_sharded


def _round_trip(tensors, folder, **options):
    save_safetensors_sharded(tensors, folder, **options)
    return load_safetensors_sharded(folder)


@pytest.mark.parametrize("cut", [
    lambda w: w[:2], lambda w: w.t(), lambda w: w[:, :2], lambda w: w.view(2, 6),
    lambda w: w.view(-1), lambda w: w[1:1], lambda w: w.expand(2, 4, 3), lambda w: w.int().float(),
], ids=["rows", "transposed", "columns", "reshaped", "flat", "empty", "expanded", "copy"])
def test_views_keep_shape_and_values(cut, tmp_path, torch):
    whole = torch.randn(4, 3)
    tensors = {"w": whole, "a part": cut(whole)}
    loaded = _round_trip(tensors, tmp_path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape and torch.equal(loaded[name], tensor), name


def test_reinterpreted_bits(tmp_path, torch):
    bits = torch.arange(6, dtype=torch.int32)
    loaded = _round_trip({"i": bits, "f": bits.view(torch.float32)}, tmp_path)
    assert loaded["i"].dtype is torch.int32 and loaded["f"].dtype is torch.float32
    assert torch.equal(loaded["i"], bits)


def test_conjugate_view_is_not_tied(tmp_path, torch):
    z = torch.randn(3, dtype=torch.complex64)
    loaded = _round_trip({"z": z, "conj": z.conj()}, tmp_path)
    assert torch.equal(loaded["conj"], z.conj()) and torch.equal(loaded["z"], z)


def test_one_tensor_of_several_names_is_saved_once(tmp_path, torch):
    whole = torch.randn(64, 64)
    tensors = {"b": whole, "a": whole, "c": whole.view(64, 64), "d": torch.ones(2)}
    loaded = _round_trip(tensors, tmp_path, max_shard_size=64 * 64 * 4)
    assert loaded.keys() == tensors.keys()
    assert loaded["a"] is loaded["b"] is loaded["c"] and torch.equal(loaded["c"], whole)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) < 2 * whole.nbytes


@pytest.mark.parametrize("metadata, name", [(None, "pt"), ({"kind": "enc"}, "enc"),
                                            ({"fastsafetensors.tied": "not json"}, "w"),
                                            ({"fastsafetensors.tied": "[1]"}, "w")])
def test_metadata_does_not_tie_tensors(metadata, name, tmp_path, torch):
    assert _round_trip({name: torch.ones(1)}, tmp_path, metadata=metadata).keys() == {name}


def test_metadata_of_files_without_ties_is_as_given(tmp_path, torch):
    path = save_safetensors_sharded({"w": torch.ones(1)}, tmp_path)
    with safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_views_in_a_torch_file(tmp_path, torch):
    from fastsafetensors._torch.torch_file import main
    from fastsafetensors.torch import load_file

    whole = torch.randn(4, 3)
    torch.save({"w": whole, "wt": whole.t(), "again": whole}, tmp_path / "m.bin")
    assert main([str(tmp_path / "m.bin"), str(tmp_path / "m.st"), "{}"]) == 0
    loaded = load_file(tmp_path / "m.st")
    assert torch.equal(loaded["wt"], whole.t()) and "w" not in loaded
    assert torch.equal(loaded["again"], whole)
