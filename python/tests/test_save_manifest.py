# SPDX-License-Identifier: Apache-2.0
"""Manifests written by saves equal those of `hash --manifest` on the result."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import fastsafetensors.numpy as fst_numpy
from fastsafetensors import (
    SafetensorError,
    check_manifest,
    edit_header,
    hash_file,
    load_file,
    write_manifest,
)

torch = pytest.importorskip("torch")

import fastsafetensors.torch as fst_torch
from fastsafetensors import fast_loading
from fastsafetensors._core import Writer


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command of the installed package."""
    words = [sys.executable, "-m", "fastsafetensors", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def is_right(model: pathlib.Path, manifest: pathlib.Path, algorithm: str = "xxh3-128") -> bool:
    """Whether the manifest equals a newly made one, and verifies the complete model."""
    again = manifest.parent / "again.manifest"
    write_manifest(model, again, algorithm=algorithm)
    same = again.read_bytes() == manifest.read_bytes()
    again.unlink()
    return same and not check_manifest(model, manifest)


def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(700, 1001) for i in range(3)}


def by_torch(path: pathlib.Path, **options: object) -> None:
    fst_torch.save_file(weights(), path, **options)


def by_numpy(path: pathlib.Path, **options: object) -> None:
    arrays = {name: tensor.numpy() for name, tensor in weights().items()}
    fst_numpy.save_file(arrays, path, **options)


def by_model(path: pathlib.Path, **options: object) -> None:
    fst_torch.save_model(torch.nn.Linear(600, 700), path, **options)


@pytest.mark.parametrize("save", [by_torch, by_numpy, by_model])
def test_every_api_writes_a_manifest(save, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    beside = tmp_path / "model.safetensors.manifest"
    for value, algorithm in ((True, "xxh3-128"), ("xxh3", "xxh3-128"), ("blake3", "blake3")):
        save(path, manifest=value, durable=value is True)
        assert is_right(path, beside, algorithm)
        load_file(path, verify=True)
    save(path)
    assert not beside.exists()  # it was the old file's
    with pytest.raises(FileNotFoundError, match="no digests to verify"):
        load_file(path, verify=True)
    save(path, manifest=tmp_path / "mine.manifest")
    assert is_right(path, tmp_path / "mine.manifest") and not beside.exists()
    assert sorted(os.listdir(tmp_path)) == ["mine.manifest", "model.safetensors"]


def test_sharded_model_gets_a_manifest(tmp_path: pathlib.Path) -> None:
    state = weights()
    index = fast_loading.save_safetensors_sharded(state, tmp_path, "3MB", manifest="blake3")
    assert index.endswith(".json")
    assert is_right(tmp_path, tmp_path / "model.manifest", "blake3")
    fast_loading.save_safetensors_sharded(state, tmp_path, "3MB")
    assert not (tmp_path / "model.manifest").exists()


def test_invalid_manifest_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="manifest"):
        by_torch(path, manifest="")
    with pytest.raises(TypeError):
        by_torch(path, manifest=5)
    by_torch(path)
    with pytest.raises(ValueError, match="overwrite the model"):
        by_torch(path, manifest=path)
    assert not list(tmp_path.glob(".*"))


def test_manifest_needs_no_reads(tmp_path: pathlib.Path) -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    rows = [("a", "F32", array.shape, array.ctypes.data, array.nbytes)]
    writer = Writer(tmp_path / "model.safetensors", rows, owners=array, manifest=b"")
    writer.commit()
    stats = writer.stats()
    writer.close()
    assert stats["bytes_hashed"] == stats["bytes_total"] > array.nbytes
    assert stats["bytes_read"] == 0


