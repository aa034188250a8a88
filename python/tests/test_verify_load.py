# SPDX-License-Identifier: Apache-2.0
"""Verified loads return the verified bytes, in every interface."""

import json
import os
import pathlib
import pickle
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fastsafetensors
from fastsafetensors import SafetensorError, check_manifest, safe_open, verifying, write_manifest
from fastsafetensors import numpy as fast_numpy
from fastsafetensors import torch as fast_torch
from fastsafetensors._base.command import find_command
from fastsafetensors.distributed import load_sharded
from fastsafetensors.fast_loading import load_safetensors_sharded, save_safetensors_sharded

NAMES = [f"layer.{number}" for number in range(6)]


@pytest.fixture()
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 6 MiB with its manifest."""
    path = tmp_path / "model.safetensors"
    fast_torch.save_file({name: torch.arange(262144.0).reshape(512, 512) + number
                          for number, name in enumerate(NAMES)}, path)
    write_manifest(path)
    return path


def flip(path: pathlib.Path, at: int) -> None:
    """Change a bit of a file without changing its times."""
    times = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Layers(torch.nn.Module):
    """A module of the file's tensors."""

    def __init__(self) -> None:
        """Make parameters of zeros."""
        super().__init__()
        self.layer = torch.nn.ParameterList(torch.zeros(512, 512) for _ in NAMES)


def by_safe_open(path, verify):
    with safe_open(path, "pt", verify=verify) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def by_slices(path, verify):
    with safe_open(path, "np", verify=verify) as file:
        return {name: file.get_slice(name)[:] for name in file.keys()}


def by_module(path, verify):
    module = Layers()
    fast_torch.load_model(module, path, verify=verify)
    return module.state_dict()


def by_old_loader(path, verify):
    with verifying(verify), fastsafetensors.fastsafe_open(str(path)) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def by_path_loader(path, verify):
    with verifying(verify):
        return fastsafetensors.SafeTensorsFileLoader(path).load()


def by_parallel_loader(path, verify):
    with verifying(verify):
        loader = fastsafetensors.ParallelLoader(None, [str(path)], device="cpu")
        try:
            return {name: tensor.clone() for name, tensor in loader.iterate_weights()}
        finally:
            loader.close()


def by_ranks(path, verify):
    with verifying(verify):
        return dict(load_sharded(path, {name: None for name in NAMES}))


APIS = {
    "load_file": lambda path, verify: fast_torch.load_file(path, verify=verify),
    "load": lambda path, verify: fast_torch.load_file(path, mode="load", verify=verify),
    "map": lambda path, verify: fast_torch.load_file(path, mode="map", verify=verify),
    "converted": lambda path, verify: fast_torch.load_file(path, dtype="F64", verify=verify),
    "numpy": lambda path, verify: fast_numpy.load_file(path, verify=verify),
    "safe_open": by_safe_open,
    "slices": by_slices,
    "load_model": by_module,
    "fastsafe_open": by_old_loader,
    "SafeTensorsFileLoader": by_path_loader,
    "ParallelLoader": by_parallel_loader,
    "load_sharded": by_ranks,
}


@pytest.mark.parametrize("api", APIS)
def test_every_api_refuses_a_flipped_bit(api: str, model: pathlib.Path) -> None:
    """Every API loads an unchanged file, and raises DigestMismatch for a changed one."""
    load = APIS[api]
    tensors = load(model, True)
    assert len(tensors) == len(NAMES)
    for number in range(len(NAMES)):
        name = NAMES[number] if NAMES[number] in tensors else f"layer.{number}"
        assert float(tensors[name][0][1]) == number + 1
    flip(model, os.path.getsize(model) - 3000000)
    with pytest.raises(SafetensorError) as caught:
        load(model, True)
    assert caught.value.tag == "DigestMismatch"
    assert caught.value.file == str(model)
    assert len(load(model, False)) == len(NAMES)


def test_verify_true_without_digests_is_an_error(tmp_path: pathlib.Path) -> None:
    """verify=True without digests is an error, so no load is unverified by accident."""
    path = tmp_path / "alone.safetensors"
    fast_torch.save_file({"a": torch.zeros(4)}, path)
    with pytest.raises(FileNotFoundError):
        fast_torch.load_file(path, verify=True)
    assert list(fast_torch.load_file(path)) == ["a"]


