# SPDX-License-Identifier: Apache-2.0
"""Files with padding tensors between aligned tensors: they are visible only by their full names."""

import json
import os
import subprocess

import numpy
import pytest
from test_rewrite import run  # noqa: F401 - a fixture

import fastsafetensors
import fastsafetensors.numpy
import fastsafetensors.torch
from fastsafetensors import safe_open

FILLER = "__padding__.0"


@pytest.fixture
def aligned(tmp_path, torch):
    """(aligned file, module, packed file) of a module whose tensor sizes are not multiples of
    64."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    path, packed = tmp_path / "aligned.safetensors", tmp_path / "packed.safetensors"
    fastsafetensors.torch.save_file(module.state_dict(), path, {"a": "b"}, alignment=64)
    fastsafetensors.torch.save_file(module.state_dict(), packed, {"a": "b"})
    return path, module, packed


def stock_names(path):
    from safetensors import safe_open as stock_open

    with stock_open(path, "pt") as f:
        return set(f.keys())


def test_other_readers_see_padding_tensors(aligned):
    path, module, _ = aligned
    fillers = stock_names(path) - set(module.state_dict())
    assert fillers and all(name.startswith("__padding__.") for name in fillers)


def test_strict_loads(aligned, torch):
    path, module, _ = aligned
    module.load_state_dict(fastsafetensors.torch.load_file(path), strict=True)
    assert fastsafetensors.torch.load_model(module, path, strict=True) == (set(), [])
    module.load_state_dict(fastsafetensors.torch.load(path.read_bytes()), strict=True)
    assert set(fastsafetensors.numpy.load_file(path)) == set(module.state_dict())


def test_names_of_an_opened_file(aligned):
    path, module, _ = aligned
    with safe_open(path, "pt") as f:
        assert set(f.keys()) == set(module.state_dict())
        filler = f.get_tensor(FILLER)  # by its whole name
        assert filler.numel() and not filler.any()
        assert f.metadata()["a"] == "b"


def test_lists_of_files(tmp_path, torch):
    """Padding tensors have the same names in every file of a list."""
    paths = []
    for part in range(3):
        paths.append(tmp_path / f"{part}.safetensors")
        fastsafetensors.torch.save_file(
            {f"{part}.x": torch.ones(3), f"{part}.y": torch.ones(5)}, paths[-1], alignment=64)
    wanted = {f"{part}.{name}" for part in range(3) for name in "xy"}
    assert set(fastsafetensors.torch.load_file(tmp_path)) == wanted
    with fastsafetensors.SafeTensorsFileLoader(None, "cpu") as loader:
        loader.add_filenames({0: [os.fspath(path) for path in paths]})
        with loader.copy_files_to_device() as buffer:
            assert set(buffer.key_to_rank_lidx) == wanted


def test_saved_sharded_model(tmp_path, run, aligned):
    path, module, _ = aligned
    run("split", "--count", "2", "--alignment", "64", path, tmp_path / "set")
    assert set(fastsafetensors.torch.load_file(tmp_path / "set")) == set(module.state_dict())
    index = json.loads((tmp_path / "set/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(module.state_dict())
    run("merge", tmp_path / "set", tmp_path / "merged.safetensors")
    assert stock_names(tmp_path / "merged.safetensors") == set(module.state_dict())


def test_padding_is_removed_by_convert(tmp_path, run, aligned):
    path, _, packed = aligned
    run("convert", path, tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == packed.read_bytes()


def test_realignment(tmp_path, run, aligned):
    path, _, _ = aligned
    run("convert", "--alignment", "4096", path, tmp_path / "wide.safetensors")
    run("convert", "--alignment", "64", tmp_path / "wide.safetensors",
        tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_differences(run, aligned):
    path, module, packed = aligned
    out, _ = run("diff", path, packed)
    assert f"{len(module.state_dict())} tensors are the same, 0 differences" in out


def test_inspect_reports_padding(run, aligned):
    path, module, _ = aligned
    out, _ = run("inspect", path)
    assert "padding tensors" in out and FILLER not in out
    shown = json.loads(run("inspect", "--json", path)[0])
    assert shown["files"][0]["padding_tensors"] == len(stock_names(path)) - len(module.state_dict())
    assert shown["totals"]["tensors"] == len(module.state_dict())
    assert all(row["offset"] % 64 == 0 for row in shown["tensors"])
    out, _ = run("show", path, FILLER)
    assert "U8" in out


def test_file_digest_includes_padding(run, aligned):
    import ctypes
    import hashlib

    path, _, _ = aligned
    try:
        ctypes.CDLL("libcrypto.so.3")
    except OSError:
        pytest.skip("libcrypto is not installed")
    out, _ = run("hash", "--algorithm", "sha256", path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in out


def test_edits_keep_padding(command, run, aligned):
    path, module, _ = aligned
    names = set(module.state_dict())
    for words in (["--set", "c=d"], ["--clear"], ["--rename", "0.*=first.*"]):
        run("edit", *words, path)
        names = {name.replace("0.", "first.") if words[0] == "--rename" else name for name in names}
        with safe_open(path, "pt") as f:
            assert set(f.keys()) == names, words
    streamed = subprocess.run([command, "edit", "--set", "e=f", os.fspath(path), "-"],
                              stdout=subprocess.PIPE, check=True).stdout
    (path.parent / "streamed").write_bytes(streamed)
    with safe_open(path.parent / "streamed", "pt") as f:
        assert set(f.keys()) == names and f.metadata()["e"] == "f"
    offsets = json.loads(run("inspect", "--json", path.parent / "streamed")[0])["tensors"]
    assert all(row["offset"] % 64 == 0 for row in offsets)
    _, err = run("edit", "--unset", "__padding__", path, code=3)
    assert "marks padding" in err
    _, err = run("edit", "--rename", "1.bias=__padding__.9", path, code=3)
    assert "__padding__." in err


def test_name_alone_is_not_padding(tmp_path, torch):
    """Without the mark in the metadata, or with another dtype, a tensor of that name is an ordinary
    tensor."""
    path = tmp_path / "own.safetensors"
    for tensors, metadata in (({FILLER: torch.zeros(3, dtype=torch.uint8)}, None),
                              ({FILLER: torch.zeros(3)}, {"__padding__": "64"}),
                              ({"__padding__.x": torch.zeros(3, dtype=torch.uint8)},
                               {"__padding__": "64"})):
        fastsafetensors.torch.save_file(tensors, path, metadata)
        assert set(fastsafetensors.torch.load_file(path)) == set(tensors)


def test_no_save_hides_a_tensor(tmp_path, torch):
    """A packed save drops the alignment mark from copied metadata, which would turn a tensor into
    padding."""
    mine = {FILLER: torch.zeros(3, dtype=torch.uint8), "a": torch.ones(2)}
    for save in (lambda: fastsafetensors.torch.save_file(mine, tmp_path / "m", {"__padding__": ""}),
                 lambda: fastsafetensors.torch.save(mine, {"__padding__": "64"})):
        with pytest.raises(ValueError, match="Leave out the metadata key"):
            save()
    assert not (tmp_path / "m").exists()


def test_aligned_sizes_need_no_padding(tmp_path, torch):
    tensors = {"a": torch.ones(16), "b": torch.ones(32), "odd": torch.ones(3)}
    fastsafetensors.torch.save_file(tensors, tmp_path / "m", alignment=64)
    assert stock_names(tmp_path / "m") == set(tensors)
    assert fastsafetensors.torch.load_file(tmp_path / "m").keys() == tensors.keys()


def test_arrays(tmp_path):
    tensors = {"a": numpy.ones(3), "b": numpy.ones(5, numpy.float32)}
    fastsafetensors.numpy.save_file(tensors, tmp_path / "m", alignment=64)
    assert set(fastsafetensors.numpy.load_file(tmp_path / "m")) == set(tensors)