def test_the_command(tmp_path: pathlib.Path) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    folder = tmp_path / "set"
    by_torch(source)
    assert command("convert", "--manifest", "--dtype", "BF16", source, target).returncode == 0
    assert is_right(target, tmp_path / "other.safetensors.manifest")
    assert command("split", "--manifest=sha256", "--count", 2, source, folder).returncode == 0
    assert is_right(folder, folder / "model.manifest", "sha256")
    assert command("merge", "--manifest=blake3", folder, target).returncode == 0
    assert is_right(target, tmp_path / "other.safetensors.manifest", "blake3")
    assert command("verify", "--manifest", target).returncode == 0
    assert command("convert", source, target).returncode == 0
    assert not (tmp_path / "other.safetensors.manifest").exists()
    answer = command("convert", "--manifest", "--dry-run", source, target)
    assert answer.returncode == 3 and "--manifest cannot be combined" in answer.stderr
    assert command("convert", "--manifest=md5", source, target).returncode == 3


def test_compressed_and_back(tmp_path: pathlib.Path) -> None:
    source, packed = tmp_path / "model.safetensors", tmp_path / "packed.safetensors"
    plain = tmp_path / "plain.safetensors"
    tensors = {"a": torch.randn(900, 1000).bfloat16(), "b": torch.arange(3)}
    fst_torch.save_file(tensors, source)
    for word in ("", "=blake3", "=sha256"):
        algorithm = word[1:] or "xxh3-128"
        assert command("convert", "--compress", f"--manifest{word}", source, packed).returncode == 0
        assert packed.stat().st_size < source.stat().st_size
        assert is_right(packed, tmp_path / "packed.safetensors.manifest", algorithm)
        answer = command("convert", "--decompress", f"--manifest{word}", packed, plain)
        assert answer.returncode == 0 and plain.read_bytes() == source.read_bytes()
        assert is_right(plain, tmp_path / "plain.safetensors.manifest", algorithm)
    # At its default path: the old manifest is replaced or deleted.
    assert command("convert", "--compress", "--manifest", plain, plain).returncode == 0
    assert is_right(plain, tmp_path / "plain.safetensors.manifest")
    assert command("convert", "--decompress", plain, plain).returncode == 0
    assert not (tmp_path / "plain.safetensors.manifest").exists()


def test_edited(tmp_path: pathlib.Path) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    beside = tmp_path / "model.safetensors.manifest"
    by_torch(source, manifest=True)
    assert command("edit", "--manifest=blake3", "--set", "a=" + "b" * 9000, source).returncode == 0
    assert is_right(source, beside, "blake3")
    assert (
        command("edit", "--manifest", "--rename", "layer.1=other", source, target).returncode == 0
    )
    assert is_right(target, tmp_path / "other.safetensors.manifest")
    assert is_right(source, beside, "blake3")  # it is unchanged
    edit_header(source, {"a": "c"}, manifest=True)
    assert is_right(source, beside)
    load_file(source, verify=True)
    edit_header(source, {"a": "d"}, manifest=tmp_path / "mine.manifest")
    assert is_right(source, tmp_path / "mine.manifest") and not beside.exists()
    edit_header(source, {"a": "e"}, manifest="sha256", durable=True)
    assert is_right(source, beside, "sha256")
    for wrong in (source, target):
        with pytest.raises(ValueError, match="overwrite the model"):
            edit_header(source, {"a": "f"}, target=target, manifest=wrong)
    assert command("edit", "--unset", "a", source).returncode == 0
    assert not beside.exists()
    for more in (["--dry-run", source], [source, "-"]):
        answer = command("edit", "--manifest", "--set", "a=b", *more)
        assert answer.returncode == 3 and "--manifest cannot be combined" in answer.stderr


def saved_file(path: pathlib.Path, value: float) -> None:
    fst_torch.save_file({"w": torch.full((4,), value)}, path)


def edited_file(path: pathlib.Path, value: float) -> None:
    edit_header(path, metadata={"step": str(value)})


def saved_set(path: pathlib.Path, value: float) -> None:
    tensors = {name: torch.full((64, 64), value) for name in "ab"}
    fast_loading.save_safetensors_sharded(tensors, path, max_shard_size=20_000)