def test_a_manifest_from_elsewhere(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A path names the manifest, and the statistics report it."""
    other = tmp_path / "elsewhere"
    os.rename(f"{model}.manifest", other)
    assert len(fast_torch.load_file(model, verify=other)) == len(NAMES)
    opened = fastsafetensors._core.Model(model, False, other)
    assert opened.verification() == {"manifest": str(other), "algorithm": "xxh3-128",
                                     "chunk_bytes": 1 << 20, "files": 1, "source": "manifest"}
    loader = opened.load()
    loader.wait()
    assert loader.stats()["verified_bytes"] >= os.path.getsize(model)
    assert fastsafetensors._core.Model(model).verification() is None


def test_only_the_chunks_of_a_slice_are_verified(model: pathlib.Path) -> None:
    """A damaged last tensor does not prevent reading the first."""
    flip(model, os.path.getsize(model) - 10)
    with safe_open(model, "pt", verify=True) as file:
        assert file.get_tensor(NAMES[0])[0][1] == 1
        assert file.get_slice(NAMES[1])[3:5].shape == (2, 512)
        with pytest.raises(SafetensorError):
            file.get_tensor(NAMES[-1])


def test_folders_with_an_index(tmp_path: pathlib.Path) -> None:
    """A folder's manifest lists its index and all other files; each is verified."""
    save_safetensors_sharded({name: torch.ones(1000) * at for at, name in enumerate(NAMES)},
                             tmp_path, max_shard_size=9000)
    (tmp_path / "README.md").write_text("hello")
    made = write_manifest(tmp_path, algorithm="blake3", tensors=True)
    assert made.files == len(list(tmp_path.iterdir())) - 1
    with verifying():
        assert len(load_safetensors_sharded(tmp_path)) == len(NAMES)
    assert check_manifest(tmp_path) == []
    flip(next(tmp_path.glob("*.index.json")), 30)
    with verifying(), pytest.raises(SafetensorError) as caught:
        load_safetensors_sharded(tmp_path)
    assert caught.value.tag == "DigestMismatch"
    assert [problem.kind for problem in check_manifest(tmp_path)] == ["DigestMismatch"]


def test_a_changed_readme_hashes_that_alone(tmp_path: pathlib.Path) -> None:
    """Only files that changed since the old manifest was begun are read."""
    fast_torch.save_file({"a": torch.zeros(1 << 20)}, tmp_path / "model.safetensors")
    (tmp_path / "README.md").write_text("old")
    time.sleep(4)  # a file that has just changed could change again within the same time stamp
    write_manifest(tmp_path)
    manifest = shutil.copy(tmp_path / "model.manifest", tmp_path / "copied.manifest")
    made = write_manifest(tmp_path, keep=manifest)
    assert (made.files, made.files_kept, made.bytes_read) == (2, 2, 0)
    (tmp_path / "README.md").write_text("new")
    made = write_manifest(tmp_path, tmp_path / "new.manifest", keep=manifest)
    assert (made.files, made.files_kept, made.bytes_read) == (2, 1, 3)
    assert len(fast_torch.load_file(tmp_path, verify=tmp_path / "new.manifest")) == 1


def test_the_command(model: pathlib.Path) -> None:
    """Exit codes are 0 for a match, 1 for a difference, and 2 if there is nothing to compare
    with."""
    command = find_command()
    assert command is not None

    def ask(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True)

    assert ask("verify", "--manifest", model).returncode == 0
    assert ask("load", "--verify", model).returncode == 0
    made = ask("hash", "--manifest", "--json", "--algorithm", "sha256", "--chunk", "64K", model)
    assert json.loads(made.stdout)["algorithm"] == "sha256"
    flip(model, 4000000)
    flip(model, 5000000)
    found = ask("verify", "--manifest", "--json", model)
    assert found.returncode == 1
    answer = json.loads(found.stdout)
    assert len(answer["errors"]) == 2 and answer["valid"] is False
    assert ask("load", "--verify", model).returncode == 1
    os.remove(f"{model}.manifest")
    assert ask("verify", "--manifest", model).returncode == 2
    assert ask("verify", "--public-key", "x", model).returncode == 3
    assert ask("hash", "--keep", "x", model).returncode == 3


def test_digests_are_their_libraries(model: pathlib.Path) -> None:
    """Digests equal those of hashlib (SHA-256) and of the xxhash and blake3 packages, if
    installed."""
    import hashlib

    kinds = {"sha256": lambda data: hashlib.sha256(data).hexdigest()}
    for name, package, function in (("xxh3-128", "xxhash", "xxh3_128"),
                                    ("blake3", "blake3", "blake3")):
        try:
            made = getattr(__import__(package), function)
        except ImportError:
            continue
        kinds[name] = lambda data, made=made: made(data).hexdigest()
    data = model.read_bytes()
    for name, digest in kinds.items():
        write_manifest(model, algorithm=name)
        text = pathlib.Path(f"{model}.manifest").read_bytes()
        lines = text.decode().splitlines()
        chunks = [line[6:] for line in lines if line.startswith("chunk ")]
        size = 1 << 20
        assert chunks == [digest(data[at:at + size]) for at in range(0, len(data), size)]
        sealed, _, seal = text.rpartition(b"seal ")
        assert seal.decode() == digest(sealed) + "\n"
        assert np.frombuffer(data[:8], "<u8")[0] + 8 == int(lines[2].split()[1])


def test_verifying_holds_for_threads_pickles_and_bytes(model: pathlib.Path) -> None:
    """verifying() applies to threads started in it, to handles pickled in it, and to loads from
    bytes."""
    with verifying():
        handle = pickle.dumps(safe_open(model, "pt"))
    flip(model, 3 << 20)
    with verifying(), ThreadPoolExecutor(1) as pool:
        with pytest.raises(SafetensorError, match="differs"):
            pool.submit(fast_torch.load_file, model).result()
        with pytest.raises(SafetensorError, match="no manifest"):
            fast_torch.load(model.read_bytes())
    with pickle.loads(handle) as file, pytest.raises(SafetensorError, match="differs"):
        for name in NAMES:
            file.get_tensor(name)
    assert len(fast_torch.load_file(model)) == len(NAMES)


def test_hooks_keep_verification(model: pathlib.Path) -> None:
    """Errors of verification do not fall back to safetensors, which would return the rejected
    tensor."""
    reference = pytest.importorskip("safetensors.torch")
    from fastsafetensors.integrations import accelerate_from_pretrained

    flip(model, 3 << 20)
    with accelerate_from_pretrained(), verifying():
        with pytest.raises(SafetensorError, match="differs"):
            reference.load_file(model)
        os.remove(f"{model}.manifest")
        with pytest.raises((OSError, SafetensorError)):
            reference.load_file(model)


def test_a_compressed_file_without_digests(tmp_path: pathlib.Path) -> None:
    fast_torch.save_file({"a": torch.zeros(1 << 16)}, tmp_path / "c.safetensors", compress="all")
    with pytest.raises(FileNotFoundError, match="no digests to verify against"):
        fast_torch.load_file(tmp_path / "c.safetensors", verify=True)


@pytest.mark.parametrize("name", ["m.safetensors.digest", "m.safetensors.manifest"])
def test_a_list_beyond_the_limit(tmp_path: pathlib.Path, name: str) -> None:
    fast_torch.save_file({"a": torch.zeros(4)}, tmp_path / "m.safetensors")
    with (tmp_path / name).open("wb") as file:
        file.write(b"fastsafetensors-digest 1 xxh3\n")
        file.truncate((1 << 30) + 1)
    with pytest.raises(Exception, match="larger than 1 GiB, the limit of indexes, manifests"):
        fast_torch.load_file(tmp_path / "m.safetensors", verify=True)


def test_an_index_of_more_than_100_mb(tmp_path: pathlib.Path) -> None:
    """As many names need; the limit of headers is not that of an index."""
    fast_torch.save_file({"a": torch.zeros(4)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"padding": "x" * 100_000_001}, "weight_map": {"a": "m.safetensors"}}))
    assert list(fast_torch.load_file(tmp_path / "model.safetensors.index.json")) == ["a"]