@pytest.mark.parametrize("save", [saved_file, edited_file, saved_set], ids=lambda f: f.__name__)
@pytest.mark.parametrize("whole", [True, False], ids=["model", "file"])
def test_a_save_deletes_every_file_that_describes_the_old_model(
    save, whole: bool, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "m"
    if save is edited_file:
        saved_file(path, 0.0)
    save(path, 1.0)
    described = path if whole or path.is_file() else sorted(path.glob("model-*.safetensors"))[0]
    hash_file(described, "sha256", write=True)
    write_manifest(described)
    load_file(described, verify=True)
    save(path, 2.0)
    beside = [found.name for found in tmp_path.rglob("*")
              if found.name.endswith((".digest", ".manifest"))]
    assert beside == []
    with pytest.raises(FileNotFoundError, match="no digests to verify against"):
        load_file(described, verify=True)


def test_a_save_leaves_files_of_others_with_those_names(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.safetensors"
    for ending in (".digest", ".manifest"):
        (tmp_path / f"m.safetensors{ending}").write_text("somebody's notes\n")
    saved_file(path, 1.0)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("ending", [".digest", ".manifest"])
def test_what_cannot_be_examined_is_an_error(tmp_path: pathlib.Path, ending: str) -> None:
    """It may describe the old model, which is kept. Reading address 0 of a process fails."""
    path = tmp_path / "m.safetensors"
    saved_file(path, 1.0)
    before = path.read_bytes()
    (tmp_path / f"m.safetensors{ending}").symlink_to("/proc/self/mem")
    with pytest.raises(SafetensorError, match="examining a file that may describe"):
        saved_file(path, 2.0)
    assert path.read_bytes() == before and len(os.listdir(tmp_path)) == 2


def test_the_same_for_a_shard_that_a_save_removes(tmp_path: pathlib.Path) -> None:
    fst_torch.save_file({f"t{i}": torch.full((64,), 1.0) for i in range(3)}, tmp_path / "one")
    folder = tmp_path / "shards"
    assert command("split", "--manifest", "--count", 3, tmp_path / "one", folder).returncode == 0
    (folder / "model-00003-of-00003.safetensors.digest").symlink_to("/proc/self/mem")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if not path.is_symlink()}
    done = command("split", "--manifest", "--count", 2, tmp_path / "one", folder)
    assert done.returncode == 2 and "examining a file that may describe" in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()
            if not path.is_symlink()} == before


@pytest.mark.parametrize("ending", [".digest", ".manifest"])
def test_a_pipe_keeps_what_was_sent(tmp_path: pathlib.Path, ending: str) -> None:
    """It describes no model, whatever its name."""
    pipe = tmp_path / f"m.safetensors{ending}"
    os.mkfifo(pipe)
    both = os.open(pipe, os.O_RDWR)
    os.write(both, b"fastsafetensors-digest 1 xxh3\n")
    saved_file(tmp_path / "m.safetensors", 1.0)
    assert os.read(both, 100) == b"fastsafetensors-digest 1 xxh3\n" and pipe.is_fifo()
    os.close(both)


def test_a_link_to_an_old_manifest_is_deleted_and_its_target_stays(tmp_path, torch):
    """The Hub's cache has such links, from files to blobs."""
    from fastsafetensors.torch import load_file, save_file

    path, link = tmp_path / "m.safetensors", tmp_path / "m.safetensors.manifest"
    save_file({"a": torch.zeros(3)}, path, manifest=True)
    (tmp_path / "blobs").mkdir()
    link.rename(tmp_path / "blobs/old")
    link.symlink_to("blobs/old")
    load_file(path, verify=True)
    save_file({"a": torch.ones(3)}, path)
    assert not link.is_symlink() and (tmp_path / "blobs/old").exists()
